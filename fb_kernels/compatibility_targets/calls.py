"""How `compatibility_targets` is called."""

from __future__ import annotations

import torch

from fb_kernels.calls import RAGGED, Call, Calls, by_definition, offsets, randn
from fb_kernels.compatibility_targets import naive


def compatibility_targets(g: int = 2, k: int = 13, h: int = 32) -> Call:
    """A call on G groups of K, with horizons H / 4 and H."""
    arguments = {"logprob": -randn(g * k, h).abs(), "cu_group": offsets(g, k), "horizons": sorted({max(1, h // 4), h})}
    return Call(
        "compatibility_targets",
        arguments,
        least={"logprob": torch.float32},
        shape=f"G={g} K={k} H={h}",
        scales=(None, 8.0),
        bytes=4.0 * g * k * h,
    )


OPS = (
    Calls(
        "compatibility_targets",
        compatibility_targets,
        by_definition(naive.compatibility_targets),
        checked=lambda _: [compatibility_targets(2, 7).with_(cu_group=torch.tensor(RAGGED, dtype=torch.int32))],
        takes="logprob[N, H], cu_group[G + 1], (local[N])",
        gives="B[N, horizons], q[N, horizons], fp32",
    ),
)
