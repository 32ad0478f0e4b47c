"""CompatibilityScorer: teacher-force one shared future behind every candidate, in one packed forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor

from fb_core import hf
from fb_kernels import linear_logprob

TOKEN_BUDGET = 16_384
LEAST_BUDGET, MOST_BUDGET = 1024, 65_536  # more rows gain nothing
OUT_OF_MEMORY = ("can't allocate memory", "could not create a primitive", "out of memory", "STATUS_ALLOC_FAILED")
ROW_STATISTICS = 8192  # bytes a row in linear_logprob, about


@dataclass(frozen=True)
class BranchGroup:
    """The candidates of one state of a trajectory and the future that they share.

    Attributes:
        position: the state's prefix is tokens[:position] of its trajectory.
        candidates: [K] token ids, no two alike.
        future: [H] token ids that follow every candidate.
    """

    position: int
    candidates: Tensor
    future: Tensor


Trajectories: TypeAlias = Sequence[tuple[Tensor | Sequence[int], Sequence[BranchGroup]]]


class CompatibilityScorer:
    """Log-likelihoods of a shared future behind candidate tokens, under a frozen causal LM.

    l[k, h] = log p(f_h | prefix, c_k, f_<h). The trajectory and all branches [c_k, f_1 .. f_(H-1)] of its states run as
    packed rows of one forward: every decoder layer once, one `branch_attention` a layer with the trajectory's own keys
    and values as the prefix, no copied cache and no logits. Llama, Mistral, Qwen2 and Qwen3 run in the native decoder
    (`fb_core.native`), which lays weights that are multiplied together side by side in memory; nothing else about the
    model changes. Safe to share between threads.

    Args:
        model: a transformers causal LM (Qwen3, Qwen2, Llama, Mistral, Phi3, Gemma2 and others whose attention goes
            through `AttentionInterface`).
        valid_vocab: ids from here on are padding of the embedding: they are no candidate and no target, and take no
            probability; None for none.

    Raises:
        TypeError: not a transformers model, or valid_vocab no int.
        ValueError: a model that packing would get wrong (refused by name), one whose logits are NaN, or valid_vocab out
            of range.
    """

    def __init__(self, model: hf.CausalLM, *, valid_vocab: int | None = None) -> None:
        hf.check_supported(model)
        self.model = model
        self.valid_vocab = hf.valid_ids(valid_vocab, model)
        hf.check_packed_forward(model)

    def score(
        self,
        prefix: Tensor | Sequence[int],
        candidates: Tensor | Sequence[int],
        future: Tensor | Sequence[int],
        cache: hf.Cache | None = None,
    ) -> Tensor:
        """Score one group.

        Args:
            prefix: [P] token ids, at least one.
            candidates: [K] token ids, no two alike.
            future: [H] token ids, at least one.
            cache: a Hugging Face cache that holds exactly the prefix and no other sequence; read, left as it was.

        Returns:
            float32 [K, H]: log p(f_h | prefix, c_k, f_<h), in nats.

        Raises:
            TypeError: ids that are not integers.
            ValueError: an empty argument, a candidate given twice, an id outside the vocabulary or in its padding,
                another device, more positions than the model has, a cache of another length, model or batch, or active
                dropout.
        """
        tokens = hf.token_ids("prefix", prefix, self.model)
        group = self._check_group(BranchGroup(len(tokens), candidates, future), len(tokens))  # type: ignore[arg-type]
        if cache is None:
            return self._forward([(tokens, [group])])[0][0][0]
        held = hf.cached_prefix(cache, self.model, len(tokens))
        return self._forward([(held, [group])])[0][0][0]

    def score_trajectory(self, tokens: Tensor | Sequence[int], groups: Sequence[BranchGroup]) -> list[Tensor]:
        """Score all groups of one trajectory in one forward.

        Args:
            tokens: [T] token ids of prompt and output.
            groups: states of this trajectory; the prefix of each is tokens[:position].

        Returns:
            one float32 [K, H] a group, in nats.

        Raises:
            TypeError: as `score`.
            ValueError: as `score`, or a position outside 1..T.
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
        """Score many trajectories, several of them packed into each forward.

        Where memory runs out a forward is halved and tried again, down to a single group.

        Args:
            trajectories: (tokens[T], groups) pairs as for `score_trajectory`.
            token_budget: rows a forward takes at most; a longer trajectory goes alone.
            return_local: also give log p(c_k | prefix) of every candidate.

        Returns:
            for every trajectory one float32 [K, H] a group, in nats; with return_local pairs of it and float32 [K].

        Raises:
            TypeError: as `score`.
            ValueError: as `score_trajectory`; everything is checked before the first forward.
        """
        if not token_budget >= 1:
            raise ValueError(
                f"token_budget: expected 1 row or more, got {token_budget}; leave it out for {TOKEN_BUDGET}"
            )
        checked = []
        for tokens, groups in trajectories:
            ids = hf.token_ids("tokens", tokens, self.model)
            kept = [self._check_group(group, len(ids)) for group in groups]
            checked.append((ids[: max((group.position for group in kept), default=0)], kept))
        results: list[list[tuple[Tensor, Tensor]]] = []
        for start, stop in hf.packs([_rows(*pair) for pair in checked], token_budget):
            results.extend(self._forward_in_halves(checked[start:stop], return_local))
        return results if return_local else [[matrix for matrix, _ in scores] for scores in results]

    def _check_group(self, group: BranchGroup, length: int) -> BranchGroup:
        future = hf.token_ids("future", group.future, self.model)
        if len(future) == 0:
            raise ValueError("future: expected at least one token id, got none; give the continuation to be scored")
        position = hf.check_position(group.position, length)
        checked = BranchGroup(position, hf.check_group(self.model, position, group.candidates, len(future)), future)
        for name, ids in (("candidates", checked.candidates), ("future", checked.future)):
            if self.valid_vocab < hf.vocabulary(self.model) and int(ids.max()) >= self.valid_vocab:
                raise ValueError(
                    f"{name}: expected ids from 0 below {self.valid_vocab}, got {int(ids.max())}; use the tokenizer's "
                    "own, or make the scorer with another valid_vocab"
                )
        return checked

    def _forward_in_halves(
        self, pack: Sequence[tuple[Tensor, Sequence[BranchGroup]]], local: bool
    ) -> list[list[tuple[Tensor, Tensor]]]:
        """`_forward`, in as many parts as memory wants."""
        try:
            return self._forward(pack, local)
        except (RuntimeError, MemoryError) as problem:
            known = isinstance(problem, torch.OutOfMemoryError | MemoryError)
            if not known and not any(words in str(problem) for words in OUT_OF_MEMORY):
                raise
            if len(pack) == 1 and len(pack[0][1]) < 2:
                raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(pack) > 1:
            half = len(pack) // 2
            return self._forward_in_halves(pack[:half], local) + self._forward_in_halves(pack[half:], local)
        ((tokens, groups),) = pack
        half = len(groups) // 2
        first, second = (self._forward_in_halves([(tokens, part)], local)[0] for part in (groups[:half], groups[half:]))
        return [first + second]

    @torch.no_grad()
    def _forward(
        self, trajectories: Sequence[tuple[Tensor | hf.Prefix, Sequence[BranchGroup]]], local: bool = False
    ) -> list[list[tuple[Tensor, Tensor]]]:
        """One packed forward: ([K, H], log p(c | prefix) [K] if `local`, else [0]) of every group.

        A trajectory is given by its tokens, or, then alone and without `local`, by its cached prefix.
        """
        device = self.model.device
        ids: list[Tensor] = []
        positions: list[Tensor] = []
        targets: list[Tensor] = []
        scored: list[Tensor] = []
        layout: list[tuple[list[int], int, int]] = []
        prefix = None
        row = 0
        for tokens, groups in trajectories:
            start = row
            if isinstance(tokens, hf.Prefix):
                prefix, start = tokens.kv, tokens.start
            else:
                layout.append(([len(tokens)], 0, 0))
                ids.append(tokens)
                positions.append(torch.arange(len(tokens), device=device))
                row += len(tokens)
            for group in groups:
                k, h = len(group.candidates), len(group.future)
                body = group.future[:-1].expand(k, h - 1)
                ids.append(torch.cat([group.candidates[:, None], body], 1).reshape(-1))
                positions.append(torch.arange(group.position, group.position + h, device=device).repeat(k))
                targets.append(group.future.repeat(k))
                scored.append(torch.arange(row, row + k * h, device=device))
                if local:
                    targets.append(group.candidates)
                    scored.append(torch.full((k,), start + group.position - 1, device=device))
                layout.append(([h] * k, start, group.position))
                row += k * h
        if not any(groups for _, groups in trajectories):
            return [[] for _ in trajectories]
        packed = hf.Layout.build(layout, device, prefix=prefix, pages=None if prefix is None else [0] * len(layout))
        hidden = hf.packed_forward(self.model, torch.cat(ids), torch.cat(positions), packed, rows=torch.cat(scored))
        head = hf.lm_head(self.model)
        logprob = linear_logprob(
            hidden,
            head.weight,
            torch.cat(targets),
            head.bias,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
            valid_vocab=self.valid_vocab,
        ).float()
        flat = iter(logprob.split([len(rows) for rows in scored]))
        return [
            [(next(flat).view(len(group.candidates), -1), next(flat) if local else logprob[:0]) for group in groups]
            for _, groups in trajectories
        ]


def token_budget(model: hf.CausalLM) -> int:
    """Rows that a packed forward of the model can take in half the memory that is free now; 1,024 to 65,536."""
    config = hf.text_config(model)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    live = 6 * config.hidden_size + 3 * config.intermediate_size + 2 * (heads + 2 * kv_heads) * width
    row = live * model.dtype.itemsize + ROW_STATISTICS
    return max(LEAST_BUDGET, min(MOST_BUDGET, int(0.5 * hf.free_memory(model.device) / row)))


def _rows(tokens: Tensor, groups: Sequence[BranchGroup]) -> int:
    return len(tokens) + sum(len(group.candidates) * len(group.future) for group in groups)
