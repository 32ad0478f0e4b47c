"""CompatibilityScorer: teacher-forces continuations of shared prefixes, many in one packed forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args, overload

import torch
from torch import Tensor

from fb_core._util import check_count
from fb_core.models.facts import Cache, CausalLM, Tokenizer, free_memory, text_config, valid_ids
from fb_core.models.packed import cached_prefix, check_packed_forward, check_supported, packs
from fb_core.models.tokens import check_group, check_position, text_group, token_ids
from fb_core.score import shared_prefix
from fb_core.score.shared_prefix import Branches, Ids, Pack, Requests, Results

TOKEN_BUDGET = 16_384
LEAST_BUDGET, MOST_BUDGET = 1024, 65_536  # more rows gain nothing
OUT_OF_MEMORY = ("can't allocate memory", "could not create a primitive", "out of memory", "STATUS_ALLOC_FAILED")
ROW_STATISTICS = 8192  # bytes a row in linear_logprob, about


@dataclass(frozen=True)
class BranchGroup:
    """The candidates of one state of a trajectory and the future that they share."""

    position: int  # the prefix is tokens[:position] of its trajectory
    candidates: Tensor  # [K] token ids, no two alike
    future: Tensor  # [H] token ids that follow every candidate


Reduction: TypeAlias = Literal["mean", "sum", "none"]
Trajectories: TypeAlias = Sequence[tuple[Tensor | Sequence[int], Sequence[BranchGroup]]]


class CompatibilityScorer:
    """Log-likelihoods of continuations of shared prefixes, such as candidates with one future, under a frozen LM.

    l[k, h] = log p(f_h | prefix, c_k, f_<h). The trajectory and all branches [c_k, f_1 .. f_(H-1)] of its states run as
    packed rows of one forward. Each decoder layer runs once, with one `branch_attention` whose prefix is the
    trajectory's own keys and values; no cache is copied and no logits are stored. Llama, Mistral, Mixtral, Qwen2, Qwen3
    and Qwen3-MoE run in the native decoder (`fb_core.models.native`), which moves weights that are multiplied together
    next to each other in memory; nothing else about the model changes. Safe to share between threads.

    Args:
        model: a transformers causal LM (Qwen3, Qwen2, Llama, Mistral, Phi3, Gemma2 and others whose attention goes
            through `AttentionInterface`).
        valid_vocab: ids from this one on are padding of the embedding: they cannot be candidates or targets and get no
            probability. If left out, those that the tokenizer does not know, or none without a tokenizer.
        tokenizer: the model's own, needed for `score_texts`; None if only token ids are scored.

    Raises:
        TypeError: not a transformers model, a valid_vocab that is not an int, or not a transformers tokenizer.
        ValueError: a model that a packed forward would compute wrongly (refused by name), one whose logits are NaN, or
            valid_vocab out of range.
    """

    def __init__(self, model: CausalLM, *, valid_vocab: int | None = None, tokenizer: Tokenizer | None = None) -> None:
        check_supported(model)
        if not isinstance(tokenizer, Tokenizer | None):
            raise TypeError(
                f"tokenizer: expected one of transformers, got {type(tokenizer).__name__}; use AutoTokenizer"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.valid_vocab = valid_ids(valid_vocab, model, tokenizer)
        check_packed_forward(model)

    def score(
        self,
        prefix: Tensor | Sequence[int],
        candidates: Tensor | Sequence[int],
        future: Tensor | Sequence[int],
        cache: Cache | None = None,
    ) -> Tensor:
        """Score one group.

        Args:
            prefix: [P] token ids, at least one.
            candidates: [K] token ids, no two alike.
            future: [H] token ids, at least one.
            cache: a Hugging Face cache that holds exactly the prefix and no other sequence; it is read, not changed.

        Returns:
            float32 [K, H]: log p(f_h | prefix, c_k, f_<h), in nats.

        Raises:
            TypeError: ids that are not integers.
            ValueError: an empty argument, a candidate given twice, an id outside the vocabulary or in its padding, the
                wrong device, more positions than the model has, a cache of another length, model or batch, or active
                dropout.
        """
        tokens = token_ids("prefix", prefix, self.model)
        branches = self._check_group(BranchGroup(len(tokens), candidates, future), len(tokens))  # type: ignore[arg-type]
        held = tokens if cache is None else cached_prefix(cache, self.model, len(tokens))
        return _matrix(self._forward([(held, [branches])])[0][0])

    def score_trajectory(self, tokens: Tensor | Sequence[int], groups: Sequence[BranchGroup]) -> list[Tensor]:
        """Score all groups of one trajectory in one forward; raises as `score`.

        Args:
            tokens: [T] token ids of prompt and output.
            groups: states of this trajectory, at positions from 1 to T; the prefix of each is tokens[:position].

        Returns:
            one float32 [K, H] per group, in nats.
        """
        return self.score_trajectories([(tokens, groups)])[0]

    @overload
    def score_trajectories(
        self, trajectories: Trajectories, token_budget: int = ..., *, return_local: Literal[False] = ...
    ) -> list[list[Tensor]]: ...

    @overload
    def score_trajectories(
        self, trajectories: Trajectories, token_budget: int = ..., *, return_local: Literal[True]
    ) -> list[list[tuple[Tensor, Tensor]]]: ...

    def score_trajectories(
        self, trajectories: Trajectories, token_budget: int = TOKEN_BUDGET, *, return_local: bool = False
    ) -> list[list[Tensor]] | list[list[tuple[Tensor, Tensor]]]:
        """Score many trajectories, several of them packed into each forward; raises as `score`, before the first.

        A forward that runs out of memory is halved and tried again, down to a single continuation.

        Args:
            trajectories: (tokens[T], groups) pairs as for `score_trajectory`.
            token_budget: maximum rows of a forward; a longer trajectory runs alone.
            return_local: also return log p(c_k | prefix) of every candidate.

        Returns:
            for each trajectory one float32 [K, H] per group, in nats; with return_local a pair of it and float32 [K].
        """
        checked = []
        for tokens, groups in trajectories:
            ids = token_ids("tokens", tokens, self.model)
            kept = [self._check_group(group, len(ids)) for group in groups]
            if return_local:
                kept = [group._replace(first=0) for group in kept]
            checked.append((ids[: max((group.position for group in kept), default=0)], kept))
        matrices = [[_matrix(outputs) for outputs in groups] for groups in self._packed(checked, token_budget)]
        if not return_local:
            return matrices
        return [[(whole[:, 1:].contiguous(), whole[:, 0].contiguous()) for whole in groups] for groups in matrices]

    def score_texts(
        self, prefix: str, candidates: Sequence[str], future: str, *, reduction: Reduction = "mean"
    ) -> Tensor:
        """Score one group of texts: how likely the future is after prefix and candidate.

        prefix + candidate + future is tokenized as one text. The tokenizer's special tokens are added before it (unless
        the prefix begins with them, as a chat template's does) and none after it. Candidate and future must begin at a
        token boundary, so a leading space belongs to the word that it precedes. A text that begins inside a token is
        refused, and so is a future whose tokens are not the same after every candidate. A candidate may have any number
        of tokens.

        Args:
            prefix: the text before every candidate.
            candidates: K texts.
            future: the text after each candidate, H tokens.
            reduction: "mean" or "sum" over the future's tokens, or "none".

        Returns:
            float32 [K], in nats (per token for "mean"); [K, H] for "none".

        Raises:
            TypeError: arguments that are not texts.
            ValueError: no tokenizer, an unknown reduction, texts that are refused, more positions than the model has,
                or active dropout.
        """
        return self._score_texts([(prefix, candidates, future)], TOKEN_BUDGET, reduction, [""])[0]

    def score_texts_many(
        self,
        groups: Sequence[tuple[str, Sequence[str], str]],
        token_budget: int = TOKEN_BUDGET,
        *,
        reduction: Reduction = "mean",
    ) -> list[Tensor]:
        """`score_texts` for many (prefix, candidates, future) groups, several of them packed into each forward.

        `token_budget` is as for `logprobs_many`, all else as for `score_texts`; everything is checked before the first
        forward.
        """
        return self._score_texts(groups, token_budget, reduction, [f"groups[{n}]." for n in range(len(groups))])

    def _score_texts(
        self,
        groups: Sequence[tuple[str, Sequence[str], str]],
        token_budget: int,
        reduction: Reduction,
        names: Sequence[str],
    ) -> list[Tensor]:
        if reduction not in get_args(Reduction):
            raise ValueError(f"reduction: expected mean, sum or none, got {reduction!r}; leave it out for mean")
        if self.tokenizer is None:
            raise ValueError("tokenizer: expected one to score texts, got None; pass it to CompatibilityScorer")
        parts = [text_group(self.tokenizer, *group, name) for group, name in zip(groups, names, strict=True)]
        requests = [(ids.prefix, [[*each, *ids.future] for each in ids.candidates]) for ids in parts]
        matrices = [
            torch.stack([row[len(each) :] for row, each in zip(rows, ids.candidates, strict=True)])
            for rows, ids in zip(self.logprobs_many(requests, token_budget), parts, strict=True)
        ]
        if reduction == "none":
            return matrices
        return [matrix.mean(1) if reduction == "mean" else matrix.sum(1) for matrix in matrices]

    @overload
    def logprobs(
        self,
        prefix: Ids,
        continuations: Sequence[Ids],
        *,
        return_entropy: Literal[False] = ...,
        return_greedy: Literal[False] = ...,
    ) -> list[Tensor]: ...

    @overload
    def logprobs(
        self, prefix: Ids, continuations: Sequence[Ids], *, return_entropy: bool = ..., return_greedy: bool = ...
    ) -> list[Tensor] | list[tuple[Tensor, ...]]: ...

    def logprobs(
        self, prefix: Ids, continuations: Sequence[Ids], *, return_entropy: bool = False, return_greedy: bool = False
    ) -> list[Tensor] | list[tuple[Tensor, ...]]:
        """Log-probs of continuations of one prefix, of any lengths, in one forward.

        Computes log p(c_i | prefix, c_<i) for every token of every continuation. `score` is the special case of
        candidates that share one future. A continuation of one token adds no row to the forward.

        Args:
            prefix: [P] token ids, at least one.
            continuations: K sequences [R_k] of token ids, of any lengths; K and R_k may be 0.
            return_entropy: also return the entropy of the distribution at each token, in nats.
            return_greedy: also return which tokens are the likeliest under their distribution (ties count).

        Returns:
            one float32 [R_k] per continuation, in nats; with a flag, a tuple of it and, as requested, the entropies
            float32 [R_k] and the greedy flags bool [R_k].

        Raises:
            TypeError: ids that are not integers.
            ValueError: an empty prefix, an id outside the vocabulary or in its padding, the wrong device, more
                positions than the model has, or active dropout.
        """
        asked = {"return_entropy": return_entropy, "return_greedy": return_greedy}
        return self.logprobs_many([(prefix, continuations)], **asked)[0]

    @overload
    def logprobs_many(
        self,
        requests: Requests,
        token_budget: int = ...,
        *,
        return_entropy: Literal[False] = ...,
        return_greedy: Literal[False] = ...,
    ) -> list[list[Tensor]]: ...

    @overload
    def logprobs_many(
        self, requests: Requests, token_budget: int = ..., *, return_entropy: bool = ..., return_greedy: bool = ...
    ) -> list[list[Tensor]] | list[list[tuple[Tensor, ...]]]: ...

    def logprobs_many(
        self,
        requests: Requests,
        token_budget: int = TOKEN_BUDGET,
        *,
        return_entropy: bool = False,
        return_greedy: bool = False,
    ) -> list[list[Tensor]] | list[list[tuple[Tensor, ...]]]:
        """`logprobs` for many (prefix, continuations) pairs, several of them packed into each forward.

        What several of a forward begin with runs once, at any depth: the examples of a few-shot task, a system prompt.
        Flags, results and errors are as of `logprobs`; everything is checked before the first forward. A forward that
        runs out of memory is halved and tried again, down to a single continuation. A request of more than
        `token_budget` rows is split over several forwards; each repeats the prefix and has room for at least as many
        rows of continuations as the prefix has.
        """
        pieces, cut = [], []
        for tokens, whole in shared_prefix.checked(self.model, requests, self.valid_vocab):
            rows = [max(0, len(each) - 1) for each in whole.continuations]
            parts = packs(rows, max(token_budget - len(tokens), len(tokens))) or [(0, 0)]
            pieces += [(tokens, Branches(len(tokens), whole.continuations[slice(*part)])) for part in parts]
            cut.append(len(parts))
        check_count("token_budget", token_budget, 1, f"leave it out for {TOKEN_BUDGET}", "{} row or more")
        forward = partial(self._forward_tree, return_entropy=return_entropy, return_greedy=return_greedy)
        results: Results = []
        for pack in shared_prefix.tree_packs(pieces, token_budget):
            results += _in_halves(forward, [(tokens, [own]) for tokens, own in pieces[pack]])
        apart = iter([group for (group,) in results])
        each = [[_float32(outputs) for _ in range(count) for outputs in next(apart)] for count in cut]
        return each if return_entropy or return_greedy else [[logprob for (logprob,) in group] for group in each]

    def _check_group(self, group: BranchGroup, length: int) -> Branches:
        future = token_ids("future", group.future, self.model, self.valid_vocab)
        if len(future) == 0:
            raise ValueError("future: expected at least one token id, got none; give the continuation to be scored")
        position = check_position(group.position, length)
        candidates = check_group(self.model, position, group.candidates, len(future), self.valid_vocab)
        return Branches(position, torch.cat([candidates[:, None], future.expand(len(candidates), -1)], 1).unbind(), 1)

    def _packed(self, work: Sequence[tuple[Tensor, Sequence[Branches]]], budget: int, **asked: bool) -> Results:
        """The results of any amount of work, computed one forward at a time."""
        check_count("token_budget", budget, 1, f"leave it out for {TOKEN_BUDGET}", "{} row or more")
        rows = [len(tokens) + sum(group.rows for group in groups) for tokens, groups in work]
        results: Results = []
        for start, stop in packs(rows, budget):
            results.extend(_in_halves(lambda pack: self._forward(pack, **asked), work[start:stop]))
        return results

    @torch.no_grad()
    def _forward(self, pack: Pack, **asked: bool) -> Results:
        return shared_prefix.forward(self.model, pack, valid_vocab=self.valid_vocab, **asked)

    @torch.no_grad()
    def _forward_tree(self, pack: Pack, **asked: bool) -> Results:
        """Of tokens with one group of continuations each."""
        pairs: Any = [(tokens, own) for tokens, (own,) in pack]
        return [[each] for each in shared_prefix.forward_tree(self.model, pairs, valid_vocab=self.valid_vocab, **asked)]


def _in_halves(forward: Callable[[Pack], Results], pack: Pack) -> Results:
    """A forward's results; if it runs out of memory, of its halves, down to a single continuation."""
    try:
        return forward(pack)
    except (RuntimeError, MemoryError) as problem:
        out_of_memory = isinstance(problem, torch.OutOfMemoryError | MemoryError)
        if not out_of_memory and not any(words in str(problem) for words in OUT_OF_MEMORY):
            raise
        if sum(len(group.continuations) for _, groups in pack for group in groups) < 2:
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if len(pack) > 1:
        half = len(pack) // 2
        return _in_halves(forward, pack[:half]) + _in_halves(forward, pack[half:])
    ((tokens, groups),) = pack
    if len(groups) > 1:
        half = len(groups) // 2
        parts = [_in_halves(forward, [(tokens, part)])[0] for part in (groups[:half], groups[half:])]
        return [parts[0] + parts[1]]
    ((position, continuations, first),) = groups
    half = len(continuations) // 2
    halves = (Branches(position, part, first) for part in (continuations[:half], continuations[half:]))
    return [[[each for half in halves for each in _in_halves(forward, [(tokens, [half])])[0][0]]]]


def _matrix(outputs: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """float32 [K, R] of K continuations of one length."""
    return torch.stack([logprob for logprob, *_ in outputs]).float()


def _float32(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.float() if each.is_floating_point() else each for each in outputs)


def token_budget(model: CausalLM) -> int:
    """The rows of a packed forward that fit in half the memory that is free now; 1,024 to 65,536."""
    config = text_config(model)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    live = 6 * config.hidden_size + 3 * config.intermediate_size + 2 * (heads + 2 * kv_heads) * width
    row = live * model.dtype.itemsize + ROW_STATISTICS
    return max(LEAST_BUDGET, min(MOST_BUDGET, int(0.5 * free_memory(model.device) / row)))
