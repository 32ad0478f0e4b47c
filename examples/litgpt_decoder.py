"""Log-probs of K continuations in litgpt's own decoder, whose prompt then runs once.

Nothing of litgpt is changed: `logprobs` walks through its modules and calls our ops where its blocks call theirs:
attention over a shared prefix, norms, rotary embedding, gate and head, with gradients. As a check litgpt's `forward`
scores the same continuations in full rows, and both are timed in turns.

    pip install --no-deps litgpt lightning lightning-utilities pytorch-lightning torchmetrics jsonargparse
    python examples/litgpt_decoder.py --model SmolLM2-135M

Weights are random; without `--model` the decoder is tiny.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from litgpt.model import GPT, Block, Config, LLaMAMLP, RMSNorm
from torch import Tensor

from fb_kernels import BranchLayout, branch_attention, linear_logprob, qk_norm_rope, rms_norm, swiglu

TINY = {"block_size": 256, "padded_vocab_size": 300, "n_layer": 2, "n_embd": 64, "intermediate_size": 96, "bias": False}
TINY |= {"n_head": 4, "n_query_groups": 2, "rotary_percentage": 1.0, "parallel_residual": False, "norm_eps": 1e-5}
TINY |= {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP"}
Given = tuple[Tensor, list[Tensor]]  # prompt, continuations
Score = Callable[[GPT, Tensor, Sequence[Tensor]], list[Tensor]]


def normed(norm: RMSNorm, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(normed sum, sum) of x[T, D] and what it is added to."""
    return rms_norm(x, norm.weight, norm.eps, residual, offset=float(norm.add_unit_offset))


def after(
    block: Block, x: Tensor, residual: Tensor | None, tables: Sequence[Tensor], layout: BranchLayout
) -> tuple[Tensor, Tensor]:
    """A block over packed rows x[T, D]: (what it adds, what that is added to); the next norm makes the sum."""
    attn, mlp, config = block.attn, block.mlp, block.config
    y, residual = normed(block.norm_1, x, residual)
    weights = [None if norm is None else norm.weight for norm in (attn.norm_q, attn.norm_k)]
    heads = {"num_heads": config.n_head, "num_kv_heads": config.n_query_groups, "eps": config.norm_eps}
    q, k, v = qk_norm_rope(attn.qkv(y), *weights, *tables, **heads)
    attended = branch_attention(q, k, v, k, v, layout)  # the prefix is rows of the same forward
    y, residual = normed(block.norm_2, attn.proj(attended.flatten(1)), residual)
    return mlp.proj(swiglu(mlp.fc_1(y), mlp.fc_2(y))), residual


def logprobs(model: GPT, prompt: Tensor, continuations: Sequence[Tensor]) -> list[Tensor]:
    """Log-probs of each continuation's tokens after the prompt, [R_k] each."""
    check(model)
    start, lengths = len(prompt) - 1, [len(tokens) for tokens in continuations]
    # Group 0 is the prompt without its last token, which every branch of group 1 begins with.
    layout = BranchLayout.of([[start], lengths], [(0, 0), (0, start)], device=prompt.device)
    ids = torch.cat([prompt[:-1], *(torch.cat((prompt[-1:], tokens[:-1])) for tokens in continuations)])
    places = torch.cat([torch.arange(start), *(torch.arange(start, start + length) for length in lengths)])
    tables = model.cos, model.sin, places.to(prompt.device)
    x, residual = model.transformer.wte(ids), None
    for block in model.transformer.h:
        x, residual = after(block, x, residual, tables, layout)
    hidden, _ = normed(model.transformer.ln_f, x, residual)
    target = torch.cat([*continuations])
    return list(linear_logprob(hidden[start:], model.lm_head.weight, target, model.lm_head.bias).split(lengths))


def check(model: GPT) -> None:
    """Raise unless the model's blocks are those that `after` knows."""
    config = model.config
    others = config.parallel_residual, config.scale_embeddings, config.rope_interleave, config.latent_attention
    others += config.post_attention_norm, config.post_mlp_norm, config.sliding_window_size, config.rope_indices
    others += config.attention_logit_softcapping, config.final_logit_softcapping, config.attention_scores_scalar
    known = not any(others) and config.rotary_percentage == 1.0 and config.norm_qk_type == "default"
    for block in model.transformer.h:
        known &= type(block.mlp) is LLaMAMLP and type(block.norm_1) is RMSNorm and block.attn.mscale == 1.0
    if not known:
        raise ValueError("litgpt: expected blocks like those of Llama and Qwen3, got others; extend `after`")


def full_rows(model: GPT, prompt: Tensor, continuations: Sequence[Tensor]) -> list[Tensor]:
    """The same by litgpt's forward: the prompt once for each continuation, padded, and all logits."""
    most = max(len(tokens) for tokens in continuations)
    rows = torch.stack([torch.cat((prompt, tokens, tokens.new_zeros(most - len(tokens)))) for tokens in continuations])
    scores = model(rows[:, :-1])[:, len(prompt) - 1 :].float().log_softmax(-1).gather(2, rows[:, len(prompt) :, None])
    return [row[: len(tokens), 0] for row, tokens in zip(scores, continuations, strict=True)]


def differences(model: GPT, given: Given) -> tuple[float, float]:
    """The largest difference of a log-prob, and of a parameter's gradient relative to its norm."""
    found, grads = [], []
    for score in (logprobs, full_rows):
        values = torch.cat(score(model, *given))
        grads.append(torch.autograd.grad(values.sum(), [*model.parameters()]))
        found.append(values.detach())
    apart = [float((mine - theirs).norm() / (theirs.norm() + 1e-30)) for mine, theirs in zip(*grads, strict=True)]
    return float((found[0] - found[1]).abs().max()), max(apart)


def seconds(score: Score, model: GPT, given: Given) -> float:
    """Of one call."""
    start = time.perf_counter()
    score(model, *given)
    return time.perf_counter() - start


def main() -> None:
    """Compare values and gradients, then time both."""
    parser = argparse.ArgumentParser(description="K continuations in litgpt's decoder, by our ops and by its forward")
    parser.add_argument("--model", help="a name that litgpt knows, such as SmolLM2-135M (default: a tiny one)")
    parser.add_argument("--candidates", type=int, default=13)
    parser.add_argument("--prompt", type=int, default=100, help="tokens (default: 100)")
    parser.add_argument("--tokens", type=int, default=16, help="of a continuation, at most (default: 16)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = Config.from_name(options.model) if options.model else Config(**TINY)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(config).to(device).eval()
    model.apply(model._init_weights)

    def tokens(count: int) -> Tensor:
        return torch.randint(config.padded_vocab_size, (count,), device=device)

    given = tokens(options.prompt), [tokens(max(1, options.tokens - k % 3)) for k in range(options.candidates)]
    worst, apart = differences(model, given)
    print(f"largest difference from litgpt's forward: {worst:.1e}; of a gradient, relative: {apart:.1e}")
    if worst > 1e-5 or apart > 1e-5:
        raise SystemExit("the two do not agree")
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            model.to(dtype)
            times = [[seconds(score, model, given) for score in (logprobs, full_rows)] for _ in range(options.rounds)]
            ours, theirs = (sorted(each)[len(times) // 2] for each in zip(*times, strict=True))
            print(f"{str(dtype)[6:]}: ours {1e3 * ours:.1f} ms, litgpt {1e3 * theirs:.1f} ms, {theirs / ours:.2f}x")


if __name__ == "__main__":
    main()
