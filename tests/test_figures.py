"""README blocks and plots from a made-up folder of GPU results."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence import Cells
from benchmarks.gpu import gpu_status, roofline, targets
from benchmarks.pages import cost, event, figures
from benchmarks.paper.rows import Result, Run
from fb_core.apps.pipeline.statistics import Interval

ROOT = Path(__file__).resolve().parent.parent
GPU = figures.GPUS[0]
SIZES = {
    "branch_attention": [f"G=1 K=13 L=128 P={p}" for p in (1024, 2048)] + ["G=1 K=4 L=128 P=2048"],
    "score_group": ["K=13 H=128 P=1024", "G=3 K=13 H=128 P=1024", "G=4 K=13 H=128 P=2048"],
    "linear_logprob": ["N=13 D=2048 V=151936", "N=1664 D=2048 V=151936"],
    "decode_step": ["P=256, mean of 32 steps", "P=2048, mean of 32 steps"],
}
FILES = {"score_group": "scorer", "decode_step": "decode"}  # others have their op's name


def case(op: str, shape: str, impl: str, us: float | None, share: float | None) -> dict[str, Any]:
    times = {"median_us": us, "p10_us": us, "p90_us": us}
    about = {"op": op, "shape": f"{shape} (cold L2)", "impl": impl, "dtype": "bfloat16", "max_error": 0.01}
    return about | times | {"ok": us is not None, "fraction_of_ceiling": share, "peak_bytes": 8}


DRAW_WORLDS = figures.draw_worlds  # takes ten seconds; its own test runs it


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what the figures are made of, without GPU results.

    docs/evidence.md is not made: its intervals take most of the time of `figures.main`, and test_readme.py makes it.
    """
    monkeypatch.setattr(figures, "draw_worlds", lambda root: None)
    monkeypatch.delitem(figures.RENDERED, "docs/evidence.md")
    for device in ("cpu", "grpo", "soak"):
        shutil.copytree(ROOT / "benchmarks" / "results" / device, tmp_path / "benchmarks" / "results" / device)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "benchmarks" / "results" / "stages", tmp_path / "benchmarks" / "results" / "stages")
    for name in ("experiments", "evidence", "pretrained_pair"):
        if (ROOT / "docs" / name).exists():
            shutil.copytree(ROOT / "docs" / name, tmp_path / "docs" / name)
    for name in (name.removeprefix("docs/") for name in figures.RENDERED if name.startswith("docs/")):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs" / name)
    shutil.copy(ROOT / "benchmarks" / "NOTES.md", tmp_path / "benchmarks")
    return tmp_path


@pytest.fixture
def gpu_root(root: Path) -> Path:
    """The same with results: ours takes 40,000 us, the peers 80,000 and 120,000; one is wrong, one a bound."""
    folder = root / "benchmarks" / "results" / GPU
    folder.mkdir()
    for op, shapes in SIZES.items():
        cases = []
        for shape in shapes:
            cases.append(case(op, shape, "fb", 40_000.0, 0.5))
            cases.append(case(op, shape, "fb, one group at a time", 41_000.0, 0.4))
            cases += [case(op, shape, "slow peer", 120_000.0, 0.1), case(op, shape, "good peer", 80_000.0, 0.25)]
            cases += [case(op, shape, "wrong peer", None, None), case(op, shape, "floor", 20_000.0, 1.0)]
        about = {"device": "NVIDIA Made-Up", "driver": "1", "cuda": "13.0", "torch": "2.11", "triton": "3.6.0"}
        about |= {"commit": "0123456789abcdef", "date": "2026-01-01", "cases": cases}
        ceilings = {"ceilings": {"copy_tbps": 4.0, "bf16_tflops": 700.0}}
        (folder / f"{FILES.get(op, op)}.json").write_text(json.dumps(about | ceilings))
    return root


def test_without_gpu_results_nothing_is_promised(root: Path) -> None:
    before = {name: (root / name).read_text() for name in figures.RENDERED}
    figures.main(root)
    after = {name: (root / name).read_text() for name in figures.RENDERED}
    assert not (root / "docs" / GPU).exists()
    assert not any(f"]({GPU}/" in text or "share of the ceiling;" in text for text in after.values())
    if not any((ROOT / "benchmarks" / "results" / device).exists() for device in figures.GPUS):
        assert after == before
        assert after["benchmarks/NOTES.md"].count("| not measured |") == 2 * len(targets.TARGETS)


def test_gpu_results_are_shown(gpu_root: Path) -> None:
    figures.main(gpu_root)
    shown = (gpu_root / "docs" / "benchmarks.md").read_text()
    assert "no GPU yet" not in shown
    pack = "a group (G=4 K=13 H=128 P=2048 (cold L2)) is scored in **10.0 ms**; good peer takes **2.0x**"
    assert pack in shown
    row = "| `linear_logprob` | N=13 D=2048 V=151936: 40,000.0 us, 50%; good peer 2.00x<br>"
    assert row in shown
    assert "copy 4.00 TB/s, bf16 product 700 TFLOP/s" in shown
    assert not any(name in shown for name in ("wrong peer", "| slow peer", "| floor | 2"))
    assert "- `linear_logprob`: good peer; slow peer\n" in shown
    for name in ("prefix", "candidates", "rows", "roofline", "decode"):
        assert f"]({GPU}/{name}.svg)" in shown
        assert (gpu_root / "docs" / GPU / f"{name}.svg").is_file()
    reached = "3 or more packed | 10 ms | <= 20.4 ms | met | <= 19 ms | met | 5 ms |"
    assert re.search(r"\n\d of \d+ goals that were measured here are met, \d+ are not measured: \[all goals\]", shown)
    assert reached in (gpu_root / "benchmarks" / "NOTES.md").read_text()
    readme = (gpu_root / "README.md").read_text()
    assert f"128 tokens of future, prefix of 1,024 | {GPU.upper()}, bfloat16 | 40.0 ms | good peer 2.00x |" in readme
    assert "prefix of 1,024 | CPU, float32 |" in readme
    assert "NVIDIA Made-Up, torch 2.11 (2026-01-01 at 0123456)" in readme
    cold = f"On the {GPU.upper()} the L2 cache is cold unless the size says otherwise; no alternative that uses `torch"
    assert cold in readme
    for name, rendered in figures.RENDERED.items():
        text = (gpu_root / name).read_text()
        assert rendered(text, gpu_root) == text


def test_the_readme_shows_what_is_furthest_behind() -> None:
    times = {"a": (0.9, 0.6), "b": (0.8,), "c": (2.0,), "d": (0.7,)}  # of the fastest peer, where ours takes 1
    found = [(op, f"N={n}", us) for op, theirs in times.items() for n, us in enumerate(theirs)]
    cases = [case(op, shape, impl, us, None) for op, shape, us in found for impl, us in (("fb", 1.0), ("peer", us))]
    cases += [case(op, shape, "the weights, read by a sum", 0.1, None) for op, shape, _ in found]
    made = {"device": "", "torch": "2", "date": "2026-01-01", "commit": "0123456789abcdef+", "cases": cases}
    lines = figures.speed({"cpu": {"decode": made}})
    assert re.findall(r"behind: `(.)` \| N=(.).*? peer (\S+)x", str(lines)) == [("a", "1", "0.60"), ("d", "0", "0.70")]
    assert "at 0123456+). Ours is slower in 4 of 5 comparisons." in lines[-1]


def test_the_cost_page_takes_the_measured_time_of_a_group() -> None:
    assert f"**{1e3 * cost.GROUP:.1f} ms**" in figures.gpu_headline(figures.load(ROOT, "h100")["scorer"])[0]


@pytest.mark.sweep
def test_plots_are_the_same_every_time_and_see_through(gpu_root: Path) -> None:
    figures.main(gpu_root)
    folder = gpu_root / "docs" / GPU
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    figures.main(gpu_root)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    assert all(b"<dc:date>" not in content for content in first.values())
    assert b"good peer" in first["prefix.svg"]
    assert b"wrong peer" not in first["prefix.svg"]
    assert b"120.00" in first["decode.svg"]
    assert b"wrong peer" not in first["decode.svg"]
    assert all(roofline.GREY.encode() in content for content in first.values())  # text for light and dark pages
    assert all(b"fill: #ffffff" not in content for content in first.values())


def test_a_sweep_is_where_one_size_alone_changes() -> None:
    cases = [
        case("op", "K=2 P=8", "fb", 1.0, None),
        case("op", "K=2 P=16", "fb", 2.0, None),
        case("op", "K=4 P=16", "fb", 3.0, None),
        case("op", "K=2 P=4", "peer", 4.0, None),
    ]
    assert roofline.sweeps(cases, "P") == {"op\nK=2 (cold L2)": {"fb": [(8, 1.0), (16, 2.0)], "peer": [(4, 4.0)]}}
    assert roofline.sweeps(cases, "K") == {"op\nP=16 (cold L2)": {"fb": [(2, 2.0), (4, 3.0)]}}
    assert roofline.sweeps(cases, "N") == {}


def test_nothing_to_show_draws_nothing(tmp_path: Path) -> None:
    untimed = {"cases": [case("branch_attention", "P=8", "fb", None, None)]}
    assert roofline.plots([untimed], tmp_path) == []


def test_r2r_and_ours_are_compared_at_each_others_cost() -> None:
    def row(table: str, key: str, right: float, tokens: float, above: float | None = None) -> Result:
        line = None if above is None else Interval(above, above, above)
        intervals = {"accuracy": Interval(right, right, right), "llm_tokens": Interval(tokens, tokens, tokens)}
        return Result(table, "b", key, key, above_line=line, **intervals)

    rows = [row("methods", "greedy", 0.5, 0.0), row("methods", "deployed", 0.9, 2.0, 0.3)]
    rows += [row("methods", "r2r", 0.8, 4.0, 0.1), row("recalls", "r2r-1", 1.0, 8.0), row("recalls", "r2r", 0.8, 4.0)]
    lines = figures.r2r([Run(name="tiny", results=tuple(rows))])
    assert lines[0] == "| accuracy, % (LLM tokens per problem) | plans |"
    assert [line.rpartition(" | ")[2] for line in lines[2:]] == [
        *("80.0 (4.0) |", "+10.0 |", "65.0 (2.0) |"),
        *("90.0 (2.0) |", "+30.0 |", "90.0 (2.0) |"),  # R2R costs more: there is nothing to interpolate
    ]


def test_a_target_is_held_against_the_worst_case_of_its_shapes() -> None:
    def scored(shape: str, impl: str, ms: float | None) -> dict[str, Any]:
        return case("score_group", shape, impl, None if ms is None else 1000 * ms, None)

    cases = [
        scored("G=3 K=13 H=128 P=1024", "fb", 30.0),  # 10 ms a group
        scored("G=4 K=13 H=128 P=2048", "fb", 78.0),  # 19.5 ms
        scored("G=2 K=13 H=128 P=2048", "fb", 90.0),  # too few groups to count
        scored("G=3 K=13 H=128 P=1024", "repeated caches, one batch", 45.0),  # 1.5 times as long
        scored("G=4 K=13 H=128 P=2048", "repeated caches, one batch", 780.0),
        scored("G=3 K=13 H=128 P=1024", "K full forwards, needed logits", None),  # was wrong
        scored("G=4 K=13 H=128 P=2048", "K full forwards, needed logits", 780.0),
        case("rerank_event", "K=13 P=256 (deployed)", "fb", 1100.0, None),
        case("rerank_event", "K=13 P=256 (deployed)", "one greedy step", 1000.0, None),
        case("rerank_event", "K=13 P=2048 (deployed)", "fb", 1500.0, None),
        case("rerank_event", "K=13 P=2048 (deployed)", "one greedy step", 1200.0, None),
        case("linear_logprob", "N=128 D=2048 V=151936", "fb", 1.0, 0.1),
        case("linear_logprob", "N=1664 D=2048 V=151936", "fb", 1.0, 0.75),
        case("linear_logprob", "N=8192 D=2048 V=151936", "fb", 1.0, 0.95),
        case("training_step", "R=12 G=8 K=13 P<=2048 (a group and run)", "fb", 2000.0, None),
    ]
    measured = {
        row.split(" | ")[0][2:]: row.split(" | ")[1:]
        for row in targets.table({"made up": {"cases": cases}}, "h200")[2:]
    }
    packed = "a group scored, K=13, H=128, P={}, 3 or more packed"
    assert measured[packed.format("1,024")][:5] == ["10 ms", "<= 14.7 ms", "met", "<= 13.6 ms", "met"]
    assert measured[packed.format("2,048")][:5] == ["19.5 ms", "<= 20.4 ms", "met", "<= 19 ms", "missed"]
    assert measured["the same against the batched repeated caches"][:3] == ["1.5 x", ">= 2 x", "missed"]
    assert measured["the same against a loop over candidates"][:3] == ["10 x", ">= 10 x", "met"]
    assert measured["a rerank event, in steps"][:5] == ["1.25 x", "<= 1.2 x", "missed", "<= 1.1 x", "missed"]
    head = ["95 %", ">= 92 %", "met", ">= 96 %", "missed", "100 %"]
    assert measured["`linear_logprob`, N=8,192, of the matrix rate"][:6] == head
    assert measured["reranker training, 12 runs of 16,576 groups x 3 epochs"][0] == "19.9 min"
    assert measured["`topk_entropy`, one row of 151,936, in a graph from a cold cache"][0] == "not measured"


def bounds(device: str) -> dict[str, list[str]]:
    """Of the targets that hold a bound there: {what: [measured, first, verdict, stretch, verdict]}."""
    step = case("decode_step", "P=256, mean of 32 steps", "fb", 1500.0, None)
    head = [case("linear_logprob", "N=8192 D=2048", impl, us, 0.7) for impl, us in (("fb", 2.0), ("Liger-Kernel", 1.0))]
    head[1]["kernel"] = "sm90_ce"
    rows = targets.table({"made up": {"cases": [step, *head]}}, device)
    assert rows[0].startswith(f"| on an {device.upper()} |")
    return {row.split(" | ")[0][2:]: row.split(" | ")[1:6] for row in rows[2:]}


def test_what_memory_bounds_takes_longer_on_an_h100() -> None:
    step, share = "a decode step, 256 tokens of context", "`linear_logprob`, N=8,192, of the matrix rate"
    assert bounds("h200")[step] == ["1.5 ms", "<= 1.2 ms", "missed", "<= 1.04 ms", "missed"]
    assert bounds("h100")[step] == ["1.5 ms", "<= 1.68 ms", "met", "<= 1.45 ms", "missed"]
    assert bounds("h100")[share] == bounds("h200")[share] == ["70 %", ">= 92 %", "missed", ">= 96 %", "missed"]
    assert bounds("a100")[step] == ["1.5 ms", "", "", "", ""]


def test_a_peer_is_named_by_the_kernel_that_ran() -> None:
    assert bounds("h200")["`linear_logprob`, N >= 1,664, against Liger-Kernel (`sm90_ce`)"][0] == "0.5 x"


def test_no_goal_is_below_its_measured_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in figures.GPUS:
        cases = [case for result in figures.load(ROOT, device).values() for case in result["cases"]]
        assert targets.beyond_floor(cases, device) == []
    alone = case("score_group", "K=13 H=128 P=2048", "floor", 16_300.0, 1.0)
    goal = targets.time("groups", "ms", (20.4, 15), "score_group", rf"{targets.PACKED}K=13 H=128 P=2048", "G")
    monkeypatch.setattr(targets, "TARGETS", [goal, targets.share("products", 90, 101, "op", "")])
    wrong = targets.beyond_floor([alone], "h100")
    assert wrong == [
        "groups: 15 ms, and the floor is 16.3",
        "products, of the matrix rate: 101 %, and the floor is 100",
    ]


def test_a_gpus_page_counts_what_is_right_and_names_what_did_not_run(tmp_path: Path) -> None:
    (tmp_path / "h100").mkdir()
    (tmp_path / "h100" / "check.txt").write_text(
        "op        size     kernel     right    microseconds  of the ceiling  used\n"
        "commit    B=5      cuda       yes      3.7                           yes\n"
        "commit    B=5      reference  yes      84.5\n"
        "rms_norm  N=4 D=2  triton     no\n"
        "rms_norm  N=8 D=2  triton     not run\n"
        "rms_norm, triton, N=8 D=2: not run: no room; free some\n"
    )
    made = dict.fromkeys(("device", "driver", "cuda", "torch", "triton", "date", "commit"), "0123456789abc+")
    other = {"date": "2026-02-02", "changed": ["docs/a.md", "csrc/b.cu"]}
    (tmp_path / "h100" / "scorer.json").write_text(json.dumps(made | {"cases": []}))
    (tmp_path / "h100" / "decode.json").write_text(json.dumps(made | other | {"cases": []}))
    page = gpu_status.of_device(tmp_path / "h100")
    assert any("commit 0123456789+ (changed files not recorded)" in line for line in page)
    assert "2026-02-02" not in str(page)  # its kernels are no commit's
    (tmp_path / "h100" / "decode.json").write_text(json.dumps(made | {"changed": ["docs/a.md"], "cases": []}))
    assert "commit 0123456789+ (docs/a.md)" in str(gpu_status.of_device(tmp_path / "h100"))
    assert "| `commit` | CUDA | plain PyTorch |  |" in page
    assert "| `rms_norm` |  |  | Triton, 0 of 2 |" in page
    assert "- rms_norm, triton, N=8 D=2: not run: no room" in page
    assert any("2 ops at 3 sizes" in line and "1 differ, 1 did not run" in line for line in page)
    assert gpu_status.of_device(tmp_path / "h200")[2].startswith("Nothing has run on an H200")


def test_the_cost_table_is_relative_to_greedy() -> None:
    counted = {"calls": 5, "mean pool": 13.25, "appended": 5, "resident bytes": 60e9}
    rows = {"fb": counted, "greedy": counted | {"calls": 0, "appended": 0}}
    cases = [
        {
            "op": "end_to_end",
            "shape": "64 + 500 tokens",
            "impl": impl,
            "median_us": us,
            "peak_bytes": 1e9,
            "details": found,
        }
        for (impl, found), us in zip(rows.items(), (13e5, 1e6), strict=True)
    ]
    without = {"op": "end_to_end", "shape": "64 + 250 tokens", "impl": "fb", "median_us": 1.0}
    assert gpu_status.cost_table([without, *cases]) == [
        "| 64 + 500 tokens | calls | mean pool | appended | against greedy | peak GB |",
        "|---|---|---|---|---|---|",
        "| FutureBridge | 5 | 13.2 | 5 | 1.30x | 61.0 |",
        "| greedy | 0 |  | 0 | 1.00x | 61.0 |",
        "",
    ]


def test_the_readme_shows_the_means_of_all_cells() -> None:
    def row(right: int, tokens: float, calls: float) -> dict[str, Any]:
        return {"correct": "1" * right + "0" * (10 - right), "calls": calls, "llm_tokens": tokens}

    def cell(seed: int, ours: int) -> dict[str, Any]:
        rows = {"greedy": row(5, 0.0, 0.0), "direct": row(6, 4.0, 4.0), "published": row(ours, 4.0, 4.0)}
        rows["takeover"] = row(9, 40.0, 1.0)
        return {"world": "plans", "seed": seed, "quantile": 0.9, "deployed": "published", "rows": rows}

    lines = figures.accuracy(Cells([cell(1, 7), cell(2, 9)]), [])
    assert lines[2] == "| SLM alone | 50.0 (0) |"
    assert "| **deployed recipe (certified)**: what `train` deploys; the test is ours | 80.0 (4.0) |" in lines
    (counted,) = (line for line in lines if line.startswith("Means of 2 runs: 2 seeds, request quantiles 0.9, in"))
    assert "At these quantiles the published recipe has 80.0 in plans." in counted
    assert "in 0 runs, what is deployed in 0: our value head in 0, the published recipe in 2, the direct" in counted
    assert lines[-1].startswith("**Takeover is more accurate in 1 of 1 worlds**, with 10 to 10 times the LLM's tokens")
    assert "; in the paper its recipe is 2.0 points above takeover" in lines[-1]

    def in_a_run(key: str, mean: float, tokens: float) -> Result:
        accuracy, written = Interval(mean, mean - 0.1, mean + 0.1), Interval(tokens, tokens, tokens)
        return Result("methods", "demo:plans", key, key, accuracy=accuracy, llm_tokens=written)

    both = (in_a_run("r2r", 0.7, 8.0), in_a_run("deployed", 0.8, 2.0), in_a_run("pool-slm-wide", 0.75, 0.0))
    lines = figures.accuracy(Cells([cell(1, 7)]), [Run(name="tiny", results=both)])
    assert "| R2R, in one run of each world, where the deployed recipe has 80.0 | 70.0 (8.0) |" in lines
    assert any("**no LLM call**" in line and line.endswith("| 75.0 (0) |") for line in lines)
    assert not any(
        "R2R, in" in line for line in figures.accuracy(Cells([cell(1, 7)]), [Run(name="tiny", results=both[1:])])
    )


def test_the_worlds_frontier_is_drawn_from_the_committed_rows(root: Path) -> None:
    folder = (root / figures.TABLES).parent
    for file in folder.glob("*.svg"):
        file.unlink()
    DRAW_WORLDS(root)
    for world in ("plans", "helpful", "control"):
        assert (folder / f"frontier-{world}.svg").is_file()
        assert f"](experiments/frontier-{world}.svg)" in (ROOT / "docs" / "worlds.md").read_text()
        assert (ROOT / "docs" / "experiments" / f"frontier-{world}.svg").is_file()


def test_the_readmes_event_is_drawn_from_its_file(root: Path) -> None:
    shutil.copy(ROOT / event.EVENT, root / event.EVENT)
    known = json.loads((root / event.EVENT).read_text())
    assert [one["right"] for one in known["candidates"]].index(True) == known["choice"]
    figures.main(root)
    first = {name: (root / "docs" / name).read_bytes() for name in ("event.svg", "event-dark.svg")}
    assert first["event.svg"] != first["event-dark.svg"]
    known["choice"] = 0
    (root / event.EVENT).write_text(json.dumps(known))
    event.draw(root)
    assert (root / "docs" / "event.svg").read_bytes() != first["event.svg"]
