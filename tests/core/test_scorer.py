"""CompatibilityScorer against full forwards, and what it refuses."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from support import full_forwards
from tiny import FAMILIES, V, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.utils.parametrize import register_parametrization
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    DogeConfig,
    DynamicCache,
    Gemma3Config,
    PhimoeConfig,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    StaticCache,
)

from fb_core import (
    BranchGroup,
    CollaborativeDecoder,
    CompatibilityScorer,
    FutureBridgeSelector,
    LocalLLM,
    LowLatencyDecoder,
    RequestPolicy,
    TokenReranker,
    shared_prefix_logprobs,
)
from fb_core.models.facts import Cache
from fb_core.models.tokens import check_group, many_token_ids, token_ids
from fb_core.score.scorer import token_budget
from fb_kernels.testing import count_launches, largest_tensor


def random_group(seed, p=9, k=4, h=6):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (p,), generator=g), torch.randperm(V, generator=g)[:k]
    return *ids, torch.randint(V, (h,), generator=g)


def close(mine, want):
    torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)


SHAPES = [(9, 4, 6), (1, 1, 1), (30, 13, 2), (3, 2, 20)]
VARIANTS = [
    *(("mistral", {"sliding_window": 3}), ("phi3", {"sliding_window": 4}), ("gemma2", {"sliding_window": 2})),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    ("llama", {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 4}),
    ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(
    ("family", "overrides", "shape"),
    [*((f, {}, shape) for f in FAMILIES for shape in SHAPES), *((*variant, (11, 3, 8)) for variant in VARIANTS)],
)
def test_score_equals_full_forwards_and_leaves_the_model_as_it_was(family, overrides, shape):
    model = tiny(family, **overrides)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    group = random_group(1, *shape)
    ours = CompatibilityScorer(model).score(*group)
    assert ours.dtype == torch.float32
    assert ours.shape == shape[1:]
    close(ours, full_forwards(model, *group))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.training


@given(data=st.data())
@settings(max_examples=15)
def test_trajectories_equal_single_groups(data):
    family = data.draw(st.sampled_from(FAMILIES))
    model = tiny(family)
    scorer = CompatibilityScorer(model)
    batch = []
    for _ in range(data.draw(st.integers(0, 3))):
        tokens, *_ = random_group(data.draw(st.integers(0, 99)), data.draw(st.integers(1, 14)))
        groups = []
        for seed in range(data.draw(st.integers(0, 3))):
            sizes = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
            groups.append(BranchGroup(data.draw(st.integers(1, len(tokens))), *random_group(seed, 1, *sizes)[1:]))
        batch.append((tokens, groups))
    packed = scorer.score_trajectories(batch, token_budget=data.draw(st.sampled_from([1, 40, 10_000])))
    for (tokens, groups), scores in zip(batch, packed, strict=True):
        for group, score in zip(groups, scores, strict=True):
            close(score, full_forwards(model, tokens[: group.position], group.candidates, group.future))


def work_of(sizes):
    """Trajectories with so many groups of two candidates each."""
    g = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(V, (9,), generator=g),
            [BranchGroup(3 + i, torch.tensor([4, 5]), torch.randint(V, (3,), generator=g)) for i in range(count)],
        )
        for count in sizes
    ]


def refused():
    """What torch raises where memory is not to be had."""
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as problem:
        return problem


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize("problem", [torch.OutOfMemoryError(), MemoryError(), refused(), RuntimeError("another")])
def test_a_pack_that_memory_refuses_is_halved(monkeypatch, most, problem):
    """Down to a single group; what fails for another reason, or alone, is an error."""
    scorer, work, taken, seen = CompatibilityScorer(tiny()), work_of([1, 3, 2]), [], []
    expected = scorer.score_trajectories(work, 1 << 20)
    forward = scorer._forward

    def limited(pack, **asked):
        groups = sum(len(each) for _, each in pack)
        seen.append(groups)
        if groups > most:
            raise problem
        taken.append(groups)
        return forward(pack, **asked)

    monkeypatch.setattr(scorer, "_forward", limited)
    if "another" in str(problem) or not most:
        with pytest.raises(type(problem)) as raised:
            scorer.score_trajectories(work, 1 << 20)
        assert raised.value is problem
        assert (len(seen) == 1) == ("another" in str(problem))
        return
    for mine, want in zip(scorer.score_trajectories(work, 1 << 20), expected, strict=True):
        torch.testing.assert_close(mine, want)
    assert taken == ([1] * 6 if most == 1 else [1, 1, 2, 2])


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # with a head_dim in the config, and without
@pytest.mark.parametrize(("free", "rows"), [(0, 1024), (40_000_000, 1990), (1 << 40, 65_536)])
def test_a_budget_is_of_half_the_free_memory(monkeypatch, family, free, rows):
    """A row of the tiny model: 4 (6 * 32 + 3 * 48 + 2 (4 + 2 * 2) 8) bytes of activations, 8,192 of the head."""
    monkeypatch.setattr("fb_core.score.scorer.free_memory", lambda device: free)
    assert token_budget(tiny(family)) == rows


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_given_cache_is_read_and_left(family):
    model = tiny(family, sliding_window=3) if family == "mistral" else tiny(family)
    group = random_group(3)
    cache = Cache()
    model(input_ids=group[0][None], past_key_values=cache, use_cache=True)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    close(CompatibilityScorer(model).score(*group, cache=cache), full_forwards(model, *group))
    assert cache.get_seq_length() == len(group[0])
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


def test_each_layer_runs_once_and_no_logits_exist():
    model, calls = tiny("qwen3", vocab_size=9001), []
    scorer = CompatibilityScorer(model)
    for layer in model.model.layers:
        layer.register_forward_hook(lambda layer, *_: calls.append(layer))
    groups = [BranchGroup(p, torch.arange(p, p + 5), torch.arange(30, 50)) for p in (20, 40, 60)]
    with largest_tensor() as largest:
        scorer.score_trajectory(torch.arange(60), groups)
    assert calls == list(model.model.layers)
    assert largest.numel < 3 * 5 * 20 * 9001


def test_bfloat16_is_as_good_as_plain_bfloat16():
    model = tiny("qwen3")
    prefix, candidates, future = random_group(4, 20, 6, 10)
    exact = full_forwards(model.double(), prefix, candidates, future).double()
    low = model.bfloat16()
    native = (full_forwards(low, prefix, candidates, future).double() - exact).abs()
    ours = (CompatibilityScorer(low).score(prefix, candidates, future).double() - exact).abs()
    assert ours.max() <= 2 * native.max() + 1e-2
    assert ours.square().mean().sqrt() <= 2 * native.square().mean().sqrt() + 1e-2


def test_attention_implementation_is_restored_after_success_and_failure():
    model, group = tiny("qwen3"), random_group(5)
    scorer, before = CompatibilityScorer(model), model.config._attn_implementation
    close(scorer.score(*group), full_forwards(model, *group))
    assert model.config._attn_implementation == before
    broken = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: (_ for _ in ()).throw(RuntimeError("broken layer"))
    with pytest.raises(RuntimeError, match="broken layer"):
        scorer.score(*group)
    assert model.config._attn_implementation == before
    model.model.layers[1].mlp.forward = broken
    close(scorer.score(*group), full_forwards(model, *group))


BAD = [
    *(({"prefix": []}, ValueError), ({"prefix": [-1]}, ValueError), ({"prefix": torch.zeros(2, 2).long()}, ValueError)),
    *(({"prefix": [0] * 130}, ValueError), ({"candidates": []}, ValueError), ({"candidates": [3, 4, 3]}, ValueError)),
    *(({"candidates": [3, V]}, ValueError), ({"candidates": torch.tensor([1], device="meta")}, ValueError)),
    *(({"future": []}, ValueError), ({"future": torch.tensor([0.5])}, TypeError)),
]


@pytest.mark.parametrize(("change", "kind"), BAD)
def test_bad_input_is_one_clear_sentence(change, kind):
    model = tiny("qwen3")
    scorer = CompatibilityScorer(model)
    good = dict(zip(("prefix", "candidates", "future"), random_group(7), strict=True))
    with count_launches() as launches, pytest.raises(kind, match=f"{next(iter(change))}.*; ") as caught:
        scorer.score(**{**good, **change})
    assert not any("mm" in name or "linear" in name for name in launches.by_op)  # work has not begun
    assert "\n" not in str(caught.value)
    close(scorer.score(**good), full_forwards(model, *good.values()))


def test_bad_arguments_of_other_calls():
    model = tiny("qwen3")
    cache = Cache()
    model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="cache: expected 4 tokens"):
        CompatibilityScorer(model).score(torch.tensor([1, 2, 3, 4]), [5], [6], cache=cache)
    with pytest.raises(ValueError, match="position"):
        CompatibilityScorer(model).score_trajectory([1, 2, 3], [BranchGroup(4, torch.tensor([1]), torch.tensor([2]))])
    for make in (CompatibilityScorer, LocalLLM):
        for value in (0, V + 1, -1, 4.0, "40", True):
            with pytest.raises(TypeError if isinstance(value, str | float | bool) else ValueError, match="valid_vocab"):
                make(model, valid_vocab=value)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        CompatibilityScorer(model)


def test_unsupported_models_are_refused_by_name():
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": V}
    encoder = {"vocab_size": V, "d_model": 32}
    encoder |= {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in BART.items()}
    own = {"layer_types": ["full_attention"] * 4, "attn_temperature_tuning": False}
    broken = tiny("phi3")
    broken.model.norm.forward = lambda hidden: hidden.absent
    for model, words in (
        (zoo.build("minimax"), "MiniMaxForCausalLM with 2 layers with a state, of which only 0"),
        (BartForConditionalGeneration(BartConfig(**encoder)), "BartForConditionalGeneration.*encoder"),
        (tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "Llama.*dynamic"),
        (BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=V)), "BloomForCausalLM"),
        (BertModel(BertConfig(**small, intermediate_size=32)), "BertModel with no LM head"),
        (zoo.build("llama4_text", **own), "Llama4ForCausalLM.*base_model"),
        (broken, "Phi3ForCausalLM with AttributeError"),
    ):
        with pytest.raises(ValueError, match=words):
            CompatibilityScorer(model.eval())
    with pytest.raises(TypeError, match="Linear"):
        CompatibilityScorer(torch.nn.Linear(2, 2))


BART = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}


def test_ids_that_the_tokenizer_does_not_know_get_no_probability():
    model, made = tiny("qwen3", vocab_size=64, tie_word_embeddings=False), Tokenizer(WordLevel({"a": 0, "b": V - 1}))
    with torch.no_grad():
        model.lm_head.weight[V:] *= 3
    prefix, rest = torch.arange(5, 15), torch.tensor([4, 9])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    found = CompatibilityScorer(model, tokenizer=tokenizer)
    with torch.no_grad():
        logits = model(torch.cat([prefix, rest])[None]).logits[0, 9:-1, :V]
    torch.testing.assert_close(found.logprobs(prefix, [rest])[0], logits.log_softmax(-1)[[0, 1], rest])
    assert found.valid_vocab == V
    assert CompatibilityScorer(model, tokenizer=tokenizer, valid_vocab=64).valid_vocab == 64
    assert CompatibilityScorer(tiny(vocab_size=30), tokenizer=tokenizer).valid_vocab == 30


GROUP = (torch.arange(5, 15), torch.tensor([3, 7, 21]), torch.tensor([4, 9, 30]))


def cache_of(model, tokens, cache=None):
    cache = DynamicCache() if cache is None else cache
    with torch.no_grad():
        model(torch.as_tensor(tokens).view(-1, len(GROUP[0])), past_key_values=cache, use_cache=True)
    return cache


def test_cache_that_is_not_this_prefix_alone_is_refused():
    model = tiny("qwen3")
    scorer = CompatibilityScorer(model)
    reranker = TokenReranker.from_base(model)
    prefix, candidates, _ = GROUP
    half = StaticCache(config=model.config, max_cache_len=len(prefix))
    with torch.no_grad():
        model(prefix[None, :7], past_key_values=half, use_cache=True)
    for cache, kind, words in (
        (half, ValueError, "7 in 10 slots"),
        (cache_of(model, torch.stack([prefix + 5, prefix])), ValueError, "one sequence, got 2"),
        (cache_of(tiny("qwen3", num_hidden_layers=3), prefix), ValueError, "2 layers, got those of 3"),
        (cache_of(tiny("qwen3").bfloat16(), prefix), ValueError, "torch.float32"),
        *((DynamicCache(), ValueError, "2 layers, got those of 0"), (((prefix, prefix),), TypeError, "tuple")),
    ):
        for call in (lambda c=cache: scorer.score(*GROUP, c), lambda c=cache: reranker.scores(prefix, candidates, c)):
            with pytest.raises(kind, match=words):
                call()
    expected = scorer.score(*GROUP)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=len(prefix))):
        got = scorer.score(*GROUP, cache_of(model, prefix, cache))  # keys as the model's own modules compute them
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma3n_text", {}),  # half of the layers use the keys of others
        ("glm4_moe_lite", {"v_head_dim": 16}),  # latents, and values of the keys' width or narrower
        ("deepseek_v3", {}),
    ],
)
def test_a_cache_that_layers_share_or_that_holds_latents_is_read(kind, settings):
    model, other = zoo.build(kind, **settings), tiny("llama", num_key_value_heads=4)
    scorer, cache = CompatibilityScorer(model), cache_of(model, GROUP[0])
    torch.testing.assert_close(scorer.score(*GROUP, cache), scorer.score(*GROUP), rtol=1e-4, atol=1e-4)
    copied = copy.deepcopy(model)  # a decoder's model need not be the reranker's own
    selector = FutureBridgeSelector(TokenReranker.from_base(model))
    decoder = CollaborativeDecoder(copied, None, selector, RequestPolicy(-math.inf), pool="slm", max_events=2)
    event = decoder.generate(GROUP[0], 3).events[0]
    wanted = selector.reranker.scores(GROUP[0], event.pool)
    torch.testing.assert_close(torch.tensor(event.scores), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=f"cache of {type(model).__name__}: expected (its|keys)"):
        scorer.score(*GROUP, cache_of(other, GROUP[0]))


def test_a_cache_of_heads_that_are_repeated_later_is_refused():
    model = zoo.build("jetmoe", kv_channels=8)
    scorer = CompatibilityScorer(model)
    expected = scorer.score(*GROUP)
    with pytest.raises(ValueError, match=r"\[\[4, 8\], \[4, 8\]\] in layer 0, got \[\[2, 8\], \[2, 8\]\]"):
        scorer.score(*GROUP, cache=cache_of(model, GROUP[0]))
    assert torch.equal(scorer.score(*GROUP), expected)
    with pytest.raises(ValueError, match="linear layers alone to project in attention, got JetMoe"):
        TokenReranker.from_base(model)


EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        (PhimoeConfig, {**EXPERTS, "sliding_window": 5}, "PhimoeForCausalLM:"),
        (Qwen2MoeConfig, {**EXPERTS, "layer_types": ["sliding_attention"] * 2, "sliding_window": 5}, "Qwen2Moe"),
        (DogeConfig, {}, "a mask of the model's own"),
    ],
)
def test_what_a_model_keeps_to_its_mask_is_refused(config, settings, words):
    """Short probes agree with plain forwards there; beyond the window, scores would silently be wrong."""
    sizes = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(config(**{**sizes, **heads, **settings})).eval()
    with pytest.raises(ValueError, match=words):
        CompatibilityScorer(model)


def test_active_dropout_is_refused():
    model = tiny("phi3", resid_pdrop=0.5)
    scorer = CompatibilityScorer(model)
    expected = scorer.score(*GROUP)
    model.train()
    for call in (lambda: scorer.score(*GROUP), lambda: CompatibilityScorer(model)):
        with pytest.raises(ValueError, match=r"dropout.*0.5 in .*eval"):
            call()
    model.eval()
    assert torch.equal(scorer.score(*GROUP), expected)


def test_parts_of_a_multimodal_model_keep_their_own_attention():
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    text |= {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "query_pre_attn_scalar": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    CompatibilityScorer(model).score(*GROUP)
    now = [part._attn_implementation for part in (config, config.text_config, config.vision_config)]
    assert now == ["sdpa", "eager", "sdpa"]
    model.draft = tiny("phi3")  # in no part of the configuration
    CompatibilityScorer(model).score(*GROUP)
    assert model.draft.config._attn_implementation == "sdpa"
    stacked = zoo.build("hrm_text")  # whose configuration takes an implementation by name alone
    torch.testing.assert_close(CompatibilityScorer(stacked).score(*GROUP), full_forwards(stacked, *GROUP))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        *(
            ("abc", "a text; encode it"),
            (b"abc", "a text; encode it"),
            ({"input_ids": [1]}, "dict; pass its input_ids"),
        ),
        *((None, "NoneType"), (5, "int"), ({1, 2}, "set"), (["a"], "'a' at place 0"), ([1, None], "None at place 1")),
        *((ids, "place 0; pass one sequence") for ids in ([[1, 2]], [[1, 2], [3]], [torch.tensor([1, 2])])),
        *(([torch.tensor([[1], [2]])], "place 0; pass one sequence"), ([1, 2**63], "at place 1, beyond int64")),
        *((ids, "token ids, got ") for ids in ([2**64], [-(2**63) - 1], [10**400])),
        *(([1.0], "1.0 at place 0"), ([True], "True at place 0"), ([torch.tensor(1.5)], "1.5 at place 0")),
        ([float("nan")], "nan at place 0"),
    ],
)
def test_what_is_no_list_of_ids_is_named(ids, words):
    with pytest.raises(TypeError, match=f"prefix: .*{words}") as raised:
        CompatibilityScorer(tiny("qwen3")).score(ids, [1], [2])
    assert len(str(raised.value)) < 200


def test_ids_and_positions_of_every_kind_of_whole_number_are_taken():
    prefix, candidates, future = GROUP
    scorer = CompatibilityScorer(tiny("qwen3"))
    expected = scorer.score(*GROUP)
    for same in (tuple(prefix.tolist()), iter(prefix), prefix.numpy(), list(prefix.numpy()), prefix.int()):
        assert torch.equal(scorer.score(same, candidates, future), expected)
    with pytest.raises(ValueError, match=r"prefix\[0\]"):
        scorer.score(prefix[None], candidates, future)
    for position in (10, torch.tensor(10), prefix.numpy()[5]):
        (got,) = scorer.score_trajectory(prefix, [BranchGroup(position, candidates, future)])
        assert torch.equal(got, expected)
    for position in (2.5, None):
        with pytest.raises(TypeError, match="position:"):
            scorer.score_trajectory(prefix, [BranchGroup(position, candidates, future)])


def test_threads_on_one_model_leave_it_as_it_was():
    model = tiny("qwen3")
    scorer = CompatibilityScorer(model)
    expected = scorer.score(*GROUP)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: scorer.score(*GROUP), range(24)))
    assert all(torch.equal(scores, expected) for scores in found)
    assert model.config._attn_implementation == "sdpa"


def test_autocast_leaves_packed_forwards_possible():
    scorer = CompatibilityScorer(tiny("qwen3"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close = scorer.score(*GROUP)
    assert torch.allclose(close, scorer.score(*GROUP), atol=0.3)


@pytest.mark.parametrize(("family", "bias"), [("qwen3", False), ("gemma2", False), ("phi3", False), ("llama", True)])
def test_padded_rows_of_the_vocabulary_never_count(family, bias):
    """The padding would take most of the probability, even all that is finite."""
    model, valid = tiny(family, vocab_size=64, tie_word_embeddings=False), 40
    head = model.get_output_embeddings()
    if bias:
        head.bias = torch.nn.Parameter(torch.linspace(-1, 1, 64))
    with torch.no_grad():
        head.weight[valid:] = 3 * head.weight[:24]
    prefix, candidates, future = torch.arange(3, 12), torch.tensor([4, 39, 0]), torch.tensor([7, 39, 8, 8])
    scorer = CompatibilityScorer(model, valid_vocab=valid)
    ((matrix, local),) = scorer.score_trajectories([(prefix, [BranchGroup(9, candidates, future)])], return_local=True)[
        0
    ]
    with torch.no_grad():
        logits = model(input_ids=prefix[None], use_cache=False).logits[0, -1, :valid].float()
        rows = torch.cat([prefix.expand(3, -1), candidates[:, None], future.expand(3, -1)], 1)
        behind = model(input_ids=rows, use_cache=False).logits[:, 9:-1, :valid].float().log_softmax(-1)
    want = behind.gather(2, future.expand(3, -1)[..., None])[..., 0]
    torch.testing.assert_close(local, logits.log_softmax(-1)[candidates], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(matrix, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scorer.score(prefix, candidates, future), want, rtol=1e-5, atol=1e-5)
    everything = CompatibilityScorer(model).score(prefix, candidates, future)
    assert torch.equal(CompatibilityScorer(model, valid_vocab=64).score(prefix, candidates, future), everything)
    assert float((want - everything).min()) > 0.1
    for bad in ({"candidates": torch.tensor([valid])}, {"future": torch.tensor([3, 63])}):
        ids = {"candidates": candidates, "future": future} | bad
        (name,) = bad
        with pytest.raises(ValueError, match=rf"{name}: expected ids from 0 below 40, got (40|63); .*valid_vocab"):
            scorer.score(prefix, **ids)


def test_ids_that_are_no_tensors_are_checked_on_the_host():
    model = tiny("qwen3").to("meta")  # whose values nobody can wait for
    given = [
        token_ids("prefix", [1, 2], model),
        check_group(model, 3, [1, 2]),
        *many_token_ids("rows", [[1]], model, V),
    ]
    assert all(ids.is_meta for ids in given)
    for wrong in (partial(token_ids, "prefix", [V]), partial(check_group, position=3, candidates=[V])):
        with pytest.raises(ValueError, match="expected ids from 0 below"):
            wrong(model=model)


def adapter_on(*names):
    return lambda model: model.add_adapter(LoraConfig(r=2, target_modules=[*names], init_lora_weights=False))


class Shifted(torch.nn.Module):
    def forward(self, weight):
        return weight + torch.linspace(0.0, 1.0, weight.shape[0])[:, None]


def doubled(_, inputs, output):
    return 2 * output


HEADS = {
    "an adapter": adapter_on("lm_head"),
    "a hook behind": lambda model: model.lm_head.register_forward_hook(doubled),
    "a hook before": lambda model: model.lm_head.register_forward_pre_hook(lambda _, inputs: (3 * inputs[0],)),
    "a parametrisation": lambda model: register_parametrization(model.lm_head, "weight", Shifted()),
    "another module": lambda model: setattr(model, "lm_head", torch.nn.Sequential(model.lm_head, torch.nn.Tanh())),
    "another forward": lambda model: setattr(model.lm_head, "forward", torch.nn.functional.softsign),
}
BODIES = {
    "a hook on the norm": lambda model: model.model.norm.register_forward_hook(doubled),
    "another norm": lambda model: setattr(model.model, "norm", torch.nn.Sequential(model.model.norm, torch.nn.Tanh())),
    "an adapter in the layers": adapter_on("q_proj", "qkv_proj"),
    "a hook on a layer": lambda model: model.model.layers[1].mlp.register_forward_hook(doubled),
}


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
@pytest.mark.parametrize("change", [*HEADS, *BODIES])
def test_a_model_that_is_changed_later_is_followed_or_refused(change, family):
    model, policy = tiny(family, tie_word_embeddings=False), RequestPolicy(math.inf)
    prefix, candidates, future = GROUP
    scorer, llm, reranker = CompatibilityScorer(model), LocalLLM(model), TokenReranker.from_base(model)
    plain = CollaborativeDecoder(model, None, None, policy, max_events=0)
    fast = LowLatencyDecoder(model, None, None, policy, max_events=0, max_length=64)
    before = llm.candidates(prefix, 3).logprob
    scorer.score(*GROUP)
    reranker.scores(prefix, candidates)
    fast.generate(prefix, 4)
    (HEADS | BODIES)[change](model)
    model.requires_grad_(False)
    wanted = model.generate(prefix[None], max_new_tokens=6, do_sample=False, eos_token_id=[], pad_token_id=0)[0, 10:]
    model.generation_config.eos_token_id = []
    assert plain.pair.slm is model
    assert llm.complete(prefix, 6).tolist() == wanted.tolist()
    again = llm.candidates(prefix, 3)
    assert not torch.equal(again.logprob, before)
    assert again.ids[0] == wanted[0]
    assert plain.generate(prefix, 6).token_ids.tolist() == wanted.tolist()
    if fast.loop is not None:
        with pytest.raises(ValueError, match="expected an unchanged Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3Moe"):
            fast.generate(prefix, 6)
    with pytest.raises(ValueError, match=f"expected the {type(model).__name__} that the reranker was made on"):
        reranker.scores(prefix, candidates)
    if change in HEADS:
        for call in (
            lambda: scorer.score(*GROUP),
            lambda: scorer.logprobs(prefix, [future]),
            lambda: shared_prefix_logprobs(model, prefix, [future]),
            lambda: CompatibilityScorer(model),
        ):
            with pytest.raises(ValueError, match="plain LM head"):
                call()
    else:
        torch.testing.assert_close(scorer.score(*GROUP), full_forwards(model, *GROUP), rtol=1e-4, atol=1e-4)
