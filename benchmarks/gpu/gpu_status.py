"""The page docs/gpu_status.md: what ran on which GPU and what did not, from the committed result files."""

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
    """Each op's kernels: at how many of their sizes they are right, and at how many they are the one that is used."""
    by_op: dict[str, dict[str, list[Mapping[str, str]]]] = {}
    for row in rows:
        by_op.setdefault(row["op"], {}).setdefault(row["kernel"], []).append(row)
    kinds = list(dict.fromkeys(row["kernel"] for row in rows))

    def cell(sizes: Sequence[Mapping[str, str]]) -> str:
        right, used = (sum(row[name] == "yes" for row in sizes) for name in ("right", "used"))
        return f"right at {right} of {len(sizes)}{f', used at {used}' if used else ''}" if sizes else ""

    body = [[f"`{op}`", *(cell(kernels.get(kind, [])) for kind in kinds)] for op, kernels in by_op.items()]
    return markdown_table(["op", *(NAMES.get(kind, kind) for kind in kinds)], body)


def timed(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What was timed, with the kernels that ran and the implementations beside it."""
    cases = [case for result in results.values() for case in result["cases"]]
    body = []
    for op in dict.fromkeys(case["op"] for case in cases):
        measured = [case for case in cases if case["op"] == op and case["median_us"]]
        own = [case for case in measured if case["impl"] == OURS]
        ran = sorted({case.get("backend", "") for case in own})
        peers = {case["impl"] for case in measured}.difference(roofline.BOUNDS, roofline.YARDSTICKS)
        beside = sorted(peer for peer in peers if not peer.startswith(OURS))
        body.append([f"`{op}`", str(len(own)), "; ".join(ran), "; ".join(beside)])
    return markdown_table(["what", "shapes", "kernels that ran", "timed beside it"], body)


def against_the_best(result: dict[str, Any]) -> list[str]:
    """Ours with its share of the ceiling, and the best peer; one line per case, in Markdown."""
    reached, ceilings = result.get("ceilings"), ""
    if reached is not None:
        ceilings = f"; copy {reached['copy_tbps']:.2f} TB/s, bf16 product {reached['bf16_tflops']:.0f} TFLOP/s"
    best, rows = roofline.best_peers(result["cases"]), []
    for case in result["cases"]:
        if case["impl"] != OURS or not case["median_us"]:
            continue
        peer, share = best.get((case["op"], case["shape"])), case["fraction_of_ceiling"]
        theirs = ["none ran", ""]
        if peer:
            kernel = f", `{peer['kernel']}`" if peer.get("kernel") else ""
            theirs = [f"{peer['impl']}{kernel}", f"{peer['median_us'] / case['median_us']:.2f}x"]
        ceiling, ours = "" if share is None else f"{share:.0%}", f"{case['median_us']:,.1f}"
        if case.get("host_us"):
            ours += f" (host {case['host_us']:,.0f})"
        rows.append([f"`{case['op']}`", case["shape"], case.get("backend", ""), ours, ceiling, *theirs])
    head = ["op", "shape", "ran", "ours, us", "of the ceiling", "best peer", "its time / ours"]
    return [
        f"*{result['device']}, torch {result['torch']}, triton {result['triton']}, commit "
        f"{commit_and_changes(result)}, {result['date']}{ceilings}*",
        "",
        *markdown_table(head, rows),
        "",
    ]


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


def missing(results: Mapping[str, Mapping[str, Any]], device: str) -> list[str]:
    """The library's targets of which the device has no measurement."""
    rows = [line.split(" | ") for line in targets.table(results, device)[2:]]
    return [f"- {row[0].removeprefix('| ')}" for row in rows if row[1] == "not measured"]


def of_device(folder: Path) -> list[str]:
    """A device's section."""
    device, check = folder.name, folder / CHECK
    results = {name: result for name, result in read_results(folder).items() if of_its_commit(result)}
    lines = [f"## {device.upper()}", ""]
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
            "### Is every kernel right?",
            "",
            f"The check ran {len(ops)} ops at {len(sizes)} sizes, each with all its kernels. {right} results equal the "
            f"definition within rounding, {len(rows) - right - left or 'none'} differ, {left or 'none'} did not run.",
            "",
            *kernels(rows),
            "",
            *(f"- {line.partition(';')[0]}" for line in text.splitlines() if re.match(r"\w+, \w+, .*: ", line)),
            "",
        ]
    lines += ["### Timed", "", *timed(results), "", "[The times](benchmarks.md#measurements)", ""]
    if absent := missing(results, device):
        lines += ["### Not measured", "", *absent, ""]
    return lines


def page(results: Path) -> list[str]:
    """A section for each device that has targets, those with results first."""
    sections = sorted((of_device(results / device) for device in targets.SLOWER), key=len, reverse=True)
    return [line for section in sections for line in section]
