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

from fb_kernels import shared_library

ABI_VERSION = 2
LIBRARY = Path(__file__).with_name("libfb_kernels.so")
NOT_TAKEN = -1
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

TOPK_ROWS, TOPK_K, TOPK_GROUPS = 32, 64, 2048  # the most; rows are few, for Triton does many as well
HEAD_ROWS = HEAD_GROUPS = 1024  # the most

_SIGNATURES = {  # in the letters of `shared_library`; the last p of those that launch is the stream
    "commit": "pqq pp pp pp i pi pi i p",
    "topk_entropy": "pqi qii p ppp p",
    "candidate_head": "pq p pi pi pi qqq if ppp p",
    "skinny_linear": "pq pq pp f pq pq iii iii p",
    "branch_attention_qkv": "pq pp ppq p pp qq pp pq p iiii i ff i p",
    "branch_attention_qkv_workspace": "iiiq",
}


@cache
def library() -> ctypes.CDLL | str:
    """The library, or in a few words why there is none."""
    if not LIBRARY.is_file():
        return "not built: there was no nvcc at installation, or FB_BUILD_CUDA=skip"
    return opened(LIBRARY)


def opened(path: Path) -> ctypes.CDLL | str:
    """A library with its functions typed, or why it cannot be used."""
    found = shared_library.opened(path, "fb_", ABI_VERSION, _SIGNATURES)
    if isinstance(found, str):
        return found
    found.fb_error_string.restype = ctypes.c_char_p
    found.fb_branch_attention_qkv_workspace.restype = ctypes.c_int64
    return found


@cache
def why_not(device: str) -> str:
    """Why the compiled kernels cannot be launched on tensors of a device; empty where they can."""
    return _why_not(library(), device)


def _why_not(found: ctypes.CDLL | str, device: str) -> str:
    if isinstance(found, str):
        return found
    if (device == "cpu") != bool(found.fb_is_emulation()):
        return "compiled kernels are for CUDA tensors" if device == "cpu" else "its library runs CPU tensors"
    if device == "cuda" and torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs"
    if device == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability[0] != 8 and capability != (9, 0):
            return f"its kernels are for compute capability 8.x and 9.0, not {capability[0]}.{capability[1]}"
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


def branch_attention_qkv(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    held: Tensor,
    slots: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    window: int | None,
    scale: float,
) -> Tensor:
    """[N, Hq, E] of branches of one token: norm, rotation, attention; keys and values go to their slots."""
    found, rows, width, size = library(), qkv.shape[0], cos.shape[-1], k_cache.shape[0]
    floats = [x for x in (qkv, q_weight, k_weight, k_cache, v_cache) if x is not None]
    indices = [x for x in (positions, held, slots) if x is not None]
    given = [x.dtype == qkv.dtype for x in floats] + [x.dtype == torch.int32 for x in indices]
    given += [x.dtype == torch.float32 for x in (cos, sin)]
    given += [x.is_contiguous() for x in (q_weight, k_weight, cos, sin, *indices) if x is not None]
    given += [x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == width) for x in (k_cache, v_cache)]
    given += [qkv.dtype in (torch.float16, torch.bfloat16), qkv.stride(1) == 1]
    given += [size < 2 or k_cache.stride(0) == v_cache.stride(0)]
    assert not isinstance(found, str)
    needed = found.fb_branch_attention_qkv_workspace(rows, num_heads, width, size)
    if not all(given) or needed < 0:
        return NotImplemented
    out = torch.empty(rows, num_heads, width, dtype=qkv.dtype, device=qkv.device)
    partials = torch.empty(needed, dtype=torch.float32, device=qkv.device)
    taken = launch(
        "branch_attention_qkv", qkv, qkv, qkv.stride(0), q_weight, k_weight, cos, sin, len(cos), positions,
        k_cache, v_cache, k_cache.stride(0), size, held, slots, out, out.stride(0), partials,
        rows, num_heads, num_kv_heads, width, min(window or 0, 2**31 - 1), eps, scale, DTYPES[qkv.dtype],
    )  # fmt: skip
    return out if taken else NotImplemented


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    swiglu: bool,
    frozen: bool = False,
) -> Tensor:
    """[N, M], or [N, M / 2] where it is gated, of up to 32 rows."""
    tensors = [value for value in (x, weight, bias, norm_weight, residual) if value is not None]
    given = [x.dtype in (torch.float16, torch.bfloat16), not (swiglu and residual is not None)]
    given += [value.dtype == x.dtype for value in tensors]
    given += [value.shape[-1] < 2 or value.stride(-1) == 1 for value in tensors]
    rows, width = x.shape
    if not all(given) or rows > 32:
        return NotImplemented
    out = torch.empty(rows, weight.shape[0] // (2 if swiglu else 1), dtype=x.dtype, device=x.device)
    taken = launch(
        "skinny_linear", x, x, x.stride(0), weight, weight.stride(0), bias, norm_weight, eps,
        residual, 0 if residual is None else residual.stride(0), out, out.stride(0),
        rows, width, out.shape[1], swiglu, frozen, DTYPES[x.dtype],
    )  # fmt: skip
    return out if taken else NotImplemented


def topk_entropy(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(entropy[...], values[..., k], indices[..., k])."""
    shape, width = logits.shape[:-1], logits.shape[-1]
    rows = shape.numel()
    if logits.dtype not in DTYPES or rows > TOPK_ROWS or k > TOPK_K:  # before anything of that size is allocated
        return NotImplemented
    entropy = logits.new_empty(shape, dtype=torch.float32)
    values = logits.new_empty((*shape, k), dtype=torch.float32)
    indices = logits.new_empty((*shape, k), dtype=torch.int64)
    if not rows:
        return entropy, values, indices
    x = logits.reshape(rows, width)
    x = x if x.stride(1) == 1 else x.contiguous()
    workspace = logits.new_empty(rows * (min(width, TOPK_GROUPS) + 1), dtype=torch.int64)
    taken = launch(
        "topk_entropy", x, x, x.stride(0), rows, width, k, DTYPES[x.dtype], workspace, entropy, values, indices
    )
    return (entropy, values, indices) if taken else NotImplemented


def candidate_head(
    hidden: Tensor,
    norm_weight: Tensor | None,
    head_weight: Tensor,
    head_bias: Tensor | None,
    cu_group: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(score[N], prob[N], best[G])."""
    (rows, width), groups = hidden.shape, len(cu_group) - 1
    if hidden.dtype not in DTYPES or not width or rows > HEAD_ROWS or groups > HEAD_GROUPS:
        return NotImplemented
    x = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    head_weight, cu_group = head_weight.contiguous(), cu_group.contiguous()
    score, prob = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    best = cu_group.new_empty(groups, dtype=torch.int64)
    wide_bias = head_bias is not None and head_bias.dtype == torch.float32
    taken = launch(
        "candidate_head", x, x, x.stride(0), norm_weight, head_weight, head_weight.dtype == torch.float32,
        head_bias, wide_bias, cu_group, cu_group.dtype == torch.int64, rows, groups, width, DTYPES[x.dtype], eps,
        score, prob, best,
    )  # fmt: skip
    return (score, prob, best) if taken else NotImplemented
