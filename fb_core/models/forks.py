"""Layers that keep a state instead of keys: gated delta rules, short convolutions, Mamba2.

In a packed forward each state is forked where branches leave: a prefix runs once, and every branch goes on from the
state after its last token. The layers are the model's own; instead of a cache they get the state to go on from.
"""

from __future__ import annotations

import copy
import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

CACHES = ("cache_params", "past_key_values")  # what the layers call their cache


class State:
    """The state of B sequences after their last token, in the place of a transformers cache."""

    record_past = True  # else one token alone would be written into the convolution's state

    def __init__(self, conv: dict[int, Tensor], recurrent: dict[int, Tensor]) -> None:
        self.conv_states, self.recurrent_states = conv, recurrent  # [B, C, width] and [B, ...] of each state
        self.before = bool(conv)

    @classmethod
    def stacked(cls, states: Sequence[State]) -> State:
        """One of all sequences."""
        parts = ([each.conv_states for each in states], [each.recurrent_states for each in states])
        return cls(*({at: torch.cat([each[at] for each in own]) for at in own[0]} for own in parts))

    @property
    def rows(self) -> int:
        """B."""
        return len(next(iter(self.conv_states.values()))) if self.before else 0

    def of(self, row: int) -> State:
        """That of one sequence, as a view."""
        own = ({at: x[row : row + 1] for at, x in each.items()} for each in (self.conv_states, self.recurrent_states))
        return State(*own)

    @classmethod
    def cached(cls, layer: Any) -> State:
        """That of a layer of a transformers cache."""
        own = (layer.conv_states, layer.recurrent_states)
        return cls(*({at: x for at, x in each.items() if x is not None} for each in own))

    @property
    def layers(self) -> State:
        """The layers of the cache: there is one."""
        return self

    def __getitem__(self, layer: int) -> State:
        return self

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the layer goes on from a state."""
        return self.before

    def update_conv_state(
        self, x: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """The inputs [B, C, T] of a convolution, behind those that it still sees."""
        whole = torch.cat([self.conv_states[state_idx], x], -1) if self.before else x
        width = conv_kernel_size or x.shape[-1]
        kept = whole[..., -width:]
        self.conv_states = self.conv_states | {state_idx: pad(kept, (width - kept.shape[-1], 0))}
        return whole

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep the state after the last token."""
        self.recurrent_states = self.recurrent_states | {state_idx: state}
        return state


class Batch(NamedTuple):
    """Segments of sequences that run together: all from a beginning, or all from a state."""

    rows: list[range]
    ids: Tensor  # [B, longest] int64; a shorter segment ends with copies of its last row
    after: list[int]  # the rows whose states they go on from; none if they begin
    keep: bool  # whether others go on from their last rows; then none is shorter


class Plan:
    """The segments of a packed forward's sequences, cut where others leave, those before first.

    Args:
        groups: of every group, in row order, its branches' lengths and the row whose state they go on from, if any.
        apart: these rows are not among the packed ones.
        keep: rows after which states are wanted.
        device: of the rows.
    """

    def __init__(
        self, groups: Sequence[tuple[Sequence[int], int | None]], apart: bool, keep: Sequence[int], device: torch.device
    ) -> None:
        assert not (apart and keep)
        runs, row = list[tuple[range, int | None]](), 0
        for lengths, after in groups:
            for count in lengths:
                if count:
                    runs.append((range(row, row + count), after))
                row += count
        leaving = sorted({*keep, *(after for _, after in runs if after is not None and not apart)})
        wanted = set(leaving)
        depths: dict[int, int] = {}  # of the segment that ends with a row
        batches: dict[tuple[int, bool, int], list[tuple[range, int | None]]] = {}
        for rows, after in runs:
            cuts = leaving[bisect_left(leaving, rows.start) : bisect_left(leaving, rows[-1])]
            for first, stop in pairwise([rows.start, *(cut + 1 for cut in cuts), rows.stop]):
                depth = 0 if after is None or apart else depths[after] + 1
                depths[stop - 1] = depth
                length = stop - first
                if stop - 1 not in wanted:  # then it may be padded, to less than twice its length
                    length = -(length - 1).bit_length()
                batches.setdefault((depth, after is not None, length), []).append((range(first, stop), after))
                after = stop - 1
        self.batches, self.keep = list[Batch](), {*keep}
        for (_, _, length), own in sorted(batches.items(), key=lambda item: item[0][0]):
            longest = max(len(rows) for rows, _ in own)
            index = [[*rows, *[rows[-1]] * (longest - len(rows))] for rows, _ in own]
            after_rows = [after for _, after in own if after is not None]
            self.batches.append(
                Batch([rows for rows, _ in own], torch.tensor(index, device=device), after_rows, length > 0)
            )
        order = [row for batch in self.batches for rows in batch.rows for row in rows]
        self.inverse = torch.tensor(order, device=device).argsort()

    def run(self, forward: Callable[..., Tensor], hidden: Tensor, cache: str, states: dict[int, State]) -> Tensor:
        """A layer's output [1, T, D] for packed rows; `states`, by row, gets those that are wanted."""
        pieces, passing = [], set[int]()
        for rows, ids, after, keep in self.batches:
            state = State.stacked([states[row] for row in after]) if after else State({}, {})
            with _saved(state) if ids.shape[1] == 1 else nullcontext():
                out = forward(hidden_states=hidden[0][ids], attention_mask=None, **{cache: state})
            pieces += [out[at, : len(own)] for at, own in enumerate(rows)]
            if keep:
                states |= {own[-1]: state.of(at) for at, own in enumerate(rows)}
                passing |= {own[-1] for own in rows} - self.keep
        for row in passing:  # kept, they would hold the graph
            del states[row]
        return torch.cat(pieces)[self.inverse][None]


def _saved(state: State) -> AbstractContextManager[None]:
    """Inside, autograd saves copies of a recurrent state: Mamba2 writes one token into it."""
    places = {x.data_ptr() for x in state.recurrent_states.values()}

    def copied(x: Tensor) -> Tensor:
        return x.clone() if x.data_ptr() in places else x

    hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(copied, lambda x: x)
    return hooks


def stateful(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The layers of a model that keep a state, and what they call their cache."""
    found = []
    for module in model.modules():
        convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
        if convolves and isinstance(getattr(module, "layer_idx", None), int):
            names = inspect.signature(type(module).forward).parameters
            found += [(module, name) for name in CACHES if name in names][:1]
    return found


@torch.no_grad()
def unforkable(model: nn.Module, count: int, width: int) -> str | None:
    """Why the model's stateful layers, of which there must be so many, do not go on from a state; None if they do.

    One layer of each class runs in float32 on a few rows [T, width], in one part and in three; and in its own dtype.
    """

    def in_parts(layer: nn.Module, x: Tensor, name: str) -> Tensor:
        state, found = State({}, {}), []
        for part in x.split([6, 5, 1], 1):
            found.append(layer(hidden_states=part, attention_mask=None, **{name: state}))
            state = state.of(0)
        return torch.cat(found, 1)

    layers = stateful(model)
    if len(layers) != count:
        return f"{count} layers with a state, of which only {len(layers)} accept one"
    for module, name in {type(module): (module, name) for module, name in layers}.values():
        if any(type(x).__name__ == "DTensor" for x in module.parameters()):
            continue  # the comparison of logits must do
        like = next(module.parameters())
        x = torch.arange(12 * width, device=like.device).view(1, 12, width).sin()
        in_parts(module, x.to(like.dtype), name)  # which may raise
        layer = copy.deepcopy(module).float().eval()
        wanted = layer(hidden_states=x, attention_mask=None, **{name: State({}, {})})
        if not torch.allclose(in_parts(layer, x, name), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())):
            return f"layers of class {type(module).__name__}, whose state cannot be continued by several tokens"
    return None


@contextmanager
def forked(model: nn.Module, plan: Callable[[], Plan], states: Callable[[int], dict[int, State]]) -> Iterator[None]:
    """Inside, the model's stateful layers run by a plan of the packed rows, from and into the states of each layer."""
    layers = stateful(model)

    def packed(module: nn.Module, name: str) -> Callable[..., Tensor]:
        own = module.forward

        def forward(hidden_states: Tensor, **_: Any) -> Tensor:
            return plan().run(own, hidden_states, name, states(module.layer_idx))  # type: ignore[arg-type]

        return forward

    before = [vars(module).get("forward") for module, _ in layers]
    for module, name in layers:
        module.forward = packed(module, name)
    try:
        yield
    finally:
        for (module, _), own in zip(layers, before, strict=True):
            del module.forward
            if own is not None:
                module.forward = own
