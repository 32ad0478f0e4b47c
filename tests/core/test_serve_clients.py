"""The server with clients as people have them: OpenAI's, curl, lm-eval, and the documentation's own lines."""

import asyncio
import json
import re
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAI
from limits import HANG
from serving import MODEL, Server
from warm import python

from fb_core import CompatibilityScorer

ROOT = Path(__file__).parent.parent.parent
DOCS, README = ROOT / "docs" / "serving.md", ROOT / "README.md"


@pytest.fixture(scope="module")
def texts(expected):
    return [one.text for one in expected]


def test_openais_asynchronous_client_streams_many_answers_at_once(server, problems, texts):
    async def answer(client, problem):
        pieces = []
        messages = [{"role": "user", "content": problem.prompt}]
        async for piece in await client.chat.completions.create(model=MODEL, messages=messages, stream=True):
            pieces.append(piece.choices[0].delta.content or "")
        return "".join(pieces)

    async def ask():
        async with server.client(openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(answer(client, problem) for problem in problems))

    assert asyncio.run(ask()) == texts


def test_langchains_requests_are_answered(server, problems, texts):
    """As they come by default, then drawn with a seed: whole, streamed and in a batch, chat and completions."""
    chat, completion = (partial(server.client, kind, model=MODEL) for kind in (ChatOpenAI, OpenAI))
    prompts = [problem.prompt for problem in problems]
    assert chat().invoke(prompts[0]).content
    assert completion().invoke(prompts[0])
    plain = completion(temperature=0, max_tokens=60)
    assert [plain.invoke(prompts[0]), "".join(plain.stream(prompts[1]))] == texts[:2]
    assert plain.batch(prompts) == texts
    drawn = chat(temperature=0.7, top_p=1, seed=3, logprobs=True, top_logprobs=2, max_tokens=60)
    whole = drawn.invoke(prompts[0])
    assert "".join(piece.content for piece in drawn.stream(prompts[0])) == whole.content
    assert [answer.content for answer in drawn.batch(prompts[:1] * 2)] == [whole.content] * 2
    tokens = whole.response_metadata["logprobs"]["content"]
    assert tokens
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_streams(server, problems, texts):
    body = json.dumps({"prompt": problems[0].prompt, "max_tokens": 60, "stream": True})
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    *lines, end = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert end == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == texts[0]
    refused = subprocess.run([*command[:-1], "{"], capture_output=True, text=True, timeout=HANG)
    assert json.loads(refused.stdout)["error"]["type"] == "invalid_request_error"


# --- lm-eval ----------------------------------------------------------------------------------------------------------

YAML = """
task: fb_served
custom_dataset: !function served.split
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
"""
UNTIL = """
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["?"], max_gen_toks: 60, do_sample: false}
filter_list:
  - name: boxed
    filter: [{function: regex, regex_pattern: "boxed.([0-9]+)"}, {function: take_first}]
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def harness(tmp_path, pair, problems):
    """Runs lm-eval over the server with a task of our own."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity", reason="lm-eval's models behind a server need it")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    asked = {"question": [p.prompt for p in problems], "answer": [p.answer for p in problems]}
    (tmp_path / "served.py").write_text(
        f"import datasets\n\n\ndef split(**_):\n    return {{'test': datasets.Dataset.from_dict({asked!r})}}\n"
    )
    pair.world.tokenizer.save_pretrained(tmp_path / "tokenizer")

    def run(model, url, kind, more, **arguments):
        (tmp_path / "served.yaml").write_text(YAML.format(kind=kind) + more)
        found = simple_evaluate(
            model=model,
            model_args={"model": MODEL, "base_url": url, "max_retries": 1, **arguments},
            tasks=["fb_served"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            apply_chat_template="chat" in model,
            bootstrap_iters=0,
        )
        return found["results"]["fb_served"], [each["resps"][0][0] for each in found["samples"]["fb_served"]]

    run.tokenizer = str(tmp_path / "tokenizer")
    return run


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_lm_eval_completes_by_token_ids(server, harness, problems, texts, batch):
    options = {"tokenizer": harness.tokenizer, "tokenizer_backend": "huggingface", "add_bos_token": True}
    url = f"{server.url}/v1/completions"
    result, answers = harness("local-completions", url, "generate_until", UNTIL, batch_size=batch, **options)
    assert answers == texts
    right = sum(f"boxed{{{problem.answer}}}" in text for problem, text in zip(problems, texts, strict=True))
    assert result["exact_match,boxed"] == right / len(problems) > 0


@pytest.mark.slow
def test_lm_eval_chats(server, harness, texts):
    url = f"{server.url}/v1/chat/completions"
    _, answers = harness("local-chat-completions", url, "generate_until", UNTIL, num_concurrent=3)
    assert answers == texts


# --- the documentation ------------------------------------------------------------------------------------------------


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(), re.DOTALL)


def run(lines):
    done = python(lines)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readmes_server_answers_as_it_says():
    lines = README.read_text().splitlines()
    (place,) = (number for number, line in enumerate(lines) if line.startswith("futurebridge serve "))
    serve, curl = lines[place : place + 2]
    curl, _, answer = curl.partition("  # ")
    slm, *options = shlex.split(serve.removeprefix("futurebridge serve --slm "), comments=True)
    running = Server(*options, slm=slm)
    done = subprocess.run(
        shlex.split(curl.replace("http://127.0.0.1:8000", running.url)), capture_output=True, text=True
    )
    running.end()
    parts = [part.strip(" ,") for part in answer.split("...")]
    assert [part for part in parts if part not in done.stdout] == []
    assert "boxed" in answer


def test_the_documents_client_prints_what_they_say():
    (command,) = (
        line
        for block in blocks("bash")
        for line in block.splitlines()
        if line.startswith("futurebridge serve --slm demo:")
    )
    slm, *options = command.removeprefix("futurebridge serve --slm ").split()
    running = Server(*options, slm=slm)
    _, client = blocks("python")
    assert run(client.replace("http://127.0.0.1:8000", running.url)) == blocks("text")[0]
    running.end()


def test_the_documents_scores_are_the_scorers(server, pair):
    (block,) = (block for block in blocks("bash") if "/v1/continuations" in block)
    command = shlex.split(block.replace("http://127.0.0.1:8000", server.url))
    got = json.loads(subprocess.run([*command, "-s"], capture_output=True, text=True, timeout=HANG).stdout)
    scorer = CompatibilityScorer(pair.slm, tokenizer=pair.world.tokenizer)
    wanted = scorer.score_texts(**json.loads(command[-1]))
    assert [row["mean"] for row in got["data"]] == pytest.approx(wanted.tolist(), abs=1e-4)


def test_the_documents_engine_runs():
    engine, _ = blocks("python")
    assert "Event(" in run(engine)


def test_every_metric_is_documented_and_no_other(server):
    text = httpx.get(f"{server.url}/metrics").text
    there = {name.removesuffix("_total") for name in re.findall(r"^# TYPE futurebridge_(\w+)", text, re.MULTILINE)}
    there = {name for name in there if not name.endswith("_created")}
    rows = DOCS.read_text().partition("| metric")[2].partition("\n\n")[0].splitlines()[2:]
    told = {name for row in rows for name in re.findall(r"`([a-z_]+)[`{]", row.split("|")[1])}
    assert {name.removesuffix("_total") for name in told} == there
