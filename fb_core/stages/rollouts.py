"""Rollouts: the SLM's own greedy continuation after every candidate, without later interventions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fb_core import hf
from fb_core.llm import LocalLLM, seeded
from fb_core.stages.examples import Examples, Rollout, State, example_files
from fb_core.stages.futures import FutureStage
from fb_core.stages.inputs import span_of, verifier_of
from fb_core.stages.pools import part_of, with_spans
from fb_core.stages.stage import Cost, Output, Stage
from fb_core.stages.states import OverStates, StateStage
from fb_core.stages.trajectories import TrajectoryStage, judged
from fb_core.verify import Verifier


def roll_out(
    slm: LocalLLM, states: Sequence[State], tokenizer: hf.Tokenizer, verifier: Verifier, max_new_tokens: int
) -> list[Rollout]:
    """Roll out every candidate of every state with the SLM, and judge the solutions.

    Args:
        slm: the small model.
        states: their pools hold the candidates; a rollout starts after a candidate and its tail.
        tokenizer: of both models.
        verifier: checks the decoded solutions.
        max_new_tokens: longest rollout.
    """
    prefixes, firsts = list[Tensor](), list[Sequence[int]]()
    spans = [
        [(first, *tail) for first, tail in zip_longest(state.pool.ids.tolist(), state.pool.tails, fillvalue=())]
        for state in states
    ]
    for state, own in zip(states, spans, strict=True):
        prefix = state.prefix.to(slm.device)
        prefixes.append(prefix)
        firsts.append([first for first, *tail in own if not tail])
        for *before, last in (span for span in own if len(span) > 1):
            prefixes.append(torch.cat([prefix, prefix.new_tensor(before)]))
            firsts.append([last])
    written = iter(slm.complete_branches(prefixes, firsts, max_new_tokens))
    branches = []
    for own in spans:
        singles = iter(next(written))
        for span in own:
            rest = next(singles) if len(span) == 1 else next(written)[0]
            branches.append(torch.cat([rest.new_tensor(span), rest]))
    owners = [state for state in states for _ in range(len(state.pool))]
    texts, verdicts = judged(owners, branches, tokenizer, verifier)
    found, start = [], 0
    for state in states:
        mine = slice(start, start := start + len(state.pool))
        correct = torch.tensor([verdict == "correct" for verdict in verdicts[mine]], dtype=torch.bool)
        kind = token_kind(tokenizer.decode([int(state.pool.ids[0])]))
        found.append(Rollout(state, kind, correct, texts[mine]))
    return found


class RolloutStage(OverStates):
    """Rollouts of all candidates of held-out states, for the diagnostics, and of some training states, for fitting."""

    name = "rollouts"
    command = "futurebridge rollouts"
    slice = (
        "rollouts.validation",
        "rollouts.train",
        "rollouts.seed",
        "collect.slm_k",
        "collect.max_new_tokens",
        "futures.span",
        "verify",
    )
    reads = (TrajectoryStage, StateStage)
    uses = ("slm", "tokenizer", "valid_vocab")

    def inputs(self) -> Sequence[type[Stage]]:
        return self.reads if self.settings.futures.span.tokens == 1 else (*self.reads, FutureStage)

    def work(self, shard: str) -> Output:
        settings, collect = self.settings.rollouts, self.settings.collect
        share = settings.validation if shard.startswith("validation") else settings.train
        examples, span = Examples(self.run, shard), span_of(self.settings.futures.span, self.models.tokenizer)
        states = [replace(state, pool=part_of(state.pool, collect.slm_k)) for state in examples.states.values()]
        drawn = [
            state
            for state in states
            if len(state.pool) >= 2 and seeded(settings.seed, state.prefix.tolist()).random() < share
        ]
        if not span.single:
            scorer, futures = self.models.scorer, examples.futures()
            followed = [replace(futures[state.id], state=state) for state in drawn]
            drawn = [future.state for future in with_spans(followed, span, scorer, collect.max_new_tokens)]
        found = roll_out(
            self.models.local_slm,
            drawn,
            self.models.tokenizer,
            verifier_of(self.settings.verify),
            collect.max_new_tokens,
        )
        mixed = sum(bool(one.correct.any() and not one.correct.all()) for one in found)
        side = shard.partition("-")[0]
        counts = {f"{side} states": len(found), f"{side} mixed": mixed}
        counts["rollouts"] = sum(len(one.texts) for one in found)
        return Output(example_files(shard, Rollout, found), counts)

    def units(self, manifest: dict[str, Any]) -> int:
        return sum(manifest["counts"].get(f"{split} states", 0) for split in ("train", "validation"))

    def cost(self) -> Cost:
        candidates = self.settings.collect.slm_k + self.input(StateStage).settings.futures.llm_k
        tokens = self.input(TrajectoryStage).longest + self.settings.collect.max_new_tokens + 1
        return Cost("rolled out after every candidate of the chosen states", tokens * candidates)


def token_kind(text: str) -> str:
    """The kind of an event by the text of the SLM's likeliest token: "digit", "word", or "mark" for anything else."""
    stripped = text.strip()
    if any(character.isdigit() for character in stripped):
        return "digit"
    return "word" if stripped.isalpha() else "mark"
