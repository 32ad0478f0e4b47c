"""S2T-Local's training: FutureBridge's reranker with the target and the loss of another method.

Source: Ye et al., "Select to Think: Unlocking SLM Potential with Local Sufficiency", arXiv 2604.26940, and its software
YeRona/Select-to-Think (scripts/train_s2t_local.py, `listwise_loss` in its default mode top1_ce). The loss is the
cross-entropy to the LLM's best candidate, a hinge of MARGIN against the best other one, and KL_WEIGHT * KL(p_T || p)
with p = softmax(score) and p_T renormalised over the SLM's own candidates.

Here it trains FutureBridge's reranker: a scalar head whose score has no bounds, an adapter on the attention alone, and
a frozen prefix. The software scores by the expected bin, 0 to 1, of reserved tokens' logits, so its hinge is always
active. It also adapts the MLPs and the reserved rows of the head, on the prefix (its last 511 tokens) and in greedy
decoding too. A KL term of weight 0.1 keeps the prefix close to the base model; it is zero here, where only candidates
are adapted. It trains at a constant rate of 5e-5, four groups per step, three epochs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.paper.settings import PaperSettings
from fb_core.apps.pipeline.records import Group
from fb_core.apps.pipeline.train import TrainStage
from fb_core.rerank.training import Sweep

MARGIN, KL_WEIGHT = 1.0, 0.1


def selection_target(llm_logprob: Tensor) -> Tensor:
    """[K]: the target of one group whose cross-entropy equals the cross-entropy and KL terms of the loss.

    Equality is up to a constant: together they are the cross-entropy to onehot(best) + KL_WEIGHT * p_T, minus
    KL_WEIGHT * H(p_T), which does not depend on the scores. Ties for the best go to the first.
    """
    target = KL_WEIGHT * llm_logprob.softmax(0)
    target[llm_logprob.argmax()] += 1.0
    return target


def hinge(scores: Tensor, target: Tensor, sizes: Sequence[int]) -> Tensor:
    """Sum over groups of relu(MARGIN - (score of the best by target - best other score)); a lone candidate adds 0."""
    rows = pad_sequence(scores.split(list(sizes)), batch_first=True, padding_value=-math.inf)  # [G, K]
    wanted = pad_sequence(target.split(list(sizes)), batch_first=True, padding_value=-math.inf)
    best = wanted.argmax(1, keepdim=True)  # the first of equal ones
    rival = rows.scatter(1, best, -math.inf).max(1).values
    return (MARGIN - (rows.gather(1, best)[:, 0] - rival)).relu().sum()


class SelectionSweep(Sweep):
    """A sweep whose loss has the hinge as well."""

    def loss(self, scores: Tensor, target: Tensor, cu_group: Tensor) -> Tensor:
        return super().loss(scores, target, cu_group) + hinge(scores, target, cu_group.diff().tolist())


class SelectionTrainStage(TrainStage):
    """Rerankers trained towards the LLM's best candidate; all horizons have the same target."""

    settings: PaperSettings
    slice = ("train", "experiment.target")
    sweep = SelectionSweep

    def targets(self, groups: Sequence[Group]) -> list[Tensor]:
        best = (selection_target(group.state.pool.llm_logprob) for group in groups)
        return [target[:, None].expand(-1, len(self.settings.train.horizons)) for target in best]
