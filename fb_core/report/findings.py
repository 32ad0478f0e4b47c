"""What a run found: checked plain values of which a report is made, read and written as JSON without any model code.

Shares and differences of shares lie in 0..1 (-1..1), with the ends of their 95% intervals. A section that is None was
not run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fb_core.statistics import Interval

OURS = "futurebridge"  # key of the run's own reranker
DEPLOYED = "deployed"  # key of the row by the recipe that the run chose
FIRST = ("greedy", "majority", "random", "slm-preference", "s2t", "direct", "one-token-takeover")
LAST = (OURS, "recipes", DEPLOYED, "takeover")  # behind all other peers; "recipes" are the others of FutureBridge
LISTED = 10  # problems of a kind
BY_METHOD = ("methods", "repairs", "quantiles")  # tables whose rows are methods, in their order


class _Values(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")


class Pair(_Values):
    """The two models; the hash is of the SLM's weights."""

    slm: str
    llm: str
    slm_parameters: int | None = None
    llm_parameters: int | None = None
    slm_hash: str | None = None


class Policy(_Values):
    """When the LLM is asked: nats, the quantile on validation problems that they are, and logits that count."""

    threshold: float
    quantile: float
    top_k: int


class SeedTrial(_Values):
    """One reranker of the sweep on the validation problems."""

    seed: int
    accuracy: float


class Trial(_Values):
    """The rerankers of an epoch and horizon, averaged over seeds."""

    epoch: int
    horizon: int
    accuracy: float
    cross_entropy: float | None = None
    pairwise_accuracy: float | None = None
    seeds: tuple[SeedTrial, ...] = ()


class Selection(_Values):
    """The sweep, what was chosen of it, and on how many problems."""

    horizon: int
    epoch: int
    problems: int | None = None
    table: tuple[Trial, ...] = ()


class Experiment(_Values):
    """How a table of variants is shown: its title, what it varies, its figure, and whether with the LLM's tokens."""

    name: str
    title: str
    varies: str
    spans: bool = False
    figure: Literal["accuracy", "horizon", "sweep"] | None = None
    caption: str = ""


class Result(_Values):
    """A row of an experiment: what a variant made of one benchmark, or the note that says why it made nothing.

    Attributes:
        ours: whether it is FutureBridge, as published, repaired or deployed.
        x: the number that is varied, if it is one.
        quantile: the request quantile, where a table varies it; `threshold` is its nats.
        seeds: of the rerankers; none of what runs once.
        minus: paired difference of accuracy to others on the same problems, at the same quantile, by their names.
        events: a problem, on average, as are `calls` of the LLM and `tokens`.
        llm_tokens: of the answer those that the LLM wrote or that were chosen where it was asked, a problem.
        llm_written: the same with the tails of spans that were not chosen.
        above_line: accuracy less that of taking over so large a share of the problems, the SLM decoding the others,
            that it costs as many `llm_tokens`; None of greedy decoding and takeover, the ends of that line.
    """

    table: str
    benchmark: str
    key: str
    label: str
    note: str | None = None
    ours: bool = False
    x: float | None = None
    quantile: float | None = None
    threshold: float | None = None
    seeds: tuple[int, ...] = ()
    problems: int | None = None
    accuracy: Interval | None = None
    minus: dict[str, Interval] = {}
    events: float | None = None
    calls: float | None = None
    tokens: float | None = None
    llm_tokens: Interval | None = None
    above_line: Interval | None = None
    llm_written: float | None = None


class Agreement(_Values):
    """How well a score tells what becomes of the candidates of held-out states, at events of a kind.

    Attributes:
        benchmark: whose problems the states are of; None for the validation problems.
    """

    benchmark: str | None = None
    score: str
    kind: str
    states: int
    mixed_states: int
    pairs: int
    problems: int
    pairwise: Interval | None = None
    top1: Interval | None = None
    top1_mixed: Interval | None = None
    top1_minus_slm: Interval | None = None
    top1_minus_llm: Interval | None = None


class Choice(_Values):
    """How often a recipe's choice leads to success, at events of a kind and a request quantile."""

    label: str
    kind: str
    quantile: float
    states: int
    problems: int
    top1: Interval | None = None
    top1_minus_slm: Interval | None = None
    top1_minus_llm: Interval | None = None


class Coverage(_Values):
    """How often a pool holds a candidate from which the SLM succeeds, at states as of `Agreement`."""

    benchmark: str | None = None
    pool: str
    mean_size: float
    states: int
    mixed_states: int
    coverage: Interval | None = None
    coverage_mixed: Interval | None = None


class FutureQuality(_Values):
    """Share of pairs in order by quality of the future and horizon, on the states that have every quality."""

    states: int
    horizons: tuple[int, ...]
    qualities: tuple[str, ...]
    pairwise: tuple[tuple[float | None, ...], ...]


class Change(_Values):
    """A problem on which a method's verdict is another than greedy decoding's.

    Attributes:
        key: of the method, as in `Result`.
        gained: wrong by greedy decoding and right by the method, or the other way round.
        kind: of the first event at which the SLM's own token was not taken; None where there is none.
        step: of that event.
        page: file that explains the problem, seen from the report; None of those that a report does not list.
    """

    benchmark: str
    problem: str
    key: str
    label: str
    seed: int | None = None
    gained: bool
    kind: str | None = None
    step: int | None = None
    page: str | None = None


class Turned(_Values):
    """The problems on which methods, by their labels, turn the verdict of greedy decoding."""

    methods: tuple[str, ...]
    changes: tuple[Change, ...]


class Choosing(_Values):
    """A step of a trajectory at which there was a choice."""

    step: int
    chosen: str
    slm: str


class Trajectory(_Values):
    """An SLM's text, token by token, with its entropy in nats."""

    problem: str
    tokens: tuple[str, ...]
    entropy: tuple[float, ...]
    threshold: float
    events: tuple[Choosing, ...]


class Candidate(_Values):
    """A candidate of the event that is shown in full."""

    token: str
    source: str
    p_slm: float
    p_llm: float
    compatibility: float | None = None
    score: float
    rollout: str
    correct: bool


class WorkedEvent(_Values):
    """One event in full."""

    problem: str
    prompt: str
    prefix: str
    gold: str
    entropy: float
    future: str
    candidates: tuple[Candidate, ...]


class Calibration(_Values):
    """The weights of the calibrated target, and the states that they were fitted to."""

    theta: dict[str, float]
    states: int
    mixed: int
    minimum_mixed: int


class Tested(_Values):
    """A recipe on the problems of certification; differences are (mean, lower bound)."""

    label: str
    accuracy: float
    minus_greedy: tuple[float, float]
    minus_direct: tuple[float, float]
    calls: float
    llm_tokens: float


class Deployed(_Values):
    """What a run chose to deploy with the adapter of a seed, and why."""

    seed: int
    label: str
    words: str
    problems: int
    delta: float
    level: float
    tested: tuple[Tested, ...]


class OfflineCost(_Values):
    """What a stage took."""

    stage: str
    units: int
    unit: str
    seconds: float
    gpu_hours: float
    devices: tuple[str, ...]
    published: float | None = None


class DeploymentCost(_Values):
    """What a problem takes by a method in a loop, on average; `relative` is in times of greedy decoding."""

    method: str
    key: str
    loop: str | None = None
    problems: int
    calls: float
    pool: float | None = None
    appended: float
    suffix: float
    seconds: float
    relative: Interval | None = None
    peak_bytes: float | None = None
    published: float | None = None


class Costs(_Values):
    """What stages and methods took."""

    offline: tuple[OfflineCost, ...] = ()
    deployment: tuple[DeploymentCost, ...] | None = None


class Findings(_Values):
    """All that one run found."""

    name: str
    settings: dict[str, Any] = {}
    pair: Pair | None = None
    test_sets: dict[str, str] = {}  # hashes
    policy: Policy | None = None
    selection: Selection | None = None
    deployed: tuple[Deployed, ...] | None = None
    filters: dict[str, int] | None = None
    seeds: tuple[int, ...] = ()
    experiments: tuple[Experiment, ...] = ()
    rows: tuple[Result, ...] = ()
    agreement: tuple[Agreement, ...] | None = None
    choices: tuple[Choice, ...] | None = None
    coverage: tuple[Coverage, ...] | None = None
    turned: Turned | None = None
    future_quality: FutureQuality | None = None
    trajectory: Trajectory | None = None
    worked_event: WorkedEvent | None = None
    calibration: Calibration | None = None
    advice: tuple[str, ...] | None = None
    costs: Costs | None = None
    machine: str | None = None
    commit: str | None = None
    made: dict[str, str | None] = {}

    def of(self, table: str) -> list[Result]:
        """The rows of one table."""
        rows = [row for row in self.rows if row.table == table]
        return in_order(rows) if table in BY_METHOD else rows

    @property
    def frontier(self) -> list[Result]:
        """Every method and recipe whose accuracy and LLM tokens are known, once a benchmark."""
        found: dict[tuple[str, str], Result] = {}
        for row in (*self.of("methods"), *self.of("repairs")):
            if row.accuracy and row.llm_tokens:
                found.setdefault((row.benchmark, row.key), row)
        return in_order(found.values())


def listed(changes: Sequence[Change]) -> list[Change]:
    """Those that a report lists: the first `LISTED` of every method, direction and kind, losses before gains."""
    kept: dict[tuple[str, bool, str | None], list[Change]] = {}
    for one in changes:
        kept.setdefault((one.label, one.gained, one.kind), []).append(one)
    found = [one for group in kept.values() for one in group[:LISTED]]
    return sorted(found, key=lambda one: (one.gained, one.kind is None, one.kind or "", LAST.index(one.key)))


def in_order(rows: Iterable[Result]) -> list[Result]:
    """Rows of methods as every table and figure has them, by request quantile first where that is varied.

    `FIRST`, then other peers, then `LAST`; what has the same place stays as it was.
    """
    return sorted(rows, key=lambda row: (row.quantile or 0.0, place_of(row)))


def place_of(row: Result) -> int:
    """The place of a row's method among others."""
    places = (*FIRST, "peers", *LAST)
    recipe = row.ours or row.table != "methods"  # the other tables have no other peers
    return places.index(row.key if row.key in places else "recipes" if recipe else "peers")


_ALL = TypeAdapter(tuple[Findings, ...])
_IN_BRIEF: Any = {*("name", "pair", "test_sets", "policy", "seeds"), "costs"}


def read_findings(path: Path) -> tuple[Findings, ...]:
    """The findings of one run or several, as `findings_bytes` or `rows_bytes` wrote them.

    Raises:
        ValueError: another file, or a damaged one: its path, the place and what is wrong there.
        OSError: it cannot be read.
    """
    try:
        return _ALL.validate_json(path.read_bytes())
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        got = f"{place}{': ' * bool(place)}{first['msg']}"
        raise ValueError(
            f"{path}: expected what `futurebridge report` writes of runs, got {got}; make it again with that command"
        ) from None


def findings_bytes(findings: Sequence[Findings]) -> bytes:
    """All of the findings as JSON.

    Raises:
        ValueError: a number that is not finite.
    """
    values = [one.model_dump(mode="json", exclude_none=True) for one in findings]
    return json.dumps(values, indent=1, allow_nan=False).encode() + b"\n"


def rows_bytes(findings: Sequence[Findings]) -> bytes:
    """The rows of all tables, one a line and rounded, and what they were made with: enough for tables across runs."""
    runs = []
    for one in findings:
        head = one.model_copy(update={"costs": one.costs and Costs(deployment=one.costs.deployment)})
        about = _line(head, include=_IN_BRIEF)
        rows = ",\n".join(_line(row) for row in one.rows)
        runs.append(f'{about[:-1]}, "rows": [\n{rows}\n]}}')
    return "[\n{}\n]\n".format(",\n".join(runs)).encode()


def _line(values: _Values, **options: Any) -> str:
    text = values.model_dump_json(exclude_none=True, exclude_defaults=True, **options)
    return json.dumps(json.loads(text, parse_float=lambda digits: round(float(digits), 6)), allow_nan=False)
