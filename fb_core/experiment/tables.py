"""The tables of `futurebridge experiment`, an entry each: what it varies, its rows, and how the report shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fb_core.config import RunSettings
from fb_core.methods import EXTERNAL
from fb_core.report.findings import OURS, Experiment
from fb_core.stages.deploy import label_of
from fb_core.stages.inside import FOLDER, TRAINED, Changes, training_changes

REFERENCES = ("greedy", "direct", "futurebridge")  # methods that every row is compared with


@dataclass(frozen=True)
class Variant:
    """A run with one thing changed: a row of a table, in a folder inside the run's own.

    Attributes:
        key: of its folder.
        label: of its row.
        changes: settings by section.
        method: that decodes the benchmarks, None for none: then others vary it in their turn.
        x: the number that is varied, if it is one.
        inside: the variant that it varies, if not the run itself.
        borrowed: shown in this table where another one made it.
    """

    key: str
    label: str
    changes: Changes = field(default_factory=dict)
    method: str | None = OURS
    x: float | None = None
    inside: Variant | None = None
    borrowed: bool = False

    @property
    def place(self) -> Variant | None:
        """The variant among those it is inside of that only others vary; None where there is none."""
        if self.inside is None or self.inside.method is None:
            return self.inside
        return self.inside.place

    @property
    def name(self) -> str:
        """Its key after those of what it is inside of."""
        return self.key if self.inside is None else f"{self.inside.name}/{self.key}"

    @property
    def path(self) -> Path:
        """Its folder inside the run's."""
        return (Path() if self.inside is None else self.inside.path) / FOLDER / self.key


@dataclass(frozen=True)
class Plan:
    """A run whose variants are made.

    Attributes:
        settings: of the run.
        run: its folder.
        horizon: that the run chose on validation problems, which all but the rows of "horizons" keep.
    """

    settings: RunSettings
    run: Path
    horizon: int

    def references(self) -> list[Variant]:
        """The methods that every row is compared with."""
        return [self.method(name) for name in REFERENCES]

    def method(self, name: str, x: float | None = None, inside: Variant | None = None) -> Variant:
        """A method that needs no training of its own."""
        return Variant(name, label_of(name, self.settings), {}, name, x, inside)

    def own(self, label: str, x: float | None = None) -> Variant:
        """The run's own reranker, under the label that tells what it is in a table."""
        return replace(self.method("futurebridge"), label=label, x=x, borrowed=True)

    def recipe(
        self, key: str, label: str, x: float | None = None, inside: Variant | None = None, **changes: dict[str, Any]
    ) -> Variant:
        """A reranker of its own, unless only its deployment changes."""
        if set(changes) != {"evaluate"}:
            changes["train"] = dict(training_changes(self.horizon, **changes.get("train", {}))["train"])
        return Variant(key, label, changes, x=x, inside=inside)


@dataclass(frozen=True)
class Beside:
    """A row that others of its table are compared with: what it is called, its key, and whose it is (all if none)."""

    name: str
    key: str
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """One experiment.

    Attributes:
        name: on the command line.
        title: of its section in the report.
        varies: what differs from row to row, in a sentence.
        rows: those of a run, in their order, the run's own and other borrowed ones among them.
        figure: of its section, with its caption.
        beside: what its rows are compared with besides `REFERENCES`.
        judged: whether its rerankers are held against the rollouts.
        spans: whether the LLM's tokens are shown.
    """

    name: str
    title: str
    varies: str
    rows: Callable[[Plan], list[Variant]]
    figure: Literal["accuracy", "horizon", "sweep"] | None = None
    caption: str = ""
    beside: tuple[Beside, ...] = ()
    judged: bool = False
    spans: bool = False

    @property
    def shown(self) -> Experiment:
        """What the report is told of it."""
        about = {name: getattr(self, name) for name in Experiment.model_fields}
        return Experiment(**about)


def _methods(plan: Plan) -> list[Variant]:
    apart = ("futurebridge", *(() if plan.settings.problems.certification else ("deployed",)))
    known = [plan.method(name) for name in plan.settings.compare.methods if name not in apart]
    external = [Variant(f"external-{name}", name, method=EXTERNAL + name) for name in plan.settings.compare.external]
    return [*known, *_distilled(plan), *external, plan.method("futurebridge")]


def _distilled(plan: Plan) -> list[Variant]:
    pool = {"pool": "slm"}
    return [
        plan.recipe("distilled", "Distilled LLM preference", train={"alpha": 0.0}),
        plan.recipe("s2t-local", "S2T-Local, matched", train={"alpha": 0.0}, score=pool),
        plan.recipe("s2t-local-original", "S2T-Local, original loss", train={"target": "select"}, score=pool),
    ]


def _pools(plan: Plan) -> list[Variant]:
    wide = plan.settings.collect.slm_k + plan.settings.futures.llm_k
    kinds = {"slm": "SLM pool", "llm": "LLM pool", "slm-wide": f"SLM top-{wide}"}
    others = [plan.recipe(f"pool-{kind}", label, score={"pool": kind}) for kind, label in kinds.items()]
    return [plan.own("joint pool"), *others]


def _horizons(plan: Plan) -> list[Variant]:
    others = [h for h in plan.settings.train.horizons if h != plan.horizon]
    found = [plan.recipe(f"horizon-{h}", f"H = {h}", float(h), train={"horizons": (h,)}) for h in others]
    return _by_number([*found, plan.own(f"H = {plan.horizon}", float(plan.horizon))])


def _futures(plan: Plan) -> list[Variant]:
    qualities = {
        "verified": "verified greedy future",
        "sampled": "first correct sample",
        "unverified": "first sample, unverified",
        "incorrect": "first incorrect sample",
        "cross-state": "cross-state, verified greedy",
        "shuffled": "shuffled, verified greedy",
    }
    found = [plan.recipe(f"future-{kind}", label, score={"future": kind}) for kind, label in qualities.items()]
    return [*found, plan.own("all states with a verified future")]


def _alpha(plan: Plan) -> list[Variant]:
    own = plan.settings.train.alpha
    distilled = [replace(row, label="alpha = 0", x=0.0) for row in _distilled(plan) if row.key == "distilled"]
    others = [a for a in plan.settings.experiment.alphas if a not in (0.0, own)]
    hybrids = [plan.recipe(f"alpha-{a:g}", f"alpha = {a:g}", a, train={"alpha": a}) for a in others]
    return _by_number([*distilled, *hybrids, plan.own(f"alpha = {own:g}", own)])


def _temperatures(plan: Plan) -> list[Variant]:
    own = plan.settings.train.temperature
    others = [t for t in plan.settings.experiment.temperatures if t != own]
    found = [plan.recipe(f"temperature-{t:g}", f"temperature {t:g}", t, train={"temperature": t}) for t in others]
    return _by_number([*found, plan.own(f"temperature {own:g}", own)])


def _spans(plan: Plan) -> list[Variant]:
    """The reranker and the LLM's own preference where the LLM offers more than a token."""
    experiment = plan.settings.experiment
    longest = max(experiment.spans)
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        **{f"span-{n}": (f"{n} tokens", {"tokens": n}) for n in experiment.spans},
        "span-step": ("to a step's end", {"tokens": None, "delimiter": experiment.delimiter}),
        "span-agree": (f"until the SLM agrees, {longest} tokens at most", {"tokens": longest, "agree": True}),
        "span-all": ("no bound", {"tokens": None}),
    }
    ours, direct = [plan.own("FutureBridge, one token")], [plan.method("direct")]
    direct[0] = replace(direct[0], label="Direct LLM score, one token", borrowed=True)
    for key, (words, span) in kinds.items():
        ours.append(plan.recipe(key, f"FutureBridge, {words}", futures={"span": span}))
        takes_over = ": takeover" if key == "span-all" else ""
        label, changes = f"Direct LLM score, {words}{takes_over}", {"futures": {"span": span}}
        direct.append(Variant(f"direct-{key}", label, changes, "direct"))
    return [*ours, *direct]


def _by_number(rows: list[Variant]) -> list[Variant]:
    return sorted(rows, key=lambda row: row.x or 0.0)


def _scope(plan: Plan) -> list[Variant]:
    sequence = plan.recipe("scope-sequence", "adapter on the whole sequence", train={"scope": "sequence"})
    return [plan.own("adapter on the candidate alone"), sequence]


def _repairs(plan: Plan) -> list[Variant]:
    """What is tried beyond the published recipe, plain options of the same commands."""
    own = plan.recipe("own", "the SLM's own future", score={"future": "own"})
    hindsight = {"hindsight": plan.settings.experiment.hindsight}
    return [
        plan.own("FutureBridge, as published"),
        *_swept(plan),
        own,
        _override(plan, "own-override", "the SLM's own future, override", own),
        plan.recipe("on-policy", "states under the deployed reranker", collect={"deployed": str(plan.run)}),
        plan.recipe("hindsight", "hindsight baseline", train=hindsight),
    ]


def _swept(plan: Plan, inside: Variant | None = None) -> list[Variant]:
    """The repairs that are tried at every quantile."""
    x = None if inside is None else inside.x
    labels = ("candidate features", "calibrated target", "calibrated target, features")
    features, calibrated, both = (
        plan.recipe(key, label, x, inside, train=dict(changes))
        for (key, changes), label in zip(TRAINED.items(), labels, strict=True)
    )
    return [
        features,
        _override(plan, "override", "override by a certain LLM", inside),
        _override(plan, "features-override", "candidate features, override", features),
        calibrated,
        both,
        _override(plan, f"{both.key}-override", "calibrated target, features, override", both),
    ]


def _override(plan: Plan, key: str, label: str, inside: Variant | None) -> Variant:
    """A reranker, the run's own if no other, deployed with the override."""
    x = None if inside is None else inside.x
    return plan.recipe(key, label, x, inside, evaluate={"certainty": plan.settings.experiment.certainty})


def _quantiles(plan: Plan) -> list[Variant]:
    """Peers and recipes with states, futures and rerankers of their own at other quantiles, the run's own between."""
    peers = ("takeover", "s2t", "direct", "futurebridge")
    here = plan.settings.collect.quantile
    there = {variant.key for variant in (*_methods(plan), *plan.references())}
    own = [*(plan.method(name) for name in peers if name in there), *_swept(plan)]
    found = [replace(variant, borrowed=True, x=here) for variant in own]
    for quantile in plan.settings.experiment.quantiles:
        if quantile != here:
            place = plan.recipe(f"q{quantile:g}", f"quantile {quantile:g}", quantile, collect={"quantile": quantile})
            place = replace(place, method=None)
            found += [*(plan.method(name, quantile, place) for name in peers), *_swept(plan, place)]
    return _by_number(found)


TABLES = {
    table.name: table
    for table in (
        Table(
            "methods",
            "Methods",
            "The reranker beside its rivals, on the same problems.",
            _methods,
        ),
        Table("pools", "Candidate pools", "Whose candidates the reranker is trained on and chooses from.", _pools),
        Table(
            "horizons",
            "Horizon",
            "How many tokens of the future make the target.",
            _horizons,
            "horizon",
            "By horizon: accuracy of the rerankers, and how many pairs of candidates the target itself puts in the "
            "order of the SLM's rollouts. Bands are 95% intervals.",
        ),
        Table(
            "futures",
            "Futures",
            "What stands as the future behind every candidate when the target is made, on one set of states. Verified "
            "and first correct sample differ in how they were decoded alone, the samples among each other in their "
            "answers alone, cross-state and shuffled from verified in the state and in the order alone.",
            _futures,
            "accuracy",
            "Accuracy by what stands as the future, with 95% intervals.",
            beside=(  # greedy ones with the greedy one, samples with the right sample
                Beside("verified", "future-verified"),
                Beside("first correct sample", "future-sampled", ("future-unverified", "future-incorrect")),
            ),
        ),
        Table(
            "alpha",
            "Hybrid targets",
            "How much of the target is the future's score, the rest being the LLM's preference.",
            _alpha,
        ),
        Table(
            "scope", "Adapter scope", "Whether the adapter acts on the candidate alone or on its prefix too.", _scope
        ),
        Table("temperature", "Target temperature", "How soft the target is.", _temperatures),
        Table(
            "spans",
            "Spans",
            "How much the LLM offers at an event: a token, or what it would write behind it as well.",
            _spans,
            spans=True,
        ),
        Table("repairs", "Repairs", "Recipes beyond the published one.", _repairs, judged=True),
        Table(
            "quantiles",
            "Request quantiles",
            "States, futures and rerankers made again at other request quantiles.",
            _quantiles,
            "sweep",
            "Accuracy by request quantile with 95% intervals; the dashed line is greedy decoding of the SLM.",
            judged=True,
        ),
    )
}
