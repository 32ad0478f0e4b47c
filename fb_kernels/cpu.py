"""The compiled kernels for CPU tensors, `csrc/cpu.cpp`: loads their library when first asked, says why there is none.

The library is a plain C one beside this file (setup.py builds it where a C++ compiler is); it needs no torch. Made for
float32, the ops of a decode step, attention of branches and log-probs for bfloat16 too, and for what is small, the rows
of a decode step and the candidates of a training step, where plain operations cost more than their arithmetic; an op
leaves sizes at which torch's threads are ahead to its reference. Linear layers, log-probs and attention of branches run
on torch's threads, whose OpenMP runtime it finds loaded (on others where torch has another runtime), all else on one
thread.

`fb_kernels/<op>/cpu.py` calls its functions.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from fb_kernels import shared_library

ABI_VERSION = 13
ROWS = 16  # the most of a linear layer: from there on oneDNN's blocks are ahead
SHARE = 1 << 17  # products, the least of a thread
STEP = (torch.float32, torch.bfloat16)  # dtypes of the ops of a decode step
LIBRARY = Path(__file__).with_name("libfb_cpu.so")

_SIGNATURES = {  # in the letters of `shared_library`
    "skinny_linear": "pq pq pp f pq pq qqq iii",
    "branch_attention_qkv": "pq pp ppq pi pqqq pqqq qq pi piqq pi p qqq qqq ff ii",
    "decoder_layer": "pq p ppq pi pqqq pqqq qq pi piqq pi p qqq qqq ff qq ii",
    "branch_attention": "pqq pqq pqq pqqq pqqq ppppp qqqqq ppp qqqq ff q ii",
    "branch_attention_backward": "pqq pqq pqq pqq pqq pqqq pqqq ppppp qqqqq ppppppp qqqq ff q ii",
    "topk_entropy": "pqqqq ppp i",
    "rms_norm": "ppp f pp qq i",
    "swiglu": "pp qq",
    "merge_attention_states": "pp pp pp qqq",
    "candidate_head": "pq ppp f pi ppp qqq",
    "linear_logprob": "pq pq pp iq fff pppp qqq ii",
    "qk_norm_rope": "pq pp ppq pi ppp pqq pqq pi qqqq f",
}


def threads(products: int) -> int:
    """How many a linear layer of so many products runs on."""
    return max(1, min(torch.get_num_threads(), products // SHARE))


@cache
def library() -> ctypes.CDLL | str:
    """The library, or in a few words why there is none."""
    if not LIBRARY.is_file():
        return "not built: there was no C++ compiler at installation, or FB_BUILD_CPU=skip"
    return opened(LIBRARY)


def opened(path: Path) -> ctypes.CDLL | str:
    """A library with its functions typed, or why it cannot be used."""
    return shared_library.opened(path, "fbcpu_", ABI_VERSION, _SIGNATURES)


def why_not() -> str:
    """Why these kernels cannot run; empty where they can."""
    found = library()
    return found if isinstance(found, str) else ""
