"""What runs of every causal LM family of transformers, made tiny, against its own full forwards in float64.

`python tests/core/support.py` writes docs/support.md.
"""

from __future__ import annotations

import copy
import logging
import math
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import zoo
from torch import Tensor
from transformers import PreTrainedModel

from fb_core import (
    CollaborativeDecoder,
    CompatibilityScorer,
    Engine,
    FutureBridgeSelector,
    LocalLLM,
    Pair,
    RequestPolicy,
    TokenReranker,
    shared_prefix_logprobs,
)
from fb_core.models.native import NativeDecoder

PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"
PREFIX, CANDIDATES, FUTURE, NEW, EVENTS = 23, 3, 6, 6, 2
RELATIVE = {"scores": 1e-4, "gradients": 1e-3, "reranker": 1e-3}  # of the largest value, in float32


def ids(count: int, seed: int) -> Tensor:
    return torch.randint(3, zoo.V, (count,), generator=torch.Generator().manual_seed(seed))


PROMPTS = [ids(11, 3), ids(5, 4)]


def wide(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64, with plain attention and experts one by one."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    getattr(model, "set_experts_implementation", lambda _: None)("eager")
    return model


def full_forwards(model: PreTrainedModel, prefix: Tensor, candidates: Tensor, future: Tensor) -> Tensor:
    """Of the future behind every candidate, [K, H], by full forwards without a cache."""
    rows = [torch.cat([prefix, candidate[None], future]) for candidate in candidates]
    logits = torch.stack([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])
    behind = logits[:, len(prefix) : -1].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return behind.gather(2, future.expand(len(rows), -1)[..., None])[..., 0]


def close(ours: Tensor, wanted: Tensor, name: str) -> str:
    error = float((ours.double() - wanted.double()).abs().max() / wanted.double().abs().max())
    return "equal" if error <= RELATIVE[name] else f"wrong: {error:.1e}"


def on_the_last_token(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """A LoRA layer acts on the candidate alone, the last token."""
    return torch.cat([layer.base_layer(inputs[0])[..., :-1, :], output[..., -1:, :]], -2)


def gradient(value: Tensor, model: PreTrainedModel) -> Tensor:
    """Of the sum, to all parameters, as one vector."""
    parameters = [x for x in model.parameters() if x.requires_grad]
    found = torch.autograd.grad(value.sum(), parameters, materialize_grads=True)
    return torch.cat([x.double().flatten() for x in found])


class Tiny:
    """A tiny model of a family, its float64 definition, and one question for each column."""

    definition = staticmethod(wide)

    def __init__(self, kind: str) -> None:
        self.model = self.build(kind)
        self.truth = self.definition(self.model)
        self.group = ids(PREFIX, 1), torch.tensor([5, 9, 17][:CANDIDATES]), ids(FUTURE, 2)
        with torch.no_grad():
            self.wanted = full_forwards(self.truth, *self.group)

    def build(self, kind: str) -> PreTrainedModel:
        return zoo.build(kind)

    def scores(self) -> str:
        return close(CompatibilityScorer(self.model).score(*self.group), self.wanted, "scores")

    def gradients(self) -> str:
        prefix, candidates, future = self.group
        rows = [torch.cat([candidate[None], future]) for candidate in candidates]
        found = [each[1:] for each in shared_prefix_logprobs(self.model, prefix, rows)]
        mine = gradient(torch.cat(found), self.model)
        theirs = gradient(full_forwards(self.truth, *self.group), self.truth)
        error = float((mine - theirs).norm() / theirs.norm())
        return "equal" if error <= RELATIVE["gradients"] else f"wrong: {error:.1e}"

    @torch.no_grad()
    def greedy(self, prompt: Tensor) -> list[int]:
        whole = prompt
        for _ in range(NEW):
            whole = torch.cat([whole, self.truth(input_ids=whole[None], use_cache=False).logits[0, -1:].argmax(-1)])
        return whole[len(prompt) :].tolist()

    def plain(self) -> str:
        """A batch, an LLM's completions, and its candidates one after another."""
        decoder = CollaborativeDecoder(self.model, None, None, RequestPolicy(math.inf), max_events=0)
        decoded = [one.token_ids.tolist() for one in decoder.generate_many(PROMPTS, NEW)]
        llm = LocalLLM(self.model)
        completed = [new.tolist() for new in llm.complete_many(PROMPTS, NEW)]
        asked = PROMPTS[0].tolist()
        for _ in range(NEW):
            asked += llm.candidates(asked, 1).ids.tolist()
        wanted = [self.greedy(prompt) for prompt in PROMPTS]
        equal = decoded == completed == wanted and asked[len(PROMPTS[0]) :] == wanted[0]
        return "equal" if equal else "wrong: other tokens"

    def engine(self) -> str:
        with Engine(Pair(self.model, None), None, RequestPolicy(math.inf), max_length=64, max_events=0) as engine:
            handles = [engine.submit(prompt, NEW) for prompt in PROMPTS]
            found = [handle.result().token_ids.tolist() for handle in handles]
        return "equal" if found == [self.greedy(prompt) for prompt in PROMPTS] else "wrong: other tokens"

    def reranker(self) -> str:
        """Events of a decode: their scores are those of the adapted model over the frozen one's cache."""
        reranker = TokenReranker.from_base(self.model, rank=4)
        with torch.no_grad():
            for parameter in [x for x in reranker.parameters() if x.requires_grad]:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(7))
        options: dict[str, Any] = {"pool": "slm", "slm_k": 4, "max_events": EVENTS}
        selector = FutureBridgeSelector(reranker)
        decoder = CollaborativeDecoder(self.model, None, selector, RequestPolicy(-math.inf), **options)
        prompt, one = PROMPTS[0], decoder.generate(PROMPTS[0], NEW)
        adapted, head = self.definition(reranker.adapted.base_model.model), reranker.head.detach().double()
        for layer in adapted.modules():
            if hasattr(layer, "lora_A"):
                layer.register_forward_hook(on_the_last_token)
        for event in one.events:
            prefix = torch.cat([prompt, one.token_ids[: event.step]])
            rows = torch.stack([torch.cat([prefix, torch.tensor([candidate])]) for candidate in event.pool])
            with torch.no_grad():
                states = adapted.base_model(input_ids=rows, use_cache=False).last_hidden_state[:, -1].double()
            wanted = states @ head
            error = float((wanted - torch.tensor(event.scores)).abs().max() / (states.norm(dim=-1) * head.norm()).max())
            if error > RELATIVE["reranker"]:
                return f"wrong: {error:.1e}"
        return "equal" if len(one.events) == EVENTS else "wrong: no events"

    def bfloat16(self) -> str:
        """No further from float64 than twice what the model's own plain forward is, in the median."""
        narrow = copy.deepcopy(self.model).bfloat16()
        truth = wide(narrow)
        try:
            with torch.no_grad():
                wanted, plain = full_forwards(truth, *self.group), full_forwards(narrow, *self.group).double()
        except RuntimeError as problem:
            return f"not tried: its own forward in bfloat16: {problem!s:.80}"
        found = CompatibilityScorer(narrow).score(*self.group).double()
        own, error = (float((x - wanted).abs().median()) for x in (plain, found))
        return "equal" if error <= 2 * own + 1e-2 else f"wrong: {error:.2g} where its own error is {own:.2g}"


COLUMNS: dict[str, Callable[[Tiny], str]] = {
    "scores": Tiny.scores,
    "gradients": Tiny.gradients,
    "plain": Tiny.plain,
    "engine": Tiny.engine,
    "reranker": Tiny.reranker,
    "bfloat16": Tiny.bfloat16,
}


def torchao() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


WEIGHTS: dict[str, Callable[[], Any]] = {
    "bitsandbytes, int8": lambda: transformers.BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes, nf4": lambda: transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "torchao, int8": torchao,
    "optimum-quanto, int8": lambda: transformers.QuantoConfig(weights="int8"),
    "fp8, by blocks": lambda: transformers.FineGrainedFP8Config(),
    "GPTQ, 4 bits": lambda: transformers.GPTQConfig(bits=4, dataset=["some words"]),
    "AWQ, 4 bits": lambda: transformers.AwqConfig(bits=4),
    "compressed-tensors": lambda: transformers.CompressedTensorsConfig(),
}


class Quantized(Tiny):
    """A tiny Qwen3 with weights that are not floats; the definition is its own full forwards."""

    definition = staticmethod(lambda model: model)

    def build(self, kind: str) -> PreTrainedModel:
        with tempfile.TemporaryDirectory() as folder:
            zoo.build("qwen3", tie_word_embeddings=False).save_pretrained(folder)
            options = {"quantization_config": WEIGHTS[kind](), "dtype": torch.float32}
            return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def told(problem: Exception) -> str:
    """A refusal in few words."""
    text = " ".join(str(problem).split())
    if isinstance(problem, ValueError) and " expected " in text:
        short = text.partition(";")[0].removeprefix("model: ").removeprefix("slm: ")
        return "refused: " + re.sub(
            "expected a decoder with softmax attention and fixed positions, got .*? with ", "", short
        )
    return f"wrong: {type(problem).__name__}: {text:.120}"


def row(kind: str) -> dict[str, str]:
    """The cells of one family, or of one kind of weights."""
    quantized = kind in WEIGHTS
    columns = {name: ask for name, ask in COLUMNS.items() if not (quantized and name == "bfloat16")}
    try:
        tiny = Quantized(kind) if quantized else Tiny(kind)
    except Exception as problem:  # of transformers' own
        return {
            "how": "",
            **dict.fromkeys(columns, f"not tried: {type(problem).__name__}: {' '.join(str(problem).split()):.80}"),
        }
    cells = {"how": "native" if NativeDecoder.fits(tiny.model) else "modules"}
    for name, ask in columns.items():
        try:
            cells[name] = ask(tiny)
        except Exception as problem:
            cells[name] = told(problem)
    return cells


def line(kind: str, cells: dict[str, str]) -> str:
    """A row of the table: its reasons stand in the last column, each once."""
    found = (
        re.sub(r" by up to [\d.]+ nats", "", cell.partition(": ")[2]) for cell in cells.values()
    )  # other ones elsewhere
    why = "; ".join(dict.fromkeys(filter(None, found))).replace("|", "/").replace("<", "&lt;")
    return f"| {' | '.join([f'`{kind}`', *(cell.partition(':')[0] for cell in cells.values()), why])} |"


def table(first: str, rows: dict[str, dict[str, str]]) -> str:
    head = [first, *next(iter(rows.values())), "why"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(line(kind, cells) for kind, cells in rows.items())]
    return "\n".join(lines)


def page(rows: dict[str, dict[str, str]], weights: dict[str, dict[str, str]]) -> str:
    """docs/support.md."""
    scored, decoded = (sum(cells[name] == "equal" for cells in rows.values()) for name in ("scores", "plain"))
    native = ", ".join(f"`{kind}`" for kind, cells in rows.items() if cells["how"] == "native")
    return f"""# Models

Every family of causal LMs in transformers {transformers.__version__}, as `make support` found it on a CPU: made tiny,
with random weights, and compared with its own full forwards in float64. Of {len(rows)} families {scored} score and
{decoded} decode. {native} also have a native decoder: the fast loop, and
batches in the engine. `futurebridge env --model FOLDER` says what will run of a model of yours.

- *how*: native, or through the model's own modules.
- *scores*, *gradients*: a group of candidates, and `shared_prefix_logprobs`.
- *plain*: greedy tokens of a padded batch, and of an LLM. *engine*: of the engine, one after another where not native.
- *reranker*: a LoRA scorer at the events of a decode.
- *bfloat16*: scores, no further off than twice the model's own plain forward.
- *equal*: the same tokens; scores within 1e-4 of the largest log-prob, gradients and reranker within 1e-3. *refused*:
  an error that says why. *not tried*: no tiny model could be made.

The tiny model has its family's usual layers; what another configuration brings is checked when a model is loaded.

{table("family", rows)}

## Quantized weights

A tiny Qwen3 made in float32, its weights then quantized, against its own full forwards. *not tried*: what they need is
not there.

{table("weights", weights)}
"""


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    start, rows = time.perf_counter(), {}
    for kind in [*sorted(zoo.KINDS), *WEIGHTS]:
        rows[kind] = row(kind)
        print(line(kind, rows[kind]), flush=True)
    weights = {kind: rows.pop(kind) for kind in WEIGHTS}
    PAGE.write_text(page(rows, weights), encoding="utf-8")
    print(f"{len(rows)} families in {(time.perf_counter() - start) / 60:.0f} minutes: {PAGE.name}")


if __name__ == "__main__":
    main()
