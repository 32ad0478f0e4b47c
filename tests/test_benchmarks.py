"""Every benchmark runs, at toy sizes, in the branches that it takes on a GPU and in those for CPUs alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG

ROOT = Path(__file__).resolve().parent.parent
ABSENT = (
    r"ModuleNotFoundError: .*|NotImplementedError: .* CUDA only|TypeError: this version of trl wants outputs|"
    r"expected vLLM at .*|it gives no log-probs of a prompt's tokens"
)
OPS = {
    "branch_attention": {"branch_attention", "branch_attention_backward"},
    "decode": {"decode_step", "generate", "rerank_event", "host_time"},
    "end_to_end": {"end_to_end"},
    "engine": {"problems_at_once", "experts"},
    "linear_logprob": {"linear_logprob", "linear_logprob_targets", "linear_logprob_backward"},
    "neighbours": {"rms_norm", "qk_norm_rope", "swiglu", "merge_attention_states", "candidate_head", "topk_entropy"}
    | {"skinny_linear", "branch_attention_qkv", "commit_"},
    "scorer": {"score_group", "score_trajectory", "packed_forward"},
    "training": {"training_step"},
}
ON_CPUS_ALONE = {"decode": {"generate"}, "scorer": {"score_group"}, "linear_logprob": OPS["linear_logprob"]}
ON_CPUS_ALONE |= {"engine": {"generate_many", "first_token"}}


def command(folder: Path, device: str, *options: str) -> str:
    environment = {"TOY_DEVICE": device, "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM": os.devnull}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    given = [sys.executable, "-m", "pytest", str(ROOT / "benchmarks"), "-p", "toy_sizes", "-p", "no:xdist", "-s"]
    given += ["-p", "no:cacheprovider", "--benchmark-only", "--benchmark-disable-gc", "--write-results", str(folder)]
    run = [*given, *options]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of a worker's
    done = subprocess.run(run, env=outer | environment, capture_output=True, text=True, timeout=HANG, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-10_000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "chosen", "ops"),
    [("cuda", "test", OPS), ("cpu", "llama and dtype1 or linear_logprob or beside_servers", ON_CPUS_ALONE)],
)
@pytest.mark.sweep(2)
def test_every_benchmark_runs(tmp_path: Path, device: str, chosen: str, ops: dict[str, set[str]]) -> None:
    output = command(tmp_path, device, "-k", chosen)
    results = {file.stem: json.loads(file.read_text())["cases"] for file in next(tmp_path.glob("cpu*")).iterdir()}
    assert {name: {case["op"] for case in cases} for name, cases in results.items()} == ops
    assert [case for cases in results.values() for case in cases if not case["median_us"]] == []
    reasons = re.findall(r": not run: (.*)", output)
    assert [reason for reason in reasons if not re.fullmatch(ABSENT, reason)] == []
