"""Training under a tracker: what it is sent, when a run is resumed too, and that it decides nothing."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from runs import contents, finish, settings, start
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from warm import futurebridge

from fb_core.stages.files import Artefact
from fb_core.stages.train import TRACKED, TrainStage

NAMES = ("h8-s0", "h8-s1")


def tracked(tracker, **changes):
    """The small run's settings under a tracker."""
    train = settings().train.model_dump() | {"tracker": tracker, **changes}
    return settings(train=train)


@pytest.fixture
def begun(undisturbed, tmp_path) -> Path:
    """A run that only waits for `train`."""
    run = tmp_path / "a run"
    shutil.copytree(undisturbed[0]["score"], run)
    return run


def sent(run: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every tag that tensorboard's files hold, in the order in which they came."""
    found = defaultdict(list)
    for file in sorted((run / TRACKED / "futurebridge").iterdir()):
        events = EventAccumulator(str(file))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found[tag] += [(event.step, event.value) for event in events.Scalars(tag)]
    return dict(found)


def check(run: Path, found: dict[str, list[tuple[int, float]]]) -> None:
    """What was sent is what the run's own files say, every step once."""
    rows = [
        json.loads(line)
        for epoch in (1, 2)
        for line in Artefact(run, TrainStage.name).read(f"epoch-{epoch}", "jsonl").splitlines()
    ]
    per_epoch = len(rows[0]["loss"])
    steps = list(range(1, 2 * per_epoch + 1))
    for name in NAMES:
        own = [row for row in rows if f"h{row['horizon']}-s{row['seed']}" == name]
        losses = [loss for row in own for loss in row["loss"]]
        assert found[f"loss/{name}"] == list(zip(steps, map(pytest.approx, losses), strict=True))
        norms = found[f"gradient_norm/{name}"]
        assert [step for step, _ in norms] == steps
        assert all(norm > 0 for _, norm in norms)
        for figure in ("validation_cross_entropy", "validation_pairwise_accuracy"):
            ends = zip((per_epoch, 2 * per_epoch), [pytest.approx(row[figure]) for row in own], strict=True)
            once = dict.fromkeys(found[f"{figure}/{name}"])  # sent again where a process died before it wrote them
            assert list(once) == list(ends)
    rates = found["learning_rate"]
    assert [step for step, _ in rates] == steps
    assert rates[0][1] == pytest.approx(0.002)  # warmed up in one step of so few
    assert [rate for _, rate in rates] == sorted((rate for _, rate in rates), reverse=True)
    assert len(found) == 9


def test_tensorboard_is_sent_every_figure_and_changes_no_byte(undisturbed, begun):
    finish("train", tracked("tensorboard"), begun)
    check(begun, sent(begun))
    plain, other = contents(undisturbed[0]["train"]), contents(begun)
    assert plain.pop("settings.json") != other.pop("settings.json")
    assert {name: value for name, value in other.items() if not name.startswith(TRACKED)} == plain
    assert not any(name.startswith(TRACKED) for name in plain)


@pytest.mark.parametrize("writes", [3, 6, 9])
def test_a_killed_run_goes_on_behind_the_last_step_sent(begun, writes):
    """Killed with a checkpoint half written, with two steps between checkpoints."""
    chosen = tracked("tensorboard", checkpoint_steps=2)
    process = start("train", chosen, begun, dies=writes, seed=1)  # whose moment is "half"
    process.join()
    assert process.exitcode == -9
    before = sent(begun).get("learning_rate", [])
    name = (begun / TRACKED / "name").read_text()
    finish("train", chosen, begun)
    found = sent(begun)
    check(begun, found)
    assert len(before) < len(found["learning_rate"])
    assert (begun / TRACKED / "name").read_text() == name
    assert name.startswith("a-run-")


def test_of_two_processes_one_sends(begun, tmp_path):
    from warm import launched, start_futurebridge

    config = tmp_path / "small.json"
    config.write_text(tracked("tensorboard").model_dump_json())
    arguments = ["train", "--config", config, "--run-dir", begun]
    folders = [tmp_path / f"process-{rank}" for rank in range(2)]
    processes = []
    for folder, environment in zip(folders, launched(2), strict=True):
        folder.mkdir()
        processes.append(start_futurebridge(arguments, folder, **environment))
    for process, folder in zip(processes, folders, strict=True):
        process.join()
        assert process.exitcode == 0, (folder / "stderr").read_text()
    check(begun, sent(begun))


def test_wandb_offline_keeps_a_run_of_its_own(begun):
    config = begun.parent / "small.json"
    config.write_text(settings().model_dump_json())
    arguments = ["--config", config, "--run-dir", begun, "--set", "train.tracker=wandb"]
    done = futurebridge("train", *arguments, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    name = (begun / TRACKED / "name").read_text()
    (file,) = (begun / TRACKED / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb")
    for tag in ("gradient_norm/h8-s1", "learning_rate", "validation_cross_entropy/h8-s0"):
        assert tag.encode() in file.read_bytes()


def test_trackio_is_sent_a_run_under_one_name(begun):
    config, place = begun.parent / "small.json", begun.parent / "trackio"
    config.write_text(settings().model_dump_json())
    arguments = ["--config", config, "--run-dir", begun, "--set", "train.tracker=trackio"]
    done = futurebridge("train", *arguments, TRACKIO_DIR=str(place))
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(place / "futurebridge.db") as found:
        rows = found.execute("select run_name, step, metrics from metrics order by step").fetchall()
    name = (begun / TRACKED / "name").read_text()
    assert {row[0] for row in rows} == {name}
    assert "gradient_norm/h8-s0" in json.loads(rows[0][2])


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_one_sentence_ahead_of_all_work(begun, monkeypatch, tracker):
    monkeypatch.setitem(sys.modules, tracker, None)
    stage = TrainStage(tracked(tracker), begun)
    with pytest.raises(ImportError) as raised:
        stage.work("epoch-1")
    assert str(raised.value) == (
        f"train.tracker {tracker}: expected the extra [track] to be installed, got no {tracker}; "
        "pip install 'futurebridge[track]'"
    )
    assert not (begun / TRACKED).exists()


def test_another_tracker_is_refused():
    done = futurebridge("train", "--config", "tiny", "--set", "train.tracker=mlflow", "--dry-run")
    assert done.returncode == 2
    assert "train.tracker: Input should be 'tensorboard', 'wandb' or 'trackio'" in done.stderr
