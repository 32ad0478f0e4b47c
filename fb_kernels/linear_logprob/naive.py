"""What `linear_logprob`, its partials of a vocabulary shard and their combination mean."""

import torch
from torch import Tensor


def linear_logprob(
    hidden: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    target: Tensor,  # [...] or [..., K]
    bias: Tensor | None = None,  # [V]
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log softmax(logits)[target], log-sum-exp, the entropy -sum p log p; without gradient the largest log-prob).

    The first is [...] or [..., K], the others are [...]; ignored ids and rows of none but these are 0.
    """
    ids = target if target.ndim == hidden.ndim else target[..., None]  # [..., K]
    counted = ids != ignore_index
    rows = counted.any(-1)
    logits = _logits(hidden[rows], weight[:valid_vocab], bias, logit_scale, softcap, temperature)  # [N, V]
    logprob, lse = logits.log_softmax(-1), logits.logsumexp(-1)
    lse = lse.masked_fill(lse == torch.inf, torch.nan)
    picked = logprob.gather(1, ids[rows].long().where(counted[rows], 0))[counted[rows]]
    entropy = -(logprob.exp() * logprob.masked_fill(logprob == -torch.inf, 0.0)).sum(-1)  # 0 log 0 is 0
    largest = logprob.detach().amax(-1) if logits.numel() else lse.detach()  # [N]
    logprobs = _fill(counted, picked, 0.0).view(target.shape)
    return logprobs, *(_fill(rows, values, 0.0) for values in (lse, entropy, largest))  # type: ignore[return-value]


def linear_logprob_partials(
    hidden: Tensor,  # [..., D]
    weight_shard: Tensor,  # [Vs, D]
    target: Tensor,  # [...]
    *,
    vocab_start: int,
    bias: Tensor | None = None,  # [Vs]
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(max, sum of exp(logit - max), target's logit or -inf where it is another shard's) of the shard, each [...]."""
    counted = target != ignore_index
    valid = len(weight_shard) if valid_vocab is None else min(len(weight_shard), max(0, valid_vocab - vocab_start))
    logits = _logits(hidden[counted], weight_shard[:valid], bias, logit_scale, softcap, temperature)
    logits = torch.cat([logits, logits.new_full((len(logits), 1), -torch.inf)], 1)  # [N, valid + 1], the last of no id
    top = logits.detach().amax(-1)
    sumexp = (logits - top.masked_fill(top == -torch.inf, 0.0)[:, None]).exp().sum(-1)
    sumexp = sumexp.masked_fill(top == -torch.inf, float(valid > 0))  # the maximum's own term
    local = target[counted].long() - vocab_start
    picked = logits.gather(1, local.where((local >= 0) & (local < valid), valid)[:, None])[:, 0]
    return _fill(counted, top, -torch.inf), _fill(counted, sumexp, 0.0), _fill(counted, picked, -torch.inf)


def combine_logprob_partials(max: Tensor, sumexp: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor]:
    """(log-prob[N], lse[N]) of S shards' partials, each [S, N]: lse = log sum_s sumexp_s exp(max_s)."""
    ignored = (sumexp == 0).all(0)
    top = max.amax(0)
    top = top.masked_fill(top == -torch.inf, 0.0)
    lse = top + (sumexp * (max - top).exp()).sum(0).masked_fill(ignored, 1.0).log()
    return (target_logit.amax(0) - lse).masked_fill(ignored, 0.0), lse


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_scale: float, softcap: float | None, temperature: float
) -> Tensor:
    logits = logit_scale * (hidden @ weight.T)
    if bias is not None:
        logits = logits + bias[: len(weight)]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def _fill(counted: Tensor, values: Tensor, fill: float) -> Tensor:
    return values.new_full(counted.shape, fill).masked_scatter(counted, values)
