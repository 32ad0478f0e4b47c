"""`futurebridge generate` and `futurebridge chat` on saved models, as a user runs them."""

from __future__ import annotations

import io
import json
import re
import shutil

import pytest
import torch
from dialects import FAMILY, SEED, byte_tokenizer, served
from rich.console import Console
from test_runtime import random_reranker
from test_server import Handler, probs, says, scripted
from tiny import EOS, V, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from warm import futurebridge

from fb_core import CollaborativeDecoder, LLMPreference, LocalLLM, RequestPolicy
from fb_core._util import escaped
from fb_core.apps.cli.chat import EVENT_STYLE, HELP, Chat, Printer, read_prompt
from fb_core.apps.serve.protocol import ChatRequest
from fb_core.apps.serve.run import load_server
from fb_core.apps.settings.pair import PairSettings, ServeSettings
from fb_core.decode.deployment import Deployed
from fb_core.events import Event

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w4{% endif %}"
    "{% if enable_thinking %} w5{% endif %}"
)


def tokenizer(words=V):
    vocabulary = {("<pad>", "</s>", "<unk>")[i] if i < 3 else f"w{i}": i for i in range(words)}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=built, chat_template=TEMPLATE, **special)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of an SLM, an LLM and an adapter."""
    folder = tmp_path_factory.mktemp("pair")
    for name, model in (("slm", tiny("qwen3", 1)), ("llm", tiny("qwen3", 2))):
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
        if name == "slm":
            random_reranker(model).save_pretrained(folder / "adapter")
    return folder


def options(pair, **more):
    given = {"slm": pair / "slm", "llm": pair / "llm", "threshold": 1.2, "max_new_tokens": 12, "max_length": 64} | more
    return options_of(given)


def options_of(given):
    """The options of a command."""
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]


def expected(pair, text):
    slm, llm = tiny("qwen3", 1), tiny("qwen3", 2)
    ids = AutoTokenizer.from_pretrained(pair / "slm")(text)["input_ids"]
    return CollaborativeDecoder(slm, LocalLLM(llm), LLMPreference(), RequestPolicy(1.2)).generate(ids, 12)


def test_generate_prints_the_decoders_text(pair, tmp_path):
    done = futurebridge("generate", "w7 w8", *options(pair))
    want = expected(pair, "w7 w8 w4")
    words = [f"w{token}" for token in want.token_ids.tolist() if token > 2]
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["".join(words)] or done.stdout.split() == words
    assert f"{len(want.token_ids)} tokens in" in done.stderr
    assert f"{len(want.events)} event(s), mean pool" in done.stderr
    (tmp_path / "prompt.txt").write_text("w7 w8")
    reranked = futurebridge("generate", *options(pair, adapter=pair / "adapter", file=tmp_path / "prompt.txt"))
    assert reranked.returncode == 0, reranked.stderr
    assert "tokens in" in reranked.stderr


def trained(pair, folder, thinking=False, recipe="direct"):
    """The adapter in a folder as `train` writes it."""
    shutil.copytree(pair / "adapter", folder)
    pools = {"pool": "joint", "slm_k": 3, "llm_k": 3, "max_events": 8}
    Deployed(name=recipe, value=None, threshold=1.2, top_k=64, pools=pools, thinking=thinking).save(folder)
    return folder


@pytest.mark.parametrize(("given", "stored", "wanted"), [(True, None, True), (None, True, True), (False, True, False)])
def test_thinking_is_the_users_or_the_adapters(pair, tmp_path, given, stored, wanted):
    """In a terminal and on a server: the template adds a word where thinking is on."""
    adapter = None if stored is None else str(trained(pair, tmp_path / "adapter", stored))
    values = {"slm": str(pair / "slm"), "llm": str(pair / "llm"), "threshold": 1.2, "max_new_tokens": 12}
    chosen = PairSettings(**values, adapter=adapter, thinking=given)
    messages = [{"role": "user", "content": "w7 w8"}]
    generation = Chat(chosen).answer(messages, Console(file=io.StringIO()))
    prompt = "w7 w8 w4 w5" if wanted else "w7 w8 w4"
    assert generation.token_ids.tolist() == expected(pair, prompt).token_ids.tolist()
    made = load_server(ServeSettings(**chosen.model_dump(), max_batch=1, kv_memory=1 << 24), loopback=True)
    try:
        (ids,) = made.service.prompts(ChatRequest.model_validate({"model": "m", "messages": messages}))
        assert ids == tokenizer()(prompt)["input_ids"]
    finally:
        made.service.engine.close()


def test_the_command_takes_thinking(pair):
    outputs = [futurebridge("generate", "w7 w8", *options(pair), *more) for more in ([], ["--thinking", "true"])]
    assert [done.returncode for done in outputs] == [0, 0], outputs[1].stderr
    assert outputs[0].stdout != outputs[1].stdout


def test_an_adapter_without_a_threshold_asks_for_one(pair, tmp_path):
    """One that `train` wrote has its own; one of `save_pretrained` has none."""
    words = options_of({"slm": pair / "slm", "llm": pair / "llm", "adapter": trained(pair, tmp_path / "adapter")})
    assert futurebridge("generate", "w7 w8", *words).returncode == 0
    words[words.index("--adapter") + 1] = pair / "adapter"
    done = futurebridge("generate", "w7 w8", *words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("futurebridge: threshold: ")


def test_chat_greets_and_knows_its_words_and_goes_on_until_an_empty_line(pair):
    """/new drops the conversation; what only begins with a slash is said to the model."""
    for end in ("/quit\nw9\n", "\nw9\n", ""):
        done = futurebridge("chat", *options(pair), typed=f"w7\n/help\n/new\nw7\n/w8\n{end}")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(HELP) == 3  # the greeting, /help, /new
        assert done.stderr.count("tokens in") == 3
        answers = [line for line in done.stdout.splitlines() if line.startswith("> ") and HELP not in line]
        assert answers[0] == answers[1]


def test_the_greeting_says_who_decides(pair, tmp_path):
    """By the recipe with which the adapter was deployed, or with the one asked for instead."""
    models = {"slm": str(pair / "slm"), "llm": str(pair / "llm")}
    for recipe, asked, said in (
        ("greedy", "chosen", f"{pair / 'slm'} answers by itself. "),
        ("direct", "chosen", f"{pair / 'llm'} is asked, and the large model's own choice decides. "),
        ("greedy", "published", f"is asked, and the reranker in {tmp_path / 'greedy'} decides. "),
    ):
        folder = tmp_path / recipe
        adapter = folder if folder.exists() else trained(pair, folder, recipe=recipe)
        assert said in Chat(PairSettings(**models, adapter=str(adapter), recipe=asked)).greeting()


def test_a_setting_may_be_a_variable_and_an_option_counts_before_it(pair):
    models = {"FUTUREBRIDGE_SLM": str(pair / "slm"), "FUTUREBRIDGE_LLM": str(pair / "llm")}
    variables = models | {"FUTUREBRIDGE_MAX_NEW_TOKENS": "0"}
    refused = futurebridge("generate", "w7 w8", **variables)
    assert refused.returncode == 2
    assert "max_new_tokens" in refused.stderr
    done = futurebridge("generate", "w7 w8", "--max-new-tokens", "3", **variables)
    assert done.returncode == 0, done.stderr
    assert "3 tokens in" in done.stderr


def test_events_are_highlighted(pair):
    chat = Chat(PairSettings(slm=str(pair / "slm"), llm=str(pair / "llm"), threshold=1.2, max_new_tokens=12))
    screen, marked = (Console(file=io.StringIO(), force_terminal=True, color_system="standard") for _ in range(2))
    generation = chat.answer([{"role": "user", "content": "w7 w8"}], screen)
    assert generation.events
    marked.print("x", style=EVENT_STYLE, end="")
    code = marked.file.getvalue().split("x")[0]
    assert screen.file.getvalue().count(code) == len([event for event in generation.events if event.token > 2])


def test_characters_are_printed_whole():
    words = byte_tokenizer()
    for tokens, shown, end in (
        (words.encode("a\N{EURO SIGN}b\nc\N{EURO SIGN}")[:-1], "a\N{EURO SIGN}b\nc", "\N{REPLACEMENT CHARACTER}\n"),
        ([*words.encode("a\x9b")[:2], *words.encode("\x1b")], "a\N{REPLACEMENT CHARACTER}\\x1b", "\n"),
    ):
        screen = io.StringIO()
        show = Printer(words, Console(file=screen, width=80))
        for token in tokens:
            show(token, None)
        assert screen.getvalue() == shown
        show.end()
        assert screen.getvalue() == shown + end


def test_words_keep_the_spaces_that_only_their_neighbours_show():
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"if:": 0, "\n": 1, "pass": 2})))
    indented = Tokenizer(models.BPE({"if:": 0, "\n": 1, "\u2581\u2581\u2581\u2581": 2, "pass": 3}, []))
    indented.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    for made, ids, want in (
        (words, [0, 0, 2], "if: if: pass"),
        (PreTrainedTokenizerFast(tokenizer_object=indented), [0, 1, 2, 3, 1, 2, 3], "if:\n    pass\n    pass"),
    ):
        screen = io.StringIO()
        show = Printer(made, Console(file=screen, width=80))
        for token in ids:
            show(token, None)
        assert screen.getvalue() == made.decode(ids) == want


def test_a_prompt_is_a_text_or_a_file_as_an_editor_shows_it(tmp_path):
    path = tmp_path / "prompt.txt"
    for data, want in (
        *((b"\xef\xbb\xbf29*9;\r\n", "29*9;"), (b"29*9;\n", "29*9;"), (b"a\r\nb\n\n", "a\nb\n")),
        *((b"  a  ", "  a  "), (b"", "")),
    ):
        path.write_bytes(data)
        assert read_prompt(None, path) == want
    path.write_bytes("h\u00e9".encode("utf-16"))
    for text, file, named in ((None, path, r"prompt\.txt:"), ("x", path, "both"), (None, None, "neither")):
        with pytest.raises(ValueError, match=named):
            read_prompt(text, file)


def test_on_token_sees_every_token_and_its_event():
    seen, ids = [], torch.tensor([7, 8])
    decoder = CollaborativeDecoder(tiny("qwen3", 1), LocalLLM(tiny("qwen3", 2)), LLMPreference(), RequestPolicy(1.2))
    generation = decoder.generate(ids, 12, on_token=lambda *token: seen.append(token))
    assert [token for token, _ in seen] == generation.token_ids.tolist()
    assert [event for _, event in seen if event] == generation.events
    assert generation.token_ids.tolist() == decoder.generate(ids, 12).token_ids.tolist()
    assert EOS in generation.token_ids.tolist()[-1:] or len(generation.token_ids) == 12


SERVER = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(({"slm": "nowhere/at-all"}, "nowhere/at-all"), ({"llm": None}, "expected llm or server, got neither")),
        *(
            ({"threshold": "nan"}, "threshold"),
            ({"max_new_tokens": 0}, "max_new_tokens"),
            ({"flavour": "t"}, "flavour"),
        ),
        *(({"adapter": "no-adapter"}, "no-adapter"), ({"api_key_variable": "KEY"}, "api_key_variable:")),
        ({"llm": None, "server": SERVER, "api_key_variable": "NO_KEY"}, "NO_KEY"),
        *(({"max_length": 4}, "max_length:"), ({"server": f"{SERVER}/\x1b]0;x"}, f"url: .*{SERVER}/\\\\x1b")),
        ({"slm": "\x1b]52;c;eA==\x07"}, r"\\x1b\]52;c;eA==\\x07: "),
    ],
)
def test_errors_are_one_message(pair, change, words):
    given = {name: value for name, value in ({"llm": pair / "llm"} | change).items() if value is not None}
    arguments = options(pair, **given)
    if change.get("llm", "") is None:
        place = arguments.index("--llm")
        del arguments[place : place + 2]
    done = futurebridge("generate", "w7 w8", *arguments)
    assert done.returncode == 2
    assert re.search(words, done.stderr)
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr


def test_models_of_two_families_are_refused(pair, tmp_path):
    tiny("qwen3", 2, vocab_size=V + 1).save_pretrained(tmp_path)
    tokenizer(V + 1).save_pretrained(tmp_path)
    done = futurebridge("generate", "w7", *options(pair, llm=tmp_path))
    assert done.returncode == 2
    assert "tokenizer: expected SLM and LLM to share one vocabulary" in done.stderr


def test_the_llm_may_be_behind_a_server(tmp_path):
    """That answers as vLLM does; the tokens are those of the same model in this process."""
    words = byte_tokenizer()
    slm, llm = (tiny(family, seed, vocab_size=len(words)) for family, seed in (("qwen3", 1), (FAMILY, SEED)))
    slm.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    with served(len(words)) as url:
        given = {"slm": tmp_path, "server": url, "threshold": 1.2, "max_new_tokens": 12, "max_length": 64}
        done = futurebridge("generate", "hello", *options_of(given))
    decoder = CollaborativeDecoder(slm, LocalLLM(llm), LLMPreference(), RequestPolicy(1.2))
    want = decoder.generate(torch.tensor(words("hello")["input_ids"]), 12)
    assert done.returncode == 0, done.stderr
    assert want.events
    assert f"{len(want.token_ids)} tokens in" in done.stderr
    assert f"{len(want.events)} event(s)" in done.stderr


# --- what models and servers write never steers the terminal ----------------------------------------------------------

HOSTILE = {
    "CSI": "\x1b[2J\x1b[31mred",
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;ZXZpbA==\x1b\\",
    "DECRQSS": "\x1bP$q\x22p\x1b\\",
    "link": "\x1b]8;;http://evil\x1b\\here\x1b]8;;\x1b\\",
    "C1": "\x9b2J\x9d0;x\x9c\x90q\x85",
    "bidi": "\u202egnorw\u202c \u2066a\u2069 \u200f\u061c",
    "DEL": "ab\x7f\x08\x08cd",
    "return": "good\rbad\x0b\x0c",
    "bell": "\x07\x00\x1a\x18",
    "invisible": "a\u200bb\ufeffc\u2028d\u2029",
    "tags": "\U000e0041\U000e0001\ue000",
    "charset": "\x1b(0\x0elqqk\x0f\x1bc",
    "markup": "[red]x[/red] [link=http://evil]y[/link] :boom:",
}
KEPT = "so\tit is:\n\u00fcber \u4e2d\u6587 \U0001f642 e\u0301 caf\u00e9\n\tend"


def words_of(text):
    """Byte-level BPE whose merges put an escape and its first letter, and parts of characters, into one token."""
    made = byte_tokenizer()
    starts = (made.encode(part) for part in ("\x1b[", "\x1b]", "\u202e", "\u4e2d"))
    return byte_tokenizer(merges=[tuple(made.convert_ids_to_tokens(ids)[:2]) for ids in starts])


def printable(text):
    return all(char.isprintable() or char in "\n\t" for char in text)


@pytest.mark.parametrize("name", HOSTILE)
def test_escapes_of_a_model_are_shown_and_do_nothing_however_they_are_split(name):
    text = KEPT + HOSTILE[name] + KEPT
    words = words_of(text)
    merged = words.encode(text, add_special_tokens=False)
    single = byte_tokenizer().encode(text, add_special_tokens=False)
    assert words.decode(merged) == byte_tokenizer().decode(single) == text
    for made, ids in ((words, merged), (byte_tokenizer(), single)):
        for options in ({}, {"force_terminal": True, "color_system": "standard"}):
            screen = io.StringIO()
            show = Printer(made, Console(file=screen, width=80, **options))
            for number, token in enumerate(ids):
                show(token, Event.alone(number, 1.0, torch.zeros(2)) if options and number % 3 == 0 else None)
            show.end()
            written = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue()) if options else screen.getvalue()
            assert printable(written)
            assert written == escaped(text, {"\n": "\n", "\t": "\t"}) + "\n"
            assert KEPT in written
            assert text not in written or name == "markup"


class Dictating(Handler):
    """llama.cpp's server holding a model that is certain of the next token of `script`, or refuses what has a "!"."""

    script = ()

    def do_POST(self):
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = self.server.words
        if self.path == "/tokenize":
            says({"tokens": words.encode(fields["content"], add_special_tokens=False)})(self)
        elif words.convert_tokens_to_ids("!") in fields["prompt"]:
            says({"error": "no \x1b]0;exclamation\x07 marks"}, 400)(self)
        else:
            script, place = self.server.script, len(fields["prompt"]) - self.server.prompt
            wanted = script[place] if 0 <= place < len(script) else words.eos_token_id
            says(probs(*((token, -0.1 if token == wanted else -9.0) for token in range(len(words)))))(self)


@pytest.fixture
def dictated(tmp_path):
    """(options, server): the SLM is asked about at every token, and the server says which it is."""
    words = byte_tokenizer()
    words.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    slm = tiny("qwen3", 1, vocab_size=len(words), max_position_embeddings=2048)
    slm.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    with scripted() as there:
        there.RequestHandlerClass, there.words, there.script, there.prompt = Dictating, words, [], 0
        given = {"slm": tmp_path, "server": there.url, "flavour": "llama.cpp", "max_length": 1024}
        yield options_of(given | {"threshold": "-inf", "max_events": 600}), there


def test_generate_passes_nothing_to_the_terminal(dictated):
    options, there = dictated
    text = "".join(HOSTILE.values()) + KEPT
    there.script = there.words.encode(text, add_special_tokens=False)
    there.prompt = len(there.words("hi ")["input_ids"])
    for environment in ({}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}):
        done = futurebridge("generate", "hi", *options, "--max-new-tokens", "600", **environment)
        assert done.returncode == 0, done.stderr
        assert f"{len(there.script) + 1} tokens in" in done.stderr
        written = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
        assert printable(written)
        assert written == escaped(text, {"\n": "\n", "\t": "\t"}) + "\n"
        assert ("\x1b[" in done.stdout) == bool(environment)


# --- a conversation outlives its turns --------------------------------------------------------------------------------


def test_a_failing_server_ends_the_turn_and_not_the_conversation(dictated):
    options, there = dictated
    there.script = there.words.encode("yes", add_special_tokens=False)
    there.prompt = len(there.words("hi ")["input_ids"])
    done = futurebridge("chat", *options, "--max-new-tokens", "8", typed="hi\nhi!\nhi\n\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("yes") == 1  # the third turn has the first before it, and its prompt another length
    assert done.stderr.count("tokens in") == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("futurebridge: ")]
    assert "got status 400" in line
    assert printable(done.stderr)


def test_a_conversation_that_outgrows_the_length_drops_its_oldest_turns(pair):
    said = [f"w{number} w8 w9" for number in range(3, 11)]
    done = futurebridge("chat", *options(pair, max_length=48), typed="\n".join([*said, "w5 " * 60, "w7", "", ""]))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tokens in") == 9
    found = re.findall(r"(\d+) oldest turn\(s\) dropped: .* 48 tokens of max_length", done.stdout)
    assert len(found) >= 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("futurebridge: ")]
    assert re.search("max_length:", line)


def test_what_is_left_of_a_conversation_is_answered_as_if_it_were_all(pair):
    given = {"slm": str(pair / "slm"), "llm": str(pair / "llm"), "threshold": 1.2, "max_new_tokens": 12}
    chat = Chat(PairSettings(**given, max_length=44))
    turns = [
        {"role": role, "content": " ".join(f"w{3 + turn}" for _ in range(6))}
        for turn in range(5)
        for role in ("user", "assistant")
    ][:-1]
    kept, screen = list(turns), io.StringIO()
    generation = chat.answer(kept, Console(file=screen, width=200))
    assert kept == turns[4:]  # 5 messages of 6 words, the template's own and 12 to come
    assert screen.getvalue().startswith("2 oldest turn(s) dropped: ")
    alone = chat.answer(list(turns[4:]), Console(file=io.StringIO()))
    assert generation.token_ids.tolist() == alone.token_ids.tolist()
    whole = Chat(PairSettings(**given))
    for template, content in ((TEMPLATE, "w5 " * 200), (None, "")):
        whole.tokenizer.chat_template = template
        with pytest.raises(ValueError, match="prompt:"):
            whole.answer([{"role": "user", "content": content}], Console(file=io.StringIO()))
