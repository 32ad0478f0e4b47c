"""Stage 1: SLM trajectories without intervention, and their entropies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from fb_core import hf
from fb_core.llm import LocalLLM
from fb_core.policy import RequestPolicy
from fb_core.stages.examples import State, Trajectory, example_files
from fb_core.stages.inputs import problems_hash, splits_of, verifier_of
from fb_core.stages.problems import Problem
from fb_core.stages.stage import Cost, Output, Stage
from fb_core.verify import Verdict, Verifier, tally

ROWS = 16_384  # of a teacher-forced forward
LOGIT_ROWS = 1024  # of logits [rows, V] held at once


def collect(
    slm: LocalLLM,
    problems: Sequence[Problem],
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    top_k: int = 64,
    on_done: Callable[[int], None] | None = None,
    write: Callable[[Sequence[Tensor], int], list[Tensor]] | None = None,
) -> list[Trajectory]:
    """Greedy SLM outputs, and the entropy at every step from one teacher-forced pass.

    Args:
        slm: the small model.
        problems: what is asked.
        prompts: one [P] of ids per problem.
        max_new_tokens: longest output.
        top_k: size of the softmax that the entropy is taken over.
        on_done: called with the number of finished problems.
        write: writes the outputs from prompts and max_new_tokens; the SLM in this process if None.
    """
    policy = RequestPolicy(float("inf"), top_k)
    outputs = (write or slm.complete_many)(prompts, max_new_tokens)
    whole = [torch.cat([prompt, output.to(prompt)]) for prompt, output in zip(prompts, outputs, strict=True)]
    trajectories: list[Trajectory] = []
    for start, rows in teacher_forced(slm.model, whole, [len(prompt) - 1 for prompt in prompts]):
        for index, hidden in enumerate(rows, start):
            tokens, length = whole[index], len(prompts[index])
            blocks = hidden[:-1].split(LOGIT_ROWS)
            entropy = torch.cat([policy.entropy(logits_of(slm, block)) for block in blocks])
            trajectories.append(Trajectory(problems[index], tokens, length, entropy))
        if on_done is not None:
            on_done(len(trajectories))
    return trajectories


def logits_of(slm: LocalLLM, hidden: Tensor) -> Tensor:
    """Logits [n, V] from hidden states [n, D], without padding ids."""
    return hf.logits(slm.model, hidden)[:, : slm.vocabulary]


@torch.no_grad()
def teacher_forced(
    model: hf.CausalLM, sequences: Sequence[Tensor], first: Sequence[int]
) -> Iterator[tuple[int, list[Tensor]]]:
    """(index of the first sequence, hidden states from row `first` on of each) for packs of whole sequences."""
    for start, stop in hf.packs([len(tokens) for tokens in sequences], ROWS):
        pack = sequences[start:stop]
        layout = hf.Layout.build([([len(tokens)], 0, 0) for tokens in pack], model.device)
        positions = torch.cat([torch.arange(len(tokens), device=model.device) for tokens in pack])
        hidden = hf.packed_forward(model, torch.cat(list(pack)), positions, layout)
        rows = hidden.split([len(tokens) for tokens in pack])
        yield start, [states[skip:] for states, skip in zip(rows, first[start:stop], strict=True)]


def texts_of(outputs: Sequence[Tensor], tokenizer: hf.Tokenizer) -> list[str]:
    """The texts of token ids, as the verifier judges them."""
    return [tokenizer.decode(output.tolist(), skip_special_tokens=True) for output in outputs]


def judged(
    states: Sequence[State], written: Sequence[Tensor], tokenizer: hf.Tokenizer, verifier: Verifier
) -> tuple[list[str], list[Verdict]]:
    """(texts, verdicts) of the whole solutions: the output up to each state, then what was written from there."""
    outputs = [torch.cat([state.output, new.to(state.output)]) for state, new in zip(states, written, strict=True)]
    texts = texts_of(outputs, tokenizer)
    golds = [state.trajectory.problem.answer for state in states]
    return texts, verifier.verify_many(texts, golds, bad_golds="unparsable")


class TrajectoryStage(Stage):
    """Greedy outputs of the SLM with entropies."""

    name = "trajectories"
    command = "futurebridge collect"
    slice: ClassVar[Sequence[str]] = ("problems", "collect.max_new_tokens", "collect.top_k", "verify")

    def data(self) -> dict[str, Any]:
        return {split: problems_hash(problems) for split, problems in self.splits.items()}

    @property
    def splits(self) -> dict[str, list[Problem]]:
        """The problems as "train" and "validation"."""
        return {
            name: problems for name, problems in splits_of(self.settings.problems).items() if name != "certification"
        }

    def shards(self) -> dict[str, int]:
        return {name: len(problems) for name, problems in self._problems.items()}

    @cached_property
    def _problems(self) -> dict[str, list[Problem]]:
        """The problems of every shard; all stages up to the scores have these shards."""
        size = self.settings.problems.per_shard
        return {
            f"{split}-{start // size:05d}": problems[start : start + size]
            for split, problems in self.splits.items()
            for start in range(0, len(problems), size)
        }

    @cached_property
    def longest(self) -> int:
        """The most tokens of a trajectory, without its prompt if the tokenizer is not on this machine."""
        problems = [problem for members in self.splits.values() for problem in members]
        asked = self.settings.problems
        prompt = self.models.longest_prompt(problems, asked.prompt, asked.thinking)
        return prompt + self.settings.collect.max_new_tokens

    def work(self, shard: str) -> Output:
        problems, slm, settings = self._problems[shard], self.models.local_slm, self.settings.collect
        tokenizer, asked = self.models.tokenizer, self.settings.problems
        prompts = self.models.prompts(problems, asked.prompt, asked.thinking)
        write = self.models.slm_writer.complete_many
        found = collect(slm, problems, prompts, settings.max_new_tokens, settings.top_k, self.on_progress, write)
        texts = texts_of([trajectory.output for trajectory in found], tokenizer)
        golds = [problem.answer for problem in problems]
        verdicts = verifier_of(self.settings.verify).verify_many(texts, golds, bad_golds="unparsable")
        counts = {"trajectories": len(found), "tokens": sum(len(trajectory.output) for trajectory in found)}
        return Output(example_files(shard, Trajectory, found), counts | tally(texts, verdicts))

    def cost(self) -> Cost:
        return Cost("generated and teacher-forced, prompts included", 2 * self.longest)
