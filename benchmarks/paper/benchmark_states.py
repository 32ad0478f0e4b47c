"""The states of benchmark problems: the run's stages over each benchmark, in a folder of its own inside the run's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.paper.agreement import AgreementStage, agreement_table
from benchmarks.paper.rollouts import HeldOutRolloutStage
from benchmarks.paper.settings import PaperSettings
from fb_core.apps.pipeline.choose import ChoiceStage, RerankerStage
from fb_core.apps.pipeline.collect import PolicyStage, StateStage, TrajectoryStage
from fb_core.apps.pipeline.commands import Command, stages_of
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.models import POLICY, RERANKER, benchmark_problems, file_stem, frozen_policy
from fb_core.apps.pipeline.problems import Problem, draw_problems
from fb_core.apps.pipeline.run import Output, Stage, run_stage

BEFORE: tuple[Command, ...] = ("collect", "futures", "score")  # whose stages come before the rollouts


class BenchmarkTrajectoryStage(TrajectoryStage):
    """Trajectories of some problems of a benchmark, all of them as "validation"."""

    settings: PaperSettings
    slice = (*TrajectoryStage.slice, "evaluate.benchmarks", "evaluate.limit", "experiment.benchmark_problems")

    def data(self) -> dict[str, Any]:
        tested = [Artefact(self.run.parent, stage).finished()["digest"] for stage in (POLICY, RERANKER)]
        return {"tested": tested} | super().data()  # before any problem is read

    @property
    def splits(self) -> dict[str, list[Problem]]:
        few, seed = self.settings.experiment.benchmark_problems, self.settings.problems.seed
        benchmarks = benchmark_problems(self.settings).values()
        return {"validation": [problem for problems in benchmarks for problem in draw_problems(problems, few, seed)]}


class BenchmarkPolicyStage(PolicyStage):
    """The request policy of the run around this one."""

    def work(self, shard: str) -> Output:
        policy = frozen_policy(self.run.parent)
        line = json.dumps({"threshold": policy.threshold, "top_k": policy.top_k}) + "\n"
        return Output({f"{shard}.jsonl": line.encode()}, {"validation tokens": 0})

    def report(self, manifest: dict[str, Any]) -> str:
        return f"**{self.name}**: asks above {frozen_policy(self.run).threshold:.4f} nats, as in {self.run.parent}"


class BenchmarkAgreementStage(AgreementStage):
    """The rerankers of the run around this one."""

    reads = (TrajectoryStage, StateStage, HeldOutRolloutStage)

    @property
    def trained(self) -> Path:
        return self.run.parent


INSTEAD: Mapping[type[Stage], type[Stage]] = {
    TrajectoryStage: BenchmarkTrajectoryStage,
    PolicyStage: BenchmarkPolicyStage,
    AgreementStage: BenchmarkAgreementStage,
}


def benchmark_runs(settings: PaperSettings, run: Path) -> dict[str, tuple[PaperSettings, Path]]:
    """Settings and folder of every benchmark's states, by the benchmark's name; empty until `train` is finished."""
    last = ChoiceStage if settings.problems.certification else RerankerStage
    manifest = Artefact(run, last.name).manifest()
    if not settings.experiment.benchmark_problems or manifest is None or not manifest["complete"]:
        return {}
    runs: dict[str, tuple[PaperSettings, Path]] = {}
    for name in settings.evaluate.benchmarks:
        values = settings.model_dump()
        values["collect"] |= {"max_new_tokens": settings.evaluate.max_new_tokens}
        values["evaluate"] |= {"benchmarks": (name,)}
        folder = run / f"benchmark-{file_stem(name)}"
        if folder in (other for _, other in runs.values()):
            raise ValueError(f"evaluate.benchmarks: expected names that differ, got {name!r} again; rename a file")
        runs[name] = PaperSettings.model_validate(values), folder
    return runs


def judge_benchmarks(settings: PaperSettings, run: Path, show: Callable[[str], None] = print) -> None:
    """Collect, score and roll out states of some problems of every benchmark, and judge the rerankers there.

    Does nothing until `train` is finished: before that no test problem is read. Tables are shown in Markdown.
    """
    for name, (chosen, folder) in benchmark_runs(settings, run).items():
        judge_states(chosen, folder)
        show(f"**agreement on {name}**\n\n{agreement_table(chosen, folder)}")


def judge_states(settings: PaperSettings, folder: Path) -> None:
    """Do so for the states of one benchmark."""
    kinds: list[type[Stage]] = [kind for command in BEFORE for kind in stages_of(command, settings)]
    kinds += [HeldOutRolloutStage, AgreementStage]
    for kind in kinds:
        run_stage(INSTEAD.get(kind, kind)(settings, folder, INSTEAD))
