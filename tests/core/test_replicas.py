"""Two replicas under Ray Serve, asked over HTTP, beside the same application in one process: in `make test-all`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from limits import HANG
from starlette.testclient import TestClient

from fb_core.apps.serve.run import load_server
from fb_core.apps.settings.pair import ServeSettings

pytest.importorskip("ray")
pytest.importorskip("fastapi")

PAIR = {"slm": "demo:plans", "llm": "demo:plans", "threshold": 0.6, "max_length": 256, "device": "cpu"}
PROMPT = {"prompt": "29*9+7*7+9;", "max_tokens": 60}
# `serve run` on a Ray of two cores whatever the machine has, on loopback.
COMMAND = """
import signal, sys
import ray
from ray import serve
from ray.serve.scripts import cli
ray.init(address="local", num_cpus=2, _node_ip_address="127.0.0.1", include_dashboard=False)
serve.start(http_options={"port": int(sys.argv[1])})
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
cli(["run", *sys.argv[2:]])
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """Two replicas."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    arguments = [f"{name}={value}" for name, value in (PAIR | {"replicas": 2}).items()]
    command = [sys.executable, "-c", COMMAND, str(port), "fb_core.apps.serve.replicas:app", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= dict.fromkeys(
        ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S"), "60"
    )
    log = tmp_path_factory.mktemp("replicas") / "log"
    with log.open("w") as written:
        running = subprocess.Popen(
            command, stdout=written, stderr=written, env=environment | {"RAY_USAGE_STATS_ENABLED": "0"}
        )
    try:
        stop = time.monotonic() + HANG
        while "is ready at" not in log.read_text():
            assert running.poll() is None, log.read_text()
            assert time.monotonic() < stop, log.read_text()
            time.sleep(0.1)
        yield SimpleNamespace(pid=running.pid, url=f"http://127.0.0.1:{port}")
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(HANG)


@pytest.fixture(scope="module")
def replicas(process) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=process.url, timeout=HANG) as client:
        yield client


@pytest.fixture(scope="module")
def single() -> Iterator[TestClient]:
    """One process's application."""
    made = load_server(ServeSettings(**PAIR), loopback=True)
    with TestClient(made, base_url="http://127.0.0.1") as client:
        yield client


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("method", "path", "status", "options"),
    [
        ("POST", "/v1/completions", 200, {"json": PROMPT}),
        ("POST", "/v1/chat/completions", 200, {"json": {"messages": [{"role": "user", "content": "7*7+9;"}]}}),
        *(("GET", "/v1/models", 200, {}), ("GET", "/health", 200, {}), ("GET", "/nothing", 404, {})),
        ("POST", "/v1/completions", 400, {"json": PROMPT | {"frequency_penalty": 0.5}}),
        ("GET", "/v1/models", 403, {"headers": {"Origin": "http://page.example"}}),
        ("POST", "/v1/completions", 413, {"content": b"x" * ((1 << 20) + 1)}),
    ],
)
def test_a_replica_answers_as_one_process_does(replicas, single, method, path, status, options):
    def said(client: Any) -> tuple[int, Any]:
        """Without the answer's name and time."""
        answer = client.request(method, path, **options)
        return answer.status_code, {name: it for name, it in answer.json().items() if name not in ("id", "created")}

    wanted = said(single)  # once: the large model's cache would round a second answer differently
    assert wanted[0] == status
    assert said(replicas) == wanted


@pytest.mark.slow
@pytest.mark.sweep
def test_a_stream_comes_in_pieces(replicas, single):
    with replicas.stream("POST", "/v1/completions", json=PROMPT | {"stream": True}) as said:
        assert said.headers["content-type"].startswith("text/event-stream")
        parts = list(said.iter_raw())
    lines = [line for line in b"".join(parts).decode().splitlines() if line]
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    whole = single.post("/v1/completions", json=PROMPT).json()["choices"][0]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["text"]
    assert pieces[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"
    assert lines[-1] == "data: [DONE]"
    assert len(parts) > 1


@pytest.mark.slow
@pytest.mark.sweep
def test_two_processes_share_the_requests(process, replicas, single):
    def text(client: Any) -> str:
        return client.post("/v1/completions", json=PROMPT).json()["choices"][0]["text"]

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(lambda _: text(replicas), range(64))) == {text(single)}
    started = [one.cmdline()[0] for one in psutil.Process(process.pid).children(recursive=True) if one.cmdline()]
    assert len([name for name in started if name.startswith("ray::ServeReplica")]) == 2

    def counts() -> str:
        lines = replicas.get("/metrics").text.splitlines()
        return next(line for line in lines if line.startswith("futurebridge_tokens_total "))

    stop, seen = time.monotonic() + HANG, {counts()}
    while len(seen) < 2:  # each answers with its own
        assert time.monotonic() < stop
        seen.add(counts())
    assert not any(line.endswith(" 0.0") for line in seen)


def test_a_replica_whose_engine_is_closed_is_not_healthy():
    from fb_core.apps.serve.replicas import Replica

    replica = SimpleNamespace(server=load_server(ServeSettings(**PAIR, kv_memory=1 << 24), loopback=False))
    Replica.check_health(replica)
    replica.server.service.engine.close()
    with pytest.raises(RuntimeError, match="engine:"):
        Replica.check_health(replica)
