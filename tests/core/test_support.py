"""docs/support.md is what its families do, and what `futurebridge env --model` says of a folder."""

from __future__ import annotations

import json

import pytest
import support
import torch
import zoo
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, Phi3Config, Qwen3Config, Qwen3NextConfig

from fb_core.models.checkpoints import outlook

LINES = {line.split("`")[1]: line for line in support.PAGE.read_text().splitlines() if line.startswith("| `")}


def test_every_family_has_a_row_and_none_is_wrong():
    assert [*sorted(zoo.KINDS), *support.WEIGHTS] == [*LINES]
    cells = [cell.strip() for line in LINES.values() for cell in line.split("|")[3:-2]]
    assert {*cells} == {"equal", "refused", "not tried"}
    scored = sum(LINES[kind].split("|")[3].strip() == "equal" for kind in zoo.KINDS)
    assert f"[{scored} families](docs/support.md)" in (support.PAGE.parents[1] / "README.md").read_text()


@pytest.mark.parametrize("kind", sorted(zoo.KINDS))
@pytest.mark.sweep(19)
def test_a_row_is_what_its_family_does(kind):
    assert support.line(kind, support.row(kind)) == LINES[kind]


@pytest.mark.parametrize("kind", support.WEIGHTS)
def test_a_row_is_what_its_quantized_weights_do(kind):
    cells = support.row(kind)
    if not cells["how"]:
        pytest.skip(cells["scores"])
    assert support.line(kind, cells) == LINES[kind]


TINY = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 96}
TINY |= {"num_key_value_heads": 2, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            Qwen3Config(**TINY, dtype="bfloat16"),
            ["in bfloat16, 96 ids", "decoding: native", "serving: native", "reranking: native", "gradients: modules"],
        ),
        (
            Phi3Config(**TINY),
            [
                "in float32",
                "decoding: plain, in padded batches",
                "serving: one sequence after another",
                "reranking: modules",
            ],
        ),
        (
            CONFIG_MAPPING["bloom"](vocab_size=96, hidden_size=32, n_layer=2, n_head=4),
            ["decoding: plain", "refused: attention outside"],
        ),
        (
            Qwen3NextConfig(**TINY),
            ["decoding: plain, in padded batches", "serving: one sequence after another", "reranking: modules"],
        ),
        (CONFIG_MAPPING["llama4_text"](**TINY), ["refused: layers of type chunked_attention"]),
    ],
)
def test_a_folder_with_a_configuration_says_what_will_run(tmp_path, config, words):
    config.save_pretrained(tmp_path)
    lines = outlook(str(tmp_path))
    assert all(word in "\n".join(lines) for word in words)
    save_file({"zeros": torch.zeros(3)}, tmp_path / "model.safetensors")  # no weights are read
    assert outlook(str(tmp_path)) == lines


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(OSError, match="expected a folder or hub id of a model"):
        outlook(str(tmp_path / "missing"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    with pytest.raises(
        ValueError, match=r"expected the config.json of a causal LM that transformers knows, got: .*nonsense"
    ):
        outlook(str(tmp_path))
