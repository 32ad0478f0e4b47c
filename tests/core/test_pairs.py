import dataclasses
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from worked import worked_words

from fb_core.apps.demo import pairs
from fb_core.apps.demo.pairs import load_pair, retrain
from fb_core.apps.demo.worlds import WORLDS
from fb_core.models.checkpoints import load_model, tokenizer_hash


class Description(NamedTuple):
    """Greedy accuracy of each model alone, and of the SLM when every step opens with a word it follows, or does not."""

    slm: float
    llm: float
    slm_worked: float
    slm_guessed: float


def describe(pair, n, seed):
    """Measures a pair on `n` validation problems by an exact checker."""
    problems = pair.world.problems(n, seed, "validation")

    def accuracy(model, forced=()):
        answers = _greedy_answers(model, pair.world, problems, forced)
        return sum(map(str.endswith, answers, (f"\\boxed{{{p.answer}}}" for p in problems))) / n

    forced = partial(_ForcedWords, pair.world, problems)
    return Description(
        accuracy(pair.slm), accuracy(pair.llm), accuracy(pair.slm, [forced(True)]), accuracy(pair.slm, [forced(False)])
    )


@torch.no_grad()
def _greedy_answers(model, world, problems, forced):
    prompts = torch.tensor([problem.prompt_ids for problem in problems])
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=world.max_new_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList(forced),
    )
    return list(world.tokenizer.batch_decode(out[:, prompts.shape[1] :], skip_special_tokens=True))


class _ForcedWords(LogitsProcessor):
    """Forbids the words after which the SLM guesses a step (or, with `worked` False, those after which it works)."""

    def __init__(self, world, problems, worked):
        self.stop = world.vocabulary[". "]
        self.prompt = len(problems[0].prompt_ids)
        forbidden = torch.zeros(len(problems), world.steps + 1, len(world.vocabulary), dtype=torch.bool)
        for row, problem in enumerate(problems):
            for step, (multiplier, _) in enumerate(problem.operations[1]):
                for word in world.words:
                    if (word in worked_words(world, multiplier)) != worked:
                        forbidden[row, step, world.vocabulary[f"{word} "]] = True
        self.forbidden = forbidden

    def __call__(self, input_ids, scores):
        """Masks by the step each row is in, which the number of full stops tells."""
        step = (input_ids[:, self.prompt :] == self.stop).sum(1).clamp(max=self.forbidden.shape[1] - 1)
        return scores.masked_fill(self.forbidden[torch.arange(len(step)), step], -torch.inf)


@pytest.fixture
def short_recipes(monkeypatch):
    """Recipes of a few steps."""
    short = {name: dataclasses.replace(recipe, steps=3) for name, recipe in pairs.RECIPES.items()}
    monkeypatch.setattr(pairs, "RECIPES", short)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


def test_retrain_writes_the_same_bytes_for_the_same_seed(short_recipes, tmp_path):
    calls = []
    random_state = torch.get_rng_state()
    retrain(tmp_path / "a", 0, ["plans"], calls.append, workers=1)
    retrain(tmp_path / "b", 0, ["plans"], workers=1)
    retrain(tmp_path / "c", 1, ["plans"], workers=1)
    assert torch.equal(random_state, torch.get_rng_state())
    assert calls == [(name, step, 3) for name in ("plans-slm", "plans-llm") for step in (1, 2, 3)]
    assert contents(tmp_path / "a") == contents(tmp_path / "b") != contents(tmp_path / "c")
    pair = load_pair("plans", tmp_path / "a")
    assert describe(pair, 4, 0).slm == 0
    prompt = torch.tensor([pair.world.problems(1, 0, "test")[0].prompt_ids])
    for model, folder in zip((pair.slm, pair.llm), pairs.folders("plans", tmp_path / "a"), strict=True):
        loaded, tokenizer = load_model(str(folder), "cpu", "float32")  # an ordinary checkpoint
        assert torch.equal(loaded(prompt).logits, model(prompt).logits)
        assert tokenizer_hash(tokenizer) == tokenizer_hash(pair.world.tokenizer)


def test_style_worlds_share_their_slm(short_recipes, tmp_path):
    retrain(tmp_path, 0, ["helpful", "control"], workers=1)
    assert {folder.name for folder in tmp_path.iterdir()} == {"style-slm", "helpful-llm", "control-llm"}
    helpful, control = load_pair("helpful", tmp_path), load_pair("control", tmp_path)
    assert all(map(torch.equal, helpful.slm.parameters(), control.slm.parameters()))


@pytest.mark.slow
def test_two_processes_write_what_one_does(tmp_path, monkeypatch):
    calls = []
    tiny = {name: dataclasses.replace(recipe, steps=2) for name, recipe in pairs.RECIPES.items()}
    monkeypatch.setattr(pairs, "RECIPES", tiny)
    retrain(tmp_path / "two", 0, ["plans"], calls.append, workers=2)
    retrain(tmp_path / "one", 0, ["plans"], workers=1)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert sorted(calls) == [(name, step, 2) for name in ("plans-llm", "plans-slm") for step in (1, 2)]


def test_unknown_worlds_and_missing_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected one of demo:plans, demo:helpful, demo:control"):
        load_pair("nowhere")
    with pytest.raises(OSError, match="plans-slm: expected a folder or hub id of a model"):
        load_pair("plans", tmp_path)
    with pytest.raises(ValueError, match="nowhere"):
        retrain(tmp_path, worlds=["nowhere"])


@pytest.mark.parametrize("name", WORLDS)
def test_shipped_pair_is_frozen_float32_and_fits_its_world(name):
    pair = load_pair(name)
    for model in (pair.slm, pair.llm):
        assert not model.training
        assert all(p.dtype == torch.float32 and not p.requires_grad for p in model.parameters())
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.config.vocab_size == len(pair.world.tokenizer)
        assert model.config.eos_token_id == pair.world.tokenizer.eos_token_id


@pytest.mark.parametrize("name", WORLDS)
def test_shipped_pair_has_the_gap_it_is_for(name):
    gap = describe(load_pair(name), 120, seed=5)
    assert gap.llm > 0.95
    assert gap.slm_guessed < gap.slm < gap.slm_worked
    assert gap.slm_worked - gap.slm_guessed > 0.3
    assert gap.slm_worked > 0.8


def test_shipped_weights_are_safetensors_and_small():
    folder = Path(pairs.__file__).parent / "weights"
    files = [file for file in folder.rglob("*") if file.is_file()]
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in files} == names
    assert {file.parent.name for file in files} == set(pairs.RECIPES)
    assert sum(file.stat().st_size for file in files) < 5e6
