"""`linear_logprob` in plain PyTorch, on any device: in blocks, so that the logits never exist as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fb_kernels._runtime import checks
from fb_kernels._runtime.precision import accumulation_dtype
from fb_kernels.linear_logprob.options import Options

ROW_BLOCK = 1024
VOCAB_BLOCK = 8192  # also limits the float32 copy of the head's rows
LOGITS = 1 << 20  # logits of a block: few enough to stay in the cache
FEW_ROWS = 48
FAR_BELOW = -1e4  # relative to the maximum: exp is already 0, and 0 * -inf must not enter the entropy


def _logit_blocks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    valid: int,
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
            if options.logit_scale != 1.0:
                logits *= options.logit_scale
            if bias is not None:
                logits += bias[columns].to(dtype)
            slope = None
            if options.softcap is not None:
                logits.div_(options.softcap).tanh_()
                slope = 1 - logits.square()
                logits *= options.softcap
            if options.temperature != 1.0:
                logits /= options.temperature
            yield rows, columns, logits, slope


def _outside(target: Tensor, limit: int | None) -> Tensor:
    """Which ids are outside a vocabulary of `limit` ids; for None only negative ones are."""
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Running (max, sum exp(l - max), sum (l - max) exp(l - max), logit of ids, -inf outside [0, valid)), each [N]."""
    dtype = accumulation_dtype(x.dtype)
    top = torch.full((x.shape[0],), -torch.inf, dtype=dtype, device=x.device)
    total, weighted, picked = torch.zeros_like(top), torch.zeros_like(top), top.clone()
    for rows, columns, logits, _ in _logit_blocks(x, weight, bias, options, valid):
        local = ids[rows] - columns.start
        inside = (local >= 0) & (local < logits.shape[1])
        gathered = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        picked[rows] = torch.where(inside, gathered, picked[rows])
        new_top = torch.maximum(top[rows], logits.amax(1))
        shift = torch.where(new_top == -torch.inf, torch.zeros_like(new_top), new_top)
        fall = torch.where(top[rows] == -torch.inf, 0.0, top[rows] - shift)  # an empty sum stays empty
        logits.sub_(shift[:, None]).clamp_(min=FAR_BELOW)
        exponentials = logits.exp()
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-prob, lse, entropy, largest log-prob), each of target's shape."""
    options = Options(*rest)
    valid = options.rows(weight)
    check_targets("linear_logprob", target, options.ignore_index, valid)
    ids = target.reshape(-1).long()
    x = hidden.reshape(ids.shape[0], hidden.shape[-1])
    top, total, weighted, picked = _statistics(x, weight, ids, bias, options, valid)
    lse = top + total.log()
    entropy = total.log() - weighted / total
    ignored = ids == options.ignore_index
    logprob = torch.where(_outside(ids, valid), torch.nan, picked - lse)
    results = (logprob, lse, entropy, top - lse)
    return tuple(values.masked_fill(ignored, 0.0).view(target.shape) for values in results)  # type: ignore[return-value]


def _project_back(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    on_target: Tensor,
    on_exponential: Tensor,
    shift: Tensor,
    options: Options,
    valid: int,
    needs: list[bool],
    normed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to hidden, weight, bias of sum_n on_target * l[target] + on_exponential * exp(l - shift).

    If the shift is the lse (`normed`) and a block holds whole rows, the block's own lse is used: the forward may have
    been another kernel with other rounding, which matters where a probability is almost 1.
    """
    x = hidden.reshape(ids.shape[0], hidden.shape[-1])
    dtype = accumulation_dtype(x.dtype)
    need_hidden, need_weight, need_bias = needs
    d_hidden = torch.zeros(x.shape if need_hidden else (0,), dtype=dtype, device=x.device)
    d_weight = torch.zeros(weight.shape if need_weight else (0,), dtype=dtype, device=x.device)
    d_bias = torch.zeros(weight.shape[0] if need_bias else 0, dtype=dtype, device=x.device)
    unused = ((on_target == 0) & (on_exponential == 0))[:, None]  # their logits may be inf or NaN
    for rows, columns, logits, slope in _logit_blocks(x, weight, bias, options, valid):
        own = normed and logits.shape[1] == valid
        grad = logits.softmax(1) if own else logits.sub_(shift[rows, None]).exp_()
        grad *= on_exponential[rows, None]
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


def linear_logprob_backward(
    grad_logprob: Tensor,
    grad_lse: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of a logit is grad_logprob (onehot - p) + grad_lse p; what `needs` leaves out comes back empty."""
    *given, needs = rest
    options = Options(*given)
    ids = target.reshape(-1).long()
    counted = ids != options.ignore_index
    on_logprob = torch.where(counted, grad_logprob.reshape(-1), 0.0)
    on_lse = torch.where(counted, grad_lse.reshape(-1), 0.0)
    return _project_back(
        hidden,
        weight,
        bias,
        ids,
        on_logprob,
        on_lse - on_logprob,
        lse.reshape(-1),
        options,
        options.rows(weight),
        needs,
        normed=True,
    )


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


def linear_logprob_partials_backward(
    grad_sumexp: Tensor,
    grad_target_logit: Tensor,
    hidden: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    bias: Tensor | None,
    top: Tensor,
    vocab_start: int,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The shift by the maximum is a constant: whatever it is, lse = max + log(sumexp) has the same gradient."""
    *given, needs = rest
    options = Options(*given)
    ids = target.reshape(-1).long()
    counted = ids != options.ignore_index
    shift = top.reshape(-1)
    return _project_back(
        hidden,
        weight_shard,
        bias,
        ids - vocab_start,
        torch.where(counted, grad_target_logit.reshape(-1), 0.0),
        torch.where(counted, grad_sumexp.reshape(-1), 0.0),
        torch.where(shift == -torch.inf, torch.zeros_like(shift), shift),
        options,
        options.rows(weight_shard, vocab_start),
        needs,
        normed=False,
    )


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
