"""What the published run costs at least, by stage: docs/scale.md. Only the time to score a group is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fb_core.apps.pipeline.page import markdown_table
from fb_core.apps.settings.run import RolloutSettings

FLOPS, COPY, MEMORY = 790e12, 3.0e12, 80e9 * 0.9  # H100: dense bf16 FLOP/s, bytes/s, bytes for a server
MOST = 256  # sequences in a batch
ANSWER, FUTURE, PROMPT = 1000, 800, 100  # mean tokens, assumed: the paper's lengths are not known here
PROBLEMS, STATES, GROUPS, TRAINED = 7500, 31_680, 18_432, 16_576  # the paper's counts
VALIDATION, BENCHMARKS, AIME, EVENTS, CANDIDATES = 750, 2553, 60, 4.8, 13
CERTIFICATION = 750  # problems set aside by the shipped settings, which train on as many fewer
RUNS, EPOCHS, SEEDS = 12, 3, 3
GROUP = 17.3e-3  # seconds, measured on an H100: results/h100/scorer.json, four groups packed; the floor is 9e-3
GROUP_STEP = 1.5e-3  # seconds, a computed floor
PAPER = {"collect": 5.8, "futures": 29.4, "score": 8.6, "train": 7.2}  # H200 hours, as reported


@dataclass(frozen=True)
class Model:
    """A model in bfloat16: parameters, and bytes of keys and values per token."""

    parameters: float
    kv: int

    def read(self, tokens: float) -> float:
        """GPU seconds of a forward over this many tokens."""
        return 2 * self.parameters * tokens / FLOPS

    def write(self, tokens: float, context: float, gpus: int = 1) -> float:
        """GPU seconds to write this many tokens, each after `context` tokens on average; a copy has `gpus` GPUs."""
        weights = 2 * self.parameters
        held = 2 * context  # each sequence reserves twice its mean length
        batch = min(MOST, (MEMORY * gpus - weights) // (self.kv * held))
        bytes_ = weights + batch * context * self.kv
        step = max(bytes_ / (COPY * gpus), weights * batch / (FLOPS * gpus))
        return gpus * tokens * step / batch


SLM = Model(1.72e9, 28 * 2 * 8 * 128 * 2)
LLM = Model(32.8e9, 64 * 2 * 8 * 128 * 2)


@dataclass(frozen=True)
class Row:
    """A stage: GPU hours with copies on one H100 and on four, and how many GPUs can share it."""

    stage: str
    work: str
    one_gpu: float
    four_gpus: float
    most: int = 64

    def wall(self, gpus: int) -> float:
        """Hours on this many GPUs."""
        return self.four_gpus / min(gpus, self.most)


def decoded(problems: float, gpus: int) -> float:
    """GPU hours of answers by a pair: the SLM writes, the LLM reads each once and gives one token per event."""
    asked = LLM.write(problems * EVENTS, PROMPT + ANSWER / 2, gpus)
    return (SLM.write(problems * ANSWER, PROMPT + ANSWER / 2) + LLM.read(problems * (PROMPT + ANSWER)) + asked) / 3600


def rolled(states: float) -> float:
    """GPU hours of the SLM's greedy rollout after every candidate."""
    return SLM.write(states * CANDIDATES * ANSWER / 2, PROMPT + 3 * ANSWER / 4) / 3600


def futures(states: float, gpus: int) -> float:
    """GPU hours of the LLM's continuations."""
    return LLM.write(states * FUTURE, PROMPT + ANSWER / 2 + FUTURE / 2, gpus) / 3600


def collected(problems: float) -> float:
    """GPU hours of the trajectories, of the pass that computes their entropies, and of the LLM reading each once."""
    whole = problems * (PROMPT + ANSWER)
    return (SLM.write(problems * ANSWER, PROMPT + ANSWER / 2) + SLM.read(whole) + LLM.read(whole)) / 3600


def rows() -> list[Row]:
    """All stages of the published run, then our additions."""
    few = 3 * 50 + AIME  # problems: 50 of each of five benchmarks, AIME's 30 and 30
    ratio = STATES / PROBLEMS
    step = RUNS * TRAINED * EPOCHS * GROUP_STEP / 3600
    tests = 2 + 2 * SEEDS  # greedy decoding and the direct score once, two recipes for every seed's reranker
    share, learned = RolloutSettings().train, STATES - (VALIDATION + CERTIFICATION) * ratio
    estimates: list[tuple[Any, ...]] = [
        ("collect", f"{PROBLEMS:,} trajectories, {STATES:,} states", *[collected(PROBLEMS)] * 2),
        ("futures", f"{STATES:,} continuations by the LLM", futures(STATES, 1), futures(STATES, 4)),
        ("score", f"{GROUPS:,} groups of {CANDIDATES} at {1e3 * GROUP:g} ms", *[GROUPS * GROUP / 3600] * 2),
        ("train", f"{RUNS} runs x {TRAINED:,} groups x {EPOCHS} epochs at {1e3 * GROUP_STEP:g} ms", step, step, 8),
        (
            "select",
            f"{RUNS * EPOCHS} adapters x {VALIDATION} answers",
            *(decoded(RUNS * EPOCHS * VALIDATION, n) for n in (1, 4)),
        ),
        (
            "evaluate",
            f"{SEEDS} x {BENCHMARKS:,} answers by the pair, {BENCHMARKS + 2 * AIME:,} by the SLM",
            *(
                decoded(SEEDS * BENCHMARKS, n) + SLM.write((BENCHMARKS + 2 * AIME) * ANSWER, PROMPT + ANSWER / 2) / 3600
                for n in (1, 4)
            ),
        ),
        (
            "rollouts",
            f"{VALIDATION * ratio:,.0f} held-out states x {CANDIDATES} candidates",
            *[rolled(VALIDATION * ratio)] * 2,
        ),
        (
            "benchmark states",
            f"the first three stages and rollouts over {few} problems, {few * ratio:,.0f} states",
            *(
                collected(few) + futures(few * ratio, gpus) + few * ratio * GROUP / 3600 + rolled(few * ratio)
                for gpus in (1, 4)
            ),
        ),
        (
            "choose (not in the paper)",
            f"{tests} x {CERTIFICATION} answers at most, {share:.0%} of the training states rolled out",
            *(decoded(tests * CERTIFICATION, n) + rolled(share * learned) for n in (1, 4)),
        ),
        (
            "one more row of a table",
            f"{SEEDS} x {BENCHMARKS:,} answers by the pair",
            *(decoded(SEEDS * BENCHMARKS, n) for n in (1, 4)),
        ),
    ]
    return [Row(*estimate) for estimate in estimates]


def table() -> list[str]:
    """Estimates next to the paper's figures."""
    head = [
        "stage",
        "work",
        "one H100, h",
        "eight H100, h",
        "64 H100, h",
        "GPU-hours, four GPUs per copy",
        "paper, H200 h",
    ]
    lines = []
    for row in rows():
        paper = PAPER.get(row.stage)
        hours = [row.one_gpu, row.wall(8), row.wall(64), row.four_gpus]
        lines.append(
            [
                row.stage,
                row.work,
                *(f"{value:.2g}" for value in hours),
                "not known here" if paper is None else f"{paper}",
            ]
        )
    return markdown_table(head, lines)
