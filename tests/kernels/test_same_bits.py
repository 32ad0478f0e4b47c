"""A row has the same bits in any company, scored or written, where the library's own products run."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from tiny import tiny
from ways import narrowed, running

from fb_core import CompatibilityScorer, Engine, RandomChoice, RequestPolicy
from fb_core.decode.pair import Pair
from fb_core.models import native
from fb_kernels._runtime import cpu, precision
from fb_kernels.branch_attention_qkv import reference as branch_attention_qkv

TOKENS = 1000
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(params=["tiles", "float32", "bfloat16", "float32, Triton", "bfloat16, Triton"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """That of a model: in bfloat16 as with AMX, whose tiles are emulated, or in batch-invariant mode."""
    if request.param.endswith("Triton"):
        monkeypatch.setattr(branch_attention_qkv, "_host_reads", lambda _: False)  # as on a GPU
        monkeypatch.setattr(native, "IN_PLACE", ("cpu",))
        with running("triton invariant"):
            yield torch.float32 if request.param.startswith("float32") else torch.bfloat16
        return
    if request.param == "tiles":
        library = narrowed("tiles")
        monkeypatch.setattr(cpu, "library", lambda: library)
        assert cpu.variant() == "amx"
    elif cpu.why_not():
        pytest.skip(cpu.why_not())
    else:
        monkeypatch.setattr(precision, "INVARIANT", True)
    yield torch.float32 if request.param == "float32" else torch.bfloat16


def drawn(made: random.Random, count: int) -> list[int]:
    return [made.randrange(TOKENS) for _ in range(count)]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.sweep(2)
def test_a_scored_row_does_not_depend_on_what_else_is_in_the_call(
    kind: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """In any number, order and budget; some begin alike, and share rows of whichever is there."""
    made = random.Random(kind)
    model = tiny(kind, vocab_size=TOKENS, head_dim=16, max_position_embeddings=1024, **SIZES).to(dtype).eval()
    scorer, requests = CompatibilityScorer(model), []
    system = drawn(made, 40)
    interpreted = "Triton" in request.node.name  # slowly
    for length in (3, 17, 60) if interpreted else (3, 17, 64, 130, 250, 1, 300, 280):
        prefix = [*system[: made.choice([0, 7, 40])], *drawn(made, length)]
        continuations = [drawn(made, made.choice([1, 5, 16, 40])) for _ in range(made.choice([1, 2, 5]))]
        requests.append((prefix, [*continuations, [*continuations[0][:3], 7, 8]]))
    alone = [scorer.logprobs(*each, return_entropy=True) for each in requests]
    for _ in range(1 if interpreted else 250 if request.config.getoption("--all") else 25):
        order = made.sample(range(len(requests)), made.randint(1, len(requests)))
        kept = [made.sample(range(len(requests[i][1])), made.randint(1, len(requests[i][1]))) for i in order]
        asked = [(requests[i][0], [requests[i][1][k] for k in own]) for i, own in zip(order, kept, strict=True)]
        found = scorer.logprobs_many(asked, made.choice([64, 256, 4096]), return_entropy=True)
        for i, own, scores in zip(order, kept, found, strict=True):
            for k, mine in zip(own, scores, strict=True):
                assert all(torch.equal(one, other) for one, other in zip(mine, alone[i][k], strict=True))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.sweep(2)
def test_an_engine_reports_of_its_tokens_what_the_scorer_says(
    kind: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Prompts that begin alike or not, sequences that enter and leave while others run, tokens chosen at events too."""
    made = random.Random(kind)
    options = {"vocab_size": TOKENS, "head_dim": 16, "max_position_embeddings": 1024, **SIZES}
    model = tiny(kind, **options).to(dtype).eval()
    system = drawn(made, 150)
    lengths, counts, number = ([1, 5, 64, 129, 200], [1, 9, 40], 10)
    if "Triton" in request.node.name:  # interpreted, slowly
        lengths, counts, number = [1, 5, 20], [1, 3], 3
    prompts = [[*system[: made.choice([0, 130])], *drawn(made, made.choice(lengths))] for _ in range(number)]
    options = {"pool": "slm", "max_batch": 4, "max_length": 512}
    with Engine(Pair(model, None), RandomChoice(0), RequestPolicy(1.0), **options) as engine:
        handles = [engine.submit(torch.tensor(prompt), made.choice(counts), ranking=True) for prompt in prompts]
        tokens = [list(handle) for handle in handles]
    scorer = CompatibilityScorer(model)
    for prompt, own in zip(prompts, tokens, strict=True):
        (said,) = scorer.logprobs(prompt, [[token.id for token in own]])
        assert torch.equal(torch.tensor([token.ranked.taken for token in own]), said)
