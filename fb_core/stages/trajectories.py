"""Stage 1: SLM trajectories without intervention, their entropies, and the candidate pools of admitted states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from fb_core import hf
from fb_core.llm import LLM, LocalLLM
from fb_core.methods import Generate
from fb_core.policy import RequestPolicy
from fb_core.pool import Pool, PoolKind, candidate_pool
from fb_core.stages.artefacts import Artefact, lists, table_bytes
from fb_core.stages.deploy import deployed_digest, frozen_policy, generator, pool_options
from fb_core.stages.inputs import problems_hash, splits_of, verifier_of
from fb_core.stages.problems import Problem, prompt_ids
from fb_core.stages.stage import Cost, Output, Stage
from fb_core.verify import tally
from fb_kernels import topk_entropy

ROWS = 16_384  # of a teacher-forced forward
LOGIT_ROWS = 1024  # of logits [rows, V] held at once


@dataclass(frozen=True)
class Trajectory:
    """One problem's SLM output.

    Attributes:
        tokens: [T] prompt and output.
        prompt_length: tokens of the prompt.
        entropy: float32 [T - prompt_length], nats: of the SLM's distribution before each output token.
    """

    tokens: Tensor
    prompt_length: int
    entropy: Tensor

    @property
    def output(self) -> Tensor:
        """The SLM's own tokens."""
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True)
class LoggedState:
    """One admitted state: its prefix is tokens[:position] of its trajectory."""

    trajectory: int
    position: int
    entropy: float
    pool: Pool


def collect(
    slm: LocalLLM,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    top_k: int = 64,
    on_done: Callable[[int], None] | None = None,
    write: Callable[[Sequence[Tensor], int], list[Tensor]] | None = None,
) -> list[Trajectory]:
    """Greedy SLM outputs, and the entropy at every step from one teacher-forced pass.

    Args:
        slm: the small model.
        prompts: one [P] of ids a problem.
        max_new_tokens: output length at most.
        top_k: size of the softmax that the entropy is taken over.
        on_done: called with the number of problems finished.
        write: what writes the outputs from prompts and max_new_tokens, if not the SLM in this process by itself.
    """
    policy = RequestPolicy(float("inf"), top_k)
    outputs = (write or slm.complete_many)(prompts, max_new_tokens)
    whole = [torch.cat([prompt, output.to(prompt)]) for prompt, output in zip(prompts, outputs, strict=True)]
    trajectories: list[Trajectory] = []
    for start, rows in _teacher_forced(slm.model, whole, [len(prompt) - 1 for prompt in prompts]):
        for index, hidden in enumerate(rows, start):
            tokens, length = whole[index], len(prompts[index])
            blocks = hidden[:-1].split(LOGIT_ROWS)
            entropy = torch.cat([policy.entropy(_logits(slm, block)) for block in blocks])
            trajectories.append(Trajectory(tokens, length, entropy))
        if on_done is not None:
            on_done(len(trajectories))
    return trajectories


def admitted(trajectory: Trajectory, policy: RequestPolicy, max_states: int = 8) -> list[int]:
    """Positions of the first `max_states` output tokens before which the policy asks."""
    asked = policy.asks(trajectory.entropy).nonzero()[:max_states, 0]
    return [trajectory.prompt_length + int(step) for step in asked]


def log_states(
    slm: LocalLLM,
    llm: LLM,
    trajectories: Sequence[Trajectory],
    policy: RequestPolicy,
    *,
    slm_k: int = 8,
    llm_k: int = 8,
    max_states: int = 8,
    pool: PoolKind = "joint",
) -> list[LoggedState]:
    """The admitted states of all trajectories with the pools that deployment would form there."""
    states: list[LoggedState] = []
    for at, logits in state_logits(slm, trajectories, policy, max_states):
        tokens = [trajectories[index].tokens[:position] for index, position in at]
        for (index, position), found in zip(at, candidate_pool(logits, llm, tokens, pool, slm_k, llm_k), strict=True):
            trajectory = trajectories[index]
            entropy = float(trajectory.entropy[position - trajectory.prompt_length])
            states.append(LoggedState(index, position, entropy, found))
    return states


def state_logits(
    slm: LocalLLM, trajectories: Sequence[Trajectory], policy: RequestPolicy, max_states: int
) -> Iterator[tuple[list[tuple[int, int]], Tensor]]:
    """([(trajectory, position)], the SLM's logits [n, V] there) of all admitted states, a pack at a time."""
    wanted = [(index, admitted(trajectory, policy, max_states)) for index, trajectory in enumerate(trajectories)]
    wanted = [(index, positions) for index, positions in wanted if positions]
    prefixes = [trajectories[index].tokens[: positions[-1]] for index, positions in wanted]
    for start, rows in _teacher_forced(slm.model, prefixes, [0] * len(prefixes)):
        packed = wanted[start : start + len(rows)]
        hidden = torch.cat(
            [
                states_of[torch.tensor(positions, device=states_of.device) - 1]
                for states_of, (_, positions) in zip(rows, packed, strict=True)
            ]
        )
        yield [(index, position) for index, positions in packed for position in positions], _logits(slm, hidden)


def _logits(slm: LocalLLM, hidden: Tensor) -> Tensor:
    """[n, V] of the ids that count."""
    return hf.logits(slm.model, hidden)[:, : slm.vocabulary]


@torch.no_grad()
def _teacher_forced(
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


class TrajectoryStage(Stage):
    """Greedy SLM outputs with their entropies, or those of a deployed reranker."""

    name = "trajectories"
    command = "collect"

    def relevant(self) -> dict[str, Any]:
        settings = self.settings.collect
        return {
            "problems": self.settings.problems.model_dump(),
            "collect": settings.model_dump(include={"max_new_tokens", "top_k"}),
            "deployed": None if settings.deployed is None else self._deployed(Path(settings.deployed)),
            "hash": {split: problems_hash(problems) for split, problems in self._splits.items()},
        }

    def _deployed(self, run: Path) -> dict[str, Any]:
        """What the tokens of collaborative trajectories depend on."""
        settings = self.settings
        return {
            "run": deployed_digest(run),
            "seed": settings.train.seeds[0],
            "llm": settings.models.llm,
            "certainty": settings.evaluate.certainty,
            **pool_options(settings),
        }

    @property
    def _splits(self) -> dict[str, list[Problem]]:
        return splits_of(self.settings.problems)

    def shards(self) -> dict[str, int]:
        return {name: len(problems) for name, problems in self.problems().items()}

    def problems(self) -> dict[str, list[Problem]]:
        """The problems of every shard; all stages up to the scores share these shards."""
        size = self.settings.problems.per_shard
        return {
            f"{split}-{start // size:05d}": problems[start : start + size]
            for split, problems in self._splits.items()
            for start in range(0, len(problems), size)
        }

    def work(self, shard: str) -> Output:
        problems, slm, settings = self.problems()[shard], self.models.local_slm, self.settings.collect
        prompts = [
            torch.tensor(prompt_ids(self.models.tokenizer, problem, self.settings.problems.prompt), device=slm.device)
            for problem in problems
        ]
        write = self.models.slm_writer.complete_many if settings.deployed is None else self._collaborate
        found = collect(slm, prompts, settings.max_new_tokens, settings.top_k, self.on_progress, write)
        columns = {
            "problem": pa.array([problem.id for problem in problems]),
            "prompt_length": pa.array([trajectory.prompt_length for trajectory in found], pa.int32()),
            "tokens": lists((trajectory.tokens for trajectory in found), pa.int32()),
            "entropy": lists((trajectory.entropy for trajectory in found), pa.float32()),
        }
        texts = texts_of([trajectory.output for trajectory in found], self.models.tokenizer)
        golds = [problem.answer for problem in problems]
        verdicts = verifier_of(self.settings.verify).verify_many(texts, golds, bad_golds="unparsable")
        counts = {"trajectories": len(found), "tokens": sum(len(trajectory.output) for trajectory in found)}
        return Output({f"{shard}.parquet": table_bytes(columns)}, counts | tally(texts, verdicts))

    def _collaborate(self, prompts: Sequence[Tensor], max_new_tokens: int) -> list[Tensor]:
        """What the deployed reranker of another run makes of prompts, together with the LLM."""
        return [found.token_ids for found in self._generate(prompts, max_new_tokens)]

    @cached_property
    def _generate(self) -> Generate:
        """With the first reranker of the deployed run."""
        run = Path(self.settings.collect.deployed or "")
        return generator("futurebridge", self.settings, run, self.settings.train.seeds[0])

    def cost(self) -> Cost:
        tokens = self.longest_prompt + self.settings.collect.max_new_tokens
        return Cost("generated and teacher-forced, prompts included", 2 * tokens)


class PolicyStage(Stage):
    """The request policy, frozen on the validation problems; a run under a deployed reranker keeps that one's."""

    name = "policy"
    command = "collect"
    reads = (TrajectoryStage,)
    unit = "policies"
    parallel = False

    def relevant(self) -> dict[str, Any]:
        return self.settings.collect.model_dump(include={"top_k", "quantile"})

    def shards(self) -> dict[str, int]:
        return {"policy": 1}

    def work(self, shard: str) -> Output:
        settings, trajectories = self.settings.collect, TrajectoryStage(self.settings, self.run)
        if settings.deployed is not None:
            policy, tokens = frozen_policy(Path(settings.deployed)), 0
        else:
            entropies = torch.cat(
                [
                    trajectory.entropy
                    for name in trajectories.shards()
                    if name.startswith("validation")
                    for trajectory in read_trajectories(trajectories.folder, name)
                ]
            )
            policy, tokens = RequestPolicy.calibrate(entropies, settings.quantile, settings.top_k), len(entropies)
        line = json.dumps({"threshold": policy.threshold, "top_k": policy.top_k}) + "\n"
        return Output({f"{shard}.jsonl": line.encode()}, {"validation tokens": tokens})

    def report(self, manifest: dict[str, Any]) -> str:
        asked, settings = f"the LLM is asked above {frozen_policy(self.run).threshold:.4f} nats", self.settings.collect
        source = f"quantile {settings.quantile:g} of {manifest['counts']['validation tokens']:,} validation tokens"
        if settings.deployed is not None:
            source = f"as in {settings.deployed}"
        return f"**{self.name}**: {asked}, {source}"

    def cost(self) -> Cost:
        return Cost("read off the trajectories")


class StateStage(Stage):
    """The admitted states with the SLM's candidates: as many as both models propose to a pool, the likeliest first."""

    name = "states"
    command = "collect"
    reads = (TrajectoryStage, PolicyStage)

    def relevant(self) -> dict[str, Any]:
        return {"max_states": self.settings.collect.max_states, "slm_k + llm_k": self._logged}

    @property
    def _logged(self) -> int:
        return self.settings.collect.slm_k + self.settings.futures.llm_k

    def shards(self) -> dict[str, int]:
        return TrajectoryStage(self.settings, self.run).shards()

    def work(self, shard: str) -> Output:
        slm, settings = self.models.local_slm, self.settings.collect
        trajectories = read_trajectories(self.source("trajectories"), shard, slm.device)
        at: list[tuple[int, int]] = []
        ids: list[Tensor] = []
        logprobs: list[Tensor] = []
        for places, logits in state_logits(slm, trajectories, frozen_policy(self.run), settings.max_states):
            top = topk_entropy(logits, min(self._logged, logits.shape[1]))[2]
            at.extend(places)
            ids.extend(top)
            logprobs.extend(logits.log_softmax(-1).gather(1, top))
        entropies = [
            float(trajectories[index].entropy[position - trajectories[index].prompt_length]) for index, position in at
        ]
        columns = {
            "trajectory": pa.array([index for index, _ in at], pa.int32()),
            "position": pa.array([position for _, position in at], pa.int32()),
            "entropy": pa.array(entropies, pa.float32()),
            "slm_ids": lists(ids, pa.int32()),
            "slm_logprob": lists(logprobs, pa.float32()),
        }
        counts = {"states": len(at), f"{shard.partition('-')[0]} states": len(at)}
        return Output({f"{shard}.parquet": table_bytes(columns)}, counts)

    def cost(self) -> Cost:
        return Cost("teacher-forced", self.longest_prompt + self.settings.collect.max_new_tokens)


def texts_of(outputs: Sequence[Tensor], tokenizer: hf.Tokenizer) -> list[str]:
    """The texts of token ids, as answers are judged by them."""
    return [tokenizer.decode(output.tolist(), skip_special_tokens=True) for output in outputs]


def read_trajectories(folder: Artefact, shard: str, device: torch.device | str = "cpu") -> list[Trajectory]:
    """The trajectories of a finished shard."""
    return [
        Trajectory(
            torch.tensor(row["tokens"], device=device),
            row["prompt_length"],
            torch.tensor(row["entropy"], dtype=torch.float32, device=device),
        )
        for row in folder.table(shard)
    ]
