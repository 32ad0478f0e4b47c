"""`linear_logprob` in plain PyTorch, on any device: in blocks, so that the logits never exist as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fb_kernels._runtime import checks
from fb_kernels._runtime.precision import accumulation_dtype
from fb_kernels.linear_logprob.options import Options
from fb_kernels.topk_entropy import topk_entropy

ROW_BLOCK = 1024
VOCAB_BLOCK = 8192  # also limits the float32 copy of the head's rows
LOGITS = 1 << 20  # logits of a block: few enough to stay in the cache
FEW_ROWS = 48
KEPT = 1 << 24  # logits of whole rows that are kept to find the largest
GATHERED = 1 << 20  # elements of the head's rows that are gathered at once
FAR_BELOW = -1e4  # relative to the maximum: exp is already 0, and 0 * -inf must not enter the entropy


def _logit_blocks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: Options, valid: int
) -> Iterator[tuple[slice, slice, Tensor, Tensor | None]]:
    """(rows, columns, logits, slope of the soft-cap or None) of hidden[N, D] @ weight[:valid].T, block by block."""
    dtype = accumulation_dtype(hidden.dtype)
    for row in range(0, hidden.shape[0], ROW_BLOCK):
        rows = slice(row, min(row + ROW_BLOCK, hidden.shape[0]))
        x = hidden[rows].to(dtype)
        step = min(VOCAB_BLOCK, LOGITS // x.shape[0])
        for column in range(0, valid, step):
            columns = slice(column, min(column + step, valid))
            head = weight[columns].to(dtype)
            few = x.shape[0] <= FEW_ROWS  # a product of few rows is faster transposed
            logits = (head @ x.T).T.contiguous() if few else x @ head.T  # [rows, columns]
            yield rows, columns, logits, to_logits(logits, None if bias is None else bias[columns], options)


def to_logits(products: Tensor, bias: Tensor | None, options: Options) -> Tensor | None:
    """Change products into logits in place; returns the slope of the soft-cap, if there is one."""
    slope = None
    if options.logit_scale != 1.0:
        products *= options.logit_scale
    if bias is not None:
        products += bias.to(products.dtype)
    if options.softcap is not None:
        products.div_(options.softcap).tanh_()
        slope = 1 - products.square()
        products *= options.softcap
    if options.temperature != 1.0:
        products /= options.temperature
    return slope


def _outside(target: Tensor, limit: int | None) -> Tensor:
    """Which ids are outside a vocabulary of `limit` ids; None is a vocabulary without an end."""
    return target < 0 if limit is None else (target < 0) | (target >= limit)


def check_targets(op: str, target: Tensor, ignore_index: int, limit: int | None) -> None:
    """ValueError for an id outside the vocabulary; read on the CPU only."""
    if target.device.type != "cpu":
        return
    bad = (target != ignore_index) & _outside(target, limit)
    if bad.any():
        upper = "the vocabulary" if limit is None else str(limit)
        raise checks.error(
            op,
            "target",
            f"ids from 0 below {upper}, or ignore_index {ignore_index}",
            int(target[bad][0]),
            "mark padding with ignore_index",
        )


def _statistics(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    options: Options,
    valid: int,
    pull: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Running (max, sum exp(l - max), sum (l - max) exp(l - max), logit of ids, -inf outside [0, valid)), each [N].

    To `pull` [N, D] it adds the sum of exp(l - max) dl/dx.
    """
    dtype = accumulation_dtype(x.dtype)
    top = torch.full((x.shape[0],), -torch.inf, dtype=dtype, device=x.device)
    total, weighted, picked = torch.zeros_like(top), torch.zeros_like(top), top.clone()
    for rows, columns, logits, slope in _logit_blocks(x, weight, bias, options, valid):
        local = ids[rows] - columns.start
        inside = (local >= 0) & (local < logits.shape[1])
        gathered = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        picked[rows] = torch.where(inside, gathered, picked[rows])
        new_top = torch.maximum(top[rows], logits.amax(1))
        shift = torch.where(new_top == -torch.inf, torch.zeros_like(new_top), new_top)
        fall = torch.where(top[rows] == -torch.inf, 0.0, top[rows] - shift)  # an empty sum stays empty
        logits.sub_(shift[:, None]).clamp_(min=FAR_BELOW)
        exponentials = logits.exp()
        if pull is not None:
            pulled = (exponentials if slope is None else exponentials * slope) @ weight[columns].to(dtype)
            pull[rows] = pull[rows] * fall.exp()[:, None] + pulled * (options.logit_scale / options.temperature)
        weighted[rows] = (weighted[rows] + total[rows] * fall) * fall.exp() + logits.mul_(exponentials).sum(1)
        total[rows] = total[rows] * fall.exp() + exponentials.sum(1)
        top[rows] = new_top
    return top, total, weighted, picked


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *rest: Any,
    pull: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-prob, lse, entropy, largest log-prob), each of target's shape; to `pull` [N, D] it adds dlse/dhidden."""
    options = Options(*rest)
    valid = options.rows(weight)
    check_targets("linear_logprob", target, options.ignore_index, valid)
    ids = target.reshape(-1).long()
    x = hidden.reshape(ids.shape[0], hidden.shape[-1])
    top, total, weighted, picked = _statistics(x, weight, ids, bias, options, valid, pull)
    if pull is not None:
        pull /= total[:, None]
    lse = top + total.log()
    entropy = total.log() - weighted / total
    ignored = ids == options.ignore_index
    logprob = torch.where(_outside(ids, valid), torch.nan, picked - lse)
    results = (logprob, lse, entropy, top - lse)
    return tuple(values.masked_fill(ignored, 0.0).view(target.shape) for values in results)  # type: ignore[return-value]


def linear_logprob_frozen(hidden: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """`linear_logprob`, then the gradient of lse to hidden [..., D], in the precision of the results."""
    pull = hidden.new_zeros(hidden.shape, dtype=accumulation_dtype(hidden.dtype))
    return *linear_logprob(hidden, *rest, pull=pull.view(-1, hidden.shape[-1]) if pull.numel() else None), pull


def largest_of_rows(
    logits_of: Callable[..., Tensor], hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int, *rest: Any
) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row [..., k] and their ids, some rows at a time."""
    options, (*rows, width) = Options(*rest), hidden.shape
    valid = options.rows(weight)
    bias = None if bias is None else bias[:valid]
    x = hidden.reshape(math.prod(rows), width)
    found = [topk_entropy(logits_of(part, weight[:valid], bias, options), k) for part in x.split(max(1, KEPT // valid))]
    _, values, ids = map(torch.cat, zip(*found, strict=True))
    return values.view(*rows, k), ids.view(*rows, k)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    if x.dtype == accumulation_dtype(x.dtype):
        logits = x @ weight.T
        to_logits(logits, bias, options)
        return logits
    logits = x.new_empty(len(x), len(weight), dtype=accumulation_dtype(x.dtype))
    for rows, columns, block, _ in _logit_blocks(x, weight, bias, options, len(weight)):
        logits[rows, columns] = block
    return logits


def linear_top_k(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(logits[..., k], ids[..., k])."""
    return largest_of_rows(_logits, *arguments)


def _gathered(
    hidden: Tensor, weight: Tensor, target: Tensor, options: Options
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """(rows, their x[n, D, 1], ids[n, K], the head's rows[n, K, D]); an id outside the vocabulary is another one's."""
    dtype, (count, width) = accumulation_dtype(hidden.dtype), (target.shape[-1], hidden.shape[-1])
    ids = target.reshape(-1, count).long().clamp(0, options.rows(weight) - 1)
    x = hidden.reshape(len(ids), width)
    step = max(1, GATHERED // max(1, count * width))
    for row in range(0, len(ids), step):
        rows = slice(row, row + step)
        own = ids[rows]
        heads = weight.index_select(0, own.reshape(-1)).view(*own.shape, width)
        yield rows, x[rows, :, None].to(dtype), own, heads.to(dtype)


def target_logits(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Logits of the ids of target[..., K], 0 for ignored ones."""
    options = Options(*rest)
    valid = options.rows(weight)
    check_targets("linear_logprob", target, options.ignore_index, valid)
    out = hidden.new_zeros(target.shape, dtype=accumulation_dtype(hidden.dtype))
    if not (valid and target.numel()):
        return out
    flat = out.view(-1, target.shape[-1])
    for rows, x, ids, heads in _gathered(hidden, weight, target, options):
        flat[rows] = torch.bmm(heads, x)[..., 0]
        to_logits(flat[rows], None if bias is None else bias[ids], options)
    return out.masked_fill_(_outside(target, valid), torch.nan).masked_fill_(target == options.ignore_index, 0.0)


def target_logits_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to hidden, weight and bias; those that are not needed are empty."""
    *given, (need_hidden, need_weight, need_bias) = rest
    options, dtype = Options(*given), accumulation_dtype(hidden.dtype)
    valid, width = options.rows(weight), hidden.shape[-1]
    d_hidden = hidden.new_zeros(hidden.shape if need_hidden else (0, width), dtype=dtype)
    d_weight = weight.new_zeros(weight.shape if need_weight else (0,), dtype=dtype)
    d_bias = weight.new_zeros(weight.shape[0] if need_bias else 0, dtype=dtype)
    if valid and target.numel():
        used = (target != options.ignore_index) & ~_outside(target, valid)
        grads = torch.where(used, grad, 0.0).reshape(-1, target.shape[-1])
        onto = d_hidden.view(len(grads), width) if need_hidden else d_hidden
        for rows, x, ids, heads in _gathered(hidden, weight, target, options):
            own = grads[rows] / options.temperature
            unused = own == 0  # their logits may be inf or NaN
            if options.softcap is not None:
                slope = to_logits(torch.bmm(heads, x)[..., 0], None if bias is None else bias[ids], options)
                assert slope is not None
                own.mul_(slope).masked_fill_(unused, 0.0)
            if need_bias:
                d_bias.index_add_(0, ids.flatten(), own.flatten())
            own = own * options.logit_scale
            if need_hidden:
                onto[rows] = torch.bmm(own[:, None], heads.masked_fill_(unused[..., None], 0.0))[:, 0]
            if need_weight:
                outer = (own[..., None] * x.mT).masked_fill(unused[..., None], 0.0)  # [n, K, D]
                d_weight.index_add_(0, ids.flatten(), outer.flatten(0, 1))
    d_hidden = d_hidden if need_hidden else d_hidden.view(0)
    return d_hidden.to(hidden.dtype), d_weight.to(weight.dtype), d_bias.to(weight.dtype)


def _project_back(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int,
    bias: Tensor | None,
    on_target: Tensor,
    on_exponential: Tensor,
    on_entropy: Tensor | None,
    shift: Tensor,
    options: Options,
    needs: list[bool],
    normed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to hidden, weight and bias, given that to a logit l.

    It is e^f (on_exponential - on_entropy f) with f = l - shift, and on_target more for the target. If the shift is the
    lse (`normed`) and a block holds whole rows, the block's own lse is used: the forward may have been another kernel
    with other rounding, which matters where a probability is almost 1.
    """
    ids, valid = target.reshape(-1).long() - vocab_start, options.rows(weight, vocab_start)
    on_target, on_exponential, shift = (part.reshape(-1) for part in (on_target, on_exponential, shift))
    unused = (on_target == 0) & (on_exponential == 0)  # their logits may be inf or NaN
    if on_entropy is not None:
        on_entropy = on_entropy.reshape(-1)
        unused &= on_entropy == 0
    x = hidden.reshape(ids.shape[0], hidden.shape[-1])
    dtype = accumulation_dtype(x.dtype)
    need_hidden, need_weight, need_bias = needs
    d_hidden = torch.zeros(x.shape if need_hidden else (0,), dtype=dtype, device=x.device)
    d_weight = torch.zeros(weight.shape if need_weight else (0,), dtype=dtype, device=x.device)
    d_bias = torch.zeros(weight.shape[0] if need_bias else 0, dtype=dtype, device=x.device)
    unused = unused[:, None]
    for rows, columns, logits, slope in _logit_blocks(x, weight, bias, options, valid):
        own = normed and logits.shape[1] == valid
        if on_entropy is None:
            grad = logits.softmax(1) if own else logits.sub_(shift[rows, None]).exp_()
            grad *= on_exponential[rows, None]
        else:
            fallen = (logits.log_softmax(1) if own else logits.sub_(shift[rows, None])).clamp_(min=FAR_BELOW)
            grad = fallen.exp()
            grad *= fallen.mul_(-on_entropy[rows, None]).add_(on_exponential[rows, None])
        local = ids[rows] - columns.start
        inside = (local >= 0) & (local < logits.shape[1])
        grad.scatter_add_(
            1, local.clamp(0, logits.shape[1] - 1)[:, None], torch.where(inside, on_target[rows], 0.0)[:, None]
        )
        grad /= options.temperature
        if slope is not None:
            grad *= slope
        grad.masked_fill_(unused[rows], 0.0)
        if need_bias:
            d_bias[columns] += grad.sum(0)
        grad *= options.logit_scale
        if need_hidden:
            d_hidden[rows] += grad @ weight[columns].to(dtype)
        if need_weight:
            d_weight[columns] += grad.T @ x[rows].to(dtype).masked_fill(unused[rows], 0.0)
    d_hidden = d_hidden.view(hidden.shape) if need_hidden else d_hidden
    return d_hidden.to(hidden.dtype), d_weight.to(weight.dtype), d_bias.to(weight.dtype)


def gradient(
    project_back: Callable[..., tuple[Tensor, Tensor, Tensor]],
    grad_logprob: Tensor,
    grad_lse: Tensor,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of a logit is grad_logprob (onehot - p) + grad_lse p - grad_entropy p (log p + entropy).

    Those of tensors that are not needed are empty.
    """
    *given, needs = rest
    options = Options(*given)
    counted = target != options.ignore_index
    on_logprob, on_entropy = torch.where(counted, grad_logprob, 0.0), None
    on_exponential = torch.where(counted, grad_lse, 0.0) - on_logprob
    if grad_entropy is not None:
        on_entropy = torch.where(counted, grad_entropy, 0.0)
        on_exponential = on_exponential - torch.where(on_entropy == 0, 0.0, on_entropy * entropy)
    return project_back(hidden, weight, target, 0, bias, on_logprob, on_exponential, on_entropy, lse, options, needs)


def partials_gradient(
    project_back: Callable[..., tuple[Tensor, Tensor, Tensor]],
    grad_sumexp: Tensor,
    grad_target_logit: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    top: Tensor,
    vocab_start: int,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum is a constant shift: whatever it is, lse = max + log(sumexp) has the same gradient."""
    *given, needs = rest
    options = Options(*given)
    counted = target != options.ignore_index
    on_target, on_exponential = (torch.where(counted, grad, 0.0) for grad in (grad_target_logit, grad_sumexp))
    shift = top.masked_fill(top == -torch.inf, 0.0)
    return project_back(
        hidden, weight, target, vocab_start, bias, on_target, on_exponential, None, shift, options, needs
    )


def linear_logprob_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to hidden, weight and bias."""
    return gradient(partial(_project_back, normed=True), *arguments)


def linear_logprob_partials_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to hidden, weight_shard and bias."""
    return partials_gradient(_project_back, *arguments)


def linear_logprob_partials(
    hidden: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    vocab_start: int,
    bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(max, sumexp, target logit) of one shard; ignored rows are (-inf, 0, -inf) in every shard."""
    options = Options(*rest)
    check_targets("linear_logprob_partials", target, options.ignore_index, options.valid_vocab)
    ids = target.reshape(-1).long()
    x = hidden.reshape(ids.shape[0], hidden.shape[-1])
    valid = options.rows(weight_shard, vocab_start)
    top, total, _, picked = _statistics(x, weight_shard, ids - vocab_start, bias, options, valid)
    total = total.masked_fill(top == -torch.inf, float(valid > 0))  # the maximum's own term, also of -inf
    picked = picked.masked_fill(_outside(ids, options.valid_vocab), torch.nan)
    ignored = ids == options.ignore_index
    empty = ((top, -torch.inf), (total, 0.0), (picked, -torch.inf))
    return tuple(values.masked_fill(ignored, fill).view(target.shape) for values, fill in empty)  # type: ignore[return-value]


def combine_logprob_partials(top: Tensor, sumexp: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor]:
    """(log-prob[N], lse[N]) from S shards; rows empty in every shard give 0."""
    if top.shape[0] == 0:
        return top.new_zeros(top.shape[1:]), top.new_zeros(top.shape[1:])
    highest = top.amax(0)
    shift = torch.where(highest == -torch.inf, torch.zeros_like(highest), highest)
    total = (sumexp * torch.exp(top - shift)).sum(0)
    lse = shift + total.log()
    empty = (highest == -torch.inf) & (sumexp == 0).all(0)
    logprob = target_logit.amax(0) - lse
    return logprob.masked_fill(empty, 0.0), lse.masked_fill(empty, 0.0)
