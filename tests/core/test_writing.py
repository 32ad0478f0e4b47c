"""Continuations over pages: those of the plain loop, with what prompts have in common computed once."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EOS, V, prompts, tiny

from fb_core.llm.local import LocalLLM
from fb_core.models.facts import max_positions
from fb_core.runtime import writing
from fb_core.runtime.kv_pages import SIZE, pages_of
from fb_core.runtime.paged_model import PagedModel
from fb_core.runtime.plain import Stop, lockstep

ROOM = 24


def greedy(rows, logits):
    return logits.argmax(-1).tolist()


def written(model, asked, batch_tokens=1 << 16, room=ROOM, ends=(EOS,)):
    stop = Stop(frozenset(ends), room, max_positions(model))
    return [row.new for row in writing.write(model, asked, stop, greedy, batch_tokens, V)]


def plainly(model, asked, room=ROOM, ends=(EOS,)):
    stop = Stop(frozenset(ends), room, max_positions(model))
    return [row.new for row in lockstep(model, asked, stop, lambda step: greedy(None, step.logits), 1 << 16)]


@contextmanager
def computed(monkeypatch):
    """The new tokens of every forward over prompts, and the rows of every step."""
    prefill, steps = [], []
    extend, forward = PagedModel.extend, PagedModel.forward

    def extending(self, parts):
        prefill.append(sum(len(part.tokens) for part in parts))
        return extend(self, parts)

    def going(self, ids, *args):
        steps.append(len(ids))
        return forward(self, ids, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PagedModel, "extend", extending)
        patch.setattr(PagedModel, "forward", going)
        yield prefill, steps


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_rows_are_those_of_the_plain_loop_however_scarce_the_pages(family):
    options = {"sliding_window": 70} if family == "mistral" else {}
    model = tiny(family, 3, max_position_embeddings=400, **options)
    asked = prompts(1, 2, 64, 65, 66, 130, 7, 200, 64, 3)
    asked += [torch.cat([asked[5][:129], ids]) for ids in prompts(1, 5, 70, seed=1)]  # share two pages with another
    asked += [asked[3], asked[0], asked[7]]
    ends = {EOS, 11, 12, 13}
    want = plainly(model, asked, ends=ends)
    assert len(set(map(len, want))) > 3  # rows leave at different times
    for batch_tokens in (1 << 16, 4 * SIZE, 1):
        assert written(model, asked, batch_tokens, ends=ends) == want


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 150), st.integers(0, 2)), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(1, 8),
)
def test_any_prompts_in_any_number_of_rows_and_pages(shapes, rows, pages):
    model = tiny("qwen3", 5, max_position_embeddings=160)
    whole = prompts(150, 150, 150, seed=4)
    asked = [torch.cat([whole[which][:length], torch.arange(3, 3 + more)]) for which, length, more in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(writing.ROWS, "cpu", rows)
        assert written(model, asked, pages * SIZE, room=9) == plainly(model, asked, room=9)


def test_what_prompts_have_in_common_is_computed_once(monkeypatch):
    model = tiny("qwen3", 4, max_position_embeddings=400)
    model.generation_config.eos_token_id = [V - 1]
    (stem,) = prompts(150)
    others = [torch.cat([stem[:140], ids]) for ids in prompts(9, 9, 9, seed=2)]
    with computed(monkeypatch) as (prefill, steps):
        written(model, [stem, stem, stem, *others], room=4, ends=())
    assert prefill == [149, 3 * (148 - 128)]  # the same prompt is copied; another one waits for two full pages
    assert steps[:2] == [3, 6]
    with computed(monkeypatch) as (prefill, _):
        LocalLLM(model).complete_branches([stem, others[0]], [[5, 6, 7], [8, 9]], 3)
    assert sum(prefill) == 149 + 148 - 128
    with computed(monkeypatch) as (prefill, steps):
        LocalLLM(model).sample_many([stem[:40]], 5, 3)
    assert (prefill, steps[0]) == ([39], 5)


def test_no_more_tokens_are_held_than_asked_for_but_for_one_long_sequence(monkeypatch):
    model, counts = tiny("qwen3", 4, max_position_embeddings=400), []
    make = PagedModel.__init__

    def making(self, model, length, count, **options):
        counts.append(count)
        make(self, model, length, count, **options)

    monkeypatch.setattr(PagedModel, "__init__", making)
    for batch_tokens in (1, 5 * SIZE, 10**9):
        written(model, prompts(300, 10, 10), batch_tokens)
    assert counts == [pages_of(300 + ROOM), pages_of(300 + ROOM), pages_of(300 + ROOM) + 2]
    assert written(model, []) == []


def test_another_row_takes_the_place_of_one_that_has_ended(monkeypatch):
    monkeypatch.setitem(writing.ROWS, "cpu", 8)
    model, asked = tiny("qwen3", 6), prompts(*[5] * 30)
    ends = set(range(0, V, 5))
    with computed(monkeypatch) as (_, steps):
        found = written(model, asked, ends=ends)
    assert found == plainly(model, asked, ends=ends)
    assert max(steps) == 8
    assert sum(steps) == sum(map(len, found))  # no row runs on behind its end
    assert len(steps) < sum(max(map(len, found[start : start + 8])) for start in range(0, 30, 8))
