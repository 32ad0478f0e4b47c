"""Stage 2: one answer-verified LLM continuation after every admitted state, the shared future."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fb_core.apps.pipeline.collect import OverStates, StateStage, TrajectoryStage, judge_solutions
from fb_core.apps.pipeline.models import verifier_of
from fb_core.apps.pipeline.records import Examples, Future, LoggedState, example_files
from fb_core.apps.pipeline.run import Output
from fb_core.models.facts import Tokenizer
from fb_core.verify.verifier import Verifier


def judge_futures(
    states: Sequence[LoggedState], written: Sequence[Tensor], tokenizer: Tokenizer, verifier: Verifier
) -> tuple[list[str], list[Future]]:
    """(texts of the whole solutions, futures) from states and their continuations, [n >= 1] ids each."""
    texts, verdicts = judge_solutions(states, written, tokenizer, verifier)
    return texts, [
        Future(state, int(new[0]), new[1:].cpu(), verdict)
        for state, new, verdict in zip(states, written, verdicts, strict=True)
    ]


@dataclass(frozen=True)
class Filters:
    """The paper's filter table: the number of states left after each condition."""

    admitted: int
    verified: int
    long_enough: int
    valid_group: int


def filter_futures(futures: Sequence[Future], horizon: int) -> tuple[list[Future], Filters]:
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
    loads = ("llm",)
    writer = "llm"

    def work(self, shard: str) -> Output:
        states, llm = list(Examples(self.run, shard).states.values()), self.models.llm
        prefixes = [state.prefix.to(llm.device) for state in states]
        written = llm.complete_many(prefixes, self.settings.futures.max_new_tokens)
        verifier = verifier_of(self.settings.verify)
        texts, futures = judge_futures(states, written, self.models.tokenizer, verifier)
        counts = {"futures": len(futures), "tokens": sum(len(new) for new in written)}
        counts |= verifier.tally(texts, [future.verdict for future in futures])
        return Output(example_files(shard, Future, futures), counts)

    def most_tokens(self) -> int:
        return self.input(TrajectoryStage).longest + self.settings.futures.max_new_tokens
