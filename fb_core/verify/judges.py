"""What counts as a right answer. A judge is a class in this file; settings, docs and workers go by its name."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal

Verdict = Literal["correct", "wrong", "unparsable", "timeout"]
Outcome = Literal["correct", "wrong", "unparsable", "timeout", "bad gold"]

LONGEST_CONTENT = 10_000  # characters in a box or a gold answer; longer is no final answer
LONGEST_POWER = 4  # digits of a power of ten
TEX_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace does not group
INTEGER = re.compile(r"-?[0-9]{1,18}")
# What math-verify may leave out: words, halves of the day, negations, and all that is meant by numbers and signs.
WORDS = re.compile(r"\\(?:text|textrm|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
BASE_TEN = re.compile(r"(?<=[\d)}\]])\s*_\s*\{\s*10\s*\}")
HALF_DAY = re.compile(r"\d[\s~,.\\]*([ap])\.?\s*m\b", re.IGNORECASE)
NEGATION = re.compile(r"\\(?:not|neg|lnot)(?![A-Za-z])|\xac")
MEANT = re.compile(
    r"\d+|[-+<>\u2260\u2264\u2265\u226e\u226f]|"
    r"\\(?:neq?|n?less|n?gtr|n?[lg]eq?|[lg]t|[lg]eqq|[lg]eqslant|ll|gg)(?![A-Za-z])"
)
MATH_MODE = re.compile(r"\A(?:(\$\$?)([^$]*)\1|\\\((.*)\\\)|\\\[(.*)\\\])\Z", re.DOTALL)

# A letter that is stated, and another in the same breath: "A or B" states none, and neither does "I don't know".
LETTER = r"([A-J])(?![A-Za-z0-9'\u2019]|(?<=I) (?!because|since|as|is|and|or)[a-z])"
ANOTHER = rf"(?:[\W_]{{0,6}}(?:\bor\b|\band\b|[,/&])[\W_]{{0,6}}(?:(?:option|choice) )?\b{LETTER})?"
ONE_LETTER = re.compile(rf"\A\W*(?i:{LETTER})\W*\Z")
STYLE = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|[,;:! ])")
IN_BOX = re.compile(rf"(?i:\W{{0,9}}{LETTER}{ANOTHER})")
CHOICES = tuple(  # by falling weight: the last match of the first that has any counts; bounded, so that time is linear
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"(?i:\b(?:answer|choice|option)\b[\W_]{0,9}?(?:(?:(?:should|must|would|will) be|is)\b|[:=-])[\W_]{0,9}"
        rf"(?:(?:the|option|choice|letter)\b[\W_]{{0,9}}){{0,2}}){LETTER}{ANOTHER}"
        rf"|\b{LETTER}[)*]{{0,3}} is (?:the )?(?:correct|right|best)\b",
        rf"\A[\W_]{{0,9}}(?i:option |choice )?{LETTER}(?:[)*]{{0,3}}\.|[^\w\n]{{0,9}}$)(?!(?s:.)*\b(?!\1)[A-J][.):])",
        rf"(?i:\b(?:answer|choice|option)\b[\W_]{{0,9}}){LETTER}{ANOTHER}",
        rf"\((?i:{LETTER})(?=\)){ANOTHER}|\*\*{LETTER}(?=\W?\*\*){ANOTHER}",
        rf"^[^\w\n]{{0,9}}{LETTER}(?:[.):]|[^\w\n]{{0,9}}$)",
    )
)

# A number without its sign: digits, perhaps in groups, and an exponent; digits behind ^ or _ are none.
NUMBER = re.compile(
    r"(?<![\d^_])(?<![\^_]\{)(\d+(?:(?:,(?:\\!)?|\{,\}|\\[,;:! ]|[~\xa0\u2009\u202f])\d+)*(?:\.\d+)?|\.\d+)"
    r"(?:[eE]([-+]?\d+)(?!\w)|(\s*(?:\\times|\\cdot|[\xd7\xb7*x])\s*10)?\s*"
    r"(?:\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))|([\u207a\u207b]?[\xb2\xb3\xb9\u2070\u2074-\u2079]+)))?"
)
RAISED = str.maketrans("\u2070\xb9\xb2\xb3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b", "0123456789+-")
GROUPED = re.compile(r"\d*(?:\.\d+)?|\d{1,3}(?: \d{3})*(?:\.(?:\d{3} )*\d+)?|\d{1,2}(?: \d\d)* \d{3}(?:\.\d+)?")
MINUS = re.compile(r"[\u2212\ufe63\uff0d]|(?<![\w)\]}])[\u2013\u2014]")  # a dash behind a digit or a word is none
MONEY = r"(?:US|\\?[$\u20ac\xa3\xa5\u20b9]|\\,)"
SIGN = re.compile(rf"(?:(?:^|[^A-Za-z0-9)\]}}])-|[=(]\s{{0,2}}-\s{{1,2}}){MONEY}{{0,2}}$")
BEFORE = re.compile(rf"(?:{MONEY}|\s){{0,3}}-?(?:{MONEY}|\s){{0,3}}")
AFTER = re.compile(r"(?:\\?%|[\s$.,~]|\\[,;:! ])*")
GAP = r"(?:\\[,;:! ]|\\q?quad(?![A-Za-z])|[~\s\xa0\u2009\u202f])"
SPACED = re.compile(rf"(?<![\d.^_])(?<!frac|inom|sqrt)(?<!frac |inom |sqrt )\d+(?:\.\d+)?(?:{GAP}+\d+(?:\.\d+)?)+")
MIXED = re.compile(  # math-verify reads "3 1/2" as (3+1)/2, and loses the 3 of 3\frac{1}{2}\%
    r"(?<![\d.^_])(?<!frac |inom )(\d{1,9})"
    r"(?:\s+(\d{1,9})/(\d{1,9})(?!\d)|\s*\\[dt]?frac\s*\{(\d{1,9})\}\s*\{(\d{1,9})\}(?=\s*\\?%))"
)
ROUNDED = Fraction(1, 2_000_000)  # between a decimal and what it is for, as math-verify rounds
ROUGH, PRECISE, TINY = Fraction(1, 10**3), Fraction(1, 10**5), Fraction(1, 10**90)  # shares: a decimal, two, none
DIGITS = 100
UNIT_POWER = re.compile(r"(\\(?:text|textrm|textbf|mathrm|mbox)\s*\{[^{}]*\})\s*\^\s*(?:\{\s*(-?\d)\s*\}|(\d))")
UNIT_WORDS = (
    "mm millimeter millimetre,cm centimeter centimetre,m meter metre,km kilometer kilometre,in inch inche,ft foot feet,"
    "mi mile,g gram,kg kilogram,lb pound,oz ounce,s sec second,min minute,h hr hour,day,week,month,year"
)
UNITS = {word: words.split()[0] for words in UNIT_WORDS.split(",") for word in words.split()}
SYMBOL = re.compile(r"\d+(?:\.\d+)?|\\?[A-Za-z]+|[^\s\w{}$~\\,.;:]")


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, stripped; None without a box that is closed within 10,000 characters.

    Takes a string of any length, in linear time; a TypeError if it is none.
    """
    check_text("boxed", "text", text)
    at = max(text.rfind("\\boxed{"), text.rfind("\\boxed {"))
    if at < 0:
        return None
    start, depth = text.index("{", at) + 1, 1
    for match in TEX_BRACE.finditer(text, start, start + LONGEST_CONTENT + 1):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()].strip()
    return None


class Judge:
    """Reads the answer out of a model's text, and compares it with the gold answer."""

    name: ClassVar[str]  # in the settings
    form: str  # what a text must have for its answer to be read, in words
    gold_form: ClassVar[str] = "an answer that the judge can read"
    statement: ClassVar[str | None] = "{}"  # a text that states an answer; None if nobody can say
    faults: ClassVar[Mapping[str, tuple[Verdict, str]]] = {}  # what a better prompt mends: its verdict, and words

    def read(self, answer: str) -> str | None:
        """The part of a text that is compared; None if the text does not have the form."""
        return answer.strip() or None

    def gold(self, text: str) -> str | None:
        """A gold answer as it is compared; None if no answer is right by it."""
        return text.strip() or None

    def state(self, gold: str) -> str | None:
        """A text that states this answer; None if that depends on the user's pattern or function."""
        return None if self.statement is None else self.statement.format(gold)

    def at_once(self, said: str, gold: str) -> Outcome | None:
        """The outcome if it needs no worker, else None."""
        return None

    def source(self) -> dict[str, str]:
        """What a run depends on besides the settings: by name, a hash."""
        return {}

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
    statement = r"\boxed{{{}}}"
    faults: ClassVar[Mapping[str, tuple[Verdict, str]]] = {
        "unboxed": ("unparsable", "without a closed box"),
        "worded": ("wrong", "with words in the box"),  # "34 cows": math-verify reads products of letters
    }

    def __init__(self, require_boxed: bool = True) -> None:
        self._require_boxed = require_boxed

    def read(self, answer: str) -> str | None:
        content = boxed(answer)
        if content is not None:
            return self.state(_tidy(content)) if content else None
        return None if self._require_boxed else answer[-LONGEST_CONTENT:].strip() or None

    def gold(self, text: str) -> str | None:
        content = boxed(text)
        content = _tidy(MATH_MODE.sub(r"\2\3\4", text.strip()) if content is None else content)
        return content if 0 < len(content) <= LONGEST_CONTENT else None

    def at_once(self, said: str, gold: str) -> Outcome | None:
        """What math-verify would say of two plain integers."""
        if INTEGER.fullmatch(gold) and INTEGER.fullmatch(content := boxed(said) or ""):
            return "correct" if int(content) == int(gold) else "wrong"
        return None

    def begin(self) -> None:
        """Imports, grammar and patterns."""
        with contextlib.suppress(ImportError, AttributeError):  # another latex2sympy: slower
            quicken()
        self.compare("\\boxed{x=\\frac{1}{2}}", "0.5")

    def compare(self, said: str, gold: str) -> Outcome:
        from math_verify import parse, verify

        _compare_exactly()
        content = boxed(said)
        if content is not None:
            a, b = number(content), number(gold)
            if a is not None and b is not None and "%" not in content + gold:  # 50% is 50 and 0.5
                return "correct" if a == b or _near(Fraction(a), Fraction(b), PRECISE) else "wrong"
            if SPACED.search(content) or SPACED.search(gold):  # what is no number is no sum either
                return "correct" if content.split() == gold.split() else "wrong"
        wanted = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)  # expressions, and the text that they were read from
        expected = [expression for expression in wanted if not isinstance(expression, str)]
        if not expected or _undefined(gold, expected):
            return "bad gold"
        parsed = parse(said, parsing_timeout=None)
        got = [expression for expression in parsed if not isinstance(expression, str)]
        if not got:
            return "unparsable"
        if not verify(wanted, parsed, timeout_seconds=None):  # gold first: it is not symmetric
            return "wrong"
        said = str(parsed[-1]) if content is None else content
        if _undefined(said, got):
            return "unparsable"
        if any(ours and theirs and ours != theirs for ours, theirs in zip(_units(said), _units(gold), strict=True)):
            return "wrong"
        if _unread(said, "=" in gold) != _unread(gold, "=" in said):
            return "wrong"
        return "correct" if "=" in gold or _holds(said, got) else "wrong"

    def fault(self, answer: str, verdict: Verdict) -> str | None:
        content = boxed(answer)
        if verdict == "unparsable" and content is None:
            return "unboxed"
        bare = re.sub(r"\\[A-Za-z]+", " ", WORDS.sub(" ", content or ""))
        return "worded" if verdict == "wrong" and re.search("[A-Za-z]{3,}", bare) else None


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
    r"""The letter of a choice, A to J: `\boxed{B}`, "the answer is B", (B), **B**, or a line "B" or "B. ...".

    What is stated counts before what is mentioned ("Answer: B. Option A is wrong."); "A or B" states none.
    """

    name = "choice"
    statement = "({})"
    form = 'a letter such as \\boxed{B}, "the answer is B" or (B)'

    def read(self, answer: str) -> str | None:
        if (content := boxed(answer)) is not None:
            found = IN_BOX.match(STYLE.sub(" ", content))
        else:
            found = next(filter(None, (_last(pattern, answer) for pattern in (ONE_LETTER, *CHOICES))), None)
        letters = {letter.upper() for letter in found.groups() if letter} if found else set()
        return letters.pop() if len(letters) == 1 else None

    def gold(self, text: str) -> str | None:
        match = ONE_LETTER.fullmatch(text if (content := boxed(text)) is None else content)
        return match[1].upper() if match else None

    def at_once(self, said: str, gold: str) -> Outcome:
        return "correct" if said == gold else "wrong"


class Number(Judge):
    r"""The last number, or the last one that `verify.pattern` finds, exactly.

    "$1,234.50", `1{,}234.5` and `1.2345 \times 10^{3}` are each one number, "3,4" is two; a dash before digits or a
    currency is a minus sign; percent signs do not count.
    """

    name = "number"
    form = "a number"
    statement = None

    def __init__(self, pattern: str | None = None) -> None:
        self._pattern = None if pattern is None else re.compile(pattern)
        if pattern is not None:
            self.form = f"a number that {pattern!r} finds"

    def read(self, answer: str) -> str | None:
        return answer[-LONGEST_CONTENT:].strip() or None

    def gold(self, text: str) -> str | None:
        return None if (value := number(text)) is None else str(value)

    def compare(self, said: str, gold: str) -> Outcome:
        if self._pattern is not None:
            found = ["", *(match[1] if match.re.groups else match[0] for match in self._pattern.finditer(said))]
            said = found[-1] or ""
        value = number(said, alone=self._pattern is not None)
        return "unparsable" if value is None else "correct" if value == Decimal(gold) else "wrong"


class Function(Judge):
    """The user's own function, by its import path.

    It takes the whole text and the gold answer, and returns True, False, or None where the text has no answer. Modules
    in the current folder are found too.
    """

    name = "module:function"
    statement = None

    def __init__(self, path: str) -> None:
        self.path = path
        self.form = f"what {path} reads"

    def read(self, answer: str) -> str:
        return answer

    def source(self) -> dict[str, str]:
        """The hash of the function's file, found without running anything."""
        folders: list[str] | None = [*sys.path, os.getcwd()]
        for name in accumulate(self.path.partition(":")[0].split("."), "{}.{}".format):
            spec = PathFinder.find_spec(name, folders)
            folders = None if spec is None else spec.submodule_search_locations
        content = Path(spec.origin).read_bytes() if spec and spec.origin and spec.has_location else b""
        return {f"source of {self.path}": hashlib.sha256(content).hexdigest()}

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


def describe_judges() -> str:
    """Every judge in a sentence."""
    kinds: list[type[Judge]] = [*NAMED.values(), Function]
    parts = " ".join(f'"{kind.name}": {inspect.getdoc(kind)}' for kind in kinds)
    return f"How an answer is judged. {' '.join(parts.split())}"


def judge_of(name: str, **options: Any) -> Judge:
    """The judge of that name or import path; a ValueError for an option, not None, that it does not take."""
    arguments = {option: value for option, value in options.items() if value is not None}
    kind: type[Judge] | None = NAMED.get(name)
    if kind is None and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        kind, arguments = Function, {"path": name, **arguments}
    if kind is None:
        raise ValueError(
            f"judge: expected {', '.join(NAMED)} or an import path module:function, got {name[:80]!r}; name one"
        )
    if surplus := arguments.keys() - inspect.signature(kind).parameters.keys():
        raise ValueError(f"{min(surplus)}: expected none with judge {name}, got one; leave it out")
    try:
        return kind(**arguments)
    except (re.error, RecursionError, OverflowError, MemoryError) as problem:
        raise ValueError(f"pattern: expected a regular expression, got one with {problem}; correct it") from None


def number(text: str, *, alone: bool = True) -> Decimal | None:
    """The number that a text is, beside currency, percent sign and spaces; with `alone` False the last one in it."""
    text = MINUS.sub("-", text[: LONGEST_CONTENT + 1].strip())
    match = NUMBER.search(text) if alone else _last(NUMBER, text)
    if match is None or len(text) > LONGEST_CONTENT:
        return None
    if alone and not (BEFORE.fullmatch(text, 0, match.start()) and AFTER.fullmatch(text, match.end())):
        return None
    before = text[: match.start()]
    minus = "-" in before if alone else SIGN.search(before[-12:]) is not None
    whole, point, part = match[1].partition(".")
    digits = " ".join(re.findall(r"\d+", whole)) + point + part
    if not GROUPED.fullmatch(digits):
        if alone or not re.fullmatch(r"[\d,]+", whole):
            return None
        minus, digits = False, digits.rpartition(" ")[2]  # "3,4" is two numbers
    power = (match[2] or match[4] or match[5] or match[6] or "0").translate(RAISED)
    if (match[4] or match[5] or match[6]) and match[3] is None:
        if digits != "10":
            return None
        digits = "1"
    if len(power.lstrip("+-0")) > LONGEST_POWER:
        return None
    return Decimal(f"{'-' * minus}{digits.replace(' ', '')}e{power}")


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), 1)), None)


def _near(a: Any, b: Any, share: Fraction) -> bool:
    """Whether a decimal is the other number rounded, as math-verify rounds, and to this share of it."""
    return bool(abs(a - b) <= min(ROUNDED, share * abs(b)))


@cache
def _compare_exactly() -> None:
    """Let math-verify tell numbers apart that differ after its 6 or 15 decimals, and equations without solutions."""
    from math_verify import grader
    from sympy import Float, Integer, solve  # type: ignore[import-untyped]

    roughly, solved = grader.sympy_numeric_eq, grader.sympy_solve_and_compare

    def equal(a: Any, b: Any, *rounding: Any) -> bool:
        if not roughly(a, b, *rounding):
            return False
        both = (a, b)
        is_number = all(getattr(own, "is_number", False) for own in both)
        if not is_number or all(grader.is_atomic_or_pct_atomic(own, Integer) for own in both):
            return True  # letters, matrices, 50% and 50
        a, b = grader.safe_sympy_doit(a), grader.safe_sympy_doit(b)
        return _near(a.evalf(DIGITS), b.evalf(DIGITS), (TINY, ROUGH, PRECISE)[a.has(Float) + b.has(Float)])

    def equal_solutions(gold: Any, said: Any, *rounding: Any) -> bool:
        return solve(gold, gold.free_symbols) != [] and solved(gold, said, *rounding)

    grader.sympy_numeric_eq, grader.sympy_solve_and_compare = equal, equal_solutions


def _undefined(text: str, expressions: Sequence[Any]) -> bool:
    """Whether a text has no value: NaN, or a division by zero anywhere in it."""
    from sympy import Pow, nan, zoo  # type: ignore[import-untyped]

    inverted = {power.base for expression in expressions for power in expression.atoms(Pow) if power.exp.is_negative}
    values = [base.evalf() for base in inverted if base.is_number]
    return (
        WORDS.sub(r"\1", text).strip().lower() == "nan"
        or any(expression.has(nan, zoo) for expression in (*expressions, *values))
        or any(abs(value) < 1e-100 for value in values)
    )


def _units(text: str) -> tuple[set[str], ...]:
    """Halves of the day, known units and powers of units in a text."""
    words = " ".join(WORDS.findall(text)).lower()
    names = (UNITS.get(word, UNITS.get(word.removesuffix("s"))) for word in re.findall("[a-z]+", words))
    powers = {braced or digit for _, braced, digit in UNIT_POWER.findall(text)}
    return {half.lower() for half in HALF_DAY.findall(WORDS.sub(r"\1", text))}, set(filter(None, names)), powers


def _unread(text: str, equation: bool) -> list[str]:
    """All that stands in a text, words and spaces aside, if some of it was not read; else its negations.

    What was read is what changes the reading when it changes. What is left of an equals sign counts if the other text
    is an `equation` too.
    """
    from math_verify import parse

    def reading(text: str) -> Any:
        return parse(f"\\boxed{{{text}}}", parsing_timeout=None)[:1]

    text = WORDS.sub(lambda words: re.sub("[-+]", " ", words[0]), BASE_TEN.sub("", text))
    start, whole = 0 if equation else text.rfind("=") + 1, reading(text)
    shown = Counter(MEANT.findall(str(whole)))
    for token in MEANT.finditer(text, start):
        shown[token[0]] -= 1
        if shown[token[0]] < 0:
            changed = f"{token[0]}7" if token[0].isdecimal() else {"-": "+", "+": "-"}.get(token[0], " ")
            if reading(text[: token.start()] + changed + text[token.end() :]) == whole:
                return SYMBOL.findall(WORDS.sub(lambda words: re.sub("[^0-9.]", " ", words[1]), text[start:]))
    return NEGATION.findall(text)


def _holds(text: str, expressions: Sequence[Any]) -> bool:
    """Whether the equations between numbers in a text are true, with decimals to within a hundredth."""
    from math_verify import verify
    from sympy import Eq, Float

    if re.search("[A-Za-z]", re.sub(r"\\(?!text|mathrm|mbox)[A-Za-z]+", "", text)):
        return True  # letters are quantities and units
    equations = {(equation.lhs, equation.rhs) for own in expressions for equation in own.atoms(Eq)}
    return all(
        verify(left, right, timeout_seconds=None)
        or ((left.has(Float) or right.has(Float)) and abs(complex(left) - complex(right)) <= 0.01 * abs(complex(right)))
        for left, right in equations
        if left.is_number and right.is_number
    )


def quicken() -> None:
    """Let latex2sympy's parser predict by SLL, several times as fast, and by LL where that finds an error."""
    from antlr4 import PredictionMode  # type: ignore[import-untyped]
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy  # type: ignore[import-untyped]

    by_ll = _Latex2Sympy.create_parser

    def create_parser(self: Any, latex: str) -> Any:
        parser = by_ll(self, latex)
        parser._interp.predictionMode = PredictionMode.SLL
        try:
            tree = parser.math()  # that of LL, or an error
        except Exception:
            return by_ll(self, latex)
        parser.math = lambda: tree
        return parser

    _Latex2Sympy.create_parser = create_parser


def _tidy(content: str) -> str:
    """A box's content in the signs, fractions and digit groups that math-verify reads, without a full stop."""

    def improper(match: re.Match[str]) -> str:
        whole, above, below = map(int, filter(None, match.groups()))
        return f"\\frac{{{whole * below + above}}}{{{below}}}"

    def join_groups(match: re.Match[str]) -> str:
        digits = re.findall(r"[\d.]+", match[0])
        return "".join(digits) if GROUPED.fullmatch(" ".join(digits)) else match[0]

    plain = MINUS.sub("-", re.sub(r"(?<!\.)\.$", "", content.strip()).strip())
    return SPACED.sub(join_groups, MIXED.sub(improper, plain))


def check_text(where: str, name: str, text: object) -> None:
    """TypeError if not a string."""
    if not isinstance(text, str):
        raise TypeError(f"{where}: {name} must be a string, got {type(text).__name__}; pass str.")
