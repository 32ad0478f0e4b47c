"""TokenReranker against PEFT, its directory, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import re

import pytest
import torch
import zoo
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, V, tiny
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Gemma3Config

from fb_core import TokenReranker
from fb_core._util import read_file
from fb_core.apps.pipeline.files import _read_sealed
from fb_core.apps.settings.run import settings_of
from fb_core.models.facts import Cache, text_config
from fb_core.models.packed import Prefix, PrefixKV
from fb_core.rerank.reranker import _read_json


def randomise(reranker, seed=0):
    """Adapters that do something: LoRA B and the head start at zero."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in reranker.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.3)
    return reranker


def state(seed=0, p=9, k=5):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(V, (p,), generator=g), torch.randperm(V, generator=g)[:k]


@pytest.fixture
def saved(tmp_path):
    """(model, folder): an adapter of the model, saved."""
    model = tiny("qwen3")
    TokenReranker.from_base(model, rank=4).save_pretrained(tmp_path)
    return model, tmp_path


def edited(file, **changes):
    """The JSON file with some entries changed."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_peft_activated_on_the_candidate_alone(family, tmp_path):
    reranker = randomise(TokenReranker.from_base(tiny(family), rank=4, alpha=8))
    reranker.save_pretrained(tmp_path)
    prefix, candidates = state()
    k = len(candidates)
    config = LoraConfig.from_pretrained(tmp_path)
    config.task_type, config.modules_to_save, config.alora_invocation_tokens = "CAUSAL_LM", None, [0]
    oracle = get_peft_model(tiny(family), config).eval()
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    head = tensors.pop("base_model.model.score.weight")
    set_peft_model_state_dict(oracle, tensors)
    rows = torch.cat([prefix.expand(k, -1), candidates[:, None]], 1)
    with torch.no_grad():
        hidden = oracle(input_ids=rows, alora_offsets=[1] * k, output_hidden_states=True).hidden_states[-1][:, -1]
        ours = reranker.scores(prefix, candidates)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, (hidden @ head.T)[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_directory_is_a_peft_sequence_classifier(family, tmp_path):
    """Scope "sequence" is what PEFT computes when it loads the directory by itself."""
    model = tiny(family)
    reranker = randomise(TokenReranker.from_base(model, rank=4, alpha=8, scope="sequence"))
    reranker.save_pretrained(tmp_path / "adapter")
    model.save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    prefix, candidates = state(1)
    rows = torch.cat([prefix.expand(len(candidates), -1), candidates[:, None]], 1)
    keep = (rows != model.config.pad_token_id).all(1)  # the classifier reads the last token that is not padding
    with torch.no_grad():
        theirs = loaded(input_ids=rows).logits[:, 0]
        ours = reranker.scores(prefix, candidates)
    torch.testing.assert_close(ours[keep], theirs[keep], rtol=1e-5, atol=1e-5)


def test_checkpoint_names(saved):
    _, folder = saved
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert set(load_file(folder / "adapter_model.safetensors")) == {
        "base_model.model.score.weight",
        *(
            f"base_model.model.model.layers.{i}.self_attn.{p}.lora_{ab}.weight"
            for i in range(2)
            for p in projections
            for ab in "AB"
        ),
    }
    names = ["adapter_config.json", "adapter_model.safetensors", "futurebridge.json"]
    assert sorted(path.name for path in folder.iterdir()) == names


@pytest.mark.parametrize("family", FAMILIES)
def test_model_itself_stays_bit_identical(family):
    model = tiny(family)
    ids = state(2)[0][None]
    keys, flags = list(model.state_dict()), [p.requires_grad for p in model.parameters()]
    before = model(input_ids=ids).logits
    reranker = randomise(TokenReranker.from_base(model, rank=4))
    reranker.train()
    reranker.scores(*state(2)).sum().backward()
    assert torch.equal(model(input_ids=ids).logits, before)
    assert list(model.state_dict()) == keys
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert not model.training


def test_weights_are_shared_and_only_adapter_and_head_train():
    model = tiny("qwen3")
    reranker = TokenReranker.from_base(model)
    ours = {p.data_ptr() for p in reranker.adapted.parameters() if not p.requires_grad}
    assert ours == {p.data_ptr() for p in model.parameters()}
    trained = [name for name, p in reranker.named_parameters() if p.requires_grad]
    assert all("lora_" in name or name == "head" for name in trained)
    prefix, candidates = state()
    assert torch.equal(reranker.scores(prefix, candidates), torch.zeros(len(candidates)))  # the head starts at zero


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_and_batched_prefixes_give_the_same_scores(family):
    model = tiny(family, sliding_window=4) if family in ("mistral", "phi3") else tiny(family)
    reranker = randomise(TokenReranker.from_base(model, rank=4))
    states = [state(seed, p, k) for seed, p, k in ((0, 7, 3), (1, 4, 6), (2, 9, 1))]
    with torch.no_grad():
        expected = [reranker.scores(*pair) for pair in states]
        for (prefix, candidates), want in zip(states, expected, strict=True):
            cache = Cache()
            model(input_ids=prefix[None], past_key_values=cache, use_cache=True)
            torch.testing.assert_close(reranker.scores(prefix, candidates, cache=cache), want, rtol=1e-5, atol=1e-5)
            assert cache.get_seq_length() == len(prefix)
        width = max(len(prefix) for prefix, _ in states)  # left-padded batch
        pads = [width - len(prefix) for prefix, _ in states]
        ids = torch.stack(
            [torch.cat([torch.zeros(n).long(), prefix]) for n, (prefix, _) in zip(pads, states, strict=True)]
        )
        mask = torch.stack([torch.arange(width) >= n for n in pads]).long()
        cache = Cache()
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        kv = PrefixKV.from_cache(cache, model)
        prefixes = [
            Prefix(kv, n, len(prefix), (row,)) for row, (n, (prefix, _)) in enumerate(zip(pads, states, strict=True))
        ]
        many = reranker.scores_many(prefixes, [candidates for _, candidates in states])
    for got, want in zip(many, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scope", ["candidate", "sequence"])
def test_round_trip(scope, tmp_path):
    model = tiny("qwen3")
    reranker = randomise(TokenReranker.from_base(model, rank=3, alpha=5, scope=scope))
    reranker.save_pretrained(tmp_path)
    own = reranker.scores(*state())
    assert torch.equal(TokenReranker.from_pretrained(tmp_path, model, scope=scope).scores(*state()), own)
    scopes = {"candidate": "sequence", "sequence": "candidate"}
    other = randomise(TokenReranker.from_base(model, rank=3, alpha=5, scope=scopes[scope]))
    assert (other.scores(*state()) - own).abs().max() > 1e-2
    with pytest.raises(ValueError, match="scope:"):
        TokenReranker.from_pretrained(tmp_path, model, scope=scopes[scope])


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_merged_weights_give_the_adapted_token(family):
    """A full forward with merged weights equals scope "sequence", which has the adapter everywhere."""
    reranker = randomise(TokenReranker.from_base(tiny(family), rank=4, scope="sequence"))
    merged = reranker.merged()
    assert len(merged) == (8 if family == "qwen3" else 4)
    plain = tiny(family)
    with torch.no_grad():
        for name, weight in merged.items():
            plain.get_submodule(f"model.{name}").weight.copy_(weight)
        prefix, candidates = state()
        rows = torch.cat([prefix.expand(len(candidates), -1), candidates[:, None]], 1)
        hidden = plain.model(input_ids=rows).last_hidden_state[:, -1]
        torch.testing.assert_close(reranker.scores(prefix, candidates), hidden @ reranker.head, rtol=1e-4, atol=1e-4)


def test_training_mode_reaches_only_the_adapters_dropout():
    reranker = randomise(TokenReranker.from_base(tiny("qwen3"), dropout=0.5)).train()
    training = [name for name, layer in reranker.adapted.named_modules() if layer.training]
    assert training
    assert all("lora_dropout" in name for name in training)
    a, b = reranker.scores(*state()), reranker.scores(*state())
    assert not torch.equal(a, b)
    reranker.eval()
    assert torch.equal(reranker.scores(*state()), reranker.scores(*state()))


def test_loading_the_wrong_thing_is_an_error(saved):
    model, folder = saved
    for other in (tiny("qwen3", seed=1), tiny("llama")):
        with pytest.raises(ValueError, match="base model"):
            TokenReranker.from_pretrained(folder, other)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    for name, change, back, words in (
        ("adapter_config.json", {"r": 8}, {"r": 4}, "rank"),
        ("futurebridge.json", {"format": 2}, {"format": 3}, r"futurebridge\.json: .*3, got 2"),
    ):
        edited(folder / name, **change)
        with pytest.raises(ValueError, match=words):
            TokenReranker.from_pretrained(folder, model)
        edited(folder / name, **back)
    assert TokenReranker.from_pretrained(folder, model) is not None
    del tensors["base_model.model.score.weight"]
    save_file(tensors, weights)
    with pytest.raises(ValueError, match=r"score\.weight"):
        TokenReranker.from_pretrained(folder, model)


def test_bad_input():
    model = tiny("qwen3")
    reranker = randomise(TokenReranker.from_base(model))
    for prefix, candidates, kind in (
        *(([], [1], ValueError), ([1], [], ValueError), ([1], [2, 2], ValueError), ([1], [V], ValueError)),
        *(([1] * 128, [2], ValueError), (torch.tensor([0.5]), [2], TypeError)),
    ):
        with pytest.raises(kind, match="expected"):
            reranker.scores(prefix, candidates)
    assert torch.isfinite(reranker.scores(*state())).all()
    for name, value in (("rank", 0), ("rank", 1.5), ("alpha", math.nan), ("dropout", 1.0), ("scope", "prefix")):
        with pytest.raises(ValueError, match=name):
            TokenReranker.from_base(model, **{name: value})


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("init_lora_weights", "olora"),  # PEFT would subtract from the base weights, shared with the frozen model
        *(("init_lora_weights", "pissa"), ("use_rslora", True), ("layers_to_transform", [0]), ("bias", "all")),
        ("megatron_config", {"a": 1}),  # and import the module named in megatron_core
        *(("alpha_pattern", {"q_proj": 64}), ("exclude_modules", "(a+)+$"), ("peft_type", "IA3")),
        ("r", 200_000_000),  # 25 GB, were it believed before the weights are read
        *(("r", value) for value in (-1, "16", 10**400, True)),
        *(("lora_alpha", value) for value in ("x", 1e300, 10**400, True, math.nan)),  # 1e300 is inf in float32
        *(("lora_dropout", value) for value in (2, 10**400, False)),
    ],
)
def test_hostile_adapter_config(entry, value, saved):
    model, folder = saved
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    edited(folder / "adapter_config.json", **{entry: value})
    with pytest.raises(ValueError, match="expected"):
        TokenReranker.from_pretrained(folder, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("key", ["lora_A", "lora_B", "score"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensor: tensor * float("nan"),
        lambda tensor: tensor - float("inf"),
        lambda tensor: tensor.int(),
        lambda tensor: tensor.double() + 1e300,  # inf in float32
    ],
    ids=["NaN", "inf", "int", "double"],
)
def test_weights_that_are_no_finite_floats_are_refused(spoil, key, saved):
    model, folder = saved
    file = folder / "adapter_model.safetensors"
    save_file({name: spoil(tensor) if key in name else tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=rf"adapter_model\.safetensors: .*{key}"):
        TokenReranker.from_pretrained(folder, model)


SPOILT = [
    *(b"", b"{"),
    b"[" * 100_000,
    *(b"[]", b"\xff\xfe"),
    b" " * (1 << 21),
    b"1" * 5_000,
    b'{"a": ' + b"1" * 5_000 + b"}",
]
SPOILT += [b"[" * 900 + b"]" * 900, b"null", b'{"scope": "candidate"}']
NO_WEIGHTS = [b"", b"\x80\x04K\x01.", b"\xff" * 64, (2**60).to_bytes(8, "little") + b"{}"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, content) for name in ("futurebridge.json", "adapter_config.json") for content in SPOILT),
        *(("adapter_model.safetensors", content) for content in NO_WEIGHTS),
    ],
)
def test_a_spoilt_file_is_named(name, content, saved):
    model, folder = saved
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{folder / name}: ")) as raised:
        TokenReranker.from_pretrained(folder, model)
    assert len(str(raised.value)) < 500


def test_a_rank_is_believed_only_where_the_weights_have_it(saved):
    model, folder = saved
    edited(folder / "adapter_config.json", r=1 << 40)
    file = folder / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "lora_A" not in name}
    empty = {name.replace("lora_B", "lora_A"): torch.empty(1 << 40, 0) for name in tensors if "lora_B" in name}
    for ranks, got in ((empty, r"\[1099511627776, 0\]"), ({}, "nothing")):
        save_file(tensors | ranks, file)
        with pytest.raises(ValueError, match=f"rank 1099511627776 .*got {got}"):
            TokenReranker.from_pretrained(folder, model)


@pytest.mark.parametrize("kind", ["device", "pipe", "large"])
def test_only_regular_files_of_some_bytes_are_read(kind, tmp_path):
    path, most = tmp_path / "file", 1_000
    {"device": lambda: path.symlink_to("/dev/zero"), "pipe": lambda: os.mkfifo(path), "large": lambda: None}[kind]()
    if kind == "large":
        path.write_bytes(bytes(most))
        assert read_file(path, most) == bytes(most)
        path.write_bytes(bytes(most + 1))
    with pytest.raises(ValueError, match=r"no regular file|more than 1000 bytes"):
        read_file(path, most)
    for read in (_read_json, _read_sealed, lambda path: settings_of(path.parent)):
        if kind != "large":
            path = path.rename(tmp_path / "settings.json")
            with pytest.raises(ValueError, match=r"settings\.json:"):
                read(path)


def test_a_folder_without_an_adapter_is_named_as_such(tmp_path):
    model = tiny("qwen3")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for place in ("absent", "absent/deeper", "file", "empty"):
        with pytest.raises(ValueError, match=re.escape(f"{tmp_path / place}: expected the folder of an adapter")) as no:
            TokenReranker.from_pretrained(tmp_path / place, model)
        assert "save the adapter again" not in str(no.value)


def test_what_is_no_base_is_refused():
    """Adapters in it would train with the reranker's, through the shared storage."""
    wrapped = get_peft_model(tiny("qwen3"), LoraConfig(target_modules=["q_proj"])).get_base_model()
    for model, words in ((wrapped, "plain base model"), (zoo.build("gpt2"), "linear layers.*Conv1D")):
        with pytest.raises(ValueError, match=words):
            TokenReranker.from_base(model)


def test_moving_or_casting_apart_from_the_model_is_refused():
    reranker = randomise(TokenReranker.from_base(tiny("qwen3")))
    expected = reranker.scores(*state())
    for move in (lambda: reranker.to(torch.bfloat16), reranker.half, reranker.double):
        with pytest.raises(ValueError, match="expected to stay"):
            move()
    assert torch.equal(reranker.to("cpu").float().scores(*state()), expected)


@pytest.mark.parametrize(
    ("kind", "within", "layers"),
    [
        ("opt", "model.decoder.layers", {"q_proj", "k_proj", "v_proj", "out_proj"}),
        ("phi", "model.layers", {"q_proj", "k_proj", "v_proj", "dense"}),
        ("gpt_neox", "gpt_neox.layers", {"query_key_value", "dense"}),
        ("gemma3", "model.language_model.layers", {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_the_adapter_is_on_every_projection_of_the_decoders_attention(kind, within, layers):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
    if kind == "gemma3":
        text = {**sizes, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": V, "query_pre_attn_scalar": 8}
        vision = {**sizes, "image_size": 28, "patch_size": 14}
        model = AutoModelForCausalLM.from_config(Gemma3Config(text_config=text, vision_config=vision)).eval()
    else:
        model = zoo.build(kind)
    reranker = TokenReranker.from_base(model)
    adapted = [name for name, layer in reranker.adapted.base_model.model.named_modules() if hasattr(layer, "lora_A")]
    adapted = [name for name in adapted if not name.endswith(("lora_A", "lora_B"))]
    assert all(name.startswith(within) for name in adapted)
    assert {name.rpartition(".")[2] for name in adapted} == layers
    assert len(adapted) == len(layers) * text_config(model).num_hidden_layers
