"""Training of R2R's router: labels of divergent positions, AdamW, and the threshold for a recall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.paper.r2r.network import R2RRouter, RouterFeatures, concatenated, router_features
from fb_core.decode.pair import Pair
from fb_core.llm.local import LLM, Ids
from fb_core.models.facts import CausalLM, Tokenizer
from fb_core.verify.verifier import Verifier


class Divergence(NamedTuple):
    """The labels of one trajectory, for every token of its response."""

    differs: Tensor  # [n] bool: SLM and LLM would write different tokens here
    divergent: Tensor  # [n] bool: and after the SLM's token the LLM no longer finds the right answer


def divergence_labels(
    slm: CausalLM,
    llm: LLM,
    trajectories: Sequence[tuple[Ids, Ids]],
    golds: Sequence[str],
    tokenizer: Tokenizer,
    verifier: Verifier,
    max_new_tokens: int = 4096,
) -> list[Divergence]:
    """Where taking the SLM's token instead of the LLM's costs the right answer.

    The LLM gives its token at every position of a response [n] after its prompt [P]; the published method takes the
    LLM's own responses. Where the SLM's token differs, the LLM continues after the SLM's token; where that answer is
    wrong, it also continues after its own. An answer has at most `max_new_tokens` in all.
    """
    pair = Pair(slm, llm, tokenizer)
    features = router_features(slm, trajectories, logits_size=1, vocabulary=pair.vocabulary)
    ends = pair.ends
    prompts = [torch.as_tensor(prompt).tolist() for prompt, _ in trajectories]
    responses = [torch.as_tensor(response).tolist() for _, response in trajectories]
    positions = [(row, position) for row, response in enumerate(responses) for position in range(len(response))]
    states = [prompts[row] + responses[row][:position] for row, position in positions]
    large = llm.candidates_many(states, 1) if states else []
    small = [token for rows in features for token in rows.token.tolist()]

    def right(asked: Sequence[tuple[int, int, int]]) -> list[bool]:
        """Whether the LLM's answer is correct after each (row, position, token)."""
        answers = [[*responses[row][:position], token] for row, position, token in asked]
        going = [i for i, answer in enumerate(answers) if answer[-1] not in ends and len(answer) < max_new_tokens]
        if going:
            states = [prompts[asked[i][0]] + answers[i] for i in going]
            longest = max(max_new_tokens - len(answers[i]) for i in going)
            for i, rest in zip(going, llm.complete_many(states, longest), strict=True):
                answers[i] = (answers[i] + rest.tolist())[:max_new_tokens]
        texts = [str(tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]
        return [verdict == "correct" for verdict in verifier.verify_many(texts, [golds[row] for row, _, _ in asked])]

    theirs = [int(answer.ids[0]) for answer in large]
    differing = [i for i, (mine, their) in enumerate(zip(small, theirs, strict=True)) if mine != their]
    saved = right([(*positions[i], small[i]) for i in differing])
    lost = [i for i, fine in zip(differing, saved, strict=True) if not fine]
    curable = right([(*positions[i], theirs[i]) for i in lost])
    differs, divergent = torch.zeros(2, len(positions), dtype=torch.bool)
    differs[differing] = True
    divergent[[i for i, cured in zip(lost, curable, strict=True) if cured]] = True
    lengths = [len(response) for response in responses]
    return [Divergence(*pair) for pair in zip(differs.split(lengths), divergent.split(lengths), strict=True)]


def train_router(
    router: R2RRouter,
    features: Sequence[RouterFeatures],
    labels: Sequence[Tensor],
    *,
    epochs: int = 50,
    batch_size: int = 1024,
    learning_rate: float = 5e-5,
    weight_decay: float = 5e-4,
    recall_factor: float = 1.0,
    seed: int = 0,
) -> list[float]:
    """Train in place; returns the mean loss of every epoch. The global generator is left as it was.

    The labels [n] of each trajectory are true where the position is divergent. A positive weighs `recall_factor` times
    negatives / positives. The seed is of the order and of dropout.
    """
    device = router.projection.weight.device
    target = torch.cat(list(labels)).to(device, torch.float32) if labels else torch.zeros(0)
    positives = int(target.sum())
    if not 0 < positives < len(target):
        raise ValueError(
            f"labels: expected divergent positions and others, got {positives} of {len(target)} divergent; label more "
            "trajectories"
        )
    every = RouterFeatures(*(part.to(device) for part in concatenated(features)))
    weight = torch.tensor((len(target) - positives) / positives * recall_factor, device=device)
    optimizer = torch.optim.AdamW(router.parameters(), learning_rate, weight_decay=weight_decay)
    order, losses = torch.Generator().manual_seed(seed), []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        router.train()
        for _ in range(epochs):
            total = torch.zeros((), dtype=torch.float64, device=device)
            for batch in torch.randperm(len(target), generator=order).to(device).split(batch_size):
                logit = router(RouterFeatures(*(part[batch] for part in every)))
                loss = F.binary_cross_entropy_with_logits(logit, target[batch], pos_weight=weight)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach() * len(batch)
            losses.append(float(total) / len(target))
    router.eval()
    return losses


def recall_threshold(probability: Tensor, divergent: Tensor, min_recall: float = 0.95) -> float:
    """The highest threshold that routes at least a share of the divergent of n held-out positions.

    It is one of the probabilities; every position that reaches it is routed, tied ones included.
    """
    positives = probability[divergent].sort(descending=True).values
    if not len(positives) or bool(probability.isnan().any()):
        raise ValueError(
            f"probability: expected numbers and at least one divergent position, got {len(positives)} divergent and "
            f"{int(probability.isnan().sum())} NaN of {len(probability)}; label more trajectories or check the router"
        )
    recall = torch.arange(1, len(positives) + 1, dtype=torch.float64) / len(positives)
    return float(positives[int(torch.searchsorted(recall, min_recall))])
