"""One sequence in buffers of a fixed size, its length on the device: the model over them, and the step of decoding.

Every forward reads and writes the same memory, and no size depends on how long the sequence is, so that each can be
captured once and replayed: a step of one row, the scoring of candidates by rows that are not kept, and the catching up
with new tokens in buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fb_core import hf
from fb_core.engine.graphs import Graphs
from fb_core.native import Layer, NativeDecoder
from fb_core.policy import RequestPolicy
from fb_kernels import (
    BranchLayout,
    DecodeState,
    Halt,
    branch_attention,
    commit_,
    decoder_layer,
    rms_norm,
    skinny_linear,
    topk_entropy,
)

BUCKETS = (32, 64, 128, 256)
RING = 2
"""Runs whose outcomes the host may still read."""


class Bucket(NamedTuple):
    """What a forward over new tokens reads."""

    cu_branch: Tensor  # [2] int32: all rows are one branch
    cu_group: Tensor  # [2] int32
    ids: Tensor  # [size] int64
    span: Tensor  # [2] int32: how many tokens are held, how many of the ids count
    places: Tensor  # [size] int32: 0, 1, ..


class StaticModel:
    """A model's native decoder, keys and values of up to `slots` tokens, and the model's head.

    Args:
        model: a causal LM of the Llama family (`fb_core.native`).
        slots: the most tokens.

    Raises:
        ValueError: a model without a native decoder.
    """

    def __init__(self, model: hf.CausalLM, slots: int) -> None:
        self.model = model
        self.slots = slots
        self.keys: list[Tensor] = []
        self.graphs = Graphs(model.device)
        self._read: list[int] = []
        self._frequencies: Tensor | None = None  # what the rotary tables were made of,
        self._turned: tuple[int | None, float] = (None, 1.0)  # its version then, and the tables' scale
        self.refresh()
        layer = self.layers[0]
        shape = (slots, layer.kv_heads, layer.qkv.weight.shape[0] // (layer.heads + 2 * layer.kv_heads))
        with torch.inference_mode(False):
            like = layer.qkv.weight
            self.keys = [like.new_zeros(shape) for _ in self.layers]
            self.values = [like.new_zeros(shape) for _ in self.layers]
            self._positions = torch.arange(slots, device=model.device)
            self.cos, self.sin = self.decoder.rope(self._positions)
            self.first = torch.zeros(1, dtype=torch.int32, device=model.device)  # where the prefix begins
            self.last = self.decoder.layers[0].o.weight.new_zeros(1, len(self.decoder.layers[0].o.weight))
            self.buckets = [
                Bucket(
                    torch.tensor([0, size], dtype=torch.int32, device=model.device),
                    torch.tensor([0, 1], dtype=torch.int32, device=model.device),
                    torch.zeros(size, dtype=torch.int64, device=model.device),
                    torch.zeros(2, dtype=torch.int32, device=model.device),
                    torch.arange(size, dtype=torch.int32, device=model.device),
                )
                for size in BUCKETS
            ]

    def refresh(self) -> None:
        """Read the model anew: other values count, another dtype or device does not fit the buffers.

        Raises:
            ValueError: a model without a native decoder, or whose dtype or device has changed.
        """
        decoder = NativeDecoder.of(self.model)
        if decoder is None:
            raise ValueError(
                f"{type(self.model).__name__}: expected an unchanged Llama, Mistral, Qwen2 or Qwen3, got another model "
                "or one with adapters or hooks; use CollaborativeDecoder without max_length"
            )
        weight = decoder.layers[0].qkv.weight
        if self.keys and (weight.dtype, weight.device) != (self.keys[0].dtype, self.keys[0].device):
            raise ValueError(
                f"{type(self.model).__name__}: expected {self.keys[0].dtype} on {self.keys[0].device} as when the "
                f"buffers were made, got {weight.dtype} on {weight.device}; make the decoder after moving its models"
            )
        self.decoder = decoder
        self.layers = decoder.layers
        self.head = hf.lm_head(self.model)
        frequencies, scale = decoder.frequencies
        version = None if frequencies.is_inference() else frequencies._version
        same = frequencies is self._frequencies and version is not None and (version, scale) == self._turned
        if self.keys and not same:
            for table, now in zip((self.cos, self.sin), decoder.rope(self._positions), strict=True):
                table.copy_(now)
        self._frequencies, self._turned = frequencies, (version, scale)
        read = [parameter.data_ptr() for parameter in self.model.parameters()]
        if read != self._read:
            self.graphs.forget()
        self._read = read

    @property
    def nbytes(self) -> int:
        """Memory of keys and values."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    @property
    def kv(self) -> hf.PrefixKV:
        """The buffers as one page [1, slots, Hkv, E] a layer."""
        return hf.PrefixKV([(keys[None], values[None]) for keys, values in zip(self.keys, self.values, strict=True)])

    @torch.no_grad()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        held: Tensor,
        *,
        bucket: Bucket | None = None,
        layers: Sequence[Layer] | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """The residual stream behind the last layer of rows that see the sequence and their own branch.

        Args:
            ids: [N] int64.
            positions: [N] int32 or int64.
            held: [1] int32, how many tokens of the sequence the rows see.
            bucket: whose rows are one branch; None where every row is a branch of its own.
            layers: other ones than the model's own, of the same sizes.
            slots: [N] like positions, where keys and values are kept, negative for nowhere; None keeps none.

        Returns:
            [N, D], which `logits` and `normed` take.
        """
        hidden: Tensor = self.decoder.embedding(ids)
        layers = self.layers if layers is None else layers
        if bucket is None:
            for layer, keys, values in zip(layers, self.keys, self.values, strict=True):
                hidden = decoder_layer(
                    hidden,
                    layer.weights,
                    self.cos,
                    self.sin,
                    positions,
                    keys,
                    values,
                    held,
                    slots,
                    eps=layer.input_norm.eps,
                    window=layer.window,
                    scale=layer.scale,
                )
            return hidden
        residual: Tensor | None = None
        layout = BranchLayout(bucket.cu_branch, bucket.cu_group, self.first, held, max_branch_len=len(ids))
        for layer, keys, values in zip(layers, self.keys, self.values, strict=True):
            kept = None if slots is None else (keys, values, slots)
            q, k, v, residual = layer.before_attention(hidden, residual, positions, self.cos, self.sin, kept)
            attended = branch_attention(q, k, v, keys, values, layout, window=layer.window, scale=layer.scale)
            hidden, residual = layer.after_attention(attended, residual)
        assert residual is not None
        return hidden + residual

    @torch.no_grad()
    def extend(self, ids: Sequence[int], held: int) -> Tensor:
        """Take `ids`, at least one, behind the first `held` tokens; the residual stream [1, D] behind the last of them.

        A few tokens are one forward, padded to the next of BUCKETS; padding is neither kept nor seen. The result is
        overwritten by the next call.
        """
        for start in range(0, len(ids), BUCKETS[-1]):
            part = ids[start : start + BUCKETS[-1]]
            bucket = next(bucket for bucket in self.buckets if len(part) <= len(bucket.ids))
            bucket.ids[: len(part)] = torch.tensor(part)
            bucket.span.copy_(torch.tensor([held + start, len(part)]))
            self.graphs.ready(len(bucket.ids), partial(self._take, bucket))()
        return self.last

    def _take(self, bucket: Bucket) -> None:
        """One forward over a bucket; the stream behind its last token to `last`."""
        held, count = bucket.span[:1], bucket.span[1:]
        place = bucket.places + held
        slots = place.where(bucket.places < count, -1)
        rows = self.forward(bucket.ids, place.clamp(max=self.slots - 1), held, bucket=bucket, slots=slots)
        self.last.copy_(rows.index_select(0, (count - 1).long()))

    @torch.no_grad()
    def logits(self, hidden: Tensor, vocabulary: int) -> Tensor:
        """[N, V] over the first `vocabulary` ids in the head's dtype, of a residual stream [N, D]."""
        weight, bias = self.head.weight[:vocabulary], self.head.bias
        bias = None if bias is None else bias[:vocabulary]
        norm = self.decoder.norm
        return skinny_linear(hidden, weight, bias, norm_weight=norm.weight, eps=norm.eps, frozen=True)

    @torch.no_grad()
    def normed(self, hidden: Tensor) -> Tensor:
        """[N, D]: a residual stream after the final norm."""
        return rms_norm(hidden, *self.decoder.norm)[0]


class DecodeStep:
    """A sequence under way: its state, and the step that appends to it.

    `run` reads and writes the same tensors every time and never asks the host. Once the state has halted, running it
    again computes the same values and changes nothing, so that a step may be enqueued before the host has looked.

    Args:
        model: takes the step.
        vocabulary: how many of its ids count.
        policy: when the step halts for an event.
        ends: ids at which it halts.
    """

    def __init__(self, model: StaticModel, vocabulary: int, policy: RequestPolicy, ends: frozenset[int]) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.top_k = min(policy.top_k, vocabulary)
        with torch.inference_mode(False):
            device = model.first.device
            self.state = DecodeState(
                tokens=torch.zeros(1, model.slots, dtype=torch.int64, device=device),
                length=torch.zeros(1, dtype=torch.int32, device=device),
                halt=torch.zeros(1, dtype=torch.int32, device=device),
                budget=torch.zeros(1, dtype=torch.int32, device=device),
            )
            self.logits = model.last.new_zeros(1, vocabulary)
            self.threshold = torch.tensor(policy.threshold, device=device, dtype=torch.float64)
            self.end_ids = ends
            self.ends = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
            self.limit = torch.tensor(model.slots, dtype=torch.int32, device=device)
            exact = torch.promote_types(model.last.dtype, torch.float32)
            pinned = device.type == "cuda"
            self.ring = torch.zeros(RING, 1, 3, dtype=exact, pin_memory=pinned)  # halt, token, entropy, of the device
            self.ended = [torch.cuda.Event() for _ in range(RING)] if pinned else []
        self.ahead = 1 if pinned else 0
        self._advance: list[Callable[[], None]]  # `_compute` for each place of the ring, captured where it can be
        self._begun = self._looked = 0  # runs since the sequence began, and those whose outcome was asked for

    @torch.no_grad()
    def begin(self, tokens: Tensor, budget: int) -> None:
        """A new sequence of tokens [P], the first P - 1 of which go through the model now."""
        if self.ended and self._begun:  # a step may still be under way, on another stream
            torch.cuda.current_stream(self.logits.device).wait_event(self.ended[(self._begun - 1) % RING])
        self.model.refresh()
        count = len(tokens)
        self.state.tokens[0, :count] = tokens
        self.state.length.fill_(count)
        self.state.budget.fill_(budget)
        if count > 1:
            self.model.extend(tokens[:-1].tolist(), 0)
        self.state.halt.fill_(Halt.LENGTH)  # so that a capture's runs append nothing
        self._advance = [
            self.model.graphs.ready(("step", place), partial(self._compute, outcome))
            for place, outcome in enumerate(self.ring)
        ]
        self.state.halt.zero_()
        self._looked = self._begun

    @torch.no_grad()
    def run(self) -> None:
        """Append the greedy token or halt; what it saw is in `logits`, and its outcome goes to the host."""
        place = self._begun % RING
        self._advance[place]()
        if self.ended:
            self.ended[place].record(torch.cuda.current_stream(self.logits.device))
        self._begun += 1
        self._looked = max(self._looked, self._begun - RING)  # older ones are overwritten

    def outcome(self) -> tuple[Halt, int, float]:
        """(why it halted, the greedy token, entropy in nats) of the next run, with `ahead` more enqueued behind it.

        Runs behind one that halted saw the same and are not asked for: `take` forgets them.
        """
        while self._begun <= self._looked + self.ahead:
            self.run()
        place = self._looked % RING
        if self.ended:
            self.ended[place].synchronize()
        self._looked += 1
        halt, token, entropy = self.ring[place, 0].tolist()
        return Halt(int(halt)), int(token), entropy

    def _compute(self, outcome: Tensor) -> None:
        state, model = self.state, self.model
        position = state.length - 1
        last = state.tokens.gather(1, position[:, None].long())[:, 0]
        hidden = model.forward(last, position, position, slots=position)
        self.logits.copy_(model.logits(hidden, self.vocabulary))
        entropy, _, ids = topk_entropy(self.logits, self.top_k)
        token = ids[:, 0]  # the first of equal ones
        limits = {"threshold": self.threshold, "eos_ids": self.ends, "max_length": self.limit}
        commit_(state, token, entropy, **limits, outcome=outcome)

    @torch.no_grad()
    def take(self, place: int, token: int, budget: int) -> None:
        """Put a token at `place`, which is where the sequence ends, and run on with so many events left."""
        self.state.tokens[0, place] = token
        self.state.length.fill_(place + 1)
        self.state.budget.fill_(budget)
        self.state.halt.zero_()
        self._looked = self._begun
