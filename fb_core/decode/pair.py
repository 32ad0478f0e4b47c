"""A small and a large model that share one vocabulary."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from fb_core.llm.local import LLM, LocalLLM
from fb_core.models.facts import CausalLM, Tokenizer, eos_ids, known_ids, vocabulary
from fb_core.runtime.plain import check_decodable


class Pair:
    """SLM, LLM and tokenizer, checked once to share the meaning of token ids.

    Args:
        slm: the small model, in eval mode; it is never changed.
        llm: the large one; a transformers model is wrapped in a `LocalLLM`. None if no LLM is asked.
        tokenizer: the one both models use, or the pair (SLM's, LLM's), which must have the same vocabulary. The models'
            embeddings may then be padded differently, and ids beyond the tokenizer's are never used. Without a
            tokenizer, both models must take the same number of ids.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: models with different vocabularies, or a model in training mode.
    """

    def __init__(
        self,
        slm: CausalLM,
        llm: LLM | CausalLM | None,
        tokenizer: Tokenizer | tuple[Tokenizer, Tokenizer] | None = None,
    ) -> None:
        check_decodable("slm", slm)
        self._tokenizers = tokenizer if isinstance(tokenizer, tuple) else (tokenizer,)
        shared = _common_ids(self._tokenizers)
        if isinstance(llm, CausalLM):  # type: ignore[misc]
            llm = LocalLLM(llm, tokenizer=self._tokenizers[-1])
        if llm is not None and not isinstance(llm, LLM):
            raise TypeError(
                f"llm: expected type LLM, got {type(llm).__name__}; pass a LocalLLM or a transformers causal LM"
            )
        self.slm = slm
        self.llm = llm
        self.tokenizer = self._tokenizers[0]
        size, others = vocabulary(slm), None if llm is None else llm.vocabulary
        if shared is None and others is not None and size != others:
            raise ValueError(
                f"llm: expected the SLM's vocabulary of {size} ids, got {others}; use two models of one family, or "
                "pass their tokenizer if only the padding of the embeddings differs"
            )
        for name, taken in (("slm", size), ("llm", others)):
            if shared is not None and taken is not None and taken < shared:
                raise ValueError(
                    f"{name}: expected at least the tokenizer's {shared} ids, got {taken}; use its own tokenizer"
                )
        self.vocabulary = size if shared is None else shared  # the number of ids that count

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a continuation of either model, the tokenizers' end tokens included."""
        return eos_ids(self.slm, *self._tokenizers) | (frozenset() if self.llm is None else self.llm.ends)

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


def _common_ids(given: tuple[Tokenizer | None, ...]) -> int | None:
    """The number of ids that both tokenizers know; None without a tokenizer."""
    if given == (None,):
        return None
    if len(given) not in (1, 2) or not all(hasattr(tokenizer, "get_vocab") for tokenizer in given):
        kinds = ", ".join(type(tokenizer).__name__ for tokenizer in given) or "an empty tuple"
        raise TypeError(f"tokenizer: expected a tokenizer or a pair of them, got {kinds}; load one with AutoTokenizer")
    tokenizers = cast(tuple[Tokenizer, ...], given)
    small, large = (tokenizer.get_vocab() for tokenizer in (tokenizers[0], tokenizers[-1]))
    if small != large:
        differing = len({name for name in small.keys() | large.keys() if small.get(name) != large.get(name)})
        raise ValueError(
            f"tokenizer: expected SLM and LLM to share one vocabulary, got {len(small)} and {len(large)} entries of "
            f"which {differing} differ; use two models of one family"
        )
    return known_ids(tokenizers[0])
