"""Parts of logged pools against those that a decoder forms at the same state, ties and overlap included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fb_core.apps.pipeline.scores import reduce_pool
from fb_core.decode.asking import candidate_pool
from fb_core.llm.local import LLM, Candidates

KINDS = ("joint", "slm", "llm", "slm-wide")


class Table(LLM):
    """Of these logits [V], whatever is asked; ties to the lowest id, as every LLM has them."""

    def __init__(self, logits):
        self.logprob = torch.tensor(logits).log_softmax(0)

    def candidates(self, ids, k, score_ids=None):
        order = sorted(range(len(self.logprob)), key=lambda token: (-float(self.logprob[token]), token))
        top = torch.tensor(order[:k])
        return Candidates(top, self.logprob[top], None if score_ids is None else self.logprob[score_ids])

    def complete(self, ids, max_new_tokens):
        raise AssertionError("not asked for")


def logged(small, llm, slm_k, llm_k):
    """As the stages log it: both models' k of the SLM's candidates, then the LLM's own."""
    return candidate_pool(small, llm, [torch.tensor([0])], "joint", slm_k + llm_k, llm_k)[0]


def formed(small, llm, slm_k, llm_k, kind):
    wide = kind == "slm-wide"
    asked = ("slm", slm_k + llm_k) if wide else (kind, slm_k)
    return candidate_pool(small, llm, [torch.tensor([0])], *asked, llm_k)[0]


def assert_alike(small, large, slm_k, llm_k, kind):
    small, llm = torch.tensor([small]), Table(large)
    found = reduce_pool(logged(small, llm, slm_k, llm_k), slm_k, kind)
    wanted = formed(small, llm, slm_k, llm_k, kind)
    assert found.ids.tolist() == wanted.ids.tolist()
    assert found.sources.tolist() == wanted.sources.tolist()
    assert torch.equal(found.llm_logprob, wanted.llm_logprob)
    assert torch.equal(found.slm_logprob, wanted.slm_logprob)
    assert (found.ids.dtype, found.sources.dtype, found.llm_logprob.dtype) == (torch.int64, torch.int32, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_a_part_of_a_logged_pool_is_the_deployed_one(kind, data):
    size = data.draw(st.integers(2, 9))
    logits = st.lists(st.integers(-2, 2).map(float), min_size=size, max_size=size)  # ties are the rule
    slm_k, llm_k = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    assert_alike(data.draw(logits), data.draw(logits), slm_k, llm_k, kind)


def test_the_llm_keeps_its_order_where_the_slm_has_another():
    small, large = [0.0, 1.0, 5.0, 9.0, 2.0, 0.0], [0.0, 0.0, 3.0, 3.0, 3.0, 0.0]
    pool = logged(torch.tensor([small]), Table(large), 1, 3)
    assert pool.ids.tolist() == [3, 2, 4, 1]
    assert reduce_pool(pool, 1, "llm").ids.tolist() == [2, 3, 4]
    assert reduce_pool(pool, 1).ids.tolist() == [3, 2, 4]
    assert reduce_pool(pool, 1).sources.tolist() == [3, 2, 2]
    assert reduce_pool(pool, 1, "slm").sources.tolist() == [1]
    assert reduce_pool(pool, 1, "slm-wide").ids.tolist() == [3, 2, 4, 1]
    assert reduce_pool(pool, 1, "slm-wide").sources.tolist() == [1, 1, 1, 1]


def test_both_models_at_one_and_nothing_in_common():
    for kind in KINDS:
        assert_alike([4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0], 2, 2, kind)
        assert_alike([4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0], 2, 2, kind)
