"""`python -m benchmarks.aot [OP ...] [--arch sm_90 ...] [--quick] [--json]`: compile, a row each, fail on a fault."""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module

import benchmarks.aot
from benchmarks.aot.compiler import ARCHITECTURES, Compiled, Launch, compiled, every_variant, launches, representative

OPS = sorted({module.name for module in pkgutil.iter_modules(benchmarks.aot.__path__)} - {"compiler", "__main__"})


def launched(ops: list[str], archs: list[str]) -> Iterator[Launch]:
    for op in ops:
        for case in import_module(f"benchmarks.aot.{op}").cases():
            for arch in ARCHITECTURES:
                if arch.name in archs:
                    yield from launches(case, arch)


def line(row: Compiled) -> str:
    predicted = "" if row.predicted_us is None else f"{row.predicted_us:9.2f}"
    return (
        f"{row.kernel:<44} {row.shape:<44} {row.arch:<7}{row.variant:<10}{row.warps:>5}{row.stages:>7}{row.grid:>8}"
        f"{row.registers:>6}{row.stack:>6}{row.spills:>7}{row.shared:>8}{row.hgmma:>6}{predicted:>10}"
        + "".join(f"  FAULT {fault}" for fault in row.faults)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"all by default: {', '.join(OPS)}")
    parser.add_argument("--arch", nargs="*", default=[arch.name for arch in ARCHITECTURES])
    parser.add_argument("--quick", action="store_true", help="what shows a constant or a type for the first time")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    unknown = set(options.ops) - set(OPS)
    if unknown:
        parser.error(f"op: expected some of {', '.join(OPS)}, got {', '.join(sorted(unknown))}")
    if not options.json:
        print(
            f"{'kernel':<44} {'shape':<44} {'arch':<7}{'variant':<10}{'warps':>5}{'stages':>7}{'grid':>8}{'regs':>6}"
            f"{'stack':>6}{'spills':>7}{'shared':>8}{'hgmma':>6}{'pred. us':>10}"
        )
    count = faults = 0
    chosen = representative if options.quick else every_variant
    for row in (compiled(*pair) for pair in chosen(launched(options.ops or OPS, options.arch))):
        count, faults = count + 1, faults + bool(row.faults)
        print(json.dumps(asdict(row)) if options.json else line(row), flush=True)
    if not options.json:
        print(f"{count} compiled, {faults} with a fault")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
