"""The settings of small runs with the paper's comparisons."""

from __future__ import annotations

from typing import Any

from runs import SMALL as RUN

from benchmarks.paper.settings import PaperSettings

SMALL: dict[str, dict[str, Any]] = {
    **RUN,
    "samples": {"llm": 4, "llm_temperature": 1.5, "slm": 2},
    "compare": {
        "votes": 2,
        "delimiter": ". ",
        "judge": "=",
        "timed": 2,
        "router": {"problems": 15, "width": 16, "blocks": 1, "epochs": 2, "learning_rate": 0.001},
    },
    "experiment": {
        "alphas": [0.5],
        "temperatures": [1.0],
        "quantiles": [0.92],
    },
}
TRAINED = ("trajectories", "policy", "states", "futures", "scores", "training", "selection", "reranker")
TRAINED += ("held-out-rollouts",)  # of `trained`


def settings(**changes: Any) -> PaperSettings:
    """`SMALL` with whole sections or parts of them changed."""
    values = {name: {**SMALL.get(name, {}), **changes.get(name, {})} for name in (*SMALL, *changes)}
    return PaperSettings.model_validate(values)
