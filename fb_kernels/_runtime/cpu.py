"""The compiled kernels for CPU tensors, `csrc/cpu.cpp`: loads their library on first use, or says why there is none.

The library is plain C, lies in the package's folder (setup.py builds it if there is a C++ compiler) and needs no torch.
It takes float32; the ops of a model's forward, branch attention and log-probs also take bfloat16. It is made for small
inputs, such as the rows of a decode step and the candidates of a training step, where torch's overhead exceeds the
arithmetic, and for ops that torch would make of several; linear layers in bfloat16 and log-probs are faster at all
sizes. Threads are torch's, by the OpenMP runtime that it has loaded (threads of its own if that is another one);
`merge_attention_states` and `candidate_head` run on one.

`fb_kernels/<op>/cpu.py` calls its functions.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fb_kernels._runtime import shared_library

ABI_VERSION = 22
SHARE = 1 << 17  # minimum products per thread
ELEMENT = 8  # products that take as long as an element of an elementwise op
STEP = (torch.float32, torch.bfloat16)  # dtypes of the ops of a model's forward
LIBRARY = Path(__file__).parents[1] / "libfb_cpu.so"

FUNCTIONS = (
    "skinny_linear",
    "branch_attention_qkv",
    "decoder_layer",
    "branch_attention",
    "branch_attention_backward",
    "topk_entropy",
    "rms_norm",
    "swiglu",
    "merge_attention_states",
    "candidate_head",
    "linear_logprob",
    "linear_logprob_backward",
    "target_logits",
    "qk_norm_rope",
)


def release_threads() -> None:
    """End the OpenMP workers of this thread, before another computes; they start again at its next parallel region.

    While GNU's runtime has started more threads than there are processors, none waits awake between two regions, so
    that each region of a forward first wakes its workers. Another runtime keeps them.
    """
    found: Any = library()
    gnu = hasattr(found, "omp_pause_resource_all") and not hasattr(found, "__kmpc_fork_call")
    if gnu:  # LLVM's and Intel's runtimes have both
        found.omp_pause_resource_all(1)  # omp_pause_soft


def threads(products: int) -> int:
    """The number of threads for so many products."""
    return max(1, min(torch.get_num_threads(), products // SHARE))


def address(x: Tensor | None, dtype: torch.dtype) -> int:
    """The address of a contiguous tensor of this dtype, 0 for None; -1 for any other tensor."""
    if x is None:
        return 0
    return x.data_ptr() if x.dtype is dtype and x.is_contiguous() else -1


@cache
def library() -> ctypes.CDLL | str:
    """The library, or a short reason why there is none."""
    if not LIBRARY.is_file():
        return "not built: there was no C++ compiler at installation, or FB_BUILD_CPU=skip"
    return opened(LIBRARY)


def opened(path: Path) -> ctypes.CDLL | str:
    """A library whose functions are called by name, or why it cannot be used."""
    library = shared_library.opened(path, "fbcpu_", ABI_VERSION, FUNCTIONS)
    if isinstance(library, ctypes.CDLL):
        library.fbcpu_variant.restype = ctypes.c_char_p
    return library


def variant() -> str:
    """The instructions that bfloat16 kernels use here: plain, avx2, avx512, avx512_bf16 or amx."""
    loaded = library()
    return "" if isinstance(loaded, str) else loaded.fbcpu_variant().decode()


def why_not() -> str:
    """Why these kernels cannot run; empty where they can."""
    loaded = library()
    return loaded if isinstance(loaded, str) else ""
