"""Rollouts: the SLM's own greedy continuation after every candidate, without later interventions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from fb_core.apps.pipeline.collect import OverStates, StateStage, TrajectoryStage, judge_solutions
from fb_core.apps.pipeline.models import verifier_of
from fb_core.apps.pipeline.records import Examples, LoggedState, Rollout, example_files
from fb_core.apps.pipeline.run import Output
from fb_core.apps.pipeline.scores import reduce_pool
from fb_core.apps.pipeline.statistics import outcomes_differ
from fb_core.llm.local import LocalLLM
from fb_core.models.facts import Tokenizer
from fb_core.runtime.sampling import seeded
from fb_core.verify.verifier import Verifier


def roll_out(
    slm: LocalLLM, states: Sequence[LoggedState], tokenizer: Tokenizer, verifier: Verifier, max_new_tokens: int
) -> list[Rollout]:
    """Roll out every candidate of every state's pool with the SLM, and judge the solutions."""
    prefixes, firsts = [state.prefix.to(slm.device) for state in states], [state.pool.ids.tolist() for state in states]
    written = slm.complete_branches(prefixes, firsts, max_new_tokens)
    branches = [
        torch.cat([rest.new_tensor([first]), rest])
        for own, rests in zip(firsts, written, strict=True)
        for first, rest in zip(own, rests, strict=True)
    ]
    owners = [state for state in states for _ in range(len(state.pool))]
    texts, verdicts = judge_solutions(owners, branches, tokenizer, verifier)
    rollouts, start = [], 0
    for state in states:
        own = slice(start, start := start + len(state.pool))
        correct = torch.tensor([verdict == "correct" for verdict in verdicts[own]], dtype=torch.bool)
        rollouts.append(Rollout(state, correct, texts[own]))
    return rollouts


class RolloutStage(OverStates):
    """Rollouts of all candidates of a share of the training states, to which the value head is fitted."""

    name = "rollouts"
    command = "futurebridge train"
    slice: ClassVar[Sequence[str]] = ("rollouts", "collect.slm_k", "collect.max_new_tokens", "verify")
    reads = (TrajectoryStage, StateStage)
    uses = ("slm", "tokenizer", "valid_vocab")
    split = "train"

    @property
    def share(self) -> float:
        """The share of the states that is rolled out."""
        return self.settings.rollouts.train

    def work(self, shard: str) -> Output:
        seed, collect = self.settings.rollouts.seed, self.settings.collect
        logged = Examples(self.run, shard).states.values()
        states = [replace(state, pool=reduce_pool(state.pool, collect.slm_k)) for state in logged]
        states = [state for state in states if len(state.pool) >= 2]
        drawn = [state for state in states if seeded(seed, state.prefix.tolist()).random() < self.share]
        models, verifier = self.models, verifier_of(self.settings.verify)
        rollouts = roll_out(models.local_slm, drawn, models.tokenizer, verifier, collect.max_new_tokens)
        mixed = sum(outcomes_differ(rollout.correct) for rollout in rollouts)
        texts = sum(len(rollout.texts) for rollout in rollouts)
        counts = {"states": len(rollouts), "mixed": mixed, "rollouts": texts}
        return Output(example_files(shard, Rollout, rollouts), counts)

    def most_tokens(self) -> int:
        candidates = self.settings.collect.slm_k + self.input(StateStage).settings.futures.llm_k
        tokens = self.input(TrajectoryStage).longest + self.settings.collect.max_new_tokens + 1
        return tokens * candidates
