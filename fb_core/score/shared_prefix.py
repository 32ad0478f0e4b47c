"""Log-probs of continuations of shared prefixes in one packed forward: each prefix runs once, no logits are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias, overload
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fb_core.models.facts import CausalLM, Trainable, causal_lm, lm_head, valid_ids
from fb_core.models.packed import (
    Layout,
    Prefix,
    check_packed_forward,
    check_supported,
    packed_forward,
    sharded,
    through,
    unwrapped,
)
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


@dataclass(eq=False)
class Run:
    """Tokens that follow the first `offset` of its parent's, and rows of a packed forward."""

    tokens: list[int]
    start: int  # position of the first one
    parent: Run | None
    offset: int
    children: dict[tuple[int, int], Run] = field(default_factory=dict)  # by offset and first token
    row: int = 0  # of the first one

    def path(self, count: int) -> list[range]:
        """The rows from the beginning to the first `count` of its own, those that lie together as one range."""
        run, parts = self, list[range]()
        while True:
            parts.append(range(run.row, run.row + count))
            if run.parent is None:
                break
            run, count = run.parent, run.offset
        path = list[range]()
        for part in reversed(parts):
            joined = bool(path) and path[-1].stop == part.start
            path[len(path) - joined :] = [range(path[-1].start if joined else part.start, part.stop)]
        return path


class Tree:
    """Sequences of which each token that several begin with is there once; a prefix is one run, if it is the first."""

    def __init__(self) -> None:
        self.roots: dict[int, Run] = {}  # by first token
        self.rows = 0

    def add(self, prefix: Tensor, branches: Branches) -> list[tuple[Run, int, int]]:
        """(run, first, last) of the tokens that are followed by a scored one, of each continuation in turn."""
        lengths = [len(each) for each in branches.continuations]
        known = prefix.tolist()
        self._insert(known)
        flat, spans = torch.cat((prefix[:0], *branches.continuations)).tolist(), list[tuple[Run, int, int]]()
        for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
            if length:
                least = len(known) - 1
                for run, count in self._insert(known + flat[start : start + length - 1]):
                    if run.start + count > least:
                        spans.append((run, max(0, least - run.start), count))
        return spans

    def _insert(self, tokens: list[int]) -> list[tuple[Run, int]]:
        """The runs of a sequence from its beginning, and how many tokens of each."""
        found, place, parent = list[tuple[Run, int]](), 0, None
        while place < len(tokens):
            offset = found[-1][1] if found else 0
            owner = self.roots if parent is None else parent.children
            key: Any = tokens[place] if parent is None else (offset, tokens[place])
            if (run := owner.get(key)) is None:  # type: ignore[call-overload]
                run = owner[key] = Run(tokens[place:], place, parent, offset)  # type: ignore[index]
                self.rows += len(run.tokens)
            count = _common(run.tokens, tokens, place)
            found.append((run, count))
            place, parent = place + count, run
        return found

    def runs(self) -> list[Run]:
        """All of them, the children of a place next to each other."""
        runs = list(self.roots.values())
        for run in runs:  # which grows
            runs += [child for _, child in sorted(run.children.items(), key=lambda item: item[0][0])]
        return runs

    @staticmethod
    def places(runs: Sequence[Run]) -> dict[tuple[Run | None, int], list[Run]]:
        """The runs that follow each place, in their order; those without a parent have a place each."""
        places: dict[tuple[Run | None, int], list[Run]] = {}
        for run in runs:
            places.setdefault((run.parent, run.offset if run.parent else run.row), []).append(run)
        return places


def _common(tokens: list[int], others: list[int], place: int) -> int:
    """How many of the tokens are those from a place of the others on."""
    most = min(len(tokens), len(others) - place)
    if tokens[:most] == others[place : place + most]:
        return most
    return next(i for i in range(most) if tokens[i] != others[place + i])


Pack: TypeAlias = Sequence[tuple[Tensor | Prefix, Sequence[Branches]]]
Group: TypeAlias = list[tuple[Tensor, ...]]
Results: TypeAlias = list[list[Group]]


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
    apart = _scores(
        model,
        torch.cat(ids),
        positions,
        layout,
        scored,
        targets,
        valid_vocab=valid_vocab,
        temperature=temperature,
        return_entropy=return_entropy,
        return_greedy=return_greedy,
    )
    return [[[next(apart) for _ in state.continuations] for state in states] for _, states in pack]


def forward_tree(model: CausalLM, requests: Sequence[tuple[Tensor, Branches]], **options: Any) -> list[Group]:
    """One packed forward of (prefix, continuations) pairs in which every beginning that several share runs once.

    Options are as of `forward`; returns for each pair and continuation (log-prob [R], then entropies and bool, as
    requested).
    """
    tree, device = Tree(), model.device
    spans = [tree.add(*request) for request in requests]
    targets = [each for _, branches in requests for each in branches.continuations]
    if not targets:
        return [[] for _ in requests]
    runs = tree.runs()
    for run, row in zip(runs, accumulate((len(run.tokens) for run in runs), initial=0), strict=False):
        run.row = row
    places = tree.places(runs)
    paths = [[] if parent is None else parent.path(offset) for parent, offset in places]
    depths = [sum(map(len, path)) for path in paths]
    whole = all(len(path) < 2 for path in paths)  # then each prefix is a slice of the rows
    firsts = [path[0].start if path else 0 for path in paths]
    starts = firsts if whole else [*accumulate(depths, initial=0)][:-1]
    lengths = [[len(child.tokens) for child in children] for children in places.values()]
    gathered = None if whole else _numbers([part for path in paths for part in path], device)
    layout = Layout.build([*zip(lengths, starts, depths, strict=True)], device, paths=gathered)
    ids = torch.tensor([token for run in runs for token in run.tokens], device=device)
    positions = [range(run.start, run.start + len(run.tokens)) for run in runs]
    scored = [range(run.row + first, run.row + last) for own in spans for run, first, last in own]
    apart = _scores(model, ids, positions, layout, scored, targets, **options)
    return [[next(apart) for _ in branches.continuations] for _, branches in requests]


def tree_packs(requests: Sequence[tuple[Tensor, Branches]], budget: int) -> Iterator[slice]:
    """Requests that follow one another, in packs of at most so many distinct rows; a larger one is alone."""
    first, tree = 0, Tree()
    for index, request in enumerate(requests):
        tree.add(*request)
        if tree.rows > budget and index > first:
            yield slice(first, index)
            first, tree = index, Tree()
            tree.add(*request)
    if requests:
        yield slice(first, len(requests))


def _scores(
    model: CausalLM,
    ids: Tensor,
    positions: Sequence[range],
    layout: Layout,
    scored: Sequence[range],
    targets: list[Tensor],
    *,
    valid_vocab: int | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_greedy: bool = False,
) -> Iterator[tuple[Tensor, ...]]:
    """Of each list of targets (log-prob, then entropies and bool, as requested), at the scored rows."""
    head, device = lm_head(model), model.device
    hidden = packed_forward(model, ids, _numbers(positions, device), layout, _numbers(scored, device))
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
    return zip(*(each.split([len(target) for target in targets]) for each in outputs), strict=True)


def _numbers(spans: Sequence[range], device: torch.device) -> Tensor:
    """int64 [n]: the numbers of all spans, concatenated."""
    return torch.cat([torch.arange(0), *(torch.arange(span.start, span.stop) for span in spans)]).to(device)


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
    adapters of a PEFT model are active. Under `torch.no_grad()` no activations are kept. A model of the Llama family
    runs in its native decoder without gradients, and where only LoRA learns; then both have the same bits on a CPU.

    Args:
        model: a transformers causal LM whose attention goes through `AttentionInterface`, or a PEFT model of one, also
            in DistributedDataParallel, in an engine of DeepSpeed (stages 1 and 2) or sharded by FSDP2: pass the
            outermost. On first use, and again in training mode, a packed forward of a few tokens is compared with a
            plain one.
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

    A beginning that several prefixes or continuations share runs once, at any depth. Options, results of each pair and
    errors are as of `shared_prefix_logprobs`.
    """
    inner = check_trainable(model)
    pairs = checked(inner, requests, valid_ids(valid_vocab, inner))
    options = {"valid_vocab": valid_vocab, "temperature": temperature, "return_entropy": return_entropy}
    groups = through(model, partial(forward_tree, inner, pairs, **options))
    return groups if return_entropy else [[logprob for (logprob,) in group] for group in groups]  # type: ignore[return-value]


def check_trainable(model: Trainable) -> CausalLM:
    """The causal LM, once its packed forward is known to be right; raises as `shared_prefix_logprobs`."""
    inner = causal_lm(unwrapped(model))

    def check() -> None:
        check_supported(inner)
        lm_head(inner)

    if sharded(unwrapped(model)):
        through(model, check)
    else:
        check()
    if model not in _SOUND[model.training]:
        with torch.autocast(inner.device.type, enabled=False):
            check_packed_forward(inner, model)
        _SOUND[model.training].add(model)
    return inner
