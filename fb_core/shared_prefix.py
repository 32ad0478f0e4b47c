"""Log-probs of continuations behind shared prefixes in one packed forward: each prefix runs once, no logits exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, overload
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fb_core import hf
from fb_kernels import linear_logprob

Ids: TypeAlias = Tensor | Sequence[int]
Requests: TypeAlias = Sequence[tuple[Ids, Sequence[Ids]]]


class Branches(NamedTuple):
    """Continuations [R] behind tokens[:position]; of each the log-probs from its token `first` on are wanted."""

    position: int
    continuations: Sequence[Tensor]
    first: int = 0

    @property
    def rows(self) -> int:
        """What they add to a forward: a continuation's last token is nobody's context."""
        return sum(max(0, len(tokens) - 1) for tokens in self.continuations)


Pack: TypeAlias = Sequence[tuple[Tensor | hf.Prefix, Sequence[Branches]]]
Results: TypeAlias = list[list[list[tuple[Tensor, ...]]]]


def forward(
    model: hf.CausalLM,
    pack: Pack,
    *,
    valid_vocab: int | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_greedy: bool = False,
) -> Results:
    """One packed forward: every trajectory's tokens once, behind them all branches of all its states.

    Args:
        model: a causal LM that `hf.check_supported` lets pass.
        pack: (tokens [T], branches behind them) pairs; or all of them with prefixes that are
            cached in one paged `PrefixKV` instead, then with `first` of 1 or more.
        valid_vocab: as in `linear_logprob`.
        temperature: as in `linear_logprob`.
        return_entropy: also give the entropies.
        return_greedy: also say which tokens are the model's own choice.

    Returns:
        of every pair, of every group, of every continuation (log-prob [R - first], then entropies and bool as asked).
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
        if isinstance(tokens, hf.Prefix):
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
    layout = hf.Layout.build(groups, device, prefix=prefix, pages=pages or None)
    hidden = hf.packed_forward(model, torch.cat(ids), _numbers(positions, device), layout, _numbers(scored, device))
    head = hf.lm_head(model)
    logprob, _, *others = linear_logprob(
        hidden,
        head.weight,
        torch.cat(targets),
        head.bias,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        temperature=temperature,
        valid_vocab=valid_vocab,
        return_lse=True,  # a tuple, whatever is asked
        return_entropy=return_entropy,
        return_max=return_greedy,
    )
    entropies = others[:return_entropy]
    if logprob.requires_grad:
        entropies = [_WithoutGradient.apply(entropy, logprob) for entropy in entropies]
    found = [logprob, *entropies, *([logprob == others[-1]] if return_greedy else [])]
    apart = zip(*(each.split([len(target) for target in targets]) for each in found), strict=True)
    return [[[next(apart) for _ in state.continuations] for state in states] for _, states in pack]


class _WithoutGradient(torch.autograd.Function):
    """An entropy that refuses a backward pass through it: it has no gradient, and no loss may miss that in silence."""

    @staticmethod
    def forward(ctx: Any, entropy: Tensor, logprob: Tensor) -> Tensor:  # depends on what leads to the parameters
        return entropy.view_as(entropy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ValueError(
            "entropy: expected in no loss, since it carries no gradient, got a backward pass through it; detach() it, "
            "or take it from the model's logits"
        )


def _numbers(spans: Sequence[range], device: torch.device) -> Tensor:
    """int64 [n]: all numbers of the spans."""
    return torch.cat([torch.arange(span.start, span.stop) for span in spans]).to(device)


def checked(model: hf.CausalLM, requests: Requests, valid_vocab: int) -> list[tuple[Tensor, Branches]]:
    """The ids of (prefix, continuations) pairs as tensors on the model's device.

    Raises:
        TypeError: ids that are not integers.
        ValueError: an empty prefix, an id outside the vocabulary or in its padding, another device, or more positions
            than the model has.
    """
    pairs = []
    for prefix, continuations in requests:
        tokens = hf.token_ids("prefix", prefix, model)
        behind = hf.many_token_ids("continuations", continuations, model, valid_vocab)
        hf.check_positions(model, len(tokens), max((len(each) - 1 for each in behind), default=0))
        pairs.append((tokens, Branches(len(tokens), behind)))
    return pairs


_SOUND: WeakSet[nn.Module] = WeakSet()  # models whose packed forward was compared with a plain one


@overload
def shared_prefix_logprobs(
    model: hf.Trainable,
    prefix: Ids,
    continuations: Sequence[Ids],
    *,
    temperature: float = ...,
    valid_vocab: int | None = ...,
    return_entropy: Literal[False] = ...,
) -> list[Tensor]: ...


@overload
def shared_prefix_logprobs(
    model: hf.Trainable,
    prefix: Ids,
    continuations: Sequence[Ids],
    *,
    temperature: float = ...,
    valid_vocab: int | None = ...,
    return_entropy: Literal[True],
) -> list[tuple[Tensor, Tensor]]: ...


def shared_prefix_logprobs(
    model: hf.Trainable,
    prefix: Ids,
    continuations: Sequence[Ids],
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    return_entropy: bool = False,
) -> list[Tensor] | list[tuple[Tensor, Tensor]]:
    """Log-probs of continuations behind one prefix for training: one forward that runs the prefix once.

    What K forwards over prefix + continuation give, values and parameters' gradients alike, from P + sum R tokens
    instead of K P + sum R. Gradients also go through the prefix. Under `torch.autocast` as the model's own forward;
    with `model.gradient_checkpointing_enable()` and `model.train()` layers are run anew in the backward pass; adapters
    of a PEFT model are active. Under `torch.no_grad()` nothing is kept and a model of the Llama family runs in its
    native decoder.

    Args:
        model: a transformers causal LM whose attention goes through `AttentionInterface`, or a PEFT model of one; on
            first sight a packed forward of a few tokens is compared with a plain one.
        prefix: [P] token ids, at least one.
        continuations: K sequences [R_k] of token ids, each of its own length.
        temperature: divides the logits.
        valid_vocab: ids from here on are padding of the embedding; None for none.
        return_entropy: also give the entropies, in nats; a backward pass through them is refused, since they carry no
            gradient.

    Returns:
        one [R_k] a continuation: log p(c_i | prefix, c_<i), in nats, float32 (float64 for a float64 model); with
        return_entropy pairs of it and the entropies [R_k].

    Raises:
        TypeError: not a transformers model, or ids that are not integers.
        ValueError: a model that packing would get wrong (refused by name), active dropout, an adapter on the LM head,
            an empty prefix, an id outside the vocabulary, another device, or more positions than the model has.
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
    model: hf.Trainable,
    requests: Requests,
    *,
    temperature: float = ...,
    valid_vocab: int | None = ...,
    return_entropy: Literal[False] = ...,
) -> list[list[Tensor]]: ...


@overload
def shared_prefix_logprobs_many(
    model: hf.Trainable,
    requests: Requests,
    *,
    temperature: float = ...,
    valid_vocab: int | None = ...,
    return_entropy: Literal[True],
) -> list[list[tuple[Tensor, Tensor]]]: ...


def shared_prefix_logprobs_many(
    model: hf.Trainable,
    requests: Requests,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    return_entropy: bool = False,
) -> list[list[Tensor]] | list[list[tuple[Tensor, Tensor]]]:
    """`shared_prefix_logprobs` of several prefixes, all in one forward.

    Args:
        model: as there.
        requests: (prefix, continuations) pairs.
        temperature: as there.
        valid_vocab: as there.
        return_entropy: as there.

    Returns:
        for every request what `shared_prefix_logprobs` returns.

    Raises:
        TypeError: as there.
        ValueError: as there.
    """
    inner = check_trainable(model)
    pack = [(tokens, [branches]) for tokens, branches in checked(inner, requests, hf.valid_ids(valid_vocab, inner))]
    options = {"valid_vocab": valid_vocab, "temperature": temperature, "return_entropy": return_entropy}
    found = [group for (group,) in forward(inner, pack, **options)]  # type: ignore[arg-type]
    return found if return_entropy else [[logprob for (logprob,) in group] for group in found]  # type: ignore[return-value]


def check_trainable(model: hf.Trainable) -> hf.CausalLM:
    """The causal LM, whose packed forward is known to be right; raises as `shared_prefix_logprobs`."""
    inner = hf.causal_lm(model)
    hf.check_supported(inner)
    head = inner.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        got = f"{type(head).__name__} in {type(inner).__name__}"
        raise ValueError(f"model: expected a plain LM head, got {got}; keep adapters off it")
    if inner not in _SOUND:
        with torch.autocast(inner.device.type, enabled=False):
            hf.check_packed_forward(inner)
        _SOUND.add(inner)
    return inner
