"""Tokens as text: the pieces of an answer are together the tokenizer's own text, whatever its decoder."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import service_of
from starlette.testclient import TestClient
from tiny import tiny
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fb_core.apps.serve.app import Application
from fb_core.apps.serve.protocol import TokenLogprobs, _logprobs
from fb_core.decode.engine import Engine
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import LLMPreference
from fb_core.runtime.detokenizer import BYTE_OF, Name, Text

CHARACTER = {byte: char for char, byte in BYTE_OF.items()}
WORDS = [
    *("x", "y.", "▁x", "▁", "▁▁", "▁▁▁▁", "▁if", ":", "▁.", "é", "你", "�", "\n", "'", "n", "t", "▁'", "▁n", "▁n't"),
    "s",
]


def byte_level(text):
    return "".join(CHARACTER[byte] for byte in (text if isinstance(text, bytes) else text.encode()))


def made(model, decoder, **options):
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **options)
    found.add_special_tokens({"additional_special_tokens": ["<call>", "<|eot|>", "<｜é｜>"]})
    found.add_tokens([AddedToken("<own>", normalized=False)])
    return found


def word_pieces(cleanup, **options):
    vocabulary = {word: place for place, word in enumerate(["<unk>", *SUBWORDS])}
    return made(models.WordPiece(vocabulary, unk_token="<unk>"), decoders.WordPiece(cleanup=cleanup), **options)


def of_words(words, decoder, byte_fallback=False, **options):
    words = ["<unk>", *words, *([f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else [])]
    vocabulary = {word: place for place, word in enumerate(dict.fromkeys(words))}
    model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=byte_fallback)
    return made(model, decoder, **options)


def of_unigrams(words, decoder, **options):
    scored = [("<unk>", 0.0), *((word, -1.0) for word in words)]
    return made(models.Unigram(scored, unk_id=0), decoder, **options)


def fallback(*last):
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])


LEVELS = ["x", " ", " x", "  ", "\n", "é", "你", " 你", "好"[:1], "�", ".", " .", "'", " n't"]
PARTS = [bytes([byte]) for byte in range(256)] + ["你".encode()[1:], "é".encode()[1:] + b"x", " 你".encode()[:3]]
SUBWORDS = ["x", "##x", "##.", ".", "'", "##'", "n", "##n", "do", "not", "n't", "s", "!", "é", "##", "\n"]
TOKENIZERS = {
    "byte level": of_words([*map(byte_level, LEVELS), *map(byte_level, PARTS)], decoders.ByteLevel()),
    "byte fallback, Llama": of_words(WORDS, fallback(decoders.Strip(" ", 1, 0)), byte_fallback=True),
    "byte fallback, Gemma": of_words(WORDS, fallback(), byte_fallback=True),
    "fallback alone": of_words([], decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), byte_fallback=True),
    "metaspace": of_unigrams(WORDS, decoders.Metaspace()),
    "metaspace, first": of_unigrams(WORDS, decoders.Metaspace(prepend_scheme="first", split=False)),
    "metaspace, never": of_unigrams(WORDS, decoders.Metaspace(prepend_scheme="never")),
    "metaspace, cleaned": of_unigrams(WORDS, decoders.Metaspace(), clean_up_tokenization_spaces=True),
    "word pieces": word_pieces(True),
    "word pieces, cleaned": word_pieces(False, clean_up_tokenization_spaces=True),
    "ends of words": of_words(["x", "x</w>", "y</w>", "é</w>", "</w>"], decoders.BPEDecoder("</w>")),
    "no decoder": made(models.WordLevel({"<unk>": 0, "x": 1, "y": 2, "é": 3}, unk_token="<unk>"), None),
}


def written(tokenizer, ids, *stops, **options):
    text = Text(tokenizer, stops, **options)
    pieces = [text.add(token) for token in ids]
    return "".join([*pieces, text.end()]), text


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150)
@given(data=st.data(), skip=st.booleans())
def test_the_pieces_are_the_tokenizers_own_text(name, data, skip):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=14))
    got, text = written(tokenizer, ids, skip_special=skip)
    assert got == tokenizer.decode(ids, skip_special_tokens=skip)
    assert text.decoded == len(got)
    assert not text.stopped


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if not name.endswith(("cleaned", "alone"))])
@settings(max_examples=60)
@given(data=st.data())
def test_an_answer_goes_on_a_text(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=10))
    before = [tokenizer.convert_tokens_to_ids("x")]
    got, _ = written(tokenizer, ids, after_text=True)
    assert "x" + got == tokenizer.decode([*before, *ids], skip_special_tokens=True)


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if "cleaned" not in name])
@settings(max_examples=100)
@given(data=st.data())
def test_a_stop_string_ends_the_text_with_the_token_that_completes_it(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=12))
    whole = tokenizer.decode(ids)
    start = data.draw(st.integers(0, max(0, len(whole) - 1)))
    stop = whole[start : start + data.draw(st.integers(1, 9))]
    if not stop or "�" in stop:
        return
    texts = [tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
    want, at = next(((text.split(stop)[0], n) for n, text in enumerate(texts) if stop in text), (whole, None))
    text = Text(tokenizer, [stop, "no such text"], skip_special=False)
    pieces, stopped = [], None
    for place, token in enumerate(ids):
        pieces.append(text.add(token))
        if text.stopped and stopped is None:
            stopped = place
    assert ("".join([*pieces, text.end()]), stopped) == (want, at)


LLAMA, LEVEL = TOKENIZERS["byte fallback, Llama"], TOKENIZERS["byte level"]
CALL, EOT = LLAMA.convert_tokens_to_ids(["<call>", "<|eot|>"])


def ids_of(tokenizer, *pieces):
    return [token for piece in pieces for token in tokenizer.convert_tokens_to_ids([piece])]


def raw(text):
    return [f"<0x{byte:02X}>" for byte in text.encode()]


@pytest.mark.parametrize(
    ("pieces", "stops", "want"),
    [
        *((["x", "<|eot|>", "y."], ["<|eot|>"], "x"), (["x", "<call>", "<|eot|>", "y."], ["call><|e"], "x")),
        *((["x", "y.", "<|eot|>", "y."], ["y.<|eot|>"], "x"), (["x", "<|eot|>", "▁x", "y."], ["<|eot|> x"], "x")),
        *((["x", "<|eot|>", "y."], ["<|eot|>x", "z"], "xy."), (["x", *raw("你"), "<|eot|>", "y."], ["<|eot|>"], "x你")),
        *((["x", *raw("你\n"), "<|eot|>", "y."], ["\n<|eot|>"], "x你"), (["x", *raw("你好\n"), "y."], ["好\n"], "x你")),
        *(
            (["x", *raw("你"), "y.", "x"], ["你y"], "x"),
            (["x", *raw("你")[:2], "<|eot|>", raw("你")[2], "y."], ["你"], "x"),
        ),
        (["x", *raw("é")[:1], "▁x"], ["� x"], "x"),
        ([*raw(" é"), "<call>", *raw("你"), "<|eot|>", "x"], ["你<|"], "é"),
    ],
)
def test_special_tokens_and_bytes_may_be_in_stop_strings(pieces, stops, want):
    got, text = written(LLAMA, ids_of(LLAMA, *pieces), *stops)
    assert got == want
    assert text.stopped == (want != "xy.")


def test_the_first_token_that_completes_a_stop_string_of_bytes_stops():
    text = Text(LLAMA, ["\n\n"])
    assert [text.add(token) for token in ids_of(LLAMA, "x", *raw("你\n"))] == ["x", "", "", "", ""]
    assert (text.add(ids_of(LLAMA, "<0x0A>")[0]), text.stopped, text.end()) == ("你", True, "")


def test_a_stop_id_ends_the_text_before_it():
    got, text = written(LLAMA, ids_of(LLAMA, "x", *raw("你"), "y.", "x"), stop_ids=ids_of(LLAMA, "y."))
    assert (got, text.stopped) == ("x你", True)
    got, text = written(LLAMA, ids_of(LLAMA, "x", "y."), "y", stop_ids=ids_of(LLAMA, "<|eot|>"))
    assert (got, text.stopped) == ("x", True)


def test_each_token_has_a_name_and_its_bytes():
    text = Text(LLAMA, ())
    assert text.name(ids_of(LLAMA, "▁x")[0]) == Name("x", b"x")  # the beginning of a text loses a space
    text.add(ids_of(LLAMA, "▁x")[0])
    assert text.name(ids_of(LLAMA, "▁x")[0]) == Name(" x", b" x")
    assert text.name(ids_of(LLAMA, "<0x0A>")[0]) == Name("\n", b"\n")
    assert text.name(ids_of(LLAMA, "<0xE4>")[0]) == Name("bytes:\\xe4", b"\xe4")
    assert text.name(EOT) == Name("<|eot|>", b"<|eot|>")
    assert text.name(len(LLAMA)) == Name("", b"")
    level = Text(LEVEL, ())
    for part in (" 你", "é", "<call>"):
        token = LEVEL.convert_tokens_to_ids(byte_level(part) if part != "<call>" else part)
        assert level.name(token) == Name(part, part.encode())
    half = ids_of(LEVEL, byte_level(" 你".encode()[:3]))[0]
    assert level.name(half) == Name("bytes:\\x20\\xe4\\xbd", " 你".encode()[:3])


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if "cleaned" not in name])
@settings(max_examples=100)
@given(data=st.data(), after=st.booleans())
def test_names_join_to_the_text(name, data, after):
    """Where every token is whole characters; bytes join to the text's bytes wherever they are whole together."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=10))
    text, names, pieces = Text(tokenizer, (), skip_special=False, after_text=after), [], []
    for token in ids:
        names.append(text.name(token))
        pieces.append(text.add(token))
    whole = "".join([*pieces, text.end()])
    if "�" not in whole and "ends" not in name:
        assert b"".join(name.bytes for name in names) == whole.encode()
        if not any(name.text.startswith("bytes:") for name in names):
            assert "".join(name.text for name in names) == whole


def test_alternatives_of_one_name_are_all_kept():
    top = [("b", -0.5), ("�", -1.0), ("�", -1.5), ("b", -3.0), ("b", -4.0)]
    place = TokenLogprobs(Name("b", b"b"), -3.0, [(Name(name, name.encode()), value) for name, value in top], 0)
    named = _logprobs([place])["top_logprobs"][0]
    assert list(named.values()) == [value for _, value in top]
    assert named["b"] == -3.0
    other = _logprobs([place._replace(name=Name("c", b"c"), logprob=-9.0)])["top_logprobs"][0]
    assert list(other) == ["b", "�", "� (2)", "b (2)", "b (3)", "c"]


def test_text_grows_in_linear_time():
    """Twice the tokens take about twice the time, whole characters or not, with stop strings or without."""
    byte = ids_of(LEVEL, byte_level(b"\x80"))
    for tokenizer, ids, stops in (
        *((LEVEL, byte, ()), (LLAMA, ids_of(LLAMA, "<0xE4>"), ("\nend",))),
        *((LLAMA, ids_of(LLAMA, "<0x0A>"), ("\nend",)), (LLAMA, ids_of(LLAMA, "▁▁▁▁"), (" " * 9 + "end",))),
        (LEVEL, [*ids_of(LEVEL, byte_level(b"\xe4")), LEVEL.convert_tokens_to_ids("<call>")], ()),
        (LLAMA, ids_of(LLAMA, "<0xE4>", "<call>"), ()),
    ):
        calls = []
        for count in (500, 4000):
            text = Text(tokenizer, stops)
            joined, made = text._joined, []
            text._joined = lambda pieces, joined=joined, made=made: made.append(len(pieces)) or joined(pieces)
            whole = tokenizer.decode(ids * count, skip_special_tokens=True)
            assert "".join([*map(text.add, ids * count), text.end()]) == whole
            calls.append(sum(made))
        assert calls[1] <= 9 * calls[0]


class Served:
    """A tiny model with a tokenizer, behind the server's routes."""

    def __init__(self, engine, client):
        self.engine, self.client = engine, client

    def __call__(self, ids, **fields):
        answer = self.client.post("/v1/completions", json={"prompt": ids, "max_tokens": 40} | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    def ids(self, prompt):
        return self.engine.submit(prompt, 40).result(60).token_ids.tolist()


@pytest.fixture(scope="module")
def served():
    model = tiny("llama", 3, vocab_size=len(LLAMA))
    model.generation_config.eos_token_id = None
    options = {"max_length": 96, "max_events": 0}
    with Engine(Pair(model, None), LLMPreference(), RequestPolicy(9.0), **options) as engine:
        made = Application(service_of(engine, LLAMA, max_length=96))
        with TestClient(made) as client:
            yield Served(engine, client)


def test_a_completion_goes_on_its_prompt_and_ends_at_a_stop_id(served):
    prompt = ids_of(LLAMA, "x", ":")
    new = served.ids(prompt)
    whole = LLAMA.decode([*prompt, *new], skip_special_tokens=True)
    assert LLAMA.decode(prompt) + served(prompt)["text"] == whole
    assert served(prompt, skip_special_tokens=False)["text"] == LLAMA.decode([*prompt, *new])[2:]
    place = next(n for n in range(8, 40) if new[n] not in new[:n])
    cut = served(prompt, stop_token_ids=[new[place], 2**31 - 1])
    assert cut["finish_reason"] == "stop"
    assert LLAMA.decode(prompt) + cut["text"] == LLAMA.decode([*prompt, *new[:place]], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("stop_token_ids", it) for it in (7, ["7"], [-1], [True], [3] * 129)), ("skip_special_tokens", "yes")],
)
def test_wrong_stop_ids_are_refused(served, name, value):
    answer = served.client.post("/v1/completions", json={"prompt": [1], name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{name}: ")


def test_alternatives_and_bytes_of_an_answer_are_complete(served):
    prompt = ids_of(LLAMA, "x", ":")
    known = served(prompt, logprobs=10)["logprobs"]
    assert all(
        len(top) in (10, 11) and top[token] == value
        for top, token, value in zip(known["top_logprobs"], known["tokens"], known["token_logprobs"], strict=True)
    )
    chat = served.client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "x:"}], "max_tokens": 40, "logprobs": True, "top_logprobs": 10},
    ).json()["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 10 and entry["bytes"] is not None for entry in chat)
