"""What happens at an event: both models' candidates go into one pool, and a selector picks one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fb_core.decode.asking import candidate_pool
from fb_core.decode.selectors import Selector, State
from fb_core.events import Event, Pool, PoolKind
from fb_core.llm.local import LLM

OnError = Literal["raise", "slm"]


@dataclass
class Intervention:
    """Makes events of states; the fields are arguments of `CollaborativeDecoder`."""

    llm: LLM | None
    selector: Selector | None
    pool: PoolKind
    slm_k: int
    llm_k: int
    on_llm_error: OnError

    def __call__(self, states: Sequence[State], logits: Tensor) -> list[Event]:
        """The event of every state, with the SLM's logits [n, V] there; raises as `pools` and `events`."""
        return self.events(states, logits, self.pools(states, logits))

    def pools(self, states: Sequence[State], logits: Tensor) -> list[Pool] | OSError:
        """The candidates of every state, or the error if the LLM did not answer; one call of it for all of them.

        Raises:
            OSError: it did not answer, and that is to end the generation.
        """
        try:
            prompts = [state.tokens for state in states]
            return candidate_pool(logits, self.llm, prompts, self.pool, self.slm_k, self.llm_k)
        except OSError as problem:
            if self.on_llm_error == "raise":
                raise
            return problem

    def events(self, states: Sequence[State], logits: Tensor, pools: Sequence[Pool] | OSError) -> list[Event]:
        """The events that the selector makes of `pools`; without an answer, the SLM's own token.

        ValueError for a choice that is not an index into the pool.
        """
        if isinstance(pools, OSError):
            error = f"{type(pools).__name__}: {pools}"
            return [
                Event.alone(state.step, state.entropy, row, error) for state, row in zip(states, logits, strict=True)
            ]
        assert self.selector is not None
        events = []
        for state, pool, (choice, scores) in zip(states, pools, self.selector.choose_many(states, pools), strict=True):
            if not hasattr(choice, "__index__") or not 0 <= int(choice) < len(pool):
                raise ValueError(
                    f"{type(self.selector).__name__}: expected an index from 0 below {len(pool)}, got {choice}; "
                    "return an index into the pool"
                )
            events.append(Event.of(state.step, state.entropy, pool, int(choice), scores))
        return events
