"""Write the tables of README and docs, and plots of GPU results: `python -m benchmarks.pages.figures`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import adverse, command, stages, why
from benchmarks.evidence import CELLS, TAKEOVER, Cells, page, times_below
from benchmarks.gpu import gpu_status, roofline, targets
from benchmarks.gpu.gpu_status import cost_table
from benchmarks.harness import OURS, of_its_commit, read_results, shown_commit
from benchmarks.pages import cost, event, reference, speedups
from benchmarks.pages.theme import alone
from benchmarks.paper import figures as report_figures
from benchmarks.paper import published
from benchmarks.paper.cells import LEGEND, marked
from benchmarks.paper.orderings import ordering_lines
from benchmarks.paper.rows import Result, Run, Timed, read_tables
from benchmarks.servers import serving, soak
from fb_core._util import write_file
from fb_core.apps.demo import SETTINGS
from fb_core.apps.pipeline.page import markdown_table
from fb_core.apps.settings.run import RunSettings

ROOT = Path(__file__).parents[2]
TABLES = Path("docs", "experiments", "tables.json")  # as `python -m benchmarks.paper report` writes it
PAIR = Path("docs", "pretrained_pair", "tables.json")  # as examples/pretrained_pair/run.py does
GPUS = tuple(targets.SLOWER)  # folders of their results, and of their plots in docs
ON_THEIR_PAGE = ("lm_eval", "serving")  # results of a CPU that docs/scoring.md and docs/serving.md show
DEPLOYED = "deployed"
MAIN = ("greedy", "direct", "s2t", "r2r", DEPLOYED, "published", TAKEOVER)  # whose times docs/worlds.md shows
ACCURACY = (  # label, row of the cells
    ("SLM alone", "greedy"),
    ("direct LLM score: at each event the LLM's likeliest token", "direct"),
    ("**deployed recipe (certified)**: what `train` deploys; the test is ours", DEPLOYED),
    ("published recipe, demo settings: the paper's way to choose", "published"),
    ("takeover: the LLM writes everything from the first event", TAKEOVER),
)
ONCE = {  # rows that ran once in each world
    "r2r": "R2R, in one run of each world, where the deployed recipe has {ours}",
    "pool-slm-wide": "**no LLM call**: a reranker trained on the SLM's own 8 likeliest tokens, in the same runs",
}
SHOWN = {settings: world for world, settings in SETTINGS.items()} | {"run-small": "small", "run-control": "control"}
PRETRAINED = speedups.PRETRAINED  # its rows show every alternative, others the fastest
NARROW = f"{PRETRAINED} in bfloat16"
SPEED = (  # label, result file, op, part of the shape
    ("48 prompts at once, prompt and 48 tokens, per token", "engine", "generate_many", f"{NARROW}, 48 few-shot"),
    ("first token of a prompt of 64", "engine", "first_token", f"{NARROW}, a prompt of 64"),
    ("score 32 groups; vLLM by design without its prefix cache", "scorer", "score_group", f"{NARROW}, G=32"),
    ("score candidates", "scorer", "score_group", "H=128"),
    ("log-probs of an LM head", "linear_logprob", "linear_logprob", ""),
    ("rerank at an event", "decode", "rerank_event", "(deployed)"),
)
CPUS = {"cpu": "AVX-512", "cpu-avx2": "AVX2", "cpu-amx": "AMX"}  # by folder of results: its instructions
MODEL = {"cpu": "random 42M model"} | dict.fromkeys(GPUS, "Qwen3-1.7B's shapes, random")  # of scorer and decoding
SIZES = {
    "R": "{} runs",
    "G": "{} groups",
    "K": "{} candidates",
    "H": "{} tokens of future",
    "P": "prefix of {}",
    "N": "{} rows",
    "D": "width {}",
    "V": "{} words",
}


def render(readme: str, root: Path = ROOT) -> str:
    """The README with its two tables regenerated."""
    cells = Cells(json.loads((root / CELLS).read_text()))
    readme = replace_block(readme, "accuracy", accuracy(cells, read_tables(root / TABLES)), CELLS)
    return replace_block(readme, "speed", speed({device: load(root, device) for device in (*GPUS, "cpu")}))


def accuracy(cells: Cells, worlds: Sequence[Run]) -> list[str]:
    """Mean accuracy of ways to decode over the runs of the evidence, with the large model's tokens per problem."""
    rows = [
        [
            label,
            *(
                f"{100 * cells.mean_accuracy(world, name):.1f} ({_tokens_of(cells, world, name)})"
                for world in cells.worlds
            ),
        ]
        for label, name in ACCURACY
    ]
    count = len(cells.records)
    seeds, quantiles = (sorted({cell[key] for cell in cells.records}) for key in ("seed", "quantile"))
    delta = RunSettings.load(SETTINGS[cells.worlds[0]]).choice.delta
    ours, theirs = (times_below(cells, name, delta) for name in (DEPLOYED, "published"))
    deployed = Counter(cell["deployed"] for cell in cells.records)
    ahead = sum(cells.mean_accuracy(world, TAKEOVER) > cells.mean_accuracy(world, DEPLOYED) for world in cells.worlds)
    tokens = [
        cells.mean(world, TAKEOVER, "llm_tokens") / cells.mean(world, DEPLOYED, "llm_tokens") for world in cells.worlds
    ]
    at_quantiles = [
        " / ".join(f"{100 * own.mean_accuracy(world, 'published'):.1f}" for own in cells.at_quantiles(world).values())
        for world in cells.worlds
    ]
    paper = published.averages()
    return [
        *markdown_table(
            ["accuracy, % (LLM tokens per problem)", *cells.worlds], rows + _in_one_run(worlds, cells.worlds)
        ),
        "",
        f"Means of {count} runs: {len(seeds)} seeds, request quantiles {', '.join(f'{at:g}' for at in quantiles)}, in "
        "each of three made-up worlds ([intervals and more](docs/evidence.md)). At these quantiles the published "
        f"recipe has {'; '.join(f'{own} in {world}' for world, own in zip(cells.worlds, at_quantiles, strict=True))}. "
        f"It is more than {100 * delta:g} points below the SLM alone or the direct LLM score in {theirs} runs, what is "
        f"deployed in {ours}: our value head in {deployed['value']}, the published recipe in {deployed['published']}, "
        f"the direct LLM score in {deployed['direct']}. *Demo settings*: one horizon of 16 tokens (plans) or 24, K = 4 "
        "+ 4, some 1,250 to 1,800 training groups; the paper has K = 8 + 8 and 16,576.",
        f"**Takeover is more accurate in {ahead} of {len(cells.worlds)} worlds**, with {min(tokens):.0f} to "
        f"{max(tokens):.0f} times the LLM's tokens, but fewer calls{_quicker(worlds)}; in the paper its recipe is "
        f"{paper['published'] - paper['takeover']:.1f} points above takeover. Neither R2R nor FutureBridge is always "
        "ahead: [accuracy against tokens, calls and seconds](docs/worlds.md#accuracy-against-the-llms-work). "
        "The pairs are tiny and the worlds made by hand: this shows when the method works, not what it gains on real "
        "models.",
    ]


def _quicker(worlds: Sequence[Run]) -> str:
    """Where takeover takes less time than FutureBridge too, that it does."""
    times = [_fastest(run) for run in worlds]
    both = [
        (by_key[TAKEOVER].seconds, by_key[DEPLOYED].seconds)
        for by_key in times
        if {TAKEOVER, DEPLOYED} <= by_key.keys()
    ]
    return " and, with models this small, less time" if both and all(theirs < ours for theirs, ours in both) else ""


def _tokens_of(cells: Cells, world: str, name: str) -> str:
    tokens = cells.mean(world, name, "llm_tokens")
    return f"{tokens:.1f}" if tokens else "0"


def _in_one_run(worlds: Sequence[Run], names: Sequence[str]) -> list[list[str]]:
    """The rows of what ran once in each world, with FutureBridge's accuracy in the same runs; those that are known."""
    by_world = {SHOWN.get(run.name, run.name): {row.key: row for row in run.results} for run in worlds}
    known = [by_world.get(name, {}) for name in names]

    def cells(key: str) -> list[str]:
        rows = [found[key] for found in known if key in found]
        return [f"{100 * row.accuracy.mean:.1f} ({_tokens(row)})" for row in rows if row.accuracy]

    ours = ", ".join(cell.partition(" ")[0] for cell in cells(DEPLOYED))
    labels = {key: label.format(ours=ours) for key, label in ONCE.items()}
    return [[label, *cells(key)] for key, label in labels.items() if len(cells(key)) == len(names)]


def _fastest(run: Run) -> dict[str, Timed]:
    """The time of every method in its fastest loop, by key, the slowest method first."""
    fastest: dict[str, Timed] = {}
    for timing in run.timed:
        if timing.key not in fastest or timing.seconds < fastest[timing.key].seconds:
            fastest[timing.key] = timing
    return dict(sorted(fastest.items(), key=lambda item: item[1].seconds, reverse=True))


def speed(by_device: Mapping[str, Mapping[str, dict[str, Any]]]) -> list[str]:
    """Results on the first device that has each, at their longest, next to what does the same; then the worst two."""
    shown: list[tuple[str, str, str, dict[str, Any], roofline.Case, list[roofline.Case]]] = []
    for label, file, op, said in SPEED:
        for device, results in by_device.items():
            made = results.get(file, {"cases": ()})
            cases = [case for case in made["cases"] if case["op"] == op and said in case["shape"]]
            if not (found := roofline.against_best(cases)):
                continue
            _, case, best = max(found, key=lambda one: one[1]["median_us"])
            peers = [best]
            if PRETRAINED in said:
                peers = [peer for peer in cases if peer["shape"] == case["shape"] and roofline.is_peer(peer)]
                peers.sort(key=lambda peer: peer["median_us"])
            model = [MODEL[device]] if file in ("scorer", "decode") and PRETRAINED not in said else []
            shown.append((label, ", ".join([*model, in_words(case["shape"])]), device, made, case, peers))
            break
    files = [(device, made) for device, results in by_device.items() for made in results.values()]
    compared = [(*found, device, made) for device, made in files for found in roofline.against_best(made["cases"])]
    compared.sort(key=lambda found: found[0])
    worst = {found[1]["op"]: found for found in reversed(compared)}  # the lowest ratio of each
    for _, case, peer, device, made in sorted(worst.values(), key=lambda found: found[0])[:2]:
        shown.append((f"furthest behind: `{case['op']}`", case["shape"], device, made, case, [peer]))
    rows = []
    where: dict[str, list[str]] = {}  # a machine, and when and at which commits
    for label, size, device, made, case, peers in shown:
        us = case["median_us"]
        time = f"{us / 1e6:.1f} s" if us >= 1e6 else f"{us / 1e3:.1f} ms" if us >= 100 else f"{us:.1f} us"
        ratios = "; ".join(f"{peer['impl']} {peer['median_us'] / us:.2f}x" for peer in peers)
        rows.append([label, size, f"{device.upper()}, {case['dtype']}", time, ratios])
        stamp = f"{made['date'][:10]} at {shown_commit(made, 7)}"
        where.setdefault(f"{made['device']}, torch {made['torch']}", []).append(stamp)
    machines = (f"{machine} ({', '.join(dict.fromkeys(stamps))})" for machine, stamps in where.items())
    slower = sum(ratio < 1 for ratio, *_ in compared)
    notes = [f"Measured on {'; '.join(machines)}.", f"Ours is slower in {slower} of {len(compared)} comparisons."]
    for device, results in by_device.items():
        if results and device != "cpu":
            tried = any("compile" in case["impl"] for made in results.values() for case in made["cases"])
            compiled = "" if tried else "; no alternative that uses `torch.compile` was timed there"
            notes.append(f"On the {device.upper()} the L2 cache is cold unless the size says otherwise{compiled}.")
    head = ["what", "size", "on", "ours", "alternatives: their time / ours"]
    return [*markdown_table(head, rows), "", f"*{' '.join(notes)} [All measurements](docs/benchmarks.md).*"]


def in_words(shape: str) -> str:
    """The sizes of a case's shape in words, in the order of SIZES."""
    sizes = dict(re.findall(r"([A-Z])<?=(\d+)", shape))
    words = [text.format(f"{int(sizes[letter]):,}") for letter, text in SIZES.items() if letter in sizes]
    return ", ".join([PRETRAINED] * (PRETRAINED in shape) + words)


def render_worlds(text: str, root: Path = ROOT) -> str:
    """docs/worlds.md with its tables regenerated."""
    worlds, records = read_tables(root / TABLES), json.loads((root / why.RECORDS).read_text())
    text = replace_block(text, "why", why.page(records), why.RECORDS)
    text = replace_block(text, "orderings", paper_orderings(worlds, reversed_only=True), TABLES)
    return replace_block(text, "times", times(worlds, MAIN), TABLES)


def render_questions(text: str, root: Path = ROOT) -> str:
    """docs/troubleshooting.md with R2R beside FutureBridge."""
    return replace_block(text, "r2r", r2r(read_tables(root / TABLES)), TABLES)


def render_pair(text: str, root: Path = ROOT) -> str:
    """docs/pretrained_pair/README.md with its tables of methods, orderings and times regenerated."""
    pairs = read_tables(root / PAIR)
    for name, lines in (("methods", methods), ("orderings", paper_orderings), ("times", times)):
        text = replace_block(text, name, lines(pairs), PAIR)
    return text


def methods(pairs: Sequence[Run]) -> list[str]:
    """Accuracy of every method with each pair, and the large model's tokens per problem."""
    by_pair = {SHOWN.get(run.name, run.name): {row.key: row for row in run.of("methods")} for run in pairs}
    labels = {key: row.label for rows in by_pair.values() for key, row in rows.items() if row.accuracy}
    body = []
    for key, label in labels.items():
        rows = [rows.get(key) for rows in by_pair.values()]
        body.append([label, *(f"{marked(row)} ({_tokens(row)})" if row and row.accuracy else "" for row in rows)])
    return [*markdown_table(["accuracy, % [95%] (LLM tokens per problem)", *by_pair], body), "", f"*{LEGEND}*"]


def _tokens(row: Result) -> str:
    return f"{row.llm_tokens.mean:.1f}" if row.llm_tokens and row.llm_tokens.mean else "0"


def paper_orderings(worlds: Sequence[Run], reversed_only: bool = False) -> list[str]:
    """The paper's orderings in every world, those that are reversed in one first, or alone."""
    return ordering_lines({SHOWN.get(run.name, run.name): run.results for run in worlds}, reversed_only)


def times(worlds: Sequence[Run], keys: Collection[str] | None = None) -> list[str]:
    """Milliseconds per problem of methods that were timed in all worlds, and greedy decodings of the same loop."""
    by_world = {SHOWN.get(run.name, run.name): _fastest(run) for run in worlds}
    first = next(iter(by_world.values()))
    rows = []
    for key in reversed(first):  # the fastest first
        if (keys is None or key in keys) and all(key in timings for timings in by_world.values()):
            own = [timings[key] for timings in by_world.values()]
            cells = [f"{1000 * one.seconds:.1f}{f' ({one.relative.mean:.2f}x)' if one.relative else ''}" for one in own]
            rows.append([f"{first[key].method}, {first[key].loop}", *cells])
    return markdown_table(["milliseconds per problem (times greedy in its loop), loop", *by_world], rows)


def draw_worlds(root: Path) -> None:
    """The frontier of every world, next to the rows that it is drawn from."""
    for run in read_tables(root / TABLES):
        picture = report_figures.frontier(run)
        if picture is not None:
            file = (root / TABLES).parent / f"frontier-{SHOWN.get(run.name, run.name)}.svg"
            write_file(file, alone(picture).encode())


def render_evidence(text: str, root: Path = ROOT) -> str:
    """docs/evidence.md, all of it."""
    files = (CELLS, CELLS.with_name("dropped.json"), adverse.RECORDS)
    cells, before, runs = (json.loads((root / file).read_text()) for file in files)
    return "\n".join([*page(Cells(cells), before), *adverse.section(runs)]) + "\n"


def render_benchmarks(text: str, root: Path = ROOT) -> str:
    """docs/benchmarks.md with its tables regenerated; a GPU's times only if it has results."""
    cpu, gpus = load(root, "cpu"), {device: load(root, device) for device in GPUS}
    headlines = [line for gpu in gpus.values() if "scorer" in gpu for line in gpu_headline(gpu["scorer"])]
    headlines.append(headline(cpu["scorer"], cpu["linear_logprob"], cpu["decode"], bool(headlines)))
    text = replace_block(text, "headline", headlines)
    lines: list[str] = []
    for device, gpu in sorted(gpus.items(), key=lambda item: not item[1]):  # those with results first
        lines += gpu_status.of_device(root / "benchmarks" / "results" / device)
        lines += [f"![{name}]({device}/{name}.svg)" for name in plot_names(root, device)]
        lines += ["", *deployment(gpu)]
    shown = [result for name, result in cpu.items() if name not in ON_THEIR_PAGE]
    kinds = {words: own for device, words in CPUS.items() if (own := load(root, device))}
    text = replace_block(text, "kinds", of_kinds(kinds))
    return replace_block(replace_block(text, "gpus", lines), "cpu", [*ratios(shown), *deployment(cpu)])


def deployment(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The cost of whole problems by method, from a device's result files."""
    return cost_table([case for result in results.values() for case in result["cases"]])


def r2r(worlds: Sequence[Run]) -> list[str]:
    """R2R and FutureBridge at their own LLM tokens, against the line to takeover, and at the other's tokens."""
    table: dict[str, list[str]] = {}
    for run in worlds:
        rows = {row.key: row for row in (*run.of("recalls"), *run.of("methods"))}
        at = {
            key: (row.llm_tokens.mean, 100 * row.accuracy.mean)
            for key, row in rows.items()
            if row.llm_tokens and row.accuracy
        }
        swept = sorted(at[key] for key in ("greedy", *(row.key for row in run.of("recalls"))))
        mixed = [at["greedy"], at[DEPLOYED]]
        for name, key, other, points in (("R2R", "r2r", DEPLOYED, swept), ("FutureBridge", DEPLOYED, "r2r", mixed)):
            (tokens, right), above = at[key], rows[key].above_line
            table.setdefault(name, []).append(f"{right:.1f} ({tokens:.1f})")
            table.setdefault(f"{name}, points above the line", []).append(f"{100 * above.mean:+.1f}" if above else "")
            tokens = min(at[other][0], points[-1][0])
            right = np.interp(tokens, [cost for cost, _ in points], [height for _, height in points])
            table.setdefault(f"{name}, interpolated at the other's tokens", []).append(f"{right:.1f} ({tokens:.1f})")
    head = ["accuracy, % (LLM tokens per problem)", *(SHOWN.get(run.name, run.name) for run in worlds)]
    return markdown_table(head, [[label, *cells] for label, cells in table.items()])


def load(root: Path, device: str) -> dict[str, dict[str, Any]]:
    """{bench: its result file}, without those of kernels that no commit has."""
    results = read_results(root / "benchmarks" / "results" / device)
    return {name: result for name, result in results.items() if of_its_commit(result)}


def plot_names(root: Path, device: str) -> list[str]:
    """The names of the plots that exist."""
    return sorted(file.stem for file in (root / "docs" / device).glob("*.svg"))


def gpu_headline(scorer: dict[str, Any]) -> list[str]:
    """One sentence on the largest pack of groups, per group; none if ours was not timed."""
    packs = [case for case in scorer["cases"] if case["op"] == "score_group" and _groups(case) and case["impl"] == OURS]
    packs = [case for case in packs if case["median_us"]]
    if not packs:
        return []
    case = max(packs, key=lambda case: (_groups(case), case["median_us"]))
    best = roofline.best_peers(scorer["cases"]).get((case["op"], case["shape"]))
    compared = f"; {best['impl']} takes **{best['median_us'] / case['median_us']:.1f}x** as long" if best else ""
    time = case["median_us"] / _groups(case) / 1e3
    return [f"Measured on {scorer['device']}: a group ({case['shape']}) is scored in **{time:.1f} ms**{compared}."]


def _groups(case: dict[str, Any]) -> int:
    """How many groups are packed in a case; 0 if the shape does not say."""
    match = re.search(r"\bG=(\d+)", case["shape"])
    return int(match.group(1)) if match else 0


def headline(scorer: dict[str, Any], head: dict[str, Any], decode: dict[str, Any], gpu: bool) -> str:
    """One sentence on the scorer, the LM head's memory and decoding."""
    shape = "K=13 H=64 P=512"
    group = {case["impl"]: case["median_us"] for case in scorer["cases"] if case["shape"] == shape}
    peaks = {case["impl"]: case["peak_bytes"] for case in head["cases"] if case["peak_bytes"]}
    full, repeated = (group[peer] / group["fb"] for peer in ("K full forwards, needed logits", "repeated cache"))
    saved = peaks["logits, log_softmax"] / peaks["fb"]
    steps = [(case["impl"], case["median_us"]) for case in decode["cases"] if case["op"] == "generate"]
    ours, theirs = ([us for impl, us in steps if impl == name] for name in (OURS, "HF generate"))
    faster = sorted(slow / fast for fast, slow in zip(ours, theirs, strict=True))
    return (
        f"Measured on {scorer['device']}{'' if gpu else ', no GPU yet'}: a group ({shape}, hidden 512 x 8 layers) is "
        f"scored **{full:.1f}x** faster than by K full forwards and {repeated:.1f}x faster than over a repeated cache; "
        f"log-probs ({head['cases'][0]['shape']}) take {saved:.0f}x less memory than log_softmax on logits; "
        f"small models decode greedily **{faster[0]:.1f}x** to {faster[-1]:.1f}x faster than by `model.generate`."
    )


def ratios(results: Sequence[dict[str, Any]]) -> list[str]:
    """Ours against the fastest peer, a line for each shape, a row for each op, a table for each machine and commit."""
    tables: dict[str, list[list[str]]] = {}
    for result in results:
        stamp = f"{result['device']}, torch {result['torch']}, commit {shown_commit(result)}, {result['date'][:10]}"
        rows: dict[str, list[str]] = {}
        for ratio, case, best in roofline.against_best(result["cases"]):
            peers = [best]
            if PRETRAINED in case["shape"]:
                peers = [one for one in result["cases"] if one["shape"] == case["shape"] and one["op"] == case["op"]]
                peers = sorted(filter(roofline.is_peer, peers), key=lambda one: one["median_us"])
            shown = "; ".join(f"{one['impl']} {one['median_us'] / best['median_us'] * ratio:.2f}x" for one in peers)
            rows.setdefault(case["op"], []).append(f"{case['shape']}: {shown}")
        tables.setdefault(stamp, []).extend([f"`{op}`", "<br>".join(shapes)] for op, shapes in rows.items())
    head = ["op", "shape, and the fastest peer's time / ours"]
    return [line for stamp, rows in tables.items() for line in (f"*{stamp}*", "", *markdown_table(head, rows), "")]


def of_kinds(kinds: Mapping[str, Mapping[str, dict[str, Any]]]) -> list[str]:
    """Where the pretrained model, or the head, was timed on several kinds of CPU: the fastest peer against ours."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for kind, results in kinds.items():
        for ratio, case, best in roofline.against_best([case for own in results.values() for case in own["cases"]]):
            if PRETRAINED in case["shape"] or case["op"].startswith("linear_logprob"):
                rows.setdefault((case["op"], case["shape"]), {})[kind] = f"{best['impl']} {ratio:.2f}x"
    cells = [
        [f"`{op}`, {shape}", *(row.get(kind, "") for kind in kinds)]
        for (op, shape), row in rows.items()
        if len(row) > 1
    ]
    return markdown_table(["op, shape", *kinds], cells) if cells else []


def replace_block(text: str, name: str, lines: list[str], source: Path | None = None) -> str:
    """The text with the named block replaced; the block's first line says what it is generated from."""
    begin = text.index(f"<!-- {name}:")
    start, stop = text.index("-->", begin) + 3, text.index(f"<!-- end of {name} -->")
    mark = f"<!-- {name}: written by `make figures` from {source.as_posix()} -->" if source else text[begin:start]
    return f"{text[:begin]}{mark}\n" + "\n".join(lines).strip() + f"\n{text[stop:]}"


def render_scale(text: str, root: Path = ROOT) -> str:
    """docs/scale.md with its estimates and its table of measured stages regenerated."""
    text = replace_block(text, "cost", cost.table())
    files = sorted((root / "benchmarks" / "results" / "stages").glob("*.json"))
    tables = [[*stages.table(json.loads(file.read_text())), ""] for file in files]
    return replace_block(text, "stage table", [line for lines in tables for line in lines])


def render_ops(text: str, _: Path = ROOT) -> str:
    """docs/ops.md with its table regenerated."""
    return replace_block(text, "ops", reference.ops_table())


def render_settings(text: str, _: Path = ROOT) -> str:
    """docs/settings.md with its tables regenerated."""
    return replace_block(text, "settings", reference.settings_tables())


def render_notes(text: str, root: Path = ROOT) -> str:
    """benchmarks/NOTES.md with its tables of targets regenerated."""
    tables = [[*targets.table(load(root, device), device), ""] for device in GPUS]
    return replace_block(text, "targets", [line for lines in tables for line in lines])


def render_scoring(text: str, root: Path = ROOT) -> str:
    """docs/scoring.md with its tables regenerated."""
    if grpo := load(root, "grpo").get("cpu"):
        text = replace_block(text, "grpo", speedups.grpo_table(grpo))
    tasks = load(root, "cpu").get("lm_eval")
    return replace_block(text, "lm-eval", speedups.lm_eval_table(tasks)) if tasks else text


def render_serving(text: str, root: Path = ROOT) -> str:
    """docs/serving.md with the server's measurements regenerated."""
    load_test, soaked = load(root, "cpu").get("serving"), load(root, "soak").get("cpu")
    text = replace_block(text, "load", serving.table(load_test)) if load_test else text
    return replace_block(text, "soak", soak.lines(soaked)) if soaked else text


LAYOUT = "docs/branch_layout.svg"
RENDERED = {  # by file
    "README.md": render,
    "docs/worlds.md": render_worlds,
    "docs/troubleshooting.md": render_questions,
    "docs/pretrained_pair/README.md": render_pair,
    "docs/evidence.md": render_evidence,
    "docs/benchmarks.md": render_benchmarks,
    "docs/ops.md": render_ops,
    "docs/scale.md": render_scale,
    "docs/settings.md": render_settings,
    "docs/serving.md": render_serving,
    "docs/scoring.md": render_scoring,
    "benchmarks/NOTES.md": render_notes,
}


def main(root: Annotated[Path, typer.Option(help="Folder of the repository.")] = ROOT) -> None:
    """Write the generated blocks of every file, and plots of all results."""
    grpo = load(root, "grpo").get("cpu")
    for device in GPUS:
        if gpu := load(root, device):
            roofline.plots(list(gpu.values()), root / "docs" / device)
    if grpo:
        speedups.plot(grpo, root / "docs" / "shared_prefix.svg")
    if load_test := load(root, "cpu").get("serving"):
        serving.plot(load_test, root / "docs" / "serving.svg")
    if served := speedups.draw_served(load(root, "cpu")):
        (root / "docs" / "peers.svg").write_text(alone(served))
    if (root / event.EVENT).is_file():
        event.draw(root)
    draw_worlds(root)
    (root / LAYOUT).write_text(reference.layout_picture())
    for name, rendered in RENDERED.items():
        file = root / name
        file.write_text(rendered(file.read_text(), root))


if __name__ == "__main__":
    command.run(main, "benchmarks.pages.figures")
