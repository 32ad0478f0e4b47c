"""S2T-Local's loss against its formula, its target and hinge by hand, and what a run trains with."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import sweep_process
import torch
from paper_runs import settings
from tiny import tiny

from benchmarks.paper.run import instead
from benchmarks.paper.s2t_local import KL_WEIGHT, SelectionSweep, SelectionTrainStage, hinge, selection_target
from fb_core import Optimisation, TokenReranker, TrainingGroup
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.records import Examples
from fb_core.apps.pipeline.train import TrainStage
from fb_core.rerank.training import RerankerRun
from fb_kernels import group_cross_entropy


def original_loss(scores, teacher):
    """train_s2t_local.py, `listwise_loss`, mode top1_ce, of one group: teacher holds p_T of the whole vocabulary."""
    p_teacher = [p / sum(teacher) for p in teacher]
    total = sum(math.exp(score) for score in scores)
    p_student = [math.exp(score) / total for score in scores]
    kl = sum(t * math.log(t / s) for t, s in zip(p_teacher, p_student, strict=True))
    best = p_teacher.index(max(p_teacher))
    rival = max((score for k, score in enumerate(scores) if k != best), default=-math.inf)
    return -math.log(p_student[best]) + 0.1 * kl, max(0.0, 1.0 - (scores[best] - rival))


@pytest.mark.parametrize(
    ("scores", "teacher", "smooth", "active"),
    [  # numbers worked out by hand: softmax(score) = 0.6285, 0.1402, 0.2312 and p_T = 0.625, 0.125, 0.25
        ([2.0, 0.5, 1.0], [0.5, 0.1, 0.2], 0.464369 + 0.1 * 0.001613, 0.0),
        ([0.5, 2.0, 1.0], [0.5, 0.1, 0.2], 1.964369 + 0.1 * 0.751613, 2.5),
        ([0.0, 0.0], [0.3, 0.3], math.log(2), 1.0),
        ([0.7], [0.4], 0.0, 0.0),
    ],
)
def test_the_original_loss_is_a_cross_entropy_and_a_hinge(scores, teacher, smooth, active):
    assert original_loss(scores, teacher) == pytest.approx((smooth, active), abs=1e-5)
    smooth, active = original_loss(scores, teacher)
    logprob = torch.tensor(teacher, dtype=torch.float64).log()
    target = selection_target(logprob)
    assert target.dtype == torch.float64
    assert float(target.sum()) == pytest.approx(1.1)
    p = torch.tensor(teacher, dtype=torch.float64) / sum(teacher)
    entropy = float(-(p * p.log()).sum())
    offsets = torch.tensor([0, len(scores)])
    score = torch.tensor(scores, dtype=torch.float64)
    ours = group_cross_entropy(score, target, offsets)
    assert float(ours) - KL_WEIGHT * entropy == pytest.approx(smooth, rel=1e-12, abs=1e-12)
    assert float(hinge(score, target, [len(scores)])) == pytest.approx(active, rel=1e-12)


def test_ties_for_the_best_go_to_the_first():
    assert selection_target(torch.tensor([-1.0, -math.inf])).tolist() == pytest.approx([1.1, 0.0])
    assert selection_target(torch.tensor([-1.0, -1.0])).tolist() == pytest.approx([1.05, 0.05])


@pytest.mark.parametrize(
    ("scores", "targets", "hinges"),
    [
        ([[2.0, 0.5, 1.0]], [[0.7, 0.1, 0.2]], [0.0]),  # 1 - (2 - 1) = 0
        ([[2.0, 0.5, 1.5]], [[0.1, 0.7, 0.2]], [2.5]),
        ([[0.3, 0.3]], [[0.5, 0.5]], [1.0]),  # ties to the first, which gains nothing by it
        ([[0.0], [0.0, 4.0, 1.0, 2.0], [5.0, 1.0]], [[1.0], [0.0, 0.0, 1.0, 0.0], [0.9, 0.1]], [0.0, 4.0, 0.0]),
    ],
)
def test_the_hinge_by_hand(scores, targets, hinges):
    """relu(margin - (target_score - hard_negative)) at margin 1, YeRona/Select-to-Think scripts/train_s2t_local.py."""
    flat, wanted = (torch.tensor([*chain.from_iterable(groups)]) for groups in (scores, targets))
    assert float(hinge(flat, wanted, [len(group) for group in scores])) == pytest.approx(sum(hinges))


def parameters_of(run):
    return [parameter for parameter in run.reranker.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("scope", ["candidate", "sequence"])
def test_a_sweep_adds_each_groups_hinge_to_its_run(scope, microbatches):
    model = tiny("qwen3")
    data = sweep_process.trajectories(6)
    data[0].groups.append(TrainingGroup(5, torch.tensor([3]), torch.ones(1, 2)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        rerankers = [TokenReranker.from_base(model, rank=2, dropout=0.0, scope=scope) for _ in range(2)]
        runs = [RerankerRun(reranker, column=column) for reranker, column in zip(rerankers, (1, 0), strict=True)]
        for run in runs:
            for parameter in parameters_of(run):
                torch.nn.init.normal_(parameter, std=0.3)
    sweep = SelectionSweep(runs, data, Optimisation(groups_per_step=100, microbatches=microbatches))
    wanted, resting = [], 0
    for run in runs:
        parameters, hinges = parameters_of(run), []
        total = torch.zeros(())
        for trajectory in data:
            for group in trajectory.groups:
                score = run.reranker.scores(trajectory.tokens[: group.position], group.candidates)
                target = group.target[:, run.column]
                best = int(target.argmax())
                others = [s for k, s in enumerate(score) if k != best]
                total = total - (target * score.log_softmax(0)).sum()
                if others:
                    hinges.append((1.0 - (score[best] - max(others))).relu())
        resting += sum(hinge.item() == 0.0 for hinge in hinges)
        loss = (total + sum(hinges)) / sum(len(trajectory.groups) for trajectory in data)
        gradients = torch.autograd.grad(loss, parameters)
        wanted.append(torch.cat([*(gradient.flatten() for gradient in gradients), loss.detach()[None]]))
    assert resting
    for gradient, plain in zip(sweep._gradients(), wanted, strict=True):
        torch.testing.assert_close(gradient, plain, rtol=1e-3, atol=1e-5)
    assert not torch.equal(wanted[0], wanted[1])


def test_a_variants_target_and_loss(trained):
    chosen = settings(train={"horizons": [8, 4]}, experiment={"target": "select"})
    stage = instead(chosen)[TrainStage](chosen, trained)
    assert isinstance(stage, SelectionTrainStage)
    shards = Artefact(trained, "scores").shards("train")
    groups = [group for shard in shards for group in Examples(trained, shard).groups.values()]
    targets = [group.target for trajectory in stage.groups("train") for group in trajectory.groups]
    for group, target in zip(groups, targets, strict=True):
        wanted = KL_WEIGHT * group.state.pool.llm_logprob.double().softmax(0)
        wanted[group.state.pool.llm_logprob.argmax()] += 1
        torch.testing.assert_close(target.double(), torch.stack([wanted] * 2, 1), rtol=1e-4, atol=1e-5)
    assert all(type(sweep) is SelectionSweep for sweep in stage._fresh())
    assert instead(settings()) == {}
    assert stage.identity(models=False)["settings"]["experiment"] == {"target": "select"}
