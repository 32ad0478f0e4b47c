"""One step of greedy decoding on the device: the last token in, the next token or a reason to halt out."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_core.engine.static import StaticModel
from fb_core.policy import RequestPolicy
from fb_kernels import DecodeState, Halt, commit_, topk_entropy

RING = 4
"""Outcomes on their way to the host."""


class DecodeStep:
    """A sequence under way: its state, and the step that appends to it.

    `run` reads and writes the same tensors every time and never asks the host. Once the state has halted, running it
    again computes the same values and changes nothing, so that a step may be enqueued before the host has looked.

    Args:
        model: takes the step.
        vocabulary: how many of its ids count.
        policy: when the step halts for an event.
        ends: ids at which it halts.
    """

    def __init__(self, model: StaticModel, vocabulary: int, policy: RequestPolicy, ends: frozenset[int]) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.top_k = min(policy.top_k, vocabulary)
        with torch.inference_mode(False):
            device = model.first.device
            self.state = DecodeState(
                tokens=torch.zeros(1, model.slots, dtype=torch.int64, device=device),
                length=torch.zeros(1, dtype=torch.int32, device=device),
                halt=torch.zeros(1, dtype=torch.int32, device=device),
                budget=torch.zeros(1, dtype=torch.int32, device=device),
            )
            self.logits = torch.zeros(1, vocabulary, device=device)
            self.threshold = torch.tensor(policy.threshold, device=device, dtype=torch.float64)
            self.ends = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
            self.limit = torch.tensor(model.slots, dtype=torch.int32, device=device)
            self.seen = torch.zeros(3, dtype=torch.float64, device=device)  # halt, token, entropy
            pinned = device.type == "cuda"
            self.ring = torch.zeros(RING, 3, dtype=torch.float64, pin_memory=pinned)
            self.copied = [torch.cuda.Event() for _ in range(RING)] if pinned else []
        self.ahead = 1 if pinned else 0
        self._begun = self._looked = 0  # runs since the sequence began, and those whose outcome was asked for

    @torch.no_grad()
    def begin(self, tokens: Tensor, budget: int) -> None:
        """A new sequence of tokens [P], the first P - 1 of which go through the model now."""
        if self.copied and self._begun:  # a step may still be under way, on another stream
            torch.cuda.current_stream(self.seen.device).wait_event(self.copied[(self._begun - 1) % RING])
        self.model.refresh()
        count = len(tokens)
        self.state.tokens[0, :count] = tokens
        self.state.length.fill_(count)
        self.state.budget.fill_(budget)
        if count > 1:
            self.model.extend(tokens[:-1].tolist(), 0)
        self.state.halt.zero_()
        self._looked = self._begun

    @torch.no_grad()
    def run(self) -> None:
        """Append the greedy token or halt; what it saw is in `logits`, and its outcome goes to the host."""
        if "step" not in self.model.graphs:
            halt = self.state.halt.clone()
            self.state.halt.fill_(Halt.LENGTH)  # so that a capture's runs append nothing
            self.model.graphs.run("step", self._compute)
            self.state.halt.copy_(halt)
        self.model.graphs.run("step", self._compute)
        place = self._begun % RING
        self.ring[place].copy_(self.seen, non_blocking=True)
        if self.copied:
            self.copied[place].record(torch.cuda.current_stream(self.seen.device))
        self._begun += 1
        self._looked = max(self._looked, self._begun - RING)  # older ones are overwritten

    def outcome(self) -> tuple[Halt, int, float]:
        """(why it halted, the greedy token, entropy in nats) of the next run, with `ahead` more enqueued behind it.

        Runs behind one that halted saw the same and are not asked for: `take` forgets them.
        """
        while self._begun <= self._looked + self.ahead:
            self.run()
        place = self._looked % RING
        if self.copied:
            self.copied[place].synchronize()
        self._looked += 1
        halt, token, entropy = self.ring[place].tolist()
        return Halt(int(halt)), int(token), entropy

    def _compute(self) -> None:
        state, model = self.state, self.model
        position = state.length - 1
        last = state.tokens.gather(1, position[:, None].long())[:, 0]
        hidden = model.forward(last, position, position, slots=position)
        self.logits.copy_(model.logits(hidden, self.vocabulary))
        entropy, _, ids = topk_entropy(self.logits, self.top_k)
        token = ids[:, 0]  # the first of equal ones
        commit_(state, token, entropy, threshold=self.threshold, eos_ids=self.ends, max_length=self.limit)
        self.seen.copy_(torch.cat((state.halt, token, entropy)))

    @torch.no_grad()
    def take(self, place: int, token: int, budget: int) -> None:
        """Put a token at `place`, which is where the sequence ends, and run on with so many events left."""
        self.state.tokens[0, place] = token
        self.state.length.fill_(place + 1)
        self.state.budget.fill_(budget)
        self.state.halt.zero_()
        self._looked = self._begun
