"""Judges final answers in worker processes that can be killed, since a judge can hang or use up memory."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Literal, cast, get_args

from fb_core.judges import FAULTS, Function, check_text, judge_of
from fb_core.judges import Verdict as Verdict

log = logging.getLogger(__name__)

REMEMBERED = 1 << 16  # judged pairs kept
LONGEST_REMEMBERED = 1_000  # characters of one
BATCH = 32  # pairs sent to a worker at once
SMALLEST_MEMORY = 256 << 20  # math-verify with sympy takes some 60 MiB
LONGEST_TIMEOUT = 86_400.0  # seconds
START_LIMIT = 600.0  # seconds for a worker to import math-verify
PATIENCE, SHORTEST_WAIT = 20.0, 60.0  # wall-clock limit of an answer: so many timeouts, but at least so many seconds
BAD_GOLD = "bad gold"
FAILED = "!"  # begins a worker's reply that the user's function failed; the reason follows
Pair = tuple[str, str]  # what the judge is to compare, and the gold answer

# Not multiprocessing, nor pebble's pool over it: every worker would run the caller's __main__ again, with its imports.
# Nor loky's, in which the death of one worker ends the work of all.
WORKER_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from fb_core.verify import _serve; _serve()"


def tally_words(counts: Mapping[str, int]) -> str:
    """The nonzero counts of `Verifier.tally` as one line; "" if there are none."""
    parts = []
    for verdict in get_args(Verdict):
        faults = [
            f" ({counts[name]} {words})" for name, (of, words) in FAULTS.items() if of == verdict and counts.get(name)
        ]
        if counts.get(verdict):
            parts.append(f"{counts[verdict]} {verdict}" + "".join(faults))
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
        judge: str = "boxed",
        pattern: str | None = None,
        require_boxed: bool | None = None,
    ) -> None:
        r"""Start no worker yet.

        Args:
            workers: maximum number of processes.
            timeout: seconds of CPU time for one answer, without the start of a worker. On a busy machine an answer may
                wait for a CPU, so the limit in wall-clock time is 20 times that, and at least a minute.
            memory_bytes: address space of one worker, if the system can limit it; 256 MiB or more.
            judge: a name in `fb_core.judges.NAMED`, or the import path "module:function" of your own: it takes the
                whole text and the gold answer, and returns True, False, or None where the text has no answer.
            pattern: for "number" a regular expression whose last match, or its first group, is the number.
            require_boxed: for "boxed", whether an answer without `\boxed{...}` is "unparsable" (as if left out);
                otherwise math-verify searches its last 10,000 characters, and finds a 5 in "so=5.".

        Raises:
            TypeError: an argument is not a number.
            ValueError: an argument is too small, the timeout is longer than a day, or there is no such judge.
        """
        _check_number("workers", workers, int, 1)
        _check_number("timeout", timeout, (int, float), 0.01, LONGEST_TIMEOUT)
        _check_number("memory_bytes", memory_bytes, int, SMALLEST_MEMORY)
        asked: dict[str, Any] = {"name": judge, "pattern": pattern, "require_boxed": require_boxed}
        self.judge = judge_of(**asked)
        self._workers = [_Worker(timeout, memory_bytes, asked) for _ in range(workers)]
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
            answer: the model's whole text; the judge reads it, "boxed" its last `\boxed{...}`.
            gold: the right answer, bare ("15", "\\frac{1}{2}") or inside `\boxed{}` or dollars.

        Returns:
            "correct", "wrong", "unparsable" (with "boxed": no closed box, or nothing mathematical in it), or "timeout"
            (not finished within the limits of time and memory). With "boxed", math-verify decides what is equal: it
            ignores \text{...} and the units that it knows ("34\text{ cows}", "34 cm"). It reads other bare words as
            products of letters, so "34 cows" is wrong against 34. What it leaves out must be the same in both: number
            bases, negations, relations without a left side ("15_8", "> 15" against 15), a.m. against p.m., and every
            number and sign ("3\text{ hours }20\text{ minutes}"); known units may be left out in one, not differ. An
            equation between numbers must hold ("16 = 15"). Numbers are compared exactly, a decimal with another number
            to its six decimals and at least three digits. NaN and divisions by zero are unparsable.

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
        for text in golds:
            check_text("verify", "gold", text)
        bare_golds = [self.judge.gold(gold) for gold in golds]
        pairs = list(zip(map(self._question, answers), bare_golds, strict=True))
        judged = self._judge([(text, gold) for text, gold in pairs if text is not None and gold is not None])
        outcomes = [
            BAD_GOLD if gold is None else "unparsable" if text is None else judged[text, gold] for text, gold in pairs
        ]
        for gold, outcome in zip(golds, outcomes, strict=True):
            if outcome == BAD_GOLD and bad_golds == "raise":
                raise ValueError(f"Verifier: gold must be {self.judge.gold_form}, got {gold[:80]!r}; correct the data.")
            if outcome == BAD_GOLD:
                log.warning("unparsable: the gold answer %r cannot be read, so no answer matches it", gold[:80])
        return ["unparsable" if outcome == BAD_GOLD else cast(Verdict, outcome) for outcome in outcomes]

    def judged_by_themselves(self, golds: Sequence[str]) -> list[Verdict]:
        """The verdicts on answers that state these gold answers; "correct" where nobody can say how to state one.

        Raises as `verify_many`.
        """
        texts = {gold: self.judge.stating(gold) for gold in golds if self.judge.gold(gold) is not None}
        stated = {gold: text for gold, text in texts.items() if text is not None}
        verdicts: dict[str, Verdict] = dict.fromkeys(texts, "correct")
        verdicts |= zip(stated, self.verify_many([*stated.values()], [*stated], bad_golds="unparsable"), strict=True)
        return [verdicts.get(gold, "unparsable") for gold in golds]

    def prepare(self) -> None:
        """Start a worker, so that the user's function is known to be there; raises ValueError if it is not."""
        if isinstance(self.judge, Function):
            worker = self._idle.get()
            try:
                worker.start()
            finally:
                self._idle.put(worker)

    def tally(self, answers: Sequence[str], verdicts: Sequence[Verdict]) -> dict[str, int]:
        """How many answers got each verdict, and how many have each of the judge's faults that a better prompt mends.

        Args:
            answers: the models' whole texts.
            verdicts: one for each.
        """
        counts = {verdict: verdicts.count(verdict) for verdict in get_args(Verdict)}
        found = [self.judge.fault(answer, verdict) for answer, verdict in zip(answers, verdicts, strict=True)]
        return counts | {fault: found.count(fault) for fault in self.judge.faults}

    def equivalent(self, a: str, b: str) -> bool:
        """Whether two box contents are equivalent, for majority voting; their order does not matter.

        True if the strings are equal or the judge accepts one for the other; False also if it cannot tell. Raises as
        `verify_many`.
        """
        check_text("equivalent", "a", a)
        check_text("equivalent", "b", b)
        self._check_open()
        first, second = sorted((a.strip(), b.strip()))
        if first == second:
            return True
        for said, gold in ((second, first), (first, second)):
            text, bare = self.judge.stating(said), self.judge.gold(gold)
            question = None if text is None else self.judge.read(text)
            if question is None or bare is None:
                return False
            if (outcome := self._judge([(question, bare)])[question, bare]) != "wrong":
                return outcome == "correct"
        return False

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
        check_text("verify", "answer", answer)
        question = self.judge.read(answer)
        if question is None:
            log.info("unparsable: expected %s, got none in an answer ending in %r", self.judge.form, answer[-80:])
        return question

    def _judge(self, pairs: list[Pair]) -> dict[Pair, str]:
        judged: dict[Pair, str] = {
            pair: outcome for pair in pairs if (outcome := self.judge.at_once(*pair)) is not None
        }
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
            if outcome.startswith(FAILED):
                raise ValueError(
                    f"verify.judge: {outcome.removeprefix(FAILED)}, for an answer ending in {question[-80:]!r}"
                )
            if outcome in ("unparsable", "timeout"):
                level = logging.WARNING if outcome == "timeout" else logging.INFO
                log.log(level, "%s: %r against %r", outcome, question[:80], gold[:80])
        with self._lock:
            judged = zip(batch, outcomes, strict=False)
            self._known.update((pair, outcome) for pair, outcome in judged if len(pair[0]) <= LONGEST_REMEMBERED)
            for pair in list(islice(self._known, max(0, len(self._known) - REMEMBERED))):
                del self._known[pair]
        return outcomes


class _Worker:
    """One process at a time that judges pairs; used by one thread at a time."""

    def __init__(self, timeout: float, memory_bytes: int, judge: Mapping[str, Any]) -> None:
        self._timeout = timeout
        self._memory_bytes = memory_bytes
        self._judge = judge  # arguments of `judge_of`
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, pairs: list[Pair]) -> list[str]:
        """The outcomes of the first pairs, at least one: up to the pair at which the process ended, or all."""
        request = json.dumps(pairs).encode() + b"\n"  # ASCII, whatever the texts hold
        try:
            for _ in range(2):  # again, if the process had died between two requests
                process = self.start()
                replies = self._exchange(process, request, _longest_wait(self._timeout), lines=2 * len(pairs))
                outcomes = replies[1::2]
                if len(outcomes) == len(pairs):
                    return outcomes
                self.stop()
                if len(replies) % 2:  # a pair was started and not finished
                    return [*outcomes, self._ended(process.returncode)]
                if outcomes:
                    return outcomes
        except BaseException:
            self.stop()  # its late reply must not answer the next question
            raise
        return ["timeout"]

    def _ended(self, code: int) -> str:
        """The outcome of a pair over which the process ended; limits end it by a signal, which is a code below 0."""
        judge = judge_of(**self._judge)
        if code < 0 or not isinstance(judge, Function):
            return "timeout"
        return f"{FAILED}expected a verdict of {judge.path}, got the end of its process with exit code {code}"

    def stop(self) -> None:
        """Kill the process, if there is one, and wait for its end."""
        if self.process is None:
            return
        _kill(self.process)
        self.process.wait()
        for pipe in filter(None, (self.process.stdin, self.process.stdout)):
            with contextlib.suppress(OSError):  # closing fails if a dead process left something unsent
                pipe.close()
        self.process = None

    def start(self) -> subprocess.Popen[bytes]:
        if self.process is not None and self.process.poll() is None:
            return self.process
        self.stop()
        own = [os.getcwd()] if isinstance(judge_of(**self._judge), Function) else []
        paths = json.dumps([*map(str, sys.path), *own])
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                WORKER_CODE,
                paths,
                str(self._timeout),
                str(self._memory_bytes),
                json.dumps(self._judge),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that what a judge starts ends with it
            env={**os.environ, "PYTHONHASHSEED": "0"},  # sympy's orderings, and so the verdicts, are reproducible
        )
        reply = "".join(self._exchange(self.process, b"", START_LIMIT, lines=1))
        if reply != "ready":
            self.stop()
            if reply.startswith(FAILED):
                raise ValueError(f"verify.judge: {reply.removeprefix(FAILED)}; see that it can be imported from here")
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
                    _kill(process)
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


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker with all that it started, also after its own end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()


def _failure(expected: str, problem: BaseException) -> bytes:
    """The reply that the user's function failed."""
    text = f"{FAILED}{expected}, got {type(problem).__name__}: {' '.join(str(problem).split())[:300]}\n"
    return text.encode(errors="backslashreplace")


def _serve() -> None:
    """A worker's main loop: reads lists of pairs from stdin; for each pair prints "started", then the outcome."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print does not mix with the replies
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor do they read the requests
    if hasattr(os, "register_at_fork"):  # a child would keep the parent waiting
        os.register_at_fork(after_in_child=requests.close)
        os.register_at_fork(after_in_child=replies.close)
    timeout, memory_bytes = float(sys.argv[2]), int(sys.argv[3])
    judge = judge_of(**json.loads(sys.argv[4]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _limit_memory(memory_bytes)
    logging.disable()
    try:
        judge.begin()
    except BaseException as problem:
        if not isinstance(judge, Function):
            raise
        replies.write(_failure(f"expected the function {judge.path}", problem))
        return
    replies.write(b"ready\n")
    for line in requests:
        for question, gold in json.loads(line):
            replies.write(b"started\n")
            _end_after(timeout, 2 * _longest_wait(timeout))
            try:
                reply = judge.compare(question, gold).encode() + b"\n"
            except MemoryError:
                os.kill(os.getpid(), signal.SIGTERM)  # a limit, as if over the time
            except BaseException as problem:
                if not isinstance(judge, Function):
                    raise
                reply = _failure(f"expected a verdict of {judge.path}", problem)
            _end_after(0, 0)
            replies.write(reply)
            if _resident_bytes() > memory_bytes // 2:  # what it cached would spoil the next answer
                return


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


def _check_number(
    name: str, value: float, kinds: type | tuple[type, ...], least: float, most: float = math.inf
) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"Verifier: {name} must be a number, got {type(value).__name__}; leave it out for the default.")
    if not least <= value <= most:
        limits = f"at least {least}" + ("" if most == math.inf else f" and at most {most}")
        raise ValueError(f"Verifier: {name} must be {limits}, got {value}; leave it out for the default.")
