"""Settings of a run and its stages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, field_validator, model_validator

from fb_core._util import read_file
from fb_core.apps.settings.base import (
    LARGEST_FILE,
    Dtype,
    Flavour,
    Section,
    ServerUrl,
    parse_yaml,
    read_settings,
    validate,
)
from fb_core.verify import judges

AVERAGE = "average"  # in place of a benchmark's name: the average of a run's benchmarks, equally weighted
SETTINGS = "settings.json"  # file in a run's folder: the settings of its last finished command
NOT_IN_IDENTITY = "changes no result"  # marks a setting that is not part of a stage's identity
NOT_AT_DEFAULT = "in the identity unless it has its default"  # so runs of versions without this setting can go on
SHIPPED = dict(sorted((path.stem, path) for path in (Path(__file__).parent / "configs").glob("*.yaml")))


class ServerSettings(Section):
    """An inference server that serves a model."""

    url: ServerUrl
    """Where it listens, such as http://localhost:8000; without a secret."""
    flavour: Flavour = "vllm"
    """The kind of server."""
    model: str | None = None
    """The model's name on the server, if the server needs one."""
    in_flight: int = Field(default=64, ge=1)
    """Maximum concurrent requests."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds that one answer may take."""
    retries: int = Field(default=5, ge=0)
    """How often a failed request is sent again, with growing pauses."""
    api_key_variable: str | None = None
    """Environment variable that holds the key, if the server needs one."""


class ModelSettings(Section):
    """The pair of a run."""

    slm: str
    """Folder or hub id of the small model; "demo:plans" is the demo's own pair."""
    llm: str
    """Folder or hub id of the large model; with `llm_server`, its name in the results."""
    slm_server: ServerSettings | None = None
    """Server that writes the SLM's own trajectories; the SLM is still loaded here for teacher forcing."""
    llm_server: ServerSettings | None = None
    """Server to use instead of a large model in this process."""
    device: str = "auto"
    """cpu, cuda or cuda:1; "auto" takes a GPU if there is one."""
    dtype: Dtype = "auto"
    """Dtype of the weights; "auto" is the checkpoint's own."""
    batch_tokens: int = Field(default=65_536, ge=1)
    """Maximum tokens of a batch decoded in this process, padding and new tokens included."""


class ProblemSettings(Section):
    """Which problems the states come from, and how they are asked."""

    train: str = "math-train"
    """A known set ("math-train"), a local file, or the demo's own ("demo:plans")."""
    held_out: tuple[str, ...] = ("math-500",)
    """Sets whose problems are removed from `train`."""
    limit: int | None = Field(default=None, ge=2)
    """Use only this many problems, the first ones."""
    validation: int = Field(default=750, ge=1)
    """Number of problems set aside, drawn by the seed, for the request threshold and the choice among rerankers."""
    certification: int = Field(default=0, ge=0)
    """Number of further problems on which recipes are tested against greedy decoding and the direct LLM score before
    one is deployed; with 0 there is no test, and the published recipe is deployed."""
    seed: int = Field(default=0, ge=0)
    """Seed of the split into training, validation and certification problems."""
    prompt: str = Field(
        default="{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
        pattern=r"\{problem\}",
    )
    """The user's turn; the "{problem}" in it stands for the problem."""
    thinking: bool = False
    """Whether answers begin with thinking, where the chat template can switch it (Qwen3, DeepSeek, Granite)."""
    per_shard: int = Field(default=64, ge=1)
    """Problems per shard, the most that a killed process loses."""


class CollectSettings(Section):
    """Trajectories and states; the request threshold is fixed on validation problems."""

    max_new_tokens: int = Field(default=4096, ge=1)
    """Maximum tokens of a trajectory."""
    top_k: int = Field(default=64, ge=1)
    """Number of largest logits that the entropy is taken over."""
    quantile: float = Field(default=0.99, ge=0, le=1)
    """Quantile of the validation trajectories' entropies that becomes the request threshold."""
    max_states: int = Field(default=8, ge=1)
    """Maximum states of a trajectory."""
    slm_k: int = Field(default=8, ge=1)
    """The SLM's candidates in a pool."""
    unread: Annotated[Literal["warn", "stop"], NOT_IN_IDENTITY] = "warn"
    """What happens if no answer of the first shard has the form that the judge reads: a warning, or an error that
    stops the command."""


class FutureSettings(Section):
    """The LLM's greedy continuations, and its candidates at their first position."""

    max_new_tokens: int = Field(default=4096, ge=1)
    """Maximum tokens of a continuation."""
    llm_k: int = Field(default=8, ge=1)
    """The LLM's candidates in a pool."""


class ScoreSettings(Section):
    """For every state a matrix [candidates, horizon]: the SLM's log-probs of the future after every candidate."""

    horizon: int = Field(default=128, ge=1)
    """Number of future tokens scored; states with shorter futures are left out."""
    token_budget: Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], NOT_IN_IDENTITY] = "auto"
    """Maximum rows of a packed forward; "auto" sets it once from the free memory."""
    pool: Literal["joint", "slm", "llm", "slm-wide"] = "joint"
    """The candidates that are scored, trained on and deployed: those of both models, of one of them, or ("slm-wide") as
    many of the SLM's as both models together may propose."""


class RolloutSettings(Section):
    """Greedy rollouts of the SLM after every candidate."""

    train: float = Field(default=0.2, gt=0, le=1)
    """Share of the training states to roll out, for the value head."""
    seed: int = Field(default=0, ge=0)
    """Seed of the choice of states."""


class TrainSettings(Section):
    """The sweep of rerankers: horizons times seeds."""

    horizons: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(16, 32, 64, 128), min_length=1)
    """Future tokens that a target is made from; the sweep has one run for each horizon and seed."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0, 1, 2), min_length=1)
    """Each seeds the initialisation, dropout and the order of the data. The paper does not say how data is ordered;
    here each seed has its own random order of whole trajectories."""
    temperature: float = Field(default=0.5, gt=0)
    """Temperature of the soft targets."""
    alpha: float = Field(default=1.0, ge=0, le=1)
    """Share of the future's score in the hybrid target; 1 is the published one."""
    scope: Literal["candidate", "sequence"] = "candidate"
    """What the adapter acts on: the candidate alone, or the whole sequence."""
    rank: int = Field(default=16, ge=1)
    """Rank of the LoRA adapter."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """The adapter is scaled by this divided by the rank."""
    dropout: float = Field(default=0.05, ge=0, lt=1)
    """Dropout on the adapter's input."""
    learning_rate: float = Field(default=2e-4, ge=0)
    """Peak learning rate of AdamW."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay of AdamW."""
    warmup: float = Field(default=0.03, ge=0)
    """Share of the steps in which the learning rate rises. Then it falls linearly to zero; the paper does not say
    what it does then."""
    clip: float = Field(default=1.0, ge=0)
    """Maximum gradient norm."""
    groups_per_step: int = Field(default=32, ge=1)
    """Groups per optimiser step."""
    epochs: int = Field(default=3, ge=1)
    """Passes over the training states."""
    microbatches: int = Field(default=1, ge=1)
    """Pieces of a step; up to this many processes can share it."""
    checkpoint_steps: Annotated[int, NOT_IN_IDENTITY] = Field(default=50, ge=1)
    """Optimiser steps between two checkpoints, the most that a killed process loses."""

    @field_validator("horizons", "seeds")
    @classmethod
    def _each_once(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(values)) < len(values):
            raise ValueError("expected different numbers, got one twice; name each once")
        return values


class ChoiceSettings(Section):
    """The evidence on held-out problems that a recipe needs to be deployed."""

    delta: float = Field(default=0.02, ge=0, lt=1)
    """How far below greedy decoding and the direct LLM score a recipe may be, as a share of the problems."""
    level: float = Field(default=0.95, gt=0, lt=1)
    """Confidence of the test: with at least this probability, no recipe that is further below passes. If none passes,
    greedy decoding or the direct score is deployed without this evidence."""


class SelectionSettings(Section):
    """The choice among the rerankers of the sweep, each of which decodes validation problems after every epoch."""

    problems: int | None = Field(default=None, ge=1)
    """How many validation problems each reranker decodes, the same ones for all, drawn by the seed of the problems. If
    left out, all of them, as published."""


class EvaluateSettings(Section):
    """What the deployed and the published recipe are evaluated on."""

    benchmarks: tuple[str, ...] = ("gsm8k", "math-500", "olympiadbench", "aime-2024", "aime-2025")
    """Known sets, local files, or the demo's own, each once."""
    limit: int | None = Field(default=None, ge=1)
    """Use only this many problems of each benchmark, the first ones."""
    max_new_tokens: int = Field(default=4096, ge=1)
    """Maximum tokens of an answer."""
    max_events: int = Field(default=8, ge=0, lt=1 << 31)
    """Maximum events of an answer."""
    per_shard: int = Field(default=64, ge=1)
    """Problems per shard; up to 64 of them decode at once."""

    @field_validator("benchmarks")
    @classmethod
    def _each_once(cls, benchmarks: tuple[str, ...]) -> tuple[str, ...]:
        for pair in combinations(benchmarks, 2):
            (name, file), (other, its_file) = (source.partition("=")[::2] for source in pair)
            same_path = os.path.realpath(file or name) == os.path.realpath(its_file or other)
            if same_path or (name == other and not (file and its_file)):  # a set's fields may serve two files
                raise ValueError("expected each once, got {!r} and {!r}, the same; leave one out".format(*pair))
        return benchmarks


class VerifierSettings(Section):
    """What a right answer is, and the processes that judge."""

    judge: Annotated[str, NOT_AT_DEFAULT] = Field(default="boxed", description=judges.describe_judges())
    pattern: Annotated[str | None, NOT_AT_DEFAULT] = None
    """For the judge "number": a regular expression whose last match, or its first group, is the number."""

    workers: Annotated[int, NOT_IN_IDENTITY] = Field(default=2, ge=1)
    """Number of processes."""
    timeout: float = Field(default=5.0, gt=0)
    """Seconds of CPU time for one answer."""
    memory_bytes: int = Field(default=2 << 30, ge=256 << 20)
    """Bytes of address space of one process."""

    @model_validator(mode="after")
    def _is_a_judge(self) -> VerifierSettings:
        judges.judge_of(self.judge, pattern=self.pattern)
        return self


class RunSettings(Section):
    """A whole run, as in a YAML file; what is left out has the published value."""

    models: Annotated[ModelSettings, NOT_IN_IDENTITY]  # stages identify models by their hashes
    problems: ProblemSettings = ProblemSettings()
    collect: CollectSettings = CollectSettings()
    futures: FutureSettings = FutureSettings()
    score: ScoreSettings = ScoreSettings()
    rollouts: RolloutSettings = RolloutSettings()
    train: TrainSettings = TrainSettings()
    selection: SelectionSettings = SelectionSettings()
    choice: ChoiceSettings = ChoiceSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    verify: VerifierSettings = VerifierSettings()

    @model_validator(mode="after")
    def _horizons_are_scored(self) -> RunSettings:
        if max(self.train.horizons) > self.score.horizon:
            raise ValueError(
                f"train.horizons: expected at most score.horizon, {self.score.horizon}, got "
                f"{max(self.train.horizons)}; lower train.horizons too, or raise score.horizon"
            )
        return self

    @classmethod
    def load(cls, source: str, changes: Sequence[str] = ()) -> Self:
        """Load a YAML file, or shipped settings by name, such as tiny or qwen3-1.7b.

        A file may name another as its `base`, from which it takes what it leaves out.

        Args:
            source: the file or the name.
            changes: "key=value" each, such as "train.rank=32": a dotted key and its new value in YAML. A later change
                overrides an earlier one; a change of a section keeps the keys that it leaves out.

        Raises:
            OSError: no such file, and none shipped under that name.
            ValueError: not YAML, too large, a key given twice, or settings that do not fit.
        """
        path = _find(source)
        values = read_settings(path)
        if "base" in values:
            values = _merge(_read_base(path, values.pop("base")), values)
        return validate(cls, reduce(_merge, map(_parse_change, changes), values), source)


class Slice:
    """Some of a run's settings, by section and frozen; reading any other is an AttributeError.

    Args:
        settings: all settings, or those of a section.
        names: sections or parts of them, such as "train" and "collect.max_states".
    """

    def __init__(self, settings: BaseModel, names: Iterable[str]) -> None:
        parts: dict[str, list[str]] = {}
        for name in names:
            section, _, rest = name.partition(".")
            parts.setdefault(section, []).append(rest)
        for section, inside in parts.items():
            value = getattr(settings, section)
            vars(self)[section] = value if "" in inside else Slice(value, inside)
        vars(self)["_kind"] = type(settings)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"settings: expected to be only read, got a new {name}")


def identity_of(part: BaseModel | Slice) -> dict[str, Any]:
    """The settings that results depend on, by name."""
    fields = (vars(part)["_kind"] if isinstance(part, Slice) else type(part)).model_fields
    return {
        name: identity_of(value) if isinstance(value, BaseModel | Slice) else value
        for name, value in vars(part).items()
        if name != "_kind"
        and NOT_IN_IDENTITY not in fields[name].metadata
        and not (NOT_AT_DEFAULT in fields[name].metadata and value == fields[name].default)
    }


def as_yaml(settings: RunSettings) -> str:
    """All settings, defaults included, as a file that `RunSettings.load` takes."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def first_words(name: str) -> str:
    """The description in the first line of shipped settings."""
    text = SHIPPED[name].read_text(encoding="utf-8")
    return text.removeprefix("# ").partition("\n")[0].partition(". ")[0].rstrip(".")


def settings_of(run: Path) -> RunSettings:
    """The settings of a run's last finished command; ValueError for no run, or damaged settings."""
    path = run / SETTINGS
    try:
        values = json.loads(read_file(path, LARGEST_FILE))
    except OSError as problem:
        raise ValueError(f"{path}: expected a run's settings, got {problem.strerror}; name a run's folder") from None
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path}: expected a run's settings, got {problem}; run its last command again") from None
    return validate(RunSettings, values, str(path))


def _find(source: str, folder: Path = Path()) -> Path:
    """The settings that are shipped under a name, else a file in a folder, else in the current one."""
    if source in SHIPPED:
        return SHIPPED[source]
    for path in (folder / source, Path(source)):
        if path.is_file():
            return path
    raise OSError(f"{source}: expected a YAML file or one of {', '.join(SHIPPED)}, got neither; check the name")


def _read_base(file: Path, name: Any) -> dict[str, Any]:
    """The settings that a file names as its base: shipped ones, or a file, looked for beside it first."""
    if not isinstance(name, str):
        raise ValueError(f"{file}: base: expected a file or a shipped name, got {type(name).__name__}; name one")
    path = _find(name, file.parent)
    values = read_settings(path)
    if "base" in values:
        raise ValueError(f"{path}: expected a base of {file} without a base of its own, got one; name that one")
    return values


def _parse_change(change: str) -> dict[str, Any]:
    """The content of a YAML file that would only set this "key=value"."""
    key, equals, text = change.partition("=")
    if not equals or not all(parts := key.strip().split(".")):
        raise ValueError("--set: expected KEY=VALUE, got no '=' or no key; name key and value")
    try:
        value = parse_yaml(text)
    except ValueError:
        raise ValueError(f"--set {key}: expected a value in YAML, got none; put a text into quotes") from None
    return reduce(lambda inside, part: {part: inside}, reversed(parts), value)


def _merge(base: Any, values: Any) -> Any:
    """Values that override those of a base, key by key."""
    if not (isinstance(base, dict) and isinstance(values, dict)):
        return values
    return base | {key: _merge(base.get(key), value) for key, value in values.items()}
