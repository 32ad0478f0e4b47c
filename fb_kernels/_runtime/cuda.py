"""The compiled kernels of `csrc/`: loads their library on first use and launches them, or says why there is none.

The library is plain C and lies in the package's folder (setup.py builds it if there is nvcc). It needs no torch, and a
driver only to launch a kernel. Built with FB_HOST_EMULATION it takes CPU tensors instead; tests use that.

`fb_kernels/<op>/cuda.py` calls its functions.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fb_kernels._runtime import shared_library

ABI_VERSION = 6
LIBRARY = Path(__file__).parents[1] / "libfb_kernels.so"
NOT_TAKEN = -1
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

FUNCTIONS = (
    "commit",
    "topk_entropy",
    "candidate_head",
    "skinny_linear",
    "branch_attention",
    "branch_attention_workspace",
    "branch_attention_qkv",
    "branch_attention_qkv_workspace",
)


@cache
def library() -> ctypes.CDLL | str:
    """The library, or a short reason why there is none."""
    if not LIBRARY.is_file():
        return "not built: there was no nvcc at installation, or FB_BUILD_CUDA=skip"
    return opened(LIBRARY)


def opened(path: Path) -> ctypes.CDLL | str:
    """A library whose functions are called by name, or why it cannot be used."""
    loaded = shared_library.opened(path, "fb_", ABI_VERSION, FUNCTIONS)
    if not isinstance(loaded, str):
        loaded.fb_error_string.restype = ctypes.c_char_p
    return loaded


@cache
def why_not(device: str) -> str:
    """Why the compiled kernels cannot be launched on tensors of a device; empty where they can."""
    return _why_not(library(), device)


def _why_not(loaded: ctypes.CDLL | str, device: str) -> str:
    if isinstance(loaded, str):
        return loaded
    if (device == "cpu") != bool(loaded.fb_is_emulation()):
        return "compiled kernels are for CUDA tensors" if device == "cpu" else "its library runs CPU tensors"
    if device == "cuda" and torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs"
    if device == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability[0] != 8 and capability != (9, 0):
            return f"its kernels are for compute capability 8.x and 9.0, not {capability[0]}.{capability[1]}"
        driver, runtime = (version() // 10 for version in (loaded.fb_driver_version, loaded.fb_runtime_version))
        if driver // 100 < runtime // 100:  # within one major version every driver works
            return (
                f"built with CUDA {runtime // 100}.{runtime % 100}, and the driver supports {driver // 100}."
                f"{driver % 100} at most: update the driver, or reinstall futurebridge with an nvcc of CUDA "
                f"{driver // 100}"
            )
    return ""


def launch(op: str, like: Tensor, **arguments: Any) -> bool:
    """Call `fb_<op>` on the current stream of a tensor's device; False where it does not take these sizes.

    It takes tensors and None for pointers, numbers for the rest. An error code from the launch is a RuntimeError.
    """
    loaded = library()
    assert not isinstance(loaded, str)
    stream = torch.cuda.current_stream(like.device).cuda_stream if like.is_cuda else 0
    values = {name: x.data_ptr() if isinstance(x, Tensor) else x or 0 for name, x in arguments.items()}
    code = getattr(loaded, f"fb_{op}")(**values, stream=stream)
    if code == NOT_TAKEN:
        return False
    if code:
        reason = loaded.fb_error_string(code).decode()
        raise RuntimeError(f"{op}: expected its CUDA kernel to launch, got error {code}, {reason}; see CUDA's log")
    return True
