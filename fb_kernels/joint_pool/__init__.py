"""Union of the two models' candidate ids, with where each id comes from."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import checks
from fb_kernels._runtime.op import Op


def joint_pool(slm_ids: Tensor, llm_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unique candidate ids of both models: the SLM's in their order, then those only the LLM proposes, in its order.

    Args:
        slm_ids: [..., Ks] int32 or int64, Ks may be 0; negative ids are padding and are skipped.
        llm_ids: [..., Kt] of the same dtype and batch dimensions, Kt may be 0.

    Returns:
        (ids[..., Ks + Kt] in the inputs' dtype, count[...] int32, source[..., Ks + Kt] int32). The first `count` ids
        are the pool, the rest is -1. Source bit 1 means SLM, bit 2 LLM (3 is both), 0 padding. An id that is repeated
        within one list counts once, at its first place.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape or device.
    """
    op = "joint_pool"
    checks.is_tensor(op, "slm_ids", slm_ids)
    checks.index(op, "slm_ids", slm_ids, like=slm_ids)
    checks.index(op, "llm_ids", llm_ids, like=slm_ids)
    if llm_ids.dtype != slm_ids.dtype:
        raise checks.error(
            op, "llm_ids", f"dtype {slm_ids.dtype} of slm_ids", llm_ids, "give both lists one dtype", TypeError
        )
    if slm_ids.ndim == 0:
        raise checks.error(op, "slm_ids", "shape [..., Ks]", slm_ids, "add a dimension")
    batch = tuple(slm_ids.shape[:-1])
    checks.shape(op, "llm_ids", llm_ids, (*batch, None), "[..., Kt] of slm_ids[..., Ks]", "expand the batch dimensions")
    return _joint_pool(slm_ids, llm_ids)


def _fake(slm_ids: Tensor, llm_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, size = slm_ids.shape[:-1], slm_ids.shape[-1] + llm_ids.shape[-1]
    return (
        slm_ids.new_empty((*batch, size)),
        slm_ids.new_empty(batch, dtype=torch.int32),
        slm_ids.new_empty((*batch, size), dtype=torch.int32),
    )


_joint_pool = Op(
    "joint_pool",
    "(Tensor slm_ids, Tensor llm_ids) -> (Tensor, Tensor, Tensor)",
    fake=_fake,
)
