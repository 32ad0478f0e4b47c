"""Log-probs of prompts and of continuations over HTTP: real processes, beside answers, against the scorer's."""

import asyncio
import copy
import socket
from concurrent.futures import CancelledError, ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from dialects import byte_tokenizer
from limits import HANG
from serving import MODEL, Server, service_of, until
from test_serve_limits import counted, here, raw
from tiny import tiny

import fb_core
from fb_core import CompatibilityScorer
from fb_core.apps.serve.protocol import ScoreRequest
from fb_core.apps.serve.service import Busy
from fb_core.decode.engine import Engine
from fb_core.decode.pair import Pair
from fb_core.decode.policy import RequestPolicy


@pytest.fixture(scope="module")
def scorer(pair):
    return CompatibilityScorer(pair.slm, tokenizer=pair.world.tokenizer)


def exact(model, ids):
    """float64 log-probs [n, V] of a plain forward; row i is what follows ids[: i + 1]."""
    with torch.no_grad():
        return copy.deepcopy(model).double()(torch.tensor([ids])).logits[0].log_softmax(-1)


def post(url, path="continuations", **body):
    return httpx.post(f"{url}/v1/{path}", json=body, timeout=HANG)


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("new", [0, 1, 60])
@pytest.mark.parametrize("ids", [False, True])
def test_an_echo_is_prompt_and_answer_with_all_log_probs(server, pair, problems, expected, stream, new, ids):
    """As OpenAI's legacy completions have it: arrays of prompt, then answer; null for the first token; offsets."""
    client = server.client()
    asked = [list(problem.prompt_ids) if ids else problem.prompt for problem in problems]
    options = {"model": MODEL, "prompt": asked, "max_tokens": new, "echo": True, "logprobs": 3, "seed": 1}
    options["temperature"] = 0
    texts, tokens = ["" for _ in asked], [[] for _ in asked]
    finishes = [None for _ in asked]
    answer = client.completions.create(**options, stream=stream)
    for choices in [piece.choices for piece in answer] if stream else [answer.choices]:
        for choice in choices:
            texts[choice.index] += choice.text
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
            if choice.logprobs:
                own = choice.logprobs
                arrays = (own.tokens, own.token_logprobs, own.top_logprobs, own.text_offset)
                tokens[choice.index] += zip(*arrays, strict=True)
    for problem, want, text, found, finish in zip(problems, expected, texts, tokens, finishes, strict=True):
        answered = want.token_ids.tolist()[:new]
        whole = [*problem.prompt_ids, *answered]
        assert text == problem.prompt + (want.text if new == 60 else pair.world.tokenizer.decode(answered))
        assert finish == ("stop" if new == 60 else "length")
        assert len(found) == len(whole)
        assert found[0][1:] == (None, None, 0)
        rows = exact(pair.slm, whole)
        for (name, logprob, top, offset), token, row in zip(found[1:], whole[1:], rows[:-1], strict=True):
            assert logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert top[name] == logprob
            assert len(top) == 3 + (token not in row.topk(3).indices)
            assert sorted(top.values(), reverse=True)[:3] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
            assert text[offset:].startswith(name) or (offset == len(text) and token == whole[-1])  # the end's


def test_an_echo_without_log_probs_is_text(server, problems, expected):
    client = server.client()
    for new, want in ((0, ""), (60, expected[0].text)):
        for prompt in (problems[0].prompt, list(problems[0].prompt_ids)):
            got = client.completions.create(model=MODEL, prompt=prompt, max_tokens=new, echo=True, n=2)
            assert [choice.text for choice in got.choices] == [problems[0].prompt + want] * 2
            assert [choice.logprobs for choice in got.choices] == [None] * 2
            assert got.usage.prompt_tokens == len(problems[0].prompt_ids)


def test_log_probs_of_a_prompt_have_vllms_form(server, pair, problems):
    ids = list(problems[0].prompt_ids)
    body = {"prompt": [ids, ids[:1]], "max_tokens": 1, "prompt_logprobs": 2}
    whole = post(server.url, "completions", **body).json()
    messages = [{"role": "user", "content": problems[0].prompt}]
    chat = post(server.url, "chat/completions", messages=messages, max_tokens=1, prompt_logprobs=2, n=2).json()
    assert chat["prompt_logprobs"] == whole["choices"][0]["prompt_logprobs"]
    assert all("prompt_logprobs" not in choice for choice in chat["choices"])
    assert whole["choices"][1]["prompt_logprobs"] == [None]
    first, *places = whole["choices"][0]["prompt_logprobs"]
    assert first is None
    name = pair.world.tokenizer.convert_ids_to_tokens
    for place, token, row in zip(places, ids[1:], exact(pair.slm, ids)[:-1], strict=True):
        best = row.topk(2).indices.tolist()
        assert list(place) == [str(each) for each in dict.fromkeys([token, *best])]
        for each, found in place.items():
            assert found["logprob"] == pytest.approx(float(row[int(each)]), abs=1e-4)
            assert found["rank"] == int((row > row[int(each)]).sum()) + 1
            assert found["decoded_token"] == name(int(each))
    only = post(server.url, "completions", prompt=ids, max_tokens=0, prompt_logprobs=0).json()["choices"][0]
    assert (only["text"], only["finish_reason"]) == ("", "length")
    assert [list(place) for place in only["prompt_logprobs"][1:]] == [[str(token)] for token in ids[1:]]


def test_a_text_of_bytes_is_echoed_with_the_bytes_of_its_tokens():
    """Offsets are those of the text, in which a token may end inside a character."""
    tokenizer, slm = byte_tokenizer(), tiny("qwen3", vocab_size=300, max_position_embeddings=400)
    text = "né 汉\n x"
    body = {"max_tokens": 0, "echo": True, "logprobs": 0}
    made = Engine(Pair(slm, None, tokenizer), None, RequestPolicy(9.0), max_events=0, max_length=64)
    with made as engine, here(service_of(engine, tokenizer, max_length=64)) as url:
        (choice,) = post(url, "completions", prompt=text, **body).json()["choices"]
        cut = tokenizer(text, add_special_tokens=False).input_ids[:2]
        (half,) = post(url, "completions", prompt=cut, **body).json()["choices"]
    assert choice["text"] == text
    tokens = choice["logprobs"]
    count = len(tokenizer(text).input_ids) - len(text.encode())
    assert tokens["tokens"][count:] == [
        *("n", "bytes:\\xc3", "bytes:\\xa9", " "),
        *(f"bytes:\\x{b:02x}" for b in "汉".encode()),
        *("\n", " ", "x"),
    ]
    assert tokens["text_offset"][count:] == [0, 1, 1, 2, 3, 3, 3, 4, 5, 6]
    assert half["text"] == "n\ufffd"


# --- continuations ----------------------------------------------------------------------------------------------------


def continuations_of(pair, expected):
    """Ends of answers, of several lengths."""
    return [pair.world.tokenizer.decode(want.token_ids.tolist()[:count]) for count, want in enumerate(expected, 1)]


def test_continuations_get_the_scorers_numbers_beside_answers(server, pair, scorer, problems, expected):
    prompt, texts = problems[0].prompt, continuations_of(pair, expected)
    ids = [want.token_ids.tolist()[:count] for count, want in enumerate(expected, 1)]

    async def ask():
        async with server.client(openai.AsyncOpenAI) as client, httpx.AsyncClient(timeout=HANG) as plain:
            answers = [client.completions.create(model=MODEL, prompt=p.prompt, max_tokens=60) for p in problems]
            forms = (
                {"prefix": prompt, "continuations": texts},
                {"prefix": list(problems[0].prompt_ids), "continuations": ids},
            )
            scores = [
                plain.post(f"{server.url}/v1/continuations", json=forms[n % 2] | {"model": MODEL}) for n in range(8)
            ]
            return await asyncio.gather(*answers), await asyncio.gather(*scores)

    answers, scores = asyncio.run(ask())
    assert [one.choices[0].text for one in answers] == [want.text for want in expected]
    wanted = scorer.logprobs(list(problems[0].prompt_ids), ids, return_greedy=True)
    for got in scores:
        fields = got.json()
        assert fields["object"] == "continuations"
        assert fields["model"] == MODEL
        total = len(problems[0].prompt_ids) + sum(map(len, ids))
        assert fields["usage"] == {"prompt_tokens": total, "completion_tokens": 0, "total_tokens": total}
        for index, (row, tokens, (logprob, greedy)) in enumerate(zip(fields["data"], ids, wanted, strict=True)):
            assert (row["index"], row["token_ids"]) == (index, tokens)
            assert row["logprobs"] == pytest.approx(logprob.tolist(), abs=1e-4)
            assert row["greedy"] == greedy.tolist()
            assert row["sum"] == pytest.approx(sum(row["logprobs"]))
            assert row["mean"] == pytest.approx(row["sum"] / len(tokens))
    plain = exact(pair.slm, [*problems[0].prompt_ids, *ids[-1]])[len(problems[0].prompt_ids) - 1 : -1]
    last = scores[0].json()["data"][-1]["logprobs"]
    assert last == pytest.approx(plain.gather(1, torch.tensor(ids[-1])[:, None])[:, 0].tolist(), abs=1e-4)


def test_candidates_and_a_future_get_the_compatibility_score(server, pair, scorer, problems, expected):
    """The mean over the future's tokens, by text and by ids."""
    decode, answer = pair.world.tokenizer.decode, expected[0].token_ids.tolist()
    candidates = list(range(19, 26))
    texts, future = [decode([token]) for token in candidates], decode(answer[1:9])
    by_text = post(server.url, prefix=problems[0].prompt, candidates=texts, future=future).json()
    by_ids = post(server.url, prefix=list(problems[0].prompt_ids), candidates=candidates, future=answer[1:9]).json()
    assert by_text["data"] == by_ids["data"]
    wanted = scorer.score_texts(problems[0].prompt, texts, future)
    assert [row["mean"] for row in by_text["data"]] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert [row["token_ids"] for row in by_text["data"]] == [[token, *answer[1:9]] for token in candidates]
    assert {len(row["logprobs"]) for row in by_text["data"]} == {len(row["greedy"]) for row in by_text["data"]} == {8}


ONE, TWO = {"prefix": [1]}, {"prefix": [1], "continuations": [2]}
REFUSED = {  # name: bodies
    "prefix": [
        {},
        *(TWO | {"prefix": prefix} for prefix in ([[1]], [], [True], "1", [1, 99], "1" * 2049)),
        {"prefix": [1] * 125, "continuations": [[4] * 4]},
        {"prefix": "1" * 2049, "continuations": ["2"]},
    ],
    "continuations": [
        *(ONE, TWO | {"future": [3]}, ONE | {"candidates": [2]}, {"prefix": "1" * 1100, "continuations": ["2"] * 4000}),
        *(ONE | {"continuations": them} for them in ([], [[]], "text", [1.5], [[1 << 40]], [34], [4] * 4097)),
        ONE | {"continuations": [[4] * 100] * 2700},
        *({"prefix": "1", "continuations": them} for them in (["no words"], ["2", ""])),
    ],
    "candidates": [ONE | {"candidates": [4, 34], "future": [4]}],
    "future": [{"prefix": "1", "candidates": ["2"], "future": ""}],
    "prior": [TWO | {"prior": prior} for prior in ([], 7, [99], [4] * 256)],
    "temperature": [TWO | {"temperature": 1}],
    "model": [TWO | {"model": 5}],
}


@pytest.mark.parametrize(("name", "body"), [(name, body) for name, bodies in REFUSED.items() for body in bodies])
def test_what_cannot_be_scored_is_refused_by_name(server, name, body):
    answer = post(server.url, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, name, "invalid_request_error")
    assert error["message"].startswith(name)


def test_prompts_ask_for_no_more_log_probs_than_answers_may(server, problems):
    body = {"prompt": [[1, *[4] * 99]] * 128, "max_tokens": 0, "echo": True, "logprobs": 20}
    error = post(server.url, "completions", **body).json()["error"]
    assert error["message"].startswith("logprobs:")
    error = post(server.url, "completions", **body | {"logprobs": None, "prompt_logprobs": 20}).json()["error"]
    assert "got 268800; ask for less" in error["message"]
    assert post(server.url, "completions", **body | {"logprobs": 9}).status_code == 200


def test_key_model_and_other_methods_are_checked_as_elsewhere(pair, server):
    assert post(server.url, prefix=[1], continuations=[4], model="other").status_code == 404
    assert httpx.get(f"{server.url}/v1/continuations").status_code == 405
    page = httpx.post(f"{server.url}/v1/continuations", json={}, headers={"Origin": "https://evil.example"})
    assert page.status_code == 403
    assert httpx.post(f"{server.url}/v1/continuations", content=b"x" * (2 << 20)).status_code == 413
    with engine_of(pair) as engine, here(service_of(engine, pair.world.tokenizer, queue=1), key="k") as url:
        assert post(url, prefix=[1], continuations=[4]).status_code == 401


def engine_of(pair, **options):
    settings = {"max_events": 0, "max_length": 256} | options
    return Engine(Pair(pair.slm, None, pair.world.tokenizer), None, RequestPolicy(9.0), **settings)


MANY = {"prefix": [1, *[4] * 60], "continuations": [[5] * 60] * 4000}


def test_a_client_that_leaves_ends_its_scores(pair):
    with engine_of(pair) as engine:
        service = service_of(engine, pair.world.tokenizer, queue=2)
        with here(service) as url:
            for _ in range(2):
                client = socket.create_connection(httpx.URL(url).netloc.decode().split(":"), timeout=60)
                client.sendall(raw("/v1/continuations", MANY))
                until(lambda: engine.decoder.loop.scoring)
                client.close()
                until(lambda: not engine.decoder.loop.busy and service.requests == 0)
            until(lambda: counted(url, "/v1/continuations", 499) == 2)
            assert engine.load.pages == 0
            assert post(url, prefix=[1], continuations=[4]).status_code == 200


def test_scores_count_in_the_queue_and_end_with_the_server(pair):
    async def cut(service):
        replies = [await service.score(ScoreRequest(**MANY)) for _ in range(2)]
        with pytest.raises(Busy, match="queue:"):
            await service.score(ScoreRequest(prefix=[1], continuations=[4]))
        service.end()
        for reply in replies:
            with pytest.raises(CancelledError):
                await reply.scores()
            service.end_of(reply)
            await reply.tokens.get()
        assert service.requests == 0

    with engine_of(pair) as engine:
        asyncio.run(cut(service_of(engine, pair.world.tokenizer, queue=2)))


def test_beside_many_scores_others_are_answered(pair, problems):
    """An answer of two tokens waits for a few forwards, not for all of them."""
    answered, some = 0, MANY | {"continuations": MANY["continuations"][:300]}
    with engine_of(pair) as engine, here(service_of(engine, pair.world.tokenizer)) as url:
        with ThreadPoolExecutor(1) as other, httpx.Client(timeout=HANG) as client:
            asked = other.submit(post, url, **some)
            until(lambda: engine.decoder.loop.scoring)
            while not asked.done():
                body = {"prompt": problems[0].prompt, "max_tokens": 2}
                assert client.post(f"{url}/v1/completions", json=body).status_code == 200
                answered += 1
        assert len(asked.result().json()["data"]) == 300
    assert answered > 5


def test_metrics_count_what_was_scored(pair):
    with engine_of(pair) as engine, here(service_of(engine, pair.world.tokenizer)) as url:
        post(url, prefix=[1, 4, 5], continuations=[[4, 5], [6]])
        post(url, "completions", prompt=[1, 4, 5, 6], max_tokens=0, echo=True, logprobs=1)
        text = httpx.get(f"{url}/metrics").text
    assert "futurebridge_scored_tokens_total 6.0" in text
    assert "futurebridge_prompt_tokens_total 7.0" in text
    assert 'requests_total{path="/v1/continuations",status="200"} 1.0' in text


def test_a_server_without_a_native_decoder_scores_too(tmp_path):
    tokenizer = byte_tokenizer()
    slm = tiny("gemma2", vocab_size=300)
    slm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    running = Server(slm=tmp_path, llm=tmp_path, threshold=9.0, max_length=100)
    try:
        wanted = CompatibilityScorer(slm, tokenizer=tokenizer).score_texts("a b", [" c", " de"], " f g")
        got = post(running.url, prefix="a b", candidates=[" c", " de"], future=" f g").json()
        assert [row["mean"] for row in got["data"]] == pytest.approx(wanted.tolist(), abs=1e-4)
        refused = post(running.url, "completions", prompt="a", max_tokens=1, echo=True, logprobs=1)
        assert refused.json()["error"]["message"].startswith("logprobs:")
    finally:
        running.end()


# --- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/score", "/generative_scoring"])
@pytest.mark.parametrize("softmax", [None, False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("ids", [False, True])
def test_labels_have_the_models_probabilities(server, pair, problems, path, softmax, first, ids):
    """Each item's prompt is text or ids, and both routes give what a plain forward says of the next token."""
    query, items, labels = problems[0], problems[1:4], [5, 3, 11]
    asked = {"items": [list(item.prompt_ids) if ids else item.prompt for item in items], "item_first": first}
    asked |= {"query": list(query.prompt_ids) if ids else query.prompt, "label_token_ids": labels, "model": MODEL}
    asked |= {} if softmax is None else {"apply_softmax": softmax}
    got = httpx.post(f"{server.url}{path}", json=asked, timeout=HANG).json()
    want, tokens = [], 0
    for item in items:
        parts = (item, query) if first else (query, item)
        prompt = [token for part in parts for token in part.prompt_ids]
        prompt = prompt if ids else pair.world.tokenizer("".join(part.prompt for part in parts))["input_ids"]
        own = exact(pair.slm, prompt)[-1][labels].exp()
        shares = softmax if softmax is not None else path != "/v1/score"
        want.append((own / own.sum() if shares else own).tolist())
        tokens += len(prompt)
    assert got["model"] == MODEL
    assert got["usage"] == {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    if path == "/v1/score":
        assert got["object"] == "scoring"
        found = got["scores"]
    else:
        assert got["object"] == "list"
        assert [(entry["index"], entry["object"]) for entry in got["data"]] == [(n, "score") for n in range(len(items))]
        found, want = (
            [[own] for own in x] for x in ([each["score"] for each in got["data"]], [own[0] for own in want])
        )
    for mine, own in zip(found, want, strict=True):
        assert mine == pytest.approx(own, abs=1e-5)


LABELS = {"query": [5, 6], "items": [[7], [8, 9]], "label_token_ids": [5]}


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [10**6]}, "label_token_ids"),
        ({"items": ["so "]}, "items"),
        ({"items": []}, "items"),
        ({"items": [[7]] * 10_000}, "items"),
        ({"query": [1] * 300}, "items"),
        ({"apply_softmax": 1}, "apply_softmax"),
        ({"labels": [5]}, "labels"),
    ],
)
def test_labels_that_do_not_fit_are_refused(server, changes, parameter):
    answer = post(server.url, "score", **LABELS | changes)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == parameter
    assert post(server.url, "score", **LABELS).status_code == 200


RERANK = {"rerank_prompt": "{document}{query}", "rerank_labels": ("so ", "hence ")}


@pytest.mark.parametrize("names", [("query", "documents"), ("queries", "documents"), ("text_1", "text_2")])
def test_documents_are_ranked_by_the_share_of_the_first_label(pair, problems, names):
    """`/score` keeps their order and takes a query for each too; `/rerank` has the best first."""
    tokenizer, (query, other, *documents) = pair.world.tokenizer, [problem.prompt for problem in problems]
    labels = [tokenizer(text, add_special_tokens=False).input_ids[0] for text in RERANK["rerank_labels"]]

    def wanted(queries):
        for own, text in zip(queries, documents, strict=True):
            row = exact(pair.slm, tokenizer(text + own).input_ids)[-1][labels]
            yield float(row.softmax(-1)[0])

    with engine_of(pair) as engine, here(service_of(engine, tokenizer, **RERANK)) as url:

        def ask(path, queries, **more):
            body = dict(zip(names, (queries, documents), strict=True)) | more
            return httpx.post(f"{url}/{path}", json=body, timeout=HANG).json()

        scores = list(wanted([query] * len(documents)))
        found = ask("score", query, model=MODEL)
        assert [entry["score"] for entry in found["data"]] == pytest.approx(scores, abs=1e-5)
        each = [query, other] * (len(documents) // 2) + [query] * (len(documents) % 2)
        assert [entry["score"] for entry in ask("score", each)["data"]] == pytest.approx(list(wanted(each)), abs=1e-5)
        order = sorted(range(len(documents)), key=lambda index: -scores[index])
        for path in ("rerank", "v1/rerank", "v2/rerank"):
            for count in (0, 2):
                ranked = ask(path, query, top_n=count)
                assert [one["index"] for one in ranked["results"]] == order[: count or None]
                assert [one["document"]["text"] for one in ranked["results"]] == [
                    documents[n] for n in order[: count or None]
                ]
                assert ranked["results"][0]["relevance_score"] == pytest.approx(max(scores), abs=1e-5)
                assert ranked["usage"]["prompt_tokens"] == found["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["b", {"image": "c"}]}, "documents"),
        ({"query": ["a", "b"], "documents": ["b"]}, "query"),
        ({"query": "1", "documents": ["2"], "top_n": -1}, "top_n"),
        ({"query": "1", "documents": ["2"]}, "rerank_labels"),
    ],
)
def test_documents_that_cannot_be_ranked_are_refused(server, body, parameter):
    answer = httpx.post(f"{server.url}/rerank", json=body, timeout=HANG)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)


def test_a_prior_tells_what_the_prefix_adds(server, pair, problems, expected):
    """lm-eval's `acc_mutual_info` chooses by it."""
    texts = continuations_of(pair, expected)
    prior = problems[1].prompt
    found, alone = (
        post(server.url, prefix=text, continuations=texts).json()["data"] for text in (problems[0].prompt, prior)
    )
    answer = post(server.url, prefix=problems[0].prompt, continuations=texts, prior=prior).json()
    both, tokens = answer["data"], sum(2 * len(entry["token_ids"]) for entry in answer["data"])
    assert answer["usage"]["prompt_tokens"] == tokens + sum(len(problem.prompt_ids) for problem in problems[:2])
    for entry, plain, own in zip(both, found, alone, strict=True):
        assert entry["sum"] == pytest.approx(plain["sum"], abs=1e-4)
        assert entry["prior"] == pytest.approx(own["sum"], abs=1e-4)
        assert entry["mutual_info"] == pytest.approx(plain["sum"] - own["sum"], abs=1e-4)


def test_what_other_servers_say_of_themselves(server):
    said = {path: httpx.get(f"{server.url}/{path}", timeout=HANG).json() for path in ("ping", "version", "load")}
    assert said["ping"] == {"status": "ok"}
    assert said["version"] == {"version": fb_core.__version__}
    assert said["load"]["server_load"] >= 0
