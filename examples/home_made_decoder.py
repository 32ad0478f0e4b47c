"""A whole decoder of about 60 lines on `branch_attention` and `linear_logprob`.

It shows that the ops need no model class, cache class or mask. The rows of a prompt and of all its branches go through
each layer together, a `BranchLayout` says which rows see which keys, and `linear_logprob` turns hidden states into
log-probs of given tokens without logits. As a check, every branch also runs as a separate sequence.
Run it with `python examples/home_made_decoder.py`, on a CPU or a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fb_kernels import BranchLayout, branch_attention, linear_logprob

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS, VOCABULARY = 4, 2, 16, 64, 2, 500


class Layer(nn.Module):
    """Pre-norm attention and MLP over packed rows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, positions: Tensor, layout: BranchLayout) -> Tensor:
        """x[T, D] to [T, D]."""
        heads = self.qkv(F.rms_norm(x, (HIDDEN,))).view(len(x), -1, HEAD_DIM)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = rotate(q, positions), rotate(k, positions)
        attended = branch_attention(q, k, v, k.detach(), v.detach(), layout)  # the prefix is a view of the rows
        x = x + self.out(attended.flatten(1))
        return x + self.down(F.silu(self.up(F.rms_norm(x, (HIDDEN,)))))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x[T, heads, E]."""
    angle = torch.outer(positions, 1e4 ** -(torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM))[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


class Decoder(nn.Module):
    """Embedding, layers, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, prompt: Tensor, branches: list[Tensor]) -> list[Tensor]:
        """Log-probs of each branch's tokens from its second on, given the prompt and the branch before them."""
        device, lengths = prompt.device, [len(branch) for branch in branches]
        # Group 0 is the prompt, one branch without a prefix; group 1 has the branches, with the prompt as their prefix.
        layout = BranchLayout.of([[len(prompt)], lengths], [(0, 0), (0, len(prompt))], device=device)
        places = [torch.arange(len(prompt)), *(torch.arange(len(prompt), len(prompt) + n) for n in lengths)]
        positions = torch.cat(places).to(device)
        x = self.embedding(torch.cat([prompt, *branches]))
        for layer in self.layers:
            x = layer(x, positions, layout)
        rows = F.rms_norm(x, (HIDDEN,))[len(prompt) :].split(lengths)
        hidden = torch.cat([row[:-1] for row in rows])
        target = torch.cat([branch[1:] for branch in branches])
        return list(linear_logprob(hidden, self.embedding.weight, target).split([n - 1 for n in lengths]))


@torch.no_grad()
def main() -> None:
    """Score branches together and alone, and compare."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    decoder = Decoder().to(device)
    prompt, *branches = (torch.randint(VOCABULARY, (n,), device=device) for n in (40, 6, 3, 9))
    together = decoder(prompt, branches)
    alone = [decoder(torch.cat([prompt, branch])[:1], [torch.cat([prompt, branch])[1:]])[0] for branch in branches]
    worst = max(float((a - b[-len(a) :]).abs().max()) for a, b in zip(together, alone, strict=True))
    for branch, logprob in zip(branches, together, strict=True):
        print(f"branch of {len(branch)} tokens: log-prob {float(logprob.sum()):.3f}")
    print(f"largest difference from each branch run alone: {worst:.1e}")
    if worst > 1e-4:
        raise SystemExit("the branches do not agree with their sequences")


if __name__ == "__main__":
    main()
