"""End to end: one method on a set of problems, verified."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fb_core import hf
from fb_core.decoding import Generation
from fb_core.verify import Verifier


@dataclass(frozen=True)
class Evaluation:
    """One method on one set of problems.

    Attributes:
        correct: bool [n], problem by problem.
        generations: one a problem.
        seconds: wall time of decoding, verification left out.
    """

    correct: np.ndarray
    generations: list[Generation]
    seconds: float

    @property
    def events(self) -> float:
        """Events a problem, on average."""
        return float(np.mean([len(generation.events) for generation in self.generations]))

    @property
    def new_tokens(self) -> float:
        """Tokens a problem, on average."""
        return float(np.mean([len(generation.token_ids) for generation in self.generations]))


def evaluate(
    generate: Callable[[Sequence[Tensor], int], list[Generation]],
    prompts: Sequence[Tensor],
    golds: Sequence[str],
    tokenizer: hf.Tokenizer,
    verifier: Verifier,
    max_new_tokens: int,
) -> Evaluation:
    """Run `generate` (such as `CollaborativeDecoder.generate_many`) on all prompts and verify what comes out."""
    began = time.perf_counter()
    generations = generate(prompts, max_new_tokens)
    seconds = time.perf_counter() - began
    texts = [tokenizer.decode(g.token_ids.tolist(), skip_special_tokens=True) for g in generations]
    verdicts = verifier.verify_many(texts, golds, bad_golds="unparsable")
    return Evaluation(np.array([verdict == "correct" for verdict in verdicts], dtype=bool), generations, seconds)
