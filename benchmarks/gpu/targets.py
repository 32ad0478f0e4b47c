"""The library's targets and the measured values: `python -m benchmarks.gpu.targets [FOLDER]`.

The folder is named after a device. Bounds are for an H100; memory-bound work is 1.4 times as fast on an H200, at 4.3
instead of 3.0 TB/s. A bound below the floor of the cases that it is for, as they were measured, is an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import FLOOR, OURS, read_results

RESULTS = Path(__file__).parents[1] / "results"
SLOWER = {"h200": 1 / 1.4, "h100": 1.0}  # by device, factor on the times of memory-bound work
SCORED, TRAINED, RUNS, EPOCHS = 18_432, 16_576, 12, 3  # published: groups scored; the sweep's groups, runs, epochs
Case = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """Bounds `first` and `stretch` on the worst of some cases: at most, or, if more is better, at least."""

    what: str
    unit: str
    first: float | None
    stretch: float | None
    measure: partial[float | None]
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

    def floor(self, cases: Sequence[Case]) -> float | None:
        """What no implementation can surpass, from the floors of the same cases; None where that is not known."""
        if self.measure.func is least_of_ceiling:
            return 100.0
        if self.measure.func is not slowest:
            return None
        shape = self.measure.keywords["shape"].replace(PACKED, f"^({PACKED[1:]})?")  # a group alone has the same
        return self.measure(cases, impl=FLOOR, shape=shape)

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
    """A size in a case's shape, such as G in "G=3 K=13"; 1 where it has none."""
    match = re.search(rf"\b{name}=(\d+)", case["shape"])
    return int(match[1]) if match else 1


def us(case: Case) -> float:
    """A case's time, or the host's where that is longer: no caller is served sooner."""
    return max(case["median_us"], case.get("host_us") or 0.0)


def slowest(
    cases: Sequence[Case], *, op: str, shape: str, per: str | None = None, scale: float = 1.0, impl: str = OURS
) -> float | None:
    """The longest time in microseconds times `scale`, divided by the size that `per` names."""
    found = chosen(cases, op, shape, impl)
    return max((us(case) * scale / (size(case, per) if per else 1) for case in found), default=None)


def ratio(cases: Sequence[Case], *, op: str, shape: str, peer: str, ours_over: bool = False) -> float | None:
    """The peer's time / ours, or ours / the peer's, in the worst case that has both."""
    times = []
    for case in chosen(cases, op, shape):
        for other in chosen(cases, op, f"^{re.escape(case['shape'])}$", peer):
            times.append((us(case), us(other)))
    if ours_over:
        return max((ours / theirs for ours, theirs in times), default=None)
    return min((theirs / ours for ours, theirs in times), default=None)


def least_of_ceiling(cases: Sequence[Case], *, op: str, shape: str, scale: float = 1.0) -> float | None:
    """The smallest fraction of the measured ceiling times `scale`, in percent."""
    reached = [case["fraction_of_ceiling"] for case in chosen(cases, op, shape)]
    return min((100 * scale * share for share in reached if share is not None), default=None)


def time(
    what: str, unit: str, bounds: tuple[float, float], op: str, shape: str, per: str | None = None, **options: Any
) -> Target:
    """A bound on our longest time; an option `scale` is what a microsecond is in the unit."""
    scale = options.pop("scale", {"us": 1.0, "ms": 1e-3}.get(unit))
    return Target(what, unit, *bounds, partial(slowest, op=op, shape=shape, per=per, scale=scale), **options)


def share(what: str, first: float, stretch: float, op: str, shape: str, scale: float = 1.0) -> Target:
    """A bound on our smallest share of the matrix rate."""
    measure = partial(least_of_ceiling, op=op, shape=shape, scale=scale)
    return Target(f"{what}, of the matrix rate", "%", first, stretch, measure, more=True)


def against(what: str, first: float | None, stretch: float | None, op: str, shape: str, peer: str) -> Target:
    """A bound on how many times faster ours is than a peer."""
    measure = partial(ratio, op=op, shape=shape, peer=peer)
    return Target(what, "x", first, stretch, measure, more=True, peer=peer)


PACKED = r"^G=[3-9].* "
EITHER = rf"{PACKED}K=13 H=128 P=(1024|2048)\b"
LARGE = r"^N=(1664|[2-9]\d{3}|\d{5,})\b"  # 1,664 rows or more
GRAPH = r".*graph, cold"
GROUP = 14.7, 13.6  # milliseconds
MINUTES = 14.7e-3 * SCORED / 60, 13.6e-3 * SCORED / 60
BRANCHES = "`branch_attention`, L=128, P="
TARGETS = (
    time("a group scored, K=13, H=128, P=1,024, alone", "ms", (18, 15), "score_group", r"^K=13 H=128 P=1024\b"),
    *(
        time(
            f"a group scored, K=13, H=128, P={prefix:,}, 3 or more packed", "ms", bounds, "score_group",
            rf"{PACKED}K=13 H=128 P={prefix}\b", "G", published="1,680",
        )
        for prefix, bounds in ((1024, GROUP), (2048, (20.4, 19)))
    ),
    against(
        "the same against the batched repeated caches", 2, None, "score_group", EITHER, "repeated caches, one batch"
    ),
    against(
        "the same against a loop over candidates", 10, None, "score_group", EITHER, "K full forwards, needed logits"
    ),
    time(
        f"{SCORED:,} groups scored, at the bounds of a group", "min", MINUTES,
        "score_trajectory", "^sample", scale=1e-6 * SCORED / 60, published="516",
    ),
    share(f"{BRANCHES}1,024, one group", 42, 52, "branch_attention", r"^G=1 K=13 L=128 P=1024\b"),
    share(f"{BRANCHES}2,048, 4 or more groups", 62, 70, "branch_attention", r"^G=([4-9]|\d\d).* K=13 L=128 P=2048\b"),
    share(f"{BRANCHES}4,096, 4 or more groups", 67, 75, "branch_attention", r"^G=([4-9]|\d\d).* K=13 L=128 P=4096\b"),
    *(
        time(
            f"`branch_attention`, L=1, K=13, P={prefix:,}, in a graph from a cold cache", "us", bounds,
            "branch_attention", rf"^G=1 K=13 L=1 P={prefix}\b{GRAPH}", memory=True,
        )
        for prefix, bounds in ((1024, (11, 8)), (4096, (16, 12)))
    ),
    share("`branch_attention`'s backward, L=128", 40, 55, "branch_attention_backward", r"\bL=128\b"),
    time(
        "`branch_attention`'s backward, L=1, one group, with the host's time", "us", (250, 120),
        "branch_attention_backward", r"^G=1 K=13 L=1 .*eager",
    ),
    share("`linear_logprob`, N=8,192", 92, 96, "linear_logprob", r"^N=8192\b"),
    against("`linear_logprob`, N >= 1,664, against Liger-Kernel", None, 1, "linear_logprob", LARGE, "Liger-Kernel"),
    share(
        "`linear_logprob`'s backward, of the four products that it computes", 82, 88, "linear_logprob_backward", LARGE,
        4 / 3,
    ),
    time(
        "`topk_entropy`, one row of 151,936, in a graph from a cold cache", "us", (7, 5), "topk_entropy",
        rf"\bN=1 V=151936\b{GRAPH}",
    ),
    *(
        time(
            f"a decode step, {context:,} tokens of context", "ms", bounds, "decode_step", rf"^P={context}\b",
            memory=True,
        )
        for context, bounds in ((256, (1.68, 1.45)), (2048, (1.75, 1.5)))
    ),
    Target(
        "a rerank event, in steps", "x", 1.2, 1.1,
        partial(ratio, op="rerank_event", shape="deployed", peer="one greedy step", ours_over=True),
    ),
    *(
        Target(
            f"end to end, {new:,} tokens, 32B LLM on the same GPU, against our own greedy decoding", "x", *bounds,
            partial(ratio, op="end_to_end", shape=rf"\+ {new} tokens.* LLM 3\d,\d+M", peer="greedy", ours_over=True),
            published="3.30",
        )
        for new, bounds in ((500, (1.45, 1.25)), (1200, (1.25, 1.15)))
    ),
    time(
        f"reranker training, {RUNS} runs of {TRAINED:,} groups x {EPOCHS} epochs", "min", (30, 15), "training_step",
        rf"^R={RUNS}\b", scale=1e-6 * RUNS * TRAINED * EPOCHS / 60, published="432",
    ),
)  # fmt: skip


def table(results: Mapping[str, Mapping[str, Any]], device: str) -> list[str]:
    """Every target on a device with its measured value, in Markdown, from its result files by name."""
    cases = [case for result in results.values() for case in result["cases"]]
    head = f"| on an {device.upper()} | measured | first | | stretch | | floor | published |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for target in TARGETS:
        value, sign = target.measure(cases), ">=" if target.more else "<="
        bounds = []
        for bound in target.bounds(device):
            bounds.append("" if bound is None else f"{sign} {bound:.3g} {target.unit}")
            bounds.append("" if value is None else target.met(value, bound))
        measured = "not measured" if value is None else f"{value:.3g} {target.unit}"
        published = f"{target.published} {target.unit}" if target.published else ""
        floor = "" if (least := target.floor(cases)) is None else f"{least:.3g} {target.unit}"
        ran = sorted({case["kernel"] for case in cases if target.peer == case["impl"] and case.get("kernel")})
        what = f"{target.what} ({', '.join(f'`{kernel}`' for kernel in ran)})" if ran else target.what
        lines.append(f"| {what} | {measured} | {' | '.join(bounds)} | {floor} | {published} |")
    return lines


def beyond_floor(cases: Sequence[Case], device: str) -> list[str]:
    """The bounds that nothing can reach, by the floors that were measured on the device."""
    return [
        f"{target.what}: {bound:.3g} {target.unit}, and the floor is {floor:.3g}"
        for target in TARGETS
        if (floor := target.floor(cases)) is not None
        for bound in target.bounds(device)
        if bound is not None and (bound > floor if target.more else bound < floor)
    ]


def main(arguments: Sequence[str]) -> None:
    """Print the table of a folder of result files."""
    folder = Path(arguments[0]) if arguments else RESULTS / "h200"
    results = read_results(folder)
    print("\n".join(table(results, folder.name)))
    wrong = beyond_floor([case for result in results.values() for case in result["cases"]], folder.name)
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main(sys.argv[1:])
