"""The native decoder against the model's own modules: what it computes, when it runs, and what packing leaves alone."""

from __future__ import annotations

import copy
import gc
import math
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file, save_model
from tiny import FAMILIES, V, tiny
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM, Qwen3Model

from fb_core import BranchGroup, CompatibilityScorer, RequestPolicy, TokenReranker
from fb_core.decode.decoder import LowLatencyDecoder
from fb_core.models import native as native_module
from fb_core.models import packed as packing
from fb_core.models.facts import Cache, causal_lm, share_weights
from fb_core.models.native import Layer, NativeDecoder
from fb_core.models.packed import Layout, forward_through_modules, packed_forward, prefill_packed
from fb_kernels.testing import _watch, assert_close_to_reference, count_launches, count_syncs

NATIVE = ("qwen3", "qwen2", "llama", "mistral", "mixtral", "qwen3_moe")
GROUPS = [([9], 0, 0), ([3, 3], 0, 4), ([1, 2, 5], 0, 9), ([7], 0, 0), ([4], 26, 7), ([0, 2], 3, 0)]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
VARIANTS = [
    *((family, {}) for family in NATIVE),
    ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3", {"use_sliding_window": False, "sliding_window": 4}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    ("mistral", {"sliding_window": 3}),
    ("mistral", {"head_dim": 16, "hidden_act": "swish"}),
    ("mixtral", {"sliding_window": 3, "num_experts_per_tok": 1}),
    ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 5, "use_sliding_window": True, "sliding_window": 4}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    ("llama", {"rope_parameters": LLAMA3}),
]


def packed(groups=GROUPS, seed=0, **options):
    """(ids, positions, layout) of random rows; positions as the groups' prefixes say."""
    lengths = [(length, prefix) for branches, _, prefix in groups for length in branches]
    positions = torch.cat([torch.arange(prefix, prefix + length) for length, prefix in lengths])
    ids = torch.randint(V, positions.shape, generator=torch.Generator().manual_seed(seed))
    return ids, positions, Layout.build(groups, torch.device("cpu"), **options)


@torch.no_grad()
def native(model, ids, positions, layout, rows=None):
    found = NativeDecoder.of(model)
    assert found is not None
    return found.forward(ids, positions, layout.attend, rows)


@torch.no_grad()
def modules(model, ids, positions, layout):
    return forward_through_modules(model, ids, positions, layout)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_equals_the_modules(family, overrides):
    model = tiny(family, **overrides)
    expected = modules(model, *packed())
    got = native(model, *packed())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().amax()))
    exact = native(copy.deepcopy(model).double(), *packed())  # the modules norm in float32 whatever the dtype
    assert exact.dtype == torch.float64
    assert_close_to_reference(got, exact, expected)


ALL = {"num_experts_per_tok": 5}  # else rounding changes which experts run


@pytest.mark.parametrize(("family", "overrides"), [*VARIANTS[:4], ("mixtral", ALL), ("qwen3_moe", ALL)])
def test_bfloat16_is_as_good_as_the_modules(family, overrides):
    model = tiny(family, **overrides).bfloat16()
    exact = modules(copy.deepcopy(model).double(), *packed())
    assert_close_to_reference(native(model, *packed()), exact, modules(model, *packed()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_of_experts_are_those_of_each(dtype):
    layer = NativeDecoder.of(tiny("mixtral", hidden_size=64, intermediate_size=96).to(dtype)).layers[0]
    x = torch.randn(37, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    for ends in ([0, 4, 4, 30, 37], [37, 37, 37, 37, 37], [0, 0, 0, 0, 37]):
        with torch.no_grad():
            each, grouped = (run(x, torch.tensor(ends)) for run in (layer.mlp._each, layer.mlp._grouped))
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(grouped, each, rtol=tolerance, atol=tolerance * float(each.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_rows_change_nothing(monkeypatch, dtype):
    model = tiny("qwen3", num_hidden_layers=3).to(dtype)
    whole = native(model, *packed())
    monkeypatch.setattr("fb_core.models.native.CPU_ROWS", 5)
    blocks = native(model, *packed())
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(blocks, whole, rtol=tolerance, atol=tolerance * float(whole.abs().amax()))


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_rows_are_those_of_all(family):
    model = tiny(family)
    rows = torch.tensor([5, 0, 14, 5])
    with torch.no_grad():
        whole = packed_forward(model, *packed())
        torch.testing.assert_close(packed_forward(model, *packed(), rows), whole[rows], rtol=1e-5, atol=1e-5)
        assert packed_forward(model, *packed(), rows[:0]).shape == (0, 32)


def test_captured_keys_and_values_are_the_modules_own():
    model = tiny("qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    sequences = [torch.randint(V, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 1, 8)]
    prefixes = prefill_packed(model, sequences)
    for keys, values in prefixes[0].kv.layers.values():
        for kept in (keys, values):  # nothing else is kept alive with them
            assert kept.untyped_storage().nbytes() == kept.nbytes == 14 * 2 * 8 * 4
    for prefix, sequence in zip(prefixes, sequences, strict=True):
        cache = Cache()
        with torch.no_grad():
            model(sequence[None], past_key_values=cache)
        part = slice(prefix.start, prefix.start + prefix.length)
        for (keys, values), layer in zip(prefix.kv.layers.values(), cache.layers, strict=True):
            torch.testing.assert_close(keys[part], layer.keys[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(values[part], layer.values[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


# --- when it runs -----------------------------------------------------------------------------------------------------


def ways(monkeypatch):
    """A list that gets "modules" for every packed forward through the model's modules."""
    seen = []
    plain = forward_through_modules
    monkeypatch.setattr(packing, "forward_through_modules", lambda *a: seen.append("modules") or plain(*a))
    return seen


def replaced_forward(model):
    model.model.layers[1].mlp.forward = model.model.layers[1].mlp.forward


def own_class(model):
    class Own(Qwen3Model):
        pass

    model.model.__class__ = Own


def own_linear(model):
    class Own(nn.Linear):
        pass

    model.model.layers[0].mlp.up_proj.__class__ = Own


def common_parameter(model):
    model.model.layers[1].self_attn.k_proj.weight = model.model.layers[0].self_attn.k_proj.weight


def twice_in_a_row(model):
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[1].mlp.gate_proj.weight


def missing_bias(model):
    model.model.layers[0].self_attn.q_proj.bias = nn.Parameter(torch.ones(32))


def other_parameter(model):
    class Own(nn.Parameter):
        pass

    weight = model.model.layers[0].mlp.down_proj.weight
    model.model.layers[0].mlp.down_proj.weight = Own(weight.data)


CHANGES = {
    "a hook": lambda model: model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None),
    "a pre-hook": lambda model: model.model.norm.register_forward_pre_hook(lambda *_: None),
    "another forward": replaced_forward,
    "another decoder class": own_class,
    "another linear layer": own_linear,
    "another parameter class": other_parameter,
    "another activation": lambda model: setattr(model.model.layers[1].mlp, "act_fn", nn.GELU()),
    "layers with one parameter": common_parameter,
    "one parameter twice": twice_in_a_row,
    "a bias on q alone": missing_bias,
    "two epsilons": lambda model: setattr(model.model.layers[0].self_attn.k_norm, "variance_epsilon", 1e-3),
    "a decoder that other processes see": lambda model: model.model.layers[0].self_attn.share_memory(),
}


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_exactly_the_family_goes_through_its_modules(change, read, monkeypatch):
    model = tiny("qwen3")
    if read:
        assert NativeDecoder.of(model) is NativeDecoder.of(model)
    CHANGES[change](model)
    before = {name: value.data_ptr() for name, value in model.model.layers[0].self_attn.named_parameters()}
    assert NativeDecoder.of(model) is None
    seen = ways(monkeypatch)
    with torch.no_grad():
        got = packed_forward(model, *packed())
    assert seen == ["modules"]
    assert torch.equal(got, modules(model, *packed()))
    assert before == {name: value.data_ptr() for name, value in model.model.layers[0].self_attn.named_parameters()}


def everywhere(name, value):
    def change(model):
        for module in model.modules():
            if hasattr(module, name):
                setattr(module, name, value)

    return change


LATER = {
    "another scale": everywhere("scaling", 0.9),
    "a window": everywhere("sliding_window", 2),
    "another epsilon": everywhere("variance_epsilon", 0.3),
    "fewer layers": lambda model: setattr(model.config, "num_hidden_layers", 1),
    "another dtype": lambda model: model.double(),
    "memory of its own": lambda model: setattr(model.model.layers[1].mlp.down_proj.weight, "data", torch.ones(32, 48)),
    "another module": lambda model: setattr(model.model, "norm", copy.deepcopy(model.model.layers[0].input_layernorm)),
    "a module of its own": lambda model: setattr(model.model.layers[0], "whole", model.model),
}


@pytest.mark.parametrize("change", LATER)
def test_what_changes_after_a_reading_takes_effect(change):
    model = tiny("qwen2")
    model.model.layers[0].input_layernorm.weight.data.fill_(2.0)
    before = native(model, *packed())
    LATER[change](model)
    after = native(model, *packed())
    assert torch.equal(before, after) == (change == "a module of its own")
    assert torch.equal(after, native(copy.deepcopy(model), *packed()))  # of which nothing was read


def test_a_hook_in_the_place_of_one_that_does_nothing_counts():
    model = tiny("qwen3")
    with torch.no_grad():
        model(torch.tensor([[1, 2]]), output_hidden_states=True)
    assert NativeDecoder.of(model) is not None
    for layer in model.model.layers:
        if layer._forward_hooks:
            layer._forward_hooks.clear()
            layer.register_forward_hook(lambda *_: None)
    assert NativeDecoder.of(model) is None


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(NATIVE)))
def test_other_families_have_none(family):
    assert NativeDecoder.of(tiny(family)) is None


def test_a_norm_in_another_dtype_goes_through_the_modules():
    model = tiny("llama").bfloat16()
    model.model.norm.float()
    assert NativeDecoder.of(model) is None


def test_rope_that_depends_on_the_length_has_none():
    assert (
        NativeDecoder.of(tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}))
        is None
    )


def test_active_attention_dropout_is_refused_and_inactive_is_not():
    model = tiny("qwen3", attention_dropout=0.5)
    expected = native(model, *packed())
    model.train()
    with torch.no_grad(), pytest.raises(ValueError, match="attention dropout"):
        packed_forward(model, *packed())
    assert torch.equal(native(model.eval(), *packed()), expected)


def test_gradients_and_autocast_go_through_the_modules(monkeypatch):
    model = tiny("qwen3")
    seen = ways(monkeypatch)
    with torch.no_grad():
        packed_forward(model, *packed())
        assert seen == []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            packed_forward(model, *packed())
        assert len(seen) == 1
    packed_forward(model, *packed()).sum().backward()
    assert len(seen) == 2
    assert all(parameter.grad is not None for parameter in model.model.parameters())


def test_hooks_that_transformers_leaves_behind_do_not_count():
    model = tiny("qwen3")
    with torch.no_grad():
        model(torch.tensor([[1, 2]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    expected = modules(model, *packed())
    torch.testing.assert_close(native(model, *packed()), expected, rtol=1e-5, atol=1e-5)


def test_scorer_prefill_and_its_reranker_run_natively(monkeypatch):
    model = tiny("qwen3")
    seen = ways(monkeypatch)
    scorer = CompatibilityScorer(model)
    scorer.score_trajectory([1, 2, 3], [BranchGroup(2, torch.tensor([4, 5]), torch.tensor([6, 7]))])
    assert seen == []
    reranker = TokenReranker.from_base(model)
    assert seen == ["modules"]  # which finds the projections of attention
    prefill_packed(model, [torch.tensor([1, 2, 3])])
    assert seen == ["modules"]
    reranker.scores([1, 2, 3], [4, 5]).sum().backward()
    assert seen == ["modules"]


# --- packing ----------------------------------------------------------------------------------------------------------


def storages(*models):
    """Bytes of every storage that the models' parameters lie in."""
    found = {}
    for model in models:
        for parameter in model.parameters():
            storage = parameter.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def addresses(model):
    return [parameter.data_ptr() for parameter in model.parameters()]


@pytest.mark.parametrize("family", NATIVE)
def test_packing_makes_no_second_copy_and_changes_no_value(family):
    model = tiny(family)
    ids = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    size, logits = sum(storages(model).values()), model(ids).logits
    NativeDecoder.of(model)
    assert sum(storages(model).values()) == size
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in model.parameters())
    assert len(storages(model)) == len(parameters)  # each has its own, whatever it is adjacent to
    assert parameters == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model(ids).logits, logits)
    after = addresses(model)
    with count_launches() as launches:
        NativeDecoder.of(model)
    assert launches.total == 0
    CompatibilityScorer(model)
    assert addresses(model) == after


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_of_a_decode_step_move_into_huge_pages_and_leave_nothing_behind(monkeypatch):
    def memory(kind):
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return 1024 * int(status[kind].split()[0])

    def huge(tensor):
        ranges = re.findall(r"(?ms)^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", smaps.read_text())
        (flags,) = (flags for low, high, flags in ranges if int(low, 16) <= tensor.data_ptr() < int(high, 16))
        return "hg" in flags.split()

    smaps = Path("/proc/self/smaps")
    model = tiny("llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=12, tie_word_embeddings=False)
    monkeypatch.setattr(native_module, "UNTRIMMED", 4 << 20)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    size, before, least = sum(storages(model).values()), memory("RssAnon"), memory("VmRSS")
    decoder = NativeDecoder.of(model)
    assert abs(memory("RssAnon") - before) < size / 4
    assert memory("VmHWM") - least < size / 2
    read = [
        model.lm_head.weight,
        *(x for layer in decoder.layers for x in (layer.qkv[0], layer.o[0], layer.mlp.down[0])),
    ]
    assert all(map(huge, read))
    assert not huge(model.model.embed_tokens.weight)
    copy, kept = share_weights(model), addresses(model)
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(torch.randn(1024, 256))
    NativeDecoder.of(model)
    moved = [name for (name, x), y in zip(model.named_parameters(), kept, strict=True) if x.data_ptr() != y]
    assert moved == ["model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"]  # the copy follows
    assert addresses(copy) == kept


def test_packed_weights_are_saved_and_copied_as_before(tmp_path):
    model = tiny("qwen2", tie_word_embeddings=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = native(model, *packed())
    model.save_pretrained(tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert torch.equal(native(loaded, *packed()), expected)
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, str(tmp_path))
    save_model(model, tmp_path / "whole.safetensors")
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    for file in ("model", "whole", "plain", "hf/model"):
        read = load_file(tmp_path / f"{file}.safetensors")
        assert read.keys() == before.keys()
        assert all(torch.equal(read[name], value) for name, value in before.items())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size < 1.5 * sum(storages(model).values())  # no part drags its whole along
    prepared = accelerator.prepare(model)
    accelerator.save_state(str(tmp_path / "state"))
    with torch.no_grad():
        prepared.model.layers[0].self_attn.k_proj.weight.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(native(model, *packed()), expected)
    twin = copy.deepcopy(model)
    assert sum(storages(model, twin).values()) == 2 * sum(storages(model).values())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(native(model, *packed()), expected)


def test_packed_memory_is_freed_with_the_last_parameter_in_it():
    model = tiny("llama")
    wholes = [StorageWeakRef(layer.qkv.weight.untyped_storage()) for layer in NativeDecoder.of(model).layers]
    twin = share_weights(model)
    del model.model.layers[0]
    model.bfloat16()
    gc.collect()
    assert not any(whole.expired() for whole in wholes)
    del twin
    gc.collect()
    assert all(whole.expired() for whole in wholes)


def test_weight_sharing_copies_share_packed_weights():
    model = tiny("qwen3")
    size = sum(storages(model).values())
    early = share_weights(model)  # before any forward
    expected = native(model, *packed())
    late = share_weights(model)
    assert sum(storages(model, early, late).values()) == size
    for twin in (early, late):
        assert torch.equal(native(twin, *packed()), expected)
    assert sum(storages(model, early, late).values()) == size
    reranker = TokenReranker.from_base(model)
    base = [parameter for name, parameter in reranker.adapted.named_parameters() if "lora_" not in name]
    assert {parameter.untyped_storage().data_ptr() for parameter in base} <= storages(model).keys()
    assert NativeDecoder.of(causal_lm(reranker.adapted)) is None
    assert torch.equal(native(model, *packed()), expected)


def test_what_is_done_to_the_model_counts_at_once():
    model = tiny("qwen3")
    scorer = CompatibilityScorer(model)

    def check(tolerance=1e-5):
        torch.testing.assert_close(
            native(model, *packed()), modules(model, *packed()), rtol=tolerance, atol=tolerance * 8
        )
        return native(model, *packed())

    first = check()
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(2)  # in place
    second = check()
    assert not torch.allclose(first, second, atol=1e-3)
    other = {name: value.clone() for name, value in tiny("qwen3", seed=5).state_dict().items()}
    model.load_state_dict(other)
    third = check()
    assert not torch.allclose(second, third, atol=1e-3)
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(torch.randn(48, 32) / 4)
    assert not torch.allclose(third, check(), atol=1e-3)
    model.load_state_dict(other, assign=True)
    torch.testing.assert_close(check(), third, rtol=1e-5, atol=1e-5)
    size = sum(storages(model).values())
    model.to(torch.float64)  # tears the packed storage apart
    assert native(model, *packed()).dtype == torch.float64
    assert sum(storages(model).values()) == 2 * size
    check()
    model.bfloat16()
    check(0.1)
    assert sum(storages(model).values()) == size // 2
    scorer.score([1, 2, 3], [4, 5], [6])


def test_packed_in_inference_mode_it_still_trains():
    model = tiny("llama")
    with torch.inference_mode():
        CompatibilityScorer(model).score([1, 2, 3], [4, 5], [6])
    assert not any(parameter.is_inference() for parameter in model.parameters())
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    before = native(model, *packed())
    optimizer.step()
    assert not torch.equal(native(model, *packed()), before)


def test_a_model_made_in_inference_mode_goes_through_its_modules():
    with torch.inference_mode():
        model = tiny("llama")
        CompatibilityScorer(model).score([1, 2, 3], [4, 5], [6])
    assert NativeDecoder.of(model) is None


def test_threads_pack_once_and_see_one_model():
    for seed in range(3):
        model = tiny("qwen3", seed=seed, num_hidden_layers=4)
        size, expected = sum(storages(model).values()), modules(model, *packed())
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _, model=model: native(model, *packed()), range(16)))
        assert all(torch.equal(states, found[0]) for states in found)
        torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
        assert sum(storages(model).values()) == size


# --- what it costs ----------------------------------------------------------------------------------------------------


def launches_a_layer(run, family="qwen3", **overrides):
    """What one more layer adds."""
    totals = []
    for layers in (2, 3):
        model = tiny(family, num_hidden_layers=layers, **overrides)
        run(model, *packed())
        arguments = packed()
        with count_launches() as launches:
            run(model, *arguments)
        totals.append(launches.by_op)
    return totals[1] - totals[0]


@pytest.mark.parametrize("family", NATIVE[:4])
def test_eight_operations_a_layer(family):
    ours = launches_a_layer(native, family)
    assert ours == {"fb::rms_norm": 2, "fb::qk_norm_rope": 1, "fb::branch_attention": 1, "fb::skinny_linear": 4}
    assert launches_a_layer(modules, family).total() >= 3 * 9


def test_rows_are_read_and_written_a_few_times_a_layer():
    """In units of [T, D], without attention, as wide as Qwen3-1.7B; a meta device stands for a GPU.

    A tensor counts for every operation that takes or gives it. On a CPU they are 21 beside the products, and 37.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4}
    own = vars(NativeDecoder.of(tiny("qwen3", **sizes)).layers[0])
    layer = Layer(**tree_map_only(torch.Tensor, lambda x: x.to("meta"), own))
    x, table, units = torch.zeros(256, 64, device="meta"), torch.zeros(9, 8, device="meta"), Counter()

    def see(func, args, out, inside):
        if not (inside or func.is_view or "empty" in func.__name__):
            rows = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor) and x.shape[:1] == (256,)]
            units["mm" in func.__name__ or "linear" in func.__name__] += sum(x.numel() for x in rows) / 256 / 64

    positions = torch.zeros(256, dtype=torch.long, device="meta")
    with torch.no_grad(), _watch(see):
        layer.before_attention(*layer.after_attention(x.view(256, 8, 8), x + 1), positions, table, table)
    assert units[False] - 2 <= 16.1  # x + 1 is the test's, and positions are narrow
    assert units.total() - 2 <= 34.1


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "mixtral"])
def test_a_residual_in_place_is_what_the_modules_compute(family, monkeypatch):
    """As on a GPU; also over pages."""
    model = tiny(family)
    fast = LowLatencyDecoder(model, None, None, RequestPolicy(math.inf), max_events=0, max_length=64)
    before = fast.generate(torch.arange(3, 20), 6).token_ids
    monkeypatch.setattr("fb_core.models.native.IN_PLACE", ("cpu",))
    monkeypatch.setattr("fb_core.models.native.FEW", 0)
    test_equals_the_modules(family, {})
    test_captured_keys_and_values_are_the_modules_own()
    assert torch.equal(fast.generate(torch.arange(3, 20), 6).token_ids, before)


def test_no_syncs():
    model = tiny("qwen3")
    arguments = packed()
    native(model, *arguments)
    with count_syncs() as syncs:
        native(model, *arguments, torch.tensor([1, 5]))
    assert syncs.total == 0, syncs.by_op


def test_a_wrapper_class_keeps_the_native_decoder():
    class Own(Qwen3ForCausalLM):
        pass

    model = tiny("qwen3")
    model.__class__ = Own
    assert NativeDecoder.of(model) is not None
