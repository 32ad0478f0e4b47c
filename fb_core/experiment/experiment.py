"""`futurebridge experiment`: the peers and the ablations, one thing changed at a time over the same logged states."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from dataclasses import replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.progress import TimeElapsedColumn

from fb_core.config import SETTINGS, RunSettings
from fb_core.experiment.variants import Variant, changed, work_through
from fb_core.methods import EXTERNAL, method
from fb_core.progress import Board
from fb_core.reranker import FEATURES
from fb_core.stages.agreement import AgreementStage
from fb_core.stages.artefacts import Artefact, json_bytes, write_file
from fb_core.stages.commands import Command, run_command, stages_of
from fb_core.stages.comparison import CompareStage
from fb_core.stages.deploy import label_of
from fb_core.stages.deployment import DeploymentStage
from fb_core.stages.rollouts import RolloutStage
from fb_core.stages.router import RouterLabelStage, RouterStage
from fb_core.stages.samples import SampleStage
from fb_core.stages.stage import Stage, run_stage

Table = Literal[
    "methods", "pools", "horizons", "futures", "alpha", "scope", "temperature", "repairs", "quantiles", "costs"
]
TABLES: tuple[Table, ...] = get_args(Table)
REFERENCES = ("greedy", "direct", "futurebridge")  # methods that every row is compared with
QUALITIES = {  # labels
    "verified": "verified greedy future",
    "sampled": "first correct sample",
    "unverified": "first sample, unverified",
    "incorrect": "first incorrect sample",
    "cross-state": "cross-state, verified greedy",
    "shuffled": "shuffled, verified greedy",
}
SWEPT = (  # repairs tried at every quantile
    "features",
    "override",
    "features-override",
    "calibrated",
    "calibrated-features",
    "calibrated-features-override",
)
JUDGED: tuple[Table, ...] = ("repairs", "quantiles")  # whose rerankers are held against rollouts
PROBLEM = "problem.json"  # why a variant could not be made, in its folder
LOG = "log.txt"
UNSEEN = {
    "TaH": "changes the SLM itself: name a checkpoint under compare.external",
    "TSD-KD": "retrains the SLM itself: name a checkpoint under compare.external",
    "Multiplex Thinking": "retrains the SLM itself: name a checkpoint under compare.external",
}  # peers that are there as checkpoints alone


class Rows:
    """The rows of every table: what is changed in each of them.

    Args:
        settings: of the run.
        run: its folder.
        horizon: that the run chose on validation problems, which all but the rows of "horizons" keep.
    """

    def __init__(self, settings: RunSettings, run: Path, horizon: int) -> None:
        self.settings, self.run, self.horizon = settings, run, horizon

    def of(self, table: Table) -> list[Variant]:
        """The rows of a table, in order."""
        vary, collect = self.settings.experiment, self.settings.collect
        match table:
            case "methods":
                return [*self._known(), *self._distilled(), *self._external(), self._method("futurebridge")]
            case "pools":
                wide = collect.slm_k + self.settings.futures.llm_k
                kinds = {"slm": "SLM pool", "llm": "LLM pool", "slm-wide": f"SLM top-{wide}"}
                return [self._recipe(f"pool-{kind}", label, score={"pool": kind}) for kind, label in kinds.items()]
            case "horizons":
                others = [h for h in self.settings.train.horizons if h != self.horizon]
                return [self._recipe(f"horizon-{h}", f"H = {h}", float(h), train={"horizons": (h,)}) for h in others]
            case "futures":
                return [
                    self._recipe(f"future-{kind}", label, score={"future": kind}) for kind, label in QUALITIES.items()
                ]
            case "alpha":
                distilled = [row for row in self._distilled() if row.key == "distilled"]
                hybrids = [
                    self._recipe(f"alpha-{a:g}", f"alpha = {a:g}", a, train={"alpha": a})
                    for a in vary.alphas
                    if a not in (0.0, self.settings.train.alpha)
                ]
                return [*(replace(row, label="alpha = 0", x=0.0) for row in distilled), *hybrids]
            case "scope":
                return [self._recipe("scope-sequence", "adapter on the whole sequence", train={"scope": "sequence"})]
            case "temperature":
                return [
                    self._recipe(f"temperature-{t:g}", f"temperature {t:g}", t, train={"temperature": t})
                    for t in vary.temperatures
                    if t != self.settings.train.temperature
                ]
            case "repairs":
                return self._repairs()
            case "quantiles":
                elsewhere = [q for q in vary.quantiles if q != collect.quantile]
                return [row for quantile in elsewhere for row in self._at(quantile)]
            case "costs":
                return []

    def references(self) -> list[Variant]:
        """The methods that every row is compared with."""
        return [self._method(name) for name in REFERENCES]

    def _method(self, name: str, x: float | None = None, inside: Variant | None = None) -> Variant:
        return Variant(name, label_of(name, self.settings), {}, name, x, inside)

    def _recipe(
        self, key: str, label: str, x: float | None = None, inside: Variant | None = None, **changes: dict[str, Any]
    ) -> Variant:
        """A reranker of its own, unless only its deployment changes."""
        if set(changes) != {"evaluate"}:
            changes["train"] = {"horizons": (self.horizon,), **of_its_target(changes.get("train", {}))}
        return Variant(key, label, changes, x=x, inside=inside)

    def _known(self) -> list[Variant]:
        return [self._method(name) for name in self.settings.compare.methods if name != "futurebridge"]

    def _distilled(self) -> list[Variant]:
        pool = {"pool": "slm"}
        return [
            self._recipe("distilled", "Distilled LLM preference", train={"alpha": 0.0}),
            self._recipe("s2t-local", "S2T-Local, matched", train={"alpha": 0.0}, score=pool),
            self._recipe("s2t-local-original", "S2T-Local, original loss", train={"target": "select"}, score=pool),
        ]

    def _external(self) -> list[Variant]:
        names = self.settings.compare.external
        return [Variant(f"external-{name}", name, method=EXTERNAL + name) for name in names]

    def _repairs(self, inside: Variant | None = None) -> list[Variant]:
        """What is tried beyond the published recipe, plain options of the same commands; perhaps elsewhere."""
        x = None if inside is None else inside.x

        def recipe(key: str, label: str, **changes: dict[str, Any]) -> Variant:
            return self._recipe(key, label, x, inside, **changes)

        def override(label: str, other: Variant | None = None) -> Variant:
            key = "override" if other is None else f"{other.key}-override"
            return self._recipe(key, label, x, other or inside, evaluate=certain)

        certain = {"certainty": self.settings.experiment.certainty}
        calibrated = {"target": "calibrated"}
        features = recipe("features", "candidate features", train={"features": FEATURES})
        both = recipe("calibrated-features", "calibrated target, features", train={**calibrated, "features": FEATURES})
        own = recipe("own", "the SLM's own future", score={"future": "own"})
        return [
            features,
            override("override by a certain LLM"),
            override("candidate features, override", features),
            recipe("calibrated", "calibrated target", train=calibrated),
            both,
            override("calibrated target, features, override", both),
            own,
            override("the SLM's own future, override", own),
            recipe("on-policy", "states under the deployed reranker", collect={"deployed": str(self.run)}),
            recipe("hindsight", "hindsight baseline", train={"hindsight": self.settings.experiment.hindsight}),
        ]

    def _at(self, quantile: float) -> list[Variant]:
        """Peers and recipes with states, futures and rerankers of their own at another quantile."""
        place = self._recipe(f"q{quantile:g}", f"quantile {quantile:g}", quantile, collect={"quantile": quantile})
        place = replace(place, method=None)
        peers = ("takeover", "s2t", "direct", "futurebridge")
        repaired = {row.key: row for row in self._repairs(place)}
        return [*(self._method(name, quantile, place) for name in peers), *(repaired[key] for key in SWEPT)]


def of_its_target(train: dict[str, Any]) -> dict[str, Any]:
    """Training settings with the target that they are of, and without what the run's own target alone takes."""
    if "target" in train:
        return {"alpha": 1.0, "hindsight": 0, **train}
    return {"target": "future", **train} if train.keys() & {"alpha", "hindsight", "temperature"} else train


def settings_of_variant(settings: RunSettings, variant: Variant) -> RunSettings:
    """The run's settings with the variant's changes, and with its method alone."""
    if variant.inside is not None:
        settings = settings_of_variant(settings, variant.inside)
    asked = variant.method or ""
    name = asked.removeprefix(EXTERNAL)
    external = {name: settings.compare.external[name]} if asked.startswith(EXTERNAL) else {}
    compare = {"methods": (asked,) if asked and not external else (), "external": external}
    return changed(settings, {**variant.changes, "compare": compare})


def chosen_horizon(run: Path) -> int:
    """The horizon that a run chose on validation problems; raises ValueError where it is not trained."""
    return int(Artefact(run, "selection").finished()["summary"]["horizon"])


def run_experiment(
    tables: Sequence[Table],
    settings: RunSettings,
    run: Path,
    workers: int | None = None,
    show: Callable[[str], None] = print,
) -> None:
    """Make every row of some tables, several at a time; what is finished stays, what could not be made is said.

    Args:
        tables: which.
        settings: of the run.
        run: its folder.
        workers: processes, one thread each; None for one a core, or a single one where there is a GPU.
        show: takes finished stages' reports in Markdown.

    Raises:
        ValueError: settings, models or files that do not fit the run, or another recipe than the published one.
        OSError: no room, no model, no server, or a worker that was ended; what is finished is kept.
    """
    if settings.train.features or settings.evaluate.certainty is not None:
        raise ValueError(
            "experiment: expected the published recipe, to which every row is compared, got train.features or "
            "evaluate.certainty; name a configuration without them, such as qwen3-1.7b-published"
        )
    for command in ("collect", "futures", "score", "train", "rollouts"):
        run_command(command, settings, run, show=show)  # type: ignore[arg-type]
    _finish([AgreementStage], settings, run, show)
    rows = Rows(settings, run, chosen_horizon(run))
    wanted = {table: rows.of(table) for table in tables}
    made = {v.path: v for v in (*rows.references(), *(v for found in wanted.values() for v in found))}
    for variant in list(made.values()):
        while variant.inside is not None:
            variant = variant.inside
            made.setdefault(variant.path, variant)
    methods = {variant.method for variant in made.values()} | (
        set(settings.compare.methods) if "costs" in tables else set()
    )
    if any(name is not None and method(name).routed for name in methods):  # once for all that link them
        _attempt([RouterLabelStage, RouterStage], settings, run, show)
    if "futures" in tables:
        _attempt([SampleStage], settings, run, show)
    judged = {variant.path for table in JUDGED for variant in wanted.get(table, ()) if variant.method == "futurebridge"}
    if workers is None:
        workers = 1 if torch.cuda.is_available() else os.cpu_count() or 1
    finished: list[Variant] = []
    with Board(TimeElapsedColumn()) as board:
        board.show("variants", 0, len(made))

        def told(variant: Variant, problem: str | None) -> None:
            """A variant is made, or could not be."""
            finished.append(variant)
            became = "done" if problem is None else f"not made: {problem}"
            text = f"{'/'.join(variant.path.parts[1::2])}: {became}, {len(finished)}/{len(made)} variants"
            board.say("experiment", text, always=problem is not None)
            board.show("variants", len(finished), len(made))

        for depth in sorted({len(path.parts) for path in made}):
            wave = [variant for path, variant in made.items() if len(path.parts) == depth]
            wave.sort(key=lambda variant: variant.method is not None)  # others wait for those without
            _work(wave, judged, settings, run, workers, told)
    if "costs" in tables:  # alone, on an idle machine
        _attempt([DeploymentStage], settings, run, show)
    write_file(run / SETTINGS, settings.model_dump_json(indent=1).encode())


def _finish(kinds: Sequence[type[Stage]], settings: RunSettings, run: Path, show: Callable[[str], None]) -> None:
    for kind in kinds:
        stage = kind(settings, run)
        show(stage.report(run_stage(stage)))


def _attempt(kinds: Sequence[type[Stage]], settings: RunSettings, run: Path, show: Callable[[str], None]) -> None:
    """As `_finish`, but what cannot be made is said: rows that need it say so in their turn."""
    try:
        _finish(kinds, settings, run, show)
    except ValueError as problem:
        show(f"**not made**: {problem}")


def _work(
    wave: Sequence[Variant],
    judged: Collection[Path],
    settings: RunSettings,
    run: Path,
    workers: int,
    told: Callable[[Variant, str | None], None],
) -> None:
    values = settings.model_dump_json()
    if workers == 1:  # where the models are already
        for variant in wave:
            told(variant, make(variant, values, run, variant.path in judged))
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin) as pool:
        jobs = {pool.submit(make, variant, values, run, variant.path in judged): variant for variant in wave}
        try:
            for job in as_completed(jobs):
                told(jobs[job], job.result())
        except BrokenProcessPool:
            raise OSError(
                f"experiment: expected {workers} worker processes to finish, got one ended from outside, perhaps for "
                "memory; run it again with fewer --workers, what is finished is kept"
            ) from None


def _begin() -> None:
    """A worker's own: one thread, and no life beyond the process that it works for."""
    torch.set_num_threads(1)
    parent = parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def make(variant: Variant, values: str, run: Path, judge: bool) -> str | None:
    """Make a variant, perhaps in a process of its own.

    Args:
        variant: what is changed.
        values: the run's settings as JSON.
        run: its folder.
        judge: whether its rerankers are held against the rollouts.

    Returns:
        why it could not be made, None where it was.
    """
    settings = settings_of_variant(RunSettings.model_validate_json(values), variant)
    folder = run / variant.path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PROBLEM).unlink(missing_ok=True)
    with (folder / LOG).open("a") as log, redirect_stdout(log):  # a line a shard
        try:
            parent = run if variant.inside is None else run / variant.inside.path
            work_through(_stages(variant, settings, judge), settings, folder, parent)
        except ValueError as problem:
            traceback.print_exc(file=log)
            write_file(folder / PROBLEM, json_bytes({"problem": str(problem)}))
            return str(problem)
    return None


def _stages(variant: Variant, settings: RunSettings, judge: bool) -> list[type[Stage]]:
    """All stages up to a variant's rows."""
    trained = variant.method in ("futurebridge", None)
    commands: tuple[Command, ...] = ("collect", "futures", "score", "train") if trained else ("collect",)
    kinds = [kind for command in commands for kind in stages_of(command, settings)]
    if judge or variant.method is None:  # one for all inside it that are calibrated
        kinds.append(RolloutStage)
    if judge:
        kinds.append(AgreementStage)
    if variant.method is not None and method(variant.method).routed:
        kinds += [RouterLabelStage, RouterStage]
    if variant.method is not None:
        kinds.append(CompareStage)
    return kinds
