"""Per-token log-probs of a text under any Hugging Face causal LM, without its logits.

The model's own body gives the hidden states and `linear_logprob` reads its LM head, so no tensor as large as
[tokens, vocabulary] ever exists. The same log-probs are then computed from logits with log_softmax; the script prints
the largest tensor of each way and the largest difference. Run it with `python examples/hf_logprobs.py [MODEL] [--text
TEXT]`, where MODEL is a directory or a name on the hub; without one, a tiny random model gets random tokens.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config

from fb_core.models.facts import lm_head
from fb_kernels import linear_logprob
from fb_kernels.testing import Largest, largest_tensor


def logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """[T - 1]: log p(ids[t] | ids[:t]) for t from 1."""
    hidden = model.base_model(input_ids=ids[None, :-1], use_cache=False).last_hidden_state[0]
    head = lm_head(model)
    return linear_logprob(
        hidden, head.weight, ids[1:], head.bias, logit_scale=head.logit_scale, softcap=head.softcap
    ).float()


def logprobs_by_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The same from logits."""
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
    return logits.float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def tiny_model() -> PreTrainedModel:
    """A random Qwen3 whose vocabulary is much larger than its hidden size."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=20_000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return AutoModelForCausalLM.from_config(config)


@torch.no_grad()
def main() -> None:
    """Run both ways and compare."""
    parser = argparse.ArgumentParser(description="per-token log-probs without logits")
    parser.add_argument("model", nargs="?", help="a directory or a name; a tiny random model by default")
    parser.add_argument("--text", default="The quick brown fox jumps over the lazy dog.")
    options = parser.parse_args()
    if options.model is None:
        model, ids = tiny_model(), torch.randint(20_000, (257,))
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        ids = AutoTokenizer.from_pretrained(options.model)(options.text, return_tensors="pt").input_ids[0]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = model.eval().to(device), ids.to(device)
    with largest_tensor() as ours:
        got = logprobs(model, ids)
    with largest_tensor() as theirs:
        want = logprobs_by_logits(model, ids)
    print(f"{len(got)} tokens, mean log-prob {float(got.mean()):.4f}")
    print(f"largest tensor without logits {shown(ours)}, with logits {shown(theirs)}")
    print(f"largest difference {float((got - want).abs().max()):.1e}")
    if not torch.allclose(got, want, rtol=1e-3, atol=1e-3 if model.dtype == torch.float32 else 0.1):
        raise SystemExit("the two ways do not agree")


def shown(largest: Largest) -> str:
    """Shape and size."""
    return f"{list(largest.shape)} ({largest.numel:,} elements)"


if __name__ == "__main__":
    main()
