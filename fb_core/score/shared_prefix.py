"""Log-probs of continuations of shared prefixes in one packed forward: each prefix runs once, no logits are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, overload
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fb_core.models.adapters import Trainable, causal_lm
from fb_core.models.facts import CausalLM, lm_head, valid_ids
from fb_core.models.packed import Layout, Prefix, check_packed_forward, check_supported, packed_forward
from fb_core.models.tokens import check_positions, many_token_ids, token_ids
from fb_kernels import linear_logprob

Ids: TypeAlias = Tensor | Sequence[int]
Requests: TypeAlias = Sequence[tuple[Ids, Sequence[Ids]]]


class Branches(NamedTuple):
    """Continuations [R] of tokens[:position]; each is scored from its token `first` on."""

    position: int
    continuations: Sequence[Tensor]
    first: int = 0

    @property
    def rows(self) -> int:
        """Rows that they add to a forward; a continuation's last token needs none, since no token follows it."""
        return sum(max(0, len(tokens) - 1) for tokens in self.continuations)


Pack: TypeAlias = Sequence[tuple[Tensor | Prefix, Sequence[Branches]]]
Results: TypeAlias = list[list[list[tuple[Tensor, ...]]]]


def forward(
    model: CausalLM,
    pack: Pack,
    *,
    valid_vocab: int | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_greedy: bool = False,
) -> Results:
    """One packed forward: each trajectory's tokens once, followed by the branches of all its states.

    Args:
        model: a causal LM that `check_supported` accepts.
        pack: (tokens [T], branches that follow them) pairs. Instead of tokens, all pairs may have prefixes cached in
            one paged `PrefixKV`; `first` must then be 1 or more.
        valid_vocab: like `temperature` as in `linear_logprob`.
        temperature: divides the logits.
        return_entropy: also return the entropies.
        return_greedy: also return which tokens are the model's own choice.

    Returns:
        for each pair, group and continuation: (log-prob [R - first], then entropies and bool, as requested).
    """
    device = model.device
    ids: list[Tensor] = []
    targets: list[Tensor] = []
    positions: list[range] = []
    scored: list[range] = []
    groups: list[tuple[list[int], int, int]] = []
    pages: list[tuple[int, ...]] = []
    prefix, row = None, 0
    for tokens, states in pack:
        start = row
        if isinstance(tokens, Prefix):
            prefix, start = tokens.kv, tokens.start
            pages += [tokens.pages] * len(states)
        else:
            groups.append(([len(tokens)], 0, 0))
            ids.append(tokens)
            positions.append(range(len(tokens)))
            row += len(tokens)
        for position, continuations, first in states:
            lengths = []
            for continuation in continuations:
                length = max(0, len(continuation) - 1)
                if not first and len(continuation):
                    scored.append(range(start + position - 1, start + position))
                scored.append(range(row, row + length))
                positions.append(range(position, position + length))
                ids.append(continuation[:length])
                targets.append(continuation[first:])
                lengths.append(length)
                row += length
            groups.append((lengths, start, position))
    if not targets:
        return [[[] for _ in states] for _, states in pack]
    layout = Layout.build(groups, device, prefix=prefix, pages=pages or None)
    head = lm_head(model)
    hidden = packed_forward(model, torch.cat(ids), _numbers(positions, device), layout, _numbers(scored, device))
    logprob, _, *others = linear_logprob(
        hidden,
        head.weight,
        torch.cat(targets),
        head.bias,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        temperature=temperature,
        valid_vocab=valid_vocab,
        return_lse=True,  # so that the result is always a tuple
        return_entropy=return_entropy,
        return_max=return_greedy,
    )
    outputs = [logprob, *others[:return_entropy], *([logprob == others[-1]] if return_greedy else [])]
    apart = zip(*(each.split([len(target) for target in targets]) for each in outputs), strict=True)
    return [[[next(apart) for _ in state.continuations] for state in states] for _, states in pack]


def _numbers(spans: Sequence[range], device: torch.device) -> Tensor:
    """int64 [n]: the numbers of all spans, concatenated."""
    return torch.cat([torch.arange(span.start, span.stop) for span in spans]).to(device)


def checked(model: CausalLM, requests: Requests, valid_vocab: int) -> list[tuple[Tensor, Branches]]:
    """The ids of (prefix, continuations) pairs as tensors on the model's device.

    Raises as `many_token_ids`, and ValueError for an empty prefix, or more positions than the model has.
    """
    pairs = []
    for prefix, continuations in requests:
        tokens = token_ids("prefix", prefix, model)
        following = many_token_ids("continuations", continuations, model, valid_vocab)
        check_positions(model, len(tokens), max((len(each) - 1 for each in following), default=0))
        pairs.append((tokens, Branches(len(tokens), following)))
    return pairs


_SOUND: dict[bool, WeakSet[nn.Module]] = {False: WeakSet(), True: WeakSet()}
"""Whether in training mode -> the models whose packed forward was compared with a plain one."""


@overload
def shared_prefix_logprobs(
    model: Trainable,
    prefix: Ids,
    continuations: Sequence[Ids],
    *,
    temperature: float = ...,
    valid_vocab: int | None = ...,
    return_entropy: Literal[False] = ...,
) -> list[Tensor]: ...


@overload
def shared_prefix_logprobs(
    model: Trainable,
    prefix: Ids,
    continuations: Sequence[Ids],
    *,
    temperature: float = ...,
    valid_vocab: int | None = ...,
    return_entropy: Literal[True],
) -> list[tuple[Tensor, Tensor]]: ...


def shared_prefix_logprobs(
    model: Trainable,
    prefix: Ids,
    continuations: Sequence[Ids],
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    return_entropy: bool = False,
) -> list[Tensor] | list[tuple[Tensor, Tensor]]:
    """Log-probs of continuations of one prefix for training: one forward that runs the prefix once.

    Gives the same values and parameter gradients as K forwards over prefix + continuation, from P + sum R tokens
    instead of K P + sum R. Gradients also flow through the prefix. `torch.autocast` acts as on the model's own forward.
    With `model.gradient_checkpointing_enable()` and `model.train()`, layers are recomputed in the backward pass. The
    adapters of a PEFT model are active. Under `torch.no_grad()` no activations are kept, and a model of the Llama
    family runs in its native decoder.

    Args:
        model: a transformers causal LM whose attention goes through `AttentionInterface`, or a PEFT model of one; on
            first use, and again in training mode, a packed forward of a few tokens is compared with a plain one.
        prefix: [P] token ids, at least one.
        continuations: K sequences [R_k] of token ids, of any lengths.
        temperature: divides the logits.
        valid_vocab: ids from this one on are padding of the embedding; None if there is no padding.
        return_entropy: also return the entropies, in nats, with gradients.

    Returns:
        one [R_k] per continuation: log p(c_i | prefix, c_<i), in nats, float32 (float64 for a float64 model); with
        return_entropy a pair of it and the entropies [R_k].

    Raises:
        TypeError: not a transformers model, or ids that are not integers.
        ValueError: a model that a packed forward would compute wrongly (refused by name), active dropout or noise, an
            adapter on the LM head or one that acts by token, an empty prefix, an id outside the vocabulary, the wrong
            device, or more positions than the model has.
    """
    return shared_prefix_logprobs_many(  # type: ignore[call-overload, no-any-return]
        model,
        [(prefix, continuations)],
        temperature=temperature,
        valid_vocab=valid_vocab,
        return_entropy=return_entropy,
    )[0]


@overload
def shared_prefix_logprobs_many(
    model: Trainable,
    requests: Requests,
    *,
    temperature: float = ...,
    valid_vocab: int | None = ...,
    return_entropy: Literal[False] = ...,
) -> list[list[Tensor]]: ...


@overload
def shared_prefix_logprobs_many(
    model: Trainable,
    requests: Requests,
    *,
    temperature: float = ...,
    valid_vocab: int | None = ...,
    return_entropy: Literal[True],
) -> list[list[tuple[Tensor, Tensor]]]: ...


def shared_prefix_logprobs_many(
    model: Trainable,
    requests: Requests,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    return_entropy: bool = False,
) -> list[list[Tensor]] | list[list[tuple[Tensor, Tensor]]]:
    """`shared_prefix_logprobs` for several (prefix, continuations) pairs, all in one forward.

    Options, results of each pair and errors are as of `shared_prefix_logprobs`.
    """
    inner = check_trainable(model)
    pack = [(tokens, [branches]) for tokens, branches in checked(inner, requests, valid_ids(valid_vocab, inner))]
    options = {"valid_vocab": valid_vocab, "temperature": temperature, "return_entropy": return_entropy}
    groups = [group for (group,) in forward(inner, pack, **options)]  # type: ignore[arg-type]
    return groups if return_entropy else [[logprob for (logprob,) in group] for group in groups]  # type: ignore[return-value]


def check_trainable(model: Trainable) -> CausalLM:
    """The causal LM, once its packed forward is known to be right; raises as `shared_prefix_logprobs`."""
    inner = causal_lm(model)
    check_supported(inner)
    lm_head(inner)
    if model not in _SOUND[model.training]:
        with torch.autocast(inner.device.type, enabled=False):
            check_packed_forward(inner, model)
        _SOUND[model.training].add(model)
    return inner
