"""The definitions, `naive.py` in every op's folder, against what torch and transformers offer on ordinary inputs."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fb_kernels.branch_attention.naive import branch_attention
from fb_kernels.branch_attention_qkv.naive import branch_attention_qkv
from fb_kernels.candidate_head.naive import candidate_head
from fb_kernels.commit import DecodeState, Halt
from fb_kernels.commit.naive import commit_
from fb_kernels.compatibility_targets.naive import compatibility_targets
from fb_kernels.group_cross_entropy.naive import group_cross_entropy
from fb_kernels.joint_pool.naive import joint_pool
from fb_kernels.linear_logprob.naive import combine_logprob_partials, linear_logprob, linear_logprob_partials
from fb_kernels.merge_attention_states.naive import merge_attention_states
from fb_kernels.qk_norm_rope.naive import qk_norm_rope
from fb_kernels.rms_norm.naive import rms_norm
from fb_kernels.skinny_linear.naive import skinny_linear
from fb_kernels.swiglu.naive import swiglu
from fb_kernels.topk_entropy.naive import topk_entropy

PATHS = sorted((Path(__file__).resolve().parents[2] / "fb_kernels").glob("*/naive.py"))
NAN, INF = math.nan, math.inf
GROUPS = torch.tensor([0, 3, 6])


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Float64 that takes gradients."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def close(mine: Tensor | Sequence[Tensor], theirs: Tensor | Sequence[Tensor], *leaves: Tensor) -> None:
    """Equal, with equal gradients to the leaves from the outputs that carry any."""
    one, other = ([x] if isinstance(x, Tensor) else list(x) for x in (mine, theirs))
    torch.testing.assert_close(one, other, equal_nan=True, check_dtype=False)
    if leaves:
        kept = [index for index, x in enumerate(one) if x.requires_grad]
        upstream = [randn(*one[index].shape, seed=9).detach() for index in kept]
        grads = [torch.autograd.grad([each[index] for index in kept], leaves, upstream) for each in (one, other)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.parent.name)
def test_a_definition_is_short(path: Path) -> None:
    """At most 40 lines of code, a signature one of them."""
    source = path.read_text(encoding="utf-8")
    code = {number for number, line in enumerate(source.splitlines(), 1) if line.strip()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            code -= set(range(node.lineno + 1, node.body[0].lineno))
        if isinstance(node, ast.FunctionDef | ast.Module) and ast.get_docstring(node):
            code -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    assert len(code) <= 40


def test_rms_norm() -> None:
    x, weight, residual = randn(3, 4, 8), randn(8), randn(3, 4, 8, seed=1)
    close(rms_norm(x, weight, 0.1), (F.rms_norm(x, (8,), weight, 0.1), x), x, weight)
    summed = x + residual
    close(rms_norm(x, weight, 0.1, residual), (F.rms_norm(summed, (8,), weight, 0.1), summed), x, weight, residual)


def test_swiglu() -> None:
    x = randn(3, 4, 10)
    close(swiglu(x), F.silu(x[..., :5]) * x[..., 5:], x)


def test_skinny_linear() -> None:
    x, weight, bias, norm, residual = randn(3, 5), randn(8, 5), randn(8), randn(5), randn(3, 8)
    close(skinny_linear(x, weight, bias), F.linear(x, weight, bias))
    normed = F.linear(F.rms_norm(x, (5,), norm, 0.1), weight)
    close(skinny_linear(x, weight, norm_weight=norm, eps=0.1, residual=residual), normed + residual)
    gate, up = normed.chunk(2, -1)
    close(skinny_linear(x, weight, norm_weight=norm, eps=0.1, swiglu=True), F.silu(gate) * up)


def test_linear_logprob() -> None:
    hidden, weight, bias = randn(2, 3, 5), randn(9, 5), randn(9)
    weight.data[7:], bias.data[7:] = NAN, INF  # padding
    target = torch.tensor([[0, 3, -100], [6, 3, 1]])
    logits = 3.0 * torch.tanh((0.5 * F.linear(hidden, weight[:7]) + bias[:7]) / 3.0) / 0.7
    counted = target != -100
    want = (
        -F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(2, 3),
        logits.logsumexp(-1) * counted,
        torch.distributions.Categorical(logits=logits).entropy() * counted,
        logits.detach().softmax(-1).amax(-1).log() * counted,
    )
    options: dict[str, Any] = {"logit_scale": 0.5, "softcap": 3.0, "temperature": 0.7, "valid_vocab": 7}
    close(linear_logprob(hidden, weight, target, bias, **options), want, hidden, weight, bias)


def test_linear_logprob_of_strange_rows() -> None:
    hidden = torch.tensor([[NAN, 1.0], [INF, 1.0], [-INF, 0.0], [NAN, NAN], [0.0, 0.0]], requires_grad=True)
    weight, target = torch.tensor([[1.0, 0.0], [2.0, 1.0]]), torch.tensor([0, 0, 0, -100, 1])
    logprob, lse, entropy, largest = linear_logprob(hidden, weight, target)
    close(logprob, torch.tensor([NAN, NAN, NAN, 0.0, -math.log(2)]))
    close(lse, torch.tensor([NAN, NAN, -INF, 0.0, math.log(2)]))
    close(entropy, torch.tensor([NAN, NAN, NAN, 0.0, math.log(2)]))
    close(largest, torch.tensor([NAN, NAN, NAN, 0.0, -math.log(2)]))
    (grad,) = torch.autograd.grad(logprob[3:].sum(), hidden)
    assert not grad[3].any()


@pytest.mark.parametrize("cuts", [[0, 9], [0, 2, 2, 8, 9]])
def test_partials_of_shards_combine_to_the_whole(cuts: list[int]) -> None:
    hidden, weight, bias = randn(2, 3, 5), randn(9, 5), randn(9)
    weight.data[7:] = NAN  # padding
    target = torch.tensor([[0, 3, -100], [6, 3, 1]])
    options: dict[str, Any] = {"softcap": 3.0, "valid_vocab": 7}
    parts = [
        linear_logprob_partials(hidden, weight[a:b], target, vocab_start=a, bias=bias[a:b], **options)
        for a, b in pairwise(cuts)
    ]
    combined = combine_logprob_partials(*(torch.stack(part).flatten(1) for part in zip(*parts, strict=True)))
    whole = linear_logprob(hidden, weight, target, bias, **options)[:2]
    close(combined, [x.flatten() for x in whole], hidden, weight, bias)


def test_partials_of_strange_rows() -> None:
    hidden, target = torch.tensor([[-INF], [0.0], [INF]]), torch.tensor([0, -100, 0])
    weight = torch.ones(2, 1)
    top, sumexp, picked = linear_logprob_partials(hidden, weight, target, vocab_start=0)
    close((top, sumexp, picked), torch.tensor([[-INF, -INF, INF], [1.0, 0.0, NAN], [-INF, -INF, INF]]).unbind())
    empty = linear_logprob_partials(hidden, weight[:0], target, vocab_start=2)
    close(empty, torch.tensor([[-INF] * 3, [0.0] * 3, [-INF] * 3]).unbind())


def dense(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the last rows q[R, Hq, E] of a sequence of keys k[n, Hkv, E], by SDPA where there is no cap."""
    rows, n, repeat = len(q), len(k), q.shape[1] // k.shape[1]
    position = torch.arange(n - rows, n)[:, None]
    mask = (torch.arange(n) <= position) & (position - torch.arange(n) < (window or n))
    q, k, v = q.transpose(0, 1), *(x.repeat_interleave(repeat, 1).transpose(0, 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)).masked_fill(~mask, -INF)
    out = F.scaled_dot_product_attention(q, k, v, mask) if softcap is None else scores.softmax(-1) @ v
    return out.transpose(0, 1), scores.logsumexp(-1)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 1.5}])
@pytest.mark.parametrize("paged", [False, True])
def test_branch_attention(options: dict[str, Any], paged: bool) -> None:
    """Two branches over six keys of the prefix, and a trajectory without one."""
    q, k, v = randn(10, 4, 8), randn(10, 2, 8, seed=1), randn(10, 2, 8, seed=2)
    flat = [randn(8, 2, 8, seed=seed).detach() for seed in (3, 4)]
    layout = {
        "cu_branch": torch.tensor([0, 3, 5, 10]),
        "cu_group": torch.tensor([0, 2, 3]),
        "prefix_start": torch.tensor([1, 0]),
        "prefix_len": torch.tensor([6, 0]),
    }
    prefix = flat
    if paged:
        prefix = [torch.stack([x[4:], x.new_full((4, 2, 8), NAN), x[:4]]) for x in flat]
        layout["block_table"] = torch.tensor([[2, 0, -1], [-1, -1, -1]])
    wanted = [
        dense(q[rows], *(torch.cat([x[1 : 1 + n], own[rows]]) for x, own in zip(flat, (k, v), strict=True)), **options)
        for rows, n in ((slice(0, 3), 6), (slice(3, 5), 6), (slice(5, 10), 0))
    ]
    outs, lses = zip(*wanted, strict=True)
    close(branch_attention(q, k, v, *prefix, **layout, **options), (torch.cat(outs), torch.cat(lses, 1)), q, k, v)
    alone = F.scaled_dot_product_attention(*(x[5:].transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    if not options:
        close(outs[2], alone.transpose(0, 1))


def test_branch_attention_of_strange_rows() -> None:
    one = torch.ones(3, 1, 1)
    layout = {"cu_branch": torch.arange(4), "cu_group": torch.arange(4), "prefix_start": torch.zeros(3).int()}
    keys = torch.tensor([-INF, INF]).view(2, 1, 1)
    layout["prefix_start"] = torch.tensor([0, 0, 1])
    lengths = torch.tensor([0, 1, 1])  # no key, a score of -inf, one of inf
    out, lse = branch_attention(one, None, None, keys, torch.ones(2, 1, 1), **layout, prefix_len=lengths)
    close(out.flatten(), torch.tensor([0.0, 0.0, NAN]))
    close(lse, torch.tensor([[-INF, -INF, NAN]]))


def test_merge_attention_states() -> None:
    q, keys, values = randn(1, 4, 8), randn(9, 4, 8, seed=1), randn(9, 4, 8, seed=2)
    states = []
    for part in (slice(0, 5), slice(5, 9)):
        scores = torch.einsum("the,nhe->htn", q, keys[part])
        states += [torch.einsum("htn,nhe->the", scores.softmax(-1), values[part]), scores.logsumexp(-1)]
    scores = torch.einsum("the,nhe->htn", q, keys)
    whole = torch.einsum("htn,nhe->the", scores.softmax(-1), values), scores.logsumexp(-1)
    close(merge_attention_states(*states), whole, q, keys, values)


def test_merging_empty_states() -> None:
    """The row's a, its b, neither."""
    outs = [torch.tensor(x).view(3, 1, 1).requires_grad_() for x in ([1.0, NAN, NAN], [NAN, 2.0, NAN])]
    lses = [torch.tensor([x], requires_grad=True) for x in ([3.0, -INF, -INF], [-INF, 4.0, -INF])]
    out, lse = merge_attention_states(outs[0], lses[0], outs[1], lses[1])
    close(out.flatten(), torch.tensor([1.0, 2.0, 0.0]))
    close(lse, torch.tensor([[3.0, 4.0, -INF]]))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum() + lse[:, :2].sum(), [*outs, *lses]))


def heads() -> tuple[dict[str, Any], list[Tensor]]:
    """Arguments of `qk_norm_rope`, and (q, k, v) from them by Hugging Face's rotation, [1, heads, T, E]."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    config = Qwen3Config(head_dim=8, hidden_size=32, num_attention_heads=4)
    positions = torch.arange(12)[None]
    cos, sin = (x[0].double() for x in Qwen3RotaryEmbedding(config)(randn(1, 12, 8), positions))
    built = {"qkv": randn(5, 64), "q_weight": randn(8), "k_weight": randn(8, seed=1), "cos": cos, "sin": sin}
    built |= {"positions": torch.tensor([3, 4, 5, 6, 11]), "num_heads": 4, "num_kv_heads": 2, "eps": 1e-6}
    q, k, v = built["qkv"].view(1, 5, 8, 8).transpose(1, 2).split([4, 2, 2], 1)
    q, k = (F.rms_norm(x, (8,), built[name], 1e-6) for x, name in ((q, "q_weight"), (k, "k_weight")))
    return built, [*apply_rotary_pos_emb(q, k, *(x[None, built["positions"]] for x in (cos, sin))), v]


def test_qk_norm_rope() -> None:
    built, theirs = heads()
    close(
        qk_norm_rope(**built),
        [x[0].transpose(0, 1) for x in theirs],
        *(built[x] for x in ("qkv", "q_weight", "k_weight")),
    )
    with torch.no_grad():
        caches, slots = [torch.full((6, 2, 8), NAN, dtype=torch.float64) for _ in range(2)], [4, -1, 0, 5, -2]
        *_, k, v = qk_norm_rope(**built, kv_out=(*caches, torch.tensor(slots)))
    for cache, rows in zip(caches, (k, v), strict=True):
        close(cache, torch.stack([rows[slots.index(slot)] if slot in slots else cache[1] for slot in range(6)]))
        assert cache[1].isnan().all()


@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_branch_attention_qkv(window: int | None) -> None:
    """Rows that are kept one after another are a causal sequence; the same at once are candidates for its end."""
    built, (q, k, v) = heads()
    caches = [torch.full((6, 2, 8), NAN, dtype=torch.float64) for _ in range(2)]
    names = ("k_cache", "v_cache")
    built |= dict(zip(names, caches, strict=True)) | {"window": window}
    rows = [built | {name: built[name][place : place + 1] for name in ("qkv", "positions")} for place in range(5)]
    got = [
        branch_attention_qkv(**row, held=torch.tensor([place]), slots=torch.tensor([place]))
        for place, row in enumerate(rows)
    ]
    close(torch.cat(got), dense(*(x[0].transpose(0, 1) for x in (q, k, v)), window)[0])
    candidates = branch_attention_qkv(**built, held=torch.tensor([4]))
    close(candidates[4:], got[4])
    close(caches[0][:5], k[0].transpose(0, 1))


@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_branch_attention_qkv_in_pages(window: int | None) -> None:
    """Each sequence is what it is over a flat cache, and keeps its rows in its pages."""
    built, _ = heads()
    built |= {"qkv": built["qkv"][:4], "positions": built["positions"][:4], "window": window}
    pages = [torch.full((7, 2, 2, 8), NAN, dtype=torch.float64) for _ in range(2)]
    table, held = torch.tensor([[5, 1, 3], [0, 6, -1]]), [4, 1]
    flat = [[randn(6, 2, 8, seed=2 * g + each) for each in range(2)] for g in range(2)]
    for own, row, length in zip(flat, table, held, strict=True):
        for token in range(length):
            for pool, cache in zip(pages, own, strict=True):
                pool[row[token // 2], token % 2] = cache[token]
    slots = torch.tensor([3 * 2 + 1, 3 * 2, -1, 0 * 2 + 1])  # of the second sequence the token 1
    lengths = torch.tensor(held)
    got = branch_attention_qkv(
        **built, k_cache=pages[0], v_cache=pages[1], held=lengths, slots=slots, block_table=table
    )
    for g, kept in enumerate(([5, 4], [-1, 1])):
        own = {name: built[name][2 * g : 2 * g + 2] for name in ("qkv", "positions")}
        caches = {"k_cache": flat[g][0], "v_cache": flat[g][1]}
        close(
            got[2 * g : 2 * g + 2],
            branch_attention_qkv(**built | own | caches, held=lengths[g : g + 1], slots=torch.tensor(kept)),
        )
    for pool, first, second in zip(pages, *flat, strict=True):
        close(pool[3], first[4:])
        close(pool[0], second[:2])
        assert pool[[2, 4]].isnan().all()


def test_candidate_head() -> None:
    hidden, norm, head, bias = randn(7, 8), randn(8), randn(8, seed=1), randn(1)
    score = F.linear(F.rms_norm(hidden, (8,), norm, 0.1), head[None], bias)[:, 0]
    grouped = score[:6].detach().view(2, 3)
    prob = F.pad(grouped.softmax(1).flatten(), (0, 1))
    got = candidate_head(hidden, norm, head, GROUPS, eps=0.1, head_bias=bias)
    close(got, (score, prob, grouped.argmax(1)), hidden, norm, head, bias)
    values = torch.tensor([1.0, NAN, 2.0, 2.0, NAN, NAN, -INF, 0.0, -0.0])[:, None]
    _, prob, best = candidate_head(values, None, torch.ones(1), torch.tensor([0, 4, 6, 7, 7, 9]), eps=0.0)
    assert best.tolist() == [2, -1, 0, -1, 0]
    assert prob.isnan().tolist() == [True] * 7 + [False] * 2


def test_group_cross_entropy() -> None:
    score, target = randn(7), torch.rand(7, dtype=torch.float64)
    for reduction in ("mean", "sum", "none"):
        want = F.cross_entropy(score[:6].view(2, 3), target[:6].view(2, 3), reduction=reduction)
        close(group_cross_entropy(score, target, GROUPS, reduction=reduction), want, score)
    silent = group_cross_entropy(
        torch.tensor([-INF, 0.0, NAN]), torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0, 2, 3, 3]), reduction="none"
    )
    assert not silent.any()


@pytest.mark.parametrize("alpha", [1.0, 0.3, 0.0])
def test_compatibility_targets(alpha: float) -> None:
    logprob, local = (-x.detach().square() for x in (randn(7, 5), randn(7)))
    means = torch.stack([logprob[:, :2].mean(1), logprob.mean(1)], 1)
    z, z_local = (  # the deviation of layer norm is the population's
        F.layer_norm(x[:6].view(2, 3, -1).mT, (3,), eps=0.0).mT for x in (means, local[:, None])
    )
    q = torch.softmax((alpha * z + (1 - alpha) * z_local) / 0.5, 1).flatten(0, 1)
    options: dict[str, Any] = {"local": local, "alpha": alpha, "eps": 0.0}
    close(compatibility_targets(logprob, GROUPS, horizons=[2, 5], **options), (means, F.pad(q, (0, 0, 0, 1))))


def test_compatibility_targets_without_spread() -> None:
    logprob = torch.tensor([[-0.1, -0.3], [-0.3, -0.1], [-1.0, NAN], [-2.0, -1.0]], dtype=torch.float64)
    _, q = compatibility_targets(logprob, torch.tensor([0, 2, 2, 4]), horizons=[2, 1], eps=0.0)
    assert q[:2, 0].tolist() == [0.5, 0.5]
    assert q[2:, 0].isnan().all()
    assert q[2:, 1].isfinite().all()


def test_joint_pool() -> None:
    lists = [torch.tensor([[[4, -1, 2, 4], [-1, -1, -1, 7]]]), torch.tensor([[[2, 9, 9], [-5, -1, -1]]])]
    ids, count, source = joint_pool(*lists)
    assert ids.tolist() == [[[4, 2, 9, -1, -1, -1, -1], [7, -1, -1, -1, -1, -1, -1]]]
    assert count.tolist() == [[3, 1]]
    for row in range(2):
        pool = ids[0, row, : count[0, row]]
        bits = [torch.isin(pool, each[0, row]).int() for each in lists]
        assert torch.equal(source[0, row], F.pad(bits[0] + 2 * bits[1], (0, 7 - len(pool))))


def test_topk_entropy() -> None:
    logits = randn(2, 3, 40)
    values, indices = logits.detach().topk(5)
    close(topk_entropy(logits, 5), (torch.distributions.Categorical(logits=values).entropy(), values, indices))
    rows = torch.tensor([[0.0, -0.0, 1.0, 0.0], [NAN, 1.0, INF, NAN], [-INF] * 4, [-INF, 0.0, -INF, 0.0]])
    entropy, _, order = topk_entropy(rows, 3)
    assert order.tolist() == [[2, 0, 1], [0, 3, 2], [0, 1, 2], [1, 3, 0]]
    assert entropy.isnan().tolist() == [False, True, True, False]
    close(entropy[3], torch.tensor(math.log(2)))


def test_commit() -> None:
    """A row of each kind: halted before, NaN, an event, that is out of budget, an end, the limit, a token."""
    rows = 7
    state = DecodeState(
        torch.zeros(rows, 4, dtype=torch.int64),
        torch.tensor([2, 2, 2, 2, 2, 3, 2]),
        torch.tensor([Halt.EVENT, *[Halt.NONE] * 6]),
        torch.tensor([1, 1, 1, 0, 1, 1, 1]),
    )
    commit_(
        state,
        torch.tensor([5, 5, 7, 5, 7, 5, 6]),
        torch.tensor([0.0, NAN, 2.0, 2.0, 1.0, 1.0, 1.0]),
        threshold=torch.tensor(1.0),
        eos_ids=torch.tensor([7, 8]),
        max_length=torch.tensor(3),
    )
    assert state.halt.tolist() == [Halt.EVENT, Halt.NAN, Halt.EVENT, Halt.NONE, Halt.EOS, Halt.LENGTH, Halt.NONE]
    assert state.tokens[:, 2].tolist() == [0, 0, 0, 5, 0, 0, 6]
    assert state.length.tolist() == [2, 2, 2, 3, 2, 3, 3]
