"""The plain loop of decoding, the definition that the fast one is tested against: padded batches and their caches."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fb_core.models.facts import (
    Cache,
    CausalLM,
    agree,
    check_in_memory,
    checking,
    empty_cache,
    max_positions,
    misfit,
    twice,
    unfit,
    vocabulary,
)
from fb_core.models.native import NativeDecoder

if TYPE_CHECKING:
    from fb_core.events import Event

MAX_ROWS = 256  # of one batch: keeps its logits [rows, V] small compared with the model


@dataclass
class Running:
    """One running sequence."""

    index: int  # among the prompts
    tokens: list[int]  # prompt and what was generated
    prompt: int  # its length
    events: list[Event] = field(default_factory=list)  # of a decoder that makes events
    least: int = 0  # new tokens before which none is chosen that ends it

    @property
    def early(self) -> bool:
        """Whether the next token is not to end it."""
        return len(self.tokens) < self.prompt + self.least

    @property
    def new(self) -> list[int]:
        """What was generated."""
        return self.tokens[self.prompt :]


@dataclass(frozen=True)
class Stop:
    """When a generation ends by its tokens, asked after each; stop strings are found in the text (`detokenizer.py`)."""

    ends: frozenset[int]  # stop at one of these ids
    room: int  # maximum new tokens
    positions: int | None  # maximum tokens, the prompt's included
    events: float = float("inf")  # stop after the token of this event, counted from 1
    on_token: Callable[[Running], bool] | None = None  # called after every token; True also stops

    def __call__(self, row: Running) -> bool:
        stopped = self.on_token is not None and self.on_token(row)
        ended = row.tokens[-1] in self.ends or len(row.events) >= self.events
        return stopped or ended or len(row.tokens) >= self.length(row)

    def length(self, row: Running) -> int:
        """Maximum tokens of a sequence, the prompt's included."""
        wanted = row.prompt + self.room
        return wanted if self.positions is None else min(wanted, self.positions)


@dataclass
class Step:
    """What is known when the next token of every row is to be chosen."""

    index: int  # number of tokens generated so far
    rows: list[Running]
    logits: Tensor  # float32 [B, V] after each row's last token
    cache: Cache  # cache of all rows, left-padded to `slots` tokens
    slots: int


def not_finite(step: int, prompt: int) -> ValueError:
    """The error for a small model whose logits have no softmax."""
    return ValueError(
        f"slm: expected finite logits, got NaN or infinite ones at step {step} of prompt {prompt}; check its weights "
        "and dtype"
    )


_DECODES: WeakSet[nn.Module] = WeakSet()  # models whose decoding was compared with plain forwards


def check_decodable(name: str, model: CausalLM) -> None:
    """Refuse, by name, what the plain loop would not decode as the model's own `generate` does.

    Raises:
        TypeError: not a transformers model.
        ValueError: a model in training mode or offloaded, a `misfit`, or one whose padded batches and caches of keys
            and values do not give what its plain forwards give.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{name}: expected a transformers causal LM, got {type(model).__name__}; load one with AutoModelForCausalLM"
        )
    if model.training:
        raise ValueError(f"{name}: expected a model in eval mode, got one in training mode; call .eval() first")
    check_in_memory(name, model)
    if (reason := misfit(model)) is not None:
        raise unfit(name, model, reason)
    if model not in _DECODES and not NativeDecoder.fits(model):
        with checking(name, model), torch.autocast(model.device.type, enabled=False):
            same = _decodes(model)
        if not same:
            raise unfit(name, model, "other logits in a padded batch, or after a cache, than in a plain forward")
    _DECODES.add(model)


@torch.no_grad()
def _decodes(model: CausalLM) -> bool:
    """Whether a padded batch and a cache that grows give the logits of plain forwards; a few tokens are run."""
    size, steps, room = vocabulary(model), 4, min(11, max_positions(model) or 11)
    tokens = torch.tensor([size * step // 20 for step in range(1, 20)], device=model.device)
    rows = [tokens[:room], tokens[-room + 3 :]]

    def plain() -> Tensor:
        whole = [model(input_ids=ids[None], use_cache=False).logits[0, -steps:].float() for ids in rows]
        return torch.stack([*whole, whole[0]])

    wanted, other = twice(plain)
    if bool(wanted.isnan().any()):
        return True  # which is said where they are used
    together, alone, cached = empty_cache(model), empty_cache(model), []
    ids, mask = left_padded([ids[:-steps] for ids in rows])
    assert mask is not None
    last_logits(model, ids, mask, together)
    last_logits(model, rows[0][None, :2], cache=alone)
    for step in range(room - steps, room):
        last = torch.stack([row[step - room :][:1] for row in rows])
        mask = torch.cat([mask, torch.ones_like(last)], 1)
        extended = rows[0][None, alone.get_seq_length() : step + 1]
        cached += [last_logits(model, last, mask, together), last_logits(model, extended, cache=alone)]
    return agree(torch.cat(cached).view(steps, 3, -1).transpose(0, 1), wanted, other)


def left_padded(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Token ids [B, S], padded on the left, and their mask [B, S] (None if all have one length)."""
    longest = max(len(tokens) for tokens in sequences)
    ids = torch.stack([nn.functional.pad(tokens, (longest - len(tokens), 0)) for tokens in sequences])
    if all(len(tokens) == longest for tokens in sequences):
        return ids, None
    lengths = torch.tensor([len(tokens) for tokens in sequences], device=ids.device)
    return ids, (torch.arange(longest, device=ids.device) >= longest - lengths[:, None]).long()


@torch.no_grad()
def last_logits(model: CausalLM, ids: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
    """float32 [B, V] after the last token of each row [n] of `ids`; a cache of the tokens before is extended by them.

    The mask, [B, cached + n], is 0 at left padding.
    """
    options = {**with_cache(model, cache), "use_cache": cache is not None}
    if mask is not None:
        options["attention_mask"] = mask
        options["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    head = model.get_output_embeddings()
    with head.register_forward_pre_hook(_contiguous) if min(ids.shape) > 1 else nullcontext():
        return model(input_ids=ids, **options).logits[:, -1].float()


def with_cache(model: nn.Module, cache: Any) -> dict[str, Any]:
    """A cache as an argument of the model's forward; its name depends on the version of transformers."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def _contiguous(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """For an LM head: a prefill's last positions are a slice, for which F.linear copies the weight B times on a CPU."""
    return inputs[0].contiguous(), *inputs[1:]


def lockstep(
    model: CausalLM,
    prompts: Sequence[Tensor],
    stop: Stop,
    choose: Callable[[Step], Sequence[int]],
    batch_tokens: int,
    *,
    shared: bool = False,
) -> list[Running]:
    """Continue many prompts together, one token at a time, in left-padded batches of similar lengths; a row for each.

    Args:
        model: a causal LM in eval mode.
        prompts: [P] int64 each on the model's device, not empty.
        stop: when a row leaves its batch.
        choose: gives the next token of every row.
        batch_tokens: maximum tokens of one batch, padding and new ones included.
        shared: equal prompts of a batch are one row of its first forward; not for a caller with hooks on the forward.
    """
    rows = [Running(index, ids.tolist(), len(ids)) for index, ids in enumerate(prompts)]
    for batch in batches([len(ids) for ids in prompts], stop.room, batch_tokens):
        for _ in steps(model, [rows[index] for index in batch], stop, choose, shared=shared):
            pass
    return rows


@torch.no_grad()
def steps(
    model: CausalLM,
    rows: Sequence[Running],
    stop: Stop,
    choose: Callable[[Step], Sequence[int]],
    *,
    shared: bool = False,
) -> Iterator[None]:
    """Append a token to every row of one batch, again and again until all have ended; arguments as of `lockstep`."""
    device, live = model.device, list(rows)
    first, source = _distinct(live) if shared else (live, [])
    ids, mask = left_padded([torch.tensor(row.tokens, device=device) for row in first])
    width, cache = ids.shape[1], empty_cache(model)
    for step in count():
        logits = last_logits(model, ids, mask, cache)
        if len(logits) < len(live):  # equal prompts shared a row: from here on each has its own
            cache.reorder_cache(torch.tensor(source, device=device))
            logits, mask = logits[source], None if mask is None else mask[source]
        for row, token in zip(live, choose(Step(step, live, logits, cache, width + step)), strict=True):
            row.tokens.append(token)
        yield
        going = [index for index, row in enumerate(live) if not stop(row)]
        if not going:
            return
        if len(going) < len(live):
            cache.reorder_cache(torch.tensor(going, device=device))
            mask = None if mask is None else mask[going]
            live = [live[index] for index in going]
        ids = torch.tensor([row.tokens[-1:] for row in live], device=device)
        mask = None if mask is None else torch.cat([mask, torch.ones_like(ids)], 1)


def _distinct(rows: Sequence[Running]) -> tuple[list[Running], list[int]]:
    """One row for each distinct sequence of tokens, and for every row the index of its one among these."""
    places: dict[tuple[int, ...], int] = {}
    source = [places.setdefault(tuple(row.tokens), len(places)) for row in rows]
    return [rows[source.index(index)] for index in range(len(places))], source


def batches(lengths: Sequence[int], room: int, batch_tokens: int) -> Iterator[list[int]]:
    """Indices by falling length, cut into batches of at most `batch_tokens` tokens and MAX_ROWS rows.

    Padding and up to `room` new tokens of each prompt count; a larger prompt runs alone.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) == MAX_ROWS or (len(batch) + 1) * (lengths[batch[0]] + room) > batch_tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def streamer_of_caller() -> Any:
    """The `streamer=` given to `model.generate`, which transformers 5 does not pass on to a `custom_generate` callable.

    Read from the frame of `generate`: generate calls the callable, and the callable calls this.
    """
    frame = sys._getframe(2)
    return frame.f_locals.get("streamer") if frame.f_code.co_name == "generate" else None
