"""Which files of an adapter's folder go to the hub, and what is refused before the network is used."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from runs import settings
from transformers import AutoModelForCausalLM
from warm import futurebridge

from fb_core import TokenReranker
from fb_core.apps.demo.pairs import load_pair
from fb_core.apps.pipeline.choose import RerankerStage
from fb_core.apps.pipeline.files import Artefact
from fb_core.hub import deployed_files, push_to_hub
from fb_core.models.checkpoints import is_hub_id

FILES = ["README.md", "adapter_config.json", "adapter_model.safetensors", "futurebridge.json"]


@pytest.fixture
def folder(undisturbed, tmp_path) -> Path:
    """The published recipe, as `train` wrote it."""
    return Path(shutil.copytree(undisturbed[0]["train"] / "reranker" / "seed-0", tmp_path / "seed-0"))


def test_an_adapter_is_four_files_and_nothing_else_goes(folder):
    for name in ("notes.txt", ".env", "optimizer.safetensors", "a/README.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    assert deployed_files(folder) == FILES
    there = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert len(there) == len(FILES) + 4
    assert sorted(filter_repo_objects(there, allow_patterns=deployed_files(folder))) == FILES  # as upload_folder does


def test_no_file_says_where_the_base_model_lay(tmp_path):
    """A published adapter tells nobody the paths of the machine that made it."""
    load_pair("plans").slm.save_pretrained(tmp_path / "at-home")
    local = AutoModelForCausalLM.from_pretrained(tmp_path / "at-home")
    assert local.config._name_or_path == str(tmp_path / "at-home")
    TokenReranker.from_base(local.eval()).save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    for path in (tmp_path / "adapter").iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()


def test_the_card_names_a_base_model_only_where_the_hub_knows_one(folder, undisturbed):
    card = ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.tags) == ("peft", ["futurebridge", "reranker", "lora"])
    assert card.data.base_model is None  # of the demo
    run = undisturbed[0]["train"]
    chosen = Artefact(run, "selection").finished()["summary"]
    for slm, base in (("Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B"), (str(folder), None), ("./a/b", None)):
        stage = RerankerStage(settings(models={"slm": slm}), run)
        card = stage._card(0, chosen)
        assert ModelCard(card).data.base_model == base
        assert str(folder.parent) not in card
        assert ("path/to/" + Path(slm).name in card) == (base is None)  # a folder must be told from a name
    assert is_hub_id("Qwen/Qwen3-1.7B")
    assert not any(map(is_hub_id, ("demo:plans", str(folder), "seed-0", "./a/b", "a/b/c")))


CARD = "---\nlibrary_name: peft\nbase_model: {}\n---\n# A card\n"


@pytest.mark.parametrize("base", ["Qwen/Qwen3-1.7B", "[Qwen/Qwen3-1.7B, gpt2]", ""])
def test_a_card_may_be_edited(folder, base):
    (folder / "README.md").write_text(CARD.format(base))
    assert deployed_files(folder) == FILES


@pytest.mark.parametrize("name", FILES)
def test_a_folder_that_lacks_a_file_is_refused(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=name.replace(".", r"\.") + r"( in it)?, got none; name "):
        deployed_files(folder)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        *(("README.md", "# no head", "library_name"), ("README.md", "---\na: [\n---\n", "YAML")),
        *(("README.md", "---\n- a\n---\n", "YAML"), ("README.md", "\udcff", "model card")),
        *(("README.md", CARD.format(base), "base_model") for base in ('"demo:plans"', "/models/mine", "3", "{a: b}")),
        *(("adapter_model.safetensors", "x" * 40, "safetensors"), ("adapter_model.safetensors", None, "safetensors")),
        *(("futurebridge.json", "{", "JSON"), ("futurebridge.json", '{"format": 3, "recipe": 3}', "recipe")),
    ],
)
def test_a_damaged_folder_is_refused_in_one_sentence(folder, name, text, words):
    data = (folder / name).read_bytes()[:-1] if text is None else text.encode(errors="surrogateescape")
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=words) as raised:
        deployed_files(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", FILES)
def test_a_link_is_not_followed(folder, tmp_path, name):
    """Its target may be a file that nobody meant to publish."""
    shutil.move(folder / name, tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"{name}: expected no link"):
        deployed_files(folder)


def test_an_adapter_without_a_threshold_is_not_pushed(folder):
    """Whoever downloads it could only guess."""
    TokenReranker.from_base(load_pair("plans").slm).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"futurebridge\.json:"):
        push_to_hub(folder, "owner/name")


def test_other_folders_are_no_adapters(tmp_path, undisturbed):
    for place in (tmp_path, tmp_path / "none", undisturbed[0]["train"], undisturbed[0]["train"] / "training"):
        with pytest.raises(ValueError, match=f"^{place}.*futurebridge"):
            push_to_hub(place, "owner/name")


@pytest.mark.parametrize("repo_id", ["", "a/b/c", "o/na me", "../x", "o/name.git", "https://me:s3cret@host/x"])
def test_an_id_that_the_hub_has_not_is_refused(folder, repo_id):
    with pytest.raises(ValueError, match="repo_id:") as raised:
        push_to_hub(folder, repo_id)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE=1"),
        ({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hf_none"}, "Connection refused"),
    ],
    ids=["offline", "unreachable"],
)
@pytest.mark.sweep(2)
def test_without_the_hub_the_command_is_one_line(folder, environment, words):
    fresh = environment["HF_HUB_OFFLINE"] == "0"  # which is read once
    done = futurebridge("push", folder, "owner/name", "--private", fresh=fresh, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"futurebridge: owner/name: .*{re.escape(words)}.*\n", done.stderr)
