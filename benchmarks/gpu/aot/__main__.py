"""`python -m benchmarks.gpu.aot [OP ...] [--arch sm_90 ...] [--quick] [--json] [--list]`: compile, a row each.

It fails on a fault. A kernel with more instructions per key or logit than instructions.json allows is faulty too;
`--record` rewrites that file. With `--executed`, kernels that have a target are executed at small sizes, and their
times predicted from that.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import triton

from benchmarks.gpu.aot import calls
from benchmarks.gpu.aot.compiler import (
    ARCHITECTURES,
    Compiled,
    Launch,
    compiled,
    every_variant,
    launches,
    representative,
)
from benchmarks.gpu.aot.executed import executed

TABLE = Path(__file__).with_name("instructions.json")
OPS = calls.ops()


def launched(ops: list[str], archs: list[str]) -> Iterator[Launch]:
    for op in ops:
        for case in calls.cases(op):
            for arch in ARCHITECTURES:
                if arch.name in archs:
                    yield from launches(case, arch)


def key(row: Compiled) -> str:
    return f"{row.kernel} {row.shape} {row.variant}"


def gated(row: Compiled, most: Mapping[str, float]) -> Compiled:
    """The row, with a fault where it has more instructions than the table allows."""
    allowed = most.get(key(row), math.inf)
    if row.per_unit is None or row.per_unit <= allowed:
        return row
    return replace(row, faults=(*row.faults, f"{row.per_unit:.2f} instructions a unit, above {allowed:.2f}"))


def line(row: Compiled) -> str:
    predicted = "" if row.predicted_us is None else f"{row.predicted_us:9.2f}"
    loop, after = ("/".join(map(str, row.loop)), row.epilogue) if row.hgmma else ("", "")
    per_unit = "" if row.per_unit is None else f"{row.per_unit:.1f}"
    rate = "" if row.of_rate is None else f"{row.of_rate:.0%}"
    target = "" if row.target is None else f"{row.target:.0%}"
    return (
        f"{row.kernel:<44} {row.shape:<44} {row.arch:<7}{row.variant:<10}{row.warps:>5}{row.stages:>7}{row.grid:>8}"
        f"{row.registers:>6}{row.stack:>6}{row.spills:>7}{row.shared:>8}{row.hgmma:>6}{loop:>15}{after:>6}{per_unit:>7}"
        f"{predicted:>10}{rate:>6}{target:>7}" + "".join(f"  FAULT {fault}" for fault in row.faults)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"all by default: {', '.join(OPS)}")
    parser.add_argument("--arch", nargs="*", default=[arch.name for arch in ARCHITECTURES])
    parser.add_argument("--quick", action="store_true", help="what shows a constant or a type for the first time")
    parser.add_argument("--record", action="store_true", help=f"write {TABLE.name} from all rows that it is about")
    parser.add_argument("--executed", action="store_true", help="predict from executed instructions; takes minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--list", action="store_true", help="only print the ops")
    options = parser.parse_args()
    if options.list:
        print(*OPS)
        return
    unknown = set(options.ops) - set(OPS)
    if unknown:
        parser.error(f"op: expected some of {', '.join(OPS)}, got {', '.join(sorted(unknown))}")
    if not options.json:
        print(
            f"{'kernel':<44} {'shape':<44} {'arch':<7}{'variant':<10}{'warps':>5}{'stages':>7}{'grid':>8}{'regs':>6}"
            f"{'stack':>6}{'spills':>7}{'shared':>8}{'hgmma':>6}{'loop':>15}{'after':>6}{'each':>7}{'pred. us':>10}"
            f"{'rate':>6}{'target':>7}"
        )
    count = faults = 0
    missed, per_unit = [], {}
    table = {} if options.record else json.loads(TABLE.read_text(encoding="utf-8"))
    most = table["most"] if table.get("triton") == triton.__version__ else {}  # other compilers give other counts
    chosen = representative if options.quick else every_variant
    for launch, variant in chosen(launched(options.ops or OPS, options.arch)):
        row, note = gated(compiled(launch, variant), most), ""
        if options.executed and variant == "aligned" and row.target and (tile := launch.tile) and tile.run:
            counts = executed(launch.name, row.instructions, tile.run)
            note = f"  {counts}; without: {row.predicted_us:.2f} us, {row.of_rate:.0%}"
            row = counts.predicted(row, tile, launch.case.costs[launch.name], launch.arch)
        if row.per_unit is not None:
            per_unit[key(row)] = math.ceil(100 * row.per_unit) / 100
        count, faults = count + 1, faults + bool(row.faults)
        if row.of_rate is not None and row.target is not None and row.of_rate < row.target:
            missed.append(f"{key(row)}: {row.of_rate:.0%} predicted, {row.target:.0%} wanted")
        print(json.dumps(asdict(row)) if options.json else line(row), flush=True)
        if note and not options.json:
            print(note, flush=True)
    if not options.json:
        print(*(f"target missed: {target}" for target in missed), sep="\n")
        print(f"{count} compiled, {faults} with a fault")
    if options.record:
        TABLE.write_text(
            json.dumps({"triton": triton.__version__, "most": per_unit}, indent=1) + "\n", encoding="utf-8"
        )
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
