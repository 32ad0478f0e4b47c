"""The library's targets and the measured values: `python -m benchmarks.targets [FOLDER]`.

The folder is named after a device. Bounds are for an H200. Memory-bound work may take 1.4 times as long on an H100, at
3.0 instead of 4.3 TB/s; ratios and shares of the ceiling are the same on both.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import OURS, read_results

RESULTS = Path(__file__).parent / "results"
SLOWER = {"h200": 1.0, "h100": 1.4}  # by device, factor on the times of memory-bound work
SCORED, TRAINED, RUNS, EPOCHS = 18_432, 16_576, 12, 3  # published: groups scored; the sweep's groups, runs, epochs
Case = Mapping[str, Any]
Measure = Callable[[Sequence[Case]], float | None]


@dataclass(frozen=True)
class Target:
    """Bounds `first` and `stretch` on the worst of some cases: at most, or, if more is better, at least."""

    what: str
    unit: str
    first: float | None
    stretch: float | None
    measure: Measure
    more: bool = False
    published: str = ""  # in the same unit
    memory: bool = False  # whether it is memory-bound
    peer: str = ""  # the peer whose kernel the table names

    def bounds(self, device: str) -> tuple[float | None, ...]:
        """(first, stretch) on a device; None where there is none."""
        slower = SLOWER.get(device)
        if slower is None:
            return None, None
        times = slower if self.memory else 1.0
        return tuple(None if bound is None else bound * times for bound in (self.first, self.stretch))

    def met(self, value: float, bound: float | None) -> str:
        if bound is None:
            return ""
        return "met" if (value >= bound if self.more else value <= bound) else "missed"


def chosen(cases: Sequence[Case], op: str, shape: str, impl: str = OURS) -> Iterator[Case]:
    """The timed cases of an op whose shape matches a pattern."""
    return (
        case
        for case in cases
        if case["op"] == op and case["impl"] == impl and case["median_us"] and re.search(shape, case["shape"])
    )


def size(case: Case, name: str) -> int:
    """A size in a case's shape, such as G in "G=3 K=13"."""
    match = re.search(rf"\b{name}=(\d+)", case["shape"])
    assert match is not None, case["shape"]
    return int(match.group(1))


def slowest(cases: Sequence[Case], *, op: str, shape: str, per: str | None = None, scale: float = 1.0) -> float | None:
    """Our longest time in microseconds times `scale`, divided by the size that `per` names."""
    times = [case["median_us"] * scale / (size(case, per) if per else 1) for case in chosen(cases, op, shape)]
    return max(times, default=None)


def ratio(cases: Sequence[Case], *, op: str, shape: str, peer: str, ours_over: bool = False) -> float | None:
    """The peer's time / ours, or ours / the peer's, in the worst case that has both."""
    times = []
    for case in chosen(cases, op, shape):
        for other in chosen(cases, op, f"^{re.escape(case['shape'])}$", peer):
            times.append((case["median_us"], other["median_us"]))
    if ours_over:
        return max((ours / theirs for ours, theirs in times), default=None)
    return min((theirs / ours for ours, theirs in times), default=None)


def least_of_ceiling(cases: Sequence[Case], *, op: str, shape: str) -> float | None:
    """The smallest fraction of the measured ceiling, in percent."""
    reached = [case["fraction_of_ceiling"] for case in chosen(cases, op, shape)]
    return min((100 * share for share in reached if share is not None), default=None)


PACKED = r"^G=[3-9].* K=13 H=128 P=(1024|2048)\b"
LONG = r"^G=([4-9]|\d\d).* K=13 L=128 P=(2048|4096)\b"
LARGE = r"^N=(1664|[2-9]\d{3}|\d{5,})\b"  # 1,664 rows or more
GRAPH = r".*graph, cold"
TARGETS = (
    Target(
        "a group scored, K=13, H=128, P=1,024 to 2,048, 3 or more packed",
        "ms",
        15,
        11,
        partial(slowest, op="score_group", shape=PACKED, per="G", scale=1e-3),
        published="1,680",
    ),
    Target(
        "the same against the batched repeated caches",
        "x",
        2,
        None,
        partial(ratio, op="score_group", shape=PACKED, peer="repeated caches, one batch"),
        more=True,
    ),
    Target(
        "the same against a loop over candidates",
        "x",
        10,
        None,
        partial(ratio, op="score_group", shape=PACKED, peer="K full forwards, needed logits"),
        more=True,
    ),
    Target(
        f"{SCORED:,} groups scored, at the bounds of a group",
        "min",
        15e-3 * SCORED / 60,
        11e-3 * SCORED / 60,
        partial(slowest, op="score_trajectory", shape="^sample", scale=1e-6 * SCORED / 60),
        published="516",
    ),
    Target(
        "`branch_attention`, L=128, P >= 2,048, 4 or more groups, of the matrix rate",
        "%",
        52,
        70,
        partial(least_of_ceiling, op="branch_attention", shape=LONG),
        more=True,
    ),
    *(
        Target(
            f"`branch_attention`, L=1, K=13, P={prefix:,}, in a graph from a cold cache",
            "us",
            first,
            stretch,
            partial(slowest, op="branch_attention", shape=f"^G=1 K=13 L=1 P={prefix}\\b{GRAPH}"),
            memory=True,
        )
        for prefix, first, stretch in ((1024, 6, 4), (4096, 9, 7))
    ),
    Target(
        "`linear_logprob`, N >= 1,664, of the matrix rate",
        "%",
        72,
        90,
        partial(least_of_ceiling, op="linear_logprob", shape=LARGE),
        more=True,
    ),
    Target(
        "the same against Liger-Kernel",
        "x",
        None,
        1,
        partial(ratio, op="linear_logprob", shape=LARGE, peer="Liger-Kernel"),
        more=True,
        peer="Liger-Kernel",
    ),
    Target(
        "`topk_entropy`, one row of 151,936, in a graph from a cold cache",
        "us",
        7,
        5,
        partial(slowest, op="topk_entropy", shape=rf"\bN=1 V=151936\b{GRAPH}"),
    ),
    *(
        Target(
            f"a decode step, {context:,} tokens of context",
            "ms",
            first,
            stretch,
            partial(slowest, op="decode_step", shape=f"^P={context}\\b", scale=1e-3),
            memory=True,
        )
        for context, first, stretch in ((256, 1.2, 1.05), (2048, 1.3, 1.15))
    ),
    Target(
        "a rerank event, in steps",
        "x",
        1.2,
        1.1,
        partial(ratio, op="rerank_event", shape="deployed", peer="one greedy step", ours_over=True),
    ),
    *(
        Target(
            f"end to end, {new:,} tokens, LLM on the same GPU, against our own greedy decoding",
            "x",
            first,
            stretch,
            partial(ratio, op="end_to_end", shape=rf"\+ {new} tokens", peer="greedy", ours_over=True),
            published="3.30",
        )
        for new, first, stretch in ((500, 1.45, 1.25), (1200, 1.25, 1.15))
    ),
    Target(
        f"reranker training, {RUNS} runs of {TRAINED:,} groups x {EPOCHS} epochs",
        "min",
        30,
        12,
        partial(slowest, op="training_step", shape=f"^R={RUNS}\\b", scale=1e-6 * RUNS * TRAINED * EPOCHS / 60),
        published="432",
    ),
)


def table(results: Mapping[str, Mapping[str, Any]], device: str) -> list[str]:
    """Every target on a device with its measured value, in Markdown, from its result files by name."""
    cases = [case for result in results.values() for case in result["cases"]]
    head = f"| on an {device.upper()} | measured | first | | stretch | | published |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for target in TARGETS:
        value, sign = target.measure(cases), ">=" if target.more else "<="
        bounds = []
        for bound in target.bounds(device):
            bounds.append("" if bound is None else f"{sign} {bound:.3g} {target.unit}")
            bounds.append("" if value is None else target.met(value, bound))
        measured = "not measured" if value is None else f"{value:.3g} {target.unit}"
        published = f"{target.published} {target.unit}" if target.published else ""
        ran = sorted({case["kernel"] for case in cases if target.peer == case["impl"] and case.get("kernel")})
        what = f"{target.what} ({', '.join(f'`{kernel}`' for kernel in ran)})" if ran else target.what
        lines.append(f"| {what} | {measured} | {' | '.join(bounds)} | {published} |")
    return lines


def main(arguments: Sequence[str]) -> None:
    """Print the table of a folder of result files."""
    folder = Path(arguments[0]) if arguments else RESULTS / "h200"
    print("\n".join(table(read_results(folder), folder.name)))


if __name__ == "__main__":
    main(sys.argv[1:])
