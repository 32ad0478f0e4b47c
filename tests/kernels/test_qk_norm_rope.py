"""What is peculiar to `qk_norm_rope`: Qwen3's own words, tables, and a cache that is written or not."""

from __future__ import annotations

import pytest
import torch
from cases.base import Case
from cases.qk_norm_rope import LENGTH, OP, WRITTEN, make, make_written
from torch import Tensor
from ways import names, running_small

from fb_kernels import qk_norm_rope
from fb_kernels.qk_norm_rope import reference
from fb_kernels.qk_norm_rope.naive import qk_norm_rope as naive
from fb_kernels.testing import poison_

every_way = pytest.mark.parametrize("way", names(OP))
UNREAD = [way for way in names(OP) if not way.startswith("cpu")]  # take what a host reads as a device does, or nothing


def single(rows: int = 5) -> Case:
    return OP.cast(make(rows, 4), torch.float32)


def caches(size: int = 7) -> Tensor:
    """k's and v's."""
    return poison_(torch.empty(2, size, 2, 8))


@every_way
def test_matches_hugging_face(way: str) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    case = single()
    qkv, q_weight, k_weight, cos, sin, positions = (x.clone() for x in case.tensors.values())
    norms = Qwen3RMSNorm(8, 1e-3), Qwen3RMSNorm(8, 1e-3)
    for norm, weight in zip(norms, (q_weight, k_weight), strict=True):
        norm.weight.data.copy_(weight)
    heads = qkv.view(1, 5, 8, 8)
    q, k = norms[0](heads[:, :, :4]), norms[1](heads[:, :, 4:6])
    q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos[positions][None], sin[positions][None])
    with running_small(OP, way):
        ours = case.run()
    torch.testing.assert_close(ours[0], q[0].transpose(0, 1).detach())
    torch.testing.assert_close(ours[1], k[0].transpose(0, 1).detach())


@pytest.mark.parametrize("way", UNREAD)
def test_float32_tables_serve_low_precision(way: str) -> None:
    case = single()
    low = OP.cast(case, torch.bfloat16).with_(cos=case.arguments["cos"], sin=case.arguments["sin"])
    with running_small(OP, way):
        mine = low.run()
    for ours, expected in zip(mine, naive(**OP.cast(low, torch.float64).arguments), strict=True):
        assert torch.equal(ours, expected.bfloat16())


@every_way
def test_a_cache_whose_keys_lie_beside_its_values(way: str) -> None:
    case, slots = single(), torch.tensor([4, -1, 0, 6, -2])
    k_cache, v_cache = poison_(torch.empty(7, 2, 2, 8)).unbind(1)
    with running_small(OP, way):
        plain, written = case.run(), case.run(kv_out=(k_cache, v_cache, slots))
    assert all(map(torch.equal, written, plain))
    for cache, rows in ((k_cache, plain[1]), (v_cache, plain[2])):
        assert torch.equal(cache[[4, 0, 6]], rows[[0, 2, 3]])
        assert cache[[1, 2, 3, 5]].isnan().all()


def test_a_cache_needs_no_grad() -> None:
    case = OP.cast(make_written(7, range(5), half=4), torch.float32)
    for name in ("qkv", "q_weight", "k_weight"):
        needy = case.with_(**{name: case.tensors[name].clone().requires_grad_()})
        with pytest.raises(ValueError, match=f"qk_norm_rope_out: {name}: expected a tensor that needs no gradient"):
            needy.run()
        with torch.no_grad():
            needy.run()


READING = [way for way in names(WRITTEN) if way not in ("device", "triton")]  # indices, on the host


@pytest.mark.parametrize("way", READING)
@pytest.mark.parametrize(("slot", "position"), [(7, 0), (2, 0), (1, LENGTH)])
def test_a_refused_call_leaves_the_cache_alone(way: str, slot: int, position: int) -> None:
    case, written = single(3), caches()
    slots, positions = torch.tensor([0, 2, slot]), torch.tensor([1, 2, position])
    changes = {"cos": torch.ones(LENGTH, 8), "sin": torch.ones(LENGTH, 8), "positions": positions}
    with running_small(OP, way), pytest.raises(ValueError, match=r"^qk_norm_rope: (kv_out|positions): expected"):
        case.run(**changes, kv_out=(*written, slots))
    assert written.isnan().all()


@pytest.mark.parametrize("way", UNREAD)
@pytest.mark.parametrize("slots", [[6, 2, 7, -1, 100], [-1] * 5, [7] * 5], ids=str)
def test_out_of_range_where_the_host_does_not_look(way: str, slots: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device values are not read: such rows are NaN, or not written."""
    monkeypatch.setattr(reference, "_host_reads", lambda _: False)
    case, cache = single(), caches()
    positions = case.tensors["positions"].clone()
    positions[1], positions[3] = -1, LENGTH
    with running_small(OP, way):
        clean = case.run()
        q, k, v = qk_norm_rope(**case.changed(positions=positions, kv_out=(*cache, torch.tensor(slots))))
    assert torch.equal(v, clean[2])
    for mine, expected in ((q, clean[0]), (k, clean[1])):
        assert torch.equal(mine[[0, 2, 4]], expected[[0, 2, 4]])
        assert mine[[1, 3]].isnan().all()
    for slot in range(7):
        expected = v[slots.index(slot)] if slot in slots else torch.full((2, 8), torch.nan)
        torch.testing.assert_close(cache[1][slot], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("positions", "said"), [([0, 99], 99), ([-3, 0], -3)])
def test_the_position_that_is_outside_is_named(positions: list[int], said: int) -> None:
    case = single(2)
    with pytest.raises(ValueError, match=rf"^qk_norm_rope: positions: expected 0 to {LENGTH - 1}, .*, got {said}; "):
        case.run(positions=torch.tensor(positions))
