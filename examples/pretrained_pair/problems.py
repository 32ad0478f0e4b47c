r"""Made-up arithmetic word problems in plain English, and their solutions in two styles.

A problem has two steps: a product with a two-digit number, and a sum or a difference with a one-digit number. A
solution has one sentence per step, which begins with one of eight opening words, and ends with the answer in
`\boxed{}`. A product is written

- tersely: `So 6*34=204 pens.`
- carefully: `Since 6*30=180, 6*4=24 and 18+2=20, 6*34=204 pens.`

The small model learns solutions in which the opening word decides the style: after So, Then, Thus, Hence a product is
terse; after Since, As, With, Because it is careful. The control's small model learns the same words, and styles drawn
at random whatever the word. The large model learns solutions in which every product is careful whatever the word. Each
model's preference among the words was drawn at random, once for every multiplier; no habit was set by hand. Sums and
differences are always terse and begin with a terse word.

A problem has one role only, which follows from a hash of its text.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np

Role = Literal["pair", "method", "test"]
Writer = Literal["slm", "control", "llm"]

PROMPT = "{problem}"
OPENINGS = ("So", "Then", "Thus", "Hence", "Since", "As", "With", "Because")
TERSE = OPENINGS[:4]
HABITS = {"slm": 11, "control": 11, "llm": 12}  # seeds of the writers' preferences among openings
SHARES: dict[Role, range] = {"test": range(2), "method": range(2, 5), "pair": range(5, 16)}  # of 16 parts of all texts

NAMES = (
    *("Mia", "Tom", "Ana", "Ben", "Eva", "Leo", "Zoe", "Max", "Ida", "Sam"),
    *("Lily", "Omar", "Nina", "Paul", "Rosa", "Jack", "Emma", "Luke", "Sara", "Noah"),
)
THINGS = (
    *("pens", "cards", "shells", "coins", "books", "stamps", "apples", "plums"),
    *("eggs", "beads", "nails", "cups", "tiles", "bricks", "seeds"),
)
GROUPS = ("boxes", "bags", "jars", "crates", "baskets", "packs", "rows", "trays", "sacks", "drawers")


TEXTS = {
    "rest": (
        "{one} has {times} {group} with {each} {thing} each and gives {few} {thing} to {other}. How many {thing} does "
        "{one} have left?",
        "There are {times} {group} of {each} {thing} in a shop. {other} buys {few} of the {thing}. How many {thing} "
        "are left?",
        "{one} packs {each} {thing} into each of {times} {group}, but {few} {thing} are broken. How many are whole?",
    ),
    "sum": (
        "{one} has {times} {group} with {each} {thing} each, and {other} has {few} {thing}. How many {thing} do they "
        "have together?",
        "{one} finds {few} {thing} and then buys {times} {group} of {each} {thing}. How many {thing} does {one} have "
        "now?",
        "A school has {few} {thing}. {one} brings {times} {group} with {each} {thing} in each. How many {thing} are "
        "there now?",
    ),
    "split": (
        "Each of {times} {group} holds {many} red and {few} blue {thing}. How many {thing} are in the {group}?",
        "{one} gets {many} {thing} in the morning and {few} {thing} at night, for {times} days. How many {thing} does "
        "{one} get?",
    ),
}


@dataclass(frozen=True)
class Step:
    """`left op right`, in units of `thing`; the sentence that states it ends with `rest`."""

    left: int
    op: Literal["+", "-", "*"]
    right: int
    thing: str
    rest: str = ""

    @property
    def value(self) -> int:
        return {"+": self.left + self.right, "-": self.left - self.right, "*": self.left * self.right}[self.op]


@dataclass(frozen=True)
class Problem:
    """A problem and the steps that solve it."""

    text: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].value


def problems(count: int, seed: int, role: Role) -> list[Problem]:
    """The first `count` different problems of a role that the seed draws."""
    rng, found = Random(seed), {}
    while len(found) < count:
        problem = _draw(rng)
        if zlib.crc32(problem.text.encode()) % 16 in SHARES[role]:
            found[problem.text] = problem
    return list(found.values())


def solution(problem: Problem, writer: Writer, rng: Random) -> str:
    """A correct solution as one of the models learns to write it; `rng` draws openings."""
    sentences = [_sentence(step, writer, rng) for step in problem.steps]
    return " ".join([*sentences, f"\\boxed{{{problem.answer}}}"])


def kind(token: str) -> str:
    """What a token of a solution is: an opening word, a digit, or another."""
    word = token.strip()
    return "opening" if word in OPENINGS else "digit" if word.isdigit() else "other"


def _habit(writer: Writer) -> list[list[float]]:
    """A writer's weights of the openings: one row per multiplier; row 0 is for sums and differences."""
    weights = np.exp(np.random.default_rng(HABITS[writer]).normal(size=(10, len(OPENINGS))))
    weights[0, len(TERSE) :] = 0
    return weights.tolist()


HABIT: dict[Writer, list[list[float]]] = {"slm": _habit("slm"), "control": _habit("control"), "llm": _habit("llm")}


def _sentence(step: Step, writer: Writer, rng: Random) -> str:
    multiplier = step.left if step.op == "*" else 0
    (opening,) = rng.choices(OPENINGS, HABIT[writer][multiplier])
    whole = f"{step.left}{step.op}{step.right}={step.value} {step.thing}{step.rest}."
    if step.op != "*":
        return f"{opening} {whole}"
    careful = writer == "llm" or (rng.random() < 0.5 if writer == "control" else opening not in TERSE)
    tens, units = step.left * (step.right // 10), step.left * (step.right % 10)
    parts = f"{step.left}*{step.right // 10}0={tens}0, {step.left}*{step.right % 10}={units} and "
    parts += f"{tens}+{units // 10}={tens + units // 10}, "
    return f"{opening} {parts if careful else ''}{whole}"


def _draw(rng: Random) -> Problem:
    one, other = rng.sample(NAMES, 2)
    thing, group = rng.choice(THINGS), rng.choice(GROUPS)
    times, each, few = rng.randint(3, 9), 10 * rng.randint(1, 9) + rng.randint(2, 8), rng.randint(2, 9)
    product = Step(times, "*", each, thing)
    steps = {
        "rest": (product, Step(product.value, "-", few, thing, " are left")),
        "sum": (product, Step(product.value, "+", few, thing, " in all")),
        "split": (Step(each - few, "+", few, thing, " each"), product),
    }
    shape = rng.choice(list(steps))
    numbers = {"times": times, "each": each, "few": few, "many": each - few}
    words = {"one": one, "other": other, "thing": thing, "group": group}
    return Problem(rng.choice(TEXTS[shape]).format(**numbers, **words), steps[shape])
