"""math-verify behind a killable process: right verdicts, and hostile answers that end in bounded time."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fb_core.verify import LONGEST_CONTENT, Verifier, boxed

LIMIT = 1.0  # seconds for one answer
SLACK = 8.0  # a worker's start on a busy machine, twice
HANGING = r"\boxed{9^{9^{9^{9}}}}"


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(timeout=LIMIT) as shared:
        yield shared


def worker_pid(verifier: Verifier) -> int:
    process = verifier._workers[0].process
    assert process is not None
    return process.pid


def is_child(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # a zombie would still be there
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{15}.", "15"),
        (r"\boxed{1} or rather \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}} and {more}", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\{1, 2)}", r"\{1, 2)"),
        (r"\boxed{a\\}", r"a\\"),
        (r"\boxed{}", ""),
        ("no box", None),
        ("abcd{e}", None),
        (r"\boxed 7", None),
        (r"\boxed{1} \boxed{2", None),
        (r"\boxed{1\}", None),
        ("\\boxed{" + "1" * LONGEST_CONTENT + "}", "1" * LONGEST_CONTENT),
        ("\\boxed{" + "1" * (LONGEST_CONTENT + 1) + "}", None),
    ],
)
def test_boxed_takes_the_last_closed_box(text: str, content: str | None) -> None:
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        (r"so \boxed{15}", "15", "correct"),
        (r"\boxed{16}", "15", "wrong"),
        (r"first \boxed{16}, no: \boxed{15}", "15", "correct"),
        (r"\boxed{0.5}", r"\frac{1}{2}", "correct"),
        (r"\boxed{\dfrac12}", r"$\frac{1}{2}$", "correct"),
        (r"\boxed{0.5}", r"\(\frac{1}{2}\)", "correct"),
        (r"\boxed{15.}", r"\boxed{15}", "correct"),
        (r"\boxed{033}", "33", "correct"),
        (r"\boxed{x=5}", "5", "correct"),
        (r"\boxed{2,1}", "1, 2", "correct"),
        (r"\boxed{\text{(B)}}", "B", "correct"),
        ("so=15.", "15", "unparsable"),
        (r"\boxed{15", "15", "unparsable"),
        (r"\boxed{}", "15", "unparsable"),
        (r"\boxed{?!}", "15", "unparsable"),
        ("", "15", "unparsable"),
    ],
)
def test_verdicts(verifier: Verifier, answer: str, gold: str, verdict: str) -> None:
    assert verifier.verify(answer, gold) == verdict


HOSTILE = {
    "tower of powers": HANGING,
    "long product": r"\boxed{1000000000!}",
    "power in Python": r"\boxed{10**10**10}",
    "infinite sets": r"\boxed{\{x^2 : x \in \mathbb{R} \setminus \mathbb{Q}\} \cup \bigcup_{n=1}^{\infty} (n, n+1)}",
    "braces": "\\boxed{" + "{" * 50_000 + "}" * 50_000 + "}",
    "parentheses": "\\boxed{" + "(" * 4_000 + "1" + ")" * 4_000 + "}",
    "unclosed": r"\boxed{",
    "unclosed many times": "\\boxed{" * 1_000_000,
    "closed only": "\\boxed{}" + "}" * 1_000_000,
    "dollars": "\\boxed{" + "$" * 9_000 + "}",
    "NUL": "\\boxed{\0" + "5" + "\0\n}",
    "unicode": "\\boxed{\ud800\u202e５\U0001f4a3}",
    "many digits": "\\boxed{" + "1" * 9_000 + "}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_end_in_a_logged_verdict(
    verifier: Verifier, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="fb_core.verify"):
        start = time.monotonic()
        verdict = verifier.verify(HOSTILE[name], "5")
        assert time.monotonic() - start < LIMIT + SLACK
    assert verdict in ("wrong", "unparsable", "timeout")
    assert verdict == "wrong" or verdict in caplog.text
    assert len(caplog.text) < 2_000
    verifier._judge.cache_clear()
    assert verifier.verify(r"\boxed{15}", "15") == "correct"


def test_a_hundred_megabytes_are_read_in_linear_time(verifier: Verifier) -> None:
    start = time.monotonic()
    assert verifier.verify("{" * 100_000_000, "5") == "unparsable"
    assert time.monotonic() - start < SLACK


def test_a_worker_over_its_memory_does_not_take_the_next_answer_with_it() -> None:
    with Verifier(timeout=LIMIT, memory_bytes=256 << 20) as small:
        assert small.verify(r"\boxed{2^{2^{36}}}", "5") in ("wrong", "unparsable", "timeout")
        assert small.verify(r"\boxed{15}", "15") == "correct"


def test_repeats_cost_nothing(verifier: Verifier) -> None:
    verdict = verifier.verify(HANGING, "7")
    start = time.monotonic()
    assert verifier.verify_many([f"try {n}: {HANGING}" for n in range(50)], ["7"] * 50) == [verdict] * 50
    assert time.monotonic() - start < LIMIT / 2


def test_a_killed_worker_is_replaced(verifier: Verifier) -> None:
    assert verifier.verify(r"\boxed{21}", "21") == "correct"
    pid = worker_pid(verifier)
    os.kill(pid, signal.SIGKILL)
    assert verifier.verify(r"\boxed{22}", "22") == "correct"
    assert worker_pid(verifier) != pid
    assert not is_child(pid)


def test_a_worker_that_dies_over_an_answer_counts_as_timeout() -> None:
    with Verifier(timeout=60.0) as patient, ThreadPoolExecutor(1) as thread:
        assert patient.verify(r"\boxed{15}", "15") == "correct"
        pid = worker_pid(patient)
        verdict = thread.submit(patient.verify, HANGING, "5")
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        assert verdict.result(SLACK) == "timeout"
        assert patient.verify(r"\boxed{16}", "16") == "correct"


def test_many_answers_keep_their_order_over_workers_and_threads() -> None:
    answers = [rf"\boxed{{{n % 7}}}" for n in range(60)] + [HANGING, "none", r"\boxed{3}"]
    expected = ["correct" if n % 7 == 3 else "wrong" for n in range(60)] + ["timeout", "unparsable", "correct"]
    with Verifier(workers=2, timeout=LIMIT) as pair, ThreadPoolExecutor(3) as threads:
        results = [threads.submit(pair.verify_many, answers, ["3"] * len(answers)) for _ in range(3)]
        assert [result.result() for result in results] == [expected] * 3
        processes = [worker.process for worker in pair._workers]
    assert all(process is None or process.returncode is not None for process in processes)


def test_no_process_before_the_first_answer_or_after_close() -> None:
    verifier = Verifier(timeout=LIMIT)
    assert verifier._workers[0].process is None
    assert verifier.verify("no box", "15") == "unparsable"
    assert verifier._workers[0].process is None
    assert verifier.verify(r"\boxed{15}", "15") == "correct"
    pid = worker_pid(verifier)
    verifier.close()
    verifier.close()
    assert not is_child(pid)
    for repeated in ("15", "16"):  # remembered or not
        with pytest.raises(ValueError, match="closed"):
            verifier.verify(rf"\boxed{{{repeated}}}", "15")
    with pytest.raises(ValueError, match="closed"):
        verifier.equivalent("1", "1")


def test_without_boxes_math_verify_searches_the_text() -> None:
    with Verifier(timeout=LIMIT, require_boxed=False) as lenient:
        assert lenient.verify("so=15.", "15") == "correct"
        assert lenient.verify("The final answer is $\\frac{1}{2}$.", "0.5") == "correct"
        assert lenient.verify(r"not 15 but \boxed{16}", "15") == "wrong"
        assert lenient.verify("", "15") == "unparsable"


def test_equivalence_for_majority_voting(verifier: Verifier) -> None:
    same = [("0.5", r"\frac{1}{2}"), ("x=5", "5"), ("?", "?"), ("15.", "15"), (r"\{1,2\}", "2, 1")]
    different = [("5", "6"), ("5", "?"), ("", "5"), ("5", "1" * (LONGEST_CONTENT + 1)), ("5", HANGING[7:-1])]
    for pairs, expected in ((same, True), (different, False)):
        for a, b in pairs:
            assert verifier.equivalent(a, b) is expected
            assert verifier.equivalent(b, a) is expected


@pytest.mark.parametrize("gold", ["?", "", "$$", "}", "1" * (LONGEST_CONTENT + 1)])
def test_an_unparsable_gold_is_the_fault_of_the_data(verifier: Verifier, gold: str) -> None:
    with pytest.raises(ValueError, match="gold must be") as raised:
        verifier.verify(r"\boxed{15}", gold)
    assert repr(gold[:80]) in str(raised.value)
    assert verifier.verify(r"\boxed{15}", "15") == "correct"


def test_arguments_are_checked(verifier: Verifier) -> None:
    with pytest.raises(TypeError, match="gold must be a string, got int"):
        verifier.verify(r"\boxed{15}", 15)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="answer must be a string, got None"):
        verifier.verify(None, "15")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="answers must be a sequence"):
        verifier.verify_many("15", ["15"])
    with pytest.raises(ValueError, match="got 1 answers and 2 golds"):
        verifier.verify_many(["15"], ["15", "16"])
    with pytest.raises(TypeError, match="text must be a string"):
        boxed(b"\\boxed{1}")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="workers must be a number, got str"):
        Verifier(workers="2")  # type: ignore[arg-type]
    for options in ({"workers": 0}, {"timeout": float("nan")}, {"timeout": float("inf")}, {"memory_bytes": 1 << 20}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be at least"):
            Verifier(**options)


def test_workers_do_not_run_the_calling_script_again(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import sys\nprint('running')\nfrom fb_core.verify import Verifier\n"
        "with Verifier() as verifier:\n    print(verifier.verify(r'\\boxed{15}', '15'))\n"
        "print(sorted({'torch', 'sympy', 'math_verify'} & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.split("\n")[:3] == ["running", "correct", "[]"], ran.stderr


def test_throughput_of_ordinary_answers(verifier: Verifier, record_property: Callable[[str, object], None]) -> None:
    answers = [rf"\boxed{{{n}}}" for n in range(1_000, 1_200)]
    start = time.monotonic()
    assert set(verifier.verify_many(answers, ["7"] * len(answers))) == {"wrong"}
    record_property("answers_per_second", len(answers) / (time.monotonic() - start))
