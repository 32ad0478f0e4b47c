"""Cells of `benchmarks.why`: a small real one, its selectors, and what a cell of so many problems is made of."""

from __future__ import annotations

import json

import pytest
import torch
from runs import settings
from torch import Tensor

from benchmarks import evidence, why
from benchmarks.pages.figures import ROOT, TABLES
from benchmarks.paper.rows import read_tables
from benchmarks.paper.settings import PaperSettings
from fb_core.apps.demo import SETTINGS
from fb_core.apps.pipeline.models import Models, splits_of
from fb_core.decode.selectors import LLMPreference, SLMPreference, State
from fb_core.events import Pool


@pytest.fixture
def models() -> Models:
    return Models(settings().models)


def ids(models: Models, *texts: str) -> Tensor:
    return torch.tensor([models.tokenizer.get_vocab()[text] for text in texts])


def pool(models: Models, *texts: str, favourite: int) -> Pool:
    """The SLM's likeliest token is the first, the LLM's is the favourite."""
    logprob = torch.tensor([-1.0 - n for n in range(len(texts))])
    return Pool(ids(models, *texts), torch.full((len(texts),), 3), logprob, logprob.roll(favourite))


def test_at_digits_another_selector_chooses(models):
    pools = [pool(models, "3", "so ", favourite=1), pool(models, "so ", "3", favourite=1)]
    pools.append(pool(models, "=", "3", favourite=1))
    states = [State(torch.tensor([1]), 0, 2.0)] * 3
    slm, llm = SLMPreference(), LLMPreference()
    for digits, elsewhere, expected in (llm, slm, [1, 0, 0]), (slm, slm, [0, 0, 0]), (slm, llm, [0, 1, 1]):
        selector = why.AtDigits(models, digits, elsewhere)
        assert [choice for choice, _ in selector.choose_many(states, pools)] == expected
        assert [selector.choose(*one) for one in zip(states, pools, strict=True)] == expected


def test_the_oracle_scores_what_follows_the_llms_token(models):
    prefix, own = ids(models, *"29*9+7*7+9;"), pool(models, "so ", "as ", favourite=1)
    state = State(prefix, 0, 2.0)
    (written,) = models.llm.complete_many([prefix], 6)
    (expected,) = [models.scorer.score(prefix, own.ids, written[1:6]).mean(1)]
    (found,) = why.Oracle(models, 5).scores_many([state], [own])
    assert torch.allclose(found, expected, atol=1e-5)
    cut = ids(models, "so ", "2", "9"), ids(models, "as ")
    short, alone = why.Oracle(models, 5).scores([prefix] * 2, [own] * 2, cut)
    assert torch.allclose(short, models.scorer.score(prefix, own.ids, cut[0][1:]).mean(1), atol=1e-5)
    assert alone.tolist() == [0.0, 1.0]


def test_a_scale_multiplies_the_training_problems_alone():
    made = {scale: why.settings_of("control", 1, 0.92, scale) for scale in (1, 4)}
    parts = {scale: {name: len(own) for name, own in splits_of(one.problems).items()} for scale, one in made.items()}
    assert parts[4] == {"train": 2400, "validation": 150, "certification": 300}
    assert parts[1] == parts[4] | {"train": 600}
    assert made[1].train.horizons == (16,)
    assert made[1].experiment.benchmark_problems == 400


def test_the_horizons_are_those_of_the_committed_runs():
    worlds = {settings: world for world, settings in SETTINGS.items()}
    chosen = {
        worlds[run.name]: row.x
        for run in read_tables(ROOT / TABLES)
        for row in run.of("horizons")
        if row.key == "published"
    }
    assert chosen == why.HORIZONS


def test_a_small_cell_is_made_once(tmp_path):
    values = settings(
        problems={"limit": 72, "seed": 5, "certification": 24},
        train={"seeds": [5], "epochs": 1},
        evaluate={"limit": 8},
    ).model_dump()
    small = PaperSettings.model_validate(values | {"experiment": {"benchmark_problems": 8}})
    (tmp_path / "cells").mkdir()
    why.make("plans", 1, small, tmp_path)
    (file,) = (tmp_path / "cells").glob("*.json")
    assert file.name == "plans-5-0.9-x1.json"
    cell, written = json.loads(file.read_text()), file.stat().st_mtime_ns
    assert cell["rows"].keys() == why.DECODERS.keys()
    assert all(len(row["correct"]) == 8 for row in cell["rows"].values())
    assert cell["rows"]["greedy"]["events"] == {}
    assert sum(cell["rows"]["oracle"]["events"].values()) == round(8 * cell["rows"]["oracle"]["calls"]) > 0
    assert 0 < cell["training groups"]["word"] <= cell["training states"]["word"]
    rows = {(row["score"], row["kind"]): row for row in cell["agreement at usable"]}
    same = [rows[score, "all"] | {"score": ""} for score in (why.TARGET, why.ANY)]
    assert same[0] == same[1]  # where the future is usable, the oracle's score is the target
    counts = {row["kind"]: row["states"] for row in cell["agreement"] if row["score"] == "SLM"}
    assert counts["all"] == counts["word"] + counts["digit"] + counts.get("mark", 0)
    assert {row["kind"] for row in cell["coverage"]} == {"all", "word", "digit"}
    assert not (tmp_path / "runs" / file.stem).exists()
    why.make("plans", 1, small, tmp_path)
    assert file.stat().st_mtime_ns == written
    committed = tmp_path / "why.json"
    evidence.write_cells([cell], committed)
    evidence.finished_cells(committed, again := tmp_path / "again")  # another machine goes on from the committed ones
    assert json.loads((again / "cells" / file.name).read_text()) == cell


def test_the_page_has_the_cells_of_each_seed_in_order():
    records = json.loads((ROOT / why.RECORDS).read_text())
    by_seed = {cell["seed"]: cell for cell in records if (cell["world"], cell["scale"]) == ("control", 1)}
    right = "/".join(f"{by_seed[seed]['rows']['oracle']['correct'].count('1') / 4:.1f}" for seed in (0, 1))
    page = why.page(records)
    assert any(line.startswith("| oracle: ") and line.endswith(f"| {right} |") for line in page)
    assert why.page(records[::-1]) == page
