"""The compiled kernels of `csrc/`: loads their library when first asked, launches them, says why there is none.

The library is a plain C one beside this file (setup.py builds it where nvcc is); it needs no torch, and a driver only
when something is launched. Built with FB_HOST_EMULATION it runs CPU tensors instead, which is how tests run it.

A function of an op's name takes that op's arguments; it returns NotImplemented for those it was not made for.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ABI_VERSION = 1
LIBRARY = Path(__file__).with_name("libfb_kernels.so")
NOT_TAKEN = -1
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int, "q": ctypes.c_int64, "f": ctypes.c_float}
_SIGNATURES = {  # p pointer, i int, q int64, f float; the stream behind them is not named
    "commit": "pqq pp pp pp i pi pi i",
}


@cache
def library() -> ctypes.CDLL | str:
    """The library, or in a few words why there is none."""
    if not LIBRARY.is_file():
        return "not built: there was no nvcc at installation, or FB_BUILD_CUDA=skip"
    return opened(LIBRARY)


def opened(path: Path) -> ctypes.CDLL | str:
    """A library with its functions typed, or why it cannot be used."""
    try:
        found = ctypes.CDLL(str(path))
    except OSError as problem:
        return f"cannot be loaded: {problem}"
    version = found.fb_abi_version()
    if version != ABI_VERSION:
        return f"built for interface {version}, this package has {ABI_VERSION}: install it anew"
    found.fb_error_string.restype = ctypes.c_char_p
    for name, signature in _SIGNATURES.items():
        kinds = [_KINDS[letter] for letter in signature.replace(" ", "")]
        getattr(found, f"fb_{name}").argtypes = [*kinds, ctypes.c_void_p]
    return found


def why_not(device: str) -> str:
    """Why the compiled kernels cannot be launched on tensors of a device; empty where they can."""
    found = library()
    if isinstance(found, str):
        return found
    if (device == "cpu") != bool(found.fb_is_emulation()):
        return "compiled kernels are for CUDA tensors" if device == "cpu" else "its library runs CPU tensors"
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        return "the kernels need compute capability 8.0"
    return ""


def launch(op: str, like: Tensor, *arguments: Any) -> bool:
    """Call `fb_<op>` on the current stream of a tensor's device; False where it does not take these sizes.

    Args:
        op: the C function's name without its prefix; errors name it.
        like: a tensor on the device.
        arguments: tensors and None for pointers, numbers for the rest.

    Raises:
        RuntimeError: an error code from the launch.
    """
    found = library()
    assert not isinstance(found, str)
    stream = torch.cuda.current_stream(like.device).cuda_stream if like.is_cuda else 0
    values = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
    code = getattr(found, f"fb_{op}")(*values, stream)
    if code == NOT_TAKEN:
        return False
    if code:
        reason = found.fb_error_string(code).decode()
        raise RuntimeError(f"{op}: expected its CUDA kernel to launch, got error {code}, {reason}; see CUDA's log")
    return True


def commit_(
    tokens: Tensor,
    length: Tensor,
    halt: Tensor,
    budget: Tensor,
    token: Tensor,
    entropy: Tensor,
    threshold: Tensor,
    eos_ids: Tensor,
    max_length: Tensor,
) -> None:
    """End a decode step in place."""
    flat = (length, halt, budget, token, entropy, eos_ids)
    given = [tokens.stride(-1) == 1, token.dtype == torch.int64, entropy.dtype == torch.float32]
    given += [threshold.dtype == torch.float64, eos_ids.dtype == torch.int64, max_length.dtype == torch.int32]
    if not (all(given) and all(x.is_contiguous() for x in flat)):
        return NotImplemented
    rows, slots = tokens.shape
    steps = [x.stride(0) if x.ndim else 0 for x in (threshold, max_length)]
    launch(
        "commit", tokens, tokens, tokens.stride(0), slots, length, halt, budget, token, entropy,
        threshold, steps[0], eos_ids, len(eos_ids), max_length, steps[1], rows,
    )  # fmt: skip
    return None
