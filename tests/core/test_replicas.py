"""Two replicas behind one address, one of them killed under load: real processes of Ray Serve, OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from limits import HANG
from test_serve import THRESHOLD, Server

from fb_core.decoding import LowLatencyDecoder
from fb_core.demo.pairs import load_pair
from fb_core.policy import RequestPolicy
from fb_core.selectors import LLMPreference

CLIENTS = 24
LIMIT = 60  # seconds of a request, far beyond what any takes
DIED = "its process died; try again"


@dataclass
class Said:
    """What a client got: the text, how often it was told the end, and the error, where one came instead."""

    prompt: int
    streamed: bool
    text: str
    ends: int
    error: str | None = None
    seconds: float = 0.0


async def ask(client: openai.AsyncOpenAI, prompts: list[str], prompt: int, streamed: bool) -> Said:
    said, began = Said(prompt, streamed, "", 0), time.monotonic()
    options: dict[str, Any] = {"model": "demo:plans", "prompt": prompts[prompt], "max_tokens": 60}
    try:
        if streamed:
            async for piece in await client.completions.create(**options, stream=True):
                said.text += piece.choices[0].text
                said.ends += piece.choices[0].finish_reason is not None
        else:
            whole = await client.completions.create(**options)
            said.text, said.ends = whole.choices[0].text, len(whole.choices)
    except openai.APIError as problem:
        said.error = problem.message
    said.seconds = time.monotonic() - began
    return said


async def load(server: Server, prompts: list[str], seconds: float, at_half: Any = None) -> list[Said]:
    """Many clients at once, each with one request after another until the time is over."""
    began = time.monotonic()

    async def client_at_work(client: openai.AsyncOpenAI, number: int) -> list[Said]:
        done = []
        while not done or time.monotonic() < began + seconds:
            done.append(await ask(client, prompts, (number + len(done)) % len(prompts), number % 2 == 1))
        return done

    async def strike() -> None:
        await asyncio.sleep(seconds / 2)
        if at_half is not None:
            at_half()

    async with server.client(openai.AsyncOpenAI) as client, asyncio.timeout(seconds + 2 * LIMIT):
        *said, _ = await asyncio.gather(*(client_at_work(client, number) for number in range(CLIENTS)), strike())
    return [one for many in said for one in many]


def metrics(server: Server) -> list[str]:
    return httpx.get(f"{server.url}/metrics", timeout=LIMIT).text.splitlines()


def names(server: Server) -> set[str]:
    """The replicas that answer."""
    lines = [line for line in metrics(server) if line.startswith("futurebridge_kv_pages{")]
    return {line.split('"')[1] for line in lines}


def until(reached: Any) -> None:
    stop = time.monotonic() + HANG
    while not reached():
        assert time.monotonic() < stop
        time.sleep(0.05)


def leave_early(server: Server, prompt: str) -> None:
    """Clients that go away before their answer is there."""
    for streamed in (True, False) * 2:
        body = {"model": "demo:plans", "prompt": prompt, "max_tokens": 200, "stream": streamed}
        try:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=0.02) as gone:
                next(gone.iter_lines())
        except httpx.TimeoutException:
            pass


def observe(prompts: list[str]) -> dict[str, Any]:
    """Everything that happens to two replicas, in the order in which it is told below."""
    server = Server("--engine", "ray", "--replicas", "2", "--queue", "16")
    front = psutil.Process(server.process.pid)
    try:
        seen: dict[str, Any] = {}
        family = [front, *front.children(recursive=True)]
        opened = [one for process in family for one in process.net_connections("inet") if one.status == "LISTEN"]
        seen["listen"] = sorted({one.laddr.ip for one in opened})
        seen["before"] = [asdict(said) for said in asyncio.run(load(server, prompts, 0.0))]
        body = {"model": "demo:plans", "prompt": prompts[0], "max_tokens": 9}
        refused = httpx.post(f"{server.url}/v1/completions", json=body | {"frequency_penalty": 0.5})
        seen["refused"] = [refused.status_code, refused.json()["error"]["message"]]
        long = httpx.post(f"{server.url}/v1/completions", content=b"x" * (2 << 20))
        seen["long"] = [long.status_code, long.json()["error"]["message"]]
        seen["models"] = [model.id for model in server.client().models.list()]
        with_headers = [httpx.get(f"{server.url}/health").status_code, httpx.get(f"{server.url}/nothing").status_code]
        seen["statuses"] = with_headers

        until(lambda: leave_early(server, prompts[0]) or any('status="499"' in line for line in metrics(server)))
        until(lambda: all(line.endswith(" 0.0") for line in metrics(server) if "kv_pages_used{" in line))
        seen["metrics"] = metrics(server)

        async def crowd() -> list[tuple[int, str, str]]:
            async with httpx.AsyncClient(timeout=LIMIT, limits=httpx.Limits(max_connections=None)) as client:
                posts = (client.post(f"{server.url}/v1/completions", json=body) for _ in range(80))
                errors = ((x.status_code, x.json().get("error", {})) for x in await asyncio.gather(*posts))
                return sorted({(status, error.get("type", ""), error.get("code", "")) for status, error in errors})

        seen["crowd"] = asyncio.run(crowd())

        first = names(server)
        replicas = [process for process in family if process.cmdline()[:1][0].startswith("ray::ServeReplica")]
        seen["replicas"] = len(replicas)
        seen["during"] = [
            asdict(said)
            for said in asyncio.run(load(server, prompts, 3.0, lambda: replicas[0].send_signal(signal.SIGKILL)))
        ]
        until(lambda: len(names(server) - first) == 1 and len(names(server)) == 2)
        seen["after"] = [asdict(said) for said in asyncio.run(load(server, prompts, 0.0))]

        family = [front, *front.children(recursive=True)]
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=LIMIT
        ) as stream:
            lines = stream.iter_lines()
            ending = [next(lines)]
            server.process.send_signal(signal.SIGTERM)
            ending += [line for line in lines if line]
        seen["ending"] = ending
        seen["status"] = server.process.wait(HANG)
        seen["log"] = [json.loads(line) for line in server.logged().splitlines() if line.startswith("{")]
        _, alive = psutil.wait_procs(family, timeout=30)
        seen["alive"] = [process.pid for process in alive]
        return seen
    finally:
        server.process.kill()


@pytest.fixture(scope="session")
def expected() -> dict[str, str]:
    """{prompt: its answer alone}"""
    pair = load_pair("plans")
    tokenizer = pair.world.tokenizer
    decoder = LowLatencyDecoder(
        pair.slm, pair.llm, LLMPreference(), RequestPolicy(THRESHOLD), max_length=256, tokenizer=tokenizer
    )
    problems = pair.world.problems(6, 3, "validation")
    return {problem.prompt: decoder.generate(list(problem.prompt_ids), 60).text or "" for problem in problems}


@pytest.fixture(scope="session")
def seen(once, expected) -> dict[str, Any]:
    pytest.importorskip("fastapi")

    def make(folder: Path) -> None:
        (folder / "seen.json").write_text(json.dumps(observe(list(expected))))

    return json.loads((once("replicas", make) / "seen.json").read_text())


def complete(said: dict[str, Any], expected: dict[str, str]) -> bool:
    return said["error"] is None and said["text"] == [*expected.values()][said["prompt"]] and said["ends"] == 1


@pytest.mark.slow
def test_both_replicas_answer_as_one_process_does(seen, expected):
    assert len(seen["before"]) == CLIENTS
    assert all(complete(said, expected) for said in seen["before"])
    counts = [line for line in seen["metrics"] if line.startswith("futurebridge_tokens_total{")]
    assert len(counts) == 2
    assert not any(line.endswith(" 0.0") for line in counts)


@pytest.mark.slow
def test_routes_and_limits_are_those_of_one_process(seen):
    assert seen["models"] == ["demo:plans"]
    assert seen["statuses"] == [200, 404]
    assert seen["refused"][0] == 400
    assert seen["refused"][1].startswith("frequency_penalty: expected")
    assert seen["long"] == [413, f"body: expected at most {1 << 20} bytes; shorten the request"]
    assert seen["crowd"] == [[200, "", ""], [429, "rate_limit_error", "rate_limit_exceeded"]]


@pytest.mark.slow
def test_clients_that_go_away_free_their_places(seen):
    assert [line for line in seen["metrics"] if 'status="499"' in line]
    assert all(line.endswith(" 0.0") for line in seen["metrics"] if line.startswith("futurebridge_kv_pages_used{"))


@pytest.mark.slow
def test_all_of_ray_listens_on_loopback(seen):
    assert seen["listen"]
    assert all(address.removeprefix("::ffff:").startswith("127.") for address in seen["listen"])


@pytest.mark.slow
def test_a_replica_killed_under_load_costs_streams_that_had_begun_and_nothing_else(seen, expected):
    assert seen["replicas"] == 2
    broken = [said for said in seen["during"] if not complete(said, expected)]
    for said in broken:
        assert said["streamed"], said
        assert DIED in said["error"]
        assert [*expected.values()][said["prompt"]].startswith(said["text"])
        assert said["ends"] == 0
    then = [line["then"] for line in seen["log"] if "then" in line]
    assert then.count("the client is told") == len(broken)
    assert then.count("another replica is asked") == len(then) - len(broken)
    assert then  # it was at work when it was killed
    assert len(seen["during"]) - len(broken) > CLIENTS
    assert max(said["seconds"] for said in seen["during"]) < LIMIT


@pytest.mark.slow
def test_another_replica_takes_its_place(seen, expected):
    assert len(seen["after"]) == CLIENTS
    assert all(complete(said, expected) for said in seen["after"])


@pytest.mark.slow
def test_the_end_lets_a_stream_finish_and_leaves_no_process(seen):
    assert seen["ending"][-1] == "data: [DONE]"
    assert seen["status"] == 0
    assert seen["alive"] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--replicas", "2"], "replicas: expected --engine ray with it, got none"),
        (["--engine", "slurm"], "engine: expected local or ray, got 'slurm'"),
        (["--engine", "ray", "--device", "cuda:1"], "device: expected auto, cpu or cuda with --engine ray, got cuda:1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, words):
    pytest.importorskip("fastapi")
    command = [sys.executable, "-m", "fb_core", "serve", "--slm", "demo:plans", "--llm", "demo:plans", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def sent_by(act: Any) -> tuple[list[dict[str, Any]], int]:
    """What a client gets, and the status that is logged."""
    front = pytest.importorskip("fb_core.serve.front")
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    client = front._Client(send)
    asyncio.run(act(client))
    return sent, client.status


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream; charset=utf-8"])
def test_an_error_goes_behind_a_stream_and_not_into_a_whole_answer(kind):
    head = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}

    async def refused(client: Any) -> None:
        await client.send([head])
        await client.refuse(503, "server: ended")

    sent, status = sent_by(refused)
    assert status == 503
    assert [message["type"] for message in sent[1:]] == ["http.response.body"] * (kind != b"application/json")
    assert all(message["body"].startswith(b'data: {"error"') for message in sent[1:])


def test_a_cluster_without_room_is_told_and_nothing_else():
    """On a Ray that runs already, where no Ray Serve does."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("fastapi")
    ray.init(address="local", num_cpus=1, _node_ip_address="127.0.0.1", include_dashboard=False, logging_level="ERROR")
    try:
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-m", "fb_core", "serve", "--slm", "demo:plans", "--llm", "demo:plans"]
        command += ["--port", "0", "--engine", "ray", "--replicas", "2", "--device", "cpu"]
        environment = os.environ | {"RAY_ADDRESS": address}
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=environment)
    finally:
        ray.shutdown()
    assert done.returncode == 2
    assert "replicas: expected at most the cluster's 1 cores, got 2" in done.stderr
    assert done.stderr.count("\n") == 1
