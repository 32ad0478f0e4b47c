"""The results of a run's variants on the benchmarks: the rows of all tables; each interval is resampled only once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper import intervals
from benchmarks.paper.comparison import CompareStage
from benchmarks.paper.report.findings import DEPLOYED, OURS, Result
from benchmarks.paper.run import PROBLEM
from benchmarks.paper.tables import TABLES, Plan, Table, Variant
from benchmarks.paper.variants import settings_of_variant
from fb_core import statistics
from fb_core.config import AVERAGE
from fb_core.stages.artefacts import Artefact
from fb_core.stages.decode import Row
from fb_core.stages.deploy import frozen_policy
from fb_core.stages.states import PolicyStage
from fb_core.statistics import Interval

UNSEEN = {
    "TaH": "changes the SLM itself: name a checkpoint under compare.external",
    "TSD-KD": "retrains the SLM itself: name a checkpoint under compare.external",
    "Multiplex Thinking": "retrains the SLM itself: name a checkpoint under compare.external",
}  # peers that exist only as checkpoints


def finished(run: Path, stage: str) -> dict[str, Any] | None:
    """The manifest of a finished stage, None if it is not finished."""
    manifest = Artefact(run, stage).manifest()
    return manifest if manifest is not None and manifest["complete"] else None


@dataclass(frozen=True)
class _Decoded:
    """One variant's results on the benchmarks."""

    outcomes: dict[str, dict[str, float]]  # share of right runs, by benchmark and problem
    llm_tokens: dict[str, dict[str, float]]  # mean over runs, by benchmark and problem
    calls: dict[str, dict[str, float]]  # likewise
    means: dict[str, dict[str, float]]  # by field of `Result` and benchmark
    written: dict[tuple[str, str, int | None], list[int]]  # token ids by benchmark, problem and seed


class Results:
    """The rows of tables of a run, read from its variants' folders.

    Args:
        plan: of the run.
        tables: by name.
    """

    def __init__(self, plan: Plan, tables: Mapping[str, Table] = TABLES) -> None:
        self._tables, self._plan, names = tables, plan, plan.settings.evaluate.benchmarks
        self._benchmarks = {name: (name,) for name in names} | ({AVERAGE: names} if len(names) > 1 else {})
        self._references = {variant.key: variant for variant in plan.references()}
        self._variants = {name: table.rows(plan) for name, table in tables.items()}
        everything = (*self._references.values(), *(row for rows in self._variants.values() for row in rows))
        self._decoded = {variant.path: _decoded(plan, variant) for variant in everything}
        self._interval = cache(self._resampled)
        self._distance = cache(self._above_line)
        if plan.settings.models.llm_server is None:  # a server may round differently from call to call
            direct, one_token = (self._decoded.get(Variant(key, "").path) for key in ("direct", "one-token-takeover"))
            if direct is not None and one_token is not None:
                assert direct.written == one_token.written, "the LLM's argmax is in the joint pool"

    def rows(self) -> Iterator[Result]:
        """The rows of all tables of which a variant was tried, one per benchmark and one of the average if several."""
        for name, table in self._tables.items():
            variants = self._variants[name]
            tried = (variant for variant in variants if not variant.borrowed)
            if not any(self._decoded[variant.path] or _problem(self._plan.run, variant) for variant in tried):
                continue
            for variant in variants:
                yield from self._rows(name, variant, self._compared(table, variant))
            if table is TABLES["methods"]:
                unseen = {peer: why for peer, why in UNSEEN.items() if peer not in self._plan.settings.compare.external}
                for peer, why in unseen.items():
                    for benchmark in self._plan.settings.evaluate.benchmarks:
                        yield Result(table=name, benchmark=benchmark, key=peer, label=peer, note=why)

    def _compared(self, table: Table, variant: Variant) -> dict[str, Path]:
        """The folders of what a row is compared with, by name: references at its own quantile, rows of its table."""
        place = variant.place
        compared = {
            key: reference.path if place is None or key == "greedy" else replace(reference, inside=place).path
            for key, reference in self._references.items()
        }
        paths = {other.key: other.path for other in self._variants[table.name]}
        return compared | {one.name: paths[one.key] for one in table.beside if not one.of or variant.key in one.of}

    def _rows(self, table: str, variant: Variant, compared: Mapping[str, Path]) -> Iterator[Result]:
        """A variant's row for every benchmark."""
        found, settings = self._decoded[variant.path], self._plan.settings
        about: dict[str, Any] = {"table": table, "key": variant.key, "label": variant.label, "x": variant.x}
        about["ours"] = variant.key in (OURS, DEPLOYED)
        if table == "quantiles":
            place = self._plan.run if variant.place is None else self._plan.run / variant.place.path
            known = finished(place, PolicyStage.name) is not None
            about |= {"quantile": variant.x, "threshold": frozen_policy(place).threshold if known else None}
        for benchmark, members in self._benchmarks.items():
            if found is None:
                note = _problem(self._plan.run, variant) or "not run"
                yield Result(**about, benchmark=benchmark, note=note)
                continue
            others = {name: path for name, path in compared.items() if self._decoded[path] and path != variant.path}
            means = {field: float(np.mean([by[name] for name in members])) for field, by in found.means.items()}
            yield Result(
                **about | means,
                benchmark=benchmark,
                seeds=settings.train.seeds if {seed for *_, seed in found.written} - {None} else (),
                problems=sum(len(found.outcomes[name]) for name in members),
                accuracy=self._interval(members, variant.path),
                minus={name: self._interval(members, variant.path, path) for name, path in others.items()},
                llm_tokens=statistics.average_interval([list(found.llm_tokens[name].values()) for name in members]),
                calls=statistics.average_interval([list(found.calls[name].values()) for name in members]),
                above_line=self._distance(
                    members,
                    variant.path,
                    Variant("takeover", "", inside=variant.place).path,  # at its own quantile
                ),
            )

    def _resampled(self, benchmarks: tuple[str, ...], path: Path, other: Path | None = None) -> Interval:
        """The interval of a variant's accuracy, or of its paired difference to another variant's."""
        found, beside = self._decoded[path], None if other is None else self._decoded[other]
        assert found is not None
        own = [found.outcomes[name] for name in benchmarks]
        values = [list(one.values()) for one in own]
        if beside is None:
            return statistics.average_interval(values)
        theirs = [beside.outcomes[name] for name in benchmarks]
        assert [one.keys() for one in own] == [one.keys() for one in theirs]
        paired = [[other[problem] for problem in one] for one, other in zip(own, theirs, strict=True)]
        return statistics.average_interval(values, paired)

    def _above_line(self, benchmarks: tuple[str, ...], path: Path, takeover_path: Path) -> Interval | None:
        """How far a variant is above the line from greedy decoding to takeover, if that is known."""
        greedy_path = self._references["greedy"].path
        own, greedy, takeover = (self._decoded.get(one) for one in (path, greedy_path, takeover_path))
        if own is None or greedy is None or takeover is None or path in (greedy_path, takeover_path):
            return None
        if not any(sum(takeover.llm_tokens[name].values()) for name in benchmarks):
            return None  # takeover never called the LLM
        columns = (own.outcomes, own.llm_tokens, greedy.outcomes, takeover.outcomes, takeover.llm_tokens)
        return intervals.above_line_interval(
            *([[column[name][problem] for problem in own.outcomes[name]] for name in benchmarks] for column in columns)
        )


def _decoded(plan: Plan, variant: Variant) -> _Decoded | None:
    """A variant's results on the benchmarks, None if it was not tried."""
    if finished(plan.run / variant.path, CompareStage.name) is None:
        return None
    outcomes: dict[str, dict[str, list[bool]]] = {}
    llm_tokens: dict[str, dict[str, list[int]]] = {}
    calls: dict[str, dict[str, list[int]]] = {}
    counts: dict[str, dict[str, list[int]]] = {}
    written = {}
    for row in CompareStage(settings_of_variant(plan.settings, variant), plan.run / variant.path).rows():
        outcomes.setdefault(row.benchmark, {}).setdefault(row.problem, []).append(row.correct)
        llm_tokens.setdefault(row.benchmark, {}).setdefault(row.problem, []).append(row.llm_tokens)
        calls.setdefault(row.benchmark, {}).setdefault(row.problem, []).append(row.calls)
        for name, value in _counted(row).items():
            counts.setdefault(name, {}).setdefault(row.benchmark, []).append(value)
        written[row.benchmark, row.problem, row.seed] = row.tokens
    if variant.method == "majority":  # its samples are not kept
        del counts["tokens"]
    return _Decoded(
        {name: _means(found) for name, found in outcomes.items()},
        {name: _means(found) for name, found in llm_tokens.items()},
        {name: _means(found) for name, found in calls.items()},
        {field: _means(found) for field, found in counts.items()},
        written,
    )


def _means(counts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: float(np.mean(found)) for name, found in counts.items()}


def _counted(row: Row) -> dict[str, int]:
    """What decoding a problem took, by field of `Result`."""
    return {"events": len(row.events), "tokens": len(row.tokens)}


def _problem(run: Path, variant: Variant) -> str | None:
    """Why a variant could not be made; None if it could."""
    path = run / variant.path / PROBLEM
    return json.loads(path.read_text())["problem"] if path.is_file() else None
