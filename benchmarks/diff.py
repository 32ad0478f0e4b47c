"""New results beside the committed ones of the same kind of machine: red where a ratio to a peer fell by a tenth.

A machine is not equally fast at all times. A ratio to a peer, measured in turns with ours, depends on that less.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import command
from benchmarks.harness import OURS, ROOT, device_name, read_results

LOST = 0.9  # of a ratio: below it the comparison is red


def ratios(result: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """{(case, peer): the peer's median over ours} of a file."""
    times = {(row["op"], row["shape"], row["impl"]): row.get("median_us") for row in result["cases"]}
    return {
        (f"{op}: {shape}", impl): time / ours
        for (op, shape, impl), time in times.items()
        if impl.partition(",")[0] != OURS and time and (ours := times.get((op, shape, OURS)))
    }


def kind(result: Mapping[str, Any]) -> str:
    """The kind of machine, in words; older files do not say which instructions it knows."""
    return ", ".join((result["device"], *result.get("isa", ())))


def main(
    new: Annotated[Path, typer.Argument(help="Folder with new results, as `--write-results` takes it.")],
    committed: Annotated[Path, typer.Argument(help="That of the earlier ones.")] = ROOT / "benchmarks" / "results",
) -> None:
    """Print each ratio that two runs on this device have, the largest loss first; fail if one has lost a tenth."""
    found, earlier = list[tuple[float, str]](), read_results(committed / device_name())
    for name, after in read_results(new / device_name()).items():
        before = earlier.get(name)
        if before is None or kind(before) not in (kind(after), after["device"]):
            print(f"{name}: no committed file of {kind(after)}, but {'none' if before is None else kind(before)}")
            continue
        known, measured = ratios(before), ratios(after)
        if absent := len(known.keys() - measured.keys()):
            print(f"{name}: {absent} of {len(known)} committed ratios were not measured")
        for case, peer in known.keys() & measured.keys():
            old, new_ratio = known[case, peer], measured[case, peer]
            found.append((new_ratio / old, f"{old:.2f}x -> {new_ratio:.2f}x  {peer}  {case}"))
    for kept, words in sorted(found):
        print(f"{'LOST' if kept < LOST else '':4} {kept - 1:+7.1%}  {words}")
    lost = sum(kept < LOST for kept, _ in found)
    if not found:
        print("nothing to compare")
    if lost:
        raise SystemExit(f"{lost} of {len(found)} ratios have lost more than {1 - LOST:.0%}")


if __name__ == "__main__":
    command.run(main, "benchmarks.diff build/bench")
