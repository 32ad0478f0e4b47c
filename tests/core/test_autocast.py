"""A loss of these ops in a training step of Hugging Face's Trainer, in bfloat16 autocast."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import tiny
from torch import Tensor
from transformers import Trainer, TrainingArguments

from fb_kernels import linear_logprob

PROMPT = torch.tensor([3, 7, 9, 11, 4, 8])


class Transformed(torch.nn.Module):
    """A model whose hidden states pass through one more layer, which makes them bfloat16; its forward is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny("qwen3", tie_word_embeddings=False).train()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.transform = torch.nn.Linear(32, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.transform(self.model.model(input_ids=input_ids).last_hidden_state[:, :-1])
        head, target = self.model.get_output_embeddings().weight, labels[:, 1:]
        assert (hidden.dtype, head.dtype) == (torch.bfloat16, torch.float32)
        logits = torch.nn.functional.linear(hidden, head).float().flatten(0, 1)
        plain = torch.nn.functional.cross_entropy(logits, target.flatten())
        return {"loss": -linear_logprob(hidden, head, target).mean(), "plain": plain}


def test_a_step_of_the_trainer(tmp_path: Path) -> None:
    model = Transformed()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    settings = TrainingArguments(
        str(tmp_path), bf16=True, use_cpu=True, max_steps=1, report_to=[], save_strategy="no", disable_tqdm=True
    )
    rows = [{"input_ids": PROMPT, "labels": PROMPT}, {"input_ids": PROMPT.flip(0), "labels": PROMPT.flip(0)}]
    Trainer(model, settings, train_dataset=rows).train()
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, before[name]), name


def test_gradients_are_those_of_torchs_linear() -> None:
    model = Transformed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(PROMPT[None], PROMPT[None])
    torch.testing.assert_close(losses["loss"], losses["plain"], rtol=1e-2, atol=1e-2)
    weights = list(model.parameters())
    pairs = (torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses.values())
    for one, other in zip(*pairs, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.05 * other.norm()
