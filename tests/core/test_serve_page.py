"""The server's page in a real browser, against a real server: what it shows is what the API answers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import browser
import httpx
import pytest
from serving import THRESHOLD, Server

needs_browser = pytest.mark.skipif(not (browser.DRIVER and browser.BROWSER), reason="no chromium or no driver here")
TEXTS = "return [...document.querySelectorAll('.answer .text')].map(one => one.textContent)"
DONE = "return !document.getElementById('go').disabled"
READY = "return document.getElementById('model').textContent"


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    with browser.browser() as made:
        yield made


def decode(chromium: browser.Browser, prompt: str, **values: object) -> list[str]:
    """Type a prompt, press the button and wait; the texts of the answers."""
    chromium.wait(READY)
    for name, value in {"prompt": prompt, "kind": "text", **values}.items():
        chromium.run(f"const e = document.getElementById({name!r}); e.value = {value!r}; e.oninput && e.oninput()")
    chromium.run("document.getElementById('answers').replaceChildren()")
    chromium.click("#go")
    chromium.wait("return document.querySelectorAll('.answer').length")
    chromium.wait(DONE)
    return chromium.run(TEXTS)


@needs_browser
@pytest.mark.parametrize("kind", ["text", "chat"])
def test_the_page_shows_the_two_answers_and_their_events(server, chromium, problems, expected, kind):
    chromium.open(server.url)
    chromium.wait(READY)
    assert chromium.run("return document.getElementById('prompt').value") == "29*9+7*7+9;"
    problem, want = next((p, e) for p, e in zip(problems, expected, strict=True) if len(e.events) > 1)
    ours, greedy = decode(chromium, problem.prompt, kind=kind)
    assert ours == want.text
    body = {"prompt": problem.prompt, "max_tokens": 256, "futurebridge": {"recipe": "greedy"}}
    assert greedy == httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"]
    counted = chromium.run("return [...document.querySelectorAll('.answer .count')].map(one => one.textContent)")
    assert counted[0] == f"{len(want.token_ids)} tokens, {want.usage.calls} calls of the large model"
    assert counted[1].endswith("0 calls of the large model")
    marks = chromium.run("return [...document.querySelectorAll('.answer button')].map(one => one.textContent)")
    assert len(marks) == len(want.events)

    chromium.run("document.querySelectorAll('.answer button')[1].focus()")  # the keyboard opens an event
    chromium.press("Enter", 13, "\r")
    event = want.events[1]
    cells = "row => [...row.cells].map(cell => cell.textContent)"
    rows = chromium.wait(f"return [...document.querySelectorAll('#event tbody tr')].map({cells})")
    assert len(rows) == len(event.pool)
    assert [row[1] for row in rows] == [f"{value:.3f}" for value in event.slm_logprob]
    assert [row[2] for row in rows] == [f"{value:.3f}" for value in event.llm_logprob]
    taken = "[...document.querySelectorAll('#event tbody tr')].map(row => row.className)"
    assert [index for index, name in enumerate(chromium.run(f"return {taken}")) if name == "taken"] == [event.choice]
    other = next(index for index in range(len(rows)) if index != event.choice)
    chromium.run("const f = fetch; window.fetch = (u, o) => { window.sent = JSON.parse(o.body); return f(u, o); }")
    chromium.click(f"#event tbody tr:nth-child({other + 1}) button")
    shown = chromium.wait(
        "const p = document.querySelector('#event .text'); return p && p.textContent != '...' ? p.textContent : ''"
    )
    ids = [*problem.prompt_ids, *want.token_ids.tolist()[: event.step], event.pool[other]]
    body |= {"prompt": ids}
    rest = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"]
    assert shown == rows[other][0] + rest
    sent = chromium.run("return window.sent")
    assert len(sent["prompt"]) + sent["max_tokens"] == len(problem.prompt_ids) + 256  # as much as the answer had
    assert chromium.console() == []


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_page_fits_its_screen_and_breaks_no_rule(server, chromium, problems, width, height, scheme, tmp_path):
    chromium.open(server.url, width, height, scheme)
    decode(chromium, problems[0].prompt, threshold=0)
    chromium.click(".answer button")
    (tmp_path / f"{width}-{scheme}.png").write_bytes(chromium.screenshot())
    assert chromium.run("return document.documentElement.scrollWidth") == width
    assert chromium.console() == []


@needs_browser
def test_the_threshold_and_an_error_are_the_servers(server, chromium, problems):
    chromium.open(server.url)
    chromium.wait(READY)
    assert chromium.run("return document.getElementById('nats').textContent") == f"{THRESHOLD:.2f} nats"
    decode(chromium, problems[0].prompt, threshold=4)
    assert "0 calls" in chromium.run("return document.querySelector('.count:not(#model)').textContent")
    decode(chromium, "1+" * 300)
    told = chromium.wait("return document.getElementById('problem').textContent")
    assert told.startswith("prompt: expected")


@needs_browser
def test_a_key_is_asked_for_and_kept_in_memory(chromium, problems, monkeypatch):
    monkeypatch.setenv("PAGE_KEY", "secret")
    server = Server(key_variable="PAGE_KEY")
    try:
        chromium.open(server.url)
        chromium.wait("return !document.getElementById('lock').hidden")
        chromium.run(
            "const k = document.getElementById('key'); k.value = 'secret'; k.dispatchEvent(new Event('change'))"
        )
        assert len(decode(chromium, problems[0].prompt)) == 2
        assert chromium.run("return localStorage.length + sessionStorage.length + document.cookie.length") == 0
        assert "secret" not in chromium.run("return document.documentElement.outerHTML")
    finally:
        server.end()


def test_the_page_allows_itself_alone_and_can_be_left_out(server):
    answer = httpx.get(server.url)
    policy = answer.headers["content-security-policy"]
    assert answer.headers["content-type"].startswith("text/html")
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in answer.text.replace("http-equiv", "")
    without = Server("--no-page")
    try:
        assert httpx.get(without.url).status_code == 404
        assert httpx.get(f"{without.url}/health").status_code == 200
    finally:
        without.end()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_token_ids_come_under_vllms_names(server, problems, expected, chat, stream):
    problem, want = problems[0], expected[0]
    own = {"messages": [{"role": "user", "content": problem.prompt}]} if chat else {"prompt": problem.prompt}
    body = {"max_tokens": 60, "return_token_ids": True, "stream": stream} | own
    url = f"{server.url}/v1/{'chat/' if chat else ''}completions"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        lines = answer.read().decode()
    parts = (
        [json.loads(line[6:]) for line in lines.split("\n\n") if line.startswith("data: {")]
        if stream
        else [json.loads(lines)]
    )
    assert [i for part in parts for choice in part["choices"] for i in choice["token_ids"]] == want.token_ids.tolist()
    prompts = [part if chat else part["choices"][0] for part in parts]
    assert [one["prompt_token_ids"] for one in prompts if "prompt_token_ids" in one] == [list(problem.prompt_ids)]
    events = [event for part in parts for c in part["choices"] for event in c.get("futurebridge", {}).get("events", [])]
    for event in events:
        taken = event["texts"][event["choice"]]
        assert want.text[event["offset"] :].startswith(taken)
    assert len(events) == len(want.events)
