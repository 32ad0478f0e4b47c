"""LM head, log-softmax and gather in one op: log-probabilities of given tokens without the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from fb_kernels._runtime import checks, precision
from fb_kernels._runtime.op import Op, fake_gradients, signature
from fb_kernels._runtime.precision import accumulation_dtype
from fb_kernels.linear_logprob.options import SCHEMA, SMALL, Options


@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    return_max: Literal[False] = False,
) -> Tensor: ...
@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    return_lse: Literal[True],
    return_entropy: Literal[False] = False,
    return_max: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    return_lse: Literal[False] = False,
    return_entropy: Literal[True],
    return_max: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    return_max: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_max: bool = False,
    top_k: int | None = None,
) -> Tensor | tuple[Tensor, ...]: ...
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_max: bool = False,
    top_k: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Compute log softmax(hidden @ weight.T)[target] without ever storing all the logits.

    logit = softcap * tanh((logit_scale * hidden . weight_v + bias_v) / softcap) / temperature, in this order and in
    float32 (float64 for float64 input). Under torch.autocast hidden, weight and bias are cast to its dtype first, as
    `torch.nn.functional.linear` casts them (float64 stays).

    Args:
        hidden: [..., D] float.
        weight: [V, D], hidden's dtype: the LM head.
        target: [...] int32 or int64, or [..., K] for log-probs of K ids a row, of which some may be equal;
            `ignore_index` marks ids whose log-prob is 0 and that have no gradient.
        bias: [V] in hidden's dtype.
        logit_scale: multiplies the product before the bias.
        softcap: bound of the logits (Gemma 2); None for no bound.
        temperature: divides the logits last.
        ignore_index: target value of ignored ids; a row of no other id is 0 in every result.
        valid_vocab: number of leading rows of weight that count; None for all. Padding rows never count.
        return_lse: also return the log-sum-exp.
        return_entropy: also return the entropy of the softmax, in nats.
        return_max: also return the largest log-prob of the row, rounded like the target's if that is one id: the two
            are then equal if and only if no id has a larger log-prob than the target.
        top_k: also return the log-probs of so many of the most probable ids of a row, and these ids; 1 to the
            vocabulary.

    Returns:
        log-prob of target's shape, then lse, entropy and maximum [...], log-probs [..., top_k] and ids [..., top_k],
        each if requested: float32 (float64 for float64 input), ids int64. Those of top_k are in `topk_entropy`'s order
        and carry no gradient; in a row of ignored ids they are 0 and `ignore_index`. Gradients flow to hidden, weight
        and bias through log-prob, lse and entropy; the maximum carries none, and what no loss uses costs nothing. A row
        with a NaN or +inf logit is NaN. On the CPU an id outside the vocabulary is a ValueError; on a device its
        log-prob is NaN.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value.
    """
    options = Options(logit_scale, softcap, temperature, ignore_index, valid_vocab)
    floats = (logit_scale, softcap, temperature)
    key = signature((hidden, weight, target, bias), floats, (ignore_index, valid_vocab, top_k))
    run = _linear_logprob.checked.get(key) if key else None
    if run is None:
        op = "linear_logprob"
        hidden, weight, bias = precision.lowered(hidden, weight, bias)
        _check(op, "weight", hidden, weight, target, bias, options)
        if valid_vocab is not None:
            checks.integer(op, "valid_vocab", valid_vocab, "pass None for all rows of weight", 0, weight.shape[0])
        if top_k is not None:
            checks.integer(op, "top_k", top_k, "clamp it to the vocabulary", 1, options.rows(weight))
        run = _frozen if _keeps(hidden, weight, bias) else _linear_logprob.passed(key, hidden)
        for more, asked in ((_target_logits, target.ndim == hidden.ndim), (_top_k, top_k is not None)):
            if asked:
                more.passed(key, hidden)
    if target.ndim == hidden.ndim:
        run = partial(_several, run, _target_logits.checked.get(key, _target_logits) if key else _target_logits)
    logprob, lse, entropy, largest, *_ = run(hidden, weight, target, bias, *options)
    if not (return_lse or return_entropy or return_max or top_k):
        return logprob
    optional = ((lse, return_lse), (entropy, return_entropy), (largest, return_max))
    results = logprob, *(values for values, requested in optional if requested)
    if top_k is None:
        return results
    run = _top_k.checked.get(key, _top_k) if key else _top_k
    return *results, *_most_probable(run, hidden, weight, target, bias, lse, top_k, options)


def linear_logprob_partials(
    hidden: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    *,
    vocab_start: int,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One vocabulary shard's share of `linear_logprob`; shards may be uneven or empty.

    Under torch.autocast hidden, weight_shard and bias are cast as in `linear_logprob`.

    Args:
        hidden: [..., D] float, the same in every shard.
        weight_shard: [Vs, D]: rows vocab_start to vocab_start + Vs of the LM head.
        target: [...] ids in the whole vocabulary.
        vocab_start: first id of this shard.
        bias: [Vs], this shard's.
        logit_scale: as in `linear_logprob`.
        softcap: as in `linear_logprob`.
        temperature: as in `linear_logprob`.
        ignore_index: as in `linear_logprob`.
        valid_vocab: number of valid ids in the whole vocabulary.

    Returns:
        (max, sum of exp(logit - max), target's logit or -inf if it is in another shard), each of target's shape,
        float32 (float64 for float64 input). The sum is 1 or more wherever the shard has a logit, even if all are -inf;
        it is 0 in an empty shard and in ignored rows, which are (-inf, 0, -inf). Gradients flow through the second and
        third output; the maximum is a constant shift. On the CPU an id below 0 or past valid_vocab is a ValueError; on
        a device its target logit is NaN in every shard.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value.
    """
    op = "linear_logprob_partials"
    hidden, weight_shard, bias = precision.lowered(hidden, weight_shard, bias)
    options = Options(logit_scale, softcap, temperature, ignore_index, valid_vocab)
    _check(op, "weight_shard", hidden, weight_shard, target, bias, options)
    checks.integer(op, "vocab_start", vocab_start, "count the shard's first id from 0", least=0)
    if valid_vocab is not None:
        checks.integer(op, "valid_vocab", valid_vocab, "pass None for the whole vocabulary", least=0)
    return _partials(hidden, weight_shard, target, vocab_start, bias, *options)


def combine_logprob_partials(max: Tensor, sumexp: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the partials of S shards in their order.

    Under torch.autocast float tensors of several dtypes are cast to the widest of them (float64 stays).

    Args:
        max: [S, N] float32 or float64, as from `linear_logprob_partials`; it may not require grad.
        sumexp: [S, N] like max.
        target_logit: [S, N] like max.

    Returns:
        (log-prob[N], lse[N]) as from `linear_logprob`; rows that are empty in every shard, as ignored ones are, give 0.
        Gradients flow to sumexp and target_logit.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes or devices that differ, or a max that requires grad.
    """
    op = "combine_logprob_partials"
    max, sumexp, target_logit = precision.promoted(max, sumexp, target_logit)
    checks.floating(op, "max", max)
    if max.dtype != accumulation_dtype(max.dtype):
        remedy = "pass the partials as they come"
        raise checks.error(op, "max", "dtype torch.float32 or torch.float64", max, remedy, TypeError)
    if max.ndim != 2:
        raise checks.error(op, "max", "shape [S, N]", max, "stack the shards' partials")
    for name, value in (("sumexp", sumexp), ("target_logit", target_logit)):
        checks.floating(op, name, value, like=max)
        checks.shape(op, name, value, tuple(max.shape), "[S, N]", "stack the shards' partials")
    return _combine(max, sumexp, target_logit)


def _check(
    op: str,
    weight_name: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: Options,
) -> None:
    checks.floating(op, "hidden", hidden)
    checks.floating(op, weight_name, weight, like=hidden)
    checks.index(op, "target", target, like=hidden)
    if hidden.ndim == 0:
        raise checks.error(op, "hidden", "shape [..., D]", hidden, "add a dimension")
    checks.shape(op, weight_name, weight, (None, hidden.shape[-1]), "[V, D]", "pass the LM head's weight as it is")
    rows, several = tuple(hidden.shape[:-1]), target.ndim == hidden.ndim and op == "linear_logprob"
    names = ("[..., K]" if several else "[...]") + " of hidden[..., D]"
    checks.shape(op, "target", target, (*rows, None) if several else rows, names, "give every row its ids")
    if bias is not None:
        checks.floating(op, "bias", bias, like=hidden)
        checks.shape(op, "bias", bias, (weight.shape[0],), "[V]", "give one value to each row of the weight")
    checks.number(op, "logit_scale", options.logit_scale, "use 1.0 for none")
    if options.softcap is not None:
        checks.positive(op, "softcap", options.softcap, "pass None for no soft-cap")
    checks.positive(op, "temperature", options.temperature, "use 1.0 for none")
    checks.integer(op, "ignore_index", options.ignore_index, "use -100")


def _keeps(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the forward keeps the gradient of lse to hidden, so that the backward has no product."""
    if hidden.is_cpu and hidden.shape[:-1].numel() * len(weight) <= SMALL:
        return False
    trained = [x is not None and x.requires_grad for x in (hidden, weight, bias)]
    return torch.is_grad_enabled() and trained == [True, False, False]


def _several(
    statistics: Callable,
    logits_of: Callable,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """(log-prob[..., K], lse, entropy, largest log-prob) of target[..., K], with a row's statistics computed once."""
    ignore_index = Options(*rest).ignore_index
    padded = torch.nn.functional.pad(target, (0, 1), value=ignore_index)  # K may be 0
    counted = padded != ignore_index
    first = padded.gather(-1, counted.int().argmax(-1, keepdim=True))[..., 0]
    _, lse, *others = statistics(hidden, weight, first, bias, *rest)[:4]
    logits = logits_of(hidden, weight, target, bias, *rest)
    return torch.where(counted[..., :-1], logits - lse[..., None], 0.0).contiguous(), lse, *others


def _most_probable(
    run: Callable,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    k: int,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """(log-probs[..., k], ids[..., k])."""
    ignored = target == options.ignore_index
    ignored = (ignored.all(-1) if target.ndim == hidden.ndim else ignored)[..., None]
    bias = None if bias is None else bias.detach()
    logits, ids = run(hidden.detach(), weight.detach(), bias, k, *options)
    logprobs = logits - lse.detach()[..., None]
    return logprobs.masked_fill(ignored, 0.0), ids.masked_fill(ignored, options.ignore_index)


def _statistics_fake(count: int, hidden: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    dtype = accumulation_dtype(hidden.dtype)
    return tuple(hidden.new_empty(target.shape, dtype=dtype) for _ in range(count))


def _backward_fake(upstream: int, *arguments: Any) -> tuple[Tensor, ...]:
    hidden, weight, _, bias = arguments[upstream : upstream + 4]
    return fake_gradients(weight, (hidden, weight, bias), arguments[-1])


_linear_logprob = Op(
    "linear_logprob",
    f"(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda hidden, weight, target, *_: _statistics_fake(4, hidden, target),
    triton=True,
    cpu=True,
)
_linear_logprob_backward = Op(
    "linear_logprob_backward",
    "(Tensor grad_logprob, Tensor grad_lse, Tensor? grad_entropy, Tensor hidden, Tensor weight, Tensor target, "
    f"Tensor? bias, Tensor lse, Tensor entropy, {SCHEMA}, bool[] needs) -> (Tensor, Tensor, Tensor)",
    folder="linear_logprob",
    fake=partial(_backward_fake, 3),
    triton=True,
    cpu=True,
)
_frozen = Op(
    "linear_logprob_frozen",
    f"(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, {SCHEMA}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    folder="linear_logprob",
    fake=lambda hidden, weight, target, *_: (
        *_statistics_fake(4, hidden, target),
        *_statistics_fake(1, hidden, hidden),
    ),
    triton=True,
    cpu=True,
)
_top_k = Op(
    "linear_top_k",
    f"(Tensor hidden, Tensor weight, Tensor? bias, SymInt k, {SCHEMA}) -> (Tensor, Tensor)",
    folder="linear_logprob",
    fake=lambda hidden, weight, bias, k, *_: (
        hidden.new_empty((*hidden.shape[:-1], k), dtype=accumulation_dtype(hidden.dtype)),
        hidden.new_empty((*hidden.shape[:-1], k), dtype=torch.int64),
    ),
    triton=True,
)
_top_k.has_no_gradient()
_target_logits = Op(
    "target_logits",
    f"(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, {SCHEMA}) -> Tensor",
    folder="linear_logprob",
    fake=lambda hidden, weight, target, *_: _statistics_fake(1, hidden, target)[0],
    cpu=True,
)
_target_logits_backward = Op(
    "target_logits_backward",
    "(Tensor grad, Tensor hidden, Tensor weight, Tensor target, Tensor? bias, "
    f"{SCHEMA}, bool[] needs) -> (Tensor, Tensor, Tensor)",
    folder="linear_logprob",
    fake=partial(_backward_fake, 1),
)
_partials = Op(
    "linear_logprob_partials",
    "(Tensor hidden, Tensor weight_shard, Tensor target, SymInt vocab_start, Tensor? bias, "
    f"{SCHEMA}) -> (Tensor, Tensor, Tensor)",
    folder="linear_logprob",
    fake=lambda hidden, weight, target, *_: _statistics_fake(3, hidden, target),
    triton=True,
)
_partials_backward = Op(
    "linear_logprob_partials_backward",
    "(Tensor grad_sumexp, Tensor grad_target_logit, Tensor hidden, Tensor weight_shard, Tensor target, Tensor? bias, "
    f"Tensor max, SymInt vocab_start, {SCHEMA}, bool[] needs) -> (Tensor, Tensor, Tensor)",
    folder="linear_logprob",
    fake=partial(_backward_fake, 2),
    triton=True,
)
_combine = Op(
    "combine_logprob_partials",
    "(Tensor max, Tensor sumexp, Tensor target_logit) -> (Tensor, Tensor)",
    folder="linear_logprob",
    fake=lambda top, *_: (top.new_empty(top.shape[1:]), top.new_empty(top.shape[1:])),
    triton=True,
)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, bias, *options = inputs
    _, lse, entropy, largest = output
    ctx.mark_non_differentiable(largest)
    ctx.set_materialize_grads(False)  # an entropy without a gradient costs nothing
    ctx.save_for_backward(hidden, weight, target, bias, lse, entropy)
    ctx.options = options


def _backward(ctx: Any, on_logprob: Tensor | None, on_lse: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
    *_, lse, _ = saved = ctx.saved_tensors
    if on_logprob is on_lse is others[0] is None:
        return None, None, None
    on_logprob, on_lse = (torch.zeros_like(lse) if on is None else on for on in (on_logprob, on_lse))
    return _linear_logprob_backward(on_logprob, on_lse, others[0], *saved, *ctx.options, ctx.needs)


def _save_frozen(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, bias, *options = inputs
    _, lse, entropy, largest, pull = output
    ctx.mark_non_differentiable(largest, pull)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, target, bias, lse, entropy, pull)
    ctx.options = options


def _backward_frozen(ctx: Any, on_logprob: Tensor | None, on_lse: Tensor | None, *others: Any) -> Tensor | None:
    *saved, lse, entropy, pull = ctx.saved_tensors
    if on_logprob is on_lse is others[0] is None:
        return None
    unpicked = on_logprob is None
    on_logprob, on_lse = (torch.zeros_like(lse) if on is None else on for on in (on_logprob, on_lse))
    hidden_alone = [True, False, False]
    if others[0] is not None:
        grads = (on_logprob, on_lse, others[0])
        return _linear_logprob_backward(*grads, *saved, lse, entropy, *ctx.options, hidden_alone)[0]
    hidden, weight, target, bias = saved
    counted = target != Options(*ctx.options).ignore_index
    onto_lse = torch.where(counted, on_lse - on_logprob, 0.0)[..., None]
    by_lse = torch.where(onto_lse == 0, 0.0, onto_lse * pull)  # NaN rows without an upstream gradient add nothing
    if unpicked:  # no target was in the loss, or several were, by `target_logits`
        return by_lse.to(hidden.dtype)
    one = (on_logprob[..., None], hidden, weight, target[..., None], bias, *ctx.options, hidden_alone)
    return (_target_logits_backward(*one)[0] + by_lse).to(hidden.dtype)


def _save_partials(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, vocab_start, bias, *options = inputs
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(hidden, weight, target, bias, output[0])
    ctx.options = (vocab_start, *options)


def _backward_partials(ctx: Any, _: Tensor, grad_sumexp: Tensor, grad_target: Tensor) -> tuple[Tensor, ...]:
    return _partials_backward(grad_sumexp, grad_target, *ctx.saved_tensors, *ctx.options, ctx.needs)


def _save_combine(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    top, sumexp, target_logit = inputs
    ctx.save_for_backward(top, sumexp, target_logit, output[1])


def _backward_combine(ctx: Any, grad_logprob: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
    top, sumexp, target_logit, lse = ctx.saved_tensors
    counted = (sumexp != 0).any(0)
    on_lse = torch.where(counted, grad_lse - grad_logprob, 0.0)
    share = torch.where(on_lse == 0, 0.0, torch.exp(top - lse))  # NaN rows without an upstream gradient add nothing
    shard = torch.arange(top.shape[0], device=top.device)[:, None]
    owner = shard == (target_logit.argmax(0) if top.shape[0] else shard)  # [S, N]
    return on_lse * share, torch.where(owner & counted, grad_logprob, 0.0)


_linear_logprob.differentiate(
    to=("hidden", "weight", "bias"), setup_context=_save, backward=_backward, by=_linear_logprob_backward
)
_frozen.differentiate(to=("hidden",), setup_context=_save_frozen, backward=_backward_frozen)
_target_logits.differentiate(
    to=("hidden", "weight", "bias"),
    backward=lambda ctx, grad: _target_logits_backward(grad, *ctx.saved_tensors, *ctx.options, ctx.needs),
    by=_target_logits_backward,
)
_partials.differentiate(
    to=("hidden", "weight_shard", "bias"),
    setup_context=_save_partials,
    backward=_backward_partials,
    by=_partials_backward,
)
_combine.differentiate(to=("sumexp", "target_logit"), setup_context=_save_combine, backward=_backward_combine)
