"""How `joint_pool` is called."""

from __future__ import annotations

from fb_kernels.calls import Call, Calls, by_definition, ids
from fb_kernels.joint_pool import naive


def joint_pool(n: int = 2, k: int = 8) -> Call:
    """N pools of K and K ids."""
    slm, llm = ids(20, 2 * n * k).view(2, n, k)
    return Call("joint_pool", {"slm_ids": slm - 1, "llm_ids": llm + 4}, shape=f"N={n} K={k} + {k}")


OPS = (
    Calls(
        "joint_pool",
        joint_pool,
        by_definition(naive.joint_pool),
        takes="slm_ids[..., Ks], llm_ids[..., Kt], int32 or int64",
        gives="ids[..., Ks + Kt], count[...], source[..., Ks + Kt]",
    ),
)
