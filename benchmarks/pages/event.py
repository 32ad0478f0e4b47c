"""README's figure, one event of a real run: `python -m benchmarks.pages.event` draws it from docs/event.json.

`python -m benchmarks.pages.event RUN PROBLEM` first writes that file, from a run that compared FutureBridge with other
methods.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from benchmarks import command
from benchmarks.pages.theme import DARK, LIGHT, Theme, pictured
from fb_core._util import write_file

ROOT = Path(__file__).parents[2]
EVENT = Path("docs", "event.json")
COLUMNS = (("SLM", "slm", 0.135), ("LLM", "llm", 0.225), ("reranker", "reranker", 0.315))  # head, key, place
BAR, WRITTEN, TOP, LINE = 0.075, 0.425, 0.555, 0.105  # a full bar's width, where the continuation begins, rows


def made(run: Path, problem_id: str) -> dict[str, Any]:
    """The first event of a problem's FutureBridge generation, and what the SLM writes after each candidate."""
    import torch

    from fb_core import CollaborativeDecoder, RequestPolicy
    from fb_core.apps.pipeline.models import benchmark_problems, models_of
    from fb_core.apps.settings.run import RunSettings
    from fb_core.verify.verifier import Verifier

    settings = RunSettings.model_validate_json((run / "settings.json").read_text())
    models = models_of(settings.models)
    (problem,) = (
        problem
        for problems in benchmark_problems(settings).values()
        for problem in problems
        if problem.id == problem_id
    )
    files = sorted((run / "variants" / "published" / "comparison").glob("*.published.*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    row = next(row for row in rows if row["problem"] == problem_id)  # of the first seed
    event = row["events"][0]
    (prompt,) = models.prompts([problem], settings.problems)
    prefix = [*prompt.tolist(), *row["tokens"][: event["step"]]]
    greedy = CollaborativeDecoder(models.slm, None, None, RequestPolicy(0.0), max_events=0, tokenizer=models.tokenizer)
    share = torch.tensor(event["scores"]).softmax(0).tolist()
    with Verifier(workers=1) as verifier:
        candidates = []
        for index, token in enumerate(event["pool"]):
            new = greedy.generate([*prefix, token], settings.evaluate.max_new_tokens).token_ids.tolist()
            text = models.tokenizer.decode([*row["tokens"][: event["step"]], token, *new], skip_special_tokens=True)
            candidates.append(
                {
                    "token": models.tokenizer.decode([token]),
                    "slm": math.exp(event["slm_logprob"][index]),
                    "llm": math.exp(event["llm_logprob"][index]),
                    "reranker": share[index],
                    "written": models.tokenizer.decode(new, skip_special_tokens=True),
                    "right": verifier.verify(text, problem.answer) == "correct",
                }
            )
    return {
        "from": {"run": run.name, "problem": problem_id, "row": row["method"], "seed": row["seed"]},
        "problem": problem.text,
        "before": models.tokenizer.decode(row["tokens"][: event["step"]]),
        "entropy": event["entropy"],
        "choice": event["choice"],
        "candidates": candidates,
    }


@pictured
def figure(event: dict[str, Any], theme: Theme) -> Figure:
    """The SLM's text up to the event, the candidates with three probabilities each, and the SLM's text after them."""
    drawn = Figure(figsize=(9.6, 3.5))
    axis = drawn.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, 1), ylim=(0, 1))
    axis.set_axis_off()
    axis.text(0.015, 0.93, event["problem"], color=theme.faint, style="italic", fontsize=9.5)
    axis.text(0.015, 0.82, "SLM:", color=theme.faint)
    axis.text(0.06, 0.82, event["before"].strip(), fontsize=11, family="monospace")
    asks = f"?  {event['entropy']:.1f} nats: the LLM is asked for candidates"
    end = 0.06 + len(event["before"].strip()) * 0.602 * 11 / (72 * 9.6)  # width of a character in DejaVu Sans Mono
    axis.text(end + 0.018, 0.82, asks, fontsize=10, color=theme.ground, backgroundcolor=theme.ours)
    for head, _, x in (*COLUMNS, ("what the SLM writes after it", "", WRITTEN)):
        axis.text(x, 0.675, head, color=theme.faint, fontsize=9)
    for row, candidate in enumerate(event["candidates"]):
        height, picked = TOP - LINE * row, row == event["choice"]
        if picked:
            box = FancyBboxPatch((0.012, height - 0.03), 0.976, 0.088, boxstyle="round,pad=0,rounding_size=0.01")
            box.set(facecolor="none", edgecolor=theme.ours, linewidth=1.6)
            axis.add_patch(box)
        weight = "bold" if picked else "normal"
        axis.text(0.022, height, candidate["token"].strip(), fontsize=11, family="monospace", weight=weight)
        for _, key, x in COLUMNS:
            axis.barh(height + 0.012, BAR, 0.045, x, color=theme.line)
            color = theme.ours if key == "reranker" else theme.others
            axis.barh(height + 0.012, BAR * candidate[key], 0.045, x, color=color)
        mark, color = ("\N{CHECK MARK}", theme.others) if candidate["right"] else ("\N{BALLOT X}", theme.ours)
        axis.text(WRITTEN, height, mark, color=color, fontsize=11, family="DejaVu Sans")
        axis.text(
            WRITTEN + 0.025, height, candidate["written"].strip(), fontsize=9.5, family="monospace", weight=weight
        )
    return drawn


def draw(root: Path = ROOT) -> None:
    """docs/event.svg and docs/event-dark.svg."""
    event = json.loads((root / EVENT).read_text())
    for name, theme in (("event", LIGHT), ("event-dark", DARK)):
        picture = figure(event, theme=theme)
        assert picture is not None
        write_file(root / "docs" / f"{name}.svg", picture.encode())


def main(
    run: Annotated[Path | None, typer.Argument(help="A run's folder, to take the event from.")] = None,
    problem: Annotated[str | None, typer.Argument(help="One of the run's problems.")] = None,
) -> None:
    """Draw the figure."""
    if (run is None) != (problem is None):
        raise typer.BadParameter("expected a run's folder and a problem, got one without the other")
    if run is not None and problem is not None:
        write_file(ROOT / EVENT, (json.dumps(made(run, problem), indent=1) + "\n").encode())
    draw()


if __name__ == "__main__":
    command.run(main, "benchmarks.pages.event")
