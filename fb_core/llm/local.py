"""Where candidates come from: a large model asked for its next-token preferences and for continuations, by token id."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from fb_core._util import check_count
from fb_core.models import facts as models
from fb_core.models.facts import (
    Cache,
    CausalLM,
    Reading,
    Tokenizer,
    empty_cache,
    eos_ids,
    max_positions,
    structure,
    valid_ids,
)
from fb_core.models.native import NativeDecoder
from fb_core.models.packed import hidden_states
from fb_core.models.tokens import check_max_new_tokens, checked_prompts, token_ids
from fb_core.runtime.plain import MAX_ROWS, Running, Stop, batches, check_decodable, last_logits, left_padded, lockstep
from fb_core.runtime.sampling import Sampling, seeded
from fb_core.runtime.writing import Choose, write
from fb_kernels import topk_entropy

MOST_SAMPLES = 1 << 16

Ids = Tensor | Sequence[int]
GONE: ContextVar[Future[None] | None] = ContextVar("fb_gone", default=None)
"""Cancelled once nobody waits for the call under way: an LLM elsewhere may then give it up with a `CancelledError`."""


class Candidates(NamedTuple):
    """A model's most likely next tokens, and the log-probabilities of the tokens that it was asked about."""

    ids: Tensor  # [k] int64, by falling probability, ties to the lowest id
    logprob: Tensor  # [k] float32, nats
    score_logprob: Tensor | None  # [n] float32 of the score_ids, None where none were given


class LLM(ABC):
    """A source of candidates and continuations; everything is passed as token ids, never as text.

    An LLM that decoders in several threads share must accept concurrent calls.

    Attributes:
        vocabulary: number of ids that it takes; None if unknown.
    """

    vocabulary: int | None = None

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end its continuations; empty if unknown."""
        return frozenset()

    @property
    def device(self) -> torch.device:
        """The device of its results."""
        return torch.device("cpu")

    @abstractmethod
    def candidates(self, ids: Ids, k: int, score_ids: Ids | None = None) -> Candidates:
        """The k most likely tokens after ids, and the log-probabilities of `score_ids`.

        Args:
            ids: [P] the tokens so far, at least one.
            k: number of candidates, 1 or more; clamped to the vocabulary.
            score_ids: [n] tokens whose log-probabilities are wanted too.
        """

    @abstractmethod
    def complete(self, ids: Ids, max_new_tokens: int) -> Tensor:
        """The greedy continuation of ids: int64 [n], new tokens only, the end-of-sequence token included."""

    def candidates_many(
        self, prompts: Sequence[Ids], k: int, score_ids: Sequence[Ids] | None = None
    ) -> list[Candidates]:
        """`candidates` for many prompts, each with its own `score_ids`."""
        return [
            self.candidates(ids, k, scored) for ids, scored in zip(prompts, scored_of(prompts, score_ids), strict=True)
        ]

    def complete_many(self, prompts: Sequence[Ids], max_new_tokens: int) -> list[Tensor]:
        """`complete` for many prompts, in their order."""
        return [self.complete(ids, max_new_tokens) for ids in prompts]

    def complete_branches(
        self, prefixes: Sequence[Ids], branches: Sequence[Ids], max_new_tokens: int
    ) -> list[list[Tensor]]:
        """`complete` for each prefix extended by one token, for several such tokens.

        Args:
            prefixes: [P] the tokens of each so far, at least one.
            branches: [K] tokens for each prefix, any number of them; each is continued independently.
            max_new_tokens: maximum tokens after a branch's first.

        Returns:
            for each prefix K int64 tensors of what follows the branch's token, without that token; empty after one of
            `ends`, and where the branch's token takes the last position that the model is known to have.

        Raises:
            ValueError: not one list of branches for each prefix; the rest as `complete_many`.
        """
        _check_branches(prefixes, branches)
        groups = [(_listed(prefix), _listed(firsts)) for prefix, firsts in zip(prefixes, branches, strict=True)]
        ends, none = self.ends, torch.tensor([], dtype=torch.int64, device=self.device)
        going = [[*prefix, first] for prefix, firsts in groups for first in firsts if first not in ends]
        written = iter(self.complete_many(going, max_new_tokens))
        return [[none if first in ends else next(written) for first in firsts] for _, firsts in groups]

    def sample_many(
        self,
        prompts: Sequence[Ids],
        n: int,
        max_new_tokens: int,
        *,
        temperature: float = 0.7,
        top_p: float = 0.8,
        top_k: int = 20,
        seed: int = 0,
    ) -> list[list[Tensor]]:
        """Sampled continuations, n per prompt; no global random state is read or changed.

        Args:
            prompts: token ids of each prompt.
            n: samples per prompt.
            max_new_tokens: maximum tokens of a sample.
            temperature: divides the logits.
            top_p: nucleus, in (0, 1]: the fewest of the `top_k` tokens that hold this share of their probability.
            top_k: number of largest logits kept, 0 for all.
            seed: a sample is a function of the seed, the prompt's tokens, its index among the n, and the sampler.

        Returns:
            for each prompt n int64 tensors of new tokens, the end-of-sequence token included.

        Raises:
            ValueError: an LLM that does not sample, a setting out of range; the rest as `complete_many`.
        """
        check_count("n", n, 1, "the published majority takes 8", "{} or more samples")
        if n > MOST_SAMPLES:
            raise ValueError(
                f"n: expected at most {MOST_SAMPLES} samples of a prompt, got {n}; use several seeds for more"
            )
        return self._sample(prompts, n, max_new_tokens, Sampling(temperature, top_p, top_k, seed))

    def _sample(self, prompts: Sequence[Ids], n: int, max_new_tokens: int, how: Sampling) -> list[list[Tensor]]:
        raise ValueError(f"llm: expected one that samples, got {type(self).__name__}; use LocalLLM or ServerLLM")


def scored_of(prompts: Sequence[Ids], score_ids: Sequence[Ids] | None) -> Sequence[Ids | None]:
    """The `score_ids` of every prompt; ValueError if they are given and are not one for each."""
    if score_ids is None:
        return [None] * len(prompts)
    if len(score_ids) != len(prompts):
        raise ValueError(
            f"score_ids: expected one for each of {len(prompts)} prompts, got {len(score_ids)}; pass [] for none"
        )
    return score_ids


def check_finite(largest: Tensor) -> None:
    """ValueError for rows whose largest logit is NaN or infinite; a NaN counts as the largest."""
    if not bool(largest.isfinite().all()):
        raise ValueError("model: expected finite logits, got NaN or infinite ones; check its weights and dtype")


def _check_branches(prefixes: Sequence[Ids], branches: Sequence[Ids]) -> None:
    """ValueError if there is not one list of branches for each prefix."""
    if len(branches) != len(prefixes):
        raise ValueError(
            f"branches: expected one list for each of {len(prefixes)} prefixes, got {len(branches)}; pass [] for none"
        )


def _chains(prompts: Sequence[list[int]]) -> Iterator[list[int]]:
    """The indices of all prompts, in chains: each prompt of a chain begins the next one."""
    rows: list[int] = []
    for index in sorted(range(len(prompts)), key=prompts.__getitem__):  # what begins a prompt comes before it
        if rows and prompts[index][: len(prompts[rows[-1]])] != prompts[rows[-1]]:
            yield rows
            rows = []
        rows.append(index)
    if rows:
        yield rows


def _listed(ids: Ids) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)


@dataclass
class _Seen:
    """The last query: its tokens, their cache and the logits after them, and what computed them."""

    ids: Tensor
    cache: Cache
    logits: Tensor  # [1, V]
    model: list[object]
    read: Reading


class LocalLLM(LLM):
    """A Hugging Face causal LM in this process.

    `candidates` keeps the KV cache of its last query: a query that extends it costs one forward of the new tokens, the
    same query again costs nothing, any other starts afresh. The `*_many` methods run left-padded batches of similar
    lengths; those that generate compute equal prompts of a batch once.

    Safe to share between threads: calls of `candidates` take turns, and nothing else is kept between calls.

    Args:
        model: in eval mode; it is never changed.
        batch_tokens: maximum tokens of one batch, padding and new tokens included.
        valid_vocab: ids from this one on are padding of the embedding and are never proposed; if left out, those that
            the tokenizer does not know.
        tokenizer: the model's own, whose end token ends a continuation too; None if it is not at hand.

    Raises:
        TypeError: not a transformers model, or a valid_vocab that is not an int.
        ValueError: a model in training mode or one that cannot be decoded (by name), or an argument out of range.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        batch_tokens: int = 65536,
        valid_vocab: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        check_decodable("model", model)
        check_count("batch_tokens", batch_tokens, 1, "it bounds a batch's memory")
        self.model = model
        self.batch_tokens = batch_tokens
        self.tokenizer = tokenizer
        self.vocabulary: int = valid_ids(valid_vocab, model, tokenizer)
        self._seen: _Seen | None = None
        self._turn = threading.Lock()  # guards what is kept of the last query

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    @property
    def ends(self) -> frozenset[int]:
        """The end-of-sequence tokens of model and tokenizer, as they are set now."""
        return eos_ids(self.model, self.tokenizer)

    def weights_changed(self) -> None:
        """Forget the last query, for weights that were written where `Reading` does not look."""
        with self._turn:
            self._seen = None

    def candidates(self, ids: Ids, k: int, score_ids: Ids | None = None) -> Candidates:
        """As `LLM.candidates`, from the cache of the last query if this one extends it.

        Raises:
            TypeError: ids that are not integers.
            ValueError: no ids, one outside the vocabulary, the wrong device, a prompt beyond the model's positions, k
                below 1, a model in training mode, or NaN logits. The object stays usable.
        """
        prompt, scored = self._checked([ids], k, None if score_ids is None else [score_ids])
        with self._turn:
            logits = self._in_step(prompt[0])
        return self._candidates(logits, k, scored)[0]

    def candidates_many(
        self, prompts: Sequence[Ids], k: int, score_ids: Sequence[Ids] | None = None
    ) -> list[Candidates]:
        """As `LLM.candidates_many`, without a cache; raises as `candidates`.

        Where a prompt begins another one and the model has a native decoder (`fb_core.models.native`), prompts run
        packed and the shorter one costs nothing: all states of a trajectory cost one forward. Others run in left-padded
        batches.
        """
        checked, scored = self._checked(prompts, k, score_ids)
        answers: dict[int, Candidates] = {}
        for rows, logits in self._after(checked):
            answers.update(zip(rows, self._candidates(logits, k, [scored[row] for row in rows]), strict=True))
        return [answers[row] for row in range(len(checked))]

    @torch.no_grad()
    def _after(self, prompts: Sequence[Tensor]) -> Iterator[tuple[Sequence[int], Tensor]]:
        """(which prompts, float32 logits [n, V] after them), until all are done."""
        chains = list(_chains([ids.tolist() for ids in prompts]))
        if len(chains) == len(prompts) or NativeDecoder.of(self.model) is None:
            for rows in batches([len(ids) for ids in prompts], 0, self.batch_tokens):
                yield rows, last_logits(self.model, *left_padded([prompts[row] for row in rows]))
            return
        last = [[len(prompts[row]) - 1 for row in rows] for rows in chains]
        order = chain.from_iterable(chains)
        for states in hidden_states(self.model, [prompts[rows[-1]] for rows in chains], last, self.batch_tokens):
            for hidden in torch.cat(states).split(MAX_ROWS):
                yield list(islice(order, len(hidden))), models.logits(self.model, hidden)

    def complete(self, ids: Ids, max_new_tokens: int) -> Tensor:
        """As `LLM.complete`; raises as `complete_many`."""
        return self.complete_many([ids], max_new_tokens)[0]

    def complete_many(self, prompts: Sequence[Ids], max_new_tokens: int) -> list[Tensor]:
        """As `LLM.complete_many`: the argmax at every step, ties to the lowest id; the model's settings are ignored.

        Raises as `candidates`, with max_new_tokens in place of k.
        """
        return self._continue(self._begun("ids", prompts, max_new_tokens), max_new_tokens, self._greedy)

    def complete_branches(
        self, prefixes: Sequence[Ids], branches: Sequence[Ids], max_new_tokens: int
    ) -> list[list[Tensor]]:
        """As `LLM.complete_branches`; what branches of one batch share of their prefixes is computed once.

        ValueError for a prefix that leaves no position for its branches; the rest as `complete_many`.
        """
        _check_branches(prefixes, branches)
        begun = self._begun("prefixes", prefixes, max_new_tokens)
        firsts = [token_ids("branches", ids, self.model).tolist() for ids in branches]
        flat = [first for group in firsts for first in group]

        def choose(rows: Sequence[Running], logits: Tensor) -> list[int]:
            best = self._greedy(rows, logits)
            return [token if row.new else flat[row.index] for row, token in zip(rows, best, strict=True)]

        prompts = [prefix for prefix, group in zip(begun, firsts, strict=True) for _ in group]
        written = iter(self._continue(prompts, max_new_tokens + 1, choose))
        return [[next(written)[1:] for _ in group] for group in firsts]

    def _sample(self, prompts: Sequence[Ids], n: int, max_new_tokens: int, how: Sampling) -> list[list[Tensor]]:
        """As `LLM.sample_many`; samples do not depend on the batch."""
        kept = min(how.top_k or self.vocabulary, self.vocabulary)
        begun = self._begun("ids", prompts, max_new_tokens)
        sources = [seeded(how.seed, ids.tolist(), sample) for ids in begun for sample in range(n)]

        def draw(rows: Sequence[Running], logits: Tensor) -> list[int]:
            values, ids = self._ranked(logits, kept)
            probability = (values.double() / how.temperature).softmax(-1)
            before = probability.cumsum(-1) - probability
            mass = probability.where(before < how.top_p, 0.0).cumsum(-1)
            at = [sources[row.index].random() for row in rows]
            point = torch.tensor(at, dtype=torch.float64, device=mass.device)[:, None] * mass[:, -1:]
            index = torch.searchsorted(mass, point, right=True).clamp_max(kept - 1)
            return ids.gather(1, index)[:, 0].tolist()

        drawn = self._continue([ids for ids in begun for _ in range(n)], max_new_tokens, draw)
        return [drawn[start : start + n] for start in range(0, len(drawn), n)]

    def _checked(
        self, prompts: Sequence[Ids], k: int, score_ids: Sequence[Ids] | None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Prompts and score_ids as tensors."""
        check_decodable("model", self.model)
        check_count("k", k, 1, "the published pools take 8", "{} or more candidates")
        scored = scored_of(prompts, score_ids)
        checked = [None if ids is None else token_ids("score_ids", ids, self.model) for ids in scored]
        return checked_prompts("ids", prompts, self.model, room=0), checked

    def _in_step(self, ids: Tensor) -> Tensor:
        """Logits [1, V] after ids; the cached query is dropped if anything fails."""
        seen, self._seen = self._seen, None
        model, read = structure(self.model), Reading(self.model)
        extends = seen is not None and len(seen.ids) <= len(ids) and seen.model == model and read.same(seen.read)
        if seen is None or not extends or not torch.equal(seen.ids, ids[: len(seen.ids)]):
            seen = _Seen(ids[:0], empty_cache(self.model), ids, model, read)
        new = ids[len(seen.ids) :]
        logits = last_logits(self.model, new[None], cache=seen.cache) if len(new) else seen.logits
        if not bool(logits.isnan().any()):
            self._seen = _Seen(ids.clone(), seen.cache, logits, model, read)
        return logits

    def _candidates(self, logits: Tensor, k: int, score_ids: Sequence[Tensor | None]) -> list[Candidates]:
        ids = self._ranked(logits, min(k, self.vocabulary))[1]
        logprob = torch.full_like(logits, -torch.inf)
        logprob[:, : self.vocabulary] = logits[:, : self.vocabulary].log_softmax(-1)
        return [
            Candidates(top, row[top], None if scored is None else row[scored])
            for top, row, scored in zip(ids, logprob, score_ids, strict=True)
        ]

    def _ranked(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest logits that count and their ids."""
        _, values, ids = topk_entropy(logits[:, : self.vocabulary], k)
        check_finite(values[:, 0])
        return values, ids

    def _greedy(self, _: Sequence[Running], logits: Tensor) -> list[int]:
        largest, ids = logits[:, : self.vocabulary].max(-1)  # the first of equal ones
        check_finite(largest)
        return ids.tolist()

    def _begun(self, name: str, prompts: Sequence[Ids], max_new_tokens: int) -> list[Tensor]:
        """The prompts of a call that generates, checked as its other arguments and the model are."""
        check_decodable("model", self.model)
        check_max_new_tokens(max_new_tokens)
        return checked_prompts(name, prompts, self.model, room=1)

    def _continue(self, prompts: Sequence[Tensor], max_new_tokens: int, choose: Choose) -> list[Tensor]:
        stop = Stop(self.ends, max_new_tokens, max_positions(self.model))
        if NativeDecoder.of(self.model) is None:
            by_step = lambda step: choose(step.rows, step.logits)  # noqa: E731
            rows = lockstep(self.model, prompts, stop, by_step, self.batch_tokens, shared=True)
        else:
            rows = write(self.model, prompts, stop, choose, self.batch_tokens, self.vocabulary)
        return [torch.tensor(row.new, device=self.device) for row in rows]
