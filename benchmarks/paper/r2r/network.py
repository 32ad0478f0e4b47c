"""R2R's router: the network, and what it sees of the small model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fb_core.llm.local import Ids
from fb_core.models import facts as models
from fb_core.models.facts import CausalLM, lm_head
from fb_core.models.tokens import checked_prompts, token_ids
from fb_core.runtime.plain import MAX_ROWS, batches, check_decodable

EXPANSION = 4  # inner width of a block, as a multiple of its width


class RouterFeatures(NamedTuple):
    """What the router sees at n positions."""

    hidden: Tensor  # [n, D] float32, after the final norm
    logits: Tensor  # [n, L] float32, the largest, in descending order
    embedding: Tensor  # [n, E] float32, of `token`
    token: Tensor  # [n] int64, the SLM's likeliest


class R2RRouter(nn.Module):
    """The probability that the SLM's next token is divergent: float32; the global generator is left as it was."""

    def __init__(
        self,
        slm: CausalLM,
        *,
        logits_size: int = 100,
        width: int = 1024,
        blocks: int = 6,
        dropout: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_decodable("slm", slm)
        self.logits_size = min(logits_size, models.vocabulary(slm))
        hidden, embedding = lm_head(slm).weight.shape[1], slm.get_input_embeddings().weight.shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.logits_projection = nn.Linear(self.logits_size, hidden)
            self.projection = nn.Linear(2 * hidden + embedding, width)
            self.blocks = nn.ModuleList(
                nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, EXPANSION * width),
                    nn.GELU(),
                    nn.Dropout(dropout),
                    nn.Linear(EXPANSION * width, width),
                    nn.Dropout(dropout),
                )
                for _ in range(blocks)
            )
            self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, features: RouterFeatures) -> Tensor:
        """The logit [n] of the probability."""
        x = torch.cat([features.hidden, features.embedding, self.logits_projection(features.logits)], -1)
        x = self.projection(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)[:, 0]

    @torch.no_grad()
    def probability(self, features: RouterFeatures) -> Tensor:
        """float32 [n]: that the SLM's token is divergent."""
        return self(features).sigmoid()


@torch.no_grad()
def router_features(
    slm: CausalLM,
    trajectories: Sequence[tuple[Ids, Ids]],
    *,
    logits_size: int = 100,
    vocabulary: int | None = None,
    batch_tokens: int = 65536,
) -> list[RouterFeatures]:
    """What the router would see before every token of many responses, teacher-forced in right-padded batches.

    Trajectories are (prompt [P], response [n]). Ids from `vocabulary` on never count. Row i is before response[i].
    """
    check_decodable("slm", slm)
    prompts = checked_prompts("prompt", [prompt for prompt, _ in trajectories], slm, room=0)
    responses = [token_ids("response", response, slm) for _, response in trajectories]
    joined = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    checked_prompts("trajectory", joined, slm, room=0)
    features: dict[int, RouterFeatures] = {}
    for rows in batches([len(ids) for ids in joined], 0, batch_tokens):
        ids = pad_sequence([joined[row] for row in rows], batch_first=True)  # causal: padding after a row is not seen
        for row, hidden in zip(rows, slm.base_model(input_ids=ids, use_cache=False).last_hidden_state, strict=True):
            read = hidden[len(prompts[row]) - 1 : len(joined[row]) - 1]
            parts = [
                features_of(slm, part, models.logits(slm, part)[:, :vocabulary], logits_size)
                for part in read.split(MAX_ROWS)
            ]
            features[row] = concatenated(parts)
    return [features[row] for row in range(len(joined))]


def features_of(slm: CausalLM, hidden: Tensor, logits: Tensor, logits_size: int) -> RouterFeatures:
    """What the router sees, from hidden [n, D] after the final norm and logits [n, V]."""
    token = logits.argmax(-1)  # the first of equal ones
    largest = logits.topk(min(logits_size, logits.shape[-1])).values
    embedding = slm.get_input_embeddings().weight[token]
    return RouterFeatures(hidden.float(), largest.float(), embedding.float(), token)


def concatenated(parts: Sequence[RouterFeatures]) -> RouterFeatures:
    """The rows of all parts."""
    return RouterFeatures(*(torch.cat(column) for column in zip(*parts, strict=True)))
