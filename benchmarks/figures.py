"""Write the README's tables from committed result files: `python -m benchmarks.figures`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fb_core.demo import report

ROOT = Path(__file__).parent.parent


def render(readme: str) -> str:
    """The README with its generated blocks made anew."""
    demo = json.loads((ROOT / "docs" / "demo" / "results.json").read_text())
    settings = demo["settings"]
    note = (
        f"*`futurebridge demo --seed {settings['seed']}`, top-{settings['pool_k']} pools, at most "
        f"{settings['max_events']} events, one reranker seed, {demo['seconds']:.0f} s on {demo['machine']}.*"
    )
    readme = _replace(readme, "demo table", [*report.summary(demo), "", note])
    files = sorted((ROOT / "benchmarks" / "results" / "cpu").glob("*.json"))
    results = {file.stem: json.loads(file.read_text()) for file in files}
    readme = _replace(readme, "speed", [headline(results["scorer"], results["linear_logprob"])])
    return _replace(readme, "bench table", [line for result in results.values() for line in ratios(result)])


def headline(scorer: dict[str, Any], head: dict[str, Any]) -> str:
    """One sentence of what was measured of the scorer and of the LM head's memory."""
    shape = "K=13 H=64 P=512"
    group = {case["impl"]: case["median_us"] for case in scorer["cases"] if case["shape"] == shape}
    peaks = {case["impl"]: case["peak_bytes"] for case in head["cases"]}
    full, repeated = (group[peer] / group["fb"] for peer in ("K full forwards, needed logits", "repeated cache"))
    saved = peaks["logits, log_softmax"] / peaks["fb"]
    return (
        f"Measured on {scorer['device']}, no GPU yet: a group ({shape}, hidden 512 x 8 layers) is scored "
        f"**{full:.1f}x** faster than by K full forwards and {repeated:.1f}x faster than over a repeated cache; "
        f"log-probs ({head['cases'][0]['shape']}) take {saved:.0f}x less memory than log_softmax on logits."
    )


def ratios(result: dict[str, Any]) -> list[str]:
    """Ours against every peer, case by case."""
    lines = [f"*{result['device']}, torch {result['torch']}, commit {result['commit'][:10]}, {result['date']}*", ""]
    lines += ["| op | shape | peer | peer's time / ours |", "|---|---|---|---|"]
    ours = {(case["op"], case["shape"]): case for case in result["cases"] if case["impl"] == "fb"}
    for case in result["cases"]:
        mine = ours.get((case["op"], case["shape"]))
        if case["impl"] != "fb" and mine and case["median_us"] and mine["median_us"]:
            ratio = case["median_us"] / mine["median_us"]
            lines.append(f"| `{case['op']}` | {case['shape']} | {case['impl']} | {ratio:.1f}x |")
    return [*lines, ""]


def _replace(text: str, name: str, lines: list[str]) -> str:
    begin = text.index(f"<!-- {name}:")
    start, stop = text.index("-->", begin) + 3, text.index(f"<!-- end of {name} -->")
    return f"{text[:start]}\n" + "\n".join(lines).strip() + f"\n{text[stop:]}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(render(path.read_text()))
