"""Packed forwards: many sequences and their branches in one, each layer run once.

A packed forward runs in the native decoder if the model has one, else through the model's own modules: their attention
is switched to `fb_branch` for one call and always restored.
"""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, starmap
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, PreTrainedModel
from transformers import Cache as HFCache

from fb_core.models.facts import (
    SUPPORTED_LAYERS,
    Watch,
    agree,
    check_in_memory,
    checking,
    empty_cache,
    logits,
    max_positions,
    misfit,
    quietly,
    state_layers,
    text_config,
    twice,
    unfit,
    vocabulary,
)
from fb_core.models.forks import Plan, State, forked
from fb_core.models.native import NativeDecoder
from fb_kernels import BranchLayout, branch_attention

Result = TypeVar("Result")
ROWS = 16_384  # of a packed forward of whole sequences
RATE = re.compile("^p$|drop|jitter|noise")  # names of what draws in training mode
ATTENTION = "fb_branch"  # transformers would treat a name with "flash" in it as its own


@dataclass(frozen=True)
class PrefixKV:
    """Keys and values of frozen prefixes, by layer: flat [Tp, Hkv, E], or paged [rows, S, Hkv, E]."""

    layers: Mapping[int, tuple[Tensor, Tensor]]
    states: Mapping[int, dict[int, State]] = field(default_factory=dict)  # of stateful layers, by last row or -1 - page

    @classmethod
    @torch.no_grad()
    def from_cache(cls, cache: HFCache, model: nn.Module) -> PrefixKV:
        """From the Hugging Face cache [B, Hkv, S, E] of a model: each of its rows is one page of S slots.

        Keys and values are views; those of latents are computed by the model's own layers, once it was checked.
        """
        kept = {i: (layer.keys, layer.values) for i, layer in enumerate(cache.layers) if hasattr(layer, "keys")}
        pairs = kept
        if model in _KEPT:
            pairs = {i: at.expand(*kept[at.layer]) if at.expand else kept[at.layer] for i, at in _KEPT[model].items()}
        states = {i: State.cached(layer) for i, layer in enumerate(cache.layers) if hasattr(layer, "conv_states")}
        return cls(
            {i: (k.transpose(1, 2), _widened(v, k).transpose(1, 2)) for i, (k, v) in pairs.items()},
            {i: {-1 - row: own.of(row) for row in range(own.rows)} for i, own in states.items()},
        )


@dataclass(frozen=True)
class Prefix:
    """One sequence's slice of a `PrefixKV`: slots start to start + length, of these pages where it is paged."""

    kv: PrefixKV
    start: int
    length: int
    pages: tuple[int, ...] = (0,)


@dataclass
class Layout:
    """The branches and prefixes of a packed forward's rows, and what its attention records."""

    branches: BranchLayout
    groups: Sequence[tuple[Sequence[int], int, int]]  # as `build` takes them
    pages: Sequence[Sequence[int]] | None = None
    prefix: PrefixKV | None = None  # None: the packed rows themselves are the prefix
    paths: Tensor | None = None  # [Tp] int64: or these of them, one group's after another's
    captured: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # layer -> its packed k, v
    capture: bool = False
    keep: Sequence[int] = ()  # rows after which stateful layers keep their state
    calls: list[tuple[nn.Module, int | None]] = field(default_factory=list)  # attention modules, with their windows
    states: dict[int, dict[int, State]] = field(default_factory=dict)  # of each stateful layer that ran, by last row

    @classmethod
    def build(
        cls,
        groups: Sequence[tuple[Sequence[int], int, int]],
        device: torch.device,
        *,
        pages: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> Layout:
        """From (branch lengths, prefix start, prefix length) of every group, in row order, and its pages if paged."""
        branches = BranchLayout.of(
            [lengths for lengths, _, _ in groups],
            [(start, length) for _, start, length in groups],
            block_table=None if pages is None else [list(each) for each in pages],
            device=device,
        )
        return cls(branches, groups, pages, **options)

    @cached_property
    def plan(self) -> Plan:
        """How stateful layers run these rows."""
        lasts = [start + length - 1 if length else None for _, start, length in self.groups]
        if self.pages is not None:
            lasts = [-1 - own[0] for own in self.pages]
        elif self.paths is not None:
            rows = self.paths.tolist()
            lasts = [None if last is None else rows[last] for last in lasts]
        groups = [(lengths, last) for (lengths, _, _), last in zip(self.groups, lasts, strict=True)]
        return Plan(groups, self.prefix is not None, self.keep, self.branches.cu_branch.device)

    def states_of(self, layer: int) -> dict[int, State]:
        """Those that a layer goes on from, and then those after its sequences."""
        before = {} if self.prefix is None else self.prefix.states[layer]
        return self.states.setdefault(layer, dict(before))

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        scale: float | None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of one layer, (out[T, Hq, E], lse[Hq, T]); its k and v are kept where `capture` is set."""
        if self.capture:
            self.captured[layer] = (k.detach(), v.detach().contiguous())
        prefix_k, prefix_v = (k, v) if self.prefix is None else self.prefix.layers[layer]
        if self.paths is not None:
            flat = (embedding(self.paths, x.flatten(1)) for x in (prefix_k, prefix_v))  # its gradient has a fixed order
            prefix_k, prefix_v = (x.view(-1, *k.shape[1:]) for x in flat)
        return branch_attention(
            q, k, v, prefix_k, prefix_v, self.branches, window=window, scale=scale, softcap=softcap, return_lse=True
        )


def _fb_branch(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, E]
    key: Tensor,  # [1, Hkv, T, E]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer of a packed forward, called by the model's own attention module."""
    if dropout:
        raise ValueError(
            f"{type(module).__name__}: expected no attention dropout, got {dropout}; call model.eval() first"
        )
    problem = None
    layout = _LAYOUT.get()  # not all layers pass arguments on
    if layout is None:
        problem = "attention outside a packed forward"
    elif value.shape[-1] > query.shape[-1]:
        problem = f"head sizes {query.shape[-1]} and {value.shape[-1]}"
    elif attention_mask is not None:  # transformers makes none here: the model adds one of its own
        problem = "a mask of the model's own"
    if layout is None or problem is not None:
        raise ValueError(
            f"{type(module).__name__}: expected plain attention with one head size, got {problem}; "
            "use a model of a supported family"
        )
    width = value.shape[-1]  # of latent attention less than the keys'
    parts = query, key, _widened(value, query)
    q, k, v = (states[0].transpose(0, 1).to(query.dtype) for states in parts)  # [T, heads, E]
    layer: int = module.layer_idx  # type: ignore[assignment]
    layout.calls.append((module, sliding_window))
    out, lse = layout.attend(layer, q, k, v, sliding_window, scaling, softcap)
    out = out[..., :width]
    if s_aux is not None:  # attention sinks take part in the softmax only
        out = out * torch.sigmoid(lse.T - s_aux).to(out.dtype)[..., None]
    return out[None], None


AttentionInterface.register(ATTENTION, _fb_branch)


def _widened(value: Tensor, key: Tensor) -> Tensor:
    """Values with zeros up to the keys' width: those of latent attention are narrower."""
    more = key.shape[-1] - value.shape[-1]
    return pad(value, (0, more)) if more else value  # pad would copy


_LAYOUT: ContextVar[Layout | None] = ContextVar("layout", default=None)  # of the packed forward under way
_GATHERED: ContextVar[bool] = ContextVar("gathered", default=False)  # FSDP2's weights must not move
_ONE_AT_A_TIME = threading.RLock()  # else threads on one model would restore each other's implementation


@contextmanager
def _attention(model: PreTrainedModel, name: str, layout: Layout | None = None) -> Iterator[None]:
    """Switch a model's attention implementation inside the context; the old one is always restored."""
    with _ONE_AT_A_TIME:
        configs = [each.config for each in model.modules() if isinstance(each, PreTrainedModel)]
        for config in configs:  # parts of a multimodal model's, and theirs, may differ
            configs += filter(None, (getattr(config, key, None) for key in config.sub_configs))
        before, token = [(config, config._attn_implementation) for config in configs], _LAYOUT.set(layout)
        try:
            model.set_attn_implementation(name)
            if layout is None or not state_layers(model):
                yield
            else:
                with forked(model, lambda: layout.plan, layout.states_of):
                    yield
        finally:
            _LAYOUT.reset(token)
            for config, implementation in before:
                config._attn_implementation_internal = implementation  # the setter would change its parts too


@contextmanager
def _recomputed(model: PreTrainedModel, layout: Layout) -> Iterator[None]:
    """Layers under gradient checkpointing run with the packed attention in the backward pass too."""
    layers = [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False)]
    before = [layer._gradient_checkpointing_func for layer in layers]

    def attend(function: Callable, *inputs: Any) -> Any:
        if _LAYOUT.get() is layout:  # the forward itself, not the backward
            return function(*inputs)
        with _attention(model, ATTENTION, layout):
            return function(*inputs)

    def through(checkpoint: Callable) -> Callable:
        return lambda function, *inputs: checkpoint(partial(attend, function), *inputs)

    try:
        for layer, checkpoint in zip(layers, before, strict=True):
            layer._gradient_checkpointing_func = through(checkpoint)
        yield
    finally:
        for layer, checkpoint in zip(layers, before, strict=True):
            layer._gradient_checkpointing_func = checkpoint


def packed_forward(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, layout: Layout, rows: Tensor | None = None
) -> Tensor:
    """Hidden states (after the final norm) of packed rows, every decoder layer run once.

    Without autocast, a model of the Llama family runs in its native decoder, which packs its weights on first use
    (`fb_core.models.native`), also with LoRA and its gradients; everything else goes through the model's own modules.

    Args:
        model: a causal LM that `check_supported` accepts.
        ids: [T] int64.
        positions: [T] int64, a row's position in its own sequence.
        layout: the rows' groups and their prefixes.
        rows: [N] int64, which rows are returned; None for all.

    Returns:
        [T, D], or [N, D] with rows.

    Raises:
        ValueError: active dropout or noise, or the model did not route every layer, with its window, through the
            attention interface.
    """
    if model.training:
        _check_steady(model)
    if not torch.is_autocast_enabled(ids.device.type) and not _GATHERED.get():
        native = NativeDecoder.of(model, adapted=True)
        if native is not None:
            return native.forward(ids, positions, layout.attend, rows)
    hidden = forward_through_modules(model, ids, positions, layout)
    return hidden if rows is None else hidden[rows]


_STEADY: WeakKeyDictionary[nn.Module, list[float]] = WeakKeyDictionary()  # flags and rates with which nothing is drawn


def _check_steady(model: PreTrainedModel) -> None:
    """Refuse, by name, what draws at random in training mode; asked again when a flag or a rate has changed."""
    owners = [*model.named_modules(), ("config", text_config(model))]
    now = [x for _, owner in owners for key, x in vars(owner).items() if key == "training" or isinstance(x, float)]
    if _STEADY.get(model) == now:
        return
    with torch.no_grad(), quietly(model), Watch() as seen, suppress(ValueError):  # as for a layer left out
        forward_through_modules(model, *_probe(model))
    dropping = any(isinstance(each, nn.Dropout) and each.training and each.p > 0 for _, each in owners)
    entries = ((name, *entry) for name, owner in owners for entry in vars(owner).items())
    rates = [f"{x} in {name}.{key}" for name, key, x in entries if RATE.search(key) and isinstance(x, float) and x > 0]
    if dropping or seen.drawn > 1 or (seen.drawn and rates):  # a layer that may be dropped draws one number
        got = rates[0] if rates else "random numbers in training mode"
        raise ValueError(
            f"{type(model).__name__}: expected no dropout or noise, got {got}; call .eval() or set it to 0"
        )
    _STEADY[model] = now


def _probe(model: PreTrainedModel) -> tuple[Tensor, Tensor, Layout]:
    """(ids, positions, layout) of a prefix and two branches, of n tokens each."""
    n, device = min(10, (max_positions(model) or 20) // 2), model.device
    ids = torch.arange(1, 3 * n + 1, device=device) * 7919 % vocabulary(model)  # a prime
    positions = torch.tensor([*range(2 * n), *range(n, 2 * n)], device=device)
    return ids, positions, Layout.build([([n], 0, 0), ([n, n], 0, n)], device, capture=True)


def forward_through_modules(model: PreTrainedModel, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """`packed_forward` by the model's own modules, with their gradients: [T, D]."""
    layout.calls.clear()
    layout.states.clear()
    with _attention(model, ATTENTION, layout), _recomputed(model, layout) if model.training else nullcontext():
        found = model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    hidden = found.last_hidden_state[0]
    if model.dtype.itemsize < hidden.dtype.itemsize:  # a residual kept in float32, for a head that is not
        hidden = hidden.to(model.dtype)
    slides = _sliding_layers(model)
    if (ran := len(layout.states)) != (count := state_layers(model)):
        raise ValueError(
            f"{type(model).__name__}: expected {count} layers with a state to run, got {ran}; use a model of a "
            "supported family"
        )
    if len(layout.calls) != len(slides):
        raise ValueError(
            f"{type(model).__name__}: expected {len(slides)} attention layers to go through "
            f"the attention interface, got {len(layout.calls)}; use a model of a supported family"
        )
    for layer, (sliding, (_, window)) in enumerate(zip(slides, layout.calls, strict=True)):
        if sliding and window is None:
            raise ValueError(
                f"{type(model).__name__}: expected the sliding window of layer {layer} to go through the attention "
                "interface, got none (the model puts it into its mask alone); use a model of a supported family"
            )
    return hidden


@torch.no_grad()
def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that attend in the decoder, in the order in which they are called."""
    ids, positions, layout = _probe(model)
    forward_through_modules(model, ids, positions, layout)
    return [module for module, _ in layout.calls]


def _sliding_layers(model: PreTrainedModel) -> list[bool]:
    """Which layers attend to a window, by the configuration."""
    config = text_config(model)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return [kind == "sliding_attention" for kind in kinds if kind in (*SUPPORTED_LAYERS, "hybrid")]
    makes_windows = hasattr(sys.modules[type(model).__module__], "create_sliding_window_causal_mask")
    return [makes_windows and getattr(config, "sliding_window", None) is not None] * config.num_hidden_layers


def prefill_packed(
    model: PreTrainedModel, sequences: Sequence[Tensor], positions: Sequence[Sequence[int]] | None = None
) -> list[Prefix]:
    """The sequences' keys and values from one packed forward without gradients, as slices of one flat buffer.

    Of each, states of stateful layers are there after so many tokens as `positions` say, for None after all.
    """
    lengths = [len(tokens) for tokens in sequences]
    starts = [*accumulate(lengths, initial=0)][:-1]
    ends = [[length] for length in lengths] if positions is None else positions
    keep = [start + end - 1 for start, own in zip(starts, ends, strict=True) for end in own if end]
    _, layout = _whole(model, sequences, [[]] * len(sequences), capture=True, keep=keep)
    kv = PrefixKV(layout.captured, layout.states)
    return [Prefix(kv, start, length) for start, length in zip(starts, lengths, strict=False)]


def hidden_states(
    model: PreTrainedModel, sequences: Sequence[Tensor], rows: Sequence[Sequence[int]], budget: int = ROWS
) -> Iterator[list[Tensor]]:
    """Some hidden states (after the final norm) of whole sequences, without gradients, one packed forward at a time.

    Args:
        model: a causal LM that `check_supported` accepts.
        sequences: [T] int64 each.
        rows: which states of each sequence are wanted; state i is that after token i.
        budget: most tokens of a forward; a longer sequence has one of its own.

    Yields:
        [n, D] for each of the next sequences.
    """
    for pack in starmap(slice, packs([len(tokens) for tokens in sequences], budget)):
        hidden, _ = _whole(model, sequences[pack], rows[pack])
        yield list(hidden.split([len(wanted) for wanted in rows[pack]]))


@torch.no_grad()
def _whole(
    model: PreTrainedModel, sequences: Sequence[Tensor], rows: Sequence[Sequence[int]], **options: Any
) -> tuple[Tensor, Layout]:
    """(hidden states [n, D] of the wanted rows of all sequences, layout) of one packed forward of them."""
    device, lengths = model.device, [len(tokens) for tokens in sequences]
    layout = Layout.build([([length], 0, 0) for length in lengths], device, **options)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    starts = accumulate(lengths, initial=0)
    wanted = [start + row for start, own in zip(starts, rows, strict=False) for row in own]
    at = torch.tensor(wanted, dtype=torch.int64, device=device)
    return packed_forward(model, torch.cat(list(sequences)), positions, layout, at), layout


class Kept(NamedTuple):
    """Where a model's caches have what a layer attends to."""

    layer: int  # of the cache: that of another layer where keys and values are shared
    shapes: list[list[int]]  # [Hkv, E] of keys and values
    expand: Callable[..., tuple[Tensor, Tensor]] | None  # keys and values of cached latents

    @classmethod
    def of(cls, layout: Layout) -> dict[int, Kept]:
        """Of every layer that attends, from a forward that captured them."""
        modules: dict[Any, nn.Module] = {module.layer_idx: module for module, _ in layout.calls}  # none if native
        first: dict[int, int] = {}  # place of keys -> layer of the cache
        return {
            layer: cls(
                first.setdefault(k.data_ptr(), layer),
                [list(k.shape[1:]), list(v.shape[1:])],
                getattr(modules.get(layer), "expand_kv", None),
            )
            for layer, (k, v) in sorted(layout.captured.items())
        }


_KEPT: WeakKeyDictionary[nn.Module, dict[int, Kept]] = WeakKeyDictionary()


def cached_prefix(cache: object, model: PreTrainedModel, length: int) -> Prefix:
    """The one sequence of `length` tokens that a user's cache holds.

    Raises:
        TypeError: not a Hugging Face cache.
        ValueError: more than one sequence, another number of tokens (a sliding layer may have dropped some), or keys
            that are not of this model.
    """
    if not isinstance(cache, HFCache):
        raise TypeError(
            f"cache: expected a transformers cache, got {type(cache).__name__}; pass the DynamicCache of a forward"
        )
    wanted = _KEPT[model]
    attending = sorted({each.layer for each in wanted.values()})
    if len(cache.layers) != (count := len(empty_cache(model).layers) or len(attending)):
        raise ValueError(
            f"cache of {type(model).__name__}: expected keys and values of {count} layers, got those of "
            f"{len(cache.layers)}; fill one with this model"
        )
    if not attending:
        raise ValueError(
            f"cache of {type(model).__name__}: expected layers that attend, got states alone, which do not say after "
            "how many tokens they are; give no cache"
        )
    for index in attending:
        layer: Any = cache.layers[index]
        keys, filled = layer.keys, int(layer.get_seq_length())
        slots = 0 if keys is None else keys.shape[-2]
        if slots != length or filled != length:
            held = f"{filled} in {slots} slots" if slots != filled else str(filled)
            made = "made with model.config" if state_layers(model) else "made without config"
            raise ValueError(
                f"cache: expected {length} tokens in every layer, got {held} in layer {index}; "
                f"fill a DynamicCache() {made} with exactly this prefix"
            )
        if len(keys) != 1:
            raise ValueError(f"cache: expected one sequence, got {len(keys)}; select one with batch_select_indices")
        if keys.dtype != model.dtype or keys.device != model.device:
            raise ValueError(
                f"cache: expected {model.dtype} on {model.device}, got {keys.dtype} on {keys.device} in layer {index}; "
                "fill it with this model"
            )
    try:
        kv = PrefixKV.from_cache(cache, model)
    except RuntimeError as problem:
        raise ValueError(
            f"cache of {type(model).__name__}: expected its latents, got others ({problem!s:.80}); fill it with "
            "this model"
        ) from problem
    for index, at in wanted.items():
        if (shapes := [list(x.shape[2:]) for x in kv.layers[index]]) != at.shapes:
            raise ValueError(
                f"cache of {type(model).__name__}: expected keys and values of [heads, width] {at.shapes} in layer "
                f"{index}, got {shapes}; give no cache if it keeps something else there"
            )
    return Prefix(kv, 0, length)


def check_supported(model: object) -> None:
    """Refuse, by name, a model that a packed forward would compute wrongly.

    Raises:
        TypeError: not a transformers model.
        ValueError: offloaded weights, a head that FSDP2 has sharded, a `misfit`, or attention that does not go through
            the attention interface.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: expected a transformers causal LM, got {type(model).__name__}; load one with AutoModelForCausalLM"
        )
    check_in_memory("model", model)
    if type(getattr(model.get_output_embeddings(), "weight", None)).__name__ == "DTensor":
        raise ValueError(
            f"model: expected a whole LM head, got a sharded one of a {type(model).__name__}; call fully_shard on its "
            "layers and on all of it, never on the head alone, and ask shared_prefix_logprobs"
        )
    if (reason := unpackable(model)) is not None:
        raise unfit("model", model, reason)


def unpackable(model: PreTrainedModel) -> str | None:
    """Why a model has no packed forward; None if it has one, as far as its configuration and classes say."""
    if (reason := misfit(model)) is not None:
        return reason
    if not (model._can_set_attn_implementation() and getattr(text_config(model), "is_causal", True)):
        return "attention outside transformers' AttentionInterface"
    return "its layers outside base_model" if model.base_model is model else None


@torch.no_grad()
def check_packed_forward(model: PreTrainedModel, whole: nn.Module | None = None) -> None:
    """Compare a packed forward of a few tokens with plain ones, so that no model is silently scored wrong.

    Forwards run through `whole`, a PEFT model or a wrapper of the model, if it is given.

    Raises:
        ValueError: NaN logits, log-probabilities that differ, or active dropout or noise.
    """
    if getattr(text_config(model), "attn_logit_softcapping", None) and model.config._attn_implementation == "sdpa":
        warnings.warn(
            f"{type(model).__name__} caps its attention logits and 'sdpa' leaves that out: load it with "
            "attn_implementation='eager' so that decoding and scoring see the same model",
            stacklevel=3,
        )
    whole = model if whole is None else whole
    ids, positions, layout = _probe(model)
    prefix, *branches = ids.view(3, -1)
    rows, shape = torch.stack([torch.cat([prefix, each]) for each in branches]), (3, len(prefix), -1)

    def plain() -> Tensor:
        found = whole(input_ids=rows, use_cache=False).logits.float()
        return torch.cat([found[0], found[1, len(prefix) :]]).log_softmax(-1).view(shape)

    with quietly(model):
        with checking("model", model), _attention(model, "eager"):
            theirs, other = twice(plain)
        ours = through(whole, lambda: logits(model, packed_forward(model, ids, positions, layout)))
    if bool(theirs.isnan().any()):
        raise ValueError(f"model: expected finite logits, got NaN from {type(model).__name__}; check its weights")
    _KEPT[model] = Kept.of(layout)
    ours = ours.log_softmax(-1).view(shape)
    if not agree(ours, theirs, other):
        kind = getattr(getattr(whole, "peft_type", None), "value", "")
        name = f"{kind} {type(whole).__name__}".strip()
        raise ValueError(
            f"model: expected packed and plain forwards to agree, got {name}, whose log-probabilities differ by up to "
            f"{float((ours - theirs).abs().max()):.3g} nats; use a model of a supported family"
        )


def through(model: Any, ask: Callable[[], Result]) -> Result:
    """`ask()` as the forward of the model: FSDP2 gathers weights for it, a `parallel` wrapper sees its gradients.

    Code that torch.compile has made of the model's own forward is not used.
    """
    while hasattr(model, "_orig_mod"):
        model = model._orig_mod
    module: Any = model
    if parallel(model) and torch.is_grad_enabled():
        module = model.module
    elif not sharded(model):
        return ask()
    before, token = vars(module).get("forward"), _GATHERED.set(sharded(module))
    module.forward = lambda: tree_map_only(Tensor, torch.clone, ask())  # hooks on views would be lost in place
    try:
        return model()
    finally:
        _GATHERED.reset(token)
        del module.forward
        if before is not None:
            module.forward = before


def sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards the parameters of the module itself."""
    return any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__)


def parallel(model: nn.Module) -> bool:
    """Whether it is a wrapper that adds up gradients over processes: DistributedDataParallel or a DeepSpeed engine."""
    return isinstance(model, DistributedDataParallel) or type(model).__name__ == "DeepSpeedEngine"


def unwrapped(model: Any) -> Any:
    """The model in the wrappers of torch.compile, DistributedDataParallel and DeepSpeed."""
    while hasattr(model, "_orig_mod") or parallel(model):
        model = getattr(model, "_orig_mod", None) or model.module
    return model


def packs(rows: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """(start, stop) of consecutive packs whose rows stay within the budget; a larger item is a pack by itself."""
    cuts, start, used = [], 0, 0
    for index, count in enumerate(rows):
        if index > start and used + count > budget:
            cuts.append((start, index))
            start, used = index, 0
        used += count
    return [*cuts, (start, len(rows))] if rows else []
