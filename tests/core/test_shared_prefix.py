"""Log-probs of ragged continuations of shared prefixes against full forwards, with gradients and without."""

from __future__ import annotations

import copy
import os
import random
import re
from functools import partial
from multiprocessing import get_context

import accelerate
import peft
import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import HANG
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, V, tiny
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import BloomConfig, BloomForCausalLM
from warm import launched

from fb_core import CompatibilityScorer, shared_prefix_logprobs
from fb_core.models.packed import packed_forward, unwrapped
from fb_core.score import shared_prefix
from fb_core.score.shared_prefix import shared_prefix_logprobs_many
from fb_kernels.testing import count_launches, largest_tensor

PREFIX = torch.tensor([3, 17, 4, 4, 30, 9, 22, 8, 1, 40, 6])
RAGGED = [[5, 9, 9, 30], [7], [5, 9, 2, 11, 48, 0], [], [31, 4]]


def full_forwards(model, prefix, continuations, temperature=1.0, valid=V):
    """(log-prob [R], entropy [R], greedy [R]) of each continuation, from a forward of its own."""
    found = []
    for continuation in continuations:
        tokens = torch.as_tensor(continuation, dtype=torch.int64)
        ids = torch.cat([torch.as_tensor(prefix), tokens])
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prefix) - 1 : -1, :valid]
        logprob = (logits if logits.dtype is torch.float64 else logits.float()).div(temperature).log_softmax(-1)
        entropy = torch.special.entr(logprob.exp()).sum(-1)
        found.append((logprob.gather(1, tokens[:, None])[:, 0], entropy, logprob.argmax(-1) == tokens))
    return found


def random_request(seed, lengths, p):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(V, (p,), generator=g), [torch.randint(V, (n,), generator=g) for n in lengths]


def close(mine, want):
    torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)


# --- the scorer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_continuations_equal_full_forwards(family):
    model = tiny(family)
    scorer = CompatibilityScorer(model)
    with torch.no_grad():
        want = full_forwards(model, PREFIX, RAGGED)
    for one, (logprob, _, _) in zip(scorer.logprobs(PREFIX, RAGGED), want, strict=True):
        assert one.dtype is torch.float32
        close(one, logprob)
    for ours, theirs in zip(
        scorer.logprobs(PREFIX, RAGGED, return_entropy=True, return_greedy=True), want, strict=True
    ):
        close(ours[0], theirs[0])
        close(ours[1], theirs[1])
        assert torch.equal(ours[2], theirs[2])


@given(data=st.data())
@settings(max_examples=20)
def test_many_requests_equal_full_forwards_whatever_the_budget(data):
    model = tiny(data.draw(st.sampled_from(FAMILIES)))
    scorer = CompatibilityScorer(model)
    lengths = st.lists(st.integers(0, 6), max_size=5)
    requests = [
        random_request(seed, data.draw(lengths), data.draw(st.integers(1, 12)))
        for seed in range(data.draw(st.integers(0, 4)))
    ]
    found = scorer.logprobs_many(requests, data.draw(st.sampled_from([1, 7, 30, 10_000])), return_greedy=True)
    assert len(found) == len(requests)
    for (prefix, continuations), scores in zip(requests, found, strict=True):
        with torch.no_grad():
            want = full_forwards(model, prefix, continuations)
        for (logprob, greedy), (expected, _, choice) in zip(scores, want, strict=True):
            close(logprob, expected)
            assert torch.equal(greedy, choice)


def test_the_models_own_continuation_is_greedy_and_a_tie_on_either_side():
    model = tiny(tie_word_embeddings=False)
    head = model.get_output_embeddings().weight
    scorer = CompatibilityScorer(model)
    own = model.generate(PREFIX[None], max_new_tokens=7, min_new_tokens=7, do_sample=False)[0, len(PREFIX) :]
    other = own.clone()
    other[3] = (other[3] + 1) % V
    (_, mine), (_, theirs) = scorer.logprobs(PREFIX, [own, other], return_greedy=True)
    assert mine.tolist() == [True] * 7
    assert theirs[:4].tolist() == [True] * 3 + [False]
    with torch.no_grad():
        top = int(own[0])
        head[(top + 5) % V] = head[top]
    both = scorer.logprobs(PREFIX, [[top], [(top + 5) % V]], return_greedy=True)
    assert [greedy.tolist() for _, greedy in both] == [[True], [True]]


def test_candidates_with_one_future_are_a_case_of_it():
    scorer = CompatibilityScorer(tiny())
    candidates, future = torch.tensor([4, 9, 30]), torch.tensor([8, 2, 2, 17])
    rows = scorer.logprobs(PREFIX, [[c, *future.tolist()] for c in candidates.tolist()])
    close(torch.stack(rows)[:, 1:], scorer.score(PREFIX, candidates, future))


def test_each_prefix_runs_once_and_no_logits_exist(monkeypatch):
    model = tiny("qwen3", vocab_size=9001)
    scorer = CompatibilityScorer(model)
    forward, seen = packed_forward, []

    def counted(model, ids, *rest):
        seen.append(len(ids))
        return forward(model, ids, *rest)

    monkeypatch.setattr("fb_core.score.shared_prefix.packed_forward", counted)
    prefix, continuations = random_request(0, [20, 1, 5, 9], 40)
    with largest_tensor() as largest:
        scorer.logprobs(prefix, continuations, return_entropy=True, return_greedy=True)
    assert seen == [40 + 19 + 4 + 8]  # the last token of each is nobody's context
    assert largest.numel < 35 * 9001
    seen.clear()
    scorer.logprobs_many([([first, *prefix[1:].tolist()], continuations) for first in range(3)], 2 * 71)
    assert seen == [2 * 71, 71]
    seen.clear()
    scorer.logprobs(prefix, [[i] for i in range(20)])
    assert seen == [40]


def test_a_request_above_the_budget_is_cut(monkeypatch):
    """Each part runs the prefix again, and holds no fewer rows of continuations than of the prefix."""
    scorer = CompatibilityScorer(tiny())
    prefix, continuations = random_request(1, [5] * 12, 10)
    whole = scorer.logprobs(prefix, continuations)
    forward, seen = scorer._forward_tree, []

    def counted(pack, **asked):
        seen.append([sum(group.rows for group in groups) for _, groups in pack])
        return forward(pack, **asked)

    monkeypatch.setattr(scorer, "_forward_tree", counted)
    for budget, parts in ((58, [[48]]), (34, [[24], [24]]), (1, [[8]] * 6)):
        seen.clear()
        for mine, want in zip(scorer.logprobs_many([(prefix, continuations)], budget)[0], whole, strict=True):
            close(mine, want)
        assert seen == parts


def test_what_memory_refuses_is_halved_to_one_continuation(monkeypatch):
    scorer = CompatibilityScorer(tiny())
    requests = [random_request(seed, [3] * 4, 5) for seed in range(3)]
    whole = scorer.logprobs_many(requests)
    forward, taken = scorer._forward_tree, []

    def limited(pack, **asked):
        count = sum(len(group.continuations) for _, groups in pack for group in groups)
        if count > 1:
            raise torch.OutOfMemoryError
        taken.append(count)
        return forward(pack, **asked)

    monkeypatch.setattr(scorer, "_forward_tree", limited)
    for mine, want in zip(scorer.logprobs_many(requests), whole, strict=True):
        for one, expected in zip(mine, want, strict=True):
            close(one, expected)
    assert taken == [1] * 12


BAD = [
    *(({"prefix": []}, ValueError, "prefix"), ({"prefix": "abc"}, TypeError, "prefix")),
    *(({"continuations": [[3], [token]]}, ValueError, f"continuations.*{token}") for token in (V, -1)),
    *(({"continuations": [[3], [1.5]]}, TypeError, r"continuations\[1\]"), ({"continuations": 3}, TypeError, "int")),
    *(({"continuations": [3, 4]}, TypeError, r"continuations\[0\]"), ({"continuations": "ab"}, TypeError, "str")),
    ({"continuations": [torch.zeros(2, 2, dtype=torch.int64)]}, ValueError, r"continuations\[0\]"),
    ({"continuations": [[1] * 119]}, ValueError, r"prefix: .*11 \+ 118"),
]


@pytest.mark.parametrize("ask", ["scorer", "training"])
@pytest.mark.parametrize(("change", "kind", "words"), BAD)
def test_bad_input_is_one_clear_sentence(ask, change, kind, words):
    model = tiny()
    arguments = {"prefix": PREFIX, "continuations": RAGGED} | change
    call = CompatibilityScorer(model).logprobs if ask == "scorer" else partial(shared_prefix_logprobs, model)
    shared_prefix_logprobs(model, PREFIX, [[1]])  # which compares a few logits
    with count_launches() as launches, pytest.raises(kind, match=words) as caught:
        call(**arguments)
    assert not any("mm" in name or "linear" in name for name in launches.by_op)  # work has not begun
    assert str(caught.value).count("\n") == 0
    assert "; " in str(caught.value)


def test_padding_of_the_vocabulary_is_no_continuation_and_nothing_asked_is_nothing_given():
    scorer = CompatibilityScorer(tiny(), valid_vocab=40)
    with torch.no_grad():
        want = full_forwards(tiny(), PREFIX, [[5, 39]], valid=40)
    close(scorer.logprobs(PREFIX, [[5, 39]])[0], want[0][0])
    with pytest.raises(ValueError, match=r"continuations: .*valid_vocab"):
        scorer.logprobs(PREFIX, [[5, 41]])
    assert scorer.logprobs_many([]) == scorer.logprobs(PREFIX, []) == []
    (empty,) = scorer.logprobs(PREFIX, [[]])
    assert (empty.shape, empty.dtype) == ((0,), torch.float32)


# --- training ---------------------------------------------------------------------------------------------------------


def gradients(model, values):
    """Of a weighted sum of all log-probs, by parameter."""
    model.zero_grad()
    flat = torch.cat(list(values))
    (flat * torch.linspace(0.5, 1.5, len(flat), dtype=flat.dtype)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def close_gradients(mine, want):
    """Norms and rotations are float32 in the modules."""
    assert mine.keys() == want.keys()
    for name, grad in want.items():
        assert (mine[name] - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_values_and_gradients_are_those_of_full_sequences(family):
    model = tiny(family).double()
    ours = shared_prefix_logprobs(model, PREFIX, RAGGED, temperature=0.7)
    mine = gradients(model, ours)
    theirs = [logprob for logprob, _, _ in full_forwards(model, PREFIX, RAGGED, temperature=0.7)]
    for one, other in zip(ours, theirs, strict=True):
        close(one, other)
    close_gradients(mine, gradients(model, theirs))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("deepseek_v3", {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16}),
        ("granitemoehybrid", {"layer_types": ["attention"] * 4, "num_local_experts": 0}),
    ],
)
def test_latent_attention_and_a_hybrids_attention_layers_are_those_of_full_sequences(kind, settings):
    """Values narrower than keys; a class with a recurrent state in a model that has none."""
    model = zoo.build(kind, **settings)
    ours = shared_prefix_logprobs(model, PREFIX, RAGGED)
    mine = gradients(model, ours)
    theirs = [logprob for logprob, _, _ in full_forwards(model, PREFIX, RAGGED, valid=None)]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    wanted = gradients(model, theirs)
    assert mine.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (mine[name] - grad).norm() <= 1e-3 * grad.norm() + 1e-6, name


def test_without_gradients_nothing_is_kept():
    model = tiny()
    with torch.no_grad():
        values = shared_prefix_logprobs(model, PREFIX, RAGGED)
    assert not any(value.requires_grad for value in values)
    for one, other in zip(values, CompatibilityScorer(model).logprobs(PREFIX, RAGGED), strict=True):
        assert torch.equal(one, other)


def test_several_prefixes_in_one_forward():
    model = tiny().double()
    requests = [random_request(1, [3, 2], 7), random_request(2, [4, 0, 1], 3)]
    found = [each for group in shared_prefix_logprobs_many(model, requests, return_entropy=True) for each in group]
    mine = gradients(model, [each for pair in found for each in pair])
    full = [each for request in requests for each in full_forwards(model, *request)]
    for (logprob, entropy), (expected, spread, _) in zip(found, full, strict=True):
        torch.testing.assert_close(logprob, expected)
        torch.testing.assert_close(entropy, spread)
    close_gradients(mine, gradients(model, [each for logprob, entropy, _ in full for each in (logprob, entropy)]))


SYSTEM, SHOTS = [3, 17, 4, 4, 30], [9, 22, 8]
TREE = [  # two levels of prefixes, and continuations that begin alike; one prefix ends inside another
    ([*SYSTEM, *SHOTS, 1], [[5, 9, 9, 30], [5, 9, 2, 11], [7], [], [5, 9, 9]]),
    ([*SYSTEM, *SHOTS, 40, 6], [[31, 4, 4], [31, 4, 8, 8]]),
    (SYSTEM, [[9, 22, 8, 1, 5, 9, 13], [2]]),
    ([*SYSTEM, 11], [[5, 5], [6, 5]]),
    ([44, 3], [[3, 17], []]),
    ([*SYSTEM, *SHOTS, 1], [[5, 9, 9, 30]]),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_beginning_runs_once_at_any_depth(family, monkeypatch):
    model, rows = tiny(family).double(), []
    forward = packed_forward

    def counted(model, ids, *rest):
        rows.append(len(ids))
        return forward(model, ids, *rest)

    monkeypatch.setattr(shared_prefix, "packed_forward", counted)
    found = shared_prefix_logprobs_many(model, TREE, return_entropy=True)
    whole = [[*prefix, *each[:-1]] for prefix, continuations in TREE for each in continuations]
    assert rows == [len({tuple(ids[:count]) for ids in whole for count in range(1, len(ids) + 1)})]
    mine = gradients(model, [each for group in found for pair in group for each in pair])
    full = [full_forwards(model, *request) for request in TREE]
    for group, wanted in zip(found, full, strict=True):
        for (logprob, entropy), (exact, spread, _) in zip(group, wanted, strict=True):
            close(logprob, exact)
            close(entropy, spread)
    close_gradients(mine, gradients(model, [each for group in full for one in group for each in one[:2]]))


def test_prefixes_that_grow_by_a_token_are_one_row_each():
    """Deeper than Python's stack."""
    tree, ids = shared_prefix.Tree(), torch.arange(1100)
    spans = [tree.add(ids[:count], shared_prefix.Branches(count, [torch.tensor([7])])) for count in range(1, 1101)]
    assert tree.rows == 1100
    runs = tree.runs()
    for row, run in enumerate(runs):
        run.row = row
    assert runs[-1].path(1) == [range(1100)]
    assert [run.row + first for ((run, first, last),) in spans if last == first + 1] == list(range(1100))


@given(seed=st.integers(0, 1 << 20), budget=st.sampled_from([1, 7, 30, 16_384]))
def test_any_tree_equals_full_forwards_whatever_the_budget(seed, budget):
    """Few different tokens, so that beginnings meet by chance."""
    draw = random.Random(seed)
    many = [
        ([draw.randrange(2, 4) for _ in range(draw.randint(1, 7))],
         [[draw.randrange(2, 4) for _ in range(draw.randint(0, 5))] for _ in range(draw.randint(0, 4))])
        for _ in range(draw.randint(0, 5))
    ]  # fmt: skip
    model = tiny()
    found = CompatibilityScorer(model).logprobs_many(many, budget, return_greedy=True)
    with torch.no_grad():
        for group, request in zip(found, many, strict=True):
            for (logprob, greedy), (exact, _, likeliest) in zip(group, full_forwards(model, *request), strict=True):
                close(logprob, exact)
                assert torch.equal(greedy, likeliest)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit_of_the_gradients(family, reentrant):
    model = tiny(family).train()
    plain = gradients(model, shared_prefix_logprobs(model, PREFIX, RAGGED))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    before = model.model.layers[0]._gradient_checkpointing_func
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpointed = gradients(model, shared_prefix_logprobs(model, PREFIX, RAGGED))
    assert len(calls) == 2
    assert model.model.layers[0]._gradient_checkpointing_func is before
    assert model.config._attn_implementation in ("sdpa", "eager")
    for name, grad in plain.items():
        assert torch.equal(checkpointed[name], grad), name


def adapted(model, **settings):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **settings)
    return peft.get_peft_model(model, config)


def test_adapters_learn_and_nothing_else_does():
    model = adapted(tiny("llama").double())
    mine = gradients(model, shared_prefix_logprobs(model, PREFIX, RAGGED))
    close_gradients(mine, gradients(model, [logprob for logprob, _, _ in full_forwards(model, PREFIX, RAGGED)]))
    assert all("lora_" in name for name in mine)
    with model.disable_adapter(), torch.no_grad():
        frozen = shared_prefix_logprobs(model, PREFIX, RAGGED)
    with torch.no_grad():
        base = shared_prefix_logprobs(tiny("llama").double(), PREFIX, RAGGED)
    for one, other in zip(frozen, base, strict=True):
        assert torch.equal(one, other)


def test_autocast_is_as_near_as_plain_autocast():
    """Parameters' gradients: maximum and RMS error at most twice those of full sequences in bfloat16, and a little."""
    model = tiny("qwen3")
    exact = copy.deepcopy(model).double()
    truth = gradients(exact, [logprob for logprob, _, _ in full_forwards(exact, PREFIX, RAGGED)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = gradients(model, shared_prefix_logprobs(model, PREFIX, RAGGED))
        plain = gradients(model, [logprob for logprob, _, _ in full_forwards(model, PREFIX, RAGGED)])
    for name, want in truth.items():
        mine, theirs = (each[name].double() - want for each in (ours, plain))
        step = 2**-8 * float(want.square().mean().sqrt())
        assert float(mine.abs().max()) <= 2 * float(theirs.abs().max()) + 4 * step, name
        assert float(mine.square().mean().sqrt()) <= 2 * float(theirs.square().mean().sqrt()) + step, name


def test_what_cannot_be_trained_is_refused_by_name():
    alibi = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=V))
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    for model, kind, words in (
        (alibi, ValueError, "BloomForCausalLM"),
        (peft.get_peft_model(tiny("llama"), config), ValueError, "PROMPT_TUNING"),
        (adapted(tiny("llama"), layer_replication=[[0, 2], [0, 2]]), ValueError, "LORA, with layer_replication"),
        (
            adapted(tiny("llama"), task_type="CAUSAL_LM", alora_invocation_tokens=[5, 2]),
            ValueError,
            "LORA, with alora_invocation_tokens",
        ),
        (peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=2, target_modules=["lm_head"])), ValueError, "LM head"),
        (adapted(tiny("llama"), lora_dropout=0.2).train(), ValueError, "dropout.*0.2"),
        (accelerate.cpu_offload(tiny("llama")), ValueError, "offloaded LlamaFor"),
        (torch.nn.Linear(2, 2), TypeError, "got Linear"),
    ):
        with pytest.raises(kind, match=words):
            shared_prefix_logprobs(model, PREFIX, RAGGED)


STEPS = [TREE[:2], TREE[1:3], TREE[2:4]]  # a request for each of two processes
WRAPPERS = {
    "ddp": DistributedDataParallel,
    "ddp, compiled": lambda model: torch.compile(DistributedDataParallel(torch.compile(model))),
    "fsdp2": lambda model: sharded(model, [*model.model.layers, model]),
    "fsdp2, root alone": lambda model: sharded(model, [model]),
    "fsdp2 of adapters, root alone": lambda model: sharded(model, [model]),
    "fsdp2 of adapters": lambda model: sharded(model, [*model.base_model.model.model.layers, model]),
}


def sharded(model, parts):
    for part in parts:
        fully_shard(part)
    return model


def learner(kind):
    model = tiny("llama").double()
    return adapted(model) if "adapters" in kind else model


def losses(model, requests):
    """Of each request, with a ratio to what the model says without gradients."""
    with torch.no_grad():
        before = shared_prefix_logprobs_many(model, requests)
    after = shared_prefix_logprobs_many(model, requests, return_entropy=True)
    for old, new in zip(before, after, strict=True):
        ratios = torch.cat([(one - other).exp() for (one, _), other in zip(new, old, strict=True)])
        yield ratios.mean() + 0.1 * torch.cat([entropy for _, entropy in new]).mean()


def gradients_of_steps(model, requests_of):
    """Gradients and losses of three steps of SGD."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for step, requests in enumerate(STEPS):
        each = torch.stack(list(losses(model, requests_of(requests))))
        each.mean().backward()
        found[f"{step} loss"] = each.detach()
        for name, parameter in unwrapped(model).named_parameters():
            if (grad := parameter.grad) is not None:
                found[f"{step} {name}"] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return found


def rank(environment, folder):
    """One of the processes, whose gradients and losses go to a file for each wrapper."""
    os.environ.update(environment | {"CUDA_VISIBLE_DEVICES": ""})
    distributed.init_process_group("gloo")
    own = distributed.get_rank()
    for kind, wrap in WRAPPERS.items():
        found = gradients_of_steps(wrap(learner(kind).train()), lambda requests: [requests[own]])
        save_file(found, folder / f"{kind} {own}")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two processes that have learnt in every wrapper."""
    folder, forks = tmp_path_factory.mktemp("ranks"), get_context("fork")
    processes = [forks.Process(target=rank, args=(own, folder)) for own in launched(2)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(HANG)
        assert each.exitcode == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRAPPERS)
def test_two_processes_learn_as_one(kind, ranks):
    want = gradients_of_steps(learner(kind).train(), lambda requests: requests)
    for own in (0, 1):
        found = load_file(ranks / f"{kind} {own}")
        assert found.keys() == want.keys()
        for name, value in want.items():
            value = value[own : own + 1] if name.endswith("loss") else value
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def test_layers_sharded_by_fsdp2_learn_and_a_head_sharded_by_itself_is_refused(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain, model = tiny("llama"), sharded(part := tiny("llama"), part.model.layers)
        for _ in range(3):
            for one in (model, plain):
                sum(logprob.sum() for logprob in shared_prefix_logprobs(one, PREFIX, RAGGED)).backward()
        for one, other in zip(model.model.layers.parameters(), plain.model.layers.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-4)
        for parts in ("lm_head", "all"):
            model = tiny("llama", tie_word_embeddings=False)
            sharded(model, [model.lm_head if parts == "lm_head" else model])
            ask = partial(shared_prefix_logprobs, model, PREFIX, RAGGED)
            with pytest.raises(ValueError, match=r"got a sharded one of a .*LlamaForCausalLM; call fully_shard"):
                CompatibilityScorer(model) if parts == "all" else ask()
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("opt", {"dropout": 0.1}, "0.1 in model.decoder.dropout"),
        ("opt", {"dropout": 0.0, "layerdrop": 0.1}, "0.1 in model.decoder.layerdrop"),
        ("starcoder2", {"residual_dropout": 0.2}, "0.2 in model.layers.0.self_attn.residual_dropout"),
        ("mixtral", {"router_jitter_noise": 0.3}, "0.3 in model.layers.0.mlp.jitter_noise"),
        *(("opt", {"dropout": 0.0}, None), ("mixtral", {}, None)),
    ],
)
def test_what_draws_in_training_mode_is_refused_by_name(kind, settings, named):
    """By both doors, after a call in eval mode; the user's random numbers stay as they were."""
    model = zoo.build(kind, **settings)
    for call in (CompatibilityScorer(model).logprobs, partial(shared_prefix_logprobs, model)):
        call(PREFIX, RAGGED)
        model.train()
        state = torch.get_rng_state()
        if named is None:
            assert all(torch.equal(*pair) for pair in zip(call(PREFIX, RAGGED), call(PREFIX, RAGGED), strict=True))
            continue
        with pytest.raises(ValueError, match=re.escape(named)):
            call(PREFIX, RAGGED)
        assert torch.equal(torch.get_rng_state(), state)
        model.eval()
        call(PREFIX, RAGGED)
    if kind == "opt" and named is None:  # a rate that is set later is seen
        model.model.decoder.layers[1].dropout = 0.25
        with pytest.raises(ValueError, match=r"0.25 in model\.decoder\.layers\.1\.dropout"):
            call(PREFIX, RAGGED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "settings", "right"),
    [
        *(("gemma3_text", {"use_bidirectional_attention": True}, False), ("modernbert-decoder", {}, False)),
        *(("roc_bert", {}, False), ("gpt_oss", {}, True), ("mixtral", {}, True), ("gemma2", {}, True)),
    ],
)
def test_in_16_bits_what_packs_wrongly_is_refused_and_nothing_else(kind, settings, right, dtype):
    model = zoo.build(kind, **settings).to(dtype)
    if right:
        CompatibilityScorer(model)
        return
    with pytest.raises(ValueError, match=f"expected packed and plain forwards to agree, got {type(model).__name__}"):
        CompatibilityScorer(model)


def test_a_mixture_of_adapters_by_token_is_refused(tmp_path):
    for name in "01":
        adapted(tiny("llama"), task_type="CAUSAL_LM").save_pretrained(tmp_path / name)
    base = tiny("llama")
    base.config.use_cache = False
    paths = {name: str(tmp_path / name) for name in "01"}
    mixed = peft.get_peft_model(base, peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters=paths)).eval()
    with pytest.raises(ValueError, match="to agree, got XLORA PeftModelForCausalLM, whose log-probabilities"):
        shared_prefix_logprobs(mixed, PREFIX, RAGGED)


def test_a_model_that_packs_wrongly_is_found_at_first_sight():
    model = tiny("llama")
    attention = type(model.model.layers[0].self_attn)

    class Louder(attention):
        def forward(self, *args, **kwargs):
            out, weights = super().forward(*args, **kwargs)
            return out * (1.5 if self.config._attn_implementation == "fb_branch" else 1.0), weights

    model.model.layers[0].self_attn.__class__ = Louder
    with pytest.raises(ValueError, match=re.escape("expected packed and plain forwards to agree")):
        shared_prefix_logprobs(model, PREFIX, RAGGED)
