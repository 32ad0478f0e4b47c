"""The tables, one entry each: what it varies, its rows, and how the report shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.paper.methods import label_of
from benchmarks.paper.nested_runs import FOLDER
from benchmarks.paper.settings import EXTERNAL, PaperSettings
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.settings.base import Changes, change

PUBLISHED = "published"  # key of the published recipe with the run's own reranker
PROBLEM = "problem.json"  # why a variant could not be made, in its folder
REFERENCES = ("greedy", "direct", PUBLISHED)  # every row is compared with these methods


@dataclass(frozen=True)
class Variant:
    """A run with some settings changed: a row of a table, in a folder inside the run's own."""

    key: str  # name of its folder
    label: str  # of its row
    changes: Changes = field(default_factory=dict)  # changed settings by section
    # the method that decodes the benchmarks; None for a variant that only other variants build on
    method: str | None = PUBLISHED
    x: float | None = None  # the value that is varied, if it is a number
    inside: Variant | None = None  # the variant that this one changes; None if it changes the run itself
    borrowed: bool = False  # whether another table makes it and this one only shows it

    @property
    def state_source(self) -> Variant | None:
        """The nearest enclosing variant without a method of its own, which holds its states; None if there is none."""
        if self.inside is None or self.inside.method is None:
            return self.inside
        return self.inside.state_source

    @property
    def name(self) -> str:
        """The keys of the enclosing variants and its own, joined by slashes."""
        return self.key if self.inside is None else f"{self.inside.name}/{self.key}"

    @property
    def path(self) -> Path:
        """Its folder inside the run's."""
        return (Path() if self.inside is None else self.inside.path) / FOLDER / self.key


@dataclass(frozen=True)
class Plan:
    """A run whose variants are made."""

    settings: PaperSettings  # of the run
    run: Path  # its folder
    horizon: int  # the horizon chosen on validation problems; all variants except those of "horizons" keep it

    def references(self) -> list[Variant]:
        """The methods that every row is compared with."""
        return [self.method(name) for name in REFERENCES]

    def method(self, name: str, x: float | None = None, inside: Variant | None = None) -> Variant:
        """A method that needs no training of its own."""
        return Variant(name, label_of(name, self.settings), {}, name, x, inside)

    def own(self, label: str, x: float | None = None) -> Variant:
        """The run's own reranker, with the label that it has in this table."""
        return replace(self.method("published"), label=label, x=x, borrowed=True)

    def recipe(
        self, key: str, label: str, x: float | None = None, inside: Variant | None = None, **changes: dict[str, Any]
    ) -> Variant:
        """A variant with changed settings; its reranker is trained anew unless only "evaluate" changes."""
        if set(changes) != {"evaluate"}:
            changes["train"] = {"horizons": (self.horizon,), **changes.get("train", {})}
        return Variant(key, label, changes, x=x, inside=inside)


@dataclass(frozen=True)
class Beside:
    """A row that other rows of its table are compared with."""

    name: str  # of the row, in the column's head
    key: str  # of the row
    of: tuple[str, ...] = ()  # keys of the rows that are compared with it; empty for all


@dataclass(frozen=True)
class Table:
    """One experiment."""

    name: str  # on the command line
    title: str  # of its section in the report
    varies: str  # what differs between its rows; the section's brief description
    # makes the rows of a run, in order, including the run's own and other borrowed ones
    rows: Callable[[Plan], list[Variant]]
    beside: tuple[Beside, ...] = ()  # rows that others are compared with, besides `REFERENCES`
    judged: bool = False  # whether its rerankers are compared with the rollouts


def plan_of(settings: PaperSettings, run: Path) -> Plan:
    """The plan of a run's variants; raises ValueError if the run is not trained."""
    return Plan(settings, run, int(Artefact(run, "selection").finished()["summary"]["horizon"]))


def settings_of_variant(settings: PaperSettings, variant: Variant) -> PaperSettings:
    """The run's settings with the variant's changes, and with only its method to compare."""
    if variant.inside is not None:
        settings = settings_of_variant(settings, variant.inside)
    method = variant.method or ""
    name = method.removeprefix(EXTERNAL)
    external = {name: settings.compare.external[name]} if method.startswith(EXTERNAL) else {}
    compare = {"methods": (method,) if method and not external else (), "external": external}
    return change(settings, {**variant.changes, "compare": {**variant.changes.get("compare", {}), **compare}})


def _methods(plan: Plan) -> list[Variant]:
    apart = ("published", *(() if plan.settings.problems.certification else ("deployed",)))
    methods = [plan.method(name) for name in plan.settings.compare.methods if name not in apart]
    external = [Variant(f"external-{name}", name, method=EXTERNAL + name) for name in plan.settings.compare.external]
    return [*methods, *_distilled(plan), *external, plan.method("published")]


def _distilled(plan: Plan) -> list[Variant]:
    pool = {"pool": "slm"}
    return [
        plan.recipe("distilled", "Distilled LLM preference", train={"alpha": 0.0}),
        plan.recipe("s2t-local", "S2T-Local, matched", train={"alpha": 0.0}, score=pool),
        plan.recipe("s2t-local-original", "S2T-Local, original loss", experiment={"target": "select"}, score=pool),
    ]


def _pools(plan: Plan) -> list[Variant]:
    wide = plan.settings.collect.slm_k + plan.settings.futures.llm_k
    kinds = {"slm": "SLM pool", "llm": "LLM pool", "slm-wide": f"SLM top-{wide}"}
    others = [plan.recipe(f"pool-{kind}", label, score={"pool": kind}) for kind, label in kinds.items()]
    return [plan.own("joint pool"), *others]


def _horizons(plan: Plan) -> list[Variant]:
    others = [h for h in plan.settings.train.horizons if h != plan.horizon]
    variants = [plan.recipe(f"horizon-{h}", f"H = {h}", float(h), train={"horizons": (h,)}) for h in others]
    return _by_number([*variants, plan.own(f"H = {plan.horizon}", float(plan.horizon))])


def _futures(plan: Plan) -> list[Variant]:
    qualities = {
        "verified": "verified greedy future",
        "sampled": "first correct sample",
        "unverified": "first sample, unverified",
        "incorrect": "first incorrect sample",
        "cross-state": "cross-state, verified greedy",
        "shuffled": "shuffled, verified greedy",
    }
    variants = [plan.recipe(f"future-{kind}", label, samples={"future": kind}) for kind, label in qualities.items()]
    greedy = plan.recipe("future-greedy", "all states, greedy future, unverified", samples={"future": "greedy"})
    own = plan.recipe("own", "all states, the SLM's own future", samples={"future": "own"})
    return [*variants, plan.own("all states with a verified future"), greedy, own]


def _alpha(plan: Plan) -> list[Variant]:
    own = plan.settings.train.alpha
    distilled = [replace(row, label="alpha = 0", x=0.0) for row in _distilled(plan) if row.key == "distilled"]
    others = [a for a in plan.settings.experiment.alphas if a not in (0.0, own)]
    hybrids = [plan.recipe(f"alpha-{a:g}", f"alpha = {a:g}", a, train={"alpha": a}) for a in others]
    return _by_number([*distilled, *hybrids, plan.own(f"alpha = {own:g}", own)])


def _temperatures(plan: Plan) -> list[Variant]:
    own = plan.settings.train.temperature
    others = [t for t in plan.settings.experiment.temperatures if t != own]
    variants = [plan.recipe(f"temperature-{t:g}", f"temperature {t:g}", t, train={"temperature": t}) for t in others]
    return _by_number([*variants, plan.own(f"temperature {own:g}", own)])


def _by_number(rows: list[Variant]) -> list[Variant]:
    return sorted(rows, key=lambda row: row.x or 0.0)


def _scope(plan: Plan) -> list[Variant]:
    sequence = plan.recipe("scope-sequence", "adapter on the whole sequence", train={"scope": "sequence"})
    return [plan.own("adapter on the candidate alone"), sequence]


def _recalls(plan: Plan) -> list[Variant]:
    """R2R at several thresholds of one router."""
    own = plan.settings.compare.recall
    if "r2r" not in plan.settings.compare.methods:
        return []
    others = [
        Variant(f"r2r-{recall:g}", f"R2R, recall {recall:g}", {"compare": {"recall": recall}}, "r2r", recall)
        for recall in plan.settings.experiment.recalls
        if recall != own
    ]
    routed = replace(plan.method("r2r", own), label=f"R2R, recall {own:g}", borrowed=True)
    return _by_number([*others, routed])


def _quantiles(plan: Plan) -> list[Variant]:
    """Peers and FutureBridge at every request quantile; at other quantiles they have their own states and rerankers."""
    peers = ("takeover", "s2t", "direct", "published")
    here = plan.settings.collect.quantile
    there = [variant.key for variant in (*_methods(plan), *plan.references())]
    variants = [plan.method(name, here) for name in (*peers, "deployed") if name in there]
    variants = [replace(variant, borrowed=True) for variant in variants]
    for quantile in plan.settings.experiment.quantiles:
        if quantile != here:
            source = plan.recipe(f"q{quantile:g}", f"quantile {quantile:g}", quantile, collect={"quantile": quantile})
            source = replace(source, method=None)
            variants += [plan.method(name, quantile, source) for name in peers]
    return _by_number(variants)


TABLES = {
    table.name: table
    for table in (
        Table("methods", "Methods", "FutureBridge and other methods on the same problems.", _methods),
        Table("pools", "Candidate pools", "Whose candidates the reranker is trained on and chooses from.", _pools),
        Table("horizons", "Horizon", "How many tokens of the future the target uses.", _horizons),
        Table(
            "futures",
            "Futures",
            "Which future is scored after every candidate to make the target, on one set of states. The verified "
            "future and the first correct sample differ only in how they were decoded, and the samples differ from "
            "each other only in their answers. The cross-state future differs from the verified one only in the state "
            "that it comes from, the shuffled one only in the order of its tokens.",
            _futures,
            beside=(  # greedy futures are compared with the greedy one, samples with the correct sample
                Beside("verified", "future-verified"),
                Beside("first correct sample", "future-sampled", ("future-unverified", "future-incorrect")),
            ),
        ),
        Table(
            "alpha",
            "Hybrid targets",
            "The weight alpha of the future's score in the target; the LLM's preference has the rest.",
            _alpha,
        ),
        Table(
            "scope", "Adapter scope", "Whether the adapter acts on the candidate alone or on its prefix too.", _scope
        ),
        Table("temperature", "Target temperature", "How soft the target is.", _temperatures),
        Table(
            "recalls",
            "Router threshold",
            "Which share of the divergent held-out tokens R2R's threshold routes to the LLM.",
            _recalls,
        ),
        Table(
            "quantiles",
            "Request quantiles",
            "The request quantile; states, futures and rerankers are made anew at each.",
            _quantiles,
            judged=True,
        ),
    )
}
