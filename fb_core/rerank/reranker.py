"""TokenReranker: a LoRA adapter and a scalar head that score candidate tokens from state and candidate alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fb_core._util import read_file, write_file
from fb_core.models.adapters import (
    AdapterConfig,
    adapter_dropouts,
    adapter_tensors,
    add_adapter,
    classifier_config,
    lora_config,
    merged_projections,
    read_adapter_config,
)
from fb_core.models.facts import Cache, CausalLM, causal_lm, fingerprint, structure
from fb_core.models.packed import (
    Layout,
    Prefix,
    cached_prefix,
    check_packed_forward,
    check_supported,
    packed_forward,
    prefill_packed,
)
from fb_core.models.tokens import check_group, token_ids

Scope = Literal["candidate", "sequence"]
HEAD_KEY = "base_model.model.score.weight"  # where PEFT keeps the head of a sequence classifier
DESCRIPTION = "futurebridge.json"
FORMAT = 3  # of the description
LONGEST_JSON = 1 << 20  # bytes
APART = "the directory's config and weights do not belong together"


class CandidateRows(NamedTuple):
    """The candidates of some states as branches of one row each, for any reranker on the same base."""

    ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    layout: Layout

    @classmethod
    def of(cls, prefixes: Sequence[Prefix], pools: Sequence[Tensor]) -> CandidateRows:
        """From the states' prefixes, slices of one `PrefixKV`, and their candidates [K], all on one device."""
        kv, ids = prefixes[0].kv, torch.cat(list(pools))
        paged = next(iter(kv.layers.values()))[0].ndim == 4
        layout = Layout.build(
            [([1] * len(pool), prefix.start, prefix.length) for prefix, pool in zip(prefixes, pools, strict=True)],
            ids.device,
            prefix=kv,
            pages=[prefix.pages for prefix in prefixes] if paged else None,
        )
        lengths = [prefix.length for prefix, pool in zip(prefixes, pools, strict=True) for _ in pool]
        return cls(ids, torch.tensor(lengths, device=ids.device), layout)


class TokenReranker(nn.Module):
    """Scores candidates: head(h_c).

    h_c is the candidate's hidden state after the final norm. In scope "candidate" the prefix is the frozen model's own
    KV cache and the adapter acts on the candidate token alone; in scope "sequence" it acts on the prefix too. Only
    adapter and head are trained. The adapter sits in a copy of the module tree that shares the base weights' storage,
    so the given model's outputs do not change (`fb_core.models.native` says what changes in its storage). Make one with
    `from_base` or `from_pretrained`. In eval mode it is safe to share between threads.
    """

    def __init__(self, model: CausalLM, config: AdapterConfig, scope: Scope) -> None:
        if scope not in ("candidate", "sequence"):
            raise ValueError(f"scope: expected 'candidate' or 'sequence', got {scope!r}; use 'candidate' to deploy")
        check_supported(model)
        check_packed_forward(model)
        super().__init__()
        self._base = (model,)  # a tuple, so that the frozen model is no submodule
        self.scope: Scope = scope
        self.adapted = add_adapter(model, config)
        self._made_on = structure(model)
        width = model.get_input_embeddings().weight.shape[1]
        self.head = nn.Parameter(torch.zeros(width, dtype=torch.float32, device=model.device))
        self.eval()

    @classmethod
    def from_base(
        cls,
        model: CausalLM,
        rank: int = 16,
        alpha: float = 32,
        dropout: float = 0.05,
        *,
        scope: Scope = "candidate",
    ) -> TokenReranker:
        """A fresh reranker: adapter initialised by PEFT, head zero.

        Args:
            model: the frozen small model.
            rank: LoRA rank.
            alpha: LoRA alpha; the adapter's output is scaled by alpha / rank.
            dropout: LoRA dropout while training.
            scope: "candidate" or "sequence".

        Raises:
            TypeError: not a transformers model.
            ValueError: an unsupported model, or an argument out of range.
        """
        return cls(model, lora_config(rank, alpha, dropout), scope)

    @property
    def base(self) -> CausalLM:
        """The frozen model that this reranker was made on."""
        return self._base[0]

    def check_base(self) -> None:
        """ValueError if the frozen model has other modules, hooks or parameters than when this was made on it."""
        if structure(self.base) != self._made_on:
            raise ValueError(
                f"model: expected the {type(self.base).__name__} that the reranker was made on, got it with adapters, "
                "hooks or modules added since; add them first, then make or load the reranker"
            )

    def train(self, mode: bool = True) -> TokenReranker:
        """Switches the adapter's dropout alone; the frozen model stays in eval mode."""
        super().train(mode)
        self.adapted.eval()
        for layer in adapter_dropouts(self.adapted):
            layer.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TokenReranker:
        """What `to`, `half`, `cuda` and the like call: refuses a change that would unshare the base weights."""
        for parameter in self.parameters():
            after = fn(parameter.detach())
            if (after.dtype, after.device) != (parameter.dtype, parameter.device):
                raise ValueError(
                    f"TokenReranker: expected to stay {parameter.dtype} on {parameter.device} with its frozen model, "
                    f"got {after.dtype} on {after.device}; convert the model, then make or load the reranker on it"
                )
        return self

    def scores(
        self,
        prefix: Tensor | Sequence[int],
        candidates: Tensor | Sequence[int],
        cache: Cache | None = None,
    ) -> Tensor:
        """Score the candidates of one state.

        Args:
            prefix: [P] token ids, at least one.
            candidates: [K] token ids, no two alike.
            cache: the frozen model's cache of exactly the prefix; it is read, not changed. Scope "sequence" computes
                the prefix itself and ignores it.

        Returns:
            float32 [K]; higher is better, and only differences matter.

        Raises:
            TypeError: ids that are not integers.
            ValueError: an empty argument, a candidate given twice, an id outside the vocabulary, the wrong device, a
                prefix beyond the model's positions, a cache of another length, or a frozen model that was changed
                since.
        """
        self.check_base()
        tokens = token_ids("prefix", prefix, self.base)
        pool = check_group(self.base, len(tokens), candidates)
        if self.scope == "sequence":
            rows = torch.cat([tokens.expand(len(pool), -1), pool[:, None]], 1)
            hidden = causal_lm(self.adapted).base_model(input_ids=rows, use_cache=False).last_hidden_state
            return self.score_hidden(hidden[:, -1])
        if cache is None:
            state = prefill_packed(self.base, [tokens])[0]
        else:
            state = cached_prefix(cache, self.base, len(tokens))
        return self.packed_scores(CandidateRows.of([state], [pool]))

    def scores_many(self, prefixes: Sequence[Prefix], candidates: Sequence[Tensor]) -> list[Tensor]:
        """Score the candidates of many states in one packed forward over their cached prefixes (scope "candidate").

        Args:
            prefixes: one slice per state, all of one `PrefixKV`.
            candidates: one [K] int64 per state: ids of the model, no two alike.

        Returns:
            one float32 [K] per state.

        Raises:
            ValueError: scope "sequence", or a base model that has changed.
        """
        if self.scope != "candidate":
            raise ValueError("scores_many: expected scope 'candidate', got 'sequence'; call scores for each state")
        if not prefixes:
            return []
        self.check_base()
        scores = self.packed_scores(CandidateRows.of(prefixes, candidates))
        return list(scores.split([len(pool) for pool in candidates]))

    def packed_scores(self, rows: CandidateRows) -> Tensor:
        """float32 [N], without checks: gradients reach adapter and head."""
        return self.score_hidden(packed_forward(causal_lm(self.adapted), *rows))

    def score_hidden(self, hidden: Tensor) -> Tensor:
        """head(h_c) of candidates, float32 [N], from hidden [N, D] after the final norm, computed with the adapter."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return (hidden.to(wide) * self.head).sum(-1).float()  # no matrix product: autocast would lower its precision

    def merged(self) -> dict[str, Tensor]:
        """`layers.<i>.self_attn.<projection>` -> [out, in] weight with the adapter merged, for deployment."""
        return merged_projections(self.adapted)

    def tensors(self) -> dict[str, Tensor]:
        """Adapter and head under the names of a PEFT checkpoint; the tensors share the parameters' storage."""
        return {**adapter_tensors(self.adapted), HEAD_KEY: self.head.detach()[None]}

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write a PEFT directory of a one-label sequence classifier, plus one file for what PEFT has no place for.

        adapter_config.json and adapter_model.safetensors (adapter and scalar head) load with PEFT; futurebridge.json
        holds the scope and the base model's fingerprint. Each file is there whole or not at all.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().contiguous() for name, value in self.tensors().items()}
        config = classifier_config(self.adapted)
        description = {"format": FORMAT, "scope": self.scope, "base": fingerprint(self.base)}
        write_file(folder / "adapter_model.safetensors", save(tensors, {"format": "pt"}))
        write_file(folder / "adapter_config.json", json.dumps(config, indent=2, sort_keys=True).encode())
        write_file(folder / DESCRIPTION, json.dumps(description, indent=2).encode())

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike[str], model: CausalLM, *, scope: Scope = "candidate"
    ) -> TokenReranker:
        """Load what `save_pretrained` wrote, onto the base model that it was trained on.

        Args:
            directory: the PEFT directory.
            model: the frozen base model.
            scope: the scope in which it will be used.

        Raises:
            TypeError: not a transformers model.
            ValueError: missing or damaged files, another scope, another base model, a rank that is not the stated one,
                or an adapter that is not plain LoRA.
        """
        check_supported(model)
        folder = Path(directory)
        description = read_description(folder)
        if description.get("scope") != scope:
            raise ValueError(
                f"scope: expected an adapter trained under scope {scope!r}, got {description.get('scope')!r} in "
                f"{folder}; load it with scope={description.get('scope')!r}"
            )
        if description.get("base") != fingerprint(model):
            raise ValueError(
                f"model: expected the base model that {folder} was trained on, got a {type(model).__name__} with other "
                "weights or architecture; load that base model"
            )
        settings = folder / "adapter_config.json"
        values = _read_json(settings)
        try:
            config = read_adapter_config(values)
        except ValueError as problem:
            raise ValueError(f"{settings}: {problem}") from None
        file = folder / "adapter_model.safetensors"
        try:
            if file.exists() and not file.is_file():
                raise OSError("no regular file")
            tensors = load_file(file)
        except (OSError, SafetensorError) as problem:
            raise ValueError(f"{file}: expected a safetensors file, got {problem}; save the adapter again") from problem
        widths = {f"base_model.model.{name}": weight.shape[-1] for name, weight in model.named_parameters()}
        ranks = {name: have for name, have in tensors.items() if ".lora_A." in name}
        for name, have in ranks.items() or [("any lora_A", None)]:  # before the stated rank is allocated
            width = widths.get(name.replace(".lora_A", ""))
            if have is None or list(have.shape) != [config.r, width]:
                raise ValueError(
                    f"{file}: expected rank {config.r} by the config, got {_shape(have)} in {name}, for which the base "
                    f"model has {width or 'no'} columns; {APART}"
                )
        reranker = cls(model, config, scope)
        parameters = reranker.tensors()
        for name in sorted(parameters.keys() | tensors.keys()):
            want, have = parameters.get(name), tensors.get(name)
            if want is None or have is None or want.shape != have.shape:
                raise ValueError(
                    f"{file}: expected {name} of shape {_shape(want)} for rank and base model, "
                    f"got {_shape(have)}; {APART}"
                )
            kept = have.to(want)
            if not have.is_floating_point() or not bool(kept.isfinite().all()):
                kind = str(want.dtype).removeprefix("torch.")
                raise ValueError(
                    f"{file}: expected finite floats that {kind} holds, got others in {name}; save the adapter again"
                )
            want.copy_(kept)
        return reranker


def read_description(folder: Path) -> dict[str, Any]:
    """The description in an adapter's folder: what it says beyond PEFT's files.

    ValueError for no adapter there, a damaged description, or one of another format.
    """
    if not (folder / DESCRIPTION).is_file():
        raise ValueError(
            f"{folder}: expected the folder of an adapter with {DESCRIPTION} in it, got none; name one that "
            "save_pretrained wrote, such as reranker/seed-0 of a run"
        )
    description = _read_json(folder / DESCRIPTION)
    if description.get("format") != FORMAT:
        raise ValueError(
            f"{folder / DESCRIPTION}: expected format {FORMAT}, got {description.get('format')!r}; "
            "train the adapter again, or load it with the version that wrote it"
        )
    return description


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else str(list(tensor.shape))


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(read_file(path, LONGEST_JSON))
        if not isinstance(value, dict):
            raise ValueError(type(value).__name__)
    except (OSError, ValueError, RecursionError) as problem:
        raise ValueError(
            f"{path}: expected a small JSON object of an adapter, got {problem}; save the adapter again"
        ) from None
    return value
