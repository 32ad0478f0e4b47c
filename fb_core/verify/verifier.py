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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Literal, cast, get_args

from fb_core.verify.judges import FAULTS, Function, Judge, check_text, judge_of
from fb_core.verify.judges import Verdict as Verdict

log = logging.getLogger(__name__)

REMEMBERED = 1 << 16  # judged pairs kept
LONGEST_REMEMBERED = 1_000  # characters of one
SMALLEST_MEMORY = 256 << 20  # math-verify with sympy takes some 60 MiB
LONGEST_TIMEOUT = 86_400.0  # seconds
START_LIMIT = 600.0  # seconds for a worker to import math-verify
PATIENCE, SHORTEST_WAIT = 20.0, 60.0  # wall-clock limit of an answer: so many timeouts, but at least so many seconds
BAD_GOLD = "bad gold"
FAILED = "!"  # begins a worker's reply that the user's function failed; the reason follows
Pair = tuple[str, str]  # what the judge is to compare, and the gold answer

# Not multiprocessing, nor pebble's pool over it: every worker would run the caller's __main__ again, with its imports.
# Nor loky's, in which the death of one worker ends the work of all.
WORKER_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from fb_core.verify.verifier import _serve; _serve()"
)


def tally_words(counts: Mapping[str, int]) -> str:
    """The nonzero counts of `Verifier.tally` as one line; "" if there are none."""
    parts = []
    for verdict in filter(counts.get, get_args(Verdict)):
        faults = [(counts.get(name), words) for name, (of, words) in FAULTS.items() if of == verdict]
        parts.append(
            f"{counts[verdict]} {verdict}" + "".join(f" ({count} {words})" for count, words in faults if count)
        )
    return ", ".join(parts)


class Verifier(contextlib.AbstractContextManager["Verifier"]):
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
        r"""Start no worker yet; TypeError or ValueError for an argument that does not fit.

        Args:
            workers: maximum number of processes.
            timeout: seconds of CPU time for one answer, a day at most, without the start of a worker. An answer may
                have to wait for a CPU, so the limit in wall-clock time is 20 times that, and at least a minute.
            memory_bytes: address space of one worker, if the system can limit it; 256 MiB or more.
            judge: a name in `fb_core.verify.judges.NAMED`, or the import path "module:function" of your own: it takes
                the whole text and the gold answer, and returns True, False, or None where the text has no answer.
            pattern: for "number" a regular expression whose last match, or its first group, is the number.
            require_boxed: for "boxed", whether an answer without `\boxed{...}` is "unparsable" (as if left out);
                otherwise math-verify searches its last 10,000 characters, and finds a 5 in "so=5.".
        """
        _check_number("workers", workers, int, 1)
        _check_number("timeout", timeout, (int, float), 0.01, LONGEST_TIMEOUT)
        _check_number("memory_bytes", memory_bytes, int, SMALLEST_MEMORY)
        options: dict[str, Any] = {"name": judge, "pattern": pattern, "require_boxed": require_boxed}
        self.judge = judge_of(**options)
        self._workers = [_Worker(self.judge, timeout, memory_bytes, options) for _ in range(workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # last in, first out: those already started first
        for worker in self._workers:
            self._idle.put(worker)
        self._owner, self._closed = os.getpid(), False
        self._closing = threading.Lock()  # a second close waits for the first
        self._lock = threading.Lock()  # guards the cache
        self._known: dict[Pair, str] = {}  # the cache

    def __exit__(self, *_: object) -> None:
        self.close()

    def verify(self, answer: str, gold: str) -> Verdict:
        r"""Judge one answer, a model's whole text, against the right one, bare or inside `\boxed{}` or dollars.

        Returns "correct", "wrong", "unparsable" (with "boxed": no closed box, or nothing mathematical in it), or
        "timeout" (not finished within the limits of time and memory). With "boxed", math-verify decides what is equal:
        it ignores \text{...} and the units that it knows ("34\text{ cows}", "34 cm"). It reads other bare words as
        products of letters, so "34 cows" is wrong against 34. What it leaves out must be the same in both: number
        bases, negations, relations without a left side ("15_8", "> 15" against 15), a.m. against p.m., and every number
        and sign ("3\text{ hours }20\text{ minutes}"); known units may be left out in one, not differ. An equation
        between numbers must hold ("16 = 15"). Numbers are compared exactly, a decimal with another number to its six
        decimals and at least three digits. NaN and divisions by zero are unparsable.
        """
        return self.verify_many([answer], [gold])[0]

    def verify_many(
        self, answers: Sequence[str], golds: Sequence[str], *, bad_golds: Literal["raise", "unparsable"] = "raise"
    ) -> list[Verdict]:
        """Judge many answers, each against its gold answer, spread over the workers; verdicts come in their order.

        A gold answer that cannot be parsed raises, or gives the verdict "unparsable", as `bad_golds` says.

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
            got = f"{len(answers)} answers and {len(golds)} golds"
            remedy = "repeat the gold of a problem with several answers."
            raise ValueError(f"verify_many: expected one gold for each answer, got {got}; {remedy}")
        outcomes = self._outcomes(answers, golds)
        for gold, outcome in zip(golds, outcomes, strict=True):
            if outcome == BAD_GOLD and bad_golds == "raise":
                raise ValueError(f"Verifier: gold must be {self.judge.gold_form}, got {gold[:80]!r}; correct the data.")
            if outcome == BAD_GOLD:
                log.warning("unparsable: the gold answer %r cannot be read, so no answer matches it", gold[:80])
        return ["unparsable" if outcome == BAD_GOLD else cast(Verdict, outcome) for outcome in outcomes]

    def judge_golds(self, golds: Sequence[str]) -> list[Verdict]:
        """The verdicts on answers that state these gold answers; "correct" if the judge cannot state one."""
        stated = {gold: text for gold in golds if (text := self.judge.state(gold)) is not None}
        verdicts = self.verify_many([*stated.values()], [*stated], bad_golds="unparsable")
        by_gold = dict(zip(stated, verdicts, strict=True))
        return [by_gold.get(gold, "unparsable" if self.judge.gold(gold) is None else "correct") for gold in golds]

    def prepare(self) -> None:
        """Start a worker, so that the user's function is known to be there; raises ValueError if it is not."""
        if isinstance(self.judge, Function):
            worker = self._idle.get()
            try:
                worker.start()
            finally:
                self._idle.put(worker)

    def tally(self, answers: Sequence[str], verdicts: Sequence[Verdict]) -> dict[str, int]:
        """How many answers, whole texts, got each verdict, and how many have each fault that a better prompt mends."""
        counts = {verdict: verdicts.count(verdict) for verdict in get_args(Verdict)}
        found = [self.judge.fault(answer, verdict) for answer, verdict in zip(answers, verdicts, strict=True)]
        return counts | {fault: found.count(fault) for fault in self.judge.faults}

    def equivalent(self, a: str, b: str) -> bool:
        """Whether two box contents are the same text, or the judge accepts one for the other; for majority voting."""
        check_text("equivalent", "a", a)
        check_text("equivalent", "b", b)
        self._check_open()
        first, second = sorted((a.strip(), b.strip()))
        if first == second:
            return True
        for said, gold in ((second, first), (first, second)):
            text = self.judge.state(said)
            outcome = "unparsable" if text is None else self._outcomes([text], [gold])[0]
            if outcome != "wrong":
                return outcome == "correct"
        return False

    def close(self) -> None:
        """End the workers once they have finished their current work; safe to call again."""
        self._closed = True
        with self._closing:
            for worker in [self._idle.get() for _ in self._workers]:
                worker.stop()
                self._idle.put(worker)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("Verifier: expected an open verifier, got a closed one; make a new one.")
        if self._owner != os.getpid():  # two processes would read each other's verdicts
            raise ValueError("Verifier: expected the process that made it, got a fork of it; make one in each process.")

    def _outcomes(self, answers: Sequence[str], golds: Sequence[str]) -> list[str]:
        """For each answer its verdict, or `BAD_GOLD`."""
        self._check_open()
        for text in golds:
            check_text("verify", "gold", text)
        bare_golds = {gold: self.judge.gold(gold) for gold in golds}
        pairs = [(self._read(answer), bare_golds[gold]) for answer, gold in zip(answers, golds, strict=True)]
        outcomes = {pair: self._judge_at_once(*pair) for pair in pairs}
        todo = [cast(Pair, pair) for pair, outcome in outcomes.items() if outcome is None]
        if min(len(todo), len(self._workers)) < 2:  # without a thread, so that Ctrl-C ends it at once
            outcomes |= {pair: self._ask(pair) for pair in todo}
        else:
            with ThreadPoolExecutor(len(self._workers)) as threads:  # they only wait for the workers
                outcomes |= zip(todo, threads.map(self._ask, todo), strict=True)
        return [cast(str, outcomes[pair]) for pair in pairs]

    def _read(self, answer: str) -> str | None:
        check_text("verify", "answer", answer)
        said = self.judge.read(answer)
        if said is None:
            log.info("unparsable: expected %s, got none in an answer ending in %r", self.judge.form, answer[-80:])
        return said

    def _judge_at_once(self, said: str | None, gold: str | None) -> str | None:
        """The outcome, if it needs no worker or is cached."""
        if gold is None:
            return BAD_GOLD
        return "unparsable" if said is None else self.judge.at_once(said, gold) or self._known.get((said, gold))

    def _ask(self, pair: Pair) -> str:
        worker = self._idle.get()
        try:
            self._check_open()  # it may have been closed meanwhile
            outcome = worker.ask(pair)
        finally:
            self._idle.put(worker)
        said, gold = pair
        if outcome.startswith(FAILED):
            raise ValueError(f"verify.judge: {outcome.removeprefix(FAILED)}, for an answer ending in {said[-80:]!r}")
        if outcome in ("unparsable", "timeout"):
            level = logging.WARNING if outcome == "timeout" else logging.INFO
            log.log(level, "%s: %r against %r", outcome, said[:80], gold[:80])
        with self._lock:
            if len(said) <= LONGEST_REMEMBERED:
                self._known[pair] = outcome
            if len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]
        return outcome


class _Worker:
    """One process at a time that judges; used by one thread at a time."""

    def __init__(self, judge: Judge, timeout: float, memory_bytes: int, options: Mapping[str, Any]) -> None:
        self._judge, self._memory_bytes = judge, memory_bytes
        self._wait = _longest_wait(timeout)
        self._arguments = json.dumps([timeout, memory_bytes, options])
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, pair: Pair) -> str:
        """The outcome of a pair; "timeout" if limits end the process."""
        request = json.dumps(pair).encode() + b"\n"  # ASCII, whatever the texts hold
        for _ in range(2):  # again, if the process had died between two requests
            process = self.start()
            replies = self._exchange(process, request, self._wait, lines=2)
            if len(replies) == 2:
                return replies[1]
            self.stop()
            if replies:  # it died over this pair
                break
        if process.returncode < 0 or not isinstance(self._judge, Function):  # limits end it by a signal
            return "timeout"
        code = process.returncode
        return f"{FAILED}expected a verdict of {self._judge.path}, got the end of its process with exit code {code}"

    def start(self) -> subprocess.Popen[bytes]:
        """The process, ready for a request."""
        if self.process is not None and self.process.poll() is None:
            return self.process
        self.stop()
        paths = [*map(str, sys.path), *([os.getcwd()] if isinstance(self._judge, Function) else [])]
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER_CODE, json.dumps(paths), self._arguments],
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

    def stop(self) -> None:
        """Kill the process, if there is one, and wait for its end."""
        if self.process is not None:
            _kill(self.process)
            with contextlib.suppress(OSError), self.process:  # closing fails if a dead process left something unsent
                self.process = None

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes, limit: float, *, lines: int) -> list[str]:
        """Send a request and read `lines` lines; fewer if the process ends, or is killed at the limit of seconds."""
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(limit, _kill, [process])
        watch.daemon = True
        watch.start()
        try:
            with contextlib.suppress(OSError):  # the process is dead, as reading will show
                process.stdin.write(request)
                process.stdin.flush()
            return [line.decode().strip() for line in islice(process.stdout, lines)]
        except BaseException:
            self.stop()  # its late reply must not answer the next question
            raise
        finally:
            watch.cancel()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker with all that it started, also after its own end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()


def _failure(judge: Judge, what: str, problem: BaseException) -> bytes:
    """The reply that the user's function failed; any other judge's failure ends the process."""
    if not isinstance(judge, Function):
        raise problem
    got = f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
    return f"{FAILED}expected {what} {judge.path}, got {got}\n".encode(errors="backslashreplace")


def _serve() -> None:
    """A worker's main loop: reads a pair a line from stdin, prints "started" and then the outcome."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print does not mix with the replies
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor do they read the requests
    if hasattr(os, "register_at_fork"):  # a child would keep the parent waiting
        os.register_at_fork(after_in_child=requests.close)
        os.register_at_fork(after_in_child=replies.close)
    timeout, memory_bytes, options = json.loads(sys.argv[2])
    judge = judge_of(**options)
    with contextlib.suppress(ImportError, ValueError, OSError):  # on Windows, or a lower limit is already set
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        judge.begin()
    except BaseException as problem:
        replies.write(_failure(judge, "the function", problem))
        return
    replies.write(b"ready\n")
    for line in requests:
        replies.write(b"started\n")
        _end_after(timeout, 2 * _longest_wait(timeout))
        try:
            reply = judge.compare(*json.loads(line)).encode() + b"\n"
        except MemoryError:
            os.kill(os.getpid(), signal.SIGTERM)  # a limit, as if over the time
        except BaseException as problem:
            reply = _failure(judge, "a verdict of", problem)
        _end_after(0, 0)
        replies.write(reply)
        if _resident_bytes() > memory_bytes // 2:  # what it cached would spoil the next answer
            return


def _longest_wait(timeout: float) -> float:
    """Wall-clock seconds for an answer that may take `timeout` seconds of CPU time."""
    return max(PATIENCE * timeout, SHORTEST_WAIT)


def _end_after(cpu: float, clock: float) -> None:
    """End this process after `cpu` s of CPU time or `clock` s of wall time (its parent may be gone); 0 cancels."""
    if hasattr(signal, "setitimer"):  # not on Windows: there the clock of the parent decides
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu)
        signal.setitimer(signal.ITIMER_REAL, clock)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # Linux only
        return 0


def _check_number(name: str, value: float, kinds: Any, least: float, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"Verifier: {name} must be a number, got {type(value).__name__}; leave it out for the default.")
    if not least <= value <= most:
        limits = f"at least {least}" + ("" if most == math.inf else f" and at most {most}")
        raise ValueError(f"Verifier: {name} must be {limits}, got {value}; leave it out for the default.")
