"""What is peculiar to `branch_attention_qkv`: what rows see and keep, and calls that are out of range."""

from __future__ import annotations

import re
from typing import Any

import emulation
import pytest
import torch
from cases.base import Case, ids
from cases.branch_attention_qkv import CACHES, LENGTH, OP, in_16_bits, make
from layouts import laid
from test_contract import check, same
from torch import Tensor
from ways import names, running

from fb_kernels._runtime import cuda

WAYS = names(OP)
CPU = [way for way in WAYS if way.startswith("cpu")]
ONCE = [way for way in WAYS if way not in CPU[1:]]  # where the CPU's vectors change nothing
PAGES = {"cuda": 64}  # what an implementation takes, others any


def called(way: str, **sizes: Any) -> Case:
    """In a dtype that the implementation takes."""
    return OP.cast(make(**{"half": 32, "wide_tables": True} | sizes), OP.ways[way.partition(" ")[0]].dtypes[-1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sweep(2)
def test_what_is_not_finite_shows_where_it_is_seen(way: str, value: float) -> None:
    """Values after the held keys and before the window must not show; values that a row sees must."""
    case = called(way, held=70, window=20)
    with running(way):
        clean = case.fresh().run()[0]
        assert clean.isfinite().all()
        case.arguments["v_cache"][50] = value  # the first 51 lie before the window
        case.arguments["k_cache"][:50] = value
        assert torch.equal(case.fresh().run()[0], clean)
        for name in CACHES:
            seen = case.with_(**{name: case.arguments[name].clone()})
            seen.arguments[name][51, 1, 3] = value
            results = seen.fresh().run()
            check(OP, seen, results, [])
            assert torch.equal(results[0][:, :2], clean[:, :2])  # the other key head's
            assert name == "k_cache" or not results[0][:, 2:, 3].isfinite().any()


@pytest.mark.parametrize("held", [0, 65, 200])
@pytest.mark.parametrize("rows", [1, 4, 13])
@pytest.mark.parametrize("way", [*CPU, "cuda", "triton", "triton invariant"])
@pytest.mark.sweep(4)
def test_a_row_has_the_same_bits_in_any_company(way: str, rows: int, held: int) -> None:
    if way.startswith("triton"):
        rows, held = min(rows, 5), held // 5
    case, alone = called(way, rows=rows, held=held, spare=rows), rows // 2
    row = {name: case.arguments[name][alone : alone + 1].clone() for name in ("qkv", "positions", "slots")}
    with running(way), OP.ways[way.partition(" ")[0]].small():
        out = case.fresh().run()[0]
        assert torch.equal(case.fresh().run(**row)[0][0], out[alone])


RANGE = [
    *(({"held": ids(value)}, range(3)) for value in (-1, 10, (1 << 31) - 1, -(1 << 31))),
    *(({"slots": ids(5, value, 6)}, (1,)) for value in (0, 4, 9, (1 << 31) - 1)),
    *(({"positions": ids(0, 1, value)}, (2,)) for value in (-1, LENGTH, 1 << 30, -(1 << 31))),
]


@pytest.mark.parametrize(("changes", "wrong"), RANGE, ids=str)
@pytest.mark.parametrize("way", ONCE)
def test_out_of_range(way: str, changes: dict[str, Tensor], wrong: range | tuple[int, ...]) -> None:
    """An error where the host looks, elsewhere NaN in the rows that it concerns, and nothing is written for them."""
    case = called(way, held=5).with_(slots=ids(5, 8, 7)).with_(**changes)
    before = case.fresh()
    with running(way):
        if way == "reference" or way in CPU:
            with pytest.raises(ValueError, match=rf"^branch_attention_qkv: {next(iter(changes))}: expected "):
                case.run()
        else:
            out = case.run()[0]
            assert [row for row in range(3) if out[row].isnan().all()] == list(wrong)
            right = [row for row in range(3) if row not in wrong]
            assert out[right].isfinite().all()
            at = case.arguments["slots"][right].long()
            for name in CACHES:
                assert case.arguments[name][at].isfinite().all()
                before.arguments[name][at] = case.arguments[name][at]
    assert same([case.arguments[name] for name in CACHES], [before.arguments[name] for name in CACHES])


def in_pages(way: str, **sizes: Any) -> Case:
    """Three sequences of two rows each in pages that an implementation takes; the first holds 150 tokens."""
    held = 30 if way.startswith("triton") else 150
    return called(way, rows=2, held=held, page=PAGES.get(way, 16), sequences=3, **sizes)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("way", WAYS)
def test_a_sequence_has_the_same_bits_in_any_company_and_pages(way: str, window: int | None) -> None:
    case, page = in_pages(way, window=window), PAGES.get(way, 16)
    given, pages = case.arguments, len(case.arguments["k_cache"])
    order = torch.randperm(pages, dtype=torch.int32)  # where each page goes
    moved = {name: torch.empty_like(given[name]).index_copy_(0, order.long(), given[name]) for name in CACHES}
    table = torch.where((given["block_table"] >= 0) & (given["block_table"] < pages), given["block_table"], 0)
    table, slots = order[table.long()], order[given["slots"].long() // page] * page + given["slots"] % page
    slots = slots.where(given["slots"] >= 0, -1)
    with running(way), OP.ways[way.partition(" ")[0]].small():
        out, *caches = case.fresh().run()
        for g in range(3):
            rows = slice(2 * g, 2 * g + 2)
            own = {name: given[name][rows].clone() for name in ("qkv", "positions")} | {"slots": slots[rows].clone()}
            own |= {"held": given["held"][g : g + 1].clone(), "block_table": table[g : g + 1].clone()}
            result, *kept = case.with_(**moved).fresh().run(**own)
            assert torch.equal(result, out[rows])
            for cache, before in zip(kept, caches, strict=True):
                at, was = (x[rows][x[rows] >= 0].long() for x in (slots, given["slots"]))
                assert torch.equal(cache.flatten(0, 1)[at], before.flatten(0, 1)[was])


WRONG_PAGES = [
    *(("held", 1, value, (2, 3)) for value in (-1, 10_000, (1 << 31) - 1, -(1 << 31))),
    *(("block_table", (1, 0), value, (2, 3)) for value in (-1, 10_000, (1 << 31) - 1, -(1 << 31))),
    *(("slots", 3, value, (3,)) for value in (None, 10_000_000, (1 << 31) - 1)),  # None: of a token that is held
]


@pytest.mark.parametrize(("name", "place", "value", "rows"), WRONG_PAGES)
@pytest.mark.parametrize("way", ONCE)
@pytest.mark.sweep(4)
def test_out_of_range_in_pages(
    way: str, name: str, place: int | tuple[int, int], value: int | None, rows: tuple[int, ...]
) -> None:
    """As of a flat cache: it concerns the sequence, or its row."""
    good, changed = in_pages(way, seed=3), in_pages(way, seed=3).arguments[name]
    assert good.arguments["held"][1] > 1
    changed[place] = int(good.arguments["block_table"][1, 0]) * PAGES.get(way, 16) + 1 if value is None else value
    case = good.fresh().with_(**{name: changed})
    with running(way):
        if way == "reference" or way in CPU:
            with pytest.raises(ValueError, match=rf"^branch_attention_qkv: {name}: expected "):
                case.run()
            assert same([case.arguments[name] for name in CACHES], [good.arguments[name] for name in CACHES])
            return
        (out, *caches), (want, *expected) = case.run(), good.fresh().run()
    right = [row for row in range(6) if row not in rows]
    assert out[list(rows)].isnan().all()
    assert torch.equal(out[right], want[right])
    for cache, full in zip(caches, expected, strict=True):
        full.flatten(0, 1)[good.arguments["slots"][list(rows)].long()] = torch.nan
        assert same([cache], [full])


@pytest.mark.parametrize("rows", [1, 5])
def test_compiled_rows_and_slots_may_lie_apart(rows: int) -> None:
    case = in_16_bits(rows=rows, held=65, spare=9)
    padded = {name: laid(case.arguments[name], around=8) for name in ("qkv", *CACHES)}
    padded["qkv"] = torch.nn.functional.pad(padded["qkv"], (8, 16), value=torch.nan)[:, 8:-16]
    for name in CACHES:
        padded[name] = torch.nn.functional.pad(padded[name], (0, 0, 0, 1), value=torch.nan)[:, :-1]
    with running("cuda"):
        check(OP, case, case.with_(**padded).run(), [])


@pytest.mark.parametrize("stream", [1, 2])  # on a host 1 stands for one that captures
@pytest.mark.skipif(torch.cuda.is_available(), reason="its library takes host pointers")
def test_a_launch_leaves_kept_counters_as_it_found_them(stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several blocks for a key head the last to arrive merges, at every replay."""
    case = in_16_bits(rows=5, held=200, spare=5, kv_heads=1)

    class OnStream:
        def __getattr__(self, name: str) -> Any:
            found = getattr(emulation.library(), name)
            return (lambda **given: found(**given | {"stream": stream})) if name == "fb_branch_attention_qkv" else found

    with running("cuda"):
        want = case.fresh().run()[0]
        monkeypatch.setattr(cuda, "library", OnStream)
        for _ in range(3):
            assert torch.equal(case.fresh().run()[0], want)


def test_tables_of_nothing_are_not_read() -> None:
    with running("cuda"), pytest.raises(ValueError, match="expected arguments that the cuda kernel takes"):
        in_16_bits().run(cos=torch.ones(0, 64), sin=torch.ones(0, 64))


def test_the_graphs_of_an_engine_have_counters_of_their_own() -> None:
    """Without, each launch in a graph is behind another one that clears them: 64 rows of Qwen3-1.7B, and candidates."""
    (counters,) = re.findall(r"kGraphCounters = 1 << (\d+);", (emulation.SOURCES / "counters.cuh").read_text())
    steps, candidates = 2 * (1 + 2 + 4 + 8 + 16 + 32 + 64), 16 * (1 + 2 + 4)  # rows of all graphs
    assert 2 * (steps + candidates) * 8 * 28 < 1 << int(counters)  # of key heads and layers
