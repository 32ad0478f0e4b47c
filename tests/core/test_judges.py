"""What counts as a right answer: every judge on texts, and a function of the user's own in the verifier's processes."""

from __future__ import annotations

import os
import time
from decimal import Decimal

import pytest

from fb_core.apps.pipeline.collect import TrajectoryStage
from fb_core.apps.settings.run import RunSettings, VerifierSettings, identity_of
from fb_core.verify.judges import NAMED, judge_of, number
from fb_core.verify.verifier import Verifier

OWN = """
import os, time
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
def forking(answer, gold):
    if os.fork() == 0:
        time.sleep(600)
    while True: pass
def asking(answer, gold):
    try:
        return input() == gold
    except EOFError:
        return answer == gold
def leaving(answer, gold):
    raise SystemExit("no \\ud800 key")
def ending(answer, gold):
    os._exit(3)
"""


pytestmark = pytest.mark.usefixtures("quick_workers")


def verdicts(judge, *pairs, **options):
    with Verifier(judge=judge, timeout=1, **options) as verifier:
        return verifier.verify_many(*zip(*pairs, strict=True), bad_golds="unparsable")


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        *(("B", "B"), (" (b). ", "B"), ("The answer is (B).", "B"), ("**Answer:** B", "B")),
        *(("I take A first.\nThe correct option is C, not B", "C"), ("Not (A), so (d)", "D"), ("It is **E**.", "E")),
        *(("B. Paris", "B"), ("Thus\nC) 34", "C"), (r"the answer is A, no: \boxed{\text{(D) 34}}", "D")),
        *((r"\boxed{34}", None), ("Answer: B. Option A is incorrect.", "B")),
        ("The answer is (C). Option (D) is too large.", "C"),
        *(("So the answer is A.\n\nOption A: 5\nOption B: 6", "A"), ("Choice C is wrong, so the answer is D.", "D")),
        *(("The answer is A. No, wait: the answer is option B.", "B"), ("Option B is correct. Option A is not.", "B")),
        *(("B. Option A is incorrect.", "B"), ("A. 5\nB. 6\nSo option B", "B"), ("Answer: I don't know", None)),
        *(("The answer is I because of J.", "I"), ("The answer is A or B", None), ("(A) or (B)", None)),
        *((r"\boxed{A, B}", None), (r"\boxed{\text{A} \text{ and } \text{B}}", None), ("A train and I", None)),
        *(("34", None), ("", None), ("the answer" + " !" * 200_000, None), ("(" * 200_000 + "\n" * 200_000, None)),
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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("The answer is \u22125.", "-5"), ("x = \u20130.5", "-0.5"), ("x = - 5", "-5")),
        *(("The change is -$15.", "-15"), (r"It is $-\$1{,}250.50$", "-1250.50"), ("US$-15", "-15")),
        *(("pages 3\u20135", "5"), ("10 - 5", "5"), (r"$9{,}500$ or $9\,500$", "9500"), ("1,00,000", "100000")),
        *(("(3,-4)", "-4"), ("3,4", "4"), ("1.5e3", "1500"), (r"1.6 \times 10^{-19}", "1.6e-19")),
        *(("1.6\xd710\u207b\xb9\u2079", "1.6e-19"), ("34 cm^2", "34"), ("50%", "50"), (r"12\,34", None)),
        ("1e99999", None),
    ],
)
def test_a_number_is_read_with_its_sign_groups_and_exponent(text, value):
    found = number(text, alone=False)
    assert found == (None if value is None else Decimal(value))


def test_a_gold_number_is_the_whole_text_and_read_in_linear_time():
    golds = {"-$1,234.50": "-1234.50", "1{,}000": "1000", "50\\%": "50", "12 34": None, "5 - 3": None, "1/2": None}
    assert {text: number(text) for text in golds} == {
        text: None if value is None else Decimal(value) for text, value in golds.items()
    }
    began = time.process_time()
    for hostile in ("1" * 9_999 + "x", "1,23" * 2_400 + "x", "$" * 9_999, "1 " * 4_999, "5" + " " * 9_990 + "x"):
        assert number(hostile) is None
        judge_of("boxed").gold(hostile)
    assert time.process_time() - began < 1  # quadratic time was two seconds for the first alone


def test_a_function_of_ones_own_runs_where_it_can_do_no_harm(tmp_path, monkeypatch):
    (tmp_path / "own_judge.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    pairs = [("so 34", "34"), ("so 35", "34"), ("", "34")]
    assert verdicts("own_judge:right", *pairs) == ["correct", "wrong", "unparsable"]
    assert verdicts("own_judge:endless", ("34", "34")) == ["timeout"]
    assert verdicts("own_judge:alone", ("34", str(os.getpid()))) == ["correct"]
    assert verdicts("own_judge:asking", ("34", "34"), ("35", "34")) == ["correct", "wrong"]
    began = time.monotonic()
    assert verdicts("own_judge:forking", ("34", "34")) == ["timeout"]
    assert time.monotonic() - began < 50  # not until the child ends, nor the minute of a worker without a CPU
    refused = {
        "leaving": r"SystemExit: no \\ud800 key",
        "ending": "exit code 3",
        "failing": "KeyError: 'nothing there'",
    }
    refused |= {"wordy": "TypeError: expected True, False or None, got str", "absent": "AttributeError"}
    for name, words in refused.items():
        with pytest.raises(ValueError, match=f"verify.judge: .*own_judge:{name}, got .*{words}"):
            verdicts(f"own_judge:{name}", ("34", "34"))
    with Verifier(judge="no_such_module:right") as verifier, pytest.raises(ValueError, match="No module named"):
        verifier.prepare()


@pytest.mark.parametrize("judge", NAMED)
def test_a_gold_answer_is_right_by_itself(judge):
    golds = ["B", "34", "?"]
    with Verifier(judge=judge) as verifier:
        readable = [verifier.judge.gold(gold) is not None for gold in golds]
        kept = verifier.judge_golds(golds)
    assert [verdict == "correct" for verdict in kept] == [readable[0], readable[1], judge == "exact"]


@pytest.mark.parametrize(
    ("judge", "pattern", "words"),
    [
        *(("boxes", None, "'boxes'"), ("a b:c", None, "'a b:c'"), ("boxed", "x", "pattern: .*boxed")),
        *(("number", "(", "pattern:"), ("number", "a{99999999999}", "pattern:")),
        ("number", "(" * 3_000 + ")" * 3_000, "pattern:"),
    ],
)
def test_settings_name_a_judge(judge, pattern, words):
    with pytest.raises(ValueError, match=words):
        RunSettings.load("tiny", [f"verify.judge={judge!r}", *([f"verify.pattern={pattern!r}"] if pattern else [])])
    assert all(kind.name in (VerifierSettings.model_fields["judge"].description or "") for kind in NAMED.values())


def test_runs_that_were_begun_before_there_were_judges_go_on():
    assert {"judge", "pattern"}.isdisjoint(identity_of(VerifierSettings()))
    assert identity_of(VerifierSettings(judge="number", pattern="x"))["pattern"] == "x"


def test_a_run_knows_the_file_of_its_function(tmp_path, monkeypatch):
    (tmp_path / "judging").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = RunSettings.load("tiny", ["verify.judge=judging.own:right", "problems.limit=500"])
    identities = []
    for body in ("gold in answer", "answer == gold", "gold in answer"):
        (tmp_path / "judging" / "own.py").write_text(f"def right(answer, gold):\n    return {body}\n")
        identities.append(TrajectoryStage(settings, tmp_path).identity(models=False))
    assert identities[0] == identities[2] != identities[1]
    plain = TrajectoryStage(RunSettings.load("tiny", ["problems.limit=500"]), tmp_path).identity(models=False)
    assert plain.keys() == {"settings", "data", "inputs"}
