"""Predicted and measured times of tiles with products: `python -m benchmarks.gpu.aot.measured [FOLDER]`.

Of the attention cases in file order every other one, from the first, fits the three constants of `executed.py`. All
others and the head check them: it fails where one is further off than WITHIN.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.aot import branch_attention, linear_logprob
from benchmarks.gpu.aot.compiler import ARCHITECTURES, Case, compiled, launches
from benchmarks.gpu.aot.executed import EXPOSED, LAUNCH_US, TILE_US, Executed, cycles_per_us, executed, rounds
from benchmarks.harness import OURS, read_results

HOPPER = next(arch for arch in ARCHITECTURES if arch.name == "sm_90")
WITHIN = 0.15
HEAD = ("1664", "8192")  # rows; fewer are bound by the weight's bytes


@dataclass(frozen=True)
class Row:
    """A measured case and what the model makes of it."""

    case: str
    fitted: bool
    measured_us: float
    predicted_us: float
    terms: tuple[float, ...]  # what each constant is multiplied by, and the rest, in microseconds

    @property
    def off(self) -> float:
        return self.predicted_us / self.measured_us - 1


def of_shape(op: str, shape: str) -> Case | None:
    """The launches of a measured case, if it has tiles that are predicted."""
    size = dict(re.findall(r"\b([A-Z])=(\d+)", shape))
    if op == "branch_attention" and size.get("L") == "128" and "cold" in shape:
        group = [128] * int(size["K"]), int(size["P"])
        return branch_attention.case([group] * int(size["G"]), shape)
    if op == "linear_logprob" and size["N"] in HEAD:
        return linear_logprob.case(int(size["N"]), int(size["V"]), int(size["D"]), torch.bfloat16, "fused")
    return None


def rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """Every measured case with its prediction at the matrix rate of that run."""
    counts: dict[str, Executed] = {}
    for result in (results["branch_attention"], results["linear_logprob"]):
        arch = replace(HOPPER, tflops=result["ceilings"]["bf16_tflops"])
        fitted = False
        for measured in result["cases"]:
            if measured["impl"] != OURS or (case := of_shape(measured["op"], measured["shape"])) is None:
                continue
            launch = next(each for each in launches(case, arch) if each.tile)
            tile, cost, made = launch.tile, case.costs[launch.name], compiled(launch, "aligned")
            assert tile
            assert tile.run
            if launch.name not in counts:
                counts[launch.name] = executed(launch.name, made.instructions, tile.run)
            found = counts[launch.name]
            fitted = case.op == "branch_attention" and not fitted
            predicted = found.predicted(made, tile, cost, arch).predicted_us
            assert predicted is not None
            products, inside, beside = found.shares(tile)
            cycles = (beside + inside * (not tile.overlaps), products)
            each = rounds(tile, cost, arch)
            terms = (1.0, each, *(each * count / cycles_per_us(arch) for count in cycles))
            yield Row(f"{case.op} {measured['shape']}", fitted, measured["median_us"], predicted, terms)


def fit(found: Sequence[Row]) -> tuple[float, ...]:
    """The three constants that make the squares of the fitted cases' relative errors smallest."""
    chosen = [row for row in found if row.fitted]
    by = torch.tensor([[term / row.measured_us for term in row.terms] for row in chosen], dtype=torch.float64)
    return tuple(torch.linalg.lstsq(by[:, :3], 1 - by[:, 3:]).solution[:, 0].tolist())


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    found = list(rows(read_results(Path(arguments[0] if arguments else "benchmarks/results/h100"))))
    print("| case | used to | measured, us | predicted, us | off |", "|---|---|---|---|---|", sep="\n")
    for row in found:
        print(
            f"| {row.case} | {'fit' if row.fitted else 'check'} | {row.measured_us:,.0f} | {row.predicted_us:,.0f} "
            f"| {row.off:+.1%} |"
        )
    shown = zip(("a launch", "a round", "exposed"), (LAUNCH_US, TILE_US, EXPOSED), fit(found), strict=True)
    print("; ".join(f"{name} {used:.3g} (the fit: {fitted:.3g})" for name, used, fitted in shown))
    wrong = [row.case for row in found if not row.fitted and abs(row.off) > WITHIN]
    sys.exit(f"further off than {WITHIN:.0%}: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
