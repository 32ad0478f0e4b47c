import functools

import pytest
import torch
from plain import logits, models
from tiny import EOS, V, prompts, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from benchmarks.paper.methods.spec_reason import CHATML_JUDGE, CHUNK, JUDGE, spec_reason
from fb_core.llm.local import LLM, Candidates

BREAKS = (20, 21, 22, 23, 24, 25)  # ids whose text holds the delimiter
DIGITS = range(3, 13)


@functools.cache
def words():
    vocabulary = {"<unk>": 0, "<end>": EOS, "?": 2} | {str(digit): 3 + digit for digit in range(10)}
    vocabulary |= {chr(ord("a") + n) + "\n\n" * (13 + n in BREAKS): 13 + n for n in range(V - 13)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")


def naive_step(model, ids, most):
    step = []
    while len(step) < most:
        step.append(int(logits(model, ids + step).argmax()))
        if step[-1] in (EOS, *BREAKS):
            break
    return step


def naive(slm, llm, ids, max_new_tokens, threshold, step_tokens):
    ids, new, steps, read = ids.tolist(), [], [], 0
    while len(new) < max_new_tokens and (not new or new[-1] != EOS):
        most = min(step_tokens, max_new_tokens - len(new))
        draft = naive_step(slm, ids + new, most)
        shown = draft[:-1] if draft[-1] == EOS else draft
        score = int(logits(llm, ids + new + shown + [2])[list(DIGITS)].argmax())
        kept = draft if score >= threshold else naive_step(llm, ids + new, most)
        read += len(shown) + 1 + len(kept) * (kept is not draft)
        steps.append((len(new), len(kept), score, "slm" if score >= threshold else "llm", len(draft)))
        new += kept
    return new, steps, read - (steps[-1][3] == "llm")


def as_tuples(generation):
    return [(step.start, step.length, step.score, step.writer, step.drafted) for step in generation.steps]


def run(slm, llm, asked, limit=40, **options):
    return spec_reason(slm, llm, asked, limit, **{"tokenizer": words(), "judge_template": "?"} | options)


@pytest.mark.parametrize(("threshold", "step_tokens"), [(3, 7), (5, 40), (7, 5), (0, 6), (10, 6), (4.5, 1)])
@pytest.mark.sweep(2)
def test_it_is_the_naive_loop(threshold, step_tokens):
    slm, llm = models(1, 2)
    asked = prompts(4, 9, 6, 5, 7)
    found = run(slm, llm, asked, threshold=threshold, step_tokens=step_tokens)
    for ids, generation in zip(asked, found, strict=True):
        new, steps, read = naive(slm, llm, ids, 40, threshold, step_tokens)
        assert generation.read == read
        assert generation.token_ids.tolist() == new
        assert as_tuples(generation) == steps
        assert generation.events == []
        assert generation.text == words().decode(new, skip_special_tokens=True)
    writers = {step.writer for generation in found for step in generation.steps}
    assert writers == {"slm"} if threshold == 0 else {"llm"} if threshold == 10 else len(writers) >= 1


def test_both_writers_and_several_borders_are_met():
    slm, llm = models(1, 2)
    found = run(slm, llm, prompts(*range(3, 15)), threshold=4, step_tokens=9)
    steps = [step for generation in found for step in generation.steps]
    assert {step.writer for step in steps} == {"slm", "llm"}
    ends = {int(one.token_ids[step.start + step.length - 1]) for one in found for step in one.steps}
    assert ends & set(BREAKS)
    assert any(step.length == 9 for step in steps)
    for generation in found:
        assert [step.start for step in generation.steps] == [
            sum(step.length for step in generation.steps[:place]) for place in range(len(generation.steps))
        ]


class Judge(LLM):
    """Gives the scores it was told to and writes tokens it was told to."""

    def __init__(self, scores, written=()):
        self.scores, self.written, self.asked = list(scores), list(written), []

    def candidates(self, ids, k, score_ids=None):
        assert list(score_ids) == list(DIGITS)
        self.asked.append(list(ids))
        logprob = torch.full((10,), -5.0)
        logprob[self.scores.pop(0)] = -1.0
        return Candidates(torch.tensor([40]), torch.tensor([-0.1]), logprob)  # the likeliest token is no digit

    def complete(self, ids, max_new_tokens):
        return torch.tensor(self.written.pop(0)[:max_new_tokens], dtype=torch.int64)


def test_the_threshold_itself_accepts():
    (slm,) = models(1)
    (ids,) = prompts(5)
    judge = Judge([7, 6, 8, 7], [[30, 31, 20, 33]])
    (one,) = run(slm, judge, [ids], 8, step_tokens=2)
    assert [(step.score, step.writer) for step in one.steps][:2] == [(7, "slm"), (6, "llm")]
    assert one.token_ids[one.steps[1].start :][:2].tolist() == [30, 31]
    first = naive_step(slm, ids.tolist(), 2)
    assert judge.asked[0] == [*ids.tolist(), *first, 2]
    assert judge.asked[1][:-1] == [*ids.tolist(), *first, *naive_step(slm, ids.tolist() + first, 2)]


def test_the_llms_step_ends_behind_the_delimiter():
    (slm,) = models(1)
    (one,) = run(slm, Judge([0] * 2, [[30, 31, 20, 33, 34], [35, EOS, 36]]), prompts(5), 12)
    assert one.token_ids.tolist() == [30, 31, 20, 35, EOS]
    assert [step.length for step in one.steps] == [3, 2]


def test_a_long_step_of_the_llm_is_asked_for_in_chunks():
    (slm,) = models(1)
    (one,) = run(slm, Judge([0], [[30] * CHUNK, [31] * 5 + [22, 33]]), prompts(5), CHUNK + 6)
    assert one.token_ids.tolist() == [30] * CHUNK + [31] * 5 + [22]


def test_an_llm_that_has_nothing_to_say_ends_the_generation():
    (slm,) = models(1)
    (one,) = run(slm, Judge([0], [[]]), prompts(5), 12)
    assert one.token_ids.tolist() == []
    assert [(step.length, step.writer) for step in one.steps] == [(0, "llm")]


def test_the_end_of_sequence_inside_a_step():
    slm, llm = tiny("qwen3", 1), models(2)[0]
    (ids,) = prompts(5)
    draft = naive_step(slm, ids.tolist(), 4)
    slm.generation_config.eos_token_id = end = draft[2]
    place = draft.index(end)
    judge = Judge([9])
    (accepted,) = run(slm, judge, [ids], 30)
    assert accepted.token_ids.tolist() == draft[: place + 1]
    assert judge.asked == [[*ids.tolist(), *draft[:place], 2]]  # the end is not shown
    (rejected,) = run(slm, llm, [ids], 3, threshold=10)
    assert rejected.steps[0].drafted == min(3, place + 1)
    assert rejected.steps[0].writer == "llm"


def test_the_length_limit_cuts_the_last_step():
    slm, llm = models(1, 2)
    for limit in (1, 2, 5, 11):
        for one in run(slm, llm, prompts(4, 7), limit, threshold=5, step_tokens=4):
            assert len(one.token_ids) == sum(step.length for step in one.steps) <= limit
            assert len(one.token_ids) == limit or int(one.token_ids[-1]) == EOS
    short = tiny("qwen3", 1, max_position_embeddings=12)
    for one in run(short, llm, prompts(4, 7), 40, threshold=5):
        assert len(one.token_ids) <= 8


def test_a_delimiter_may_span_tokens():
    (slm,) = models(1)
    (one,) = run(slm, Judge([0] * 2, [[30, 31, 32, 33], [EOS]]), prompts(5), 9, delimiter=words().decode([31, 32]))
    assert one.token_ids.tolist() == [30, 31, 32, EOS]


def test_the_templates_end_where_the_score_belongs():
    assert JUDGE.endswith("Score: ")
    assert CHATML_JUDGE.endswith("<|im_start|>assistant\nScore: ")
    assert CHATML_JUDGE.startswith("<|im_end|>\n<|im_start|>user\n")


def test_digits_must_be_single_tokens():
    slm, llm = models(1, 2)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<unk>": 0, "<end>": EOS, "ab": V - 1}, unk_token="<unk>")),
        unk_token="<unk>",
    )
    with pytest.raises(ValueError, match="tokenizer: expected one token for each digit"):
        run(slm, llm, prompts(4), tokenizer=tokenizer)


def test_an_llm_without_the_asked_log_probabilities():
    class Silent(Judge):
        def candidates(self, ids, k, score_ids=None):
            return Candidates(torch.tensor([3]), torch.tensor([0.0]), None)

    with pytest.raises(ValueError, match="llm: expected log-probabilities of the ten digits"):
        run(models(1)[0], Silent([]), prompts(4))
