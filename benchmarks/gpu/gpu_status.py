"""What ran on which GPU and what did not, for docs/benchmarks.md, from the committed result files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import roofline, targets
from benchmarks.harness import OURS, commit_and_changes, of_its_commit, read_results
from fb_core.apps.pipeline.page import markdown_table

CHECK = "check.txt"  # as `python -m fb_kernels.env --check` printed it
HEADS = ("op", "size", "kernel", "right", "microseconds", "of the ceiling", "used")
NAMES = {"cuda": "CUDA", "triton": "Triton", "reference": "plain PyTorch"}
NOTHING = "Nothing has run on an {device}: no kernel was checked there and nothing was timed."


def checked(text: str) -> list[dict[str, str]]:
    """The rows of the check's table, by the words of its head."""
    (head, *lines) = (line for line in text.splitlines() if re.search(r"\S  ", line))
    starts = [*(head.index(name) for name in HEADS), None]
    return [
        {name: line[a:b].strip() for name, a, b in zip(HEADS, starts, starts[1:], strict=False)}
        for line in lines
        if not line[starts[1] - 1].strip()  # type: ignore[operator]
    ]


def kernels(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """The kernels that are used, that are also right, and that are right at some sizes only; ops alike share a row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for op in dict.fromkeys(row["op"] for row in rows):
        used, also, faulty = [], [], []
        for kind in dict.fromkeys(row["kernel"] for row in rows if row["op"] == op):
            sizes = [row for row in rows if (row["op"], row["kernel"]) == (op, kind)]
            name, right = NAMES.get(kind, kind), sum(row["right"] == "yes" for row in sizes)
            if any(row["used"] == "yes" for row in sizes):
                used.append(name)
            elif right == len(sizes):
                also.append(name)
            if right < len(sizes):
                faulty.append(f"{name}, {right} of {len(sizes)}")
        alike.setdefault((*(", ".join(names) for names in (used, also)), "; ".join(faulty)), []).append(f"`{op}`")
    body = [[", ".join(ops), *cells] for cells, ops in alike.items()]
    return markdown_table(["op", "used", "also right", "right at some sizes only"], body)


def peers(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The implementations that were timed beside each op."""
    cases = [case for result in results.values() for case in result["cases"] if case["median_us"]]
    lines = []
    for op in dict.fromkeys(case["op"] for case in cases):
        names = {case["impl"] for case in cases if case["op"] == op}
        names = names.difference(roofline.BOUNDS, roofline.YARDSTICKS)
        beside = sorted(name for name in names if not name.startswith(OURS))
        lines.append(f"- `{op}`: {'; '.join(beside)}")
    return lines


def against_the_best(result: dict[str, Any]) -> list[str]:
    """Ours with its share of the ceiling, and the best peer; a line for each case, a row for each op, in Markdown."""
    reached = result.get("ceilings")
    ceilings = (
        ""
        if reached is None
        else (f"; copy {reached['copy_tbps']:.2f} TB/s, bf16 product {reached['bf16_tflops']:.0f} TFLOP/s")
    )
    lines = [f"*Commit {commit_and_changes(result)}, {result['date'][:16]}{ceilings}*", ""]
    rows: dict[str, list[str]] = {}
    best = roofline.best_peers(result["cases"])
    for case in result["cases"]:
        if case["impl"] != OURS or not case["median_us"]:
            continue
        peer, share = best.get((case["op"], case["shape"])), case["fraction_of_ceiling"]
        theirs = "no peer ran"
        if peer:
            kernel = f", `{peer['kernel']}`" if peer.get("kernel") else ""
            theirs = f"{peer['impl']}{kernel} {peer['median_us'] / case['median_us']:.2f}x"
        ours = f"{case['median_us']:,.1f} us"
        if case.get("host_us"):
            ours += f" (host {case['host_us']:,.0f})"
        ceiling = "" if share is None else f", {share:.0%}"
        shape = case["shape"].removesuffix(" (cold L2)")
        rows.setdefault(case["op"], []).append(f"{shape}: {ours}{ceiling}; {theirs}")
    head = ["op", "shape: time, share of the ceiling; the fastest peer's time / ours"]
    return [*lines, *markdown_table(head, [[f"`{op}`", "<br>".join(cases)] for op, cases in rows.items()]), ""]


def cost_table(cases: Sequence[dict[str, Any]]) -> list[str]:
    """The cost of whole problems by method, in Markdown, with the columns of the published table."""
    shapes = dict.fromkeys(case["shape"] for case in cases if case["op"] == "end_to_end" and case.get("details"))
    lines = []
    for shape in shapes:
        rows = {case["impl"]: case for case in cases if case["op"] == "end_to_end" and case["shape"] == shape}
        greedy = rows["greedy"]["median_us"]
        costs = []
        for impl, row in rows.items():
            if not row["median_us"] or not greedy:
                continue
            counted = row["details"]
            pool = f"{counted['mean pool']:.1f}" if counted["calls"] else ""
            peak = "" if row["peak_bytes"] is None else f"{(counted['resident bytes'] + row['peak_bytes']) / 1e9:.1f}"
            about = ["FutureBridge" if impl == OURS else impl, f"{counted['calls']}", pool, f"{counted['appended']}"]
            costs.append([*about, f"{row['median_us'] / greedy:.2f}x", peak])
        lines += [*markdown_table([shape, "calls", "mean pool", "appended", "against greedy", "peak GB"], costs), ""]
    return lines


def against_goals(results: Mapping[str, Mapping[str, Any]], device: str) -> str:
    """How many of the goals are met, and how many were not measured."""
    rows = [line.strip("| ").split(" | ") for line in targets.table(results, device)[2:]]
    measured = [row for row in rows if row[1] != "not measured"]
    met, others = sum("met" in row for row in measured), len(rows) - len(measured)
    words = f"{met} of {len(measured)} goals that were measured here are met, {others} are not measured"
    return f"{words}: [all goals](../benchmarks/NOTES.md)."


def of_device(folder: Path) -> list[str]:
    """A device's section."""
    device, check = folder.name, folder / CHECK
    results = {name: result for name, result in read_results(folder).items() if of_its_commit(result)}
    lines = [f"### {device.upper()}", ""]
    if not results and not check.is_file():
        return [*lines, NOTHING.format(device=device.upper()), ""]
    made = {
        f"{result['device']}, driver {result['driver']}, CUDA {result['cuda']}, torch {result['torch']}, triton "
        f"{result['triton']}, commit {commit_and_changes(result)}, {result['date'][:10]}"
        for result in results.values()
    }
    lines += [f"*{'; '.join(sorted(made))}*", ""]
    if check.is_file():
        rows = checked(text := check.read_text())
        ops, sizes = ({tuple(row[name] for name in names) for row in rows} for names in (HEADS[:1], HEADS[:2]))
        right, left = (sum(row["right"] == word for row in rows) for word in ("yes", "not run"))
        lines += [
            f"The check ran {len(ops)} ops at {len(sizes)} sizes, each with all its kernels. {right} results equal the "
            f"definition within rounding, {len(rows) - right - left or 'none'} differ, {left or 'none'} did not run.",
            "",
            *kernels(rows),
            "",
            *(f"- {line.partition(';')[0]}" for line in text.splitlines() if re.match(r"\w+, \w+, .*: ", line)),
            "",
        ]
    for result in results.values():
        lines += against_the_best(result)
    if results:
        lines += ["Timed beside it:", "", *peers(results), "", against_goals(results, device), ""]
    return lines
