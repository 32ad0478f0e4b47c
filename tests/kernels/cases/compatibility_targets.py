"""How `compatibility_targets` is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from cases.base import LOW, Case, Op, Sizes, Way, generator, ids, offsets, seeds
from fb_kernels.compatibility_targets.naive import compatibility_targets as naive
from fb_kernels.testing import magnitude


def make(
    sizes: Sequence[int],
    tail: int,
    length: int,
    horizons: Sequence[int],
    alpha: float | None = None,
    temperature: float = 0.5,
    index: torch.dtype = torch.int32,
    seed: int = 0,
) -> Case:
    """Groups of these sizes and `tail` rows of none; `local` is given where `alpha` is."""
    rows = sum(sizes) + tail
    logprob, local = (
        -5 * torch.rand(*shape, generator=generator(seed + place), dtype=torch.float64)
        for place, shape in enumerate([(rows, length), (rows,)])
    )
    arguments = {
        "logprob": logprob,
        "cu_group": offsets(sizes, index),
        "horizons": list(horizons),
        "temperature": temperature,
    }
    return Case("compatibility_targets", arguments | ({} if alpha is None else {"local": local, "alpha": alpha}))


def truth(case: Case, results: Sequence[Tensor]) -> list[Tensor]:
    """Rounded once."""
    doubles = {name: x.double() for name, x in case.tensors.items() if x.is_floating_point()}
    return [x.to(mine.dtype) for x, mine in zip(naive(**(case.arguments | doubles)), results, strict=True)]


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    length = draw(st.integers(1, 12))
    return {
        "sizes": draw(st.lists(st.integers(0, 6), max_size=5)),
        "tail": draw(st.integers(0, 3)),
        "length": length,
        "horizons": draw(st.lists(st.integers(1, length), min_size=1, max_size=4)),
        "alpha": draw(st.sampled_from([None, 0.0, 0.3, 1.0])),
        "temperature": draw(st.sampled_from([0.05, 0.5, 2.0])),
        "index": draw(st.sampled_from([torch.int32, torch.int64])),
        "seed": draw(seeds),
    }


GOOD = make([3, 0, 3], 1, 5, [5, 1]).tensors
LOCAL = GOOD["logprob"][:, 0].float()
OP = Op(
    "compatibility_targets",
    make,
    sizes(),
    truth,
    {"reference": Way(LOW, also=[{"sizes": [13] * 20, "tail": 0, "length": 128, "horizons": [1, 32, 128]}])},
    typical={"sizes": [3, 0, 3], "tail": 1, "length": 5, "horizons": [5, 1], "alpha": 0.3},
    scales=lambda _, truth: [magnitude(each) for each in truth],
    widened=(0, 1),
    hostile=("logprob", "local"),
    wrong=[
        ("logprob", {"logprob": LOCAL}, ValueError),
        ("cu_group", {"cu_group": ids()}, ValueError),
        ("cu_group", {"cu_group": ids(0, 3, 2)}, ValueError),
        ("cu_group", {"cu_group": ids(1, 4)}, ValueError),
        ("cu_group", {"cu_group": ids(0, 8)}, ValueError),
        ("horizons", {"horizons": 3}, TypeError),
        *[("horizons", {"horizons": value}, TypeError) for value in ([1.0], [True])],
        ("horizons", {"horizons": ids(1)}, TypeError),
        *[("horizons", {"horizons": value}, ValueError) for value in ([], [0], [1, 6], [10**5000])],
        ("temperature", {"temperature": 0.0}, ValueError),
        ("eps", {"eps": -1.0}, ValueError),
        ("alpha", {"alpha": 1.5}, ValueError),
        ("local", {"local": None}, ValueError),
        ("local", {"local": LOCAL[:3]}, ValueError),
    ],
)
EXAMPLES = {"compatibility_targets": OP.example(**OP.typical)}
