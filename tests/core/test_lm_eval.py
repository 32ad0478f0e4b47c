"""lm-eval's model `futurebridge` against its `hf`: the same requests, results, cache entries and metrics."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from serving import MODEL, service_of
from test_serve_limits import here

from fb_core import CollaborativeDecoder, LLMPreference, RequestPolicy, TokenReranker
from fb_core.decode.deployment import Deployed
from fb_core.decode.engine import Engine
from fb_core.decode.pair import Pair
from fb_core.lm_eval import UNSUPPORTED, FutureBridgeLM, cli_evaluate
from fb_core.score import shared_prefix

ROOT = Path(__file__).resolve().parent.parent.parent
TASKS = ROOT / "examples" / "lm_eval"
CHOICES = ("fb_long_context", "fb_short_context", "fb_one_token", "fb_few_shot")
WORDS = [*re.findall(r"[A-Za-z]+", (TASKS / "documents.py").read_text()), "A", "B", "C", "D", "know", "does", "he"]
RELATIVE = 1e-4
Calls = list[tuple[str, tuple, Any]]


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    """Byte pairs of the tasks' own words: a word and the space before it are one token, or a few."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<pad>", "<end>", "<start>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    special = {"pad_token": "<pad>", "eos_token": "<end>", "bos_token": "<start>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **special)


@pytest.fixture(scope="module")
def model(words: PreTrainedTokenizerFast) -> PreTrainedModel:
    return tiny("llama", vocab_size=len(words), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def tasks() -> TaskManager:
    return TaskManager(include_path=str(TASKS), include_defaults=False)


class Recorder:
    """A cache hook that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: Calls = []

    def add_partial(self, attr: str, req: tuple, res: Any) -> None:
        self.calls.append((attr, tuple(req), res))


def pair(model: PreTrainedModel, words: PreTrainedTokenizerFast, **options: Any) -> tuple[HFLM, FutureBridgeLM]:
    """(hf, ours), each with a recorder as its cache hook."""
    found = HFLM(model, tokenizer=words, **options), FutureBridgeLM(model, tokenizer=words, **options)
    for lm in found:
        lm.set_cache_hook(Recorder())
    return found


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def check_equal(ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    torch.testing.assert_close(
        torch.tensor([value for value, _ in ours], dtype=torch.float64),
        torch.tensor([value for value, _ in theirs], dtype=torch.float64),
        rtol=RELATIVE,
        atol=1e-5,
    )


def evaluate(name: str, task: str, tasks: TaskManager, **arguments: Any) -> dict:
    options = {"limit": 3, "bootstrap_iters": 0, "batch_size": 2}
    return simple_evaluate(model=name, model_args=arguments, tasks=[task], task_manager=tasks, **options)


@pytest.fixture(scope="module")
def by_hf(model: PreTrainedModel, words: PreTrainedTokenizerFast, tasks: TaskManager) -> Callable[[str], dict]:
    """What `hf` gives for a task, computed once."""
    return cache(lambda task: evaluate("hf", task, tasks, pretrained=model, tokenizer=words))


@pytest.mark.parametrize("task", [*CHOICES, "fb_perplexity", "fb_generate"])
@pytest.mark.sweep(3)
def test_every_task_gives_what_hf_gives(
    model: PreTrainedModel, words: PreTrainedTokenizerFast, tasks: TaskManager, by_hf: Callable, task: str
) -> None:
    check_results(evaluate("futurebridge", task, tasks, pretrained=model, tokenizer=words), by_hf(task), task)


def check_results(ours: dict, theirs: dict, task: str) -> None:
    """The same metrics and the same answer to every request."""
    found, expected = ours["results"][task], theirs["results"][task]
    assert found.keys() == expected.keys()
    for metric, value in expected.items():
        assert found[metric] == (value if isinstance(value, str) else pytest.approx(value, rel=RELATIVE)), metric
    answers = [[row["resps"] for row in result["samples"][task]] for result in (ours, theirs)]
    assert len(answers[0]) == 3
    if task == "fb_generate":
        assert answers[0] == answers[1]
        assert any(text for ((text,),) in answers[0])
    elif task == "fb_perplexity":
        torch.testing.assert_close(*map(torch.tensor, answers), rtol=RELATIVE, atol=0.0)
    else:
        check_equal(*([answer for row in rows for (answer,) in row] for rows in answers))


@pytest.fixture(scope="module")
def served(model: PreTrainedModel, words: PreTrainedTokenizerFast, tmp_path_factory: Any) -> Iterator[dict[str, Any]]:
    """Arguments of lm-eval's client for a server of the model."""
    for package in ("aiohttp", "requests", "tenacity"):
        pytest.importorskip(package, reason=f"lm-eval's models behind a server need {package}")
    folder = str(tmp_path_factory.mktemp("words"))
    words.save_pretrained(folder)
    made = Engine(Pair(model, None, words), None, RequestPolicy(9.0), max_events=0, max_length=1024)
    with made as engine, here(service_of(engine, words, max_length=1024)) as url:
        arguments = {"model": MODEL, "base_url": f"{url}/v1/completions", "tokenizer": folder, "max_retries": 1}
        yield arguments | {"tokenizer_backend": "huggingface", "max_length": 1024}


@pytest.mark.parametrize("client", ["local-completions", "futurebridge-server"])
@pytest.mark.parametrize(
    ("task", "concurrent"),
    [*((task, 1 + 2 * (i % 2)) for i, task in enumerate(CHOICES)), ("fb_perplexity", 3), ("fb_generate", 3)],
)
@pytest.mark.sweep(5)
def test_a_server_gives_lm_evals_clients_what_hf_gives(
    served: dict[str, Any], tasks: TaskManager, by_hf: Callable, task: str, concurrent: int, client: str
) -> None:
    """`local-completions` asks for echo, log-probs and one token; ours sends each context once."""
    check_results(evaluate(client, task, tasks, **served, num_concurrent=concurrent), by_hf(task), task)


def greedy_pair(model: PreTrainedModel, words: PreTrainedTokenizerFast) -> tuple[str, str]:
    """(context, the two tokens that the model would write after it), where their text is tokenized as these two."""
    for word in WORDS:
        ids = words(f"Anna keeps {word}", return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=2, do_sample=False)[0].tolist()
        if words(text := words.decode(made)).input_ids == made:
            return f"Anna keeps {word}", text.removeprefix(f"Anna keeps {word}")
    raise AssertionError("no context has a continuation that is text")


def test_requests_of_every_kind_in_any_order(model: PreTrainedModel, words: PreTrainedTokenizerFast) -> None:
    # with its cache hf reads wrong rows for the last of these, whose text another splits elsewhere
    theirs, ours = pair(model, words, logits_cache=False)
    shared = "Anna keeps red apples. Ben keeps five hats"
    likely = greedy_pair(model, words)
    asked = requests(
        "loglikelihood",
        (shared, " in the kitchen"),
        ("What does he keep?", " A"),
        likely,
        ("", " red apples"),
        (shared, " A"),
        ("Answer: ", "seven lamps"),  # the space goes to the continuation
        (shared, " in the kitchen"),
        ("", "<start> red"),  # the prefix token itself
        ("What does he keep?", " B"),
        (likely[0], likely[1] + " A"),
        (shared + " in", " the kitchen"),
    )
    found, expected = ours.loglikelihood(asked, disable_tqdm=True), theirs.loglikelihood(asked, disable_tqdm=True)
    check_equal(found, expected)
    assert [index for index, (_, greedy) in enumerate(found) if greedy] == [2]
    assert found[0] == found[6]
    kept, wanted = ({call[:2]: call[2] for call in lm.cache_hook.calls} for lm in (ours, theirs))
    assert kept.keys() == wanted.keys() == {("loglikelihood", request.args) for request in asked}
    assert [kept["loglikelihood", request.args] for request in asked] == found


@pytest.mark.parametrize("room", [7, 8, 12])
def test_what_is_too_long_loses_its_beginning(
    model: PreTrainedModel, words: PreTrainedTokenizerFast, room: int
) -> None:
    theirs, ours = pair(model, words, max_length=room)
    context = "Anna keeps red apples. Ben keeps five hats. Clara keeps two black shoes in the kitchen"
    continuations = (" A", " on the roof", " and two white toys under the bed")
    longest = max(len(words(text).input_ids) for text in continuations)
    assert len(words(context).input_ids) > room >= longest == 7
    asked = requests("loglikelihood", *((context, text) for text in continuations))
    check_equal(ours.loglikelihood(asked, disable_tqdm=True), theirs.loglikelihood(asked, disable_tqdm=True))


def test_a_text_longer_than_the_model_is_the_sum_of_its_windows(
    model: PreTrainedModel, words: PreTrainedTokenizerFast
) -> None:
    theirs, ours = pair(model, words, max_length=16)
    texts = ("Ben keeps hats.", "Anna keeps red apples. " * 9, "Kate", "two black shoes in the kitchen" * 2)
    asked = requests("loglikelihood_rolling", *((text,) for text in texts))
    found, expected = (lm.loglikelihood_rolling(asked, disable_tqdm=True) for lm in (ours, theirs))
    assert found == pytest.approx(expected, rel=RELATIVE)
    kept, wanted = (lm.cache_hook.calls for lm in (ours, theirs))
    assert [call[:2] for call in kept] == [call[:2] for call in wanted]
    assert [total for *_, total in kept] == found


def test_a_context_runs_once(
    model: PreTrainedModel, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = pair(model, words)
    rows: list[int] = []
    forward = shared_prefix.packed_forward

    def counted(model: PreTrainedModel, ids: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        rows.append(len(ids))
        return forward(model, ids, *arguments, **options)

    monkeypatch.setattr(shared_prefix, "packed_forward", counted)
    context, letters = "Anna keeps red apples. Ben keeps five hats", (" A", " B", " C", " D")
    asked = requests("loglikelihood", *((context, text) for text in letters), ("Kate", " A"))
    ours.loglikelihood(asked, disable_tqdm=True)
    assert rows == [len(words(context).input_ids) + len(words("Kate").input_ids)]  # one token costs no row


def test_a_small_budget_changes_nothing_but_the_forwards(
    model: PreTrainedModel, words: PreTrainedTokenizerFast
) -> None:
    asked = requests(
        "loglikelihood", *((f"{name} keeps", f" {what} hats") for name in "ABC" for what in ("red", "two"))
    )
    whole = FutureBridgeLM(model, tokenizer=words).loglikelihood(asked, disable_tqdm=True)
    for budget in (1, 7, 100):
        lm = FutureBridgeLM(model, tokenizer=words, token_budget=budget)
        check_equal(lm.loglikelihood(asked, disable_tqdm=True), whole)
        assert lm.loglikelihood([], disable_tqdm=True) == lm.loglikelihood_rolling([], disable_tqdm=True) == []


@pytest.mark.parametrize("option", UNSUPPORTED)
def test_options_of_another_forward_are_refused(
    model: PreTrainedModel, words: PreTrainedTokenizerFast, option: str
) -> None:
    with pytest.raises(ValueError, match=f"^{option}: .*--model hf$"):
        FutureBridgeLM(model, tokenizer=words, **{option: "auto"})


@pytest.mark.parametrize(
    ("context", "continuation", "got"),
    [
        *(
            ("Kate", " red hats" * 9, "1 to 8 tokens"),
            (" ", "red", "1 to 8 tokens"),
            ("Kate keeps", "", "an empty one"),
        ),
        ("Kate kee", "ps", "'ps' after 'Kate kee'"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    model: PreTrainedModel, words: PreTrainedTokenizerFast, context: str, continuation: str, got: str
) -> None:
    lm = FutureBridgeLM(model, tokenizer=words, max_length=8)
    with pytest.raises(ValueError, match=f"^requests: .*{got}"):
        lm.loglikelihood(requests("loglikelihood", (context, continuation)), disable_tqdm=True)


def test_generations_are_a_pairs_where_there_is_a_large_model(
    model: PreTrainedModel, words: PreTrainedTokenizerFast, tasks: TaskManager, tmp_path: Path
) -> None:
    large = tiny("qwen3", 2, vocab_size=len(words), max_position_embeddings=1024)
    large.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    decoder = CollaborativeDecoder(model, large, LLMPreference(), RequestPolicy(1.0), tokenizer=words)
    contexts = ["Kate keeps", "Anna keeps red apples. Ben keeps", "What does he", "Leo", "Emma keeps"] * 2
    whole = [decoder.generate(words(text, add_special_tokens=False)["input_ids"], 24) for text in contexts]
    stop = whole[0].text[5:8]
    asked = [(text, {"until": [stop], "max_gen_toks": 24, "do_sample": False}) for text in contexts]
    wanted = [one.text.partition(stop)[0] for one in whole]
    assert sum(len(one.events) for one in whole) > 10
    for llm, most in ((large, 3), (str(tmp_path), 32)):
        lm = FutureBridgeLM(model, tokenizer=words, llm=llm, threshold=1.0, max_batch=most)
        lm.set_cache_hook(Recorder())
        assert lm.generate_until(requests("generate_until", *asked), disable_tqdm=True) == wanted
        assert [call[1:] for call in lm.cache_hook.calls] == list(zip(asked, wanted, strict=True))
        assert lm.engine.load.pages == 0
    sampling = {"until": [], "max_gen_toks": 24, "do_sample": True, "temperature": 2.0}
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(lm.generate_until(requests("generate_until", *[("Kate", sampling)] * 4), disable_tqdm=True))
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) > 1
    found = simple_evaluate(
        model="futurebridge",
        model_args={"pretrained": model, "tokenizer": words, "llm": str(tmp_path), "max_events": 2},
        tasks=["fb_generate"],
        task_manager=tasks,
        limit=3,
        bootstrap_iters=0,
        device="cpu",
    )
    assert found["n-samples"]["fb_generate"]["effective"] == 3
    with pytest.raises(ValueError, match=r"^adapter:"):
        FutureBridgeLM(model, tokenizer=words, adapter="folder")


def test_a_setting_that_a_pair_does_not_follow_is_refused(
    model: PreTrainedModel, words: PreTrainedTokenizerFast
) -> None:
    lm = FutureBridgeLM(model, tokenizer=words, llm=tiny("qwen3", 2, vocab_size=len(words)), threshold=9.0)
    plain = {"until": [], "max_gen_toks": 4, "do_sample": False}
    idle = {"repetition_penalty": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0, "use_cache": True, "top_p": 1.0}
    whole, same = lm.generate_until(requests("generate_until", ("Kate", plain), ("Kate", plain | idle)), True)
    assert whole == same
    for name, value in (
        *(("repetition_penalty", 1.2), ("no_repeat_ngram_size", 1), ("min_new_tokens", 3), ("num_beams", 2)),
        *(("bad_words_ids", [[7]]), ("presence_penalty", 0.5)),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected none with llm=, which does not follow it, got"):
            lm.generate_until(requests("generate_until", ("Kate", plain | {name: value})), disable_tqdm=True)
        assert lm.engine is not None
        assert lm.engine.load.pages == 0


def test_an_adapter_brings_what_it_was_trained_for(
    model: PreTrainedModel, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    large = tiny("qwen3", 2, vocab_size=len(words), max_position_embeddings=1024)
    TokenReranker.from_base(model).save_pretrained(tmp_path)
    given = {"tokenizer": words, "llm": large, "adapter": str(tmp_path)}
    with pytest.raises(ValueError, match=r"^threshold:"):
        FutureBridgeLM(model, **given)
    pools = {"pool": "joint", "slm_k": 3, "llm_k": 2, "max_events": 5}
    Deployed(name="published", value=None, threshold=1.7068, top_k=64, pools=pools, thinking=True).save(tmp_path)
    lm = FutureBridgeLM(model, **given)
    decoder, pool = lm.engine.decoder, lm.engine.decoder.intervention
    assert (decoder.policy, pool.slm_k, pool.llm_k, decoder.max_events) == (RequestPolicy(1.7068), 3, 2, 5)
    assert lm.chat_template_args["enable_thinking"] is True
    quiet = FutureBridgeLM(model, **given, chat_template_args={"enable_thinking": False}, threshold=0.5)
    assert (quiet.chat_template_args["enable_thinking"], quiet.engine.decoder.policy.threshold) == (False, 0.5)


@pytest.mark.slow
def test_the_command_knows_the_model(
    model: PreTrainedModel,
    words: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model.save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    command = ["fb_core.lm_eval", "run", "--model", "futurebridge", "--device", "cpu"]
    command += ["--model_args", f"pretrained={tmp_path / 'model'},token_budget=900", "--limit", "2"]
    command += ["--include_path", str(TASKS), "--tasks", "fb_one_token", "--output_path", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", command)
    own = partialmethod(TaskManager.__init__, include_defaults=False)  # theirs take long to read
    monkeypatch.setattr(TaskManager, "__init__", own)
    cli_evaluate()  # all that `python -m fb_core.lm_eval` calls once it is imported
    assert "futurebridge" in capfd.readouterr().out
    (written,) = tmp_path.rglob("out*.json")
    assert json.loads(written.read_text())["n-samples"]["fb_one_token"]["effective"] == 2
