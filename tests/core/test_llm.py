from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from tiny import EOS, FAMILIES, V, prompts, tiny
from torch import nn

from fb_core.llm.local import LLM, Candidates, LocalLLM
from fb_core.models.facts import Reading
from fb_core.models.native import NativeDecoder
from fb_core.models.tokens import token_ids
from fb_core.runtime import plain as generation
from fb_core.runtime.plain import batches

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@torch.no_grad()
def full(model, ids):
    """Log-probabilities [V] after ids, from a forward without cache or mask."""
    return model(ids[None], use_cache=False).logits[0, -1].double().log_softmax(-1)


def greedy(model, ids, n, ends=(EOS,)):
    new = []
    while len(new) < n and not (new and new[-1] in ends):
        new.append(int(full(model, torch.cat([ids, torch.tensor(new, dtype=torch.long)])).argmax()))
    return new


@contextmanager
def forwarded(model):
    """The number of new tokens of every forward."""
    seen = []
    handle = model.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    yield seen
    handle.remove()


def check(found, model, ids, k, score_ids=None):
    want = full(model, ids)
    order = sorted(range(len(want)), key=lambda token: (-float(want[token]), token))[:k]
    assert found.ids.tolist() == order
    assert found.ids.dtype == torch.int64
    assert found.logprob.dtype == torch.float32
    torch.testing.assert_close(found.logprob.double(), want[order], **TOLERANCE)
    if score_ids is None:
        assert found.score_logprob is None
    else:
        torch.testing.assert_close(found.score_logprob.double(), want[score_ids], **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_equal_full_forwards_while_the_cache_grows(family):
    model = tiny(family, 1, **({"sliding_window": 5} if family == "mistral" else {}))
    llm = LocalLLM(model)
    (ids,) = prompts(20)
    for end in (4, 5, 9, 9, 20):
        check(llm.candidates(ids[:end], 5, [7, 3, 3]), model, ids[:end], 5, [7, 3, 3])


def test_cache_extends_repeats_for_nothing_and_restarts():
    model = tiny("qwen3", 2)
    llm = LocalLLM(model)
    (ids,) = prompts(12)
    other = torch.cat([ids[:5], (ids[5:7] + 1) % V])
    with forwarded(model) as seen:
        for query in (ids[:6], ids[:7], ids[:7], ids, ids[:4], ids[:6], other):
            llm.candidates(query, 3)
    assert [shape[1] for shape in seen] == [6, 1, 5, 4, 2, 7]
    for query in (ids[:6], ids[:7], ids[:7], ids, ids[:4], ids[:6], other):
        check(llm.candidates(query, 3), model, query, 3)


WRITES = {
    "other values": lambda x: x.copy_(torch.randn_like(x)),
    "noise": lambda x: x.add_(torch.randn_like(x) * 1e-2),
    "a step": lambda x: x.sub_(x.sign() * 1e-2),
    "a merged adapter": lambda x: x.add_((torch.randn(*x.shape[:-1], 2) @ torch.randn(2, x.shape[-1])).to(x.dtype)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_through_data_is_seen_in_whichever_parameter(write, dtype):
    model = tiny("qwen2").to(dtype)
    model.model.norm.weight.data[0] = torch.nan  # equal to itself
    model.lm_head.weight = nn.Parameter(torch.randn(32, V).to(dtype).T)  # not contiguous
    read = Reading(model)
    assert Reading(model).same(read)
    for parameter in model.parameters():
        version = parameter._version
        WRITES[write](parameter.data)
        assert parameter._version == version
        before, read = read, Reading(model)
        assert not read.same(before)


def test_a_kept_query_is_of_the_weights_as_they_are():
    model = tiny("phi3", 2)
    llm = LocalLLM(model)
    (ids,) = prompts(12)
    for change in (lambda x: x.data.mul_(-1), lambda x: (x.data[0].mul_(-9), llm.weights_changed())):
        llm.candidates(ids[:8], 3)
        change(model.model.layers[0].self_attn.o_proj.weight)
        check(llm.candidates(ids, 3), model, ids, 3)


def test_queries_may_be_lists_and_are_not_kept_by_reference():
    model = tiny("llama", 3)
    llm = LocalLLM(model)
    (ids,) = prompts(8)
    llm.candidates(ids, 2)
    before = ids.clone()
    ids[0] = (ids[0] + 1) % V
    check(llm.candidates(ids, 2), model, ids, 2)
    check(llm.candidates(before.tolist(), 2), model, before, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_equal_single_queries(family):
    model = tiny(family, 4, **({"sliding_window": 5} if family == "mistral" else {}))
    llm = LocalLLM(model, batch_tokens=30)
    asked = prompts(3, 12, 1, 12, 7, 31)
    scored = [[5], [6, 7], [], [1], [2], [3]]
    found = llm.candidates_many(asked, 4, scored)
    for ids, score_ids, got in zip(asked, scored, found, strict=True):
        check(got, model, ids, 4, score_ids)
    assert [len(rest) for rest in llm.complete_many(asked, 3)] == [len(llm.complete(ids, 3)) for ids in asked]
    for ids, new in zip(asked, llm.complete_many(asked, 10), strict=True):
        assert new.tolist() == greedy(model, ids, 10)


def test_the_states_of_a_trajectory_cost_one_forward(monkeypatch):
    """In any order, repeated or not, among others; a prompt that only shares a beginning is another trajectory."""
    forward = mock.Mock(side_effect=NativeDecoder.forward, autospec=True)
    monkeypatch.setattr(NativeDecoder, "forward", lambda *arguments: forward(*arguments))
    model, (ids, other) = tiny("qwen3"), prompts(20, 9)
    asked = [ids[:3], other, ids, ids[:11], ids[:3], torch.cat([ids[:5], other])]
    scored = [[place] for place in range(len(asked))]
    for got, prompt, scores in zip(LocalLLM(model).candidates_many(asked, 4, scored), asked, scored, strict=True):
        check(got, model, prompt, 4, scores)
    assert [len(call.args[1]) for call in forward.call_args_list] == [20 + 9 + 14]
    forward.reset_mock()
    LocalLLM(model, batch_tokens=30).candidates_many(asked, 4)
    assert sorted(len(call.args[1]) for call in forward.call_args_list) in ([14, 29], [20, 23])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_of_a_batch_reads_contiguous_rows(family):
    """F.linear of a slice [B, 1, D] copies the weight B times: 14 GB for 250 prompts and 135M parameters."""
    model, seen = tiny(family), []
    model.get_output_embeddings().register_forward_hook(lambda _, inputs, out: seen.append(inputs[0]))
    prompts = [torch.arange(3, 3 + length) for length in (9, 5, 7)]
    LocalLLM(model).candidates_many(prompts, 2)
    LocalLLM(model).complete_many(prompts, 3)
    assert seen
    assert all(rows.is_contiguous() for rows in seen)
    assert not model.get_output_embeddings()._forward_pre_hooks  # it is as it was


def test_empty_batches():
    llm = LocalLLM(tiny())
    assert llm.candidates_many([], 3) == []
    assert llm.complete_many([], 3) == []
    assert llm.sample_many([], 2, 3) == []
    assert llm.complete_branches([], [], 3) == []
    assert llm.complete_branches(prompts(3, 4), [[], torch.tensor([], dtype=torch.long)], 3) == [[], []]


def test_completions_include_eos_and_ignore_sampling_settings_of_the_model(caplog):
    model = tiny("qwen3", 5)
    asked = prompts(4, 6, 9)
    plain = [greedy(model, ids, 12, ends=()) for ids in asked]
    ends = [plain[0][3], plain[1][5]]
    model.generation_config.update(
        do_sample=True, temperature=0.1, top_p=0.5, top_k=3, repetition_penalty=5.0, eos_token_id=ends, min_new_tokens=9
    )
    before = model.generation_config.to_dict()
    llm = LocalLLM(model)
    new = llm.complete_many(asked, 12)
    for ids, tokens in zip(asked, new, strict=True):
        assert tokens.tolist() == greedy(model, ids, 12, ends)
        assert tokens.dtype == torch.int64
    assert min(len(tokens) for tokens in new) < 12
    assert model.generation_config.to_dict() == before
    assert not caplog.records
    assert llm.ends == frozenset(ends)


def test_completion_stops_at_the_positions():
    model = tiny("llama", 6, max_position_embeddings=16, eos_token_id=None)
    model.generation_config.eos_token_id = None
    llm = LocalLLM(model)
    assert [len(tokens) for tokens in llm.complete_many(prompts(15, 4, 10), 8)] == [1, 8, 6]
    check(llm.candidates(prompts(16)[0], 3), model, prompts(16)[0], 3)
    prefixes = prompts(15, 14, 4)
    found = llm.complete_branches(prefixes, [[3, 4], [5], [6, 7]], 8)
    assert [[len(new) for new in group] for group in found] == [[0, 0], [1], [8, 8]]
    assert found[1][0].tolist() == llm.complete([*prefixes[1].tolist(), 5], 8).tolist()


def lists(written):
    return [[new.tolist() for new in group] for group in written]


@pytest.mark.parametrize("batch_tokens", [60, 65536])
@pytest.mark.parametrize("family", FAMILIES)
def test_branches_equal_completions_of_their_concatenations(family, batch_tokens):
    window = {"sliding_window": 5} if family == "mistral" else {}
    model = tiny(family, 4, tie_word_embeddings=False, **window)
    model.generation_config.eos_token_id = ends = [EOS, 11, 21, 31, 41]
    llm = LocalLLM(model, batch_tokens=batch_tokens)
    prefixes = prompts(3, 12, 1, 12, 7, 31)
    prefixes.append(prefixes[1])
    branches = [[5, 6, 5], [7, EOS, 8], [9], [], range(10, 30), [EOS], torch.tensor([8, 9])]
    found = llm.complete_branches(prefixes, branches, 6)
    for prefix, firsts, group in zip(prefixes, branches, found, strict=True):
        going = [first for first in map(int, firsts) if first not in ends]
        starts = [torch.cat([prefix, torch.tensor([first])]) for first in going]
        written = dict(zip(going, llm.complete_many(starts, 6), strict=True))
        assert [new.tolist() for new in group] == [
            written[first].tolist() if first in written else [] for first in map(int, firsts)
        ]
        assert {new.dtype for new in group} <= {torch.int64}
        if going:
            assert written[going[0]].tolist() == greedy(model, starts[0], 6, ends)
    assert len({len(new) for group in found for new in group}) > 2


def test_branches_compute_their_prefix_once():
    model = tiny("phi3", 4)
    model.generation_config.eos_token_id = [V - 1]
    a, b, c = prompts(9, 6, 5)
    llm = LocalLLM(model)
    with forwarded(model) as seen:
        llm.complete_branches([a, b, a.tolist(), c], [[5, 6, 7], [5, V - 1], [8], []], 3)
    assert seen == [(2, 9), (5, 1), (5, 1), (5, 1)]
    with forwarded(model) as seen:
        llm.complete_many([a, b, a, a], 3)
        llm.sample_many([a, b], 4, 3)
    assert seen == [(2, 9), (4, 1), (4, 1), (2, 9), (8, 1), (8, 1)]


def test_batches_count_branches(monkeypatch):
    model = tiny("phi3", 4)
    model.generation_config.eos_token_id = [V - 1]
    prefixes, branches = prompts(9, 6), [range(3, 13), range(20, 23)]
    whole = lists(LocalLLM(model).complete_branches(prefixes, branches, 3))
    monkeypatch.setattr(generation, "MAX_ROWS", 4)
    with forwarded(model) as seen:
        assert lists(LocalLLM(model).complete_branches(prefixes, branches, 3)) == whole
    assert seen[::4] == [(1, 9), (1, 9), (2, 9), (1, 6)]
    assert [rows for rows, new in seen if new == 1] == [4] * 9 + [1] * 3
    with forwarded(model) as seen:
        assert lists(LocalLLM(model, batch_tokens=3 * (9 + 4)).complete_branches(prefixes, branches, 3)) == whole
    assert max(rows for rows, _ in seen) == 3


def test_branches_of_an_llm_that_only_completes():
    class Plain(LLM):
        def __init__(self, local):
            self.local = local

        @property
        def ends(self):
            return self.local.ends

        def candidates(self, ids, k, score_ids=None):
            return self.local.candidates(ids, k, score_ids)

        def complete(self, ids, max_new_tokens):
            return self.local.complete(ids, max_new_tokens)

    local = LocalLLM(tiny("qwen3", 5))
    a, b = prompts(4, 9)
    asked = [a, b.tolist(), b], [[5, EOS, 5], torch.tensor([6]), []]
    found = Plain(local).complete_branches(*asked, 5)
    assert lists(found) == lists(local.complete_branches(*asked, 5))
    assert {new.dtype for group in found for new in group} == {torch.int64}
    with pytest.raises(ValueError, match="branches:"):
        Plain(local).complete_branches([a], [[5], [6]], 5)


def test_ties_go_to_the_lowest_id_and_k_is_clamped():
    model = tiny("qwen3", 7, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[20:] = model.lm_head.weight[:1]
    llm = LocalLLM(model)
    found = llm.candidates(prompts(5)[0], 1000)
    assert len(found.ids) == V
    tied = [token for token in found.ids.tolist() if token == 0 or token >= 20]
    assert tied == sorted(tied)
    assert float(found.logprob.exp().sum()) == pytest.approx(1.0, abs=1e-5)


def test_padded_ids_never_count():
    model = tiny("qwen3", 8, tie_word_embeddings=False, vocab_size=64)
    with torch.no_grad():
        model.lm_head.weight[50:] *= 20
    llm = LocalLLM(model, valid_vocab=50)
    assert llm.vocabulary == 50
    (ids,) = prompts(6)
    found = llm.candidates(ids, 64, [49, 60])
    assert sorted(found.ids.tolist()) == list(range(50))
    assert float(found.logprob.exp().sum()) == pytest.approx(1.0, abs=1e-5)
    assert found.score_logprob[1] == -torch.inf
    assert max(llm.complete(ids, 20)) < 50
    assert max(int(sample.max()) for sample in llm.sample_many([ids], 4, 10)[0]) < 50


def test_samples_repeat_with_their_seed_whatever_the_batch_and_leave_the_generator_alone():
    model, asked, warm = tiny("qwen3", 9), prompts(3, 8, 5), {"temperature": 1.5, "top_p": 1.0, "top_k": 0}
    llm = LocalLLM(model, batch_tokens=64)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first = lists(llm.sample_many(asked, 4, 6, seed=3, **warm))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert first == lists(llm.sample_many(asked, 4, 6, seed=3, **warm))
    assert first != lists(llm.sample_many(asked, 4, 6, seed=4, **warm))
    assert [len(one) for one in first] == [4, 4, 4]
    assert len({tuple(sample) for sample in first[0]}) > 1
    assert not any(EOS in sample[:-1] for samples in first for sample in samples)
    for ids, samples, coldest in zip(asked, first, lists(llm.sample_many(asked, 2, 6, top_k=1)), strict=True):
        alone = LocalLLM(model, batch_tokens=1).sample_many([ids.tolist()], 2, 6, seed=3, **warm)
        assert lists(alone) == [samples[:2]]
        assert coldest == [greedy(model, ids, 6)] * 2


@pytest.mark.parametrize(
    ("spread", "settings"),
    [(3.0, {"temperature": 1.3, "top_p": 0.9, "top_k": 12}), (0.3, {})],
    ids=["given", "default"],
)
def test_samples_follow_the_truncated_distribution(spread, settings):
    model = tiny("qwen3", 12, spread=spread)
    llm = LocalLLM(model)
    (ids,) = prompts(5)
    temperature, top_p, top_k = settings.values() or (0.7, 0.8, 20)
    p = (full(model, ids) / temperature).sort(descending=True)
    chances = p.values[:top_k].softmax(0)
    kept = int((chances.cumsum(0) - chances < top_p).sum())
    wanted = (chances[:kept] / chances[:kept].sum()).tolist()
    n = 3000
    drawn = [int(sample) for sample in llm.sample_many([ids], n, 1, seed=7, **settings)[0]]
    order = p.indices[:kept].tolist()
    assert set(drawn) <= set(order)
    for token, chance in zip(order, wanted, strict=True):
        assert drawn.count(token) / n == pytest.approx(chance, abs=4 * (chance * (1 - chance) / n) ** 0.5 + 1e-3)


def test_batches_bound_tokens_and_rows():
    assert list(batches([3, 9, 4, 9, 1], 5, 28)) == [[1, 3], [2, 0, 4]]
    assert list(batches([100, 1], 1, 10)) == [[0], [1]]
    assert [len(batch) for batch in batches([1] * 600, 0, 10**6)] == [256, 256, 88]
    assert list(batches([], 0, 5)) == []


def test_defaults_of_the_base_class_loop():
    class Echo(LLM):
        def candidates(self, ids, k, score_ids=None):
            return Candidates(
                torch.arange(k), torch.zeros(k), None if score_ids is None else torch.zeros(len(score_ids))
            )

        def complete(self, ids, max_new_tokens):
            return ids[:max_new_tokens]

    llm = Echo()
    assert llm.vocabulary is None
    assert llm.ends == frozenset()
    assert llm.device == torch.device("cpu")
    assert [len(found.score_logprob) for found in llm.candidates_many(prompts(3, 2), 2, [[1], [1, 2]])] == [1, 2]
    assert [found.score_logprob for found in llm.candidates_many(prompts(3, 2), 2)] == [None, None]
    assert [tokens.shape for tokens in llm.complete_many(prompts(3, 2), 2)] == [(2,), (2,)]
    with pytest.raises(ValueError, match="llm:"):
        llm.sample_many(prompts(3), 2, 2)


IDS = prompts(4)[0]


@pytest.mark.parametrize(
    ("call", "times"),
    [
        (lambda llm: llm.complete_many([IDS, IDS], 2), 2),
        (lambda llm: llm.sample_many([IDS], 5, 2), 1),
        (lambda llm: llm.complete_branches([IDS], [[3, 4, 5]], 2), 2),
    ],
)
def test_ids_are_checked_once(call, times, monkeypatch):
    check = mock.Mock(side_effect=token_ids)
    for module in ("fb_core.models.tokens", "fb_core.llm.local"):
        monkeypatch.setattr(f"{module}.token_ids", check)
    call(LocalLLM(tiny("qwen3")))
    assert check.call_count == times


def bad(method, kind, **arguments):
    """(call, kind of the error, name in it): by the name that is wrong, arguments of a method of any LLM."""
    for name, several in arguments.items():
        for given in several:
            *positional, options = given if isinstance(given[-1], dict) else (*given, {})
            yield lambda llm, given=positional, options=options: getattr(llm, method)(*given, **options), kind, name


BAD_CALLS = [  # of any LLM with a vocabulary of V
    *bad("candidates", ValueError, ids=[([], 3), ([3, -1], 3), (IDS[None], 3)], k=[(IDS, 0)]),
    *bad("candidates", ValueError, score_ids=[(IDS, 3, [V])]),
    *bad("candidates", TypeError, ids=[(IDS.float(), 3), ("text", 3)]),
    *bad("candidates_many", ValueError, ids=[([IDS, IDS[:0]], 3)], score_ids=[([IDS], 3, [[1], [2]])]),
    *bad("complete", ValueError, max_new_tokens=[(IDS, 0)]),
    *bad("complete", TypeError, max_new_tokens=[(IDS, 1.5)], ids=[(None, 3)]),
    *bad("complete_branches", ValueError, branches=[([IDS], [], 3)]),
    *bad("complete_branches", ValueError, **{"ids|branches": [([IDS], [[V]], 3)]}),
    *bad("sample_many", ValueError, n=[([IDS], n, 3) for n in (0, 2.0, 10**12)], ids=[([[]], 1, 3)]),
    *bad("sample_many", ValueError, max_new_tokens=[([IDS], 1, 0)], temperature=[([IDS], 1, 3, {"temperature": 0.0})]),
    *bad("sample_many", ValueError, top_p=[([IDS], 1, 3, {"top_p": 0.0})], top_k=[([IDS], 1, 3, {"top_k": -1})]),
    *bad("sample_many", TypeError, top_k=[([IDS], 1, 3, {"top_k": 1.5})], ids=[([None], 1, 3)]),
    *bad("sample_many", TypeError, temperature=[([IDS], 1, 3, {"temperature": "1"})]),
]
BAD_LOCAL = [
    *bad("candidates", ValueError, ids=[([3] * 129, 3)]),
    *bad("complete", ValueError, ids=[([3] * 128, 3)]),
    *bad("complete_branches", ValueError, prefixes=[([[]], [[5]], 3), ([[3] * 128], [[5]], 3)]),
    *bad("complete_branches", ValueError, max_new_tokens=[([IDS], [[5]], 0)]),
    *bad("complete_branches", TypeError, branches=[([IDS], [[1.5]], 3)], max_new_tokens=[([IDS], [[5]], None)]),
    (lambda llm: LocalLLM(llm.model, batch_tokens=0), ValueError, "batch_tokens"),
    (lambda llm: LocalLLM(llm.model, valid_vocab=51), ValueError, "valid_vocab"),
    *((lambda llm: LocalLLM("qwen"), TypeError, "model"), (lambda llm: LocalLLM(tiny().train()), ValueError, "model")),
]


@pytest.mark.parametrize(("call", "kind", "named"), BAD_CALLS + BAD_LOCAL)
def test_bad_arguments_leave_the_object_usable(call, kind, named):
    llm = LocalLLM(tiny("qwen3", 10))
    llm.candidates(IDS[:2], 3)
    with pytest.raises(kind, match=named):
        call(llm)
    check(llm.candidates(IDS, 3), llm.model, IDS, 3)


def test_a_failed_forward_drops_the_cache():
    model = tiny("qwen3", 11, tie_word_embeddings=False)
    llm = LocalLLM(model)
    (ids,) = prompts(9)
    ids[ids == 4] = 5
    llm.candidates(ids[:5], 3)
    kept = model.get_input_embeddings().weight[4].clone()
    bad = torch.cat([ids[:6], torch.tensor([4])])
    with torch.no_grad():
        model.get_input_embeddings().weight[4] = torch.nan
    for call in (lambda: llm.candidates(bad, 3), lambda: llm.candidates_many([ids, bad], 3)):
        with pytest.raises(ValueError, match="model:"):
            call()
    check(llm.candidates(ids, 3), model, ids, 3)
    with torch.no_grad():
        model.get_input_embeddings().weight[4] = kept
    check(llm.candidates(bad, 3), model, bad, 3)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)  # the first layer's cache has grown by then
    with pytest.raises(KeyboardInterrupt):
        llm.candidates(torch.cat([bad, ids[:2]]), 3)
    handle.remove()
    longer = torch.cat([bad, ids[:2]])
    check(llm.candidates(longer, 3), model, longer, 3)


def test_training_mode_is_refused_at_a_query_too():
    llm = LocalLLM(tiny())
    llm.model.train()
    with pytest.raises(ValueError, match="eval mode"):
        llm.candidates(IDS, 3)
    assert llm.model.training
    llm.model.eval()
    check(llm.candidates(IDS, 3), llm.model, IDS, 3)
