"""`futurebridge explain`: what it shows is what is on disk, and no text of a model gets at the reader."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
from pathlib import Path

import pytest
from dialects import byte_tokenizer
from rich.console import Console
from runs import settings

from fb_core.apps.cli.explain import LEGEND, explain, find_rows, print_rows, token_text
from fb_core.apps.pipeline.decode import Row
from fb_core.apps.pipeline.files import SEAL, sealed_bytes
from fb_core.apps.pipeline.models import models_of

HOSTILE = [
    *("<script>alert(1)</script>", "\x1b]0;owned\x07\x1b[31m", '" onmouseover="x', "\u202egnorw", "[red]", " so"),
]


@pytest.fixture(scope="module")
def run(undisturbed) -> Path:
    return undisturbed[0]["evaluate"]


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return Path(shutil.copytree(run / "evaluation", tmp_path / "run" / "evaluation")).parent


@pytest.fixture(scope="module")
def hostile():
    made = byte_tokenizer()
    made.add_tokens(HOSTILE)
    return made


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for path in run.glob("evaluation/*.jsonl") for line in path.read_bytes().splitlines()]


def printed(rows, tokenizer, **options) -> str:
    console = Console(file=io.StringIO(), **{"width": 200, **options})
    print_rows(rows, tokenizer, console)
    return console.file.getvalue()


def row(tokens, events=(), **changes):
    """A row as `find_rows` gives it; events are (step, pool)."""
    made = [
        {"step": step, "entropy": 1.5, "pool": pool, "sources": [1 + i % 3 for i in range(len(pool))], "error": None}
        | {
            name: [first + step_ * i for i in range(len(pool))]
            for name, first, step_ in (("slm_logprob", -1.25, -1), ("llm_logprob", -2.25, -1), ("scores", 0.125, 1))
        }
        | {"choice": pool.index(tokens[step])}
        for step, pool in events
    ]
    plain = {
        "benchmark": "b",
        "method": "published",
        "seed": 0,
        "loop": "fast",
        "problem": "p",
        "text": "",
        "gold": "7",
    }
    plain |= {"verdict": "wrong", "calls": len(made), "pool": None, "appended": len(made), "suffix": 0, "read": 0}
    plain |= {"seconds": 0.5, "peak_bytes": None, "prompt_sha256": ""}
    return Row(**{**plain, "tokens": tokens, "events": made, **changes})


METHODS = [("greedy", None), ("s2t", None), ("direct", None)]  # those that run once


def cells(text: str) -> list[list[str]]:
    """The cells of every candidate in what was printed, its mark first."""
    found = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if re.search(r"(\d\.\d{4}|–) *$", line)]
    return [row if row[0] in ("→", "g", "→ g") else ["", *row] for row in found]


def test_rows_are_those_on_disk_greedy_first(run):
    stored = lines(run)
    for problem in {row["problem"] for row in stored}:
        found = find_rows(run, problem)
        assert [(row.method, row.seed) for row in found] == [*METHODS, ("published", 0), ("published", 1)]
        wanted = [row for row in stored if row["problem"] == problem]
        assert sorted(json.dumps(json.loads(row.model_dump_json())) for row in found) == sorted(map(json.dumps, wanted))


def test_a_part_of_an_id_is_enough_where_it_is_unique(run):
    ids = sorted({row["problem"] for row in lines(run)})
    assert find_rows(run, ids[0][6:]) == find_rows(run, ids[0])
    for part in ("plans/", "nope"):
        with pytest.raises(ValueError, match=f"got '{part}'") as raised:
            find_rows(run, part)
        assert all(repr(name) in str(raised.value) for name in ids)


def rewrite(run: Path, change) -> Path:
    """One shard with its rows changed and a receipt that agrees."""
    path = next(iter(sorted(run.glob("evaluation/*published-0*.jsonl"))))
    data = "".join(change(json.loads(line)) + "\n" for line in path.read_bytes().splitlines()).encode()
    path.write_bytes(data)
    receipt = json.loads(path.with_suffix(".json").read_bytes())
    del receipt[SEAL]
    receipt["files"][path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.with_suffix(".json").write_bytes(
        sealed_bytes({name: value for name, value in receipt.items() if name != SEAL})
    )
    return path


def test_an_id_that_is_part_of_another_is_found_and_long_lists_are_cut(copy):
    """And cannot steer the terminal through an error."""
    names = [*(f"x{i}" for i in range(14)), "\x1b[31mx"]
    rewrite(copy, lambda row: "".join(json.dumps({**row, "problem": name}) + "\n" for name in names).strip())
    assert [row.problem for row in find_rows(copy, "x1")] == ["x1"] * 3
    with pytest.raises(ValueError, match=r"and 5 more$") as raised:
        find_rows(copy, "x")
    assert "\x1b" not in str(raised.value)


def test_rows_of_a_method_that_is_not_known_come_last(copy):
    rewrite(copy, lambda row: json.dumps({**row, "method": "other"}))
    problem = next(iter(lines(copy)))["problem"]
    assert [row.method for row in find_rows(copy, problem)][-1] == "other"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: row.pop("gold"), "gold: Field required"),
        (lambda row: row["events"][0].pop("pool"), r"events\.0\.pool: Field required"),
        (lambda row: row["tokens"].append(-1), r"tokens\.\d+: "),
        (lambda row: row["tokens"].append(1 << 40), r"tokens\.\d+: "),
        (lambda row: row["events"][0]["scores"].pop(), "event 1 with columns of several lengths"),
        (lambda row: row["events"][0].update(choice=99), "event 1 whose choice is not the token of its step"),
        (lambda row: row["events"][0].update(step=99), "event 1 whose choice is not the token of its step"),
        (lambda row: row["events"].append(row["events"][0]), "events out of order"),
    ],
)
def test_wrong_rows_are_named_by_file_and_line(copy, change, words):
    left = [1]

    def once(row):
        if left and row["events"] and left.pop():
            change(row)
        return json.dumps(row)

    path = rewrite(copy, once)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}, line 1: expected a row .*{words}.*; make") as wrong:
        find_rows(copy, "plans/")
    assert "\n" not in str(wrong.value)


@pytest.mark.parametrize("text", ["{", "[]", "7", "[" * 100_000, '{"problem": 1e999}', '"\\ud800"', "\0"])
def test_lines_that_are_no_rows_are_named(copy, text):
    path = rewrite(copy, lambda row: text)
    with pytest.raises(ValueError, match=f"{path.name}, line 1: expected a row of decoded problems"):
        find_rows(copy, "plans/")


def test_damaged_shards_are_named_and_unfinished_evaluations_shown(copy):
    problem = lines(copy)[0]["problem"]
    for path in copy.glob("evaluation/*published-1*.json"):
        path.unlink()
    assert [(row.method, row.seed) for row in find_rows(copy, problem)] == [*METHODS, ("published", 0)]
    damaged = copy / "evaluation" / "demo-plans.greedy.00001.jsonl"
    damaged.write_bytes(damaged.read_bytes().replace(b"plans", b"plane", 1))
    with pytest.raises(ValueError, match=r"greedy\.00001\.jsonl: expected the .* bytes of its receipt, got others"):
        find_rows(copy, problem)
    with pytest.raises(ValueError, match="expected shards of decoded problems, got none; run `futurebridge evaluate`"):
        find_rows(copy / "nowhere", problem)


def test_every_candidate_is_shown_with_its_score(run):
    tokenizer = models_of(settings().models).tokenizer
    chosen = max(lines(run), key=lambda row: len(row["events"]))["problem"]
    rows = find_rows(run, chosen)
    text, wanted = printed(rows, tokenizer), []
    for row in rows:
        for event in row.events:
            for i, token in enumerate(event.pool):
                numbers = [getattr(event, name)[i] for name in ("slm_logprob", "llm_logprob", "scores")]
                greedy = event.slm_logprob[i] == max(event.slm_logprob)
                mark = " ".join(["→"] * (i == event.choice) + ["g"] * greedy)
                source = {1: "S", 2: "L", 3: "SL"}[event.sources[i]]
                shown = tokenizer.decode([token]).replace(" ", "␣")
                wanted.append([mark, shown, str(token), source, *(f"{number:.4f}" for number in numbers)])
    assert len(wanted) > 10
    assert cells(text) == wanted
    assert {row[0] for row in wanted} == {"", "→", "g", "→ g"}
    assert text.count(LEGEND) == 1
    for row in rows:
        for words in (row.verdict, f"gold answer {row.gold}, {len(row.tokens)} tokens"):
            assert words in text
        assert f"Published recipe, seed {row.seed}" in text or row.seed is None
    timed = [rows[0].model_copy(update={"seconds": 1.254})]
    assert ", 1.25 s" in printed(timed, tokenizer)
    assert ", 1.25 s" not in printed(rows[:1], tokenizer)
    assert text.count(": Greedy, ") == 1


def test_the_question_is_shown_as_it_was_asked(run, hostile):
    rows = find_rows(run, lines(run)[0]["problem"])
    assert rows[0].question == rows[0].problem.partition("/")[2]  # as the demo names its problems
    for question in (rows[0].question, HOSTILE[0]):
        asked = [row.model_copy(update={"question": question}) for row in rows]
        assert printed(asked, hostile).startswith(f"Question: {question}\n")


def test_the_text_is_whole_with_its_events_in_place(run):
    tokenizer = models_of(settings().models).tokenizer
    for problem in dict.fromkeys(row["problem"] for row in lines(run)):
        rows = find_rows(run, problem)
        text = printed(rows, tokenizer)
        for row in rows:
            parts = [tokenizer.decode([token]) for token in row.tokens]
            for number, event in enumerate(row.events, 1):
                word = parts[event.step].replace(" ", "␣")
                parts[event.step] = f"⟦{word}⟧{'¹²³⁴⁵⁶⁷⁸'[number - 1]}"
            assert "".join(parts) in text


def test_hostile_tokens_are_shown_and_do_nothing(hostile):
    pool = hostile.convert_tokens_to_ids(HOSTILE)
    assert None not in pool
    rows = [
        row([0, *pool], [(1 + i, pool) for i in range(len(pool))], benchmark=HOSTILE[0], problem=HOSTILE[1], seed=None),
        row(pool, gold=HOSTILE[0] + HOSTILE[1], verdict=HOSTILE[0] + HOSTILE[1]),
        row(pool, [(0, pool)]),
    ]
    rows[2].events[0].error = HOSTILE[0] + HOSTILE[1]
    for options in ({}, {"force_terminal": True, "color_system": "truecolor"}, {"width": 30}):
        text = printed(rows, hostile, **options)
        visible = re.sub(r"\x1b\[[\d;]*m", "", text) if "force_terminal" in options else text
        assert not set(re.findall(r"[^\n -~]", visible)) - set("␣⟦⟧→–─¹²³⁴⁵⁶")
        assert "\\x1b" in visible
    shown = {"<script>alert(1)</script>", "\\x1b]0;owned\\x07\\x1b[31m", '"␣onmouseover="x', "\\u202egnorw"}
    assert {row[1] for row in cells(printed(rows, hostile))} == shown | {"[red]", "␣so"}


def test_half_characters_and_white_space(hostile):
    euro = hostile("€")["input_ids"]
    newline, tab, space = (hostile(char)["input_ids"][0] for char in "\n\t ")
    assert [token_text(token, hostile) for token in (*euro, newline, tab, space, 0)] == [
        *"\ufffd\ufffd\ufffd↵⇥␣",
        "<pad>",
    ]
    assert token_text(100_000, hostile) == "<100000>"
    for step, shown in enumerate(["⟦\ufffd⟧¹€a", "⟦\ufffd⟧¹€a", "⟦€⟧¹a"]):
        tokens = [*euro, *hostile("a")["input_ids"]]
        assert f"\n{shown}\n" in printed([row(tokens, [(step, [tokens[step]])])], hostile)
    assert "\n⟦\ufffd⟧¹\n" in printed([row(euro[:1], [(0, euro[:1])])], hostile)
    assert "\n⟦↵⟧¹\n€\n" in printed([row([newline, *euro], [(0, [newline])])], hostile)


def test_what_is_not_known_is_a_dash(hostile):
    made = row([5], [(0, [5])])
    event = made.events[0]
    event.scores, event.llm_logprob, event.error = None, [float("nan")], "no answer"
    assert re.search(r"S +-1.2500 +– +–", printed([made], hostile))
    assert "the LLM failed: no answer" in printed([made], hostile)
    assert cells(printed([made], hostile))[0][-3:] == ["-1.2500", "–", "–"]


def test_the_greedy_token_is_the_slms_first_where_the_slm_proposed_any(hostile):
    tokens = hostile("ab")["input_ids"]
    made = row(tokens[:1], [(0, tokens)])
    event = made.events[0]
    for sources, marks in (([1, 2], ["→ g", ""]), ([2, 3], ["→", "g"]), ([2, 2], ["→", ""])):
        event.sources = sources
        assert [row[0] for row in cells(printed([made], hostile))] == marks


def test_explain_refuses_another_tokenizer(run):
    problem, console = lines(run)[0]["problem"], Console(file=io.StringIO())
    explain(settings(), run, problem, console)
    rows, tokenizer = find_rows(run, problem), models_of(settings().models).tokenizer
    assert console.file.getvalue() == printed(rows, tokenizer, width=80)
    with pytest.raises(ValueError, match=r"begun with models\.tokenizer"):
        explain(settings(models={"slm": "demo:helpful", "llm": "demo:helpful"}), run, problem, console)
