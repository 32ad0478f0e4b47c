"""The native decoder over buffers of a fixed size: one sequence whose length lies on the device.

Every forward reads and writes the same memory, and no size depends on how long the sequence is, so that each can be
captured once and replayed: a step of one row, the scoring of candidates by rows that are not kept, and the catching up
with new tokens in buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fb_core import hf
from fb_core.engine.graphs import Graphs
from fb_core.native import Layer, NativeDecoder
from fb_kernels import branch_attention, rms_norm, skinny_linear

BUCKETS = (32, 64, 128, 256)


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
                "or one with adapters or hooks; use CollaborativeDecoder"
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
        if self.keys:
            for table, now in zip((self.cos, self.sin), decoder.rope(self._positions), strict=True):
                table.copy_(now)
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
                hidden = layer.step(hidden, positions, self.cos, self.sin, keys, values, held, slots)
            return hidden
        residual: Tensor | None = None
        for layer, keys, values in zip(layers, self.keys, self.values, strict=True):
            kept = None if slots is None else (keys, values, slots)
            q, k, v, residual = layer.before_attention(hidden, residual, positions, self.cos, self.sin, kept)
            attended: Tensor = branch_attention(  # type: ignore[assignment]
                q,
                k,
                v,
                keys,
                values,
                cu_branch=bucket.cu_branch,
                cu_group=bucket.cu_group,
                prefix_start=self.first,
                prefix_len=held,
                max_branch_len=len(ids),
                window=layer.window,
                scale=layer.scale,
            )
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
            self.graphs.run(len(bucket.ids), partial(self._take, bucket))
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
        """float32 [N, V] over the first `vocabulary` ids, of a residual stream [N, D]."""
        weight, bias = self.head.weight[:vocabulary], self.head.bias
        bias = None if bias is None else bias[:vocabulary]
        norm = self.decoder.norm
        return skinny_linear(hidden, weight, bias, norm_weight=norm.weight, eps=norm.eps, frozen=True).float()

    @torch.no_grad()
    def normed(self, hidden: Tensor) -> Tensor:
        """[N, D]: a residual stream after the final norm."""
        return rms_norm(hidden, *self.decoder.norm)[0]
