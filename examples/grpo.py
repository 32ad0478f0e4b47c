"""GRPO with TRL where each prompt of a batch runs once: a tiny model learns to write tokens with even ids.

`SharedPrefixGRPOTrainer` replaces `trl.GRPOTrainer`; nothing else changes. Run it with
`python examples/grpo.py [--steps N] [--own]` (`pip install '.[trl]'`). --own trains with TRL's own trainer,
which gets the same rewards.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from fb_core.trl import SharedPrefixGRPOTrainer
except ImportError as problem:
    raise SystemExit(f"grpo.py: expected the extra [trl], got {problem}; pip install '.[trl]'") from None

WORDS = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 64)}}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of a completion's tokens that have even ids."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    made = Tokenizer(WordLevel(WORDS, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    """Train and print the reward."""
    parser = argparse.ArgumentParser(description="GRPO with shared prompts")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--own", action="store_true", help="TRL's own trainer")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
        eos_token_id=1,
    )
    prompts = [" ".join(f"w{2 + (7 * i + 5 * j) % 62}" for j in range(20 + i % 5)) for i in range(32)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = (GRPOTrainer if options.own else SharedPrefixGRPOTrainer)(
            model=AutoModelForCausalLM.from_config(config),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=8,
                num_generations=8,
                max_completion_length=8,
                max_steps=options.steps,
                learning_rate=3e-3,
                bf16=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer(),
        )
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    part = max(1, len(rewards) // 5)
    first, last = (sum(rewards[where]) / part for where in (slice(part), slice(-part, None)))
    print(f"mean reward {first:.3f} at first, {last:.3f} at last")
    if last <= first:
        raise SystemExit("nothing was learned")


if __name__ == "__main__":
    main()
