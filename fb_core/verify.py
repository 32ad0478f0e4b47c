"""Judges final answers: math-verify in worker processes that can be killed, since it can hang or use up memory."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import SimpleNamespace
from typing import Any, Literal, cast, get_args

Verdict = Literal["correct", "wrong", "unparsable", "timeout"]

log = logging.getLogger(__name__)

LONGEST_CONTENT = 10_000  # characters in a box or a gold answer; longer is no final answer
REMEMBERED = 1 << 16  # judged pairs kept
SHAPES, LONGEST_SHAPE = 4_096, 100  # shapes of answers that a worker caches, and the most tokens of one
BATCH = 32  # pairs sent to a worker at once
SMALLEST_MEMORY = 256 << 20  # math-verify with sympy takes some 60 MiB
LONGEST_TIMEOUT = 86_400.0  # seconds
START_LIMIT = 600.0  # seconds for a worker to import math-verify
PATIENCE, SHORTEST_WAIT = 20.0, 60.0  # wall-clock limit of an answer: so many timeouts, but at least so many seconds
BAD_GOLD = "bad gold"
Pair = tuple[str, str]  # what math-verify is to read, and the gold answer
BARE_WORD = re.compile(r"[A-Za-z]{3,}")
COMMAND = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
BOX_COMMANDS = ("\\boxed{", "\\boxed {")
TEX_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace does not group
FINAL_STOP = re.compile(r"(?<!\.)\.$")  # math-verify cannot read "15."
INTEGER = re.compile(r"-?[0-9]{1,18}")
INTEGER_BOX = re.compile(r"\\boxed\{(-?[0-9]{1,18})\}")
# What math-verify does not read and leaves out: words, number bases, halves of the day, relations without a left side.
WORDS = re.compile(r"\\(?:text|textrm|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
BASE = re.compile(r"\d[\s)}\]]*_\s*(?:\{([^{}]*)\}|(\w))")
HALF_DAY = re.compile(r"\d[\s~,.\\]*([ap])\.?\s*m\b", re.IGNORECASE)
NEGATION = re.compile(r"\\(?:not|neg|lnot)(?![A-Za-z])|\xac")
RELATION = re.compile(
    r"\\(?:neq?|n?less|n?gtr|n?[lg]eq?|[lg]t|[lg]eqq|[lg]eqslant|ll|gg)(?![A-Za-z])|[<>\u2260\u2264\u2265\u226e\u226f]"
)
BY_ZERO = re.compile(r"/\s*0(?![\d.!])")
MATH_MODE = re.compile(r"(\$\$?)([^$]*)\1|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)

# Not multiprocessing, nor pebble's pool over it: every worker would run the caller's __main__ again, with its imports.
# Nor loky's, in which the death of one worker ends the work of all.
WORKER_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from fb_core.verify import _serve; _serve()"


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, in time linear in the text.

    Args:
        text: anything, of any length.

    Returns:
        The text between the braces, stripped; None if there is no box, or the last one is not closed within 10,000
        characters.

    Raises:
        TypeError: not a string.
    """
    _check_text("boxed", "text", text)
    starts = [at + len(command) for command in BOX_COMMANDS if (at := text.rfind(command)) >= 0]
    if not starts:
        return None
    start, depth = max(starts), 1
    for match in TEX_BRACE.finditer(text, start, start + LONGEST_CONTENT + 1):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()].strip()
    return None


def tally(answers: Sequence[str], verdicts: Sequence[Verdict]) -> dict[str, int]:
    r"""How many answers got each verdict, and how many have one of two faults that a better prompt can fix.

    Args:
        answers: the models' whole texts.
        verdicts: one for each.

    Returns:
        a count for each verdict; "unboxed" counts the unparsable answers without a closed `\boxed{...}`, "worded" the
        wrong ones whose box holds bare words ("34 cows"), which math-verify reads as products of letters.
    """
    counts = {verdict: verdicts.count(verdict) for verdict in get_args(Verdict)} | {"unboxed": 0, "worded": 0}
    for answer, verdict in zip(answers, verdicts, strict=True):
        content = boxed(answer) if verdict in ("wrong", "unparsable") else ""
        counts["unboxed"] += verdict == "unparsable" and content is None
        counts["worded"] += verdict == "wrong" and bool(BARE_WORD.search(COMMAND.sub(" ", content or "")))
    return counts


def tally_words(counts: Mapping[str, int]) -> str:
    """The nonzero counts of `tally` as one line; "" if there are none."""
    inside = {"wrong": ("worded", "with words in the box"), "unparsable": ("unboxed", "without a closed box")}
    parts = []
    for verdict in get_args(Verdict):
        if counts.get(verdict):
            fault, words = inside.get(verdict, ("", ""))
            parts.append(f"{counts[verdict]} {verdict}" + (f" ({counts[fault]} {words})" if counts.get(fault) else ""))
    return ", ".join(parts)


class Verifier:
    """Judges answers against gold answers; nothing in an answer can hang or crash this process.

    Workers start when first needed and are replaced after a kill; plain integers need none. Verdicts are cached by box
    content and gold answer, so repeats cost nothing. Safe to share between threads; close it, or use it as a context
    manager.
    """

    def __init__(
        self,
        *,
        workers: int = 1,
        timeout: float = 5.0,
        memory_bytes: int = 2 << 30,
        require_boxed: bool = True,
    ) -> None:
        r"""Start no worker yet.

        Args:
            workers: maximum number of processes.
            timeout: seconds of CPU time for one answer, without the start of a worker. On a busy machine an answer may
                wait for a CPU, so the limit in wall-clock time is 20 times that, and at least a minute.
            memory_bytes: address space of one worker, if the system can limit it; 256 MiB or more.
            require_boxed: an answer without `\boxed{...}` is "unparsable"; otherwise math-verify searches its last
                10,000 characters, and finds a 5 in "so=5.".

        Raises:
            TypeError: an argument is not a number.
            ValueError: an argument is too small, or the timeout is longer than a day.
        """
        _check_number("workers", workers, int, 1)
        _check_number("timeout", timeout, (int, float), 0.01, LONGEST_TIMEOUT)
        _check_number("memory_bytes", memory_bytes, int, SMALLEST_MEMORY)
        self._require_boxed = require_boxed
        self._workers = [_Worker(timeout, memory_bytes) for _ in range(workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # last in, first out: those already started first
        for worker in self._workers:
            self._idle.put(worker)
        self._owner = os.getpid()
        self._closed = False
        self._closing = threading.Lock()  # a second close waits for the first
        self._lock = threading.Lock()  # guards what is known, and the pairs to do
        self._known: dict[Pair, str] = {}

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def verify(self, answer: str, gold: str) -> Verdict:
        r"""Judge one answer.

        Args:
            answer: the model's whole text; its last `\boxed{...}` counts.
            gold: the right answer, bare ("15", "\\frac{1}{2}") or inside `\boxed{}` or dollars.

        Returns:
            "correct", "wrong", "unparsable" (no closed box, or nothing mathematical in it), or "timeout" (not finished
            within the limits of time and memory). math-verify decides what is equal: it ignores \text{...} and the
            units that it knows ("34\text{ cows}", "34 cm"). It reads other bare words as products of letters, so
            "34 cows" is wrong against 34. What it leaves out must be the same in both: number bases, negations,
            relations without a left side ("15_8", "> 15" against 15), a.m. against p.m.; and an equation between
            numbers must hold ("16 = 15"). NaN and divisions by zero are unparsable.

        Raises as `verify_many`.
        """
        return self.verify_many([answer], [gold])[0]

    def verify_many(
        self, answers: Sequence[str], golds: Sequence[str], *, bad_golds: Literal["raise", "unparsable"] = "raise"
    ) -> list[Verdict]:
        """Judge many answers, spread over the workers; verdicts come in the order of the answers.

        Args:
            answers: as in `verify`.
            golds: one for each answer.
            bad_golds: what to do about a gold answer that cannot be parsed: raise, or give the verdict "unparsable".

        Raises:
            TypeError: an argument is not a sequence of strings.
            ValueError: lengths differ, a gold answer cannot be parsed (the verdicts of the others are cached), or the
                verifier is closed.
            RuntimeError: workers cannot start here.
        """
        for name, texts in {"answers": answers, "golds": golds}.items():
            if isinstance(texts, str) or not isinstance(texts, Sequence):
                kind = type(texts).__name__
                raise TypeError(f"verify_many: {name} must be a sequence of strings, got {kind}; pass a list.")
        if len(answers) != len(golds):
            raise ValueError(
                f"verify_many: expected one gold for each answer, got {len(answers)} answers and {len(golds)} golds; "
                "repeat the gold of a problem with several answers."
            )
        self._check_open()
        bare_golds = [_bare_gold(gold) for gold in golds]
        questions = [self._question(answer) for answer in answers]
        pairs = list(zip(questions, bare_golds, strict=True))
        judged = self._judge([(text, gold) for text, gold in pairs if text is not None and gold is not None])
        outcomes = [
            BAD_GOLD if gold is None else "unparsable" if text is None else judged[text, gold] for text, gold in pairs
        ]
        for gold, outcome in zip(golds, outcomes, strict=True):
            if outcome == BAD_GOLD and bad_golds == "raise":
                raise ValueError(
                    f"Verifier: gold must be an answer math-verify can parse, got {gold[:80]!r}; correct the data."
                )
            if outcome == BAD_GOLD:
                log.warning("unparsable: no answer is right by the gold %r", gold[:80])
        return ["unparsable" if outcome == BAD_GOLD else cast(Verdict, outcome) for outcome in outcomes]

    def equivalent(self, a: str, b: str) -> bool:
        """Whether two box contents are equivalent, for majority voting; their order does not matter.

        True if the strings are equal or math-verify accepts one for the other; False also if it cannot tell. Raises as
        `verify_many`.
        """
        _check_text("equivalent", "a", a)
        _check_text("equivalent", "b", b)
        self._check_open()
        first, second = sorted((_tidy(a), _tidy(b)))
        if first == second:
            return True
        if not first or max(len(first), len(second)) > LONGEST_CONTENT:
            return False
        outcome = self._judge_one(_in_box(second), first)
        return outcome == "correct" or (outcome == "wrong" and self._judge_one(_in_box(first), second) == "correct")

    def close(self) -> None:
        """End the workers once they have finished their current work; safe to call again."""
        self._closed = True
        with self._closing:
            resting = [self._idle.get() for _ in self._workers]
            for worker in resting:
                worker.stop()
                self._idle.put(worker)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("Verifier: expected an open verifier, got a closed one; make a new one.")
        if self._owner != os.getpid():  # two processes would read each other's verdicts
            raise ValueError("Verifier: expected the process that made it, got a fork of it; make one in each process.")

    def _question(self, answer: str) -> str | None:
        """What to ask a worker about an answer; None if the answer is unparsable without asking."""
        _check_text("verify", "answer", answer)
        content = boxed(answer)
        if content is not None:
            question = _in_box(_tidy(content)) if content else None
        else:
            question = None if self._require_boxed else answer[-LONGEST_CONTENT:].strip() or None
        if question is None:
            log.info("unparsable: no box that is closed and filled in an answer ending in %r", answer[-80:])
        return question

    def _judge_one(self, question: str, gold: str) -> str:
        return self._judge([(question, gold)])[question, gold]

    def _judge(self, pairs: list[Pair]) -> dict[Pair, str]:
        judged = {pair: outcome for pair in pairs if (outcome := _of_integers(*pair)) is not None}
        with self._lock:
            judged |= {pair: self._known[pair] for pair in pairs if pair in self._known}
        todo = deque(dict.fromkeys(pair for pair in pairs if pair not in judged))

        def work() -> None:
            while True:
                with self._lock:
                    size = min(BATCH, math.ceil(len(todo) / (2 * len(self._workers))))  # small ones last
                    batch = [todo.popleft() for _ in range(size)]
                if not batch:
                    return
                outcomes = self._ask(batch)
                judged.update(zip(batch, outcomes, strict=False))
                todo.extend(batch[len(outcomes) :])

        count = min(len(self._workers), len(todo))
        if count < 2:
            work()
            return judged
        with ThreadPoolExecutor(count) as threads:  # they only wait for the workers
            try:
                for future in [threads.submit(work) for _ in range(count)]:
                    future.result()
            finally:
                todo.clear()  # after an error or Ctrl-C
        return judged

    def _ask(self, batch: list[Pair]) -> list[str]:
        """The outcomes of one or more pairs from the front of the batch."""
        worker = self._idle.get()
        try:
            self._check_open()  # it may have been closed meanwhile
            outcomes = worker.ask(batch)
        finally:
            self._idle.put(worker)
        for (question, gold), outcome in zip(batch, outcomes, strict=False):
            if outcome in ("unparsable", "timeout"):
                level = logging.WARNING if outcome == "timeout" else logging.INFO
                log.log(level, "%s: %r against %r", outcome, question[:80], gold[:80])
        with self._lock:
            self._known.update(zip(batch, outcomes, strict=False))
            for pair in list(islice(self._known, max(0, len(self._known) - REMEMBERED))):
                del self._known[pair]
        return outcomes


class _Worker:
    """One process at a time that judges pairs; used by one thread at a time."""

    def __init__(self, timeout: float, memory_bytes: int) -> None:
        self._timeout = timeout
        self._memory_bytes = memory_bytes
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, pairs: list[Pair]) -> list[str]:
        """The outcomes of the first pairs, at least one: up to the pair at which the process ended, or all."""
        request = json.dumps(pairs).encode() + b"\n"  # ASCII, whatever the texts hold
        try:
            for _ in range(2):  # again, if the process had died between two requests
                process = self._alive()
                replies = self._exchange(process, request, _longest_wait(self._timeout), lines=2 * len(pairs))
                outcomes = replies[1::2]
                if len(outcomes) == len(pairs):
                    return outcomes
                self.stop()
                if len(replies) % 2:  # a pair was started and not finished
                    return [*outcomes, "timeout"]
                if outcomes:
                    return outcomes
        except BaseException:
            self.stop()  # its late reply must not answer the next question
            raise
        return ["timeout"]

    def stop(self) -> None:
        """Kill the process, if there is one, and wait for its end."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        for pipe in filter(None, (self.process.stdin, self.process.stdout)):
            with contextlib.suppress(OSError):  # closing fails if a dead process left something unsent
                pipe.close()
        self.process = None

    def _alive(self) -> subprocess.Popen[bytes]:
        if self.process is not None and self.process.poll() is None:
            return self.process
        self.stop()
        paths = json.dumps([str(path) for path in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER_CODE, paths, str(self._timeout), str(self._memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},  # sympy's orderings, and so the verdicts, are reproducible
        )
        if self._exchange(self.process, b"", START_LIMIT, lines=1) != ["ready"]:
            self.stop()
            raise RuntimeError(
                f"Verifier: a worker must start within {START_LIMIT:.0f} s and {self._memory_bytes} bytes, but it "
                "ended; raise memory_bytes or see what `python -c 'import math_verify'` says."
            )
        return self.process

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], request: bytes, limit: float, *, lines: int) -> list[str]:
        """Send a request and read `lines` lines, each within the limit; fewer if the process ends or is killed."""
        assert process.stdin is not None
        assert process.stdout is not None
        replies: list[str] = []
        deadline = time.monotonic() + limit
        done = threading.Event()

        def watch() -> None:
            while not done.wait(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    process.kill()
                    return

        threading.Thread(target=watch, daemon=True).start()
        try:
            with contextlib.suppress(OSError):  # the process is dead, as reading will show
                process.stdin.write(request)
                process.stdin.flush()
            for line in islice(process.stdout, lines):
                deadline = time.monotonic() + limit
                replies.append(line.decode().strip())
        finally:
            done.set()
        return replies


def _serve() -> None:
    """A worker's main loop: reads lists of pairs from stdin; for each pair prints "started", then the outcome."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print does not mix with the replies
    timeout, memory_bytes = float(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _limit_memory(memory_bytes)
    logging.disable()
    with contextlib.suppress(ImportError, AttributeError):  # another latex2sympy: slower
        _quicken()
    _judge("\\boxed{x=\\frac{1}{2}}", "0.5")  # imports, grammar and patterns, before the clock runs
    replies.write(b"ready\n")
    for line in sys.stdin.buffer:
        for question, gold in json.loads(line):
            replies.write(b"started\n")
            _end_after(timeout, 2 * _longest_wait(timeout))
            try:
                outcome = _judge(question, gold)
            except MemoryError:
                return
            _end_after(0, 0)
            replies.write(outcome.encode() + b"\n")
            if _resident_bytes() > memory_bytes // 2:  # what it cached would spoil the next answer
                return


def _of_integers(question: str, gold: str) -> str | None:
    """What math-verify would say of two plain integers; None for anything else."""
    if INTEGER.fullmatch(gold) and (box := INTEGER_BOX.fullmatch(question)):
        return "correct" if int(box[1]) == int(gold) else "wrong"
    return None


def _judge(question: str, gold: str) -> str:
    from math_verify import parse, verify

    wanted = parse(_in_box(gold), parsing_timeout=None)  # expressions, and the text that they were read from
    expected = [expression for expression in wanted if not isinstance(expression, str)]
    if not expected or _undefined(gold, expected):
        return BAD_GOLD
    parsed = parse(question, parsing_timeout=None)
    got = [expression for expression in parsed if not isinstance(expression, str)]
    if not got:
        return "unparsable"
    if not verify(wanted, parsed, timeout_seconds=None):  # gold first: it is not symmetric
        return "wrong"
    content = boxed(question)
    said = str(parsed[-1]) if content is None else content
    if _undefined(said, got):
        return "unparsable"
    halves = [set(map(str.lower, HALF_DAY.findall(WORDS.sub(r"\1", text)))) for text in (said, gold)]
    if _unread(said, got) != _unread(gold, expected) or (all(halves) and halves[0] != halves[1]):
        return "wrong"
    return "correct" if "=" in gold or _holds(said, got) else "wrong"


def _undefined(text: str, expressions: Sequence[Any]) -> bool:
    """Whether a text has no value: NaN, or a division by zero anywhere in it."""
    from sympy import Pow, nan, zoo  # type: ignore[import-untyped]

    if BY_ZERO.search(text) or WORDS.sub(r"\1", text).strip().lower() == "nan":
        return True
    if any(expression.has(nan, zoo) for expression in expressions):
        return True
    inverted = {power.base for expression in expressions for power in expression.atoms(Pow) if power.exp.is_negative}
    values = (base.evalf() for base in inverted if base.is_number)
    return any(value is nan or (value.is_number and abs(value) < 1e-100) for value in values)


def _unread(text: str, expressions: Sequence[Any]) -> list[str]:
    """The number bases, negations and relations in a text that are not in what was read of it, sorted."""
    from sympy import Set
    from sympy.core.relational import Relational  # type: ignore[import-untyped]

    plain = WORDS.sub(r"\1", text)
    bases = [(braced or digit).strip() for braced, digit in BASE.findall(plain)]
    read = any(isinstance(expression, Set) or expression.has(Relational) for expression in expressions)
    relations = [] if read else RELATION.findall(plain)
    return sorted([*(base for base in bases if base != "10"), *NEGATION.findall(plain), *relations])


def _holds(text: str, expressions: Sequence[Any]) -> bool:
    """Whether the equations between numbers in a text are true, with decimals to within a hundredth."""
    from math_verify import verify
    from sympy import Eq, Float

    if re.search("[A-Za-z]", re.sub(r"\\(?!text|mathrm|mbox)[A-Za-z]+", "", text)):
        return True  # letters are quantities and units
    for equation in {equation for expression in expressions for equation in expression.atoms(Eq)}:
        left, right = equation.lhs, equation.rhs
        if not (left.is_number and right.is_number) or verify(left, right, timeout_seconds=None):
            continue
        if not equation.has(Float) or abs(complex(left) - complex(right)) > 0.01 * abs(complex(right)):
            return False
    return True


def _quicken() -> None:
    """Make latex2sympy about ten times as fast in this process, with the same results."""
    from antlr4 import PredictionMode  # type: ignore[import-untyped]
    from antlr4.error.ErrorStrategy import BailErrorStrategy  # type: ignore[import-untyped]
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy  # type: ignore[import-untyped]
    from sympy import Integer  # type: ignore[import-untyped]

    plain_parser, any_number = _Latex2Sympy.create_parser, _Latex2Sympy.parse_number
    choices_of: dict[tuple[int, ...], list[int]] = {}  # by the types of the tokens; the choices depend on nothing else

    def create_parser(self: Any, latex: str) -> Any:
        try:
            return parsed(self, latex, PredictionMode.SLL)  # the tree of LL, or an error
        except Exception:
            return parsed(self, latex, PredictionMode.LL)

    def parsed(self: Any, latex: str, mode: Any) -> Any:
        parser = plain_parser(self, latex)
        parser.getTokenStream().fill()
        shape = tuple(token.type for token in parser.getTokenStream().tokens)
        predictor, earlier = parser._interp, choices_of.get(shape)
        predictor.predictionMode = mode
        choices: list[int] = []

        def predict(*decision: Any) -> int:
            choices.append(earlier[len(choices)] if earlier else predictor.adaptivePredict(*decision))
            return choices[-1]

        parser._interp = SimpleNamespace(atn=parser.atn, adaptivePredict=predict)
        parser._errHandler = BailErrorStrategy()
        tree = parser.math()
        if len(shape) < LONGEST_SHAPE and len(choices_of) < SHAPES:
            choices_of[shape] = choices
        parser.math = lambda: tree
        return parser

    def parse_number(self: Any, text: str) -> Any:
        return Integer(text) if INTEGER.fullmatch(text) else any_number(self, text)  # not sympify's eval

    _Latex2Sympy.create_parser, _Latex2Sympy.parse_number = create_parser, parse_number


def _limit_memory(memory_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    for kind, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # a lower limit is already set, or the system has none
            resource.setrlimit(kind, (limit, limit))


def _longest_wait(timeout: float) -> float:
    """Wall-clock seconds for an answer that may take `timeout` seconds of CPU time."""
    return max(PATIENCE * timeout, SHORTEST_WAIT)


def _end_after(cpu: float, clock: float) -> None:
    """End this process after `cpu` s of CPU time or `clock` s of wall time (its parent may be gone); 0 cancels."""
    if hasattr(signal, "setitimer"):  # not on Windows: there the clock of the parent decides
        for kind, ends, seconds in (
            (signal.ITIMER_PROF, signal.SIGPROF, cpu),
            (signal.ITIMER_REAL, signal.SIGALRM, clock),
        ):
            signal.signal(ends, signal.SIG_DFL)
            signal.setitimer(kind, seconds)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # Linux only
        return 0


def _in_box(content: str) -> str:
    return f"\\boxed{{{content}}}"


def _tidy(content: str) -> str:
    return FINAL_STOP.sub("", content.strip()).strip()


def _bare_gold(gold: str) -> str | None:
    _check_text("verify", "gold", gold)
    content = boxed(gold)
    if content is None:
        content = gold.strip()
        if match := MATH_MODE.fullmatch(content):
            content = match[2] or match[3] or match[4] or ""
    content = _tidy(content)
    if not content or len(content) > LONGEST_CONTENT:
        return None
    return content


def _check_text(where: str, name: str, text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{where}: {name} must be a string, got {type(text).__name__}; pass str.")


def _check_number(
    name: str, value: float, kinds: type | tuple[type, ...], least: float, most: float = math.inf
) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"Verifier: {name} must be a number, got {type(value).__name__}; leave it out for the default.")
    if not least <= value <= most:
        limits = f"at least {least}" + ("" if most == math.inf else f" and at most {most}")
        raise ValueError(f"Verifier: {name} must be {limits}, got {value}; leave it out for the default.")
