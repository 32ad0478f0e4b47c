"""How `merge_attention_states` is called."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels.calls import Call, Calls, by_definition, randn
from fb_kernels.merge_attention_states import naive


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Plain torch."""
    lse = torch.logaddexp(lse_a, lse_b)
    parts = [out * (own - lse).exp().T[..., None] for out, own in ((out_a, lse_a), (out_b, lse_b))]
    return (parts[0] + parts[1]).to(out_a.dtype), lse


def merge_attention_states(n: int = 4096, hq: int = 16, e: int = 128) -> Call:
    """A call on N rows."""
    outs = {name: randn(n, hq, e, seed=seed) for seed, name in enumerate(("out_a", "out_b"))}
    lses = {name: randn(hq, n, seed=2 + seed) for seed, name in enumerate(("lse_a", "lse_b"))}
    return Call(
        "merge_attention_states",
        outs | lses,
        gradients=(*outs, *lses),
        outputs=(0, 1),
        least=dict.fromkeys(lses, torch.float32),
        shape=f"T={n} Hq={hq} E={e}",
        scales=(None, 4.0),
        bytes=6.0 * n * hq * e,
        plain={"torch eager": merge},
        launches={"_merge_attention_states_kernel": 6 * n * hq * e + 12 * hq * n},
    )


OPS = (
    Calls(
        "merge_attention_states",
        merge_attention_states,
        by_definition(naive.merge_attention_states),
        sizes={"small": (5, 4, 8), "checked": (33, 16, 128)},
        compiled=lambda: (merge_attention_states(rows).cast(torch.bfloat16) for rows in (16, 4096)),
        takes="out_a[T, Hq, E], lse_a[Hq, T] fp32, out_b, lse_b",
        gives="out[T, Hq, E], lse[Hq, T]",
        cpu="fp32",
    ),
)
