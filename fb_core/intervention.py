"""What happens at an event: both models' candidates go into one pool, and a selector picks one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fb_core import hf
from fb_core.llm import LLM
from fb_core.pool import Event, Pool, PoolKind, candidate_pool
from fb_core.selectors import Selector, State
from fb_core.spans import Span, until_agreement, write_tails

OnError = Literal["raise", "slm"]


@dataclass
class Intervention:
    """Makes events of states; the fields are arguments of `CollaborativeDecoder`."""

    slm: hf.CausalLM
    llm: LLM | None
    selector: Selector | None
    pool: PoolKind
    slm_k: int
    llm_k: int
    on_llm_error: OnError
    span: Span

    def __call__(self, states: Sequence[State], logits: Tensor) -> list[Event]:
        """The event of every state, with the SLM's logits [n, V] there; raises as `pools` and `events`."""
        return self.events(states, logits, self.pools(states, logits))

    def pools(self, states: Sequence[State], logits: Tensor) -> list[Pool] | OSError:
        """The candidates of every state, with the tails that the LLM writes; one call of the LLM for all states.

        Returns:
            one pool per state, or the error if the LLM did not answer.

        Raises:
            OSError: it did not answer, and that is to end the generation.
        """
        try:
            prompts = [state.tokens for state in states]
            pools = candidate_pool(logits, self.llm, prompts, self.pool, self.slm_k, self.llm_k)
            return self._with_tails(states, pools, logits.shape[-1])
        except OSError as problem:
            if self.on_llm_error == "raise":
                raise
            return problem

    def events(self, states: Sequence[State], logits: Tensor, pools: Sequence[Pool] | OSError) -> list[Event]:
        """The events that the selector makes of `pools`; without an answer, the SLM's own token.

        Raises:
            ValueError: a choice that is not an index into the pool.
        """
        if isinstance(pools, OSError):
            error = f"{type(pools).__name__}: {pools}"
            return [
                Event.alone(state.step, state.entropy, row, error) for state, row in zip(states, logits, strict=True)
            ]
        assert self.selector is not None
        if self.span.agree:
            pools = self._agreed(states, pools, logits.shape[-1])
        events = []
        for state, pool, (choice, scores) in zip(states, pools, self.selector.choose_many(states, pools), strict=True):
            if not hasattr(choice, "__index__") or not 0 <= int(choice) < len(pool):
                raise ValueError(
                    f"{type(self.selector).__name__}: expected an index from 0 below {len(pool)}, got {choice}; "
                    "return an index into the pool"
                )
            events.append(Event.of(state.step, state.entropy, pool, int(choice), scores))
        return events

    def _with_tails(self, states: Sequence[State], pools: list[Pool], vocabulary: int) -> list[Pool]:
        """The pools with what the LLM writes after its likeliest candidate, if spans may be longer than a token."""
        places = {} if self.span.single else {row: pool.large for row, pool in enumerate(pools)}
        asked = [(row, place) for row, place in places.items() if place is not None]
        if not asked:
            return pools
        assert self.llm is not None
        prompts, rooms = [states[row].tokens for row, _ in asked], [states[row].room for row, _ in asked]
        firsts = [int(pools[row].ids[place]) for row, place in asked]
        tails = write_tails(self.llm, prompts, firsts, rooms, self.span, vocabulary)
        for (row, place), tail in zip(asked, tails, strict=True):
            pools[row] = pools[row].with_tail(place, tail)
        return pools

    def _agreed(self, states: Sequence[State], pools: Sequence[Pool], vocabulary: int) -> list[Pool]:
        """The pools with each tail up to where the SLM would go on by itself."""
        cut = list(pools)
        tailed = [(row, place) for row, pool in enumerate(pools) for place, tail in enumerate(pool.tails) if tail]
        if tailed:
            prefixes = [prefix for row, _ in tailed if (prefix := states[row].prefix) is not None]
            firsts = [int(pools[row].ids[place]) for row, place in tailed]
            tails = [pools[row].tails[place] for row, place in tailed]
            agreed = until_agreement(self.slm, prefixes, firsts, tails, vocabulary)
            for (row, place), tail in zip(tailed, agreed, strict=True):
                cut[row] = pools[row].with_tail(place, tail)
        return cut
