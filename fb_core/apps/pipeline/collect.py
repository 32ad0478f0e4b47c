"""Stage 1: SLM trajectories with their entropies, the request policy, and the states where the LLM is asked."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from fb_core.apps.pipeline.models import frozen_policy, problems_hash, splits_of, verifier_of
from fb_core.apps.pipeline.problems import Problem
from fb_core.apps.pipeline.records import Examples, LoggedState, Trajectory, example_files
from fb_core.apps.pipeline.run import Output, Stage
from fb_core.decode.asking import candidate_pool
from fb_core.decode.policy import RequestPolicy
from fb_core.llm.local import LLM, LocalLLM
from fb_core.models import facts as models
from fb_core.models.facts import Tokenizer
from fb_core.models.packed import hidden_states
from fb_core.verify.judges import Judge
from fb_core.verify.verifier import Verdict, Verifier

COLLECT = ("collect.max_new_tokens", "collect.top_k", "collect.unread")  # settings of the trajectories
LOGIT_ROWS = 1024  # of logits [rows, V] held at once

log = logging.getLogger(__name__)


def collect(
    slm: LocalLLM,
    problems: Sequence[Problem],
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    top_k: int = 64,
    on_done: Callable[[int], None] | None = None,
    write: Callable[[Sequence[Tensor], int], list[Tensor]] | None = None,
) -> list[Trajectory]:
    """Greedy SLM outputs, and the entropy over the `top_k` logits at every step from one teacher-forced pass.

    A problem's prompt is [P] ids. `on_done` gets the number of finished problems. `write` writes the outputs from
    prompts and max_new_tokens; None for the SLM in this process.
    """
    policy, entropies = RequestPolicy(float("inf"), top_k), list[Tensor]()
    outputs = (write or slm.complete_many)(prompts, max_new_tokens)
    whole = [torch.cat([prompt, output.to(prompt)]) for prompt, output in zip(prompts, outputs, strict=True)]
    before = [range(len(prompt) - 1, len(tokens) - 1) for prompt, tokens in zip(prompts, whole, strict=True)]
    for rows in hidden_states(slm.model, whole, before):
        blocks = torch.cat(rows).split(LOGIT_ROWS)
        entropy = torch.cat([policy.entropy(logits_of(slm, block)) for block in blocks])
        entropies += entropy.split([len(hidden) for hidden in rows])
        if on_done is not None:
            on_done(len(entropies))
    return [Trajectory(*parts) for parts in zip(problems, whole, map(len, prompts), entropies, strict=True)]


def logits_of(slm: LocalLLM, hidden: Tensor) -> Tensor:
    """Logits [n, V] from hidden states [n, D], without padding ids."""
    return models.logits(slm.model, hidden)[:, : slm.vocabulary]


def texts_of(outputs: Sequence[Tensor], tokenizer: Tokenizer) -> list[str]:
    """The texts of token ids, as the verifier judges them."""
    return [tokenizer.decode(output.tolist(), skip_special_tokens=True) for output in outputs]


def judge_solutions(
    states: Sequence[LoggedState], written: Sequence[Tensor], tokenizer: Tokenizer, verifier: Verifier
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
    slice: ClassVar[Sequence[str]] = ("problems", *COLLECT, "verify")

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
        return self.models.longest_prompt(problems, self.settings.problems) + self.settings.collect.max_new_tokens

    def work(self, shard: str) -> Output:
        problems, slm, settings = self._problems[shard], self.models.local_slm, self.settings.collect
        prompts, write = self.models.prompts(problems, self.settings.problems), self.models.slm_writer.complete_many
        trajectories = collect(slm, problems, prompts, settings.max_new_tokens, settings.top_k, self.on_progress, write)
        outputs = [trajectory.output for trajectory in trajectories]
        texts = texts_of(outputs, self.models.tokenizer)
        golds, verifier = [problem.answer for problem in problems], verifier_of(self.settings.verify)
        verdicts = verifier.verify_many(texts, golds, bad_golds="unparsable")
        if shard == next(iter(self._problems)) and set(verdicts) == {"unparsable"}:
            self._report_unread(texts, golds, verifier.judge)
        counts = {"trajectories": len(outputs), "tokens": sum(map(len, outputs))}
        return Output(example_files(shard, Trajectory, trajectories), counts | verifier.tally(texts, verdicts))

    def _report_unread(self, texts: Sequence[str], golds: Sequence[str], judge: Judge) -> None:
        """Warn that the judge can read no answer of the first shard, or raise ValueError."""
        got, remedy = f"the first ends in {texts[0][-80:]!r}", "ask for it in problems.prompt, or set verify.judge"
        if all(judge.gold(gold) is None for gold in golds):
            got = f"and no gold answer can be read, such as {golds[0][:80]!r}"
            remedy = "correct the data, or set verify.judge"
        words = f"{self.name}: expected answers with {judge.form}, got none of {len(texts)} that can be judged, {got}"
        if self.settings.collect.unread == "stop":
            raise ValueError(f"{words}; {remedy}")
        log.warning("%s; %s (collect.unread: stop would stop here)", words, remedy)

    def most_tokens(self) -> int:
        return 2 * self.longest  # generated, then teacher-forced


def admitted_positions(trajectory: Trajectory, policy: RequestPolicy, max_states: int = 8) -> list[int]:
    """Positions of the first `max_states` output tokens before which the policy asks the LLM."""
    steps = policy.asks(trajectory.entropy).nonzero()[:max_states, 0]
    return [trajectory.prompt_length + int(step) for step in steps]


def log_states(
    slm: LocalLLM,
    llm: LLM,
    trajectories: Sequence[Trajectory],
    policy: RequestPolicy,
    *,
    slm_k: int = 8,
    llm_k: int = 8,
    max_states: int = 8,
) -> list[LoggedState]:
    """The admitted states of all trajectories, with the pools that a decoder would form there."""
    admissions = [(trajectory, admitted_positions(trajectory, policy, max_states)) for trajectory in trajectories]
    admissions = [(trajectory, positions) for trajectory, positions in admissions if positions]
    wholes = [trajectory.tokens[: positions[-1]] for trajectory, positions in admissions]
    before = [[position - 1 for position in positions] for _, positions in admissions]
    states, left = list[LoggedState](), iter(admissions)
    for rows in hidden_states(slm.model, wholes, before):
        pack = [(trajectory, position) for trajectory, own in islice(left, len(rows)) for position in own]
        prefixes = [trajectory.tokens[:position] for trajectory, position in pack]
        pools = candidate_pool(logits_of(slm, torch.cat(rows)), llm, prefixes, "joint", slm_k, llm_k)
        for (trajectory, position), pool in zip(pack, pools, strict=True):
            entropy = float(trajectory.entropy[position - trajectory.prompt_length])
            states.append(LoggedState(trajectory, position, entropy, pool))
    return states


class PolicyStage(Stage):
    """The request policy, calibrated on the validation problems."""

    name = "policy"
    command = "futurebridge collect"
    slice = ("collect.top_k", "collect.quantile")
    reads = (TrajectoryStage,)
    unit = "policies"
    parallel = False

    def shards(self) -> dict[str, int]:
        return {"policy": 1}

    def work(self, shard: str) -> Output:
        settings, names = self.settings.collect, self.input(TrajectoryStage).folder.shards("validation")
        shards = [Examples(self.run, name).trajectories.values() for name in names]
        entropies = torch.cat([trajectory.entropy for trajectories in shards for trajectory in trajectories])
        policy = RequestPolicy.calibrate(entropies, settings.quantile, settings.top_k)
        line = json.dumps({"threshold": policy.threshold, "top_k": policy.top_k}) + "\n"
        return Output({f"{shard}.jsonl": line.encode()}, {"validation tokens": len(entropies)})

    def report(self, manifest: dict[str, Any]) -> str:
        threshold, tokens = frozen_policy(self.run).threshold, manifest["counts"]["validation tokens"]
        source = f"quantile {self.settings.collect.quantile:g} of {tokens:,} validation tokens"
        return f"**{self.name}**: the LLM is asked above {threshold:.4f} nats, {source}"


class StateStage(Stage):
    """The admitted states with both models' candidates; `slm_k + llm_k` of the SLM's and `llm_k` of the LLM's."""

    name = "states"
    command = "futurebridge collect"
    slice = ("collect.max_states", "collect.slm_k", "futures.llm_k")
    reads = (TrajectoryStage, PolicyStage)
    uses = ("slm", "llm", "tokenizer")
    loads = ("slm", "llm")

    def shards(self) -> dict[str, int]:
        return self.input(TrajectoryStage).shards()

    def work(self, shard: str) -> Output:
        slm, llm_k, settings = self.models.local_slm, self.settings.futures.llm_k, self.settings.collect
        trajectories = list(Examples(self.run, shard, slm.device).trajectories.values())
        states = log_states(
            slm,
            self.models.llm,
            trajectories,
            frozen_policy(self.run),
            slm_k=settings.slm_k + llm_k,  # as many as "slm-wide" needs
            llm_k=llm_k,
            max_states=settings.max_states,
        )
        counts = {"states": len(states), f"{shard.partition('-')[0]} states": len(states)}
        return Output(example_files(shard, LoggedState, states), counts)

    def most_tokens(self) -> int:
        return self.input(TrajectoryStage).longest


class OverStates(Stage):
    """A stage whose shards are those of the states and whose units are the states in them."""

    unit = "states"
    split: ClassVar[str] = ""  # "train" or "validation" for the shards of one of them; empty for both

    def shards(self) -> dict[str, int]:
        folder, counts = self.input(StateStage).folder, {}
        for shard in folder.shards(self.split):
            receipt = folder.receipt(shard)
            if receipt is None:
                raise ValueError(f"{folder.path}: expected shard {shard}, got none; run `futurebridge collect`")
            counts[shard] = receipt.counts["states"]
        return counts

    def most(self) -> int:
        states = self.input(StateStage)
        trajectories = sum(count for shard, count in states.shards().items() if shard.startswith(self.split))
        return trajectories * states.settings.collect.max_states
