"""Losses that trainers take of log-probs and entropies: the same values and gradients as from full rows of logits."""

from __future__ import annotations

import pytest
import torch
from test_shared_prefix import full_forwards, gradients, random_request
from tiny import tiny
from torch import Tensor

from fb_core.score.shared_prefix import shared_prefix_logprobs_many

REQUESTS = [random_request(seed, [7, 7, 7, 7], 5 + seed) for seed in range(3)]
ROWS = 12
LOW, HIGH = 0.2, 0.28


class Batch:
    """What a loss is given beside the policy's log-probs and entropies, [ROWS, 7] each."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(5)
        self.advantages = torch.randn(ROWS, 1, generator=made, dtype=torch.float64)
        self.noise, self.reference = (torch.randn(2, ROWS, 7, generator=made, dtype=torch.float64) * 0.4).unbind()
        lengths = torch.randint(2, 8, (ROWS, 1), generator=made)
        self.mask = (torch.arange(7) < lengths).double()


def mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def trl_grpo(new: Tensor, entropy: Tensor, given: Batch) -> Tensor:
    """Clipped surrogate and the k3 estimate of KL, a mean of each row's mean; entropies are logged."""
    ratio = (new - (new.detach() + given.noise)).exp()
    surrogate = torch.minimum(ratio * given.advantages, ratio.clamp(1 - LOW, 1 + HIGH) * given.advantages)
    apart = new.detach() + given.reference - new
    each = -surrogate + 0.04 * (apart.exp() - apart - 1)
    return ((each * given.mask).sum(1) / given.mask.sum(1)).mean()


def trl_cispo(new: Tensor, entropy: Tensor, given: Batch) -> Tensor:
    """The ratio, cut above and without gradient, weighs the log-prob."""
    ratio = (new - (new.detach() + given.noise)).exp().clamp(max=1 + HIGH).detach()
    return mean(-ratio * given.advantages * new, given.mask) - 0.01 * mean(entropy, given.mask)


def trl_sequence(new: Tensor, entropy: Tensor, given: Batch) -> Tensor:
    """GSPO: one ratio for a row, of its mean log-prob."""
    apart = new - (new.detach() + given.noise)
    ratio = ((apart * given.mask).sum(1, keepdim=True) / given.mask.sum(1, keepdim=True)).exp()
    surrogate = torch.minimum(ratio * given.advantages, ratio.clamp(1 - LOW, 1 + HIGH) * given.advantages)
    return -surrogate.mean()


def verl_dual_clip(new: Tensor, entropy: Tensor, given: Batch) -> Tensor:
    """PPO over all tokens, bounded below for bad rows (dual clip at 3), with an entropy bonus."""
    apart = (new - (new.detach() + given.noise)).clamp(-20, 20)
    ratio = apart.exp()
    clipped = torch.maximum(-given.advantages * ratio, -given.advantages * ratio.clamp(1 - LOW, 1 + HIGH))
    bounded = torch.where(given.advantages < 0, torch.minimum(-given.advantages * 3.0, clipped), clipped)
    return mean(bounded, given.mask) - 0.01 * mean(entropy, given.mask)


def verl_clip_cov(new: Tensor, entropy: Tensor, given: Batch) -> Tensor:
    """Tokens whose log-prob and advantage vary together beyond a bound have no gradient, as in Clip-Cov."""
    together = (new - mean(new, given.mask)) * (given.advantages - mean(given.advantages.expand_as(new), given.mask))
    kept = (together.detach() < 0.5).double()
    ratio = (new - (new.detach() + given.noise)).exp()
    return mean(-given.advantages * ratio * kept, given.mask) - 0.003 * mean(entropy, given.mask)


def unsloth_grpo(new: Tensor, entropy: Tensor, given: Batch) -> Tensor:
    """The gradient alone of the ratio of the policy to itself, and the k3 estimate of KL by row."""
    kl = (given.reference + new.detach() - new).exp() - (given.reference + new.detach() - new) - 1
    each = -((new - new.detach()).exp() * given.advantages - 0.1 * kl)
    return ((each * given.mask).sum(1) / given.mask.sum(1)).mean()


@pytest.mark.parametrize(
    "loss", [trl_grpo, trl_cispo, trl_sequence, verl_dual_clip, verl_clip_cov, unsloth_grpo], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_losses_of_trainers_have_the_values_and_gradients_of_full_rows(loss, temperature):
    model, given = tiny("qwen3").double(), Batch()
    packed = shared_prefix_logprobs_many(model, REQUESTS, temperature=temperature, return_entropy=True)
    ours = [torch.stack(part) for part in zip(*(each for group in packed for each in group), strict=True)]
    full = [each[:2] for request in REQUESTS for each in full_forwards(model, *request, temperature=temperature)]
    theirs = [torch.stack(part) for part in zip(*full, strict=True)]
    mine, want = loss(*ours, given), loss(*theirs, given)
    torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-8)
    found, wanted = (gradients(model, [each[None]]) for each in (mine, want))
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float(gradient.norm()) > 0
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
