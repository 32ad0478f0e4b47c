"""A small and a large model that share one vocabulary."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from fb_core import hf
from fb_core.llm import LLM, LocalLLM


class Pair:
    """SLM, LLM and tokenizer, checked once to share the meaning of token ids.

    Args:
        slm: the small model, in eval mode; it is never changed.
        llm: the large one; a transformers model is wrapped in a `LocalLLM`. None if no LLM is asked.
        tokenizer: the one both models use, or the pair (SLM's, LLM's), which must have the same vocabulary. The models'
            embeddings may then be padded differently, and ids beyond the tokenizer's are never used. Without a
            tokenizer, both models must take the same number of ids.

    Attributes:
        vocabulary: the number of ids that count.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: models with different vocabularies, or a model in training mode.
    """

    def __init__(
        self,
        slm: hf.CausalLM,
        llm: LLM | hf.CausalLM | None,
        tokenizer: hf.Tokenizer | tuple[hf.Tokenizer, hf.Tokenizer] | None = None,
    ) -> None:
        hf.check_decodable("slm", slm)
        known = _common_ids(tokenizer)
        if isinstance(llm, hf.CausalLM):
            llm = LocalLLM(llm, valid_vocab=None if known is None else min(known, hf.vocabulary(llm)))
        if llm is not None and not isinstance(llm, LLM):
            raise TypeError(
                f"llm: expected type LLM, got {type(llm).__name__}; pass a LocalLLM or a transformers causal LM"
            )
        self.slm = slm
        self.llm = llm
        self.tokenizer = tokenizer[0] if isinstance(tokenizer, tuple) else tokenizer
        size, others = hf.vocabulary(slm), None if llm is None else llm.vocabulary
        if known is None and others is not None and size != others:
            raise ValueError(
                f"llm: expected the SLM's vocabulary of {size} ids, got {others}; use two models of one family, or "
                "pass their tokenizer if only the padding of the embeddings differs"
            )
        for name, taken in (("slm", size), ("llm", others)):
            if known is not None and taken is not None and taken < known:
                raise ValueError(
                    f"{name}: expected at least the tokenizer's {known} ids, got {taken}; use its own tokenizer"
                )
        self.vocabulary = size if known is None else known

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a continuation of either model."""
        return hf.eos_ids(self.slm) | (frozenset() if self.llm is None else self.llm.ends)

    def large(self) -> LLM:
        """The LLM; TypeError if there is none."""
        if self.llm is None:
            raise TypeError("llm: expected type LLM, got NoneType; pass a LocalLLM or a transformers causal LM")
        return self.llm

    def text(self, token_ids: Tensor) -> str | None:
        """token_ids [n] as text without special tokens; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return cast(str, self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))


def known_ids(tokenizer: hf.Tokenizer) -> int:
    """The number of ids that a tokenizer knows, unused ids between them included."""
    return int(max(tokenizer.get_vocab().values())) + 1


def _common_ids(tokenizer: hf.Tokenizer | tuple[hf.Tokenizer, hf.Tokenizer] | None) -> int | None:
    """The number of ids that both tokenizers know; None without a tokenizer."""
    if tokenizer is None:
        return None
    given = tokenizer if isinstance(tokenizer, tuple) else (tokenizer,)
    if len(given) > 2 or not all(hasattr(one, "get_vocab") for one in given):
        raise TypeError(
            f"tokenizer: expected a tokenizer or a pair of them, got {type(tokenizer).__name__}; load one with "
            "AutoTokenizer"
        )
    small, large = (one.get_vocab() for one in (given[0], given[-1]))
    if small != large:
        differing = len({name for name in small.keys() | large.keys() if small.get(name) != large.get(name)})
        raise ValueError(
            f"tokenizer: expected SLM and LLM to share one vocabulary, got {len(small)} and {len(large)} entries of "
            f"which {differing} differ; use two models of one family"
        )
    return known_ids(given[0])
