"""The native decoder: one packed forward of the Llama family with fused operations, on a model's own weights.

Eight operations per layer (nine on a GPU): norm, q k v, split-norm-rotate, attention, o, norm, gated gate and up, down;
the residual additions are part of the norms, on a GPU of the products. A model is read once, and again when a forward
finds it changed, so changes to it take effect: other values, dtype or device, new parameters. A model that does not
compute exactly what the family's modules do (hooks, quantised layers) has no native decoder; LoRA has, if asked for.

Projections that are multiplied together are adjacent in memory: on first use the parameters' `data` are moved there,
and look the same to every other user of the model. Each has a storage of its own over its part, since savers keep one
parameter of each storage. No second copy stays. On a CPU with Linux the new memory has huge pages, which are read
faster, so all other weights of a decode step move as well. Anything that holds the old storage itself does not follow:
a CUDA graph captured before, a `state_dict` taken before, an optimiser's flat buffer, another thread in the middle of a
forward. Make scorers before any of these. Copies can be sent to other processes by CUDA's IPC, the weights cannot.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, repeat
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.dlpack import from_dlpack

from fb_core.models.experts import Experts
from fb_core.models.lora import WithLora
from fb_kernels import LayerWeights, qk_norm_rope, rms_norm, skinny_linear, swiglu
from fb_kernels.env import batch_invariant

EXPERTS = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}  # families, and their classes' prefix
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"} | EXPERTS
WINDOWED = ("mistral", "mixtral")  # by the config, others by the attention module
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
LINUX = sys.platform == "linux"
CACHE_LINE, HUGE_PAGE = 64, 2 << 20  # bytes
KEPT = 31 << 20  # bytes, so that a forward's tensors do not fault in anew
UNTRIMMED = 1 << 28  # bytes that are moved before their old memory goes back to the system
WHOLE = "fb_whole"  # attribute of a storage: what it is the first part of
READ = "fb_read"  # and this one: the decoders of the models whose first projection lies in it
SETTINGS = ["training", "variance_epsilon", "head_dim", "scaling", "sliding_window", "attention_dropout", "rope_type"]
SETTINGS += ["top_k", "norm_topk_prob", "jitter_noise", "config"]  # what is read of modules beside their parameters
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
PARTS = itemgetter("_modules", "_parameters", *HOOKS)  # of a module
IN_PLACE, FEW = ("cuda", "meta"), 32  # where a residual is added to and v read in place, of more rows than so few
CPU_ROWS = 512  # rows of a block per thread: a megabyte at hidden size 512
# Hooks that change nothing: those that stay once a model returned hidden states, and those of the plain loop.
INERT_HOOKS = ("transformers.utils.output_capturing", "fb_core.runtime.plain")

Attend = Callable[[int, Tensor, Tensor, Tensor, int | None, float], tuple[Tensor, Tensor]]
"""(layer, q[T, Hq, E], k[T, Hkv, E], v[T, Hkv, E], window, scale) -> (out[T, Hq, E], lse[Hq, T])."""


class Linear(NamedTuple):
    """A projection: weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[N, out] of x[N, in], differentiable to x."""
        learns = x.requires_grad and torch.is_grad_enabled()
        return (_Product.apply if learns else skinny_linear)(x, self.weight, self.bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return skinny_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad @ ctx.saved_tensors[0], None, None


class MLP(NamedTuple):
    """A gated MLP."""

    gate_up: Linear  # [2F, D]
    down: Linear  # [D, F]


class Norm(NamedTuple):
    """A root-mean-square norm: weight [n] and eps."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Layer:
    """One decoder layer; its norms have one eps."""

    input_norm: Norm
    qkv: Linear  # [(Hq + 2 Hkv) E, D]
    q_norm: Norm | None  # [E]
    k_norm: Norm | None
    o: Linear  # [D, Hq E]
    mlp_norm: Norm
    mlp: MLP | Experts
    heads: int
    kv_heads: int
    window: int | None
    scale: float

    @cached_property
    def weights(self) -> LayerWeights | None:
        """The weights as `decoder_layer` takes them; None for a mixture of experts."""
        if isinstance(self.mlp, Experts):
            return None
        heads = (self.q_norm and self.q_norm.weight, self.k_norm and self.k_norm.weight)
        attention = (self.input_norm.weight, *self.qkv, *heads, *self.o)
        return LayerWeights(*attention, self.mlp_norm.weight, *self.mlp.gate_up, *self.mlp.down)

    def before_attention(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_out: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q[T, Hq, E], k[T, Hkv, E], v[T, Hkv, E], residual[T, D]) of the layer's input, hidden + residual [T, D].

        Positions are rows of cos and sin; k and v also go to kv_out, as in `qk_norm_rope`.
        """
        normed, residual = rms_norm(hidden, *self.input_norm, residual)
        qkv, v = self.qkv(normed), None
        if kv_out is None and _in_place(qkv):  # v is not copied
            qkv, v = qkv.tensor_split([-self.kv_heads * cos.shape[1]], 1)
        q, k, copied = qk_norm_rope(
            qkv,
            self.q_norm and self.q_norm.weight,
            self.k_norm and self.k_norm.weight,
            cos,
            sin,
            positions,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            eps=self.input_norm.eps,
            kv_out=kv_out,
        )
        return q, k, copied if v is None else v.view(k.shape), residual

    def after_attention(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """(what the MLP adds, residual), both [T, D], whose sum the next norm takes; in place (their sum, None)."""
        hidden, rest = _add(self.o, attended.flatten(1), residual)
        normed, residual = rms_norm(hidden, *self.mlp_norm, rest)
        if isinstance(self.mlp, Experts):
            return self.mlp(normed), residual
        gate_up = self.mlp.gate_up
        learns = normed.requires_grad and torch.is_grad_enabled()
        fused = normed.is_cpu and isinstance(gate_up, Linear) and not learns
        active = skinny_linear(normed, *gate_up, swiglu=True) if fused else swiglu(gate_up(normed))
        return _add(self.mlp.down, active, residual)


def _add(linear: Linear, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
    """(linear(x), residual), or their sum and None: in batch-invariant mode, or written to the residual."""
    plain = isinstance(linear, Linear) and x.device.type in IN_PLACE and not torch.is_grad_enabled()
    if plain and batch_invariant():
        return skinny_linear(x, *linear, residual=residual), None
    if plain and len(x) > FEW and linear.bias is None:
        return residual.addmm_(x, linear.weight.T), None  # rounded once
    return linear(x), residual


def _in_place(x: Tensor) -> bool:
    return x.device.type in IN_PLACE and len(x) > FEW and not torch.is_grad_enabled()


@dataclass(frozen=True)
class NativeDecoder:
    """The decoder of one model as it is now; make it with `of`."""

    embedding: nn.Module
    rotary: nn.Module
    layers: Sequence[Layer]
    norm: Norm

    @classmethod
    def of(cls, model: Any, adapted: bool = False) -> NativeDecoder | None:
        """Read a Hugging Face causal LM and pack its weights if they are not packed yet.

        With `adapted` it may have peft's LoRA in its layers, and in grad mode `forward` has a gradient to it.

        Returns:
            the decoder, or None if the model is not an unchanged one of `FAMILIES`, or if a gradient is wanted that the
            decoder does not have: of other parameters, through experts, or with layers that are recomputed.
        """
        try:
            reader = _Reader(model, adapted)
            state, readings = reader.state(), reader.readings()
            seen, decoder = readings.get(model, (None, None))
            if seen == state:
                return decoder
            readings.pop(model, None)  # it may hold weights that have moved
            decoder = reader.decoder()
            if reader.apart:
                del decoder  # holds the old memory
                _pack(model, adapted)
                reader = _Reader(model, adapted)
                state, decoder = reader.state(), reader.decoder()
            reader.readings()[model] = state, decoder
            return decoder
        except _UnfamiliarError:
            return None

    @classmethod
    def fits(cls, model: Any) -> bool:
        """Whether `of` would read the model; nothing is packed."""
        try:
            _Reader(model).decoder()
        except _UnfamiliarError:
            return False
        return True

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The model's own rotary table in float32: (cos, sin), one row [E] for each of the positions [T]."""
        cos, sin = self.rotary(positions.new_empty(0, dtype=torch.float32), positions[None])
        return cos[0], sin[0]

    @property
    def frequencies(self) -> tuple[Tensor, float]:
        """What `rope` is computed from: the inverse frequencies [E / 2] and the scale of the tables."""
        return self.rotary.inv_freq, self.rotary.attention_scaling  # type: ignore[return-value]

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Hidden states [T, D] after the final norm of packed rows, or [N, D] with `rows`; differentiable to adapters.

        Args:
            ids: [T] int64.
            positions: [T] int64, a row's position in its own sequence.
            attend: what computes attention, and keeps k and v if they are wanted.
            rows: [N] int64, which rows are returned; None for all.
        """
        table = self.rope(positions)
        every = torch.arange(len(ids), device=ids.device)  # row i of the table is that of packed row i
        step: Callable[..., tuple[Any, ...]] = self.layers[0].before_attention
        hidden: Tensor = self.embedding(ids)
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            q, k, v, residual = _by_rows(step, hidden, residual, every, constants=table)
            hidden = attend(index, q, k, v, layer.window, layer.scale)[0]
            step = partial(self._between_attentions, index + 1)
        assert residual is not None
        if rows is not None:
            hidden, residual = hidden[rows], residual[rows]
        hidden, residual = _by_rows(self.layers[-1].after_attention, hidden, residual)
        return rms_norm(hidden, *self.norm, residual)[0]

    def _between_attentions(
        self, index: int, attended: Tensor, residual: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """From the attention output of layer index - 1 to (q, k, v, residual) of layer index."""
        hidden, rest = self.layers[index - 1].after_attention(attended, residual)
        return self.layers[index].before_attention(hidden, rest, positions, cos, sin)


def _by_rows(
    step: Callable[..., tuple[Any, ...]], first: Tensor, *others: Tensor | None, constants: Sequence[Tensor] = ()
) -> tuple[Any, ...]:
    """step(first, *others, *constants); on a CPU in blocks of rows, so that intermediate results stay in its cache."""
    size = CPU_ROWS * torch.get_num_threads()
    if not first.is_cpu or len(first) <= size:
        return step(first, *others, *constants)
    parts = zip(*(repeat(x) if x is None else x.split(size) for x in (first, *others)), strict=False)
    return tuple(map(torch.cat, zip(*(step(*each, *constants) for each in parts), strict=True)))


class _UnfamiliarError(Exception):
    """Something in the model differs from the family's own modules."""


def _expect(familiar: bool) -> None:
    if not familiar:
        raise _UnfamiliarError


class _Reader:
    """Reads the modules of a family; anything else in them is an `_UnfamiliarError`."""

    def __init__(self, model: Any, adapted: bool = False) -> None:
        self.adapted = adapted
        base, head = model.base_model, model.get_output_embeddings()
        _expect(head is None or unchanged(head, nn.Linear))
        self.family = str(base.config.model_type)
        _expect(self.family in FAMILIES)
        self.base = self._own(base, "Model")
        weight = _plain(base.embed_tokens, nn.Embedding).weight
        self.kind = (weight.dtype, weight.device)
        self.rows: set[int] = set()  # id() of the parameters that are packed, or are to be
        self.apart: list[Sequence[nn.Parameter]] = []  # parameters that are still to be packed together
        self.packed = False  # whether any are already
        self.alone = [] if head is None else [head.weight]  # weights of a decode step that are not packed with others

    def state(self) -> list[object]:
        """All that the decoder depends on but the weights' values: modules, settings, hooks, where parameters lie.

        What is inside a peft layer beside its base layer is read at every call, and only checked here.
        """
        modules, known, config = [self.base], {id(self.base)}, self.base.config
        parameters: list[Any] = []
        found: list[object] = [config.num_hidden_layers, getattr(config, "sliding_window", None)]
        for module in modules:  # the list grows
            own = module.__dict__
            inside, mine, *hooks = PARTS(own)
            if module.__class__ is LoraLinear:
                self._check_adapters(module)
                inside = {"base_layer": inside["base_layer"]}
            if inside:
                new = [x for x in inside.values() if x is not None and id(x) not in known]
                modules += new
                known.update(map(id, new))
            parameters += mine.values()
            found += module.__class__, "forward" in own or (any(hooks) and hooked(module))
            if module.__class__ is not nn.Linear:
                found += map(own.get, SETTINGS)
        if self.adapted and torch.is_grad_enabled():
            _expect(self.family not in EXPERTS and not any(x is not None and x.requires_grad for x in parameters))
            _expect(not any(x.training and getattr(x, "gradient_checkpointing", False) for x in self.base.layers))
        lie = [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in parameters if type(x) is nn.Parameter]
        return [*found, *map(id, modules), *map(id, parameters), *lie]

    def readings(self) -> MutableMapping[Any, tuple[Any, Any]]:
        """(state, decoder) of models, an attribute of the first projection's memory: gone once it lies elsewhere."""
        _expect(len(self.base.layers) > 0)
        attention = self._own(self._own(self.base.layers[0], "DecoderLayer").self_attn, "Attention")
        weight = self._base(attention.q_proj).weight
        self._check(weight)
        return vars(weight.untyped_storage()).setdefault(READ, WeakKeyDictionary())

    def decoder(self) -> NativeDecoder:
        base = self.base
        rotary = self._own(base.rotary_emb, "RotaryEmbedding")
        _expect(rotary.rope_type in FIXED_ROPE)
        layers = [self._layer(layer) for layer in base.layers[: base.config.num_hidden_layers]]
        _expect(len(layers) > 0)
        if self.kind[1].type == "cpu" and self.apart and not self.packed:
            own = [x for x in self.alone if type(x) is nn.Parameter and x.is_cpu and not x.is_inference()]
            self.apart += [[weight] for weight in own if not weight.is_shared()]  # else other processes use that memory
        return NativeDecoder(base.embed_tokens, rotary, layers, self._norm(base.norm))

    def _layer(self, layer: Any) -> Layer:
        self._own(layer, "DecoderLayer")
        attention = self._own(layer.self_attn, "Attention")
        width = attention.head_dim
        _expect(2 * len(self.base.rotary_emb.inv_freq) == width)
        _expect(not (attention.training and attention.attention_dropout))
        q_norm, k_norm = None, None
        if self.family.startswith("qwen3"):
            q_norm, k_norm = self._norm(attention.q_norm), self._norm(attention.k_norm)
        input_norm, mlp_norm = self._norm(layer.input_layernorm), self._norm(layer.post_attention_layernorm)
        _expect(len({norm.eps for norm in (input_norm, mlp_norm, q_norm, k_norm) if norm}) == 1)
        return Layer(
            input_norm=input_norm,
            qkv=self._linear(attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=q_norm,
            k_norm=k_norm,
            o=self._linear(attention.o_proj),
            mlp_norm=mlp_norm,
            mlp=self._mlp(layer.mlp),
            heads=len(attention.q_proj.weight) // width,
            kv_heads=len(attention.k_proj.weight) // width,
            window=getattr(attention.config if self.family in WINDOWED else attention, "sliding_window", None),
            scale=attention.scaling,
        )

    def _mlp(self, module: Any) -> MLP | Experts:
        if not hasattr(module, "experts"):
            mlp = self._own(module, "MLP")
            self._silu(mlp.act_fn)
            return MLP(self._linear(mlp.gate_proj, mlp.up_proj), self._linear(mlp.down_proj))
        self._own(module, "SparseMoeBlock")
        _expect(not (module.training and getattr(module, "jitter_noise", 0)))
        dtype, device = self.kind  # torch has grouped products on a GPU for these alone
        _expect(device.type != "cuda" or (dtype.itemsize < 8 and torch.cuda.get_device_capability(device) >= (8, 0)))
        router, experts = self._own(module.gate, "TopKRouter"), self._own(module.experts, "Experts")
        self._silu(experts.act_fn)
        for weight in (router.weight, experts.gate_up_proj, experts.down_proj):
            self._check(weight)
        weights = router.weight.detach(), experts.gate_up_proj.detach(), experts.down_proj.detach()
        return Experts(*weights, router.top_k, getattr(router, "norm_topk_prob", True))

    def _silu(self, activation: Any) -> None:
        _expect(type(activation).__name__ in ("SiLU", "SiLUActivation") and not hooked(activation))

    def _own(self, module: Any, kind: str) -> Any:
        """The module, if it is of the family's own class."""
        name = f"transformers.models.{self.family}.modeling_{self.family}.{FAMILIES[self.family]}{kind}"
        _expect(f"{type(module).__module__}.{type(module).__qualname__}" == name and not hooked(module))
        return module

    def _norm(self, module: Any) -> Norm:
        weight = self._own(module, "RMSNorm").weight
        self._check(weight)
        return Norm(weight.detach(), module.variance_epsilon)

    def _linear(self, *modules: Any) -> Linear:
        """Several projections of one input as a single one."""
        plain = [self._base(module) for module in modules]
        weight = self._rows([module.weight for module in plain])
        biases = [module.bias for module in plain]
        starts = accumulate((len(module.weight) for module in plain), initial=0)
        adapted = [pair for pair in zip(modules, starts, strict=False) if type(pair[0]) is LoraLinear]
        linear = Linear(weight, None if all(bias is None for bias in biases) else self._rows(biases))
        return WithLora(linear, adapted) if adapted else linear  # type: ignore[arg-type, return-value]

    def _base(self, module: Any) -> Any:
        """The linear layer, also inside a peft layer."""
        adapted = self.adapted and unchanged(module, LoraLinear)
        return _plain(module.base_layer if adapted else module, nn.Linear)

    def _check_adapters(self, layer: Any) -> None:
        """Refuse a peft layer that computes anything but the terms of `Term.of` beside its base layer."""
        _expect(self.adapted and not (layer.disable_adapters and layer.merged))  # which would unmerge
        dtype, device = self.kind
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        for name in () if layer.disable_adapters or layer.merged else names:
            down, up = (_plain(factors[name], nn.Linear) for factors in (layer.lora_A, layer.lora_B))
            drop, scale = layer.lora_dropout[name], layer.scaling[name]
            _expect((unchanged(drop, nn.Identity) or unchanged(drop, nn.Dropout)) and isinstance(scale, int | float))
            _expect(name not in layer.lora_variant and down.bias is up.bias is None)
            _expect(down.weight.dtype == up.weight.dtype)
            widens = layer.cast_input_dtype_enabled and dtype.itemsize == 2 and len(names) == 1
            for weight in (down.weight, up.weight):
                _expect(type(weight) is nn.Parameter and type(weight.data) is Tensor and weight.device == device)
                _expect(weight.dtype == dtype or (widens and weight.dtype == torch.float32))

    def _rows(self, parts: list[nn.Parameter]) -> Tensor:
        for part in parts:
            self._check(part)
        if len(parts) == 1:
            self.alone += parts
            return parts[0].detach()
        names = set(map(id, parts))
        _expect(len(names) == len(parts) and self.rows.isdisjoint(names))  # a shared parameter cannot be in two places
        self.rows |= names
        whole = _whole(parts)
        if whole is not None:
            self.packed = True
            return whole
        _expect(not any(part.is_cpu and part.is_shared() for part in parts))  # other processes use that memory
        self.apart.append(parts)
        return parts[0].detach()

    def _check(self, parameter: Any) -> None:
        """Refuse what is not a plain parameter of the same dtype and device as all others."""
        _expect(type(parameter) is nn.Parameter and type(parameter.data) is Tensor)
        _expect((parameter.dtype, parameter.device) == self.kind and not parameter.is_inference())


def _plain(module: nn.Module, kind: type[nn.Module]) -> Any:
    _expect(unchanged(module, kind))
    return module


def unchanged(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of exactly this class and a call of it does what the class says."""
    return type(module) is kind and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Whether a call of the module does more, or something else, than its class says."""
    hooks = [hook for kind in HOOKS for hook in vars(module)[kind].values()]
    return "forward" in module.__dict__ or any(getattr(hook, "__module__", None) not in INERT_HOOKS for hook in hooks)


_PACKING = threading.Lock()


def _pack(model: Any, adapted: bool) -> None:
    """Move each group of parts [n_i, ...] that a familiar model has apart into one whole [sum n_i, ...]."""
    with _PACKING, torch.inference_mode(False), torch.no_grad():
        reader = _Reader(model, adapted)  # again, since another thread may have packed them
        reader.decoder()
        moved = 0
        for parts, whole in zip(reader.apart, _storages(reader.apart), strict=True):
            torch.cat([part.detach() for part in parts], out=whole)
            if whole.is_cuda:
                torch.cuda.current_stream(whole.device).synchronize()  # other streams may read it from now on
            for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
                part.data = from_dlpack(rows)  # a storage of its own, which keeps the whole
            vars(parts[0].untyped_storage())[WHOLE] = whole
            moved += whole.nbytes
            if moved > UNTRIMMED:
                trim()
                moved = 0
    trim()


def trim() -> None:
    """Give freed memory back to the system: glibc keeps that of parts below 32 MB."""
    if LINUX and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
        torch.empty(KEPT, dtype=torch.uint8)  # freed at once: then it keeps twice that


def _storages(groups: Sequence[Sequence[nn.Parameter]]) -> Iterator[Tensor]:
    """A storage [sum n_i, ...] for each group; those of one model on a CPU share huge pages, where Linux has them."""
    sizes = [-(-sum(part.nbytes for part in parts) // CACHE_LINE) * CACHE_LINE for parts in groups]
    pages, offset = None, 0
    if LINUX and groups and groups[0][0].is_cpu:
        size = -(-sum(sizes) // HUGE_PAGE) * HUGE_PAGE
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # of a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    for parts, size in zip(groups, sizes, strict=True):
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        if pages is None:
            yield parts[0].new_empty(shape)
        else:
            count = sum(part.numel() for part in parts)
            yield torch.frombuffer(pages, dtype=parts[0].dtype, count=count, offset=offset).view(shape)
        offset += size


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """What the parts were packed into, if they all still lie there, in order."""
    whole: Tensor | None = vars(parts[0].untyped_storage()).get(WHOLE)
    if whole is None or (whole.dtype, len(whole)) != (parts[0].dtype, sum(map(len, parts))):
        return None
    starts = accumulate((part.nbytes for part in parts), initial=whole.data_ptr())
    there = (part.data_ptr() == start and part.is_contiguous() for part, start in zip(parts, starts, strict=False))
    return whole if all(there) and all(part.shape[1:] == whole.shape[1:] for part in parts) else None
