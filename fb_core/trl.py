"""GRPO with TRL, each prompt of a batch run once: its per-token log-probs come from `shared_prefix_logprobs_many`.

Needs the extra `trl`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fb_core._util import require
from fb_core.score.shared_prefix import check_trainable, shared_prefix_logprobs_many

require("fb_core.trl", "trl", extra="trl")

from trl import GRPOTrainer  # noqa: E402


class SharedPrefixGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` whose policy, old and reference passes run a prompt once for all its completions.

    Arguments, losses and metrics are TRL's. Log-probs and gradients equal those of TRL's passes up to rounding, from
    P + sum R tokens per prompt instead of rows padded to [K, P + R]. Three things differ:

    - Passes without gradients, which TRL cuts into chunks of rows, are cut into packs of no more tokens than such a
      chunk has, padding included; a prompt's rows stay together as long as they fit.
    - TRL shuffles rows over the micro-batches. The rows of one optimiser step are grouped by prompt again, so that they
      share a micro-batch; a step still gets the rows that TRL gives it. A loss that is normalised by micro-batch
      (`bnpo`, the mean of the entropy bonus) sees other micro-batches.
    - Positions after the end of a completion get 0, as in TRL.

    Batches with images or token types go through TRL's own method. Model and TRL are not modified;
    DistributedDataParallel, FSDP2 and DeepSpeed (stages 1 and 2) see an ordinary forward of the model. With
    `torch_compile` the packed forwards run as they are, uncompiled.

    Raises:
        ImportError: on import of this module, without the extra `trl`.
        TypeError: not a transformers model.
        ValueError: on construction: a model that a packed forward would compute wrongly (as `shared_prefix_logprobs`),
            dropout, or settings that need what a packed forward lacks: a router's auxiliary loss, a
            float32 head on a model of another dtype, DeepSpeed's stage 3, FSDP's first version, DataParallel. On a
            batch: an empty prompt.
    """

    _buffered_inputs: Any  # of TRL: the micro-batches of a generation

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `trl.GRPOTrainer`."""
        super().__init__(*args, **kwargs)
        plugin = self.accelerator.state.deepspeed_plugin
        for name, in_use, remedy in (
            ("router_aux_loss_coef", self.aux_loss_enabled, "pass 0"),
            ("cast_lm_head_to_fp32", self.args.cast_lm_head_to_fp32, "pass False"),
            ("deepspeed", getattr(plugin, "zero_stage", 0) == 3, "pass a configuration of stage 1 or 2"),
            ("fsdp", self.is_fsdp_enabled and not self.accelerator.is_fsdp2, "pass fsdp_version 2"),
            ("n_gpu", self.args.n_gpu > 1, "start a process for each GPU with torchrun or accelerate launch"),
        ):
            if in_use:
                raise ValueError(
                    f"SharedPrefixGRPOTrainer: {name}: expected it to be off, got it in use; {remedy}, or use "
                    "trl.GRPOTrainer"
                )
        for model in filter(None, (self.model, self.ref_model)):
            model = self.accelerator.unwrap_model(model)
            modes = {layer: layer.training for layer in model.modules()}
            try:
                check_trainable(model.train())
            finally:
                for layer, mode in modes.items():
                    layer.training = mode

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,  # [B, P + C]: prompts padded on the left, completions on the right
        attention_mask: Tensor,
        logits_to_keep: int,  # C
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if any(value is not None for value in others.values()):
            return super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **others,
            )
        kept = attention_mask.bool()
        prompts = [ids[seen] for ids, seen in zip(*(x[:, :-logits_to_keep] for x in (input_ids, kept)), strict=True)]
        answers = [ids[seen] for ids, seen in zip(*(x[:, -logits_to_keep:] for x in (input_ids, kept)), strict=True)]
        budget = math.inf if batch_size is None else batch_size * input_ids.shape[1]
        rows: list[int] = []
        scored: list[tuple[Tensor, ...]] = []
        for pack in _packs(_groups(prompts), [len(answer) for answer in answers], [len(p) for p in prompts], budget):
            requests = [(prompts[group[0]], [answers[row] for row in group]) for group in pack]
            with self.accelerator.autocast():
                scores: list[list[Any]] = shared_prefix_logprobs_many(  # type: ignore[call-overload]
                    model, requests, temperature=self.temperature, return_entropy=compute_entropy
                )
            rows += (row for group in pack for row in group)
            scored += (score if compute_entropy else (score,) for group in scores for score in group)
        back = sorted(range(len(rows)), key=rows.__getitem__)
        where = kept[:, -logits_to_keep:]
        flat = (torch.cat([scored[index][part] for index in back]) for part in range(1 + compute_entropy))
        logps, *entropies = (each.new_zeros(where.shape).masked_scatter(where, each) for each in flat)
        return logps, entropies[0] if entropies else None, None

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before:
            return inputs
        steps = self.args.steps_per_generation
        together = math.gcd(steps, self.args.gradient_accumulation_steps)  # so many stay within an optimiser step
        batches = self._buffered_inputs
        self._buffered_inputs = [
            batch for start in range(0, steps, together) for batch in _by_prompt(batches[start : start + together])
        ]
        return self._buffered_inputs[self._step % steps]


def _groups(prompts: Sequence[Tensor]) -> list[list[int]]:
    """The rows of each distinct prompt, by first occurrence."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt.tolist()), []).append(row)
    return list(groups.values())


def _packs(
    groups: Sequence[Sequence[int]], answers: Sequence[int], prompts: Sequence[int], budget: float
) -> Iterator[list[list[int]]]:
    """The groups in packs of at most `budget` tokens; a group that is larger is cut, its prompt in each part."""
    pack: list[list[int]] = []
    used = 0
    for group in groups:
        whole = prompts[group[0]] + sum(answers[row] for row in group)
        if pack and used + whole > budget:
            yield pack
            pack, used = [], 0
        part: list[int] = []
        used += prompts[group[0]]
        for row in group:
            if part and used + answers[row] > budget:
                yield [*pack, part]
                pack, part, used = [], [], prompts[group[0]]
            part.append(row)
            used += answers[row]
        pack.append(part)
    yield pack


def _by_prompt(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of micro-batches, regrouped by prompt; batches with images stay as they are."""
    if any(isinstance(value, list) for value in batches[0].values()):
        return list(batches)
    sizes = [len(batch["prompt_ids"]) for batch in batches]
    prompts = [
        ids[mask.bool()]
        for batch in batches
        for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    ]
    order = [row for group in _groups(prompts) for row in group]
    whole = {
        name: torch.cat([batch[name] for batch in batches])[order].split(sizes)
        for name, value in batches[0].items()
        if value is not None and value.ndim
    }
    return [batch | {name: parts[index] for name, parts in whole.items()} for index, batch in enumerate(batches)]
