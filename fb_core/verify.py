"""Is a final answer right? math-verify in worker processes that can be killed, since it can hang or eat memory."""

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from types import TracebackType
from typing import Literal, cast

Verdict = Literal["correct", "wrong", "unparsable", "timeout"]

log = logging.getLogger(__name__)

LONGEST_CONTENT = 10_000  # characters in a box or a gold answer; longer is no final answer
REMEMBERED = 1 << 16  # judged pairs kept
SMALLEST_MEMORY = 256 << 20  # math-verify with sympy takes some 60 MiB
LONGEST_TIMEOUT = 86_400.0  # seconds
START_LIMIT = 120.0  # seconds for a worker to import math-verify
BAD_GOLD = "bad gold"
BOX_COMMANDS = ("\\boxed{", "\\boxed {")
TEX_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace does not group
FINAL_STOP = re.compile(r"(?<!\.)\.$")  # math-verify cannot read "15."
MATH_MODE = re.compile(r"(\$\$?)([^$]*)\1|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)

# Not multiprocessing, which runs the caller's __main__ again in every worker: its imports, torch among them.
WORKER_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from fb_core.verify import _serve; _serve()"


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, in time linear in the text.

    Args:
        text: anything, of any length.

    Returns:
        What stands between the braces, stripped; None where there is no box, or the last one is not closed within
        10,000 characters.

    Raises:
        TypeError: no string.
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


class Verifier:
    """Judges answers against gold answers; nothing in an answer can hang or bring down this process.

    Workers start when first needed and are replaced after a kill. Verdicts are remembered by box content and gold, so
    repeats cost nothing. Safe to share among threads; close it, or use it as a context manager.
    """

    def __init__(
        self,
        *,
        workers: int = 1,
        timeout: float = 5.0,
        memory_bytes: int = 2 << 30,
        require_boxed: bool = True,
    ) -> None:
        r"""Starts nothing yet.

        Args:
            workers: how many processes at most.
            timeout: seconds for one answer, without the start of a worker.
            memory_bytes: address space of one worker, where the system can limit it; 256 MiB or more.
            require_boxed: an answer without `\boxed{...}` is "unparsable"; otherwise math-verify searches its last
                10,000 characters, and finds a 5 in "so=5.".

        Raises:
            TypeError: an argument is no number.
            ValueError: an argument is too small, or the timeout longer than a day.
        """
        _check_number("workers", workers, int, 1)
        _check_number("timeout", timeout, (int, float), 0.01, LONGEST_TIMEOUT)
        _check_number("memory_bytes", memory_bytes, int, SMALLEST_MEMORY)
        self._require_boxed = require_boxed
        self._workers = [_Worker(timeout, memory_bytes) for _ in range(workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # last in, first out: those already started first
        for worker in self._workers:
            self._idle.put(worker)
        self._closed = False
        self._closing = threading.Lock()
        self._judge = lru_cache(REMEMBERED)(self._ask)

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def verify(self, answer: str, gold: str) -> Verdict:
        r"""Judges one answer.

        Args:
            answer: the model's whole text; its last `\boxed{...}` counts.
            gold: the right answer, bare ("15", "\\frac{1}{2}") or inside `\boxed{}` or dollars.

        Returns:
            "correct", "wrong", "unparsable" (no closed box, or nothing mathematical in it), or "timeout" (not finished
            within the limits of time and memory).

        Raises:
            TypeError: an argument is no string.
            ValueError: the gold answer cannot be parsed, or the verifier is closed.
            RuntimeError: workers cannot start here.
        """
        return self.verify_many([answer], [gold])[0]

    def verify_many(self, answers: Sequence[str], golds: Sequence[str]) -> list[Verdict]:
        """Judges many answers, spread over the workers.

        Args:
            answers: as in `verify`.
            golds: one for each answer.

        Returns:
            The verdicts in the order of the answers.

        Raises:
            TypeError: an argument is no sequence of strings.
            ValueError: lengths differ, a gold answer cannot be parsed (the verdicts of the others are remembered), or
                the verifier is closed.
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
        asked = [(text, gold) for text, gold in zip(questions, bare_golds, strict=True) if text is not None]
        judged = self._judge_all(list(dict.fromkeys(asked)))
        for (_, gold), outcome in judged.items():
            if outcome == BAD_GOLD:
                raise _bad_gold(gold)
        return [
            "unparsable" if text is None else cast(Verdict, judged[text, gold])
            for text, gold in zip(questions, bare_golds, strict=True)
        ]

    def equivalent(self, a: str, b: str) -> bool:
        """Whether two box contents say the same, as majority voting asks; their order does not matter.

        Args:
            a: what `boxed` found in one answer.
            b: what it found in another.

        Returns:
            True where the strings are equal or math-verify accepts one for the other; False also where it cannot tell.

        Raises:
            TypeError: an argument is no string.
            ValueError: the verifier is closed.
            RuntimeError: workers cannot start here.
        """
        _check_text("equivalent", "a", a)
        _check_text("equivalent", "b", b)
        self._check_open()
        first, second = sorted((_tidy(a), _tidy(b)))
        if first == second:
            return True
        if not first or max(len(first), len(second)) > LONGEST_CONTENT:
            return False
        outcome = self._judge(_in_box(second), first)
        return outcome == "correct" or (outcome == "wrong" and self._judge(_in_box(first), second) == "correct")

    def close(self) -> None:
        """Ends the workers once they have finished what they are at; safe to call again."""
        self._closed = True
        with self._closing:
            resting = [self._idle.get() for _ in self._workers]
            for worker in resting:
                worker.stop()
                self._idle.put(worker)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("Verifier: expected an open verifier, got a closed one; make a new one.")

    def _question(self, answer: str) -> str | None:
        """What to ask a worker about an answer; None for one that is unparsable at sight."""
        _check_text("verify", "answer", answer)
        content = boxed(answer)
        if content is not None:
            question = _in_box(_tidy(content)) if content else None
        else:
            question = None if self._require_boxed else answer[-LONGEST_CONTENT:].strip() or None
        if question is None:
            log.info("unparsable: no box that is closed and filled in an answer ending in %r", answer[-80:])
        return question

    def _judge_all(self, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
        if len(pairs) < 2 or len(self._workers) == 1:
            return {pair: self._judge(*pair) for pair in pairs}
        with ThreadPoolExecutor(len(self._workers)) as threads:  # they only wait for the workers
            return dict(zip(pairs, threads.map(self._judge, *zip(*pairs, strict=True)), strict=True))

    def _ask(self, question: str, gold: str) -> str:
        worker = self._idle.get()
        try:
            self._check_open()  # it may have been closed meanwhile
            outcome = worker.ask(question, gold)
        finally:
            self._idle.put(worker)
        if outcome in ("unparsable", "timeout"):
            level = logging.WARNING if outcome == "timeout" else logging.INFO
            log.log(level, "%s: %r against %r", outcome, question[:80], gold[:80])
        return outcome


class _Worker:
    """One process at a time that judges pairs; used by one thread at a time."""

    def __init__(self, timeout: float, memory_bytes: int) -> None:
        self._timeout = timeout
        self._memory_bytes = memory_bytes
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, question: str, gold: str) -> str:
        request = json.dumps([question, gold]).encode() + b"\n"  # ASCII, whatever the texts hold
        try:
            for _ in range(2):  # a second time where the process had died between two questions
                process = self._alive()
                started, outcome = self._exchange(process, request, self._timeout, lines=2)
                if outcome:
                    return outcome
                self.stop()
                if started:
                    break
        except BaseException:
            self.stop()  # its late reply must not answer the next question
            raise
        return "timeout"

    def stop(self) -> None:
        """Kills the process, if there is one, and waits for its end."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        for pipe in filter(None, (self.process.stdin, self.process.stdout)):
            with contextlib.suppress(OSError):  # what was not sent to a dead process
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
            env={**os.environ, "PYTHONHASHSEED": "0"},  # sympy's orderings, and so verdicts, repeat
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
        """Sends a request and reads so many lines; those after the process's end, by itself or at the limit, are ''."""
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(limit, process.kill)
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(OSError):  # dead already, as reading will show
                process.stdin.write(request)
                process.stdin.flush()
            return [process.stdout.readline().decode().strip() for _ in range(lines)]
        finally:
            timer.cancel()


def _serve() -> None:
    """A worker's life: reads pairs from stdin until it closes, answers each with "started" and then the outcome."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print stays out of the replies
    timeout, memory_bytes = float(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _limit_memory(memory_bytes)
    logging.disable()
    _judge("\\boxed{x=\\frac{1}{2}}", "0.5")  # imports, grammar and patterns, before the clock runs
    replies.write(b"ready\n")
    for line in sys.stdin.buffer:
        question, gold = json.loads(line)
        replies.write(b"started\n")
        _end_alone_after(2 * timeout)
        try:
            outcome = _judge(question, gold)
        except MemoryError:
            return
        _end_alone_after(0)
        replies.write(outcome.encode() + b"\n")
        if _resident_bytes() > memory_bytes // 2:  # caches that hold a monster would spoil the next answer
            return


def _judge(question: str, gold: str) -> str:
    from math_verify import parse, verify

    wanted = parse(_in_box(gold), parsing_timeout=None)
    if all(isinstance(reading, str) for reading in wanted):
        return BAD_GOLD
    found = parse(question, parsing_timeout=None)
    if verify(wanted, found, timeout_seconds=None):  # gold first: it is not symmetric
        return "correct"
    return "unparsable" if all(isinstance(reading, str) for reading in found) else "wrong"


def _limit_memory(memory_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    for kind, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # a lower limit is set already, or the system has none
            resource.setrlimit(kind, (limit, limit))


def _end_alone_after(seconds: float) -> None:
    """A hung worker ends even if its parent was killed; 0 calls it off."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


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


def _bare_gold(gold: str) -> str:
    _check_text("verify", "gold", gold)
    content = boxed(gold)
    if content is None:
        content = gold.strip()
        if match := MATH_MODE.fullmatch(content):
            content = match[2] or match[3] or match[4] or ""
    content = _tidy(content)
    if not content or len(content) > LONGEST_CONTENT:
        raise _bad_gold(gold)
    return content


def _bad_gold(gold: str) -> ValueError:
    return ValueError(f"Verifier: gold must be an answer math-verify can parse, got {gold[:80]!r}; correct the data.")


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
