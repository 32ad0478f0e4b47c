"""Training of R2R's router: labels of divergent positions, AdamW, and the threshold for a recall."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.paper.r2r.network import R2RRouter, RouterFeatures, concatenated, router_features
from fb_core._util import check_count
from fb_core.decode.pair import Pair
from fb_core.llm.local import LLM, Ids
from fb_core.models.facts import CausalLM, Tokenizer
from fb_core.models.tokens import check_max_new_tokens
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

    The LLM gives its token at every position of a response. Where the SLM's token differs, the LLM continues after the
    SLM's token; where that answer is wrong, it also continues after its own.

    Args:
        slm: the small model, in eval mode.
        llm: the large one.
        trajectories: (prompt [P], response [n]) token ids; the published method takes the LLM's own responses.
        golds: the right answer of each.
        tokenizer: the one both models use.
        verifier: judges the answers.
        max_new_tokens: maximum tokens of an answer, the response up to the position included.

    Returns:
        The labels of every trajectory, in order.

    Raises:
        TypeError: as `router_features`.
        ValueError: as `router_features`, not one gold for each trajectory, or max_new_tokens below 1.
    """
    check_max_new_tokens(max_new_tokens)
    if len(golds) != len(trajectories):
        raise ValueError(
            f"golds: expected one for each of {len(trajectories)} trajectories, got {len(golds)}; pass them in order"
        )
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
    """Train in place; the result is a function of the arguments, and the global generator is left as it was.

    Args:
        router: trained and left in eval mode.
        features: as from `router_features`.
        labels: [n] bool of each, true where the position is divergent.
        epochs: passes over all positions.
        batch_size: positions of one step.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        recall_factor: the weight of a positive is this times negatives / positives.
        seed: of the order and of dropout.

    Returns:
        The mean loss of every epoch.

    Raises:
        ValueError: not one label for each row, labels all alike, or a setting out of range.
    """
    for name, count in (("epochs", epochs), ("batch_size", batch_size)):
        check_count(name, count, 1, "leave it out for the published value")
    for name, value in (
        ("learning_rate", learning_rate),
        ("weight_decay", weight_decay),
        ("recall_factor", recall_factor),
    ):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name}: expected 0 or more, got {value}; leave it out for the published value")
    rows, marks = [len(inputs.token) for inputs in features], [len(flags) for flags in labels]
    if rows != marks:
        raise ValueError(f"labels: expected one for each row of features {rows}, got {marks}; pass them in order")
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
    """The highest threshold that routes enough of the divergent positions; equality routes.

    Args:
        probability: [n] the router's at held-out positions.
        divergent: [n] bool, their labels.
        min_recall: minimum share of divergent positions that are routed, above 0 and at most 1.

    Returns:
        one of the probabilities; every position that reaches it is routed, tied ones included.

    Raises:
        ValueError: not one label for each probability, none divergent, a NaN, or min_recall out of range.
    """
    if probability.ndim != 1 or divergent.shape != probability.shape or divergent.dtype != torch.bool:
        raise ValueError(
            f"divergent: expected one bool for each probability [n], got {divergent.dtype} {list(divergent.shape)} for "
            f"{list(probability.shape)}; pass the labels in order"
        )
    if not 0.0 < min_recall <= 1.0:
        raise ValueError(f"min_recall: expected above 0 and at most 1, got {min_recall}; the published value is 0.95")
    positives = probability[divergent].sort(descending=True).values
    if not len(positives) or bool(probability.isnan().any()):
        raise ValueError(
            f"probability: expected numbers and at least one divergent position, got {len(positives)} divergent and "
            f"{int(probability.isnan().sum())} NaN of {len(probability)}; label more trajectories or check the router"
        )
    recall = torch.arange(1, len(positives) + 1, dtype=torch.float64) / len(positives)
    return float(positives[int(torch.searchsorted(recall, min_recall))])
