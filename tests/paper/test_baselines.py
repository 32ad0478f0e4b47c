"""The peers: decision rules on logits made by hand, equality where one is another, losses against their formulas."""

import copy
import json
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import EOS, V, prompts, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from benchmarks.paper.methods import method
from benchmarks.paper.methods.external import load_external
from benchmarks.paper.methods.majority import majority, majority_vote
from benchmarks.paper.methods.spans import ending_ids, spans
from benchmarks.paper.methods.takeover import taking_over
from benchmarks.paper.s2t_local import SelectionSweep, selection_target
from fb_core import Optimisation, TokenReranker, TrainingGroup, TrainingTrajectory
from fb_core.apps.demo.pairs import load_pair
from fb_core.apps.pipeline import models
from fb_core.decode.decoder import CollaborativeDecoder, Usage
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import FutureBridgeSelector, LLMPreference, SLMPreference
from fb_core.events import LARGE, SLM
from fb_core.llm.local import LLM, Candidates, LocalLLM
from fb_core.models.checkpoints import checkpoint_ends, load_model, load_tokenizer
from fb_core.rerank.training import RerankerRun

ALWAYS, NEVER = RequestPolicy(-math.inf), RequestPolicy(math.inf)


def bigram(table):
    """A model of V ids whose logits after a token are that token's row of the table [V, V], whatever came before."""
    size = len(table)
    model = tiny("qwen3", vocab_size=size, tie_word_embeddings=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, 32))
        model.model.norm.weight.fill_(32**-0.5)  # of a one-hot row, whose mean square is 1 / 32
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :size] = torch.tensor(table).T
    return model


def words_tokenizer(size, **more):
    """One word an id, the end at EOS."""
    words = {f"w{token}": token for token in range(size)} | {"<end>": EOS} | more
    words = {word: token for word, token in words.items() if word != f"w{EOS}"}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0", eos_token="<end>"
    )


class Pools(models.Context):
    """A context of no run: two models, a policy and options of the decoder."""

    def __init__(self, slm, llm, policy, **options):
        self.given, self.options = (slm, llm), {"policy": policy, **options}

    def decoder(self, selector, **options):
        slm, llm = self.given
        return models.decoder_of(slm, llm, selector, **(self.options | options))


def by(name, slm, llm, policy, seed=None, **options):
    """What decodes by a method at events."""
    return method(name).decode(Pools(slm, llm, policy, **options), seed)


def greedy(slm, asked, length, **options):
    return models.greedy_decoder(slm, **options).generate_many(asked, length)


def takeover(slm, llm, policy, asked, length, **options):
    return taking_over(slm, llm, policy, **options)(asked, length)


def s2t_local(slm, reranker, policy, **options):
    """As a run deploys a reranker on the SLM's own pool."""
    return CollaborativeDecoder(slm, None, FutureBridgeSelector(reranker), policy, pool="slm", **options)


def tokens_of(generations):
    return [one.token_ids.tolist() for one in generations]


def same_number(a, b):
    return float(a) == float(b)


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        (["1", "2", "1"], 0),
        (["1", "2", "2.0", "3"], 1),
        (["1", "2", "2", "1"], 0),
        (["3", "1", "2", "2", "1"], 1),
        ([None, "2", None], 1),
        ([None, None, None, "5", "6", "6.0"], 4),
        ([None, None], None),
        ([], None),
    ],
)
def test_majority_is_over_classes_of_answers(answers, winner):
    assert majority_vote(answers, same_number) == winner


class Numbers:
    """What `majority` needs of a Verifier."""

    def equivalent(self, a, b):
        return a.split(".")[0] == b.split(".")[0]


def test_majority_samples_decodes_and_votes():
    sampler = LocalLLM(tiny("qwen3", 1))
    words = {f"\\boxed{{{token % 3}.{token}}}": token for token in range(3, V)} | {"<unk>": 0, "<end>": EOS, "word": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), unk_token="<unk>", eos_token="<end>"
    )
    asked = prompts(4, 7, 5)
    winners = majority(sampler, asked, Numbers(), tokenizer, 6, 12, seed=5)
    assert winners == majority(sampler, asked, Numbers(), tokenizer, 6, 12, seed=5)
    drawn = sampler.sample_many(asked, 6, 12, seed=5)
    for samples, winner in zip(drawn, winners, strict=True):
        last = [[int(token) for token in sample if token >= 3][-1:] for sample in samples]
        answers = [f"{box[0] % 3}.{box[0]}" for box in last if box]
        kinds = [answer[0] for answer in answers]
        wanted = max(answers, key=lambda a: (kinds.count(a[0]), -kinds.index(a[0]), -answers.index(a)))
        assert winner == wanted


@pytest.mark.parametrize("options", [{}, {"max_length": 20, "max_batch": 2}], ids=["plain", "fast"])
@pytest.mark.parametrize("threshold", [-math.inf, 1.5, 2.0, 2.3, math.inf])
def test_takeover_is_greedy_of_one_then_of_the_other(threshold, options):
    slm, llm = tiny("qwen3", 2), LocalLLM(tiny("qwen3", 3))
    asked = prompts(8, 4, 8, 8, 7, 8, seed=1)
    policy = RequestPolicy(threshold)
    found = takeover(slm, llm, policy, asked, 12, **options)
    alone = LocalLLM(slm).complete_many(asked, 12)
    for ids, small, generation in zip(asked, alone, found, strict=True):
        if not generation.events:
            assert torch.equal(generation.token_ids, small)
            continue
        (event,) = generation.events
        assert torch.equal(generation.token_ids[: event.step], small[: event.step])
        rest = llm.complete(torch.cat([ids, small[: event.step]]), 12 - event.step)
        assert torch.equal(generation.token_ids[event.step :], rest)
        assert event.token == int(rest[0])
        assert event.choice == 0
        assert event.entropy > threshold
        assert generation.text is None
    assert all(bool(generation.events) == (threshold < math.inf) for generation in found) or threshold > 0
    first = CollaborativeDecoder(slm, llm, LLMPreference(), policy, max_events=1).generate_many(asked, 12)
    assert [[event.step for event in one.events] for one in first] == [
        [event.step for event in one.events] for one in found
    ]


def test_takeover_at_the_limit_and_at_eos():
    slm, large = tiny("qwen3", 4), tiny("qwen3", 5)
    llm = LocalLLM(large)
    (ids,) = prompts(5)
    (one,) = takeover(slm, llm, RequestPolicy(-math.inf), [ids], 1)
    assert one.token_ids.tolist() == [one.events[0].token]
    large.generation_config.eos_token_id = one.events[0].token
    (ended,) = takeover(slm, llm, RequestPolicy(-math.inf), [ids], 9)
    assert ended.token_ids.tolist() == one.token_ids.tolist()
    assert takeover(slm, llm, RequestPolicy(1.0), [], 9) == []


@pytest.mark.parametrize("options", [{}, {"max_length": 200, "max_batch": 2}], ids=["plain", "fast"])
def test_takeover_where_the_llm_has_no_position_left(options):
    slm, llm = tiny("qwen3", 4, max_position_embeddings=400), tiny("qwen3", 5, max_position_embeddings=100)
    for model in (slm, llm):
        model.generation_config.eos_token_id = None
    full, short = takeover(slm, llm, RequestPolicy(-math.inf), prompts(99, 5), 20, **options)
    assert (len(full.token_ids), len(short.token_ids)) == (1, 20)


STEP_ENDS = frozenset(range(5, V, 4))


@torch.no_grad()
def spans_by_definition(slm, llm, ids, threshold, budget, length):
    """Spans, a full forward for every token.

    Returns (tokens, steps of the events, tokens that the LLM wrote after theirs, the last position that it computed).
    """
    tokens, steps, written, read, writing, ends = ids.tolist(), [], 0, 0, False, {EOS, 7}
    while len(tokens) < len(ids) + length and (len(tokens) == len(ids) or tokens[-1] not in ends):
        small, large = (model(torch.tensor([tokens])).logits[0, -1] for model in (slm, llm))
        entropy = float(-(small.softmax(0) * small.log_softmax(0)).sum())
        if writing:
            written += 1
        elif entropy > threshold and len(steps) < budget:
            steps.append(len(tokens) - len(ids))
            writing = True
        read = len(tokens) - len(ids) if writing else read
        tokens.append(int((large if writing else small).argmax()))
        writing = writing and tokens[-1] not in STEP_ENDS
    return tokens[len(ids) :], steps, written, read


@pytest.mark.parametrize("options", [{}, {"max_length": 49, "max_batch": 2}], ids=["plain", "fast"])
@pytest.mark.parametrize(("threshold", "budget"), [(-math.inf, 1), (1.5, 2), (2.0, 8), (2.3, 3), (math.inf, 3)])
@pytest.mark.sweep(6)
def test_spans_are_steps_of_the_llm_between_greedy_tokens(threshold, budget, options):
    asked, made = prompts(4, 9, 3, 6, 5, 8, seed=2), 0
    for seed in (2, 4, 6):
        slm, llm = tiny("qwen3", seed), tiny("qwen3", seed + 1)
        slm.generation_config.eos_token_id, llm.generation_config.eos_token_id = EOS, [EOS, 7]
        policy, given = RequestPolicy(threshold), {"step_ends": STEP_ENDS, "max_events": budget, **options}
        found = spans(slm, llm, policy, asked, 40, **given)
        for ids, one in zip(asked, found, strict=True):
            tokens, steps, written, read = spans_by_definition(slm, llm, ids, threshold, budget, 40)
            assert one.token_ids.tolist() == tokens
            assert [event.step for event in one.events] == steps
            assert [event.token for event in one.events] == [tokens[step] for step in steps]
            pool = 8.0 if steps else None
            assert one.usage == Usage(len(steps), pool, len(steps), written, read)
            made += written
    assert (made > 20) == (threshold < math.inf)


def test_spans_end_at_the_limits():
    slm, llm = tiny("qwen3", 4), tiny("qwen3", 5, max_position_embeddings=20)
    for model in (slm, llm):
        model.generation_config.eos_token_id = None
    policy, nothing = RequestPolicy(-math.inf), frozenset()
    (whole,) = takeover(slm, llm, policy, prompts(5), 15)
    for length in range(1, 16):  # a step without an end
        (one,) = spans(slm, llm, policy, prompts(5), length, step_ends=nothing)
        assert one.token_ids.tolist() == whole.token_ids[:length].tolist()
        assert one.usage[2:] == (1, length - 1, length - 1)
    full, short = spans(slm, llm, policy, prompts(19, 5), 30, step_ends=nothing, max_events=1)
    assert (len(full.token_ids), full.usage.suffix) == (30, 0)  # the LLM has no position left after its first token
    assert (len(short.token_ids), short.usage.suffix) == (30, 14)
    assert (
        full.token_ids[1:].tolist() == greedy(slm, [[*prompts(19, 5)[0], full.token_ids[0]]], 29)[0].token_ids.tolist()
    )
    assert spans(slm, llm, policy, [], 9, step_ends=nothing) == []


def test_a_step_ends_after_a_token_whose_text_holds_the_delimiter():
    tokenizer = load_pair("plans").world.tokenizer
    assert ending_ids(tokenizer, ".") == {tokenizer.get_vocab()[". "]}
    with pytest.raises(ValueError, match="delimiter: expected a text that some token holds, got 'xyz'"):
        ending_ids(tokenizer, "xyz")


# What may follow the prompt's token 7; behind it comes the end. The SLM's order is 4, 5, 6, the LLM's 3, 6, 5: its
# argmax is none of the SLM's two candidates, of which it prefers 5.
SMALL = [-9.0, -9.0, 0.5, 0.0, 3.0, 2.5, 2.0, -9.0]
LARGER = [-9.0, -9.0, 1.0, 4.0, 0.0, 2.0, 3.0, -9.0]
END = [0.0, 9.0] + [0.0] * 6


def hand_made():
    return tuple(bigram([END] * 7 + [row]) for row in (SMALL, LARGER))


def only_event(generate):
    (generation,) = generate([[7]], 5)
    (event,) = generation.events
    assert generation.token_ids.tolist() == [event.token, EOS]
    assert event.slm_logprob == pytest.approx(torch.tensor(SMALL).log_softmax(0)[event.pool].tolist(), abs=1e-4)
    return event


def test_decision_rules_by_hand():
    """Direct: argmax of p_T. S2T: that among the SLM's top k (evaluate_s2t.py, generate_hybrid, teacher_rerank)."""
    slm, llm = hand_made()
    options = {"slm_k": 2, "llm_k": 2, "max_events": 1}
    event = only_event(by("direct", slm, llm, ALWAYS, **options))
    assert (event.pool, event.sources, event.token) == ([4, 5, 3, 6], [SLM, SLM, LARGE, LARGE], 3)
    assert event.llm_logprob == pytest.approx(torch.tensor(LARGER).log_softmax(0)[event.pool].tolist(), abs=1e-4)
    event = only_event(by("one-token-takeover", slm, llm, ALWAYS, max_events=1))
    assert (event.pool, event.sources, event.token) == ([3], [LARGE], 3)
    event = only_event(by("s2t", slm, llm, ALWAYS, **options))
    assert (event.pool, event.sources, event.token) == ([4, 5], [SLM, SLM], 5)
    assert event.scores == event.llm_logprob
    event = only_event(by("slm-preference", slm, llm, ALWAYS, **options))
    assert (event.pool, event.token) == ([4, 5, 3, 6], 4)
    event = only_event(CollaborativeDecoder(slm, llm, SLMPreference(), ALWAYS, pool="llm", **options).generate_many)
    assert (event.pool, event.token) == ([3, 6], 6)
    assert tokens_of(greedy(slm, [[7]], 5)) == [[4, EOS]]
    drawn = [only_event(by("random", slm, llm, ALWAYS, seed=seed, **options)).token for seed in range(400)]
    assert [drawn.count(token) for token in (4, 5, 3, 6)] == pytest.approx([100] * 4, abs=35)
    assert drawn[:9] == [only_event(by("random", slm, llm, ALWAYS, seed=seed, **options)).token for seed in range(9)]


def test_where_the_llm_ties_both_take_the_lowest_id():
    slm, _ = hand_made()
    llm = bigram([END] * 7 + [[-9.0, -9.0, 1.0, 4.0, 0.0, 4.0, 3.0, -9.0]])
    assert only_event(by("direct", slm, llm, ALWAYS, slm_k=2, llm_k=2, max_events=1)).token == 3
    assert only_event(by("one-token-takeover", slm, llm, ALWAYS, max_events=1)).token == 3


def test_greedy_is_the_slm_by_itself_and_padding_never_counts():
    slm = tiny("qwen3", 6)
    asked = prompts(4, 9, 6)
    found = greedy(slm, asked, 12)
    assert tokens_of(found) == tokens_of(
        CollaborativeDecoder(slm, slm, LLMPreference(), NEVER).generate_many(asked, 12)
    )
    assert tokens_of(found) == [ids.tolist() for ids in LocalLLM(slm).complete_many(asked, 12)]
    assert tokens_of(greedy(slm, asked, 12, batch_tokens=1)) == tokens_of(found)
    assert not any(one.events or one.text for one in found)
    assert greedy(slm, [], 12) == []
    padded = bigram([END] * 7 + [[*SMALL[:7], 9.0]])  # the largest logit is that of no word
    assert tokens_of(greedy(padded, [[7]], 3)) == [[7, 7, 7]]
    (one,) = greedy(padded, [[7]], 3, tokenizer=words_tokenizer(7))
    assert one.token_ids.tolist() == [4, EOS]
    assert one.text == "w4"
    with pytest.raises(ValueError, match="slm: expected at least the tokenizer's 50 ids"):
        greedy(padded, [[7]], 3, tokenizer=words_tokenizer(V))


def test_an_external_checkpoint_is_decoded_as_the_slm_is(tmp_path):
    tokenizer, model = words_tokenizer(V), tiny("qwen3", 7)
    tokenizer.chat_template = "{{ messages }}"
    model.save_pretrained(tmp_path / "a")
    tokenizer.save_pretrained(tmp_path / "a")
    loaded = load_external(str(tmp_path / "a"), tokenizer, "cpu", "float32")
    assert not loaded.training
    (one,) = greedy(loaded, prompts(4), 12, tokenizer=tokenizer)
    assert one.token_ids.tolist() == tokens_of(greedy(model, prompts(4), 12, tokenizer=tokenizer))[0]
    assert one.text is not None
    others = {"swapped": words_tokenizer(V, w3=4, w4=3), "shorter": words_tokenizer(V - 1), "bare": words_tokenizer(V)}
    for name, other in others.items():  # the last one without the chat template
        model.save_pretrained(tmp_path / name)
        other.save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match=f"{name}: expected the run's tokenizer of 50 ids"):
            load_external(str(tmp_path / name), tokenizer)
    with pytest.raises(OSError, match="nowhere"):
        load_external(str(tmp_path / "nowhere"), tokenizer)


def shaken(model, **options):
    """A reranker whose head prefers something."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        reranker = TokenReranker.from_base(model, rank=2, **options)
        with torch.no_grad():
            reranker.head.copy_(torch.randn_like(reranker.head))
    return reranker


def test_what_needs_an_llm_is_refused_without_one():
    slm, policy = tiny("qwen3", 8), RequestPolicy(-math.inf)
    with pytest.raises(ValueError, match="selector: expected a reranker made on the decoder's own SLM"):
        s2t_local(slm, shaken(tiny("qwen3", 9)), NEVER)
    for name in ("direct", "one-token-takeover"):
        with pytest.raises(TypeError, match="llm: expected type LLM, got NoneType"):
            by(name, slm, None, policy)
    (prompt,) = prompts(5)
    with pytest.raises(ValueError, match="LLMPreference: expected scores that are numbers"):
        by("s2t", slm, None, policy)([prompt], 3)


class HighestId(LLM):
    """Prefers high ids, whatever came before."""

    def candidates(self, ids, k, score_ids=None):
        logprob = torch.linspace(-9.0, 0.0, V).log_softmax(0)
        asked = None if score_ids is None else logprob[torch.as_tensor(score_ids)]
        top = logprob.topk(k)
        return Candidates(top.indices, top.values, asked)

    def complete(self, ids, max_new_tokens):
        raise AssertionError


def test_a_trained_selector_does_what_s2t_did_with_the_llm():
    slm, policy, options = tiny("qwen3", 8), RequestPolicy(1.0), {"slm_k": 4}
    teacher = by("s2t", slm, HighestId(), policy, **options)
    data = []
    asked = prompts(*[5] * 60, seed=3)
    for ids, generation in zip(asked, teacher(asked, 12), strict=True):
        groups = [
            TrainingGroup(len(ids) + event.step, torch.tensor(event.pool), selection_target(event_logprob))
            for event in generation.events
            for event_logprob in [torch.tensor(event.llm_logprob)]
        ]
        data.append(TrainingTrajectory(torch.cat([ids, generation.token_ids]), groups))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reranker = TokenReranker.from_base(slm, rank=4)
    sweep = SelectionSweep([RerankerRun(reranker)], data, Optimisation(learning_rate=1e-2, epochs=8))
    while sweep.step < sweep.total:
        sweep.advance()
    agreeing = total = 0
    for generation in s2t_local(slm, reranker, policy, **options).generate_many(prompts(*[5] * 20, seed=4), 12):
        for event in generation.events:
            agreeing += event.token == max(event.pool)
            total += 1
    assert total > 40
    assert agreeing > 0.6 * total  # chance: 0.25


def test_a_checkpoint_cannot_bring_code_along(tmp_path, monkeypatch):
    """Not even where someone answers "y" on standard input, which transformers asks if it is left to decide."""
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: ...\n")
    classes = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": classes}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (load_model, load_tokenizer, checkpoint_ends):
        with pytest.raises((ValueError, OSError)):
            load(str(tmp_path))
    assert not ran.exists()


def test_an_adapter_beside_weights_is_never_applied_to_them(tmp_path):
    """Merged weights with the adapter's files left beside them: the adapter would count twice."""
    model = tiny("llama", tie_word_embeddings=False)
    made = Tokenizer(WordLevel({f"w{token}": token for token in range(V)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0")
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    both, adapter = tmp_path / "both", tmp_path / "adapter"
    for folder in (both, adapter):
        adapted.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    model.save_pretrained(tmp_path / "base")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "base")
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        wanted = adapted(ids).logits
        torch.testing.assert_close(load_model(str(adapter), "cpu")[0](ids).logits, wanted)  # an adapter alone
        adapted.merge_and_unload().save_pretrained(both)
        with pytest.raises(ValueError, match="both: expected weights alone, got an adapter beside them"):
            load_model(str(both), "cpu")
        (both / "adapter_config.json").unlink()
        torch.testing.assert_close(load_model(str(both), "cpu")[0](ids).logits, wanted)
