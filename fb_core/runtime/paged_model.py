"""A model over KV pages: its forwards of a decode step, of candidates, and of new tokens.

Every forward reads and writes the same memory, and on a GPU no size depends on the lengths of the sequences. So each
forward is captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fb_core.models.facts import CausalLM, Reading, lm_head, text_config, token_bytes
from fb_core.models.native import FAMILIES, Layer, NativeDecoder
from fb_core.models.packed import PrefixKV
from fb_core.runtime.cuda_graphs import Graphs
from fb_core.runtime.kv_pages import SIZE, Pages, pages_of
from fb_kernels import (
    BranchLayout,
    branch_attention,
    branch_attention_qkv,
    decoder_layer,
    linear_logprob,
    rms_norm,
    skinny_linear,
)

CHUNK = 512
"""New tokens of one forward at most."""
BUCKETS = (32, 64, 128, 256, CHUNK)
"""Rows of a forward over new tokens where it is captured."""
SEQUENCES = 64
"""Of a forward over new tokens at most."""


class Part(NamedTuple):
    """New tokens of one sequence."""

    tokens: Sequence[int]
    held: int  # number of tokens before them
    pages: Sequence[int]


class Packed(NamedTuple):
    """The input of a forward over new tokens, padded at the end with rows and sequences."""

    rows: Tensor  # [3, N] int64: ids, positions, slots
    cu_branch: Tensor  # [G + 1] int32: the rows of each sequence
    held: Tensor  # [G] int32
    table: Tensor  # [G, n] int32
    last: Tensor  # [G] int64, the last row of each sequence


class PagedModel:
    """A model's native decoder and head, with keys and values of sequences of up to `length` tokens in `count` pages.

    With `capture` forwards on a GPU are captured. A model without a native decoder is a ValueError.
    """

    def __init__(self, model: CausalLM, length: int, count: int, capture: bool = True) -> None:
        self.model = model
        self.length = length
        self.pages = Pages(count)
        self.keys: list[Tensor] = []
        self.graphs = Graphs(model.device, capture)
        self._read: Reading | None = None
        self._buffers: dict[int, Packed] = {}
        self._extended = torch.cuda.Event() if model.device.type == "cuda" else None  # the end of the last `extend`
        self._frequencies: Tensor | None = None  # what the rotary tables were computed from
        self._turned: tuple[int | None, float] = (None, 1.0)  # the version of that tensor, and the tables' scale
        self.refresh()
        layer = self.layers[0]
        shape = (count, SIZE, layer.kv_heads, layer.qkv.weight.shape[0] // (layer.heads + 2 * layer.kv_heads))
        with torch.inference_mode(False):
            like = layer.qkv.weight
            self.keys = [like.new_zeros(shape) for _ in self.layers]
            self.values = [like.new_zeros(shape) for _ in self.layers]
            self._positions = torch.arange(length, device=model.device)
            self.cos, self.sin = self.decoder.rope(self._positions)
            self.width = len(layer.o.weight)
            self._last = like.new_zeros(SEQUENCES + 1, self.width)
        self.kv = PrefixKV(dict(enumerate(zip(self.keys, self.values, strict=True))))

    def refresh(self) -> bool:
        """Read the model again; returns whether the pages still hold what it computes, by a `Reading` of it.

        If not, no page is shared any more. A model without a native decoder is a ValueError, and so is another dtype or
        device, which does not fit the pages.
        """
        decoder = NativeDecoder.of(self.model)
        if decoder is None:
            raise ValueError(
                f"{type(self.model).__name__}: expected an unchanged {', '.join(FAMILIES.values())}, got another model "
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
        self.head = lm_head(self.model)
        frequencies, scale = decoder.frequencies
        version = None if frequencies.is_inference() else frequencies._version
        same = frequencies is self._frequencies and version is not None and (version, scale) == self._turned
        if self.keys and not same:
            for table, now in zip((self.cos, self.sin), decoder.rope(self._positions), strict=True):
                table.copy_(now)
        self._frequencies, self._turned = frequencies, (version, scale)
        read = Reading(self.model)
        if self._read is None or read.addresses != self._read.addresses:
            self.graphs.forget()
        same = same and read.same(self._read)
        if not same:
            self.pages.forget()
        self._read = read
        return same

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    @torch.no_grad()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        held: Tensor,
        table: Tensor,
        slots: Tensor | None = None,
        layers: Sequence[Layer] | None = None,
    ) -> Tensor:
        """The residual stream after the last layer, for rows that are each one token after a sequence.

        Args:
            ids: [N] int64, N / G for each of G sequences.
            positions: [N] int32 or int64.
            held: [G] int32 or int64, how many tokens of its sequence a row sees.
            table: [G, n] int32 or int64, the pages of each sequence.
            slots: [N] like positions, where keys and values are written, negative for nowhere; None writes none.
            layers: to use instead of the model's own, of the same sizes.

        Returns:
            [N, D], the input of `logits` and `normed`.
        """
        hidden: Tensor = self.decoder.embedding(ids)
        layers = self.layers if layers is None else layers
        for layer, keys, values in zip(layers, self.keys, self.values, strict=True):
            where = (self.cos, self.sin, positions, keys, values, held, slots)
            how: dict[str, Any] = {"block_table": table, "eps": layer.input_norm.eps}
            how |= {"window": layer.window, "scale": layer.scale}
            if layer.weights is not None:
                hidden = decoder_layer(hidden, layer.weights, *where, **how)
            else:
                hidden = _mixture_layer(hidden, layer, *where, **how)
        return hidden

    @torch.no_grad()
    def extend(self, parts: Sequence[Part], every: bool = False) -> Tensor:
        """Run new tokens of some sequences, one or more each, in as few forwards of up to `CHUNK` rows as possible.

        Returns the residual stream after the last token of each [G, D]; with `every` after each token [N, D], and then
        forwards are not captured.
        """
        self.wait_for_stream()
        if every:
            rows = [self._run(self._packed([part for _, part in chunk], False)) for chunk in _chunks(parts)]
            streams = torch.cat(rows)
        else:
            streams = self.layers[0].o.weight.new_empty(len(parts), self.width)
            for chunk in _chunks(parts):
                streams[[index for index, _ in chunk]] = self._extend([part for _, part in chunk])
        if self._extended is not None:
            self._extended.record(torch.cuda.current_stream(self.graphs.device))
        return streams

    def warm(self) -> None:
        """Capture the forwards over new tokens that `extend` would capture at their first use."""
        if self.graphs.captures:
            for size in BUCKETS:
                lengths = [min(self.length, size - first) for first in range(0, size, self.length)]
                self.extend([Part([0] * length, 0, [-1] * pages_of(length)) for length in lengths])  # writes nowhere

    def wait_for_stream(self) -> None:
        """Make what this thread enqueues wait for the last `extend`, on whichever stream that ran."""
        if self._extended is not None:
            torch.cuda.current_stream(self.graphs.device).wait_event(self._extended)

    def _extend(self, parts: Sequence[Part]) -> Tensor:
        """`extend` in one forward; in a captured one, padding rows are a branch of an empty sequence."""
        captured = self.graphs.captures
        numbers = self._packed(parts, captured)
        if not captured:
            return self._run(numbers).index_select(0, numbers.last)
        size = numbers.rows.shape[1]
        packed = self._buffers.setdefault(size, numbers)
        for buffer, now in zip(packed, numbers, strict=True):
            buffer.copy_(now)
        self.graphs.ready(("extend", size), lambda: self._last.copy_(self._run(packed).index_select(0, packed.last)))()
        return self._last[: len(parts)]

    def _packed(self, parts: Sequence[Part], captured: bool) -> Packed:
        """The input of a forward over new tokens, padded if captured."""
        lengths = [len(part.tokens) for part in parts]
        total = sum(lengths)
        size = next(size for size in BUCKETS if total <= size) if captured else total
        groups = SEQUENCES + 1 if captured else len(parts)
        width = pages_of(self.length) if captured else max(pages_of(part.held) for part in parts)
        places = [range(part.held, part.held + length) for part, length in zip(parts, lengths, strict=True)]
        slots = [part.pages[i // SIZE] * SIZE + i % SIZE for part, own in zip(parts, places, strict=True) for i in own]
        ids = [token for part in parts for token in part.tokens]
        positions = [position for own in places for position in own]
        bounds = [0, *accumulate(lengths)]
        absent, absent_rows = groups - len(parts), size - total
        pieces = (
            [*ids, *[0] * absent_rows, *positions, *[0] * absent_rows, *slots, *[-1] * absent_rows],
            [*bounds, *[size] * absent],
            [*(part.held for part in parts), *[0] * absent],
            [page for part in parts for page in (*part.pages, *[-1] * width)[:width]] + [-1] * width * absent,
        )
        aligned = [[*piece, *[0] * (-len(piece) % 4)] for piece in pieces]  # to 16 bytes, as kernels are compiled for
        together = torch.tensor([number for piece in aligned for number in piece], dtype=torch.int32)
        if self.graphs.device.type == "cuda":  # one copy that the host does not wait for
            together = together.pin_memory().to(self.graphs.device, non_blocking=True)
        rows, cu_branch, held, table = (
            whole[: len(piece)] for whole, piece in zip(together.split([*map(len, aligned)]), pieces, strict=True)
        )
        return Packed(rows.long().view(3, size), cu_branch, held, table.view(groups, width), cu_branch[1:].long() - 1)

    def _run(self, packed: Packed) -> Tensor:
        """The residual stream [N, D] after every row."""
        ids, positions, slots = packed.rows
        groups = len(packed.held)
        firsts = torch.arange(groups + 1, dtype=torch.int32, device=ids.device)
        layout = BranchLayout(
            packed.cu_branch,
            firsts,
            torch.zeros_like(packed.held),
            packed.held,
            packed.table,
            max_branch_len=len(ids),
        )
        hidden: Tensor = self.decoder.embedding(ids)
        residual: Tensor | None = None
        with layout.unchanged():
            for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
                kept = keys.flatten(0, 1), values.flatten(0, 1), slots
                q, k, v, residual = layer.before_attention(hidden, residual, positions, self.cos, self.sin, kept)
                attended = branch_attention(q, k, v, keys, values, layout, window=layer.window, scale=layer.scale)
                hidden, residual = layer.after_attention(attended, residual)
        return hidden if residual is None else hidden + residual

    @torch.no_grad()
    def logits(self, hidden: Tensor, vocabulary: int) -> Tensor:
        """Logits [N, vocabulary] of the first `vocabulary` ids, in the head's dtype, from a residual stream [N, D]."""
        weight, bias = self.head.weight[:vocabulary], self.head.bias
        bias = None if bias is None else bias[:vocabulary]
        norm = self.decoder.norm
        return skinny_linear(hidden, weight, bias, norm_weight=norm.weight, eps=norm.eps, frozen=True)

    @torch.no_grad()
    def logprobs(self, hidden: Tensor, tokens: Tensor, others: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Log-probs in nats of tokens [N], as the scorer computes them, and of others [N, k], from a stream [N, D]."""
        normed, (weight, bias) = self.normed(hidden), (self.head.weight, self.head.bias)
        own, total = linear_logprob(normed, weight, tokens, bias, valid_vocab=vocabulary, return_lse=True)
        logits = torch.linalg.vecdot(normed[:, None].to(own.dtype), weight[others].to(own.dtype))
        return own, (logits if bias is None else logits + bias[others]) - total[:, None]

    @torch.no_grad()
    def normed(self, hidden: Tensor) -> Tensor:
        """A residual stream [N, D] after the final norm."""
        return rms_norm(hidden, *self.decoder.norm)[0]


def _mixture_layer(hidden: Tensor, layer: Layer, *where: Any, eps: float, **how: Any) -> Tensor:
    """`decoder_layer` of a layer with experts, with its tensors and options."""
    projected = skinny_linear(hidden, *layer.qkv, norm_weight=layer.input_norm.weight, eps=eps)
    norms = (layer.q_norm and layer.q_norm.weight, layer.k_norm and layer.k_norm.weight)
    how |= {"num_heads": layer.heads, "num_kv_heads": layer.kv_heads, "eps": eps}
    attended = branch_attention_qkv(projected, *norms, *where, **how)
    added, residual = layer.after_attention(attended, hidden)
    return added if residual is None else added + residual


def page_bytes(model: CausalLM) -> int:
    """Bytes of a page: keys and values of all layers."""
    return SIZE * token_bytes(text_config(model), model.dtype)


def _chunks(parts: Sequence[Part]) -> Iterator[list[tuple[int, Part]]]:
    """Parts with their indices, cut into chunks whose rows and sequences fit one forward."""
    chunk: list[tuple[int, Part]] = []
    room = CHUNK
    for index, (tokens, held, pages) in enumerate(parts):
        done = 0
        while done < len(tokens):
            taken = tokens[done : done + room]
            chunk.append((index, Part(taken, held + done, pages)))
            done, room = done + len(taken), room - len(taken)
            if not room or len(chunk) == SEQUENCES:
                yield chunk
                chunk, room = [], CHUNK
    if chunk:
        yield chunk
