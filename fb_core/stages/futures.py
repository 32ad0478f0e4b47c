"""Stage 2: one answer-verified LLM continuation after every admitted state, the shared future."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fb_core import hf
from fb_core.llm import LocalLLM
from fb_core.stages.examples import Examples, Future, State, example_files
from fb_core.stages.inputs import verifier_of
from fb_core.stages.stage import Cost, Output
from fb_core.stages.states import OverStates, StateStage
from fb_core.stages.trajectories import TrajectoryStage, judged
from fb_core.verify import Verifier, tally

SERVED_AT_ONCE = 4  # shards at once, so that a server stays busy while one shard's last continuations are written


def verified(
    states: Sequence[State], written: Sequence[Tensor], tokenizer: hf.Tokenizer, verifier: Verifier
) -> tuple[list[str], list[Future]]:
    """(texts of the whole solutions, futures) from states and their continuations, [n >= 1] ids each."""
    texts, verdicts = judged(states, written, tokenizer, verifier)
    return texts, [
        Future(state, int(new[0]), new[1:].cpu(), verdict)
        for state, new, verdict in zip(states, written, verdicts, strict=True)
    ]


def own_futures(
    slm: LocalLLM,
    states: Sequence[State],
    tokenizer: hf.Tokenizer,
    verifier: Verifier,
    max_new_tokens: int,
    *,
    samples: int = 4,
    temperature: float = 0.7,
    seed: int = 0,
) -> list[Future]:
    """The SLM's own futures: of a few samples from each bare state the first correct one, else the first.

    If the LLM's futures are in a style that the SLM cannot carry out, they rank candidates in the wrong order; the
    SLM's own correct solutions do not.

    Args:
        slm: the small model.
        states: where the samples begin.
        tokenizer: of both models.
        verifier: checks the decoded solutions.
        max_new_tokens: longest sample.
        samples: number per state.
        temperature: of the sampling.
        seed: of the sampling.
    """
    prefixes = [state.prefix.to(slm.device) for state in states]
    drawn = slm.sample_many(prefixes, samples, max_new_tokens, temperature=temperature, top_p=1.0, top_k=0, seed=seed)
    tried = [verified(states, [written[n] for written in drawn], tokenizer, verifier)[1] for n in range(samples)]
    return [
        next((future for future in of_state if future.verdict == "correct"), of_state[0])
        for of_state in zip(*tried, strict=True)
    ]


@dataclass(frozen=True)
class Filters:
    """The paper's filter table: the number of states left after each condition."""

    admitted: int
    verified: int
    long_enough: int
    valid_group: int


def usable(futures: Sequence[Future], horizon: int) -> tuple[list[Future], Filters]:
    """The futures of the states that can be scored, and the counts after each filter.

    A state needs a verified future of at least `horizon` tokens and a valid group: two or more candidates, including
    the future's own first token (the LLM's greedy one).
    """
    correct = [future for future in futures if future.verdict == "correct"]
    long_enough = [future for future in correct if len(future.tokens) >= horizon]
    valid = [f for f in long_enough if len(f.state.pool) >= 2 and f.first in f.state.pool.ids.tolist()]
    return valid, Filters(len(futures), len(correct), len(long_enough), len(valid))


class FutureStage(OverStates):
    """The LLM's continuation of every state, verified."""

    name = "futures"
    command = "futurebridge futures"
    slice = ("futures.max_new_tokens", "verify")
    reads = (TrajectoryStage, StateStage)
    uses = ("slm", "llm", "tokenizer")

    @property
    def at_once(self) -> int:
        return 1 if self.on_gpu else SERVED_AT_ONCE

    @property
    def on_gpu(self) -> bool:
        return self.settings.models.llm_server is None

    @property
    def device(self) -> str:
        return self.models.device if self.on_gpu else "server"

    def work(self, shard: str) -> Output:
        states, llm = list(Examples(self.run, shard).states.values()), self.models.llm
        prefixes = [state.prefix.to(llm.device) for state in states]
        written = llm.complete_many(prefixes, self.settings.futures.max_new_tokens)
        texts, found = verified(states, written, self.models.tokenizer, verifier_of(self.settings.verify))
        counts = {"futures": len(found), "tokens": sum(len(new) for new in written)}
        counts |= tally(texts, [future.verdict for future in found])
        return Output(example_files(shard, Future, found), counts)

    @property
    def longest(self) -> int:
        """The most tokens of a state's prefix with its future."""
        return self.input(TrajectoryStage).longest + self.settings.futures.max_new_tokens

    def cost(self) -> Cost:
        return Cost("generated after their prefixes, which count too", self.longest, "llm")
