"""The dtype in which ops compute, the order of their sums, and what `torch.autocast` does to their arguments.

Inside a region for the tensors' device, ops made of products (`linear_logprob`, `linear_logprob_partials`,
`skinny_linear`, `branch_attention`) take their float tensors in the region's dtype, as `torch.nn.functional.linear` and
`scaled_dot_product_attention` do; the others take float tensors of several dtypes in the widest of them, as
`torch.cat` does. float64 stays what it is, and so do the arguments of an op that writes to one of them, as with `out=`.
What an op computes inside (sums in float32) is the same as outside. Outside, mixed dtypes are an error.
"""

from __future__ import annotations

import os
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fb_kernels._runtime import checks

LOWERED = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda")
INVARIANT = os.environ.get("FB_KERNELS_BATCH_INVARIANT", "0") == "1"


def batch_invariant() -> bool:
    """Whether a row has the same bits whatever other rows its call has, as FB_KERNELS_BATCH_INVARIANT=1 asks.

    Then linear layers, attention and log-probs have one order of sums each at every size: by the compiled kernels on
    CPUs, by Triton's on GPUs.
    """
    return INVARIANT


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _inside(value: Any) -> bool:
    on = isinstance(value, Tensor) and value.device.type in DEVICES
    return on and torch.is_autocast_enabled(value.device.type)


def _is_cast(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in LOWERED and not checks.is_astray(value)


def lowered(*values: Any) -> tuple[Any, ...]:
    """The arguments of a product under autocast; the first one's device selects the region; non-tensors stay."""
    if not _inside(values[0]):
        return values
    dtype = torch.get_autocast_dtype(values[0].device.type)
    return tuple(x.to(dtype) if _is_cast(x) else x for x in values)


def promoted(*values: Any) -> tuple[Any, ...]:
    """The arguments of any other op under autocast: floats of several dtypes become the widest of them."""
    if not _inside(values[0]):
        return values
    dtypes = {x.dtype for x in values if _is_cast(x)}
    if len(dtypes) < 2:
        return values
    widest = reduce(torch.promote_types, dtypes)
    return tuple(x.to(widest) if _is_cast(x) else x for x in values)
