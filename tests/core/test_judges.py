"""What counts as a right answer: every judge on texts, and a function of the user's own in the verifier's processes."""

from __future__ import annotations

import os
import time

import pytest

from fb_core.config import RunSettings, VerifierSettings, identity_of
from fb_core.judges import NAMED, judge_of
from fb_core.verify import Verifier

OWN = """
import os
def right(answer, gold):
    return None if not answer else answer.endswith(gold)
def failing(answer, gold):
    raise KeyError("nothing there")
def wordy(answer, gold):
    return "yes"
def endless(answer, gold):
    while True: pass
def alone(answer, gold):
    return os.getpid() != int(gold)
"""


def verdicts(judge, *pairs, **options):
    with Verifier(judge=judge, timeout=1, **options) as verifier:
        return verifier.verify_many(*zip(*pairs, strict=True), bad_golds="unparsable")


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        (" (b). ", "B"),
        ("The answer is (B).", "B"),
        ("**Answer:** B", "B"),
        ("I take A first.\nThe correct option is C, not B", "C"),
        ("Not (A), so (d)", "D"),
        ("It is **E**.", "E"),
        ("B. Paris", "B"),
        ("Thus\nC) 34", "C"),
        (r"the answer is A, no: \boxed{\text{(D) 34}}", "D"),
        (r"\boxed{34}", None),
        ("A train and I", None),
        ("34", None),
        ("", None),
        ("the answer" + " !" * 200_000, None),
        ("(" * 200_000 + "\n" * 200_000, None),
    ],
)
def test_a_choice_is_read_in_linear_time(answer, letter):
    began = time.process_time()
    assert judge_of("choice").read(answer) == letter
    assert time.process_time() - began < 5  # quadratic time would be minutes


def test_choices_are_letters():
    pairs = [("(B)", "B"), ("(B)", "(b)"), ("(B)", r"\boxed{C}"), ("(B)", "2"), ("no", "B")]
    assert verdicts("choice", *pairs) == ["correct", "correct", "wrong", "unparsable", "unparsable"]


def test_exact_is_the_text_its_last_line_or_its_box():
    right = ["New York", " New \n York ", "It is\nNew  York", r"So \boxed{New York}."]
    assert set(verdicts("exact", *((text, "New York") for text in right))) == {"correct"}
    wrong = ["new york", "New York is it", "New York\n!"]
    assert set(verdicts("exact", *((text, "New York") for text in wrong))) == {"wrong"}
    assert verdicts("exact", (" \n", "New York"), ("New York", " ")) == ["unparsable", "unparsable"]


def test_a_number_is_the_last_one_or_what_the_pattern_finds():
    pairs = [("34 or 1,234.50", "1234.5"), ("$-7.", "-7"), (r"\boxed{.5}", "0.50"), ("34 of 35", "34"), ("none", "1")]
    assert verdicts("number", *pairs) == ["correct", "correct", "correct", "wrong", "unparsable"]
    pairs = [("#### 34\nnot 35", "34"), ("34", "34"), ("#### many", "34"), ("#### 34", "many")]
    assert verdicts("number", *pairs, pattern=r"#### (\S+)") == ["correct", "unparsable", "unparsable", "unparsable"]
    assert verdicts("number", ("a" * 60 + "!", "1"), pattern="(a+)+$") == ["timeout"]


def test_a_function_of_ones_own_runs_where_it_can_do_no_harm(tmp_path, monkeypatch):
    (tmp_path / "own_judge.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    pairs = [("so 34", "34"), ("so 35", "34"), ("", "34")]
    assert verdicts("own_judge:right", *pairs) == ["correct", "wrong", "unparsable"]
    assert verdicts("own_judge:endless", ("34", "34")) == ["timeout"]
    assert verdicts("own_judge:alone", ("34", str(os.getpid()))) == ["correct"]
    refused = {
        "failing": "expected a verdict of own_judge:failing, got KeyError: 'nothing there', for an",
        "wordy": "expected a verdict of own_judge:wordy, got TypeError: expected True, False or None, got str",
        "absent": "expected the function own_judge:absent, got AttributeError: module 'own_judge' has no attribute",
    }
    for name, words in refused.items():
        with pytest.raises(ValueError, match=f"verify.judge: {words}"):
            verdicts(f"own_judge:{name}", ("34", "34"))
    with Verifier(judge="no_such_module:right") as verifier, pytest.raises(ValueError, match="No module named"):
        verifier.prepare()


@pytest.mark.parametrize("judge", NAMED)
def test_a_gold_answer_is_right_by_itself(judge):
    golds = ["B", "34", "?"]
    with Verifier(judge=judge) as verifier:
        readable = [verifier.judge.gold(gold) is not None for gold in golds]
        kept = verifier.judged_by_themselves(golds)
    assert [verdict == "correct" for verdict in kept] == [readable[0], readable[1], judge == "exact"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"judge": "boxes"},
            "judge: expected boxed, exact, choice, number or an import path module:function, got 'boxes'",
        ),
        ({"judge": "a b:c"}, "got 'a b:c'"),
        ({"pattern": "x"}, "pattern: expected none with judge boxed, got one; leave it out"),
        ({"judge": "number", "pattern": "("}, "pattern: expected a regular expression, got one with missing"),
    ],
)
def test_settings_name_a_judge(changes, words):
    with pytest.raises(ValueError) as raised:
        RunSettings.load("tiny", [f"verify.{name}={value!r}" for name, value in changes.items()])
    assert words in str(raised.value)
    assert all(kind.name in (VerifierSettings.model_fields["judge"].description or "") for kind in NAMED.values())


def test_runs_that_were_begun_before_there_were_judges_go_on():
    assert {"judge", "pattern"}.isdisjoint(identity_of(VerifierSettings()))
    assert identity_of(VerifierSettings(judge="number", pattern="x"))["pattern"] == "x"
