"""`python -m benchmarks.servers.serving`: the server with 1 to 64 clients, its engine, and one prompt at a time.

Each client sends one streamed request after another. A load of requests is timed as a whole, all ways in turn, and
every answer is compared with that of its prompt alone. The clients read HTTP without a library: they share the machine
with the server, and a library would take several times as much CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.gpu.roofline import COLOURS, GREY, MARKERS, STYLE, save
from benchmarks.harness import OURS, Result
from benchmarks.servers.server_process import LENGTH, MODEL, NEW, PAIR, THREADS, THRESHOLD, Server, Truth, alone
from fb_core import Engine, LLMPreference, LowLatencyDecoder, RequestPolicy
from fb_core.apps.demo.pairs import DemoPair, load_pair
from fb_core.apps.pipeline.page import markdown_table
from fb_core.decode.pair import Pair

CLIENTS = (1, 4, 16, 64)
PROBLEMS = 64
ENGINE, SINGLE = "engine in process", "one at a time"
SHARES = (50, 90, 99)


@dataclass
class Reply:
    """A streamed answer, and the times at which its pieces arrived."""

    began: float
    times: list[float] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)

    def truth(self) -> Truth:
        """The answer that the pieces make."""
        lines = b"".join(self.pieces).decode().split("\n\n")
        assert lines[-2] == "data: [DONE]", lines
        *pieces, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        choices = [piece["choices"][0] for piece in pieces]
        events = [event["step"] for choice in choices for event in choice.get("futurebridge", {}).get("events", ())]
        text, ended = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"] == "stop"
        return Truth(text, last["usage"]["completion_tokens"], ended, events)


@dataclass
class Load:
    """The answers and measurements of one load of requests."""

    seconds: float
    answers: list[Truth]
    details: dict[str, float] = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)


async def ask(host: str, port: int, requests: Iterator[tuple[int, bytes]], replies: dict[int, Reply]) -> None:
    """One client: one connection; it sends the next request as soon as it has an answer."""
    reader, writer = await asyncio.open_connection(host, port)
    for index, body in requests:
        reply = replies[index] = Reply(time.perf_counter())
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        got = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in got, got
        while size := int(await reader.readline(), 16):
            reply.pieces.append((await reader.readexactly(size + 2))[:-2])
            reply.times.append(time.perf_counter())
        await reader.readexactly(2)
    writer.close()
    await writer.wait_closed()


def served(server: Server, prompts: Sequence[list[int]], clients: int) -> Load:
    """A load over HTTP."""
    about = {"model": MODEL, "max_tokens": NEW, "stream": True, "stream_options": {"include_usage": True}}
    bodies = iter([(index, json.dumps(about | {"prompt": ids}).encode()) for index, ids in enumerate(prompts)])
    replies: dict[int, Reply] = {}

    async def all_of_them() -> None:
        await asyncio.gather(*(ask("127.0.0.1", server.port, bodies, replies) for _ in range(clients)))

    cpu, own, began = server.cpu_seconds(), time.process_time(), time.perf_counter()
    asyncio.run(all_of_them())
    seconds = time.perf_counter() - began
    used = {"client cpu": time.process_time() - own, "server cpu": server.cpu_seconds() - cpu}
    ordered = [replies[index] for index in range(len(prompts))]
    return Load(seconds, [reply.truth() for reply in ordered], used, ordered)


def in_process(engine: Engine, pair: DemoPair, prompts: Sequence[list[int]], clients: int) -> Load:
    """The same load on an engine in this process, from as many threads as there are clients."""
    loop = engine.decoder.loop
    assert loop is not None
    steps, began = loop.step.begun, time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        generations = list(threads.map(lambda ids: engine.submit(ids, NEW).result(), prompts))
    seconds = time.perf_counter() - began
    batch = sum(len(generation.token_ids) for generation in generations) / (loop.step.begun - steps)
    return Load(
        seconds, [Truth.of(generation, pair.world.tokenizer) for generation in generations], {"mean batch": batch}
    )


def one_at_a_time(decoder: LowLatencyDecoder, pair: DemoPair, prompts: Sequence[list[int]], _: int) -> Load:
    """`CollaborativeDecoder.generate` one prompt at a time, over pages like the engine."""
    began = time.perf_counter()
    generations = [decoder.generate(ids, NEW) for ids in prompts]
    return Load(time.perf_counter() - began, [Truth.of(generation, pair.world.tokenizer) for generation in generations])


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    values = torch.tensor(seconds, dtype=torch.float64).quantile(torch.tensor(SHARES, dtype=torch.float64) / 100)
    return {f"{name} p{share}": value * 1e3 for share, value in zip(SHARES, values.tolist(), strict=True)}


def row(clients: int, impl: str, loads: Sequence[Load], wanted: Sequence[Truth]) -> Result:
    """The result of all rounds; without figures if an answer differs from that of its prompt alone."""
    asked = len(loads[0].answers)
    wrong = sum(got != wanted[index % PROBLEMS] for load in loads for index, got in enumerate(load.answers))
    shape = f"{clients} client{'s' * (clients > 1)}"
    if wrong:
        return Result("serving", shape, impl, "float32", None, None, None, float(wrong), False)
    seconds = sum(load.seconds for load in loads)
    tokens = sum(answer.tokens for load in loads for answer in load.answers)
    details = {"requests": float(asked), "requests/s": len(loads) * asked / seconds, "tokens/s": tokens / seconds}
    for name in loads[0].details:
        total = sum(load.details[name] for load in loads)
        details[name] = total / len(loads) if name == "mean batch" else total / seconds  # of a core
    if replies := [reply for load in loads for reply in load.replies]:
        answers = [answer for load in loads for answer in load.answers]
        per_token = [
            (reply.times[-1] - reply.times[0]) / (answer.tokens - 1)
            for reply, answer in zip(replies, answers, strict=True)
        ]
        details |= percentiles("first token", [reply.times[0] - reply.began for reply in replies])
        details |= percentiles("latency", [reply.times[-1] - reply.began for reply in replies])
        details |= percentiles("token", per_token)
        details["pieces/token"] = sum(len(reply.pieces) - 3 for reply in replies) / tokens  # less reason, usage and end
    times = harness.quantiles_us([load.seconds / asked for load in loads])
    return Result("serving", shape, impl, "float32", *times, 0.0, True, details=details)


def measured(server: Server, engine: Engine, pair: DemoPair, requests: int, rounds: int) -> list[Result]:
    """One row for every way and number of clients."""
    prompts = [list(problem.prompt_ids) for problem in pair.world.problems(PROBLEMS, seed=0, role="test")]
    wanted, alike = alone(pair, prompts), (pair.slm, pair.llm, LLMPreference(), RequestPolicy(THRESHOLD))
    decoder = LowLatencyDecoder(*alike, tokenizer=pair.world.tokenizer, max_length=LENGTH)
    ways: dict[str, Callable[[list[list[int]], int], Load]] = {
        OURS: lambda asked, clients: served(server, asked, clients),
        ENGINE: lambda asked, clients: in_process(engine, pair, asked, clients),
        SINGLE: lambda asked, clients: one_at_a_time(decoder, pair, asked[:PROBLEMS], clients),
    }
    loads: dict[tuple[int, str], list[Load]] = {}
    for round_number in range(-1, rounds):
        for clients in CLIENTS:
            asked = [prompts[number % PROBLEMS] for number in range(max(PROBLEMS, requests * clients // CLIENTS[-1]))]
            for impl, way in ways.items():
                load = way(asked if round_number >= 0 else asked[: 2 * clients], clients)  # the first round warms up
                if round_number >= 0:
                    loads.setdefault((clients, impl), []).append(load)
    return [row(clients, impl, own_loads, wanted) for (clients, impl), own_loads in loads.items()]


def table(result: Mapping[str, Any]) -> list[str]:
    """A row for every load that was right, and the names of the others."""
    head = ["clients", "requests/s", "tokens/s"]
    head += [f"{name}, ms p50 / p90 / p99" for name in ("first token", "latency")]
    head += ["ms per token", "CPU of server, clients"]
    head += [f"{name}, requests/s (relative to ours)" for name in (ENGINE, SINGLE)]
    rows = []
    for shape, by_impl in _by_shape(result).items():
        if OURS not in by_impl:
            continue
        ours = by_impl[OURS]
        about = [shape.partition(" ")[0], f"{ours['requests/s']:.0f}", f"{ours['tokens/s']:,.0f}"]
        for name in ("first token", "latency"):
            about.append(" / ".join(f"{ours[f'{name} p{share}']:.0f}" for share in SHARES))
        about += [f"{ours['token p50']:.1f}", f"{ours['server cpu']:.0%}, {ours['client cpu']:.0%}"]
        for name in (ENGINE, SINGLE):
            other = by_impl.get(name, {}).get("requests/s")
            about.append("" if other is None else f"{other:.0f} ({other / ours['requests/s']:.2f}x)")
        rows.append(about)
    wrong = [f"{case['shape']}, {case['impl']}" for case in result["cases"] if not case["ok"]]
    lines = [f"*{result['device']} of torch in a process, commit {harness.shown_commit(result)}, {result['date']}*", ""]
    lines += markdown_table(head, rows)
    return [*lines, "", f"Not reported, since answers differed: {'; '.join(wrong)}."] if wrong else lines


def _by_shape(result: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """{shape: {implementation: details}} of the loads that were right."""
    by_shape: dict[str, dict[str, dict[str, float]]] = {}
    for case in result["cases"]:
        if case["ok"]:
            by_shape.setdefault(case["shape"], {})[case["impl"]] = case["details"]
    return by_shape


def plot(result: Mapping[str, Any], path: Path) -> Path:
    """Latency against throughput, and throughput against clients."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    shapes = {int(shape.partition(" ")[0]): by_impl for shape, by_impl in _by_shape(result).items() if OURS in by_impl}
    clients = sorted(shapes)
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
        rates = [shapes[count][OURS]["requests/s"] for count in clients]
        for index, share in enumerate(SHARES):
            late = [shapes[count][OURS][f"latency p{share}"] for count in clients]
            look = {"color": COLOURS[0], "alpha": 1 - 0.3 * index, "marker": MARKERS[index]}
            left.plot(rates, late, markersize=4, label=f"p{share}", **look)
            if share == SHARES[0]:
                for count, x, y in zip(clients, rates, late, strict=True):
                    left.annotate(f"{count}", (x, y), (0, -11), textcoords="offset points", ha="center")
        left.set(xlabel="requests a second (at so many clients)", ylabel="latency, ms", yscale="log")
        left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        left.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        left.yaxis.set_minor_locator(NullLocator())
        left.margins(y=0.12)
        line: dict[str, Any]
        for impl, label, line in (
            (OURS, "server", {"color": COLOURS[0], "linewidth": 2.5, "marker": MARKERS[0]}),
            (ENGINE, ENGINE, {"color": GREY, "marker": MARKERS[1]}),
            (SINGLE, SINGLE, {"color": GREY, "linestyle": "--", "marker": MARKERS[2]}),
        ):
            points = [(count, shapes[count][impl]["requests/s"]) for count in clients if impl in shapes[count]]
            right.plot(*zip(*points, strict=True), markersize=4, label=label, **line)
        right.set(xlabel="clients", ylabel="requests a second", xscale="log", ylim=(0, None))
        right.set_xticks(clients, [str(count) for count in clients], minor=False)
        right.minorticks_off()
        for axis in (left, right):
            axis.grid(color=GREY, alpha=0.25)
            axis.legend()
        return save(figure, path)


def main() -> None:
    """Print the table; write the results if asked to."""
    parser = argparse.ArgumentParser(description="the server under load")
    parser.add_argument("--requests", type=int, default=256, help="requests per load at 64 clients; fewer send fewer")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all ways and client numbers (default: 3)")
    parser.add_argument("--write-results", metavar="DIR", type=Path, help="write <device>/serving.json to DIR")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    pair, batch = load_pair(PAIR), max(CLIENTS)
    engine = Engine(
        Pair(pair.slm, pair.llm), LLMPreference(), RequestPolicy(THRESHOLD), max_length=LENGTH, max_batch=batch
    )
    with engine, Server("--max-batch", str(batch)) as server:
        rows = measured(server, engine, pair, options.requests, options.rounds)
    cases = [vars(row) for row in rows]
    print(*table({**harness.machine(), "cases": cases}), sep="\n")
    if options.write_results:
        print(*harness.write_results(options.write_results, {"serving": rows}))


if __name__ == "__main__":
    main()
