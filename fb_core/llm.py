"""Where candidates come from: a large model asked for its next-token preferences and for continuations, by token id."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fb_core import hf
from fb_kernels import topk_entropy

MAX_ROWS = 256  # of one batch: keeps its logits [rows, V] small beside the model

Ids = Tensor | Sequence[int]


class Candidates(NamedTuple):
    """A model's most likely next tokens, and what it thinks of those it was asked about."""

    ids: Tensor  # [k] int64, by falling probability, ties to the lowest id
    logprob: Tensor  # [k] float32, nats
    score_logprob: Tensor | None  # [n] float32 of the score_ids, None where none were given


class LLM(ABC):
    """A source of candidates and continuations; everything passes by token id, never by text."""

    @property
    def vocabulary(self) -> int | None:
        """The number of ids it takes, None where it cannot be known."""
        return None

    @property
    def device(self) -> torch.device:
        """Where its results lie."""
        return torch.device("cpu")

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end its continuations, none where they cannot be known."""
        return frozenset()

    @abstractmethod
    def candidates(self, ids: Ids, k: int, score_ids: Ids | None = None) -> Candidates:
        """The k most likely tokens after ids, with the log-probabilities of `score_ids` beside them.

        Args:
            ids: [P] the tokens so far, at least one.
            k: number of candidates, 1 or more; clamped to the vocabulary.
            score_ids: [n] tokens whose log-probability is wanted too.
        """

    @abstractmethod
    def complete(self, ids: Ids, max_new_tokens: int) -> Tensor:
        """The greedy continuation of ids: int64 [n], new tokens only, the end-of-sequence token included."""

    def candidates_many(
        self, prompts: Sequence[Ids], k: int, score_ids: Sequence[Ids] | None = None
    ) -> list[Candidates]:
        """`candidates` of many prompts, each with its own `score_ids`."""
        asked = [None] * len(prompts) if score_ids is None else score_ids
        return [self.candidates(ids, k, score) for ids, score in zip(prompts, asked, strict=True)]

    def complete_many(self, prompts: Sequence[Ids], max_new_tokens: int) -> list[Tensor]:
        """`complete` of many prompts, in their order."""
        return [self.complete(ids, max_new_tokens) for ids in prompts]


def batches(lengths: Sequence[int], rooms: Sequence[int], batch_tokens: int, n: int = 1) -> Iterator[list[int]]:
    """Indices by falling length, cut into batches of one room, `batch_tokens` tokens and MAX_ROWS rows.

    Args:
        lengths: tokens of each prompt.
        rooms: new tokens that each may get.
        batch_tokens: the most tokens, padding and new ones included; a prompt that is larger goes alone.
        n: rows of one prompt.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch:
            rows, width = (len(batch) + 1) * n, lengths[batch[0]] + rooms[index]
            if rooms[index] != rooms[batch[0]] or rows * width > batch_tokens or rows > MAX_ROWS:
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch


@dataclass
class _Seen:
    """The last query: its tokens, their cache and the logits behind them."""

    ids: Tensor
    cache: hf.Cache
    logits: Tensor  # [1, V]


class LocalLLM(LLM):
    """A Hugging Face causal LM in this process.

    `candidates` keeps the KV cache of its last query: a query that extends it costs one forward of the new tokens, the
    same query again costs none, any other starts fresh. The `*_many` forms run left-padded batches of similar lengths.

    Args:
        model: in eval mode; it is never changed.
        batch_tokens: the most tokens, padding and new ones included, that one batch may hold.
        valid_vocab: ids from here on are padding of the embedding and are never proposed; None for none.

    Raises:
        TypeError: not a transformers model.
        ValueError: a model in training mode, or an argument out of range.
    """

    def __init__(self, model: hf.CausalLM, *, batch_tokens: int = 65536, valid_vocab: int | None = None) -> None:
        hf.check_decodable("model", model)
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens: expected 1 or more, got {batch_tokens}; it bounds a batch's memory")
        size = hf.vocabulary(model)
        if valid_vocab is not None and not 1 <= valid_vocab <= size:
            raise ValueError(f"valid_vocab: expected 1 to {size}, got {valid_vocab}; pass the tokenizer's size or None")
        self.model = model
        self.batch_tokens = batch_tokens
        self._valid = size if valid_vocab is None else valid_vocab
        self._seen: _Seen | None = None

    @property
    def vocabulary(self) -> int:
        """The number of ids that count."""
        return self._valid

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    @property
    def ends(self) -> frozenset[int]:
        """The model's end-of-sequence tokens."""
        return hf.eos_ids(self.model)

    def candidates(self, ids: Ids, k: int, score_ids: Ids | None = None) -> Candidates:
        """As `LLM.candidates`, from the cache of the last query where this one extends it.

        Raises:
            TypeError: ids that are not integers.
            ValueError: no ids, one outside the vocabulary, another device, a prompt beyond the model's positions, k
                below 1, a model in training mode, or NaN logits. The object stays usable.
        """
        prompt, scored = self._checked([ids], k, None if score_ids is None else [score_ids], room=0)
        return self._candidates(self._in_step(prompt[0]), k, scored)[0]

    def candidates_many(
        self, prompts: Sequence[Ids], k: int, score_ids: Sequence[Ids] | None = None
    ) -> list[Candidates]:
        """As `LLM.candidates_many`, in left-padded batches without a cache; raises as `candidates`."""
        checked, scored = self._checked(prompts, k, score_ids, room=0)
        found: dict[int, Candidates] = {}
        for rows in batches([len(ids) for ids in checked], [0] * len(checked), self.batch_tokens):
            logits = hf.last_logits(self.model, *hf.left_padded([checked[row] for row in rows]))
            found.update(zip(rows, self._candidates(logits, k, [scored[row] for row in rows]), strict=True))
        return [found[row] for row in range(len(checked))]

    def complete(self, ids: Ids, max_new_tokens: int) -> Tensor:
        """As `LLM.complete`; raises as `complete_many`."""
        return self.complete_many([ids], max_new_tokens)[0]

    def complete_many(self, prompts: Sequence[Ids], max_new_tokens: int) -> list[Tensor]:
        """As `LLM.complete_many`: argmax at every step, whatever the model's generation config says.

        Raises:
            TypeError: ids that are not integers.
            ValueError: no ids, one outside the vocabulary, another device, a prompt that leaves no position for a new
                token, max_new_tokens below 1, or a model in training mode.
        """
        return [rows[0] for rows in self._generate(prompts, 1, max_new_tokens, do_sample=False)]

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
        """Sampled continuations of every prompt, n each; the global random state is left as it was.

        Args:
            prompts: token ids of each prompt.
            n: samples of one prompt.
            max_new_tokens: the most tokens of a sample.
            temperature: divides the logits.
            top_p: nucleus, in (0, 1].
            top_k: number of largest logits kept, 0 for all.
            seed: of the whole call; the samples depend on it and on how the prompts fall into batches.

        Returns:
            for every prompt n int64 tensors of new tokens, the end-of-sequence token included.

        Raises:
            TypeError: ids that are not integers.
            ValueError: as `complete_many`, or a setting out of range.
        """
        if n < 1:
            raise ValueError(f"n: expected 1 or more samples, got {n}; the published majority takes 8")
        if not 0.0 < temperature < float("inf") or not 0.0 < top_p <= 1.0 or top_k < 0:
            raise ValueError(
                "temperature, top_p, top_k: expected above 0, in (0, 1] and 0 or more, got "
                f"{temperature}, {top_p}, {top_k}; use complete_many for greedy decoding"
            )
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            return self._generate(
                prompts, n, max_new_tokens, do_sample=True, temperature=temperature, top_p=top_p, top_k=top_k
            )

    def _checked(
        self, prompts: Sequence[Ids], k: int, score_ids: Sequence[Ids] | None, room: int
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Prompts and score_ids as tensors; `room` positions must be left behind every prompt."""
        hf.check_decodable("model", self.model)
        if k < 1:
            raise ValueError(f"k: expected 1 or more candidates, got {k}; the published pools take 8")
        limit = hf.max_positions(self.model)
        checked = [hf.token_ids("ids", ids, self.model) for ids in prompts]
        for ids in checked:
            if not len(ids):
                raise ValueError("ids: expected at least one token, got none; begin with the prompt")
            if limit is not None and len(ids) + room > limit:
                raise ValueError(
                    f"ids: expected at most {limit - room} tokens for a model of {limit} positions, got {len(ids)}; "
                    "shorten the prompt"
                )
        if score_ids is None:
            return checked, [None] * len(checked)
        if len(score_ids) != len(checked):
            raise ValueError(
                f"score_ids: expected one for each of {len(checked)} prompts, got {len(score_ids)}; pass [] for none"
            )
        return checked, [hf.token_ids("score_ids", ids, self.model) for ids in score_ids]

    def _in_step(self, ids: Tensor) -> Tensor:
        """Logits [1, V] behind ids; what was seen is dropped if anything fails on the way."""
        seen, self._seen = self._seen, None
        if seen is None or len(seen.ids) > len(ids) or not torch.equal(seen.ids, ids[: len(seen.ids)]):
            seen = _Seen(ids[:0], hf.new_cache(), ids)
        new = ids[len(seen.ids) :]
        logits = hf.last_logits(self.model, new[None], cache=seen.cache) if len(new) else seen.logits
        if not bool(logits.isnan().any()):
            self._seen = _Seen(ids.clone(), seen.cache, logits)
        return logits

    def _candidates(self, logits: Tensor, k: int, score_ids: Sequence[Tensor | None]) -> list[Candidates]:
        logits = logits.clone()
        logits[:, self._valid :] = -torch.inf
        logprob = logits.log_softmax(-1)
        if bool(logprob.isnan().any()):
            raise ValueError("model: expected finite logits, got NaN or infinite ones; check its weights and dtype")
        ids = topk_entropy(logits, min(k, self._valid))[2]
        return [
            Candidates(top, row[top], None if scored is None else row[scored])
            for top, row, scored in zip(ids, logprob, score_ids, strict=True)
        ]

    def _generate(self, prompts: Sequence[Ids], n: int, max_new_tokens: int, **settings: Any) -> list[list[Tensor]]:
        """Continuations of every prompt, n each, in order."""
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected 1 or more, got {max_new_tokens}; the published limit is 4096")
        checked, _ = self._checked(prompts, 1, None, room=1)
        limit = hf.max_positions(self.model)
        rooms = [max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids)) for ids in checked]
        if self._valid < hf.vocabulary(self.model):
            settings["suppress_tokens"] = list(range(self._valid, hf.vocabulary(self.model)))
        found: dict[int, list[Tensor]] = {}
        for rows in batches([len(ids) for ids in checked], rooms, self.batch_tokens, n):
            padded = hf.left_padded([checked[row] for row in rows])
            new = hf.generate(self.model, *padded, rooms[rows[0]], num_return_sequences=n, **settings)
            found.update({row: new[place * n : (place + 1) * n] for place, row in enumerate(rows)})
        return [found[row] for row in range(len(checked))]
