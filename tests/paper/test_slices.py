"""Each stage reads its own slice of the settings alone, and every part of that identifies its files."""

from __future__ import annotations

import json
import pickle

import pytest
from paper_runs import settings
from pydantic import BaseModel

from benchmarks.paper.agreement import AgreementStage
from benchmarks.paper.comparison import CompareStage, DeploymentStage
from benchmarks.paper.futures import OtherScoreStage, OwnFutureStage, SampleStage
from benchmarks.paper.r2r.stages import RouterLabelStage, RouterStage
from benchmarks.paper.rollouts import HeldOutRolloutStage
from benchmarks.paper.s2t_local import SelectionTrainStage
from benchmarks.paper.settings import PaperSettings
from fb_core.apps.pipeline.choose import CHOICE
from fb_core.apps.pipeline.commands import COMMANDS, stages_of
from fb_core.apps.pipeline.rollouts import RolloutStage
from fb_core.apps.pipeline.run import Stage
from fb_core.apps.settings.run import NOT_IN_IDENTITY, Slice, identity_of

KINDS = list(
    dict.fromkeys(
        [
            *(kind for command in COMMANDS for kind in stages_of(command, settings())),
            *(OwnFutureStage, SampleStage, HeldOutRolloutStage, AgreementStage, RolloutStage, *CHOICE),
            *(RouterLabelStage, RouterStage, CompareStage, DeploymentStage),
        ]
    )
)
FREELY = {"collect.unread", "score.token_budget", "train.checkpoint_steps", "verify.workers"}  # change no result


def leaves(part: BaseModel, before: str = "") -> list[str]:
    """Dotted names of all settings but the models'."""
    found = []
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            found += leaves(value, f"{before}{name}.") if name != "models" else []
        else:
            found.append(before + name)
    return found


def changed(part: BaseModel, name: str) -> BaseModel:
    """With another value there; what the others make of it does not matter here."""
    section, _, rest = name.partition(".")
    value = changed(getattr(part, section), rest) if rest else "another"
    return part.model_copy(update={section: value})


def read(stage: Stage, name: str) -> object:
    value: object = stage.settings
    for part in name.split("."):
        value = getattr(value, part)
    return value


def covered(names, leaf: str) -> bool:
    return any(leaf == name or leaf.startswith(f"{name}.") for name in names)


def subclasses(kind: type) -> set[type]:
    return {kind, *(one for below in kind.__subclasses__() for one in subclasses(below))}


def test_all_stages_are_here():
    named = {
        kind
        for kind in subclasses(Stage)
        if kind.__module__.startswith(("fb_core.", "benchmarks.paper")) and "name" in vars(kind)
    }
    assert named == set(KINDS)
    assert len({kind.name for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", [*KINDS, OtherScoreStage, SelectionTrainStage])
def test_a_stage_reads_its_slice_alone_and_all_of_it_counts(kind, tmp_path):
    chosen = settings()
    names, stage = kind.slice, kind(chosen, tmp_path)
    before, seen = identity_of(stage.settings), 0
    for leaf in leaves(chosen):
        if not covered(names, leaf):
            with pytest.raises(AttributeError):
                read(stage, leaf)
            continue
        read(stage, leaf)
        after = identity_of(kind(changed(chosen, leaf), tmp_path).settings)
        assert (after == before) == (leaf in FREELY), leaf
        seen += leaf not in FREELY
    assert seen or not names


def test_only_what_changes_no_result_is_free():
    def free(kind, before=""):
        for name, field in kind.model_fields.items():
            if NOT_IN_IDENTITY in field.metadata:
                yield before + name
            elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from free(field.annotation, f"{before}{name}.")

    assert set(free(PaperSettings)) == FREELY | {"models"}


def test_a_slice_is_frozen_and_travels(tmp_path):
    part = Slice(settings(), ["verify", "collect.max_states", "collect.slm_k", "compare.router.width"])
    assert identity_of(part) == {
        "verify": {"timeout": 5.0, "memory_bytes": 2 << 30},
        "collect": {"max_states": 8, "slm_k": 3},
        "compare": {"router": {"width": 16}},
    }
    assert identity_of(pickle.loads(pickle.dumps(part))) == identity_of(part)
    for where, name in ((part, "verify"), (part.collect, "slm_k"), (part.collect, "top_k")):
        with pytest.raises(AttributeError, match="expected to be only read"):
            setattr(where, name, 1)
    with pytest.raises(AttributeError):
        _ = part.collect.top_k


def test_the_identity_is_the_slice(undisturbed):
    run = undisturbed[0]["evaluate"]
    for kind in (kind for command in COMMANDS for kind in stages_of(command, settings())):
        stage = kind(settings(), run)
        manifest = stage.folder.finished()
        assert manifest["identity"]["settings"] == json.loads(json.dumps(identity_of(stage.settings)))
        assert manifest["identity"] == json.loads(json.dumps(stage.identity()))


def test_only_a_declared_input_can_be_asked_for(tmp_path):
    kinds = stages_of("collect", settings())
    assert kinds[2](settings(), tmp_path).input(kinds[0]).name == "trajectories"
    with pytest.raises(AssertionError, match="policy does not read states"):
        kinds[1](settings(), tmp_path).input(kinds[2])
