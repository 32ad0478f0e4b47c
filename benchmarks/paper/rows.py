"""The long table: one row for every decoded problem of a run and its variants; the tables are groups of these rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from benchmarks.paper import intervals
from benchmarks.paper.comparison import CompareStage, DeploymentStage
from benchmarks.paper.methods import label_of
from benchmarks.paper.published import Published
from benchmarks.paper.tables import PROBLEM, PUBLISHED, TABLES, Plan, Table, Variant, settings_of_variant
from fb_core.apps.pipeline import statistics
from fb_core.apps.pipeline.collect import PolicyStage
from fb_core.apps.pipeline.decode import Row
from fb_core.apps.pipeline.files import Artefact, table_bytes
from fb_core.apps.pipeline.models import frozen_policy
from fb_core.apps.pipeline.statistics import Interval
from fb_core.apps.settings.run import AVERAGE

DEPLOYED = "deployed"  # key of the recipe that the run chose
FIRST = ("greedy", "majority", "random", "slm-preference", "s2t", "direct", "one-token-takeover")
LAST = (DEPLOYED, PUBLISHED, "takeover")  # after all other peers
BY_METHOD = ("methods", "quantiles")  # tables whose rows are methods, in their order
UNSEEN = {
    "TaH": "changes the SLM itself: name a checkpoint under compare.external",
    "TSD-KD": "retrains the SLM itself: name a checkpoint under compare.external",
    "Multiplex Thinking": "retrains the SLM itself: name a checkpoint under compare.external",
}  # peers that exist only as checkpoints


class Decoded(NamedTuple):
    """A decoded problem."""

    run: str  # name of the run's folder
    variant: str  # as `Variant.name`; empty for the methods that are timed
    method: str
    benchmark: str
    seed: int | None  # None for a method that runs once
    loop: str  # "batch", or the loop in which the problem was decoded alone and timed
    problem: str
    verdict: str  # of the verifier
    tokens: int | None  # number of the answer's tokens; None for a method that keeps only a text
    events: int  # number of the steps at which the LLM was asked or a candidate was chosen
    calls: int  # requests to the LLM
    llm_tokens: int  # number of the answer's tokens that the LLM wrote or that were chosen when it was asked
    # positions that the LLM computes if it keeps its cache, the prompt's and those of rejected drafts included
    read: int
    candidates: float | None  # mean number per event
    seconds: float | None  # wall time; None in a batch. `peak_bytes` is peak device memory
    peak_bytes: int | None

    @property
    def correct(self) -> bool:
        """Whether the verdict is "correct"."""
        return self.verdict == "correct"


TEXTS, MEANS = ("run", "variant", "method", "benchmark", "loop", "problem", "verdict"), ("candidates", "seconds")
COLUMNS = {
    name: pa.string() if name in TEXTS else pa.float64() if name in MEANS else pa.int64() for name in Decoded._fields
}


@dataclass(frozen=True)
class Result:
    """A row of a table: a variant's results on one benchmark, or a note that says why there are none.

    Shares lie in 0..1 and their differences in -1..1; intervals are at 95%.
    """

    table: str
    benchmark: str
    key: str  # of the variant; of a method, its name
    label: str
    note: str | None = None
    x: float | None = None  # the value that is varied, if it is a number
    quantile: float | None = None  # the request quantile, if the table varies it; `threshold` is the same in nats
    threshold: float | None = None
    seeds: tuple[int, ...] = ()  # of the rerankers; empty for a method that runs once
    problems: int | None = None  # their number
    accuracy: Interval | None = None
    # paired differences of accuracy to other rows on the same problems at the same quantile, by name
    minus: Mapping[str, Interval] = field(default_factory=dict)
    events: float | None = None  # mean number per problem, like `tokens`, `calls`, `llm_tokens` and `read`
    calls: Interval | None = None
    tokens: float | None = None
    llm_tokens: Interval | None = None
    read: Interval | None = None
    # accuracy minus that of takeover on such a share of the problems (the SLM decodes the rest) that it costs the
    # same number of `llm_tokens`; None for greedy decoding and takeover, the ends of that line
    above_line: Interval | None = None
    above_read_line: Interval | None = None  # likewise at the same number of positions `read`
    published: float | None = None  # the paper's accuracy on that benchmark


@dataclass(frozen=True)
class Timed:
    """The mean cost per problem of a method in one loop."""

    method: str
    key: str
    loop: str
    problems: int
    calls: float
    seconds: float
    pool: float | None = None
    llm_tokens: float | None = None
    relative: Interval | None = None  # its time as a multiple of greedy decoding's
    peak_bytes: float | None = None
    # the paper's figures, by the names that `Published.row` has
    published: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """What the report shows of a run."""

    name: str
    # the models' names, and the numbers of their parameters if known
    pair: Mapping[str, str | int | None] = field(default_factory=dict)
    policy: Mapping[str, float] = field(default_factory=dict)  # the request threshold in nats, its quantile and top_k
    seeds: tuple[int, ...] = ()  # of the rerankers
    rows: tuple[Decoded, ...] = ()  # the long table
    results: tuple[Result, ...] = ()  # the rows of all tables
    timed: tuple[Timed, ...] = ()  # the methods that were timed one problem at a time
    # rows of the other sections by name; a part that was not run is missing
    parts: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    # all, by section; `about` says where and with what the run was made
    settings: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    published: str = "published"  # the head of columns with the paper's figures; `published_costs` that of costs
    published_costs: str = "published"

    def of(self, table: str) -> list[Result]:
        """The rows of one table."""
        rows = [row for row in self.results if row.table == table]
        return in_order(rows) if table in BY_METHOD else rows


def in_order(rows: Iterable[Result]) -> list[Result]:
    """Rows in the order of all tables and figures: by request quantile if it varies, then by method."""
    order = (*FIRST, "peers", *LAST)
    return sorted(rows, key=lambda row: (row.quantile or 0.0, order.index(row.key if row.key in order else "peers")))


def finished(run: Path, stage: str) -> dict[str, Any] | None:
    """The manifest of a finished stage, None if it is not finished."""
    manifest = Artefact(run, stage).manifest()
    return manifest if manifest is not None and manifest["complete"] else None


def variants_of(plan: Plan, tables: Mapping[str, Table]) -> list[Variant]:
    """The variants of some tables and the references, each folder once."""
    every = (*plan.references(), *(row for table in tables.values() for row in table.rows(plan)))
    return list({variant.path: variant for variant in every}.values())


def decoded(plan: Plan, variant: Variant) -> Iterator[Row]:
    """A variant's rows as its stage keeps them, with texts; none if it was not decoded."""
    if finished(plan.run / variant.path, CompareStage.name) is not None:
        yield from CompareStage(settings_of_variant(plan.settings, variant), plan.run / variant.path).rows()


def long_table(plan: Plan, tables: Mapping[str, Table] = TABLES) -> list[Decoded]:
    """The rows of a run: its variants, then its timed methods."""
    rows: list[Decoded] = []
    written: dict[tuple[str, str, str], list[int]] = {}
    for variant in variants_of(plan, tables):
        for row in decoded(plan, variant):
            rows.append(_row(plan, variant.name, row))
            if variant.name in ("direct", "one-token-takeover"):
                written[variant.name, row.benchmark, row.problem] = row.tokens
    if plan.settings.models.llm_server is None:  # a server may round differently from call to call
        for (name, benchmark, problem), tokens in written.items():
            direct = written.get(("direct", benchmark, problem))
            assert name == "direct" or direct in (None, tokens), "the LLM's argmax is in the joint pool"
    if finished(plan.run, DeploymentStage.name) is not None:
        rows += [_row(plan, "", row) for row in DeploymentStage(plan.settings, plan.run).rows()]
    return rows


def _row(plan: Plan, variant: str, row: Row) -> Decoded:
    own = {name: getattr(row, name) for name in Decoded._fields if name in Row.model_fields}
    own |= {"events": len(row.events), "llm_tokens": row.llm_tokens, "candidates": row.pool}
    own["tokens"] = None if row.method == "majority" else len(row.tokens)  # its samples are not kept
    return Decoded(run=plan.run.name, variant=variant, **own)


def rows_bytes(rows: Sequence[Decoded]) -> bytes:
    """The long table as Parquet."""
    return table_bytes([row._asdict() for row in rows], COLUMNS)


class _Group:
    """The rows of one variant, by benchmark and problem, each with one row per seed."""

    def __init__(self, rows: Sequence[Decoded]) -> None:
        self.seeded = any(row.seed is not None for row in rows)
        self.problems: dict[str, dict[str, list[Decoded]]] = {}
        for row in rows:
            self.problems.setdefault(row.benchmark, {}).setdefault(row.problem, []).append(row)

    def column(
        self, name: str, benchmarks: Sequence[str], like: Mapping[str, Iterable[str]] | None = None
    ) -> list[list[list[float]]]:
        """For every benchmark a value per problem and seed; the problems of `like`, in its order, if given."""
        wanted = like or self.problems
        return [
            [[float(getattr(row, name)) for row in self.problems[benchmark][problem]] for problem in wanted[benchmark]]
            for benchmark in benchmarks
        ]

    def mean(self, name: str, benchmarks: Sequence[str]) -> float | None:
        """The average of the benchmarks' means; None if a row has no value."""
        runs = [runs for benchmark in benchmarks for runs in self.problems[benchmark].values()]
        if any(getattr(row, name) is None for rows in runs for row in rows):
            return None
        return float(np.mean([np.mean(values) for values in self.column(name, benchmarks)]))


def results(plan: Plan, rows: Sequence[Decoded], tables: Mapping[str, Table] = TABLES) -> Iterator[Result]:
    """The rows of all tables of which a variant was tried, one per benchmark and one of the average if several."""
    names = plan.settings.evaluate.benchmarks
    benchmarks = {name: (name,) for name in names} | ({AVERAGE: names} if len(names) > 1 else {})
    by_variant: dict[str, list[Decoded]] = {}
    for row in rows:
        if row.variant:
            by_variant.setdefault(row.variant, []).append(row)
    groups = {name: _Group(own) for name, own in by_variant.items()}
    paper = Published(plan.settings)

    @cache
    def accuracy(members: tuple[str, ...], name: str, other: str | None = None) -> Interval:
        own = groups[name]
        if other is None:
            return statistics.average_interval(own.column("correct", members))
        theirs = groups[other]
        assert all(own.problems[benchmark].keys() == theirs.problems[benchmark].keys() for benchmark in members)
        return statistics.average_interval(
            own.column("correct", members), theirs.column("correct", members, own.problems)
        )

    @cache
    def above_line(members: tuple[str, ...], name: str, takeover: str, cost: str) -> Interval | None:
        if name in ("greedy", takeover) or "greedy" not in groups or takeover not in groups:
            return None
        own, least, most = (groups[key] for key in (name, "greedy", takeover))
        if not most.mean(cost, members):
            return None  # takeover never called the LLM
        columns = (own, "correct"), (own, cost), (least, "correct"), (most, "correct"), (most, cost)
        return intervals.above_line_interval(*(group.column(column, members) for group, column in columns))

    def result(table: Table, variant: Variant, benchmark: str, members: tuple[str, ...]) -> Result:
        about: dict[str, Any] = {"key": variant.key, "label": variant.label, "x": variant.x}
        about["published"] = paper.accuracy(table.name, variant.key, variant.x, benchmark)
        if table.name == "quantiles":
            folder = plan.run if variant.state_source is None else plan.run / variant.state_source.path
            has_policy = finished(folder, PolicyStage.name) is not None
            about |= {"quantile": variant.x, "threshold": frozen_policy(folder).threshold if has_policy else None}
        if (own := groups.get(variant.name)) is None:
            return Result(table.name, benchmark, **about, note=why_not(plan.run, variant) or "not run")
        others = {name: other for name, other in _compared(plan, table, variant).items() if other in groups}
        takeover = Variant("takeover", "", inside=variant.state_source).name
        return Result(
            table.name,
            benchmark,
            **about,
            seeds=plan.settings.train.seeds if own.seeded else (),
            problems=sum(len(own.problems[name]) for name in members),
            accuracy=accuracy(members, variant.name),
            minus={
                name: accuracy(members, variant.name, other) for name, other in others.items() if other != variant.name
            },
            events=own.mean("events", members),
            calls=statistics.average_interval(own.column("calls", members)),
            tokens=own.mean("tokens", members),
            llm_tokens=statistics.average_interval(own.column("llm_tokens", members)),
            read=statistics.average_interval(own.column("read", members)),
            above_line=above_line(members, variant.name, takeover, "llm_tokens"),
            above_read_line=above_line(members, variant.name, takeover, "read"),
        )

    for table in tables.values():
        variants = table.rows(plan)
        if any(variant.name in groups or why_not(plan.run, variant) for variant in variants if not variant.borrowed):
            for variant in variants:
                yield from (result(table, variant, name, members) for name, members in benchmarks.items())
            if table.name == "methods":
                unseen = {peer: why for peer, why in UNSEEN.items() if peer not in plan.settings.compare.external}
                for peer, why in unseen.items():
                    for name in benchmarks:
                        figure = paper.accuracy("methods", peer, None, name)
                        yield Result("methods", name, peer, peer, why, published=figure)


def _compared(plan: Plan, table: Table, variant: Variant) -> dict[str, str]:
    """The variants that a row is compared with, by name: references at its own quantile, rows of its table."""
    source, keys = variant.state_source, {row.key: row.name for row in table.rows(plan)}
    compared = {
        row.key: row.name if source is None or row.key == "greedy" else replace(row, inside=source).name
        for row in plan.references()
    }
    return compared | {row.name: keys[row.key] for row in table.beside if not row.of or variant.key in row.of}


def why_not(run: Path, variant: Variant) -> str | None:
    """Why a variant could not be made; None if it could."""
    path = run / variant.path / PROBLEM
    return json.loads(path.read_text())["problem"] if path.is_file() else None


def timed(plan: Plan, rows: Sequence[Decoded]) -> list[Timed]:
    """One row per method and loop of the timed problems, with its time beside greedy decoding's in the same loop."""
    groups: dict[tuple[str, str], list[Decoded]] = {}
    for row in rows:
        if not row.variant:
            groups.setdefault((row.method, row.loop), []).append(row)
    seconds = {key: [row.seconds or 0.0 for row in own] for key, own in groups.items()}
    return [
        Timed(
            label_of(name, plan.settings),
            name,
            loop,
            len(own),
            calls=float(np.mean([row.calls for row in own])),
            seconds=float(np.mean(seconds[name, loop])),
            pool=_mean(row.candidates for row in own),
            llm_tokens=_mean(row.llm_tokens for row in own),
            relative=intervals.ratio_interval(seconds[name, loop], greedy) if greedy else None,
            peak_bytes=max((row.peak_bytes for row in own if row.peak_bytes is not None), default=None),
        )
        for (name, loop), own in groups.items()
        for greedy in [seconds.get(("greedy", loop))]
    ]


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None


_RUNS = TypeAdapter(tuple[Run, ...])
BRIEF = ("name", "pair", "policy", "seeds")
KEPT = ("agreement", "coverage")  # parts that other pages quote


def tables_bytes(runs: Sequence[Run]) -> bytes:
    """The tables of runs as JSON, a row on each line and rounded: enough for tables and figures of other pages."""
    written = []
    for run in runs:
        members = [", ".join(f'"{name}": {_line(getattr(run, name))}' for name in BRIEF)]
        members += [_list(name, rows) for name in ("timed", "results") if (rows := getattr(run, name))]
        if parts := [_list(name, run.parts[name]) for name in KEPT if name in run.parts]:
            members.append('"parts": {' + ",\n".join(parts) + "}")
        written.append("{" + ",\n".join(members) + "}")
    return "[\n{}\n]\n".format(",\n".join(written)).encode()


def _list(name: str, rows: Iterable[Any]) -> str:
    return f'"{name}": [\n' + ",\n".join(map(_line, rows)) + "\n]"


def _line(value: Any) -> str:
    if isinstance(value, Result | Timed):
        value = {name: part for name, part in asdict(value).items() if part not in (None, (), {})}
    return json.dumps(
        json.loads(json.dumps(value, allow_nan=False), parse_float=lambda digits: round(float(digits), 6))
    )


def read_tables(path: Path) -> tuple[Run, ...]:
    """The tables of runs, as `tables_bytes` wrote them; a damaged file is a ValueError that names the place."""
    try:
        return _RUNS.validate_json(path.read_bytes())
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        got = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise ValueError(f"{path}: expected tables of a report, got {got}; write the report again") from None
