"""Candidate texts ranked by how well the future follows them, and the log-probs of a DPO loss, on the demo's tiny pair.

First `CompatibilityScorer.score_texts` ranks what the small model might write next by how well it continues with the
large model's text. Prefix, candidates and future are all texts. Then the best and the worst candidate become the chosen
and the rejected answer of a DPO loss under autocast in bfloat16. `shared_prefix_logprobs_many` gives the policy's
log-probs from one forward that runs each prompt once, the scorer gives those of the frozen reference. Loss and
gradients are compared with those of one forward per whole row. Any causal LM with its tokenizer can replace the demo's.
Run it with `python examples/score_texts.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fb_core import CompatibilityScorer, shared_prefix_logprobs_many
from fb_core.apps.demo.pairs import load_pair

BETA = 0.1
Pair = tuple[str, str, str]  # prompt, chosen, rejected


@torch.no_grad()
def proposals(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, count: int = 4) -> list[str]:
    """The likeliest next tokens as text."""
    ids = torch.tensor([tokenizer(prompt).input_ids])
    return [tokenizer.decode([token]) for token in model(input_ids=ids).logits[0, -1].topk(count).indices.tolist()]


@torch.no_grad()
def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, length: int = 20
) -> tuple[str, str]:
    """The first token of a greedy answer, and the tokens after it."""
    ids = torch.tensor([tokenizer(prompt).input_ids])
    new = model.generate(ids, max_new_tokens=length, do_sample=False)[0, ids.shape[1] :].tolist()
    return tokenizer.decode(new[:1]), tokenizer.decode(new[1:])


def dpo_loss(policy: Sequence[tuple[Tensor, Tensor]], reference: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Mean over pairs of -log sigmoid(beta * (the chosen answer's gain over the reference - the rejected one's))."""
    gains = [
        (chosen - known_chosen) - (rejected - known_rejected)
        for (chosen, rejected), (known_chosen, known_rejected) in zip(policy, reference, strict=True)
    ]
    return -logsigmoid(BETA * torch.stack(gains)).mean()


def packed(
    model: PreTrainedModel, requests: Sequence[tuple[list[int], list[list[int]]]]
) -> list[tuple[Tensor, Tensor]]:
    """Log-probs of chosen and rejected answers from one forward in which each prompt runs once."""
    return [(chosen.sum(), rejected.sum()) for chosen, rejected in shared_prefix_logprobs_many(model, requests)]


def row_by_row(
    model: PreTrainedModel, requests: Sequence[tuple[list[int], list[list[int]]]]
) -> list[tuple[Tensor, Tensor]]:
    """The same from logits, with one forward over prompt and answer for every answer."""

    def one(prompt: list[int], text: list[int]) -> Tensor:
        ids = torch.tensor(prompt + text)
        logprob = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float().log_softmax(-1)
        return logprob.gather(-1, ids[1:, None])[len(prompt) - 1 :].sum()

    return [(one(prompt, chosen), one(prompt, rejected)) for prompt, (chosen, rejected) in requests]


def gradient(loss: Tensor, model: PreTrainedModel) -> Tensor:
    """The gradient to all parameters as one vector, float32."""
    return torch.cat([each.flatten().float() for each in torch.autograd.grad(loss, list(model.parameters()))])


def main() -> None:
    """Rank, then compare."""
    demo = load_pair("plans")
    model, tokenizer = demo.slm, demo.world.tokenizer
    scorer = CompatibilityScorer(model, tokenizer=tokenizer)
    pairs: list[Pair] = []
    for problem in demo.world.problems(4, seed=0, role="test"):
        first, future = answer(demo.llm, tokenizer, problem.prompt)
        candidates = list(dict.fromkeys([*proposals(model, tokenizer, problem.prompt), first]))
        scores = scorer.score_texts(problem.prompt, candidates, future)  # nats per token of the future
        order = scores.argsort(descending=True).tolist()
        print(f"{problem.prompt} ", "  ".join(f"{candidates[k]!r} {float(scores[k]):.3f}" for k in order))
        pairs.append((problem.prompt, candidates[order[0]] + future, candidates[order[-1]] + future))

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    requests = [(tokenizer(prompt).input_ids, [ids(chosen), ids(rejected)]) for prompt, chosen, rejected in pairs]
    reference = [(chosen.sum(), rejected.sum()) for chosen, rejected in scorer.logprobs_many(requests)]
    policy = copy.deepcopy(model).requires_grad_(True)
    with torch.no_grad():  # otherwise policy and reference are equal, and every loss is log 2
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05 * float(parameter.std()))

    true = gradient(dpo_loss(row_by_row(policy, requests), reference), policy)  # in float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [dpo_loss(way(policy, requests), reference) for way in (packed, row_by_row)]
    ours, theirs = (float((gradient(loss, policy) - true).norm() / true.norm()) for loss in losses)
    shared = sum(len(prompt) + sum(map(len, answers)) for prompt, answers in requests)
    alone = sum(2 * len(prompt) + sum(map(len, answers)) for prompt, answers in requests)
    print("DPO loss {:.5f} packed, {:.5f} row by row".format(*(loss.item() for loss in losses)), end="; ")
    print(f"{shared} tokens through the layers instead of {alone}")
    print(f"error of the gradient under autocast {ours:.1e} packed, {theirs:.1e} row by row")
    if ours > 2 * theirs:
        raise SystemExit("the packed gradient is the worse one")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
