"""Documents for the tasks in this folder, drawn from a seed: who keeps what where."""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ivy", "Jack", "Kate", "Leo", "Mary"]
COUNTS = ["two", "three", "four", "five", "six", "seven", "eight", "nine"]
COLOURS = ["red", "blue", "green", "black", "white", "brown", "yellow", "pink"]
THINGS = ["apples", "books", "cups", "hats", "keys", "lamps", "maps", "pens", "plates", "shoes", "stones", "toys"]
PLACES = ["in the kitchen", "under the bed", "on the roof", "behind the door", "near the window", "by the river"]


def belongings(draw: random.Random) -> str:
    """A random belonging and its place, such as "two red apples under the bed"."""
    return " ".join(map(draw.choice, (COUNTS, COLOURS, THINGS, PLACES)))


def document(draw: random.Random, facts: int, answer: int) -> dict[str, Any]:
    """A context of at most `facts` sentences, and four options of `answer` belongings each; option `label` is right."""
    people = [draw.choice(NAMES) for _ in range(facts - answer)]
    who, label = draw.choice(NAMES), draw.randrange(4)
    options = [", and ".join(belongings(draw) for _ in range(answer)) for _ in range(4)]
    lines = [f"{person} keeps {belongings(draw)}." for person in people if person != who]
    lines.insert(draw.randrange(len(lines) + 1), f"{who} keeps {options[label]}.")
    return {"context": " ".join(lines), "who": who, "options": options, "label": label}


def split(facts: int, answer: int, documents: int, **_: Any) -> dict[str, Dataset]:
    """The `test` documents and, from another seed, five `train` documents as few-shot examples."""
    drawn = {"test": (random.Random(0), documents), "train": (random.Random(1), 5)}
    return {
        name: Dataset.from_list([document(draw, facts, answer) for _ in range(count)])
        for name, (draw, count) in drawn.items()
    }


def letters(row: dict[str, Any]) -> str:
    """The prompt that lists the options and asks for a letter."""
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", row["options"], strict=True))
    return f"{row['context']}\nWhat does {row['who']} keep?\n{listed}\nAnswer:"
