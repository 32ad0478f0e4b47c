"""Checks of token ids that users give, and the token ids of texts and conversations."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fb_core._util import check_count
from fb_core.models.facts import CausalLM, Tokenizer, max_positions, vocabulary

TOGETHER = 1 << 16  # characters that are tokenized in one go, where there are several texts


def chat_ids(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    thinking: bool = False,
    check: Callable[[str], None] = lambda text: None,
) -> list[int]:
    """Token ids of a conversation, up to the answer: by the chat template, or as plain text without one.

    With `thinking` the answer begins with it, where the template can switch that. `check` gets the text before it is
    tokenized, and may refuse it; a text that the tokenizer has no ids for is a ValueError.
    """
    plain = not getattr(tokenizer, "chat_template", None)
    text = "\n".join(message["content"] for message in messages)
    if not plain:
        options = {"tokenize": False, "add_generation_prompt": True, **thinking_switch(thinking)}
        text = str(tokenizer.apply_chat_template(messages, **options))
    check(text)
    return text_ids(tokenizer, text, special=plain)


def thinking_switch(thinking: bool) -> dict[str, bool]:
    """The arguments by which chat templates switch thinking: Qwen's name, then DeepSeek's and Granite's."""
    return {"enable_thinking": thinking, "thinking": thinking}


def text_ids(tokenizer: Tokenizer, text: str, *, special: bool = True, name: str = "prompt") -> list[int]:
    """Token ids of a text, with the tokenizer's surrounding special tokens or without.

    Raises:
        TypeError: not a text.
        ValueError: a text that the tokenizer has no ids for.
    """
    (ids,) = _many_ids(tokenizer, [(name, text)], special)
    return ids


def _many_ids(tokenizer: Tokenizer, named: Sequence[tuple[str, str]], special: bool = False) -> list[list[int]]:
    """Token ids of texts, each with a name for errors; raises as `text_ids`."""
    for name, text in named:
        _check_text(name, text)
    try:
        return tokenizer([text for _, text in named], add_special_tokens=special).input_ids
    except Exception as problem:
        if type(problem) is not Exception:  # tokenizers raises plain Exceptions
            raise
        if len(named) > 1:
            return [_many_ids(tokenizer, [each], special)[0] for each in named]  # the one at fault is named
        ((name, text),) = named
        raise ValueError(
            f"{name}: expected words of the tokenizer's vocabulary, got {text[:80]!r} ({problem}); use those words, or "
            "a model that takes any text"
        ) from None


class TextGroup(NamedTuple):
    """A prefix, its candidates and their future as token ids, cut out of whole texts."""

    prefix: list[int]
    candidates: list[list[int]]
    future: list[int]


def text_group(
    tokenizer: Tokenizer, prefix: str, candidates: Sequence[str], future: str | None, where: str = ""
) -> TextGroup:
    """Token ids of prefix, candidates and future, as the tokenizer gives them for each whole text.

    prefix + candidate + future is encoded as one text, so that tokens are those that the model would see. Each part
    must begin where one of these tokens begins: ids of prefix, then of prefix + candidate, begin those of the whole.
    The special tokens that the tokenizer puts before a text are put before the prefix unless it begins with them; none
    are put after.

    Args:
        tokenizer: the model's own.
        prefix: may be empty if the tokenizer adds a token before a text.
        candidates: K texts.
        future: the text after each candidate; None if there is none, and errors then call candidates continuations.
        where: put before names in errors.

    Raises:
        TypeError: arguments that are not texts.
        ValueError: a part without a token, or one that begins inside a token or holds what the tokenizer has no token
            for, or a future whose tokens depend on the candidate.
    """
    steps = text_group_in_steps(tokenizer, prefix, candidates, future, where)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def text_group_in_steps(
    tokenizer: Tokenizer, prefix: str, candidates: Sequence[str], future: str | None, where: str = ""
) -> Generator[None, None, TextGroup]:
    """As `text_group`, some texts at each step."""
    kind = "continuations" if future is None else "candidates"
    if isinstance(candidates, str | bytes | Mapping | Set) or not isinstance(candidates, Iterable):
        raise TypeError(f"{where}{kind}: expected a list of texts, got {type(candidates).__name__}; make one of it")
    texts = list(candidates)
    if not texts:
        raise ValueError(f"{where}{kind}: expected at least one text, got none; ask for a pool first")
    named = {"prefix": prefix} | {f"{kind}[{k}]": text for k, text in enumerate(texts)}
    if future is not None:
        named["future"] = future
    for name, text in named.items():
        _check_text(where + name, text)

    def following(before: str, ids_before: list[int], name: str, whole: list[int]) -> list[int]:
        """Ids of the text `name`, after a text with known ids, in those of both."""
        text, name = named[name], where + name
        if whole[: len(ids_before)] != ids_before:
            raise ValueError(
                f"{name}: expected a text that begins a token after {before[-20:]!r}, got {text[:20]!r}, which the "
                "tokenizer joins with it; move a space or letters from one to the other, or pass token ids to score"
            )
        ids = whole[len(ids_before) :]
        if not ids or (tokenizer.unk_token_id in ids and tokenizer.unk_token not in text):
            got = f"{'the unknown one' if ids else 'none'} for {text[:80]!r}"
            raise ValueError(f"{name}: expected tokens that the tokenizer knows, got {got}; change the text")
        return ids

    first = text_ids(tokenizer, prefix, special=False, name=f"{where}prefix")
    found, after = list[list[int]](), list[int]()
    count = 1 + TOGETHER // (1 + len(prefix) + max(map(len, texts)) + len(future or ""))
    for start in range(0, len(texts), count):
        names = [f"{kind}[{k}]" for k in range(start, min(start + count, len(texts)))]
        befores = [(where + name, prefix + named[name]) for name in names]
        for name, whole in zip(names, _many_ids(tokenizer, befores), strict=True):
            found.append(following(prefix, first, name, whole))
        wholes = [] if future is None else [(f"{where}future", before + future) for _, before in befores]
        for k, whole in enumerate(_many_ids(tokenizer, wholes) if wholes else (), start):
            own = following(prefix + texts[k], [*first, *found[k]], "future", whole)
            after = after or own
            if own != after:
                raise ValueError(
                    f"{where}future: expected the same tokens after every candidate, got others after candidates[0] "
                    f"and candidates[{k}]; begin it with a space or another character that is not joined to it"
                )
        yield
    special = _leading_special(tokenizer, prefix + texts[0] + (future or ""), [*first, *found[0], *after])
    return TextGroup([*special, *first], found, after)


def _leading_special(tokenizer: Tokenizer, text: str, ids: list[int]) -> list[int]:
    """The special tokens that a tokenizer puts before a text with these ids; none if the text begins with them."""
    marked = text_ids(tokenizer, text)
    places = [n for n in range(len(marked)) if marked[n : n + len(ids)] == ids]
    if not places:
        raise ValueError(
            "tokenizer: expected special tokens only around a text, got some inside; pass token ids to score"
        )
    leading = marked[: places[0]]
    return [] if ids[: len(leading)] == leading else leading


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name}: expected a text, got {type(text).__name__}; pass token ids to score")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: expected Unicode text, got a lone surrogate; decode the bytes as UTF-8") from None


def token_ids(
    name: str, value: Tensor | Sequence[int], model: PreTrainedModel, valid_vocab: int | None = None
) -> Tensor:
    """`value` as int64 [n] on the model's device, every id inside its vocabulary, or below `valid_vocab`.

    What is not a tensor is checked on the host, a tensor where it is.

    Raises:
        TypeError: not integers.
        ValueError: more than one dimension, another device, or an id outside the vocabulary.
    """
    return _inside(name, _one_row(name, value, model.device), vocabulary(model), valid_vocab).to(model.device)


def id_list(name: str, value: Tensor | Sequence[int], size: int) -> list[int]:
    """As `token_ids`, for a model of `size` ids that is not in this process; a tensor may be on any device."""
    return _inside(name, _one_row(name, value), size).tolist()


def many_token_ids(
    name: str, values: Sequence[Tensor | Sequence[int]], model: PreTrainedModel, valid_vocab: int
) -> list[Tensor]:
    """Every sequence as int64 [n] on the model's device, ids below `valid_vocab`; all are checked in one pass.

    Raises:
        TypeError: not integers.
        ValueError: as `token_ids`, or an id in the vocabulary's padding.
    """
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected a list of sequences, got {type(values).__name__}; put each into a list")
    rows = [_one_row(f"{name}[{index}]", value, model.device) for index, value in enumerate(values)]
    if not rows:
        return []
    if len({row.device for row in rows}) > 1:
        rows = [row.to(model.device) for row in rows]
    whole = _inside(name, torch.cat(rows), vocabulary(model), valid_vocab).to(model.device)
    return list(whole.split([len(row) for row in rows]))


def _one_row(name: str, value: Tensor | Sequence[int], device: torch.device | None = None) -> Tensor:
    """`value` as integers [n], on the host if it was not a tensor; raises as `token_ids`."""
    if not isinstance(value, Tensor):
        return torch.tensor(_listed(name, value), dtype=torch.int64, device="cpu")
    if value.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: expected int64 token ids, got {value.dtype}; convert them with .long()")
    if value.ndim != 1:
        row = f", such as {name}[0]" if value.ndim > 1 else ""
        raise ValueError(f"{name}: expected one dimension, got shape {list(value.shape)}; pass one sequence{row}")
    if device is not None and value.device != device:
        raise ValueError(
            f"{name}: expected a tensor on the model's device {device}, got {value.device}; move it with "
            f".to('{device}')"
        )
    return value


def _inside(name: str, ids: Tensor, size: int, valid: int | None = None) -> Tensor:
    """The ids as int64, all at least 0, below `size` and, if given, below `valid`; raises as `token_ids`."""
    limit = size if valid is None else valid
    outside = (ids < 0) | (ids >= limit)
    if bool(outside.any()):
        got = int(ids[outside][0])
        remedy = "use the model's own tokenizer"
        if 0 <= got < size:
            remedy = "use the tokenizer's own ids, or another valid_vocab"
        raise ValueError(f"{name}: expected ids from 0 below {limit}, got {got}; {remedy}")
    return ids.long()


def _listed(name: str, value: object) -> list[int]:
    """The ids of a sequence that is not a tensor, each an int64; raises TypeError as `token_ids`."""

    def refusal(got: str, wanted: str = "a sequence of token ids") -> TypeError:
        return TypeError(f"{name}: expected {wanted}, got {got}")

    if isinstance(value, str | bytes):
        raise refusal("a text; encode it with the tokenizer")
    if isinstance(value, Mapping):
        raise refusal(f"{type(value).__name__}; pass its input_ids")
    if isinstance(value, Set) or not isinstance(value, Iterable):
        raise refusal(f"{type(value).__name__}; pass a list of ints")
    ids: list[Any] = [entry.item() if isinstance(entry, Tensor) and not entry.ndim else entry for entry in value]
    for index, entry in enumerate(ids):
        if hasattr(entry, "__len__") and not isinstance(entry, str | bytes):
            raise refusal(f"a {type(entry).__name__} at place {index}; pass one sequence, such as {name}[{index}]")
        if isinstance(entry, bool | float):
            raise refusal(f"{entry} at place {index}; convert them with int()", "int64 token ids")
        if not isinstance(entry, Integral):
            raise refusal(f"{reprlib.repr(entry)} at place {index}; pass a list of ints")
        if not -(1 << 63) <= int(entry) < 1 << 63:
            raise refusal(f"{reprlib.repr(entry)} at place {index}, beyond int64; use the model's own tokenizer")
    return ids


def check_position(position: int, length: int) -> int:
    """A state's position in a trajectory as a plain int; TypeError if it is none, ValueError past the trajectory."""
    try:
        count = operator.index(position)
    except TypeError:
        raise TypeError(
            f"position: expected an int, got {type(position).__name__}; count the prefix's tokens"
        ) from None
    if count > length:
        raise ValueError(f"position: expected 1 to {length} for this trajectory, got {count}; count its tokens")
    return count


def check_group(
    model: PreTrainedModel,
    position: int,
    candidates: Tensor | Sequence[int],
    future: int = 1,
    valid_vocab: int | None = None,
) -> Tensor:
    """The candidates of a state after `position` tokens as checked ids; `future` is how many positions they need.

    Raises:
        TypeError: ids that are not integers.
        ValueError: no prefix, no candidate, an id given twice or outside the vocabulary, or too many positions.
    """
    ids = _inside("candidates", _one_row("candidates", candidates, model.device), vocabulary(model), valid_vocab)
    if len(ids) == 0:
        raise ValueError("candidates: expected at least one token id, got none; ask for a pool first")
    if len(ids.unique()) < len(ids):
        raise ValueError(f"candidates: expected no id twice, got {ids.tolist()}; remove duplicates with joint_pool")
    check_positions(model, position, future)
    return ids.to(model.device)


def check_positions(model: PreTrainedModel, position: int, rows: int) -> None:
    """ValueError for no prefix, or if the model lacks positions for a prefix of `position` tokens and `rows` more."""
    if position < 1:
        raise ValueError(f"prefix: expected at least 1 token, got {position}; a state needs a token before it")
    limit = max_positions(model)
    if limit is not None and position + rows > limit:
        raise ValueError(
            f"prefix: expected at most {limit} positions with what follows it, got {position} + {rows}; "
            "shorten the prefix or the future"
        )


def checked_prompts(name: str, prompts: Sequence[Tensor | Sequence[int]], model: CausalLM, room: int) -> list[Tensor]:
    """Prompts as int64 tensors on the model's device, each checked to leave `room` positions free.

    Raises as `token_ids`, and ValueError for no ids or a prompt that is too long.
    """
    limit = max_positions(model)
    checked = [token_ids(name, ids, model) for ids in prompts]
    for ids in checked:
        if not len(ids):
            raise ValueError(f"{name}: expected at least one token, got none; begin with the prompt")
        if limit is not None and len(ids) + room > limit:
            raise ValueError(
                f"{name}: expected at most {limit - room} tokens for a model of {limit} positions, got {len(ids)}; "
                "shorten the prompt"
            )
    return checked


def check_max_new_tokens(max_new_tokens: int, least: int = 1) -> int:
    """It as a plain int; TypeError if it is none, ValueError if below `least`."""
    if not isinstance(max_new_tokens, Integral):
        raise TypeError(f"max_new_tokens: expected an int, got {type(max_new_tokens).__name__}; convert it with int()")
    return check_count("max_new_tokens", max_new_tokens, least, "the published limit is 4096")
