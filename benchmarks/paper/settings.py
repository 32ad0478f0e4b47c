"""The settings of a run with those of the paper's comparisons."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticKnownError

from fb_core._util import write_file
from fb_core.apps.settings.base import Section, validate
from fb_core.apps.settings.run import RunSettings

FILE = "paper.json"  # in a run's folder: the settings of its last tables
CONFIGS = Path(__file__).parent / "configs"
METHODS = [str(Path(__file__).parent / "methods")]  # folders with a file for each method
EXTERNAL = "external:"  # before the name of a checkpoint, which is not a listed method


def names() -> tuple[str, ...]:
    """All methods, by their files; none is loaded. Greedy decoding is first, ours are last."""
    first, ours = "greedy", ("deployed", "published")
    stems = {module.name.replace("_", "-") for module in iter_modules(METHODS)}
    return (first, *sorted(stems - {first, *ours, EXTERNAL.rstrip(":")}), *ours)


class SampleSettings(Section):
    """Other futures than the LLM's greedy ones, and the samples that they are made of.

    Attributes:
        future: what follows the candidates: the LLM's greedy continuation if it is right ("llm"), that continuation
            whatever its answer ("greedy"), the SLM's own correct sample from the bare state ("own"); or, on the states
            that have all of the following, the right greedy continuation ("verified"), the LLM's first sample with a
            right answer ("sampled"), its first one with any answer ("unverified"), its first wrong one ("incorrect"),
            the continuation of another problem's state ("cross-state"), the verified one's tokens in a random order
            ("shuffled").
        llm: maximum LLM samples per state, drawn until one is right and one is wrong.
        llm_temperature: temperature of the LLM's samples, over its whole distribution.
        slm: the SLM's own samples per state.
        slm_temperature: temperature of the SLM's samples.
        seed: of all samples.
    """

    future: Literal[
        "llm", "own", "greedy", "verified", "sampled", "unverified", "incorrect", "cross-state", "shuffled"
    ] = "llm"
    llm: int = Field(default=16, ge=1)
    llm_temperature: float = Field(default=1.0, gt=0)
    slm: int = Field(default=4, ge=1)
    slm_temperature: float = Field(default=0.7, gt=0)
    seed: int = Field(default=0, ge=0)


class RouterSettings(Section):
    """The network of R2R and its training; the defaults are the published ones.

    Attributes:
        problems: number of training problems whose LLM solutions are labelled token by token, a fifth of them held out.
        width: of its layers.
        blocks: number of layers.
        epochs: passes over the labelled tokens.
        batch_size: tokens per step.
        learning_rate: of AdamW.
    """

    problems: int = Field(default=1000, ge=5)
    width: int = Field(default=1024, ge=1)
    blocks: int = Field(default=6, ge=1)
    epochs: int = Field(default=50, ge=1)
    batch_size: int = Field(default=1024, ge=1)
    learning_rate: float = Field(default=5e-5, gt=0)


def _known_method(name: Any) -> Any:
    if name not in (methods := names()):
        *others, last = map(repr, methods)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})
    return name


class CompareSettings(Section):
    """The methods that are compared on the benchmarks of `evaluate`, in batches.

    Attributes:
        methods: which methods; all if left out.
        external: checkpoints that replace the SLM and decode alone, by the name of their method.
        votes: samples per problem for majority voting.
        router: the router of R2R.
        recall: share of the divergent held-out tokens that R2R routes at least; it sets the router's threshold.
        delimiter: text after which a step ends, of SpecReason and of the spans.
        judge: the prompt between such a step and its score; None for a chat turn if the tokenizer is of Qwen's kind,
            else plain words.
        timed: number of problems of each benchmark that are decoded one at a time for the table of costs, drawn by the
            seed of the problems.
    """

    methods: tuple[Annotated[str, BeforeValidator(_known_method)], ...] = Field(default_factory=names)
    external: Mapping[str, str] = Field(default_factory=dict)
    votes: int = Field(default=8, ge=1)
    router: RouterSettings = RouterSettings()
    recall: float = Field(default=0.95, gt=0, le=1)
    delimiter: str = Field(default="\n\n", min_length=1)
    judge: str | None = Field(default=None, min_length=1)
    timed: int = Field(default=50, ge=1)

    @model_validator(mode="after")
    def _each_by_its_name(self) -> CompareSettings:
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods: expected different ones, got {list(self.methods)}; name each once")
        if bad := [name for name in self.external if not re.fullmatch(r"\w[\w .-]*", name)]:
            raise ValueError(f"external: expected names of letters, digits, '.', '-' or spaces, got {bad}; rename them")
        return self


class ExperimentSettings(Section):
    """What the tables vary, one thing at a time.

    Attributes:
        alphas: shares of the future's score in the hybrid target.
        temperatures: of the soft targets.
        quantiles: of the request policy; states, futures and rerankers are made again for each.
        recalls: of R2R's router.
        target: what the variants' rerankers are trained towards: the softmax of the standardised compatibility
            ("future"), or the LLM's best candidate, with the loss of S2T-Local ("select").
        validation_states: share of the validation states, drawn by the seed of the rollouts, that is rolled out.
        benchmark_problems: number of problems of each benchmark, drawn by the seed of the problems, whose states are
            also rolled out once a reranker is chosen; 0 for none.
    """

    alphas: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.25, 0.5, 0.75)
    temperatures: tuple[Annotated[float, Field(gt=0)], ...] = (0.25, 1.0, 2.0)
    quantiles: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.98, 0.995)
    recalls: tuple[Annotated[float, Field(gt=0, le=1)], ...] = (0.2, 0.5, 0.8, 1.0)
    target: Literal["future", "select"] = "future"
    validation_states: float = Field(default=1.0, gt=0, le=1)
    benchmark_problems: int = Field(default=50, ge=0)


class PaperSettings(RunSettings):
    """A whole run and the tables made from it, as in a YAML file; what is left out has the published value."""

    samples: SampleSettings = SampleSettings()
    compare: CompareSettings = CompareSettings()
    experiment: ExperimentSettings = ExperimentSettings()

    @classmethod
    def of_config(cls, name: str, changes: Sequence[str] = ()) -> PaperSettings:
        """A YAML file, or settings by a name of `CONFIGS` or of the package's; raises as `RunSettings.load`."""
        own = CONFIGS / f"{name}.yaml"
        return cls.load(str(own) if own.is_file() else name, changes)

    @classmethod
    def of_run(cls, run: Path) -> PaperSettings:
        """The settings of a run's last tables; raises ValueError if there are none or they are damaged."""
        path = run / FILE
        try:
            values = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as problem:
            raise ValueError(f"{path}: expected a run's settings, got {problem}; make its tables first") from None
        return validate(cls, values, str(path))

    def keep(self, run: Path) -> None:
        """Write them for `of_run`."""
        write_file(run / FILE, self.model_dump_json(indent=1).encode())
