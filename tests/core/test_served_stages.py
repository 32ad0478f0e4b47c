"""Stages whose models run on llama.cpp servers: results as in one process, and resumed after a server was away."""

from __future__ import annotations

import json

import pytest
from dialects import byte_tokenizer
from limits import HANG
from tiny import tiny

from benchmarks.servers.live_server import CONTEXT, LlamaCpp, write_gguf
from fb_core import ServerError
from fb_core.apps.pipeline.collect import PolicyStage, StateStage, TrajectoryStage
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.futures import FutureStage
from fb_core.apps.pipeline.run import run_stage
from fb_core.apps.pipeline.scores import ScoreStage
from fb_core.apps.settings.run import RunSettings

MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(settings by name, servers by role) of two tiny models, each a folder and a server."""
    folder, tokenizer = tmp_path_factory.mktemp("pair"), byte_tokenizer(merges=MERGES)
    names, servers = {}, {}
    for seed, role in enumerate(("slm", "llm")):
        model = tiny("qwen3", seed, vocab_size=len(tokenizer), max_position_embeddings=CONTEXT)
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
        write_gguf(folder / f"{role}.gguf", model, tokenizer)
        names[role], servers[role] = str(folder / role), LlamaCpp(folder / f"{role}.gguf")
    problems = folder / "problems.jsonl"
    problems.write_text(
        "".join(json.dumps({"problem": f"What is {n} the {n * n}?", "answer": str(n)}) + "\n" for n in range(12))
    )
    values = {
        "models": names,
        "problems": {"train": str(problems), "held_out": [], "validation": 4, "per_shard": 3, "prompt": "{problem}"},
        "collect": {"max_new_tokens": 16, "quantile": 0.8, "slm_k": 3},
        "futures": {"max_new_tokens": 16, "llm_k": 3},
        "score": {"horizon": 4},
        "train": {"horizons": [4]},
    }
    yield values, servers
    for one in servers.values():
        one.kill()


def served(values, servers, **options):
    there = {
        f"{role}_server": {"url": one.url, "flavour": "llama.cpp", "timeout": HANG, **options}
        for role, one in servers.items()
    }
    return RunSettings.model_validate({**values, "models": {**values["models"], **there}})


def rows(run, stage):
    folder = Artefact(run, stage)
    return [row for shard in sorted(path.stem for path in folder.path.glob("*.parquet")) for row in folder.table(shard)]


def assert_alike(first, second, stage):
    """The same rows; a server rounds by what else it has at hand."""
    here, there = rows(first, stage), rows(second, stage)
    assert len(here) == len(there) > 8
    for one, other in zip(here, there, strict=True):
        for name, value in one.items():
            if name == "pool":
                for part, values in value.items():
                    assert other[name][part] == pytest.approx(values, abs=1e-3), part
            elif name == "entropy":
                assert other[name] == pytest.approx(value, abs=1e-3)
            else:
                assert other[name] == value, name


def test_servers_write_what_the_process_would(pair, tmp_path):
    values, servers = pair
    for name, chosen in (("here", RunSettings.model_validate(values)), ("served", served(values, servers))):
        for stage in (TrajectoryStage, PolicyStage, StateStage, FutureStage, ScoreStage):
            run_stage(stage(chosen, tmp_path / name))
    for stage in ("trajectories", "states", "futures"):
        assert_alike(tmp_path / "here", tmp_path / "served", stage)
    counts = [Artefact(tmp_path / name, "scores").finished()["counts"] for name in ("here", "served")]
    assert counts[0] == counts[1]


def test_a_server_that_went_away_is_gone_on_with(pair, tmp_path, monkeypatch):
    values, servers = pair
    monkeypatch.setattr("fb_core.llm.http.FIRST_DELAY", 0.01)
    undisturbed, chosen = served(values, servers), served(values, servers, retries=1)
    for stage in (TrajectoryStage, PolicyStage, StateStage):
        run_stage(stage(undisturbed, tmp_path / "a"))
        run_stage(stage(undisturbed, tmp_path / "b"))
    run_stage(FutureStage(undisturbed, tmp_path / "a"))

    stage = FutureStage(chosen, tmp_path / "b")
    work, seen = stage.work, []

    def work_until_the_server_is_gone(shard):
        seen.append(shard)
        if len(seen) == 3:
            servers["llm"].kill()
        return work(shard)

    monkeypatch.setattr("fb_core.apps.pipeline.run.SERVED_AT_ONCE", 1)
    stage.work = work_until_the_server_is_gone
    with pytest.raises(ServerError, match=servers["llm"].url):
        run_stage(stage)
    done = stage.folder.receipts(stage.shards())
    assert len(done) == 2
    servers["llm"].start()
    run_stage(FutureStage(chosen, tmp_path / "b"))
    assert_alike(tmp_path / "a", tmp_path / "b", "futures")


def test_a_server_with_another_tokenizer_is_refused(pair, tmp_path):
    values, servers = pair
    other = tmp_path / "slm"
    tiny("qwen3", 0, vocab_size=len(byte_tokenizer(merges=MERGES))).save_pretrained(other)
    byte_tokenizer(swapped=True, merges=MERGES).save_pretrained(other)
    chosen = served({**values, "models": {"slm": str(other), "llm": str(other)}}, servers)
    with pytest.raises(ValueError, match="tokenizer"):
        run_stage(TrajectoryStage(chosen, tmp_path / "run"))
