"""What counts as a right answer. A judge is a class in this file; settings, docs and workers go by its name."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

Verdict = Literal["correct", "wrong", "unparsable", "timeout"]
Outcome = Literal["correct", "wrong", "unparsable", "timeout", "bad gold"]

LONGEST_CONTENT = 10_000  # characters in a box or a gold answer; longer is no final answer
SHAPES, LONGEST_SHAPE = 4_096, 100  # shapes of answers that a worker caches, and the most tokens of one
IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
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

LETTER = r"([A-Ja-j])(?![A-Za-z0-9'])"
ONE_LETTER = re.compile(r"\W*" + LETTER + r"\W*")
IN_BOX = re.compile(r"\W{0,9}(?:\\(?:text|textbf|mathrm|mbox)\s?\{)?\W{0,9}" + LETTER)
CHOICES = (  # by falling weight: the last match of the first that has any counts; bounded, so that time is linear
    re.compile(r"\b(?:[Aa]nswer|[Cc]hoice|[Oo]ption)\b[\W_]{0,9}(?:is\b)?[\W_]{0,9}([A-J])(?![A-Za-z0-9'])"),
    re.compile(r"\(([A-Ja-j])\)|\*\*([A-J])\W?\*\*"),
    re.compile(r"^[^\w\n]{0,9}([A-J])(?:[.):]|[^\w\n]{0,9}$)", re.MULTILINE),
)
NUMBER = r"-?(?:\d[\d,]*)?\.?\d+"


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
    check_text("boxed", "text", text)
    starts = [at + len(command) for command in BOX_COMMANDS if (at := text.rfind(command)) >= 0]
    if not starts:
        return None
    start, depth = max(starts), 1
    for match in TEX_BRACE.finditer(text, start, start + LONGEST_CONTENT + 1):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()].strip()
    return None


class Judge:
    """Reads the answer out of a model's text, and compares it with the gold answer.

    Attributes:
        name: in the settings.
        form: what a text must have for its answer to be read, in words.
        gold_form: what a gold answer must be.
        faults: faults of answers that a better prompt can mend, each with the verdict that such an answer gets and what
            a count of them says.
    """

    name: ClassVar[str]
    form: str
    gold_form: ClassVar[str] = "an answer that the judge can read"
    faults: ClassVar[Mapping[str, tuple[Verdict, str]]] = {}

    def read(self, answer: str) -> str | None:
        """The part of a text that is compared; None if the text does not have the form."""
        return answer.strip() or None

    def gold(self, text: str) -> str | None:
        """A gold answer as it is compared; None if no answer is right by it."""
        return text.strip() or None

    def stating(self, gold: str) -> str | None:
        """A text that states this answer; None if that depends on what the user's function reads."""
        return gold

    def at_once(self, said: str, gold: str) -> Outcome | None:
        """The outcome if it needs no worker, else None."""
        return None

    def begin(self) -> None:
        """Do in a worker what takes time or may fail, before the clock of the first answer runs."""

    def compare(self, said: str, gold: str) -> Outcome:
        """The outcome, in a worker: it may hang, crash or use up memory."""
        raise NotImplementedError

    def fault(self, answer: str, verdict: Verdict) -> str | None:
        """Which of the faults an answer has."""
        return None


class Boxed(Judge):
    r"""The last `\boxed{...}`, compared by math-verify."""

    name = "boxed"
    form = r"a closed \boxed{...}"
    gold_form = "an answer math-verify can parse"
    faults: ClassVar[Mapping[str, tuple[Verdict, str]]] = {
        "unboxed": ("unparsable", "without a closed box"),
        "worded": ("wrong", "with words in the box"),  # "34 cows": math-verify reads products of letters
    }

    def __init__(self, require_boxed: bool = True) -> None:
        self._require_boxed = require_boxed

    def read(self, answer: str) -> str | None:
        content = boxed(answer)
        if content is not None:
            return self.stating(_tidy(content)) if content else None
        return None if self._require_boxed else answer[-LONGEST_CONTENT:].strip() or None

    def gold(self, text: str) -> str | None:
        content = boxed(text)
        if content is None:
            content = text.strip()
            if match := MATH_MODE.fullmatch(content):
                content = match[2] or match[3] or match[4] or ""
        content = _tidy(content)
        return content if 0 < len(content) <= LONGEST_CONTENT else None

    def stating(self, gold: str) -> str:
        return f"\\boxed{{{gold}}}"

    def at_once(self, said: str, gold: str) -> Outcome | None:
        """What math-verify would say of two plain integers."""
        if INTEGER.fullmatch(gold) and (box := INTEGER_BOX.fullmatch(said)):
            return "correct" if int(box[1]) == int(gold) else "wrong"
        return None

    def begin(self) -> None:
        """Imports, grammar and patterns."""
        with contextlib.suppress(ImportError, AttributeError):  # another latex2sympy: slower
            quicken()
        self.compare("\\boxed{x=\\frac{1}{2}}", "0.5")

    def compare(self, said: str, gold: str) -> Outcome:
        return by_math_verify(said, gold)

    def fault(self, answer: str, verdict: Verdict) -> str | None:
        content = boxed(answer) if verdict in ("wrong", "unparsable") else ""
        if verdict == "unparsable" and content is None:
            return "unboxed"
        return "worded" if verdict == "wrong" and BARE_WORD.search(COMMAND.sub(" ", content or "")) else None


class Exact(Judge):
    r"""The same text: the whole answer, its last line or its last `\boxed{...}`; several spaces count as one."""

    name = "exact"
    form = "a text"

    def gold(self, text: str) -> str | None:
        return " ".join(text.split()) or None

    def at_once(self, said: str, gold: str) -> Outcome:
        texts = (said, said.splitlines()[-1], boxed(said) or "")
        return "correct" if gold in (self.gold(text) for text in texts) else "wrong"


class Choice(Judge):
    r"""The letter of a choice, A to J: `\boxed{B}`, "the answer is B", (B), **B**, or a line "B" or "B. ..."."""

    name = "choice"
    form = 'a letter such as \\boxed{B}, "the answer is B" or (B)'

    def read(self, answer: str) -> str | None:
        if (content := boxed(answer)) is not None:
            match = IN_BOX.match(content)
            return match[1].upper() if match else None
        if match := ONE_LETTER.fullmatch(answer):
            return match[1].upper()
        for pattern in CHOICES:
            if letters := ["".join(match.groups("")) for match in pattern.finditer(answer)]:
                return letters[-1].upper()
        return None

    def gold(self, text: str) -> str | None:
        match = ONE_LETTER.fullmatch(text if (content := boxed(text)) is None else content)
        return match[1].upper() if match else None

    def stating(self, gold: str) -> str:
        return f"({gold})"

    def at_once(self, said: str, gold: str) -> Outcome:
        return "correct" if said == gold else "wrong"


class Number(Judge):
    """The last number, or the last one that `verify.pattern` finds; commas between digits do not count, 34.0 is 34."""

    name = "number"
    form = "a number"

    def __init__(self, pattern: str | None = None) -> None:
        self._pattern = re.compile(NUMBER if pattern is None else pattern)
        if pattern is not None:
            self.form = f"a number that {pattern!r} finds"

    def read(self, answer: str) -> str | None:
        return answer[-LONGEST_CONTENT:].strip() or None

    def gold(self, text: str) -> str | None:
        return None if (number := _number(text)) is None else str(number)

    def stating(self, gold: str) -> str | None:
        return None  # that is for the pattern to say

    def compare(self, said: str, gold: str) -> Outcome:
        found = [match[1] if match.re.groups else match[0] for match in self._pattern.finditer(said)]
        number = _number(found[-1] or "") if found else None
        if number is None:
            return "unparsable"
        return "correct" if number == Decimal(gold) else "wrong"


class Function(Judge):
    """The user's own function, by its import path.

    It takes the whole text and the gold answer, and returns True, False, or None where the text has no answer. Modules
    in the current folder are found too.
    """

    name = "module:function"

    def __init__(self, path: str) -> None:
        self.path = path
        self.form = f"what {path} reads"

    def read(self, answer: str) -> str:
        return answer

    def stating(self, gold: str) -> str | None:
        return None

    def begin(self) -> None:
        module, _, name = self.path.partition(":")
        self._function = getattr(import_module(module), name)

    def compare(self, said: str, gold: str) -> Outcome:
        right = self._function(said, gold)
        if right not in (True, False, None):
            raise TypeError(f"expected True, False or None, got {type(right).__name__}")
        return "unparsable" if right is None else "correct" if right else "wrong"


NAMED: dict[str, type[Judge]] = {kind.name: kind for kind in (Boxed, Exact, Choice, Number)}
FAULTS = {name: fault for kind in NAMED.values() for name, fault in kind.faults.items()}


def described() -> str:
    """Every judge in a sentence."""
    kinds: list[type[Judge]] = [*NAMED.values(), Function]
    parts = [f'"{kind.name}": {inspect.getdoc(kind)}' for kind in kinds]
    return " ".join(["How an answer is judged.", *(" ".join(part.split()) for part in parts)])


def judge_of(name: str, **options: Any) -> Judge:
    """The judge of that name, or of the function with that import path; options that are None are left out.

    Raises:
        ValueError: no such judge, an option that it does not take, or a pattern that is none.
    """
    arguments = {option: value for option, value in options.items() if value is not None}
    kind: type[Judge] | None = NAMED.get(name)
    if kind is None and IMPORT_PATH.fullmatch(name):
        kind, arguments = Function, {"path": name, **arguments}
    if kind is None:
        raise ValueError(
            f"judge: expected {', '.join(NAMED)} or an import path module:function, got {name[:80]!r}; name one"
        )
    if surplus := arguments.keys() - inspect.signature(kind).parameters.keys():
        raise ValueError(f"{min(surplus)}: expected none with judge {name}, got one; leave it out")
    try:
        return kind(**arguments)
    except re.error as problem:
        raise ValueError(f"pattern: expected a regular expression, got one with {problem}; correct it") from None


def by_math_verify(question: str, gold: str) -> Outcome:
    """The outcome of a text with a box against a bare gold answer, by math-verify and what it leaves out."""
    from math_verify import parse, verify

    wanted = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)  # expressions, and the text that they were read from
    expected = [expression for expression in wanted if not isinstance(expression, str)]
    if not expected or _undefined(gold, expected):
        return "bad gold"
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


def quicken() -> None:
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


def _tidy(content: str) -> str:
    return FINAL_STOP.sub("", content.strip()).strip()


def _number(text: str) -> Decimal | None:
    plain = text[: LONGEST_CONTENT + 1].strip().replace("$", "").replace(",", "")
    return Decimal(plain) if len(text) <= LONGEST_CONTENT and re.fullmatch(NUMBER, plain) else None


def check_text(where: str, name: str, text: object) -> None:
    """TypeError if not a string."""
    if not isinstance(text, str):
        raise TypeError(f"{where}: {name} must be a string, got {type(text).__name__}; pass str.")
