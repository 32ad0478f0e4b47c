"""Problems decoded by a method, a row each; selection, choice, evaluation and comparison build on this stage."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from fb_core._util import escaped
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.models import Context, Generate, together_of, verifier_of
from fb_core.apps.pipeline.problems import Problem
from fb_core.apps.pipeline.run import Output, Stage
from fb_core.apps.settings.base import describe
from fb_core.apps.settings.run import ProblemSettings
from fb_core.decode.decoder import Generation
from fb_core.events import Event

ASKED = (  # settings that decide what a benchmark asks
    *("evaluate.benchmarks", "evaluate.limit", "evaluate.max_new_tokens"),
    *("problems.prompt", "problems.thinking", "problems.seed", "verify"),
)
LARGEST = 1 << 31

Loop = Literal["fast", "plain", "batch"]  # "fast" and "plain": one prompt at a time; "batch": many in the fast loop
Decoded = tuple[Generation, float | None, int | None]  # with seconds and peak bytes of device memory, if measured
Id = Annotated[int, Field(ge=0, lt=LARGEST)]


class Row(BaseModel):
    """A method's result on one problem."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    benchmark: str
    method: str
    seed: int | None  # None for a method that runs once
    loop: Loop
    problem: str  # its id
    prompt_sha256: str  # of the prompt's ids
    question: str = ""  # empty in rows of earlier versions
    tokens: list[Id]  # new ones, end-of-sequence included; empty for a method that keeps only a text
    events: list[Event]
    text: str  # the answer
    gold: str
    verdict: str
    calls: int  # of the LLM; the next three are those of `fb_core.decode.decoder.Usage`
    pool: float | None
    appended: int
    suffix: int
    read: int  # positions that the LLM computes if it keeps its cache, the prompt's included; 0 if not asked
    seconds: float | None  # wall time; None in a batch, where a problem has no time of its own
    peak_bytes: int | None  # of device memory; None in a batch and on a CPU

    @property
    def correct(self) -> bool:
        """Whether the verdict is "correct"."""
        return self.verdict == "correct"

    @property
    def llm_tokens(self) -> int:
        """The number of the answer's tokens that the LLM wrote or that were chosen at events where it was asked."""
        return min(self.calls, self.appended) + self.suffix

    @model_validator(mode="after")
    def _agrees(self) -> Row:
        for number, event in enumerate(self.events, 1):
            columns: list[Sequence[float]] = [event.sources, event.slm_logprob, event.llm_logprob]
            columns += [] if event.scores is None else [event.scores]
            if any(len(column) != len(event.pool) for column in columns):
                raise ValueError(f"event {number} with columns of several lengths")
            if not all(0 <= token < LARGEST for token in event.pool) or not set(event.sources) <= {1, 2, 3}:
                raise ValueError(f"event {number} with an id or a source that there is not")
            chosen = event.pool[event.choice : event.choice + 1] if event.choice >= 0 <= event.step else []
            if not chosen or chosen != self.tokens[event.step : event.step + 1]:
                raise ValueError(f"event {number} whose choice is not the token of its step")
        if any(later.step <= event.step for event, later in pairwise(self.events)):
            raise ValueError("events out of order")
        return self


class Trial(NamedTuple):
    """A method on some problems of a set."""

    benchmark: str
    method: str
    seed: int | None
    loop: Loop
    problems: Sequence[Problem]


class DecodeStage(Stage):
    """Decodes trials: one JSONL file per trial, one `Row` per problem."""

    uses = ("slm", "llm", "tokenizer")
    loads = ("slm", "llm")

    @cached_property
    @abstractmethod
    def trials(self) -> dict[str, Trial]:
        """The trials by shard."""

    def shards(self) -> dict[str, int]:
        return {shard: len(trial.problems) for shard, trial in self.trials.items()}

    @property
    def prompt_settings(self) -> ProblemSettings:
        """The settings with the prompt."""
        return self.settings.problems

    @property
    def max_new_tokens(self) -> int:
        """The longest answer, in tokens."""
        return self.settings.evaluate.max_new_tokens

    def generate(self, trial: Trial, max_length: int | None, max_batch: int) -> Generate:
        """The function that decodes a trial's prompts."""
        return (
            Context(self.settings, self.run, max_length, max_batch)
            .decoder_named(trial.method, trial.seed)
            .generate_many
        )

    def most_tokens(self) -> int:
        return max(self._longest.values(), default=0)

    @cached_property
    def _longest(self) -> dict[str, int]:
        """Most tokens of a prompt with its answer, by set; the size of the buffers that all trials of a set share."""
        sets: dict[str, dict[str, Problem]] = {}
        for trial in self.trials.values():
            sets.setdefault(trial.benchmark, {}).update({problem.id: problem for problem in trial.problems})
        longest = {
            name: self.models.longest_prompt([*members.values()], self.prompt_settings)
            for name, members in sets.items()
        }
        return {name: prompt + self.max_new_tokens for name, prompt in longest.items()}

    def work(self, shard: str) -> Output:
        trial, tokenizer = self.trials[shard], self.models.tokenizer
        prompts = self.models.prompts(trial.problems, self.prompt_settings)
        decoded = self.decode(trial, prompts)
        texts = [
            tokenizer.decode(own.token_ids.tolist(), skip_special_tokens=True) if own.text is None else own.text
            for own, _, _ in decoded
        ]
        verifier = verifier_of(self.settings.verify)
        verdicts = verifier.verify_many(texts, [problem.answer for problem in trial.problems], bad_golds="unparsable")
        parts = zip(trial.problems, prompts, decoded, texts, verdicts, strict=True)
        rows = [
            Row(
                **{name: getattr(trial, name) for name in ("benchmark", "method", "seed", "loop")},
                problem=problem.id,
                prompt_sha256=hashlib.sha256(str(prompt.tolist()).encode()).hexdigest(),
                question=problem.text,
                tokens=generation.token_ids.tolist(),
                events=generation.events,
                text=text,
                gold=problem.answer,
                verdict=verdict,
                **_usage_fields(generation, len(prompt)),
                seconds=seconds,
                peak_bytes=peak,
            )
            for problem, prompt, (generation, seconds, peak), text, verdict in parts
        ]
        counts = {"decoded": len(rows), "tokens": sum(len(row.tokens) for row in rows)}
        lines = "".join(row.model_dump_json() + "\n" for row in rows)
        return Output({f"{shard}.jsonl": lines.encode()}, counts | verifier.tally(texts, verdicts))

    def decode(self, trial: Trial, prompts: Sequence[Tensor]) -> list[Decoded]:
        """A trial's prompts decoded in batches, without times of their own."""
        return [(generation, None, None) for generation in self.generator(trial)(prompts, self.max_new_tokens)]

    def generator(self, trial: Trial) -> Generate:
        """The function that decodes a trial, cached until another one is needed."""
        key = trial._replace(problems=())
        if self._cached is None or self._cached[0] != key:
            self._cached = None  # frees its memory before the next one is made
            longest = self._longest[trial.benchmark]
            self._cached = key, self.generate(trial, longest, together_of(self.settings, longest))
        return self._cached[1]

    _cached: tuple[Trial, Generate] | None = None

    def rows(self) -> Iterator[Row]:
        """The rows of all shards, in order; raises as `read_rows`."""
        for shard in self.trials:
            yield from read_rows(self.folder, shard)


def _usage_fields(generation: Generation, prompt: int) -> dict[str, Any]:
    """What a generation after a prompt of so many tokens asked of the LLM, as a row's fields."""
    usage = generation.usage
    return usage._replace(read=prompt + usage.read if usage.calls else 0)._asdict()


def read_rows(folder: Artefact, shard: str) -> Iterator[Row]:
    """The rows of a finished shard; ValueError for a damaged file, or with the line and what is wrong with it."""
    for number, line in enumerate(folder.read(shard, "jsonl").splitlines(), 1):
        try:
            yield Row.model_validate_json(line, strict=True)
        except ValidationError as problem:
            where, got = f"{folder.path / shard}.jsonl, line {number}", escaped(describe(problem.errors()[0]))
            raise ValueError(f"{where}: expected a row of decoded problems, got {got}; make the shard anew") from None
