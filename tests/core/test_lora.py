"""LoRA in the native decoder: launches, values and gradients of the modules, equal bits, what goes to the modules."""

from __future__ import annotations

import copy
from functools import partial

import peft
import pytest
import torch
from test_decoder import packed, ways
from tiny import tiny
from torch import nn

from fb_core import TokenReranker, shared_prefix_logprobs
from fb_core.models.native import NativeDecoder
from fb_core.models.packed import forward_through_modules, packed_forward
from fb_core.rerank.reranker import CandidateRows, prefill_packed
from fb_kernels.testing import assert_close_to_reference, count_launches

read = partial(NativeDecoder.of, adapted=True)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def adapted(family="qwen3", dtype=torch.float32, **settings):
    """A causal LM with LoRA of which every entry matters; by default on the attention's projections."""
    config = {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION, "init_lora_weights": False} | settings
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(tiny(family).to(dtype), peft.LoraConfig(**config)).get_base_model()


def layers(model):
    return [layer for layer in model.modules() if hasattr(layer, "lora_A")]


def learned(model, run, *leaves):
    """[hidden states, gradients to all that learns and the leaves] of a random loss; dropout draws from one seed."""
    leaves += tuple(x for x in model.parameters() if x.requires_grad)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        hidden = run(model, *packed())
    loss = hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    return [hidden.detach(), *torch.autograd.grad(loss.sum(), leaves, materialize_grads=True)]


@pytest.mark.parametrize(("dropout", "most"), [(0.0, 39), (0.05, 54)])
def test_a_layer_that_trains_has_few_launches(dropout, most):
    """What one more layer adds to a reranker's forward and backward pass: 176, with dropout 184, by the modules.

    Views and allocations are not counted, an op of ours is one, and so is dropout, which is three on a CPU.
    """
    totals = []
    for count in (2, 3):
        model = tiny("qwen3", num_hidden_layers=count)
        reranker = TokenReranker.from_base(model, rank=4, dropout=dropout).train()
        rows = CandidateRows.of(prefill_packed(model, [torch.arange(3, 15)]), [torch.tensor([4, 5, 6])])
        leaves = [x for x in reranker.parameters() if x.requires_grad]
        with count_launches() as launches:
            torch.autograd.grad(reranker.packed_scores(rows).sum(), leaves)
        totals.append(launches.by_op)
    added = totals[1] - totals[0]
    assert added.total() - 2 * added["aten::bernoulli_"] <= most


def another(model):
    """A second adapter, of another rank, is active too."""
    model.add_adapter(peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"], init_lora_weights=False), "b")
    for layer in layers(model):
        layer.set_adapter(["default", "b"])


CHANGES = [lambda _: None, another, lambda model: layers(model)[0].merge()]
CHANGES.append(lambda model: [layer.enable_adapters(False) for layer in layers(model)[1:]])
KINDS = {
    "attention": {},
    "some": {"target_modules": ["v_proj", "gate_proj", "down_proj"], "layers_to_transform": [1]},
    "scaled": {"use_rslora": True, "rank_pattern": {"k_proj": 7}, "alpha_pattern": {"v_proj": 3}},
    "dropout": {"lora_dropout": 0.3, "target_modules": "all-linear"},
}


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_values_and_gradients_are_the_modules(family, kind, change, monkeypatch):
    model = adapted(family, **KINDS[kind])
    change(model)
    for module in model.modules():
        module.train(isinstance(module, nn.Dropout))
    theirs, seen = learned(model, forward_through_modules), ways(monkeypatch)
    for ours, wanted in zip(learned(model, packed_forward), theirs, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))
    assert seen == []


def test_hidden_states_have_the_modules_gradient():
    model = adapted()
    ids, positions, layout = packed()
    states = model.model.embed_tokens(ids).detach().requires_grad_()
    decoder = read(model)
    object.__setattr__(decoder, "embedding", lambda _: states)
    ours = learned(model, lambda *_: decoder.forward(ids, positions, layout.attend), states)
    model.model.embed_tokens.register_forward_hook(lambda *_: states[None])
    for mine, wanted in zip(ours, learned(model, forward_through_modules, states), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("narrow", ["none", "", "v_proj.lora"])
def test_bfloat16_is_as_good_as_the_modules(narrow):
    model = adapted("qwen2", torch.bfloat16, target_modules="all-linear")
    for name, factor in model.named_parameters():  # those of an adapter are in float32
        factor.data = factor.data.bfloat16() if narrow in name else factor.data
    exact = learned(copy.deepcopy(model).double(), forward_through_modules)
    for found in zip(learned(model, packed_forward), exact, learned(model, forward_through_modules), strict=True):
        assert_close_to_reference(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [5, 512])
def test_a_training_forward_has_the_bits_of_a_scoring_forward(dtype, block, monkeypatch):
    monkeypatch.setattr("fb_core.models.native.CPU_ROWS", block)
    model = adapted(dtype=dtype, target_modules="all-linear")
    texts = [7, 8, 9, 10, 11], [[4, 5, 6, 9], [12], [5, 4, 3, 20, 21, 22]]
    trained = shared_prefix_logprobs(model, *texts)
    with torch.no_grad():
        scored = shared_prefix_logprobs(model, *texts)
    assert all(x.requires_grad and torch.equal(x, y) for x, y in zip(trained, scored, strict=True))


OTHERS = {
    "DoRA": {"use_dora": True},
    "a bias in LoRA": {"lora_bias": True},
    "an embedding's LoRA": {"target_modules": [*ATTENTION, "embed_tokens"]},
    "a hook on a factor": lambda model: layers(model)[1].lora_A["default"].register_forward_hook(lambda *_: None),
    "a hook on a layer": lambda model: layers(model)[3].register_forward_hook(lambda *_: None),
    "a hook on a gradient": lambda model: model.model.layers[1].mlp.register_full_backward_hook(lambda *_: None),
    "another dropout": lambda model: layers(model)[2].lora_dropout.update({"default": nn.Tanh()}),
    "a wide factor": lambda model: layers(model)[2].lora_A.double(),
    "merged where disabled": lambda model: (layers(model)[0].merge(), layers(model)[0].enable_adapters(False)),
    "another gradient": lambda model: model.model.norm.requires_grad_(True),
    "layers that are recomputed": lambda model: setattr(model.train().model.layers[1], "gradient_checkpointing", True),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_adapter_or_gradient_goes_through_the_modules(other):
    change = OTHERS[other]
    model = adapted(**(change if isinstance(change, dict) else {}))
    if not isinstance(change, dict):
        assert read(model)
        change(model)
    assert read(model) is None
    with torch.no_grad():
        assert (read(model) is not None) == (other in list(OTHERS)[-2:])


def test_experts_and_autocast_train_through_the_modules_and_pages_know_no_adapters(monkeypatch):
    seen = ways(monkeypatch)
    packed_forward(adapted("mixtral"), *packed())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        packed_forward(adapted(), *packed())
    assert len(seen) == 2
    assert (NativeDecoder.of(adapted()), NativeDecoder.fits(adapted())) == (None, False)
