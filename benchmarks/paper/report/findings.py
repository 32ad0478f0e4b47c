"""What a run found: validated plain values from which a report is made, read and written as JSON without model code.

Shares lie in 0..1 and their differences in -1..1; intervals are at 95%. A part that was not run is None.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fb_core.statistics import Interval

OURS = "futurebridge"  # key of the run's own reranker
DEPLOYED = "deployed"  # key of the recipe that the run chose
FIRST = ("greedy", "majority", "random", "slm-preference", "s2t", "direct", "one-token-takeover")
LAST = (OURS, DEPLOYED, "takeover")  # after all other peers
LISTED = 10  # changed problems listed per method, direction and kind of event
BY_METHOD = ("methods", "quantiles")  # tables whose rows are methods, in their order


class _Values(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")


class Pair(_Values):
    """The two models; `slm_hash` is a hash of the SLM's weights."""

    slm: str
    llm: str
    slm_parameters: int | None = None
    llm_parameters: int | None = None
    slm_hash: str | None = None


class Policy(_Values):
    """When the LLM is asked: above `threshold` nats, the `quantile` of the entropies on validation problems.

    Attributes:
        top_k: number of largest logits over which the softmax of the entropy is taken.
    """

    threshold: float
    quantile: float
    top_k: int


class SeedTrial(_Values):
    """One seed's reranker of the sweep on the validation problems."""

    seed: int
    accuracy: float


class Trial(_Values):
    """The rerankers of one epoch and horizon, averaged over seeds."""

    epoch: int
    horizon: int
    accuracy: float
    cross_entropy: float | None = None
    pairwise_accuracy: float | None = None
    seeds: tuple[SeedTrial, ...] = ()


class Selection(_Values):
    """The sweep of rerankers, the chosen epoch and horizon, and the number of problems they were chosen on."""

    horizon: int
    epoch: int
    problems: int | None = None
    table: tuple[Trial, ...] = ()


class Experiment(_Values):
    """How a table of variants is shown.

    Attributes:
        varies: what it varies, in sentences.
        figure: the kind of figure.
    """

    name: str
    title: str
    varies: str
    figure: Literal["accuracy", "horizon", "sweep"] | None = None
    caption: str = ""


class Result(_Values):
    """A row of an experiment: a variant's results on one benchmark, or a note that says why there are none.

    Attributes:
        ours: whether it is FutureBridge, as published or deployed.
        x: the value that is varied, if it is a number.
        quantile: the request quantile, if the table varies it; `threshold` is the same in nats.
        seeds: of the rerankers; empty for a method that runs once.
        minus: paired differences of accuracy to other methods on the same problems at the same quantile, by name.
        events: mean number per problem, like `tokens`.
        calls: mean number per problem of requests to the LLM.
        llm_tokens: mean number per problem of the answer's tokens that the LLM wrote or that were chosen when it was
            asked.
        above_line: accuracy minus that of takeover on such a share of the problems (the SLM decodes the rest) that it
            costs the same number of `llm_tokens`; None for greedy decoding and takeover, the ends of that line.
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
    calls: Interval | None = None
    tokens: float | None = None
    llm_tokens: Interval | None = None
    above_line: Interval | None = None


class Agreement(_Values):
    """How well a score predicts the outcomes of the candidates of held-out states, at one kind of event.

    Attributes:
        benchmark: the benchmark whose problems the states are of; None for the validation problems.
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
    """How often a recipe's choice leads to success, at one kind of event and one request quantile."""

    label: str
    kind: str
    quantile: float
    states: int
    problems: int
    top1: Interval | None = None
    top1_minus_slm: Interval | None = None
    top1_minus_llm: Interval | None = None


class Coverage(_Values):
    """How often a pool holds a candidate from which the SLM succeeds, at the states of `Agreement`."""

    benchmark: str | None = None
    pool: str
    mean_size: float
    states: int
    mixed_states: int
    coverage: Interval | None = None
    coverage_mixed: Interval | None = None


class FutureQuality(_Values):
    """Pairwise accuracy by kind of future (`qualities`) and horizon, on the states that have every kind."""

    states: int
    horizons: tuple[int, ...]
    qualities: tuple[str, ...]
    pairwise: tuple[tuple[float | None, ...], ...]


class Change(_Values):
    """A problem on which a method's verdict differs from greedy decoding's.

    Attributes:
        key: of the method, as in `Result`.
        gained: True if greedy decoding is wrong and the method right, False for the reverse.
        kind: of the first event at which the SLM's own token was not taken; None if there is none.
        step: of that event.
        page: path of the file that explains the problem, relative to the report; None if the report does not list it.
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
    """The labels of the compared methods, and the problems on which their verdicts differ from greedy decoding's."""

    methods: tuple[str, ...]
    changes: tuple[Change, ...]


class Choosing(_Values):
    """An event of a trajectory: its step, the chosen token and the SLM's own."""

    step: int
    chosen: str
    slm: str


class Trajectory(_Values):
    """An SLM's text as tokens, with its entropy in nats at every step and its events."""

    problem: str
    tokens: tuple[str, ...]
    entropy: tuple[float, ...]
    threshold: float
    events: tuple[Choosing, ...]


class Candidate(_Values):
    """A candidate of the event that is shown in full; its compatibility score is in nats."""

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


class Tested(_Values):
    """A recipe's results on the certification problems; differences are (mean, lower bound)."""

    label: str
    accuracy: float
    minus_greedy: tuple[float, float]
    minus_direct: tuple[float, float]
    calls: float
    llm_tokens: float


class Deployed(_Values):
    """The recipe that a run chose to deploy with one seed's adapter, and why."""

    seed: int
    label: str
    words: str
    problems: int
    delta: float
    level: float
    tested: tuple[Tested, ...]


class OfflineCost(_Values):
    """The cost of an offline stage."""

    stage: str
    units: int
    unit: str
    seconds: float
    gpu_hours: float
    devices: tuple[str, ...]
    published: float | None = None


class DeploymentCost(_Values):
    """The mean cost per problem of a method in one loop; `relative` is its time as a multiple of greedy decoding's."""

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
    """The costs of stages and methods."""

    offline: tuple[OfflineCost, ...] = ()
    deployment: tuple[DeploymentCost, ...] | None = None


class Findings(_Values):
    """All findings of one run."""

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
        """Every method whose accuracy and LLM tokens are known."""
        return [row for row in self.of("methods") if row.accuracy and row.llm_tokens]


def listed(changes: Sequence[Change]) -> list[Change]:
    """The changes that a report lists: the first `LISTED` per method, direction and kind, losses before gains."""
    kept: dict[tuple[str, bool, str | None], list[Change]] = {}
    for one in changes:
        kept.setdefault((one.label, one.gained, one.kind), []).append(one)
    found = [one for group in kept.values() for one in group[:LISTED]]
    return sorted(found, key=lambda one: (one.gained, one.kind is None, one.kind or "", LAST.index(one.key)))


def in_order(rows: Iterable[Result]) -> list[Result]:
    """Rows in the order of all tables and figures: by request quantile if it varies, then by method.

    Methods are sorted as `FIRST`, other peers, `LAST`; rows of equal rank keep their order.
    """
    return sorted(rows, key=lambda row: (row.quantile or 0.0, place_of(row)))


def place_of(row: Result) -> int:
    """The rank of a row's method in that order."""
    places = (*FIRST, "peers", *LAST)
    return places.index(row.key if row.key in places else "peers")


_ALL = TypeAdapter(tuple[Findings, ...])
_IN_BRIEF: Any = {*("name", "pair", "test_sets", "policy", "seeds"), "costs"}


def read_findings(path: Path) -> tuple[Findings, ...]:
    """Read the findings of one or several runs, as `findings_bytes` or `rows_bytes` wrote them.

    Raises:
        ValueError: the file holds something else or is damaged; the message names the place and what is wrong.
        OSError: the file cannot be read.
    """
    try:
        return _ALL.validate_json(path.read_bytes())
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        got = f"{place}{': ' * bool(place)}{first['msg']}"
        raise ValueError(f"{path}: expected findings of a report, got {got}; write the report again") from None


def findings_bytes(findings: Sequence[Findings]) -> bytes:
    """All findings as JSON.

    Raises:
        ValueError: a number is not finite.
    """
    values = [one.model_dump(mode="json", exclude_none=True) for one in findings]
    return json.dumps(values, indent=1, allow_nan=False).encode() + b"\n"


def rows_bytes(findings: Sequence[Findings]) -> bytes:
    """Every run's table rows, one per line and rounded, with models, policy, seeds and times: enough for tables."""
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
