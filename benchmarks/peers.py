"""Peers: what a user would write with transformers, peft, torch and the fastest kernels that are installed."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from transformers import DynamicCache, PreTrainedModel

from benchmarks.shapes import Branches
from fb_core import TokenReranker
from fb_core.runtime.plain import with_cache
from fb_kernels import merge_attention_states


@torch.no_grad()
def full_forwards(
    model: PreTrainedModel, prefix: Tensor, candidates: Tensor, future: Tensor, *, keep_all: bool = False
) -> Tensor:
    """[K, H]: one forward of prefix + branch per candidate, with the logits of the H needed positions or of all."""
    h, rows = len(future), []
    for candidate in candidates:
        ids = torch.cat([prefix, candidate[None], future[:-1]])[None]
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=0 if keep_all else h).logits
        rows.append(_gather(logits[:, -h:], future)[0])
    return torch.stack(rows)


@torch.no_grad()
def padded_batch(model: PreTrainedModel, prefix: Tensor, candidates: Tensor, future: Tensor) -> Tensor:
    """[K, H]: all K sequences as one batch (they are equally long, so there is nothing to mask)."""
    ids = torch.cat([prefix.expand(len(candidates), -1), _branches(candidates, future)], 1)
    return _gather(model(input_ids=ids, use_cache=False, logits_to_keep=len(future)).logits, future)


@torch.no_grad()
def repeated_cache(
    model: PreTrainedModel, prefix: Tensor, candidates: Tensor, future: Tensor, cache: DynamicCache | None = None
) -> Tensor:
    """[K, H]: the prefix once, its cache repeated K times, then all branches as one batch."""
    cache = prefill(model, prefix) if cache is None else _copied(cache)
    cache.batch_repeat_interleave(len(candidates))  # in place
    return _gather(model(input_ids=_branches(candidates, future), **with_cache(model, cache)).logits, future)


@torch.no_grad()
def repeated_caches(model: PreTrainedModel, prefixes: Tensor, candidates: Tensor, futures: Tensor) -> Tensor:
    """[G, K, H]: `repeated_cache` of G groups at once, whose prefixes [G, P] are equally long."""
    cache, k = DynamicCache(), candidates.shape[1]
    model.base_model(input_ids=prefixes, **with_cache(model.base_model, cache))
    cache.batch_repeat_interleave(k)
    ids = torch.cat([_branches(*group) for group in zip(candidates, futures, strict=True)])
    logits = model(input_ids=ids, **with_cache(model, cache)).logits  # [G K, H, V]
    scores = [_gather(*group) for group in zip(logits.split(k), futures, strict=True)]
    return torch.stack(scores)


@torch.no_grad()
def expanded_cache(
    model: PreTrainedModel, prefix: Tensor, candidates: Tensor, future: Tensor, cache: DynamicCache
) -> Tensor:
    """[K, H]: as `repeated_cache`, but the repeats are views: the forward's own concatenation is the only copy."""
    return _gather(
        model(input_ids=_branches(candidates, future), **with_cache(model, _expanded(cache, len(candidates)))).logits,
        future,
    )


@torch.no_grad()
def prefill(model: PreTrainedModel, prefix: Tensor) -> DynamicCache:
    """The prefix's cache."""
    cache = DynamicCache()
    model.base_model(input_ids=prefix[None], **with_cache(model.base_model, cache))
    return cache


def as_trained(slm: PreTrainedModel, dropout: float = 0.05) -> TokenReranker:
    """A reranker of rank 16 whose adapter and head are not zero."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = TokenReranker.from_base(slm, dropout=dropout)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_B" in name or name == "head":
                    parameter.normal_(std=0.05)
    return made.eval()


@torch.no_grad()
def rerank_full_forwards(adapted: PeftModel, head: Tensor, prefix: Tensor, candidates: Tensor) -> Tensor:
    """[K]: one forward of prefix + candidate per candidate, adapters on every token."""
    decoder = adapted.get_base_model().base_model
    rows = [torch.cat([prefix, candidate[None]])[None] for candidate in candidates]
    return torch.cat([_score(decoder(input_ids=ids, use_cache=False), head) for ids in rows])


@torch.no_grad()
def rerank_cached_forwards(
    adapted: PeftModel, head: Tensor, prefix: Tensor, candidates: Tensor, cache: DynamicCache
) -> Tensor:
    """[K]: one forward of a single token per candidate over the frozen model's cache, cropped after each."""
    decoder = adapted.get_base_model().base_model
    cache = _copied(cache)
    scores = []
    for candidate in candidates:
        scores.append(_score(decoder(input_ids=candidate[None, None], **with_cache(decoder, cache)), head))
        cache.crop(-1)
    return torch.cat(scores)


@torch.no_grad()
def rerank_repeated_cache(
    adapted: PeftModel, head: Tensor, prefix: Tensor, candidates: Tensor, cache: DynamicCache
) -> Tensor:
    """[K]: the frozen model's cache repeated K times, then all candidates as one batch."""
    cache = _copied(cache)
    cache.batch_repeat_interleave(len(candidates))
    decoder = adapted.get_base_model().base_model
    return _score(decoder(input_ids=candidates[:, None], **with_cache(decoder, cache)), head)


@torch.no_grad()
def rerank_expanded_cache(
    adapted: PeftModel, head: Tensor, prefix: Tensor, candidates: Tensor, cache: DynamicCache
) -> Tensor:
    """[K]: as `rerank_repeated_cache`, but the repeats are views."""
    return candidate_scores(adapted, head, candidates, cache)


def candidate_scores(adapted: PeftModel, head: Tensor, candidates: Tensor, cache: DynamicCache) -> Tensor:
    """[K]: the candidates over views of a cache, with gradients."""
    decoder = adapted.get_base_model().base_model
    output = decoder(input_ids=candidates[:, None], **with_cache(decoder, _expanded(cache, len(candidates))))
    return _score(output, head)


@torch.no_grad()
def log_softmax_logprob(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """[N]: logits, log-softmax, gather."""
    return (hidden @ weight.T).log_softmax(-1).gather(-1, target[:, None])[:, 0]


@torch.no_grad()
def logsumexp_logprob(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """[N]: the target's logit minus the log-sum-exp of all logits."""
    logits = hidden @ weight.T
    return logits.gather(-1, target[:, None])[:, 0] - logits.logsumexp(-1)


@torch.no_grad()
def cross_entropy_logprob(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """[N]: logits in the inputs' dtype, torch's cross-entropy on them in float32."""
    return -F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="none")


@torch.no_grad()
def low_precision_cross_entropy_logprob(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """[N]: torch's cross-entropy on logits in the inputs' dtype."""
    return -F.cross_entropy(F.linear(hidden, weight), target, reduction="none").float()


FUSED: dict[str, Callable[[], Callable[..., Tensor]]] = {  # with the LM head, without logits
    "torch linear_cross_entropy": lambda: F.linear_cross_entropy,  # torch 2.13
    "cut-cross-entropy": lambda: importlib.import_module("cut_cross_entropy").linear_cross_entropy,
    "Liger-Kernel": lambda: (
        importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    ),
}


def fused_logprob(load: Callable[[], Callable[..., Tensor]]) -> Callable[..., Tensor]:
    """[N] by one of FUSED."""
    function = load()
    return torch.no_grad()(lambda hidden, weight, target: -function(hidden, weight, target, reduction="none").float())


def mean_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The loss of plain training: torch's cross-entropy on float32 copies of the logits."""
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


LOSSES: dict[str, Callable[[], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {  # means, with gradients
    "logits, cross_entropy": lambda: mean_cross_entropy,
    "logits, cross_entropy, compiled": lambda: torch.compile(mean_cross_entropy, dynamic=False),
    **FUSED,
}


def trl_chunked_logprob() -> Callable[..., Tensor]:
    """TRL's log-probs over chunks of the vocabulary; the function's arguments differ between versions."""
    function = importlib.import_module("trl.trainer.utils")._ChunkedLogProbFunction
    names = list(inspect.signature(function.forward).parameters)[1:]
    defaults = {"temperature": 1.0, "chunk_size": 8192, "bias": None, "logit_scale": 1.0}
    given = {"last_hidden": 0, "hidden": 0, "weight": 1, "targets": 2, "target": 2}
    unknown = [name for name in names if name not in defaults and name not in given and "softcap" not in name]
    if unknown:
        raise TypeError(f"this version of trl wants {', '.join(unknown)}")

    def run(*tensors: Tensor) -> Tensor:
        return function.apply(*(tensors[given[name]] if name in given else defaults.get(name) for name in names))[0]

    return torch.no_grad()(run)


def shared_prefix_attention(case: Branches, dtype: torch.dtype) -> Tensor:
    """[T, Hq, E]: plain matrix products of each group with its prefix and of each branch with itself."""
    k, length = case.candidates, case.length
    causal = torch.ones(length, length, dtype=torch.bool, device=case.q.device).tril()
    out = []
    for group in range(case.groups):
        rows, keys = (slice(group * n, (group + 1) * n) for n in (k * length, case.prefix))
        own_k, own_v = (x[rows].to(dtype).unflatten(0, (k, length)) for x in (case.k, case.v))  # [K, L, Hkv, E]
        shared_k, shared_v = (x[keys].to(dtype) for x in (case.prefix_k, case.prefix_v))  # [P, Hkv, E]
        q = (
            case.q[rows].to(dtype).unflatten(0, (k, length)).unflatten(2, (shared_k.shape[1], -1))
            * case.q.shape[2] ** -0.5
        )
        behind = torch.einsum("klhre,phe->hrklp", q, shared_k)
        among = torch.einsum("klhre,kmhe->hrklm", q, own_k).masked_fill(~causal, -torch.inf)
        weights = torch.cat([behind, among], -1).softmax(-1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        seen = torch.einsum("hrklp,phe->klhre", weights[..., : case.prefix], shared_v)
        seen = seen + torch.einsum("hrklm,kmhe->klhre", weights[..., case.prefix :], own_v)
        out.append(seen.flatten(2, 3).flatten(0, 1))
    return torch.cat(out)


Attend = Callable[[], Tensor]


def _matmuls(case: Branches) -> Attend:
    return lambda: shared_prefix_attention(case, case.q.dtype)


def _sdpa(case: Branches, backend: SDPBackend, mask: Any) -> Attend:
    """Scaled dot product attention with one backend over copies of the prefix, which every call makes."""

    def run() -> Tensor:
        q, k, v = case.repeated()
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


def _sdpa_flash(case: Branches) -> Attend:
    mask: Any = None if case.length == 1 else causal_lower_right(case.length, case.prefix + case.length)
    if mask is not None and case.q.device.type == "cpu":
        mask = _lower_right(case)
    return _sdpa(case, SDPBackend.FLASH_ATTENTION, mask)


def _sdpa_cudnn(case: Branches) -> Attend:
    _require_cuda(case, "cuDNN")
    return _sdpa(case, SDPBackend.CUDNN_ATTENTION, None if case.length == 1 else _lower_right(case))


def _lower_right(case: Branches) -> Tensor:
    """[L, P + L]: a mask that shows the whole prefix and the branch causally."""
    whole = torch.ones(case.length, case.prefix + case.length, dtype=torch.bool, device=case.q.device)
    return whole.tril(case.prefix)


def _two_flash_calls(case: Branches) -> Attend:
    on_gpu = case.q.device.type == "cuda"
    repeat = case.q.shape[1] // case.prefix_k.shape[1]
    flash = torch.ops.aten._scaled_dot_product_flash_attention if on_gpu else _cpu_flash(repeat)
    return _two_calls(case, lambda q, k, v, causal: flash(q, k, v, 0.0, causal))


def _two_cudnn_calls(case: Branches) -> Attend:
    _require_cuda(case, "cuDNN")
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    return _two_calls(case, lambda q, k, v, causal: cudnn(q, k, v, None, True, 0.0, causal))


def _two_calls(case: Branches, call: Callable[..., Any]) -> Attend:
    """One call per group over its prefix, one causal call per branch over itself, merged by their log-sum-exp.

    `call(q, k, v, causal)` of [n, heads, rows, E] gives (out, lse[n, heads, rows] or [n, heads, rows, 1], ...).
    """
    k = case.candidates
    batch = lambda x, n: x.unflatten(0, (n, -1)).transpose(1, 2)  # noqa: E731  [n, heads, rows, E]

    def run() -> Tensor:
        parts = []
        for n, keys, values, causal in (
            (case.groups, case.prefix_k, case.prefix_v, False),
            (case.groups * k, case.k, case.v, True),
        ):
            out, lse, *_ = call(batch(case.q, n), batch(keys, n), batch(values, n), causal)
            parts += [out.transpose(1, 2).flatten(0, 1), lse.flatten(2).transpose(0, 1).flatten(1)]
        return merge_attention_states(*parts)[0]

    return run


def _cpu_flash(repeat: int) -> Callable[..., Any]:
    def flash(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, *rest)

    return flash


def _two_varlen_calls(case: Branches, call: Callable[..., tuple[Tensor, Tensor]]) -> Attend:
    """As `_two_calls`, packed: `call(q, k, v, cu_q, cu_k, max_q, max_k, causal)` gives (out, lse[Hq, T])."""
    rows = case.candidates * case.length
    over_prefix = (case.offsets(case.groups, rows), case.offsets(case.groups, case.prefix), rows, case.prefix, False)
    own = case.offsets(case.branches, case.length)
    over_own = (own, own, case.length, case.length, True)

    def run() -> Tensor:
        prefix = call(case.q, case.prefix_k, case.prefix_v, *over_prefix)
        return merge_attention_states(*prefix, *call(case.q, case.k, case.v, *over_own))[0]

    return run


def _torch_varlen(case: Branches) -> Attend:
    module = importlib.import_module("torch.nn.attention.varlen")
    _require_cuda(case, "torch's varlen attention")
    names = inspect.signature(module.varlen_attn).parameters
    aux = module.AuxRequest(lse=True)

    def call(*arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, causal = arguments
        options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in names else {}
        if "window_size" in names:  # torch 2.11 and later
            options["window_size"] = (-1, 0) if causal else (-1, -1)
        else:
            options["is_causal"] = causal
        out, lse = module.varlen_attn(*tensors, return_aux=aux, **options)
        return out, lse

    return _two_varlen_calls(case, call)


def _flash_attn_varlen(case: Branches) -> Attend:
    function = importlib.import_module("flash_attn").flash_attn_varlen_func

    def call(*arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, causal = arguments
        out, lse, _ = function(*tensors, causal=causal, return_attn_probs=True)
        return out, lse

    return _two_varlen_calls(case, call)


def _flash_attention_3(case: Branches) -> Attend:
    """FlashAttention-3, by the wheel `fa3-fwd` or one that is built from its source."""
    name = "flash_attn_interface" if find_spec("flash_attn_interface") else "fa3_fwd_interface"
    function = importlib.import_module(name).flash_attn_varlen_func
    names = inspect.signature(function).parameters
    options = {name: True for name in ("return_attn_probs", "return_softmax_lse") if name in names}

    def call(*arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, causal = arguments
        out, lse, *_ = function(*tensors, causal=causal, **options)
        return out, lse

    return _two_varlen_calls(case, call)


def _flash_attn_kvcache(case: Branches) -> Attend:
    """A group's branches share the prefix's pages; each has its own pages after them, which every call fills."""
    function = importlib.import_module("flash_attn").flash_attn_with_kvcache
    page = 256
    if case.prefix % page:
        raise ValueError(f"expected a prefix of whole pages of {page}, got {case.prefix}")
    shared, own = case.prefix // page, -(-case.length // page)
    pages = case.groups * shared
    device = case.q.device
    prefix = torch.arange(pages, dtype=torch.int32, device=device).view(case.groups, shared)
    behind = torch.arange(pages, pages + case.branches * own, dtype=torch.int32, device=device).view(case.branches, own)
    table = torch.cat([prefix.repeat_interleave(case.candidates, 0), behind], 1)
    cache = []
    for x in (case.prefix_k, case.prefix_v):
        cache.append(torch.cat([x.unflatten(0, (pages, page)), x.new_zeros(case.branches * own, page, *x.shape[1:])]))
    filled = torch.full((case.branches,), case.prefix, dtype=torch.int32, device=device)
    q, k, v = (x.unflatten(0, (case.branches, case.length)) for x in (case.q, case.k, case.v))
    return lambda: function(q, *cache, k=k, v=v, cache_seqlens=filled, block_table=table, causal=True).flatten(0, 1)


def _flex(case: Branches) -> Attend:
    """Flex attention with a block mask over the prefixes and all branches, laid side by side beforehand."""
    _require_cuda(case, "compiled flex attention")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows, prefix, k, length = len(case.q), case.prefix, case.candidates, case.length
    shared = case.groups * prefix

    def visible(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_prefix = (key < shared) & (key // prefix == query // (k * length))
        own = key - shared
        return in_prefix | ((own >= 0) & (own // length == query // length) & (own <= query))

    mask = create_block_mask(visible, None, None, rows, shared + rows, device=case.q.device)
    keys, values = (
        torch.cat(x).transpose(0, 1)[None].contiguous() for x in ((case.prefix_k, case.k), (case.prefix_v, case.v))
    )
    q = case.q.transpose(0, 1)[None]
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, keys, values, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def _require_cuda(case: Branches, what: str) -> None:
    if case.q.device.type != "cuda":
        raise NotImplementedError(f"{what} runs on CUDA only")


ATTENTION: dict[str, Callable[[Branches], Attend]] = {
    "matmuls over the shared prefix": _matmuls,
    "SDPA flash, repeated prefix": _sdpa_flash,
    "SDPA cuDNN, repeated prefix": _sdpa_cudnn,
    "two flash calls, merged": _two_flash_calls,
    "two cuDNN calls, merged": _two_cudnn_calls,
    "torch varlen twice, merged": _torch_varlen,
    "flash-attn varlen twice, merged": _flash_attn_varlen,
    "FlashAttention-3 varlen twice, merged": _flash_attention_3,
    "flash-attn with kvcache, shared pages": _flash_attn_kvcache,
    "flex attention, block mask": _flex,
}

COMPILED = ("flex attention, block mask",)

DIFFERENTIABLE = (
    "matmuls over the shared prefix",
    "SDPA flash, repeated prefix",
    "SDPA cuDNN, repeated prefix",
    "flex attention, block mask",
)  # those of ATTENTION that autograd can differentiate; merged ones would need the gradient of a log-sum-exp


def _branches(candidates: Tensor, future: Tensor) -> Tensor:
    return torch.cat([candidates[:, None], future[:-1].expand(len(candidates), -1)], 1)  # [K, H]


def _score(output: Any, head: Tensor) -> Tensor:
    """[B]: the last hidden state times the head, in the head's dtype."""
    return output.last_hidden_state[:, -1].to(head.dtype) @ head


def _gather(logits: Tensor, future: Tensor) -> Tensor:
    """[K, H] log-probs in float32 or wider: in bfloat16 they are multiples of 1/16."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.log_softmax(-1, dtype=dtype).gather(-1, future.expand(len(logits), -1)[..., None])[..., 0]


def _copied(cache: DynamicCache) -> DynamicCache:
    return DynamicCache([(layer.keys, layer.values) for layer in cache.layers])


def _expanded(cache: DynamicCache, k: int) -> DynamicCache:
    layers = [copy.copy(layer) for layer in cache.layers]
    for layer in layers:
        layer.keys, layer.values = layer.keys.expand(k, -1, -1, -1), layer.values.expand(k, -1, -1, -1)
    views = copy.copy(cache)
    views.layers = layers
    return views
