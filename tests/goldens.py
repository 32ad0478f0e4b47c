"""What a rebuild may not change, as one JSON file: `python tests/goldens.py FILE`. Compare two files of one machine.

It holds the digests of a small run's shards and its accuracies, the tokens and events of both decoding loops, the
server's replies, and verdicts.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from runs import SMALL

from fb_core import CollaborativeDecoder, LLMPreference, LowLatencyDecoder, RandomChoice, RequestPolicy
from fb_core.apps.demo.pairs import load_pair
from fb_core.verify.verifier import Verifier

SECTIONS = ("models", "problems", "collect", "futures", "score", "rollouts", "train", "evaluate", "verify")
STAGES = ("trajectories", "policy", "states", "futures", "scores", "training", "selection", "reranker")
ANSWERS = (
    "12",
    r"\boxed{12}",
    r"\boxed{\frac{24}{2}}",
    r"\boxed{0.5}",
    r"\boxed{x=3}",
    r"\boxed{(1,2)}",
    r"\boxed{1{2}",
    "",
)
GOLDS = ("12", r"\frac{1}{2}", "3", "(1,2)")
REQUESTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("completions", {"prompt": "29*9+7*7+9;", "max_tokens": 24}),
    ("completions", {"prompt": "3*4+5;", "max_tokens": 24, "logprobs": 3, "echo": True}),
    ("completions", {"prompt": ["3*4+5;", "8-2*3;"], "max_tokens": 12, "n": 1, "stop": "="}),
    ("chat/completions", {"messages": [{"role": "user", "content": "3*4+5;"}], "max_tokens": 8}),
    ("completions", {"prompt": "3*4+5;", "max_tokens": -1}),
)


def run_digests(folder: Path) -> dict[str, Any]:
    """Hashes of the shards of a small run, and the table of its evaluation."""
    config, run = folder / "small.yaml", folder / "run"
    values = {name: SMALL[name] for name in SECTIONS}
    values["score"] = {**values["score"], "token_budget": 4096}  # else of the free memory, and rounding with it
    config.write_text(yaml.safe_dump(values))
    for command in ("collect", "futures", "score", "train", "evaluate"):
        command_line = [sys.executable, "-m", "fb_core", command, "--config", str(config), "--run-dir", str(run)]
        subprocess.run(command_line, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = {}
    for stage in STAGES:
        for path in sorted((run / stage).rglob("*")):
            if path.suffix in (".parquet", ".safetensors"):
                found[str(path.relative_to(run))] = hashlib.sha256(path.read_bytes()).hexdigest()
    found["evaluation"] = json.loads((run / "evaluation" / "manifest.json").read_text())["summary"]["table"]
    return found


def decoded() -> dict[str, Any]:
    """Tokens and events of both loops."""
    pair, found = load_pair("plans"), dict[str, Any]()
    prompts = [torch.tensor(one.prompt_ids) for one in pair.world.problems(12, 3, "validation")]
    for kind in (CollaborativeDecoder, LowLatencyDecoder):
        for selector in (LLMPreference(), RandomChoice(7)):
            decoder = kind(pair.slm, pair.llm, selector, RequestPolicy(0.6), slm_k=4, llm_k=4)
            found[f"{kind.__name__} {type(selector).__name__}"] = [
                [one.token_ids.tolist(), [[event.step, event.pool, event.choice] for event in one.events]]
                for one in (decoder.generate(prompt, 45) for prompt in prompts)
            ]
    return found


def replies() -> list[Any]:
    """The server's replies without names and times."""
    options = ["--port", "0", "--slm", "demo:plans", "--llm", "demo:plans", "--threshold", "0.6", "--max-length", "256"]
    command = [sys.executable, "-m", "fb_core", "serve", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        address = re.search(r"at (http://\S+)/v1", process.stdout.readline())
        assert address
        found = []
        for path, body in REQUESTS:
            answer = httpx.post(f"{address[1]}/v1/{path}", json={"model": "demo:plans", **body}, timeout=60)
            values = {name: value for name, value in answer.json().items() if name not in ("id", "created")}
            found.append([answer.status_code, values])
        return found
    finally:
        process.terminate()
        process.wait()


def main(path: Path) -> None:
    """Write the file."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {"run": run_digests(Path(folder)), "decoded": decoded(), "replies": replies()}
    golds = [gold for gold in GOLDS for _ in ANSWERS]
    found["verdicts"] = Verifier().verify_many([*ANSWERS] * len(GOLDS), golds)
    path.write_text(json.dumps(found, indent=1, sort_keys=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
