"""math-verify behind a killable process: right verdicts, and hostile answers that end in bounded time."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from limits import HANG

from fb_core.verify import verifier as verify
from fb_core.verify.judges import LONGEST_CONTENT, boxed
from fb_core.verify.verifier import Verifier

pytestmark = pytest.mark.usefixtures("quick_workers")
LIMIT = 0.5  # seconds of CPU for one answer
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
    return Path(f"/proc/{pid}").exists()  # a zombie would still be there


def runs(pid: int) -> bool:
    return is_child(pid) and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def cpu_seconds(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def by_math_verify(answer: str, gold: str) -> str:
    import math_verify

    wanted = math_verify.parse(rf"\boxed{{{gold}}}", parsing_timeout=None)
    found = math_verify.parse(rf"\boxed{{{boxed(answer)}}}", parsing_timeout=None)
    return "correct" if math_verify.verify(wanted, found, timeout_seconds=None) else "wrong"


def ordinary(count: int, seed: int) -> list[tuple[str, str]]:
    """Distinct pairs of a model's text and its gold answer, half of them right."""
    draw = random.Random(seed)
    pairs: dict[tuple[str, str], None] = {}
    while len(pairs) < count:
        a, b, c = draw.randint(1, 9_999), draw.randint(2, 999), draw.randint(2, 50)
        other = a + draw.choice((0, draw.randint(1, 9)))
        content, gold = draw.choice(
            (
                *((f"{other}", f"{a}"), (f"-{other:06}", f"-{a}"), (f"{other:,}", f"{a}")),
                (f"{other / 100}", rf"\frac{{{a}}}{{100}}"),
                (rf"\frac{{{2 * other}}}{{{2 * b}}}", rf"\frac{{{a}}}{{{b}}}"),
                *((f"{other}/{b}", rf"\dfrac{{{a}}}{{{b}}}"), (rf"{other}\sqrt{{{c}}}", rf"{a}\sqrt{{{c}}}")),
                (rf"\frac{{{other}\pi}}{{{c}}}", rf"\frac{{{a}\pi}}{{{c}}}"),
                *((f"[{other},{a + b + 10})", f"[{a}, {a + b + 10})"), (f"({other}, {b})", f"({a},{b})")),
                *((rf"\{{{b}, {other}\}}", rf"\{{{a},{b}\}}"), (f"x = {other}", f"{a}"), (f"y={other}", f"y = {a}")),
                *((f"{b}x^2+{other}x-{c}", f"{a}x+{b}x^2-{c}"), (rf"{other}\%", rf"{a}\%")),
            )
        )
        work = "Step by step, with $x^2+1$ and the identity above, the sum telescopes. " * draw.randint(3, 6)
        pairs[rf"{work}So the answer is \boxed{{{content}}}.", gold] = None
    return list(pairs)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        *((r"so \boxed{15}.", "15"), (r"\boxed{1} or rather \boxed{ 2 }", "2"), (r"\boxed {7}", "7")),
        *((r"\boxed{\frac{1}{2}} and {more}", r"\frac{1}{2}"), (r"\boxed{\{1, 2)}", r"\{1, 2)"), (r"\boxed{}", "")),
        *((r"\boxed{a\\}", r"a\\"), ("no box", None), ("abcd{e}", None), (r"\boxed 7", None)),
        *((r"\boxed{1} \boxed{2", None), (r"\boxed{1\}", None)),
        ("\\boxed{" + "1" * LONGEST_CONTENT + "}", "1" * LONGEST_CONTENT),
        ("\\boxed{" + "1" * (LONGEST_CONTENT + 1) + "}", None),
    ],
)
def test_boxed_takes_the_last_closed_box(text: str, content: str | None) -> None:
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        *((r"so \boxed{15}", "15", "correct"), (r"first \boxed{16}, no: \boxed{15}", "15", "correct")),
        *((r"\boxed{0.5}", r"\frac{1}{2}", "correct"), (r"\boxed{\dfrac12}", r"$\frac{1}{2}$", "correct")),
        *((r"\boxed{0.5}", r"\(\frac{1}{2}\)", "correct"), (r"\boxed{15.}", r"\boxed{15}", "correct")),
        *((r"\boxed{033}", "33", "correct"), (r"\boxed{x=5}", "5", "correct"), (r"\boxed{2,1}", "1, 2", "correct")),
        *((r"\boxed{\text{(B)}}", "B", "correct"), (r"\boxed{34 \text{ cows}}", "34", "correct")),
        *((r"\boxed{34 cm}", "34", "correct"), (r"\boxed{34 \mathrm{cm}^2}", "34", "correct")),
        *((r"\boxed{34}", r"34\text{ cows}", "correct"), (r"\boxed{16}", "15", "wrong")),
        (r"\boxed{34 cows}", "34", "wrong"),  # by math-verify a product: 34*c*o*s*w
        *((r"\boxed{34 \text{ cows}}", "35", "wrong"), ("so=15.", "15", "unparsable"), ("", "15", "unparsable")),
        *((text, "15", "unparsable") for text in (r"\boxed{15", r"\boxed{}", r"\boxed{?!}")),
    ],
)
def test_verdicts(verifier: Verifier, answer: str, gold: str, verdict: str) -> None:
    assert verifier.verify(answer, gold) == verdict


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        *((text, "15") for text in ("15_8", "15_{16}", "15_{ 8 }", "(15)_8", r"15_{\text{8}}")),
        *(("15", "15_8"), ("15_9", "15_8")),
        *(
            (text, "15")
            for text in (r"\ne 15", r"\neq15", "\u2260 15", "> 15", "<15", r"\gt 15", r"\geq 15", r"\nless 15")
        ),
        *((text, "15") for text in (r"\not 15", r"\not=15", r"\neg 15", r"x \not= 15")),
        *((r"x \not= 15", "x = 15"), ("10:30 PM", "10:30 AM"), ("10:30am", "10:30pm")),
        *((r"10:30\text{ p.m.}", r"10:30\text{ a.m.}"), (r"10\text{ PM}", r"10\text{ AM}")),
        *((text, "15") for text in ("16 = 15", "16=16=15", "2+14=15", r"\frac{32}{2}=15", "16.0 = 15")),
        *(("(1/0, 2)", "2"), (r"\frac{1}{0} + 2", "2")),
        *(("f(2)=6", "f(2)=5"), ("f(7)=5", "f(2)=5"), (r"\gcd(12,18)=3", r"\gcd(12,18)=6"), ("x^2=-1", "x^2=-2")),
        *((r"P(X>3)=0.5", "P(X>2)=0.5"), (r"3\text{ hours }50\text{ minutes}", r"3\text{ hours }20\text{ minutes}")),
        *(("3", r"3\text{ hours }20\text{ minutes}"), (r"5\text{ ft 2 in}", r"5\text{ ft 11 in}")),
        *((r"3\mathbf{i}+4\mathbf{j}", r"3\mathbf{i}-4\mathbf{j}"), (r"8\frac{1}{2}\%", r"7\frac{1}{2}\%")),
        *((r"1, 3, 5, \ldots, 19", "19"), (r"2, 4, \ldots, 19", r"1, 3, \ldots, 19")),
        *((r"x\equiv 3\pmod{8}", r"x\equiv 3\pmod{7}"), (r"n=4k+2, k\in\mathbb{Z}", r"n=4k+1, k\in\mathbb{Z}")),
        *((r"5\text{ minutes}", r"5\text{ hours}"), (r"5\text{ cm}^3", r"5\text{ cm}^2")),
        *((r"2\cdot 10^{-30}", "10^{-30}"), (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"), ("0.0010004", "0.001")),
        *((r"\{10^{-30}, 1\}", r"\{10^{-31}, 1\}"), (r"2\cdot10^{-30}\pi", r"10^{-30}\pi"), ("0.0000003", "1/3000000")),
        *((r"10^{-30}x", r"10^{-31}x"), ("12 34", "46"), (r"1\,234", "235"), (r"23\quad 34", "57"), ("3 1/2", "2")),
        *(("\u22125", "5"), ("1.5e3", "1.5"), ("12.5 34", "425")),
    ],
)
def test_what_math_verify_leaves_out_is_not_right(verifier: Verifier, answer: str, gold: str) -> None:
    assert verifier.verify(f"\\boxed{{{answer}}}", gold) in ("wrong", "unparsable")
    assert not verifier.equivalent(answer, gold)


@pytest.mark.parametrize(
    "text", ["nan", r"\text{NaN}", "0/0", r"\frac{0}{0}", "1/0", "0^{-1}", r"\frac{15}{0}+15", r"\{0/0\}"]
)
def test_what_has_no_value_is_no_gold_answer(verifier: Verifier, text: str) -> None:
    with pytest.raises(ValueError, match="gold must be an answer math-verify can parse"):
        verifier.verify(f"\\boxed{{{text}}}", text)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        *(("15_8", "15_{8}"), ("15_{10}", "15"), ("x_1 = 15", "15"), ("S_{10} = 55", "55"), (r"\log_2 8", "3")),
        *(("x>15", "x > 15"), ("> 15", "> 15"), (r"x \ge 15", r"x \geq 15"), (r"x \ne 15", r"x \neq 15")),
        *(("(15,\\infty)", "x>15"), (r"\{x : x>15\}", r"\{x : x>15\}"), (r"\approx 15", "15")),
        *(("10:30 AM", "10:30 AM"), (r"10:30\text{ AM}", r"10:30\text{ a.m.}"), ("15 cm", "15"), ("15^\\circ", "15")),
        *(("x = 15", "15"), ("15", "x = 15"), ("f(x)=15", "15"), ("a = b = 15", "15"), ("e = 5", "5"), ("i = 5", "5")),
        *(("2+13=15", "15"), (r"\binom{5}{2} = 10", "10"), ("5! = 120", "120"), (r"\sqrt{2} = 1.414", "1.414")),
        *(("x = 3, y = 4", "x=3,y=4"), ("y = 2x+1", "2x+1"), ("1/0.5", "2"), ("2^{-1}", "1/2"), (r"\frac1x", "x^{-1}")),
        *((r"1\,234", "1234"), ("1234", r"1\,234"), (r"1{,}000", "1000"), ("\u22125", "-5"), ("1.5e3", "1500")),
        *(("3 1/2", "3.5"), (r"7\frac{1}{2}\%", r"7.5\%"), (r"50\%", "50"), (r"50\%", "0.5"), (r"\$5", "5")),
        *(("0.333333", "1/3"), ("0.6666666", "2/3"), ("0.003333", "1/300"), (r"1 + \sqrt2", r"\sqrt{3+2\sqrt2}")),
        *((r"3\text{ h }20\text{ min}", r"3\text{ hours }20\text{ minutes}"), (r"5\text{ foot-pounds}", "5")),
        *((r"x\equiv 3\pmod{7}", r"x \equiv 3 \pmod{7}"), ("f(2)=5", "5"), (r"\text{Total} = 3\times 5 = 15", "15")),
        *((r"\text{undefined}", r"\text{undefined}"), (r"\infty", r"\infty"), (r"1/10^{30}", r"10^{-30}")),
    ],
)
def test_right_answers_of_usual_forms_stay_right(verifier: Verifier, answer: str, gold: str) -> None:
    assert verifier.verify(f"\\boxed{{{answer}}}", gold) == "correct"


def test_integers_need_no_math_verify() -> None:
    texts = ["0", "-0", "7", "007", "-7", "70", "999999999999999999", "-999999999999999999"]
    pairs = [(rf"\boxed{{{answer}}}", gold) for answer in texts for gold in texts]
    with Verifier() as verifier:
        assert verifier.verify_many(*zip(*pairs, strict=True)) == [by_math_verify(*pair) for pair in pairs]
        assert verifier._workers[0].process is None


def test_workers_parse_quickly() -> None:
    code = "from fb_core.verify.judges import Boxed, quicken; quicken(); "
    code += "print(Boxed().compare('\\\\boxed{x^2-1}', '-1+x^2'))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=False)
    assert ran.stdout == "correct\n", ran.stderr  # an unknown latex2sympy would only make the workers slow


def test_a_tally_tells_what_the_prompt_must_mend() -> None:
    judged: list[tuple[str, verify.Verdict]] = [
        *((r"\boxed{5}", "correct"), (r"\boxed{6 cows}", "wrong"), (r"\boxed{6}", "wrong")),
        *((r"\boxed{\text{six}}", "wrong"), ("so 5", "unparsable"), (r"\boxed{5", "unparsable")),
        *((r"\boxed{?!}", "unparsable"), ("x", "timeout")),
    ]
    counts = Verifier().tally([answer for answer, _ in judged], [verdict for _, verdict in judged])
    assert counts == {"correct": 1, "wrong": 3, "unparsable": 3, "timeout": 1, "unboxed": 2, "worded": 1}
    words = "1 correct, 3 wrong (1 with words in the box), 3 unparsable (2 without a closed box), 1 timeout"
    assert verify.tally_words(counts) == words
    assert verify.tally_words({"states": 3, "wrong": 0}) == ""


HOSTILE = {
    "tower of powers": HANGING,
    "long product": r"\boxed{1000000000!}",
    "tower of factorials": r"\boxed{((9!)!)!}",
    "power in Python": r"\boxed{10**10**10}",
    "memory": r"\boxed{10^{999999999999}}",
    "expansion": r"\boxed{(a+b+c+d+e+f+g)^{400}-1}",
    "infinite sets": r"\boxed{\{x^2 : x \in \mathbb{R} \setminus \mathbb{Q}\} \cup \bigcup_{n=1}^{\infty} (n, n+1)}",
    "infinite sum": r"\boxed{\sum_{n=1}^{\infty} \frac{1}{n^{3} + n + \sin n}}",
    "integral": r"\boxed{\int_0^\infty \frac{\sin(x^3) e^{-x^2}}{\log(1 + x^5)} dx}",
    "matrix": r"\boxed{\begin{pmatrix}" + r"\\".join(["&".join("1" * 1_000)] * 1_000) + r"\end{pmatrix}}",
    "braces": "\\boxed{" + "{" * 50_000 + "}" * 50_000 + "}",
    "parentheses": "\\boxed{" + "(" * 4_000 + "1" + ")" * 4_000 + "}",
    "fractions": "\\boxed{" + r"\frac{1}{" * 900 + "1" + "}" * 900 + "}",
    "unclosed": r"\boxed{",
    "unclosed many times": "\\boxed{" * 1_000_000,
    "closed only": "\\boxed{}" + "}" * 1_000_000,
    "dollars": "\\boxed{" + "$" * 9_000 + "}",
    "patterns of numbers": "\\boxed{" + "1," * 4_000 + "}",
    "patterns of roots": "\\boxed{" + "sqrt(" * 1_900 + "}",
    "patterns of brackets": "\\boxed{" + "(1 " * 3_000 + ")_}",
    "boxes in a box": "\\boxed{" + "\\boxed{1}" * 1_000 + "",
    "NUL": "\\boxed{\0" + "5" + "\0\n}",
    "control characters": "\\boxed{" + "".join(map(chr, range(32))) + "6}",
    "unicode": "\\boxed{\ud800\u202e５\U0001f4a3}",
    "replies of a worker": "\\boxed{started\ncorrect\nready\n}",
    "JSON": '\\boxed{"], ["5", "5"]]\n[["5", "5"]]\n}',
    "Python": "\\boxed{__import__('os').write(3, b'correct')}",
    "many digits": "\\boxed{" + "1" * 9_000 + "}",
}
MORE_HOSTILE = {
    "lambda": r"\boxed{lambda: 1}",
    "lambda that calls itself": r"\boxed{(lambda f: f(f))(lambda f: f(f))}",
    "attributes": r"\boxed{().__class__.__base__.__subclasses__()}",
    "open": r"\boxed{open('/dev/zero').read()}",
    "exec": r"\boxed{exec('while True: pass')}",
    "eval in eval": r"\boxed{eval('eval(' * 100 + '1' + ')' * 100)}",
    "quit": r"\boxed{quit()}",
    "exit": r"\boxed{__import__('os')._exit(0)}",
    "kill": r"\boxed{__import__('os').kill(1, 9)}",
    "sleep": r"\boxed{__import__('time').sleep(1000)}",
    "signals": r"\boxed{__import__('signal').setitimer(0, 0)}",
    "format string": r"\boxed{'%1000000000d' % 1}",
    "list in Python": r"\boxed{[0]*10**10}",
    "shift": r"\boxed{1<<10**10}",
    "text": "\\boxed{" + "word " * 1_900 + "}",
    "units": "\\boxed{6" + r"\text{ cm}" * 900 + "}",
    "percent signs": "\\boxed{5" + r"\%" * 4_000 + "}",
    "double factorial": r"\boxed{100000001!!}",
    "factorials in a row": r"\boxed{9!!!!!!!!!!!!!!!!!!!!}",
    "factorial of a fraction": r"\boxed{(\frac{1}{3})!}",
    "binomial": r"\boxed{\binom{10^{9}}{5 \cdot 10^{8}}}",
    "gamma": r"\boxed{\Gamma(10^{9})}",
    "primes": r"\boxed{\prod_{n=1}^{10^{9}} (n^2 + 1)}",
    "finite sum": r"\boxed{\sum_{n=1}^{10^{9}} \frac{1}{n}}",
    "sums in sums": r"\boxed{\sum_{a=1}^{99}\sum_{b=1}^{99}\sum_{c=1}^{99}\sum_{d=1}^{99} (a b c d)^{-1}}",
    "limit": r"\boxed{\lim_{x \to \infty} \left(1 + \frac{1}{x}\right)^{x^{x}}}",
    "limit of an oscillation": r"\boxed{\lim_{x \to 0} \sin\left(\frac{1}{x}\right)^{\frac{1}{x}}}",
    "derivative": r"\boxed{\frac{d^{50}}{dx^{50}} \left(\sin(x^{x})\right)}",
    "integrals in integrals": r"\boxed{\int_0^1\int_0^1\int_0^1 e^{x y z} \sin(x^y) dx dy dz}",
    "continued fraction": "\\boxed{" + r"1+\frac{1}{" * 300 + "2" + "}" * 300 + "}",
    "roots": "\\boxed{" + r"\sqrt{1+" * 400 + "2" + "}" * 400 + "}",
    "root of a large number": r"\boxed{\sqrt[7]{123456789^{12345}+1}}",
    "many roots": "\\boxed{" + "+".join(rf"\sqrt{{{n}}}" for n in range(2, 200)) + "}",
    "exponents": "\\boxed{" + "2^{" * 1_000 + "2" + "}" * 1_000 + "}",
    "indices": "\\boxed{" + "x_{" * 1_000 + "1" + "}" * 1_000 + "}",
    "absolute values": "\\boxed{" + "|" * 3_000 + "1" + "|" * 3_000 + "}",
    "floors": "\\boxed{" + r"\lfloor " * 500 + "1" + r"\rfloor " * 500 + "}",
    "negations": "\\boxed{" + "-" * 9_000 + "1}",
    "equalities": "\\boxed{" + "=".join("abcdefgh" * 100) + "}",
    "inequalities": r"\boxed{" + " < ".join("abcdefghijklmnopqrstuvwxyz") + "}",
    "equation of a high degree": r"\boxed{x^{500} - 3x^{499} + 7x = 1}",
    "nested sets": "\\boxed{" + r"\{" * 500 + "1" + r"\}" * 500 + "}",
    "a large set": r"\boxed{\{" + ",".join(map(str, range(2_000))) + r"\}}",
    "sets of sums": r"\boxed{\{" + ",".join(rf"\frac{{{n}}}{{{n + 1}}}" for n in range(400)) + r"\}}",
    "intervals": r"\boxed{" + r" \cup ".join(f"({n}, {n + 1})" for n in range(600)) + "}",
    "intersections": r"\boxed{" + r" \cap ".join(rf"[{n}, \infty)" for n in range(600)) + "}",
    "determinant": r"\boxed{\det\begin{pmatrix}" + r"\\".join(["&".join("abcdefgh")] * 8) + r"\end{pmatrix}}",
    "power of a matrix": r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}^{10^{9}}}",
    "logarithms": "\\boxed{" + r"\log(" * 300 + "2" + ")" * 300 + "}",
    "trigonometry": r"\boxed{" + r"\sin(\cos(\tan(" * 60 + "x" + ")))" * 60 + "}",
    "decimal places": r"\boxed{0." + "3" * 9_000 + "}",
    "repeating decimal": r"\boxed{0.\overline{" + "142857" * 1_000 + "}}",
    "small number": r"\boxed{10^{-999999999}}",
    "infinity": r"\boxed{\infty^{\infty} - \infty}",
    "NaN": r"\boxed{nan}",
    "division by zero": r"\boxed{\frac{1}{0}}",
    "combining marks": "\\boxed{5" + "\u0301" * 9_000 + "}",
    "other digits": "\\boxed{\u0665\uff15\u096b}",
    "terminal": "\\boxed{\x1b]52;c;NQ==\x07\x1b[2J5}",
}


@pytest.mark.parametrize(
    "text",
    [*HOSTILE.values(), *(pytest.param(t, marks=pytest.mark.slow) for t in MORE_HOSTILE.values())],
    ids=[*HOSTILE, *MORE_HOSTILE],
)
@pytest.mark.parametrize("role", ["answer", "gold"])
@pytest.mark.sweep(6)
def test_hostile_texts_end_in_a_logged_verdict(
    verifier: Verifier, text: str, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = (text, "5") if role == "answer" else (r"\boxed{5}", boxed(text) or text)
    with caplog.at_level(logging.INFO, logger="fb_core.verify.verifier"):
        (verdict,) = verifier.verify_many(*([each] for each in pair), bad_golds="unparsable")
    assert verdict in ("wrong", "unparsable", "timeout")
    assert verdict == "wrong" or verdict in caplog.text
    assert len(caplog.text) < 2_000
    verifier._known.clear()
    assert verifier.verify(r"\boxed{0.5}", r"\frac{1}{2}") == "correct"


@pytest.mark.parametrize(
    ("start", "unit", "end", "verdict"),
    [
        *(("", "{", "", "unparsable"), ("", "\\boxed{", "", "unparsable"), (r"\boxed{5}", "x", "", "correct")),
        *(("", "\U0001f4a3", r"\boxed{5}", "correct"), (r"\boxed{", "5", "}", "unparsable")),
    ],
    ids=["no box", "unclosed boxes", "box first", "box last", "in the box"],
)
def test_a_hundred_megabytes_are_read_in_linear_time(
    verifier: Verifier, start: str, unit: str, end: str, verdict: str
) -> None:
    answer = start + unit * (100_000_000 // len(unit.encode())) + end
    began = time.process_time()
    assert verifier.verify(answer, "5") == verdict
    assert time.process_time() - began < 60  # quadratic time would be days


def test_nothing_is_left_after_hostile_answers() -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    pids = []
    with Verifier(timeout=LIMIT) as verifier:
        for hostile, plain in ((HANGING, "0.5"), (HOSTILE["JSON"], "1.5"), (r"\boxed{1000000000!}", "2.5")):
            verifier.verify(hostile, "5")
            assert verifier.verify(rf"\boxed{{{plain}}}", plain) == "correct"
            pids.append(worker_pid(verifier))
    assert not any(is_child(pid) for pid in pids)
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_remembered_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "REMEMBERED", 10)
    with Verifier() as verifier:
        assert set(verifier.verify_many([rf"\boxed{{{n}.5}}" for n in range(40)], ["7.5"] * 40)) == {"correct", "wrong"}
        assert len(verifier._known) == 10


def test_a_worker_over_its_memory_does_not_take_the_next_answer_with_it() -> None:
    with Verifier(timeout=LIMIT, memory_bytes=256 << 20) as small:
        assert small.verify(r"\boxed{2^{2^{36}}}", "5") in ("wrong", "unparsable", "timeout")
        assert small.verify(r"\boxed{1.5}", "1.5") == "correct"


def test_repeats_ask_no_worker(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, asked = verifier.verify(HANGING, "7"), []
    monkeypatch.setattr(verify._Worker, "ask", lambda _, pairs: asked.append(pairs) or ["wrong"] * len(pairs))
    assert verifier.verify_many([f"try {n}: {HANGING}" for n in range(50)], ["7"] * 50) == [verdict] * 50
    assert not asked


def test_a_killed_worker_is_replaced(verifier: Verifier) -> None:
    assert verifier.verify(r"\boxed{2.1}", "2.1") == "correct"
    pid = worker_pid(verifier)
    os.kill(pid, signal.SIGKILL)
    assert verifier.verify(r"\boxed{2.2}", "2.2") == "correct"
    assert worker_pid(verifier) != pid
    assert not is_child(pid)


def test_a_worker_that_dies_over_an_answer_counts_as_timeout() -> None:
    with Verifier(timeout=60.0) as patient, ThreadPoolExecutor(1) as thread:
        assert patient.verify(r"\boxed{1.5}", "1.5") == "correct"
        pid = worker_pid(patient)
        verdict = thread.submit(patient.verify, HANGING, "5")
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        assert verdict.result(HANG) == "timeout"
        assert patient.verify(r"\boxed{1.6}", "1.6") == "correct"


def test_verdicts_are_those_of_math_verify_and_a_worker_killed_among_many_costs_one_at_most() -> None:
    answers, golds = zip(*ordinary(400, seed=300), strict=True)
    with Verifier(workers=2) as pair, ThreadPoolExecutor(1) as thread:
        assert pair.verify_many([r"\boxed{1.5}", r"\boxed{2.5}"], ["1.5", "2.5"]) == ["correct"] * 2  # both start
        pid = worker_pid(pair)
        verdicts = thread.submit(pair.verify_many, answers, golds)
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        expected = [by_math_verify(*one) for one in zip(answers, golds, strict=True)]
        wrong = [got for got, right in zip(verdicts.result(), expected, strict=True) if got != right]
    assert wrong in ([], ["timeout"])
    assert {"correct", "wrong"} == set(expected)


@contextmanager
def stopped_at_work(verifier: Verifier, question: str, gold: str) -> Iterator[Future[str]]:
    """The verdict to come of an answer over which the worker is stopped; it goes on at the end."""
    assert verifier.verify(r"\boxed{1.5}", "1.5") == "correct"
    pid = worker_pid(verifier)
    before = cpu_seconds(pid)
    with ThreadPoolExecutor(1) as thread:
        verdict = thread.submit(verifier.verify, question, gold)
        while cpu_seconds(pid) < before + 0.1:
            assert not verdict.done()
            time.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield verdict
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_time_without_a_cpu_does_not_count() -> None:
    long = "+".join(f"x^{{{power}}}" for power in range(60))  # half a second
    with Verifier(timeout=2.0) as patient:
        with stopped_at_work(patient, rf"\boxed{{{long}}}", long) as verdict:
            time.sleep(2.5)
            assert not verdict.done()
        assert verdict.result() == "correct"


def test_a_worker_that_gets_no_cpu_at_all_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "SHORTEST_WAIT", 0.5)
    monkeypatch.setattr(verify, "PATIENCE", 0.1)
    with Verifier(timeout=5.0) as patient:
        with stopped_at_work(patient, HANGING, "5") as verdict:
            assert verdict.result() == "timeout"
        assert patient.verify(r"\boxed{1.6}", "1.6") == "correct"


@pytest.mark.parametrize("question", [HANGING, r"\boxed{0.5}"], ids=["hanging", "idle"])
def test_workers_end_after_a_killed_parent(question: str) -> None:
    code = (
        "import sys, threading\nfrom fb_core.verify.verifier import Verifier\nverifier = Verifier(timeout=2)\n"
        "verifier.verify(r'\\boxed{0.5}', '0.25')\nprint(verifier._workers[0].process.pid, flush=True)\n"
        "verifier.verify(sys.argv[1], '5')\nthreading.Event().wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, question], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        assert runs(pid)
        parent.kill()
    deadline = time.monotonic() + HANG
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(pid)


def test_a_fork_is_refused(verifier: Verifier) -> None:
    assert verifier.verify(r"\boxed{0.5}", "0.25") == "wrong"
    child = os.fork()
    if child == 0:
        try:
            verifier.verify(r"\boxed{0.5}", "0.25")
        except ValueError as error:
            verifier.close()
            os._exit("got a fork" not in str(error))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert verifier.verify(r"\boxed{0.75}", r"\frac{3}{4}") == "correct"


def test_many_answers_keep_their_order_over_workers_and_threads() -> None:
    answers = [rf"\boxed{{{n % 7}.5}}" for n in range(60)] + [HANGING, "none", r"\boxed{3.5}"]
    expected = ["correct" if n % 7 == 3 else "wrong" for n in range(60)] + ["timeout", "unparsable", "correct"]
    with Verifier(workers=2, timeout=LIMIT) as pair, ThreadPoolExecutor(3) as threads:
        results = [threads.submit(pair.verify_many, answers, ["3.5"] * len(answers)) for _ in range(3)]
        assert [result.result() for result in results] == [expected] * 3
        processes = [worker.process for worker in pair._workers]
    assert all(process is None or process.returncode is not None for process in processes)


def test_no_process_before_the_first_answer_or_after_close() -> None:
    verifier = Verifier(timeout=LIMIT)
    assert verifier._workers[0].process is None
    assert verifier.verify("no box", "15") == "unparsable"
    assert verifier._workers[0].process is None
    assert verifier.verify(r"\boxed{15}", "15") == "correct"
    assert verifier._workers[0].process is None  # for integers none is needed
    assert verifier.verify(r"\boxed{1.5}", "1.5") == "correct"
    pid = worker_pid(verifier)
    verifier.close()
    verifier.close()
    assert not is_child(pid)
    for repeated in ("1.5", "1.6", "15"):  # remembered or not
        with pytest.raises(ValueError, match="closed"):
            verifier.verify(rf"\boxed{{{repeated}}}", "1.5")
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
    assert verifier.verify(r"\boxed{1.5}", "1.5") == "correct"


def test_arguments_are_checked(verifier: Verifier) -> None:
    for call, kind, named in (
        (lambda: verifier.verify(r"\boxed{15}", 15), TypeError, "gold"),  # type: ignore[arg-type]
        (lambda: verifier.verify(None, "15"), TypeError, "answer"),  # type: ignore[arg-type]
        (lambda: verifier.verify_many("15", ["15"]), TypeError, "answers"),
        (lambda: verifier.verify_many(["15"], ["15", "16"]), ValueError, "1 answers and 2 golds"),
        (lambda: boxed(b"\\boxed{1}"), TypeError, "text"),  # type: ignore[arg-type]
        (lambda: Verifier(workers="2"), TypeError, "workers"),  # type: ignore[arg-type]
        (lambda: Verifier(workers=0), ValueError, "workers"),
        (lambda: Verifier(timeout=float("nan")), ValueError, "timeout"),
        (lambda: Verifier(timeout=float("inf")), ValueError, "timeout"),
        (lambda: Verifier(memory_bytes=1 << 20), ValueError, "memory_bytes"),
    ):
        with pytest.raises(kind, match=named):
            call()


def test_workers_do_not_run_the_calling_script_again(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import sys\nprint('running')\nfrom fb_core.verify.verifier import Verifier\n"
        "with Verifier() as verifier:\n    print(verifier.verify(r'\\boxed{1.5}', '1.5'))\n"
        "print(sorted({'torch', 'sympy', 'math_verify'} & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=HANG, check=False)
    assert ran.stdout.split("\n")[:3] == ["running", "correct", "[]"], ran.stderr
