"""What the demo found, as Markdown tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

OURS = "FutureBridge"


def markdown(results: dict[str, Any]) -> str:
    """The report: settings beside every number, worlds in the order told."""
    settings = results["settings"]
    lines = [
        "# FutureBridge demo",
        "",
        f"Fresh problems of seed {settings['seed']}, one reranker seed, top-{settings['pool_k']} pools, at most "
        f"{settings['max_events']} events, greedy decoding between events, temperature {settings['temperature']} of "
        "the soft target. Accuracy in percent with 95% bootstrap intervals over problems; differences are paired. The "
        "pairs are tiny and their worlds were designed by hand: this shows that the mechanism works under stated "
        "conditions, not how much it brings on real models.",
        "",
    ]
    lines += [*summary(results), ""]
    for world in results["worlds"]:
        lines += _world(world)
    lines += ["## Wall time by stage, seconds", ""]
    lines += _table(
        ["stage", *(world["world"] for world in results["worlds"])],
        [
            [stage, *(str(world["seconds"].get(stage, "")) for world in results["worlds"])]
            for stage in dict.fromkeys(stage for world in results["worlds"] for stage in world["seconds"])
        ],
    )
    lines += ["", f"Whole demo: {results['seconds']} s. {results['machine']}.", ""]
    return "\n".join(lines)


def summary(results: dict[str, Any]) -> list[str]:
    """One table over all worlds: accuracy in percent with 95% intervals."""
    worlds = results["worlds"]
    accuracy = {world["world"]: {row["method"]: row["accuracy"] for row in world["accuracy"]} for world in worlds}
    methods = list(dict.fromkeys(method for rows in accuracy.values() for method in rows))
    head = [f"{w['world']}, n = {w['accuracy'][0]['n']}, q = {w['settings']['quantile']}" for w in worlds]
    return _table(
        ["accuracy, % [95% interval]", *head],
        [
            [f"**{method}**" if method == OURS else method, *(_span(rows.get(method)) for rows in accuracy.values())]
            for method in methods
        ],
    )


def _world(world: dict[str, Any]) -> list[str]:
    settings, filters = world["settings"], world["filters"]
    lines = [
        f"## World: {world['world']}" + (", where the plain recipe fails" if _fails(world) else ""),
        "",
        world["description"],
        "",
        f"{settings['train_problems']} training problems, threshold {world['threshold_nats']:.3f} nats (quantile "
        f"{settings['quantile']} over {settings['validation_problems']} validation problems), H = "
        f"{settings['horizon']}. States: {filters['admitted']} admitted, {filters['verified']} with a verified future, "
        f"{filters['long_enough']} of them long enough, {filters['valid_group']} valid groups.",
        "",
    ]
    lines += _table(
        ["method", "accuracy", "- SLM greedy", f"- {OURS}", "events", "tokens"],
        [
            [
                row["method"],
                _span(row["accuracy"]),
                _span(row.get("minus SLM greedy"), sign=True),
                _span(row.get(f"minus {OURS}"), sign=True),
                str(row.get("events", "")),
                str(row.get("tokens", "")),
            ]
            for row in world["accuracy"]
        ],
    )
    lines += ["", f"n = {world['accuracy'][0]['n']} test problems.", ""]
    lines += ["### Agreement with the SLM's own rollouts on held-out states", ""]
    lines += _agreement(world["agreement"])
    lines += [
        "",
        "A pair of candidates counts where their rollouts differ, score ties count one half; 95% score intervals, a "
        "problem one trial at most. Direct-B needs a verified future, so it is seen on fewer states. Mixed: states "
        "whose candidates differ in outcome.",
        "",
        "### By kind of event",
        "",
    ]
    for kind, part in world["agreement_by_kind"].items():
        lines += [f"**{kind}**: {part['events']} held-out states", ""]
        lines += [*_agreement(part["rows"]), ""]
    lines += ["### Pool coverage", ""]
    lines += _table(
        ["pool", "mean size", "coverage % (all states)", "states", "coverage % (mixed states)", "mixed states"],
        [
            [
                row["pool"],
                str(row["mean_size"]),
                _number(row["coverage_percent"]),
                str(row["states"]),
                _number(row["coverage_mixed_percent"]),
                str(row["mixed_states"]),
            ]
            for row in world["coverage"]
        ],
    )
    if len(world["sweep"]) > 1:
        methods = list(world["sweep"][0]["accuracy"])
        lines += ["", "### Sweep of the request quantile", ""]
        lines += _table(
            ["quantile", "threshold, nats", "events a problem", *methods],
            [
                [
                    str(row["quantile"]),
                    str(row["threshold_nats"]),
                    str(row["events"]),
                    *(_span(row["accuracy"][method]) for method in methods),
                ]
                for row in world["sweep"]
            ],
        )
        lines += ["", "States, futures and reranker are made again at every quantile.", ""]
    lines += ["", *_event(world["worked_event"])]
    return lines


def _fails(world: dict[str, Any]) -> bool:
    """Ours lies below the SLM by itself, by more than the interval."""
    ours = next(row for row in world["accuracy"] if row["method"] == OURS)
    return bool(ours["minus SLM greedy"][2] < 0)


def _event(event: dict[str, Any] | None) -> list[str]:
    lines = ["### One event in full", ""]
    if event is None:
        return [
            *lines,
            "No held-out event where the LLM's pick and the reranker's part and lead to different outcomes.",
            "",
        ]
    lines += [
        "The first held-out state where the LLM's favourite and the reranker's part and lead to different outcomes.",
        "",
        f"Prompt `{event['prompt']}`, answer {event['gold']}; written so far `{event['prefix']}`; entropy "
        f"{event['entropy_nats']} nats; shared future `{event['future']}`.",
        "",
    ]
    lines += _table(
        ["token", "source", "p SLM", "p LLM", "B_H", "score", "the SLM goes on", ""],
        [
            [
                f"`{row['token']}`",
                row["source"],
                str(row["p_slm"]),
                str(row["p_llm"]),
                str(row["compatibility"]),
                str(row["score"]),
                f"`{row['rollout']}`".replace("|", "\\|"),
                "right" if row["correct"] else "wrong",
            ]
            for row in sorted(event["candidates"], key=lambda row: -row["score"])
        ],
    )
    return [*lines, ""]


def _agreement(rows: Sequence[dict[str, Any]]) -> list[str]:
    return _table(
        ["score", "pairwise % [95%]", "pairs", "top-1 % (all)", "states", "top-1 % (mixed)", "mixed"],
        [
            [
                row["score"],
                "-" if row["pairwise_percent"] is None else _span(row["pairwise_percent"]),
                str(row["pairs"]),
                _number(row["top1_percent"]),
                str(row["states"]),
                _number(row["top1_mixed_percent"]),
                str(row["mixed_states"]),
            ]
            for row in rows
        ],
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _span(interval: Sequence[float] | None, sign: bool = False) -> str:
    if interval is None:
        return ""
    mean, low, high = interval
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" if sign else f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def plots(results: dict[str, Any], folder: Path) -> list[Path]:
    """accuracy.png, agreement.png and sweep.png in `folder`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    worlds = results["worlds"]
    written = []

    methods = list(dict.fromkeys(row["method"] for world in worlds for row in world["accuracy"]))
    size = (4.2 * len(worlds) + 2.0, 0.3 * len(methods) + 1.4)
    figure, axes = plt.subplots(1, len(worlds), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis, world in zip(axes[0], worlds, strict=True):
        rows = world["accuracy"]
        _bars(axis, [methods.index(row["method"]) for row in rows], rows, "method", "accuracy")
        axis.set(title=f"{world['world']} world, n = {rows[0]['n']}", xlabel="accuracy, %", xlim=(0, 104))
        axis.set_yticks(range(len(methods)), methods)
        axis.set_ylim(len(methods) - 0.4, -0.6)  # the first on top
    figure.suptitle("Accuracy by method, 95% bootstrap intervals")
    written.append(_save(figure, folder / "accuracy.png"))

    known = [[row for row in world["agreement"] if row["pairwise_percent"] is not None] for world in worlds]
    most = max(map(len, known))
    size = (4.2 * len(worlds), 0.36 * most + 1.5)
    figure, axes = plt.subplots(1, len(worlds), figsize=size, squeeze=False, layout="constrained")
    for axis, world, rows in zip(axes[0], worlds, known, strict=True):
        _bars(axis, range(len(rows)), rows, "score", "pairwise_percent")
        axis.axvline(50, color="#333333", linestyle=":", linewidth=1)
        axis.set(title=f"{world['world']} world", xlabel="pairs in order, %", xlim=(0, 104))
        axis.set_yticks(range(len(rows)), [row["score"] for row in rows])
        axis.set_ylim(most - 0.4, -0.6)
    figure.suptitle("Which score ranks candidates as the SLM's own rollouts do (50 = chance), 95% score intervals")
    written.append(_save(figure, folder / "agreement.png"))

    swept = [world for world in worlds if len(world["sweep"]) > 1]
    if swept:
        figure, axes = plt.subplots(1, len(swept), figsize=(4.6 * len(swept), 3.8), squeeze=False, layout="constrained")
        for axis, world in zip(axes[0], swept, strict=True):
            quantiles = [row["quantile"] for row in world["sweep"]]
            for method, marker in zip(world["sweep"][0]["accuracy"], "so^", strict=True):
                spans = [row["accuracy"][method] for row in world["sweep"]]
                axis.plot(quantiles, [span[0] for span in spans], marker=marker, label=method)
                axis.fill_between(quantiles, [span[1] for span in spans], [span[2] for span in spans], alpha=0.15)
            axis.set_xticks(quantiles, [f"{quantile:g}" for quantile in quantiles])
            axis.margins(x=0.08)
            axis.set(title=f"{world['world']} world", xlabel="request quantile", ylabel="accuracy, %", ylim=(0, 104))
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
        figure.suptitle("How often the SLM asks decides whether the plain recipe works, 95% bootstrap bands")
        written.append(_save(figure, folder / "sweep.png"))
    return written


def _bars(axis: Any, places: Sequence[int], rows: Sequence[dict[str, Any]], name: str, value: str) -> None:
    """A bar a row with its interval, ours in a colour of its own."""
    means, lows, highs = zip(*(row[value] for row in rows), strict=True)
    reach = [[m - low for m, low in zip(means, lows, strict=True)], [h - m for m, h in zip(means, highs, strict=True)]]
    colours = ["#c8553d" if row[name] == OURS else "#6b7f99" for row in rows]
    axis.barh(places, means, xerr=reach, color=colours, ecolor="#333333", capsize=2)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
