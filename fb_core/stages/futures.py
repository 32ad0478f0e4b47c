"""Stage 2: one answer-verified LLM continuation behind every admitted state, the shared future."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from fb_core import hf
from fb_core.llm import LLM, LocalLLM
from fb_core.pool import merge_candidates
from fb_core.stages.artefacts import Artefact, lists, table_bytes
from fb_core.stages.inputs import verifier_of
from fb_core.stages.stage import Cost, Output, Stage
from fb_core.stages.trajectories import (
    LoggedState,
    StateStage,
    Trajectory,
    TrajectoryStage,
    read_trajectories,
    texts_of,
)
from fb_core.verify import Verdict, Verifier, tally

SERVED_AT_ONCE = 4  # shards that keep a server busy while the last continuations of one of them are written


@dataclass(frozen=True)
class Future:
    """What a model writes from a state.

    Attributes:
        first: the token at the state itself; it competes in the pool.
        tokens: [n] what is written behind it: the future that all candidates share. End-of-sequence counts.
        verdict: of the whole solution against the gold answer.
    """

    first: int
    tokens: Tensor
    verdict: Verdict


def llm_futures(
    llm: LLM,
    trajectories: Sequence[Trajectory],
    states: Sequence[LoggedState],
    golds: Sequence[str],
    tokenizer: hf.Tokenizer,
    verifier: Verifier,
    max_new_tokens: int,
) -> list[Future]:
    """One future a state, verified against the gold answer of its trajectory.

    Args:
        llm: the large model.
        trajectories: as from `collect`.
        states: as from `log_states`.
        golds: one answer a trajectory.
        tokenizer: of both models.
        verifier: checks the decoded solutions.
        max_new_tokens: continuation length at most.
    """
    written = llm.complete_many(_prefixes(trajectories, states), max_new_tokens)
    verdicts = _verify(trajectories, states, written, golds, tokenizer, verifier)
    return [
        Future(int(continuation[0]), continuation[1:], verdict)
        for continuation, verdict in zip(written, verdicts, strict=True)
    ]


def own_futures(
    slm: LocalLLM,
    trajectories: Sequence[Trajectory],
    states: Sequence[LoggedState],
    golds: Sequence[str],
    tokenizer: hf.Tokenizer,
    verifier: Verifier,
    max_new_tokens: int,
    *,
    samples: int = 4,
    temperature: float = 0.7,
    seed: int = 0,
) -> list[Future]:
    """The SLM's own future: of a few samples from the bare state the first correct one, else the first.

    Where the LLM's futures are in a style that the SLM cannot carry out, they rank candidates the wrong way round; what
    the SLM itself got right does not. Arguments as `llm_futures`; `samples`, `temperature` and `seed` are the
    sampling's.
    """
    prefixes = _prefixes(trajectories, states)
    owners = [trajectories[state.trajectory] for state in states]
    return own_continuations(
        slm,
        prefixes,
        [owner.prompt_length for owner in owners],
        [golds[state.trajectory] for state in states],
        tokenizer,
        verifier,
        max_new_tokens,
        samples=samples,
        temperature=temperature,
        seed=seed,
    )


def own_continuations(
    slm: LocalLLM,
    prefixes: Sequence[Tensor],
    prompt_lengths: Sequence[int],
    golds: Sequence[str],
    tokenizer: hf.Tokenizer,
    verifier: Verifier,
    max_new_tokens: int,
    *,
    samples: int,
    temperature: float,
    seed: int,
) -> list[Future]:
    """As `own_futures`, of states given by their tokens [P], the length of the prompt in them and the gold answer."""
    drawn = slm.sample_many(prefixes, samples, max_new_tokens, temperature=temperature, top_p=1.0, top_k=0, seed=seed)
    starts = [prefix[length:] for prefix, length in zip(prefixes, prompt_lengths, strict=True)]
    verdicts = [
        verdicts_of(
            [torch.cat([start, written[n]]) for start, written in zip(starts, drawn, strict=True)],
            golds,
            tokenizer,
            verifier,
        )
        for n in range(samples)
    ]
    futures = []
    for index, written in enumerate(drawn):
        best = next((n for n in range(samples) if verdicts[n][index] == "correct"), 0)
        futures.append(Future(int(written[best][0]), written[best][1:].cpu(), verdicts[best][index]))
    return futures


def _prefixes(trajectories: Sequence[Trajectory], states: Sequence[LoggedState]) -> list[Tensor]:
    return [trajectories[state.trajectory].tokens[: state.position] for state in states]


def _verify(
    trajectories: Sequence[Trajectory],
    states: Sequence[LoggedState],
    written: Sequence[Tensor],
    golds: Sequence[str],
    tokenizer: hf.Tokenizer,
    verifier: Verifier,
) -> list[Verdict]:
    """Verdicts of the whole solutions: what the SLM wrote up to the state, then the continuation."""
    outputs = [
        torch.cat([prefix[trajectories[state.trajectory].prompt_length :], continuation])
        for state, prefix, continuation in zip(states, _prefixes(trajectories, states), written, strict=True)
    ]
    return verdicts_of(outputs, [golds[state.trajectory] for state in states], tokenizer, verifier)


def verdicts_of(
    outputs: Sequence[Tensor], golds: Sequence[str], tokenizer: hf.Tokenizer, verifier: Verifier
) -> list[Verdict]:
    """Verdicts of whole solutions, given by token ids."""
    return verifier.verify_many(texts_of(outputs, tokenizer), golds, bad_golds="unparsable")


@dataclass(frozen=True)
class Filters:
    """The paper's filter table: how many states are left after each condition."""

    admitted: int
    verified: int
    long_enough: int
    valid_group: int


def usable(pools: Sequence[Sequence[int]], futures: Sequence[Future], horizon: int) -> tuple[list[int], Filters]:
    """Indices of the states that can be scored, and the count after each filter.

    A state needs a verified future of at least `horizon` tokens and a valid group: two or more candidates, the
    future's own first token (the LLM's greedy one) among them.

    Args:
        pools: candidate ids of every state.
        futures: one a state.
        horizon: future tokens to score.
    """
    verified = [i for i, future in enumerate(futures) if future.verdict == "correct"]
    long_enough = [i for i in verified if len(futures[i].tokens) >= horizon]
    valid = [i for i in long_enough if len(pools[i]) >= 2 and futures[i].first in pools[i]]
    return valid, Filters(len(futures), len(verified), len(long_enough), len(valid))


class FutureStage(Stage):
    """The LLM's continuation of every state, verified, and the joint pool with its log p_T."""

    name = "futures"
    command = "futures"
    reads = (TrajectoryStage, StateStage)
    uses = ("slm", "llm", "tokenizer")
    unit = "states"

    @property
    def at_once(self) -> int:
        return 1 if self.on_gpu else SERVED_AT_ONCE

    @property
    def on_gpu(self) -> bool:
        return self.settings.models.llm_server is None

    @property
    def device(self) -> str:
        return self.models.device if self.on_gpu else "server"

    def relevant(self) -> dict[str, Any]:
        return self.settings.futures.model_dump() | self.settings.verify.model_dump(exclude={"workers"})

    def shards(self) -> dict[str, int]:
        states, found = StateStage(self.settings, self.run), {}
        for shard in states.shards():
            receipt = states.folder.receipt(shard)
            if receipt is None:
                raise ValueError(f"{states.folder.path}: expected shard {shard}, got none; run `futurebridge collect`")
            found[shard] = receipt.counts["states"]
        return found

    def most(self) -> int:
        problems = TrajectoryStage(self.settings, self.run).most()
        return problems * self.settings.collect.max_states

    def work(self, shard: str) -> Output:
        problems = TrajectoryStage(self.settings, self.run).problems()[shard]
        trajectories, states = read_trajectories(self.source("trajectories"), shard), self.source("states").table(shard)
        llm, settings = self.models.llm, self.settings.futures
        prefixes = [trajectories[state["trajectory"]].tokens[: state["position"]] for state in states]
        asked = [torch.tensor(state["slm_ids"]) for state in states]
        there = llm.device
        found = llm.continue_many(
            [tokens.to(there) for tokens in prefixes],
            settings.max_new_tokens,
            settings.llm_k,
            [ids.to(there) for ids in asked],
        )
        answers, written = [answer for answer, _ in found], [new.cpu() for _, new in found]
        pools = merge_candidates(torch.stack(asked), answers, self.models.vocabulary) if states else []
        outputs = [
            torch.cat([tokens[trajectories[state["trajectory"]].prompt_length :], new])
            for state, tokens, new in zip(states, prefixes, written, strict=True)
        ]
        golds = [problems[state["trajectory"]].answer for state in states]
        texts = texts_of(outputs, self.models.tokenizer)
        verdicts = verifier_of(self.settings.verify).verify_many(texts, golds, bad_golds="unparsable")
        columns = {
            "first": pa.array([int(new[0]) for new in written], pa.int32()),
            "tokens": lists((new[1:] for new in written), pa.int32()),
            "verdict": pa.array(verdicts, pa.string()),
            "pool_ids": lists((ids for ids, _, _ in pools), pa.int32()),
            "pool_sources": lists((sources for _, sources, _ in pools), pa.int8()),
            "pool_llm_logprob": lists((logprob for _, _, logprob in pools), pa.float32()),
        }
        counts = {"futures": len(states), "tokens": sum(len(new) for new in written)}
        counts |= tally(texts, verdicts)
        return Output({f"{shard}.parquet": table_bytes(columns)}, counts)

    def cost(self) -> Cost:
        prefix, new = self.longest_prompt + self.settings.collect.max_new_tokens, self.settings.futures.max_new_tokens
        return Cost("generated behind their prefixes", prefix + new, "llm")


def read_futures(folder: Artefact, shard: str) -> tuple[list[Future], list[dict[str, Any]]]:
    """The futures of a finished shard, and its rows with the pools."""
    rows = folder.table(shard)
    return [Future(row["first"], torch.tensor(row["tokens"]), row["verdict"]) for row in rows], rows
