"""Texts scored: their tokens are those of the whole text, their scores those of full forwards, the rest is refused."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fb_core import CompatibilityScorer
from fb_core.apps.demo.pairs import load_pair
from fb_core.models.facts import known_ids
from fb_core.models.tokens import chat_ids, text_group, text_ids

CORPUS = [
    "The answer is 42. So we have to multiply 12 by 3, and then add 6.",
    "the other answers are not the answer; this is 123456, that is 7 and 8.",
    "naïve Übergröße 中文字符 русский 🙂",
] * 4
PREFIX, CANDIDATES, FUTURE = "The answer", [" is", " are", " then", " not the", ", and so"], " 42. So we add 6"
V = 400


@pytest.mark.parametrize(("text", "kind"), [("a\ud800b", ValueError), ("\udfff", ValueError), (b"a", TypeError)])
def test_what_is_no_unicode_text_has_no_ids(text, kind):
    with pytest.raises(kind, match="prompt:"):
        text_ids(byte_pairs(), text)
    if isinstance(text, str):
        with pytest.raises(kind, match="prompt:"):
            chat_ids(byte_pairs(), [{"role": "user", "content": text}])


@cache
def byte_pairs(kind: str = "plain") -> PreTrainedTokenizerFast:
    """GPT-2's kind: bytes and merges. "bos" puts a token ahead, "around" also one behind, as some Llama folders do."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special, alphabet = ["<s>", "</s>", "<|user|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=V, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    if kind != "plain":
        single = "<s> $A" + (" </s>" if kind == "around" else "")
        made.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<|user|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


@cache
def pieces() -> PreTrainedTokenizerFast:
    """SentencePiece's kind: spaces are part of words, and a text begins with one that is not there."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    options = {"vocab_size": 120, "special_tokens": ["<unk>", "<s>"], "unk_token": "<unk>", "show_progress": False}
    made.train_from_iterator(CORPUS, trainers.UnigramTrainer(**options))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


@cache
def words() -> PreTrainedTokenizerFast:
    """A token a word in small letters, unknown ones included; spaces and case are lost."""
    names = sorted({word for line in CORPUS for word in re.findall(r"\w+|[^\w\s]", line.lower())})
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(["<unk>", *names])}, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


TOKENIZERS = {
    "bytes": byte_pairs,
    "bytes with bos": lambda: byte_pairs("bos"),
    "bytes with bos and eos": lambda: byte_pairs("around"),
    "pieces": pieces,
    "words": words,
}


def definition(model, tokenizer, prefix, candidate, future):
    """[H] in float64: a full forward over the tokens of the whole text, of which the future is the end."""
    whole = tokenizer(prefix + candidate + future, add_special_tokens=False).input_ids
    length = len(whole) - len(tokenizer(prefix + candidate, add_special_tokens=False).input_ids)
    has_bos = tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    ids = torch.tensor([*([tokenizer.bos_token_id] if has_bos else []), *whole])
    with torch.no_grad():
        logprob = (
            model(input_ids=ids[None], use_cache=False).logits[0, :, : known_ids(tokenizer)].double().log_softmax(-1)
        )
    return logprob[:-1].gather(1, ids[1:, None])[-length:, 0]


@cache
def scorer_of(name, family="qwen3"):
    return CompatibilityScorer(tiny(family, vocab_size=V), tokenizer=TOKENIZERS[name]())


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_scores_equal_full_forwards_over_the_whole_text(name, family):
    scorer = scorer_of(name, family)
    model = tiny(family, vocab_size=V).double()
    want = torch.stack([definition(model, scorer.tokenizer, PREFIX, one, FUTURE) for one in CANDIDATES])
    found = scorer.score_texts(PREFIX, CANDIDATES, FUTURE, reduction="none")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
    assert not found.requires_grad
    mean, total = (scorer.score_texts(PREFIX, CANDIDATES, FUTURE, reduction=way) for way in ("mean", "sum"))
    assert mean.shape == total.shape == (5,)
    torch.testing.assert_close(mean, want.mean(1).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, want.sum(1).float(), rtol=1e-5, atol=1e-4)
    assert torch.equal(scorer.score_texts(PREFIX, CANDIDATES, FUTURE), mean)


def test_one_token_candidates_score_as_their_ids():
    scorer = scorer_of("bytes with bos")
    group = text_group(scorer.tokenizer, PREFIX, CANDIDATES[:3], FUTURE)
    assert {len(ids) for ids in group.candidates} == {1}
    want = scorer.score(group.prefix, [ids[0] for ids in group.candidates], group.future)
    found = scorer.score_texts(PREFIX, CANDIDATES[:3], FUTURE, reduction="none")
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("budget", [1, 40, 10_000])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_many_groups_equal_single_ones(budget, reduction):
    scorer = scorer_of("bytes with bos")
    groups = [(PREFIX, CANDIDATES, FUTURE), ("the", [" other"], " is 7"), ("this is", [" 7", " naïve"], " and 8.")]
    found = scorer.score_texts_many(groups, budget, reduction=reduction)
    assert len(found) == 3
    for one, group in zip(found, groups, strict=True):
        torch.testing.assert_close(one, scorer.score_texts(*group, reduction=reduction), rtol=1e-5, atol=1e-5)
    assert scorer.score_texts_many([]) == []


@given(data=st.data())
def test_any_texts_are_scored_by_the_whole_text_or_refused(data):
    name = data.draw(st.sampled_from(list(TOKENIZERS)))
    scorer, alphabet = scorer_of(name), "The answr 12,.\nü中🙂 "
    text = st.text(alphabet, max_size=6)
    prefix, future = data.draw(text), data.draw(text)
    candidates = data.draw(st.lists(text, min_size=1, max_size=4))
    refusal = ""
    try:
        found = scorer.score_texts(prefix, candidates, future, reduction="none")
    except ValueError as problem:
        refusal = str(problem)
    if refusal:
        assert re.fullmatch(r"(prefix|candidates\[\d\]|future): expected [^\n]+", refusal)
        return
    model = tiny(vocab_size=V).double()
    want = [definition(model, scorer.tokenizer, prefix, candidate, future) for candidate in candidates]
    assert found.shape == (len(candidates), len(want[0]))
    torch.testing.assert_close(found.double(), torch.stack(want), rtol=1e-5, atol=1e-5)


@given(cuts=st.lists(st.integers(1, 40), min_size=2, max_size=2, unique=True).map(sorted))
def test_a_text_may_be_cut_where_its_tokens_end_and_nowhere_else(cuts):
    tokenizer, (start, stop) = byte_pairs(), cuts
    text = "The answers are not 123, so multiply 42 by it."
    ends = [end for _, end in tokenizer(text, return_offsets_mapping=True).offset_mapping]
    own = [tokenizer(text[:end]).input_ids for end in (start, stop)]
    fits = all(tokenizer(text).input_ids[: len(ids)] == ids for ids in own)
    try:
        group = text_group(tokenizer, text[:start], [text[start:stop]], text[stop:])
    except ValueError:
        assert not fits
        return
    assert fits
    assert start in ends
    assert stop in ends
    assert [*group.prefix, *group.candidates[0], *group.future] == tokenizer(text).input_ids


def test_special_tokens_stand_ahead_once():
    for kind in ("bos", "around"):
        group = text_group(byte_pairs(kind), "the", [" other"], " answer")
        assert (group.prefix[0], group.prefix.count(0), group.future.count(1)) == (0, 1, 0)
        assert text_group(byte_pairs(kind), "<s>the", [" other"], " answer") == group  # as a chat template writes it
        assert text_group(byte_pairs(kind), "", ["the"], " answer").prefix == [0]
    chat = text_group(byte_pairs("bos"), "<|user|>the", [" other"], " answer</s>")
    assert (chat.prefix[:2], chat.future[-1]) == ([0, 2], 1)
    assert text_group(byte_pairs(), "the", [" other"], " answer").prefix == byte_pairs()("the").input_ids


def test_the_demos_words_are_scored():
    pair = load_pair("plans")
    scorer = CompatibilityScorer(pair.slm, tokenizer=pair.world.tokenizer)
    found = scorer.score_texts("29*9+7*7+9;", ["so ", "hence ", "as "], "29*9+7~18,88,8>68. ")
    assert found.shape == (3,)
    with pytest.raises(ValueError, match=r"candidates\[1\]:"):
        scorer.score_texts("29*9+7*7+9;", ["so ", "perhaps "], "29*9+7~18,88,8>68. ")


def test_the_documents_example_runs(capsys):
    text = (Path(__file__).parents[2] / "docs" / "scoring.md").read_text(encoding="utf-8")
    (block,) = (one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "score_texts(" in one)
    exec(block, {})
    assert capsys.readouterr().out.startswith("tensor([")


BAD = [  # texts, and the argument that is named
    (("The answer ", ["is"], " 42"), "candidates[0]:"),  # a space that the next word has
    (("The answer", [" is", "s"], " 42"), "candidates[1]:"),  # half a word
    *((("The answer", [" is "], "42"), "future:"), (("The answer", [], " 42"), "candidates:")),
    *((("The answer", [" is", ""], " 42"), "candidates[1]:"), (("The answer", [" is"], ""), "future:")),
    *((("", ["The"], " answer"), "prefix:"), (("The \udcff", [" is"], " 42"), "prefix:")),
    (("The answer" * 99, [" is"], " 42"), "prefix:"),
]


@pytest.mark.parametrize(("texts", "words"), BAD)
def test_what_cannot_be_scored_is_one_sentence(texts, words):
    scorer = scorer_of("bytes")
    with pytest.raises(ValueError) as raised:
        scorer.score_texts(*texts)
    assert str(raised.value).startswith(words)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError) as raised:
        scorer.score_texts_many([(PREFIX, CANDIDATES, FUTURE), texts])
    assert str(raised.value).removeprefix("groups[1].").startswith(words)


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        *(((prefix, [" is"], " 42"), "prefix") for prefix in (3, [1, 2], None, b"The")),
        *((("The", candidates, " 42"), "candidates") for candidates in (" is", {" is": 1}, {" is"}, None)),
        *((("The", [" is", 3], " 42"), r"candidates\[1\]"), (("The", [" is"], [" 42"]), "future")),
    ],
)
def test_what_is_no_text_is_a_type_error(texts, name):
    with pytest.raises(TypeError, match=f"^{name}: expected a (list of )?text"):
        scorer_of("bytes").score_texts(*texts)


def test_unknown_words_are_refused_where_they_count():
    scorer = scorer_of("words")
    assert scorer.score_texts("The zebra", [" is"], " not").shape == (1,)  # of a prefix the model makes what it can
    for texts, name in ((("The", [" zebra"], " is"), r"candidates\[0\]"), (("The", [" is"], " a zebra"), "future")):
        with pytest.raises(ValueError, match=f"^{name}: .*unknown"):
            scorer.score_texts(*texts)
    assert scorer.score_texts("The", [" is"], " <unk>").shape == (1,)  # said by name


def test_a_future_whose_tokens_depend_on_the_candidate_is_refused():
    """Behind "b" alone "cd" is two tokens, as digits that are grouped from the right are other ones behind others."""
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(["a", "b", "c", "d", "cd", "e"])}))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(?<=b)c|cd|."), "isolated")
    assert text_group(PreTrainedTokenizerFast(tokenizer_object=made), "a", ["e", "a"], "cd").future == [4]
    assert text_group(PreTrainedTokenizerFast(tokenizer_object=made), "a", ["b", "eb"], "cd").future == [2, 3]
    with pytest.raises(ValueError, match=r"^future:"):
        text_group(PreTrainedTokenizerFast(tokenizer_object=made), "a", ["e", "b"], "cd")


def test_other_arguments_are_refused():
    texts = PREFIX, CANDIDATES, FUTURE
    for call, kind, words in (
        *(
            (lambda way=way: scorer_of("bytes").score_texts(*texts, reduction=way), ValueError, "reduction:")
            for way in ("max", None, "", "Mean")
        ),
        (lambda: CompatibilityScorer(tiny()).score_texts(*texts), ValueError, "tokenizer:"),
        (lambda: CompatibilityScorer(tiny(), tokenizer="gpt2"), TypeError, "tokenizer:"),
        (lambda: CompatibilityScorer(tiny(), tokenizer=byte_pairs()).score_texts(*texts), ValueError, "below 50"),
    ):
        with pytest.raises(kind, match=words):
            call()
