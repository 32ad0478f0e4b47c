r"""The demo's synthetic arithmetic: problems, a tokenizer, and the corpora that make a small and a large model differ.

A problem is a start value v of two digits and a few operations v <- (v * a + b) mod 100; its prompt is written
``29*9+7*7+9;``. A solution writes one sentence per step, which starts with a word, and ends with ``\boxed{85}``. The
corpora of the SLM and the LLM disagree on what a word says about the way of working in its sentence; worlds differ in
how they disagree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.random import Generator, SeedSequence, default_rng
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fb_core.apps.demo import Part

Role = Literal["pair", "train", "validation", "test"]
StepRule = Callable[[int, int, int, Generator], str]

BEGIN, END, PAD = "<s>", "</s>", "<pad>"
MULTIPLIERS = range(2, 10)
_TOKEN = r"\\boxed\{|</?s>|<pad>|[a-z]+ |\. |."
_OPERATIONS = len(MULTIPLIERS) * 10
# The tenths of the problem space that belong to each role; no problem belongs to two roles.
_TENTHS: Mapping[Role, range] = {
    "pair": range(6),
    "train": range(6, 8),
    "validation": range(8, 9),
    "test": range(9, 10),
}


@dataclass(frozen=True)
class WorldProblem:
    """One problem: its prompt (the ids start with the begin token) and the two digits of its boxed answer."""

    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str

    @property
    def operations(self) -> tuple[int, list[tuple[int, int]]]:
        """The start value, and (multiplier, addend) of every step."""
        start, *rest = map(int, re.findall(r"\d+", self.prompt))
        return start, list(zip(rest[::2], rest[1::2], strict=True))


@dataclass(frozen=True)
class World:
    """A task and its two corpora; `WORLDS` holds the three worlds of the demo."""

    steps: int  # operations in a problem; all prompts have the same length
    families: tuple[tuple[str, ...], ...]  # words that start a step, by their way of working in the SLM's corpus
    marks: str  # further single-character tokens, such as the operators
    max_new_tokens: int  # of the longest correct solution, the end token included
    slm_step: StepRule  # writes one step of the SLM's corpus from (value, multiplier, addend, rng)
    llm_step: StepRule  # the same for the LLM's

    @property
    def words(self) -> tuple[str, ...]:
        """All words, family by family."""
        return tuple(word for family in self.families for word in family)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The word-level tokenizer, built in code; it encodes a prompt with the begin token in front."""
        tokens = [PAD, BEGIN, END, *"0123456789", *self.marks, ". ", "\\boxed{", "}", *(f"{w} " for w in self.words)]
        vocabulary = {token: i for i, token in enumerate(tokens)}
        # The unknown token is not in the vocabulary, so encoding text of another world is an error.
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_TOKEN), "isolated")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, vocabulary[BEGIN])]
        )
        tokenizer.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=BEGIN,
            eos_token=END,
            pad_token=PAD,
            padding_side="left",
            clean_up_tokenization_spaces=False,
        )

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Token text to id."""
        return self.tokenizer.get_vocab()

    def problems(self, n: int, seed: int, role: Role) -> list[WorldProblem]:
        """`n` different problems, drawn from the role's own part of the problem space.

        A fixed hash splits the space (640,000 problems of two steps, 51 million of three) between the roles. So no
        test problem ("test") is in a pair's corpus ("pair") or a reranker's training set ("train"), whatever the seeds.
        For one seed and role, fewer problems are a prefix of more. ValueError if `n` is negative or more than half of
        the role's part.
        """
        space = 100 * _OPERATIONS**self.steps
        # Beyond half of a role's part, drawing without repeats would become slow.
        if not 0 <= n <= (limit := space * len(_TENTHS[role]) // 20):
            raise ValueError(f"problems: n must lie in 0..{limit} for role {role!r}, got {n}; ask for fewer.")
        rng = default_rng(SeedSequence([seed, list(_TENTHS).index(role), self.steps]))
        drawn: dict[int, None] = {}
        while len(drawn) < n:
            codes = rng.integers(space, size=4096)
            drawn |= dict.fromkeys(codes[np.isin(_tenth(codes), _TENTHS[role])].tolist())
        return [self._problem(code) for code in list(drawn)[:n]]

    def example(self, problem: WorldProblem, part: Part, rng: Generator) -> list[int]:
        """Token ids of a solution as the SLM's or the LLM's corpus writes it, including the end token."""
        step = self.slm_step if part == "slm" else self.llm_step
        value, operations = problem.operations
        text = ""
        for a, b in operations:
            text += step(value, a, b, rng)
            value = (value * a + b) % 100
        return self.encode(f"{text}\\boxed{{{value:02d}}}{END}")

    def _problem(self, code: int) -> WorldProblem:
        code, value = divmod(code, 100)
        prompt = f"{value:02d}"
        for _ in range(self.steps):
            code, operation = divmod(code, _OPERATIONS)
            a, b = MULTIPLIERS[operation // 10], operation % 10
            prompt += f"*{a}+{b}"
            value = (value * a + b) % 100
        prompt += ";"
        return WorldProblem(prompt, tuple(self.encode(BEGIN + prompt)), f"{value:02d}")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in the world's tokens; KeyError for another."""
        return [self.vocabulary[token] for token in re.findall(_TOKEN, text)]


def _tenth(codes: np.ndarray) -> np.ndarray:
    """A fixed pseudo-random tenth (0..9) of each problem code, from the finaliser of splitmix64."""
    mixed = codes.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) % np.uint64(10)


def step_text(word: str, working: int | Literal["careful"] | None, value: int, a: int, b: int) -> str:
    """One step: only its result, or worked out by a plan (units first, tens first, product before sum) or carefully."""
    tens, units = divmod(value, 10)
    low = units * a + b
    high = tens * a + low // 10
    restated, result = f"{value:02d}*{a}+{b}", f"{high % 10}{low % 10}"
    body = {
        None: f"{restated}={result}",
        0: f"{restated}|{low:02d},{high:02d}>{result}",
        1: f"{restated}~{tens * a:02d},{low:02d},{low // 10}>{result}",
        2: f"{restated}&{units * a:02d},{low:02d},{high:02d}>{result}",
        "careful": f"{units}*{a}+{b}={low:02d},{tens}*{a}+{low // 10}={high:02d}>{result}",
    }[working]
    return f"{word} {body}. "


# The plans world: a worked step follows one of three plans, and every multiplier has a house plan.

_PLAN_WORDS = (("so", "thus", "then"), ("hence", "since", "note"), ("as", "because", "for"))
HOUSE_PLAN = {2: 0, 4: 0, 8: 0, 3: 1, 6: 1, 9: 1, 5: 2, 7: 2}


def _word_habits(seed: int, house_bonus: float) -> dict[int, np.ndarray]:
    """[9] word probabilities by multiplier: softmax(N(0, 1) + bonus for words of the house plan's family)."""
    rng = default_rng(seed)
    family = np.repeat(np.arange(len(_PLAN_WORDS)), [len(words) for words in _PLAN_WORDS])
    weights = {a: np.exp(rng.normal(size=family.size) + house_bonus * (family == HOUSE_PLAN[a])) for a in MULTIPLIERS}
    return {a: weight / weight.sum() for a, weight in weights.items()}


_PLANS_SLM_HABITS = _word_habits(1, house_bonus=0.2)
_PLANS_LLM_HABITS = _word_habits(2, house_bonus=1.3)


def _plans_slm_step(value: int, a: int, b: int, rng: Generator) -> str:
    family, word = divmod(int(rng.choice(9, p=_PLANS_SLM_HABITS[a])), 3)
    return step_text(_PLAN_WORDS[family][word], family if family == HOUSE_PLAN[a] else None, value, a, b)


def _plans_llm_step(value: int, a: int, b: int, rng: Generator) -> str:
    family, word = divmod(int(rng.choice(9, p=_PLANS_LLM_HABITS[a])), 3)
    draw = rng.random()
    plan = HOUSE_PLAN[a] if draw < 0.6 else family if draw < 0.8 else None
    return step_text(_PLAN_WORDS[family][word], plan, value, a, b)


# The style task: a step is terse or careful; for the SLM the word decides which.

_STYLE_WORDS = (("so", "thus", "then", "hence"), ("since", "note", "as", "because"))
_TERSE_WEIGHTS = (0.4, 0.25, 0.2, 0.15)
_HELPFUL_ODD = (0.20, 0.05, 0.15, 0.05, 0.35, 0.12, 0.04, 0.04)
_HELPFUL_LOW = (0.35, 0.10, 0.20, 0.05, 0.20, 0.05, 0.03, 0.02)
_HELPFUL_HIGH = (0.35, 0.17, 0.20, 0.13, 0.05, 0.04, 0.03, 0.03)


def _coupled_style_step(terse_share: float, value: int, a: int, b: int, rng: Generator) -> str:
    if rng.random() < terse_share:
        return step_text(str(rng.choice(_STYLE_WORDS[0], p=_TERSE_WEIGHTS)), None, value, a, b)
    return step_text(str(rng.choice(_STYLE_WORDS[1])), "careful", value, a, b)


def _style_slm_step(value: int, a: int, b: int, rng: Generator) -> str:
    return _coupled_style_step(0.75 if a <= 4 else 0.6 if a <= 6 else 0.35, value, a, b, rng)


def _helpful_llm_step(value: int, a: int, b: int, rng: Generator) -> str:
    habit = _HELPFUL_ODD if a % 2 else _HELPFUL_LOW if a <= 4 else _HELPFUL_HIGH
    word = str(rng.choice(sum(_STYLE_WORDS, ()), p=habit))
    return step_text(word, "careful" if rng.random() < 0.75 else None, value, a, b)


def _control_llm_step(value: int, a: int, b: int, rng: Generator) -> str:
    return _coupled_style_step(0.8, value, a, b, rng)


WORLDS: Mapping[str, World] = {
    # Every step has one plan that the SLM can carry out, and which words lead to it changes from state to state.
    "plans": World(2, _PLAN_WORDS, "*+=>,;|~&", 45, _plans_slm_step, _plans_llm_step),
    # The LLM works carefully whatever the word, so its futures point the SLM to the words it can follow.
    "helpful": World(3, _STYLE_WORDS, "*+=>,;", 71, _style_slm_step, _helpful_llm_step),
    # The LLM is right but terse, so its futures point the SLM to a style that it cannot carry out.
    "control": World(3, _STYLE_WORDS, "*+=>,;", 71, _style_slm_step, _control_llm_step),
}
