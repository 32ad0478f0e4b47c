"""GRPO in a loop of one's own: sampled completions, their log-probs and entropies with gradients, and one step.

`shared_prefix_logprobs_many` runs each prompt once for all its completions. It takes a model in
DistributedDataParallel or DeepSpeed (stages 1 and 2), or one that FSDP2 shards, in place of a plain one. A trainer with
its own forward takes `of_hidden_states`: hidden states, head and ids in, log-probs and entropies out, no logits.
Run it with `python examples/policy_gradient.py`; a tiny model learns to write tokens with even ids.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from fb_core import shared_prefix_logprobs_many
from fb_kernels import linear_logprob

PROMPTS, GROUP, NEW = [[5, 9, 4], [7, 12], [3]], 8, 6


def of_hidden_states(hidden: Tensor, head: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """hidden[..., D] after each place, head[V, D], ids[...] behind them: (log-prob [...], entropy [...]), in nats."""
    return linear_logprob(hidden, head, ids, return_entropy=True)


@torch.no_grad()
def sample(model: PreTrainedModel, prompt: list[int]) -> list[list[int]]:
    """Completions of a prompt."""
    rows = model.generate(torch.tensor([prompt] * GROUP), max_new_tokens=NEW, do_sample=True, top_k=0)
    return [row[len(prompt) :].tolist() for row in rows]


def reward(completion: list[int]) -> float:
    """The share of tokens with even ids."""
    return sum(token % 2 == 0 for token in completion) / len(completion)


def main() -> None:
    """Train and print the reward."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=64, eos_token_id=None, **sizes, **heads)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(30):
        groups = [(prompt, sample(model, prompt)) for prompt in PROMPTS]
        rewards = torch.tensor([[reward(each) for each in completions] for _, completions in groups])
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        scored = [each for group in shared_prefix_logprobs_many(model, groups, return_entropy=True) for each in group]
        logprob, entropy = (torch.stack(each) for each in zip(*scored, strict=True))  # [B, NEW] each
        ratio = (logprob - logprob.detach()).exp()  # one step a sample: the old policy is this one
        (-(advantages[:, None] * ratio).mean() - 1e-3 * entropy.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step}: mean reward {rewards.mean():.2f}, entropy {entropy.mean():.2f} nats")
    prompt, completions = groups[0]
    rows = torch.tensor([[*prompt, *each] for each in completions])
    with torch.no_grad():
        hidden = model.model(rows[:, :-1]).last_hidden_state[:, len(prompt) - 1 :]
        own, _ = of_hidden_states(hidden, model.lm_head.weight, rows[:, len(prompt) :])
        packed = torch.stack(shared_prefix_logprobs_many(model, groups[:1])[0])
    print(f"largest difference from full rows: {float((own - packed).abs().max()):.1e} nats")


if __name__ == "__main__":
    main()
