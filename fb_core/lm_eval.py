"""Models for EleutherAI's lm-evaluation-harness: log-likelihoods with shared contexts, here or on a server, and a pair.

Importing this module registers them with lm-eval, which finds models of other packages in no other way: use
`import fb_core.lm_eval` before `lm_eval.simple_evaluate(model="futurebridge", ...)`, and on a command line
`python -m fb_core.lm_eval run --model futurebridge ...`, which is lm-eval's own command with this model in it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

from fb_core._util import require

try:
    require("fb_core.lm_eval", "lm_eval", extra="lm-eval")
except ImportError as problem:
    if __name__ != "__main__":
        raise
    print(problem, file=sys.stderr)
    raise SystemExit(2) from None

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from fb_core.decode.deployment import Wanted, deployment_of, thinking_of
from fb_core.decode.engine import Engine, Handle, Token
from fb_core.decode.pair import Pair
from fb_core.llm.http import Connections, JSONClient
from fb_core.llm.local import LLM
from fb_core.models.checkpoints import load_model
from fb_core.models.facts import CausalLM
from fb_core.models.packed import packs
from fb_core.models.tokens import thinking_switch
from fb_core.runtime.detokenizer import Text
from fb_core.runtime.sampling import Sampling
from fb_core.score.scorer import CompatibilityScorer
from fb_core.score.scorer import token_budget as rows_in_memory

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

Request: TypeAlias = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, context ids, continuation ids
Item: TypeAlias = tuple[tuple[int, ...], dict[tuple[int, ...], list[int]]]
"""A context, and its continuations with the places of their requests."""
UNSUPPORTED = ("mixed_precision_dtype", "parallelize", "softmax_dtype", "tp_plan")
FOLLOWED = (
    *("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p", "pad_token_id", "use_cache"),
)
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1, "typical_p": 1}  # change no text


@register_model("futurebridge")
class FutureBridgeLM(HFLM):
    """lm-eval's `hf` model, with log-likelihoods from packed forwards: each context runs once, without logits.

    Tokens, the split into context and continuation, truncation, chat templates and generation are those of `hf`;
    `batch_size` applies to generation alone. Log-probs are float32. With a large model, the pair generates in an
    `Engine`; log-likelihoods are still those of the small model.

    Args:
        pretrained: a folder, a name on the hub or a loaded transformers model, as for `hf`.
        token_budget: maximum rows of a forward; by default what fits in half the free memory.
        llm: the large model that is asked during generation: a folder, a name on the hub, or a loaded model.
        adapter: folder of a reranker; without one, the large model's own preference decides.
        recipe: for an adapter with a recipe that `train` chose, that recipe or the published one.
        threshold: entropy in nats above which the large model is asked. If left out, the adapter's, or 1 without an
            adapter; an adapter that names none needs it.
        max_events: maximum events of one generation. If left out, the adapter's, or 8.
        max_batch: sequences that the pair continues together.
        options: as for `hf`, except those that change the plain forward of a whole model.

    Raises:
        ValueError: such an option, a model that a packed forward would compute wrongly, or models that do not belong
            together.
    """

    def __init__(
        self,
        pretrained: str | CausalLM,
        *,
        token_budget: int | None = None,
        llm: str | LLM | CausalLM | None = None,
        adapter: str | None = None,
        recipe: Wanted = "chosen",
        threshold: float | None = None,
        max_events: int | None = None,
        max_batch: int = 32,
        **options: Any,
    ) -> None:
        if llm is None and adapter is not None:
            raise ValueError("adapter: expected an llm with it, got none; it chooses among the large model's tokens")
        for name in UNSUPPORTED:
            if options.get(name):
                raise ValueError(f"{name}: expected none for futurebridge, got {options[name]}; use --model hf")
        if adapter is not None:
            own = options.get("chat_template_args") or {}
            options["chat_template_args"] = thinking_switch(thinking_of(adapter)) | own
        super().__init__(pretrained, **options)
        self.scorer = CompatibilityScorer(self.model)
        self.token_budget = token_budget or rows_in_memory(self.model)
        self.engine: Engine | None = None
        if llm is None:
            return
        tokenizers = (self.tokenizer, self.tokenizer)
        if isinstance(llm, str):
            llm, other = load_model(llm, str(self.device), "auto")
            tokenizers = (self.tokenizer, other)
        selector, policy, others = deployment_of(
            adapter, self.model, recipe=recipe, threshold=threshold, max_events=max_events
        )
        self.engine = Engine(
            Pair(self.model, llm, tokenizers),
            selector,
            policy,
            max_batch=max_batch,
            max_length=self.max_length,
            **others,
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context up to its stop strings, by `hf` or by the pair.

        Raises:
            ValueError: a request that leaves no room for its prompt, or has settings that are out of range or that a
                pair does not follow.
        """
        if self.engine is None:
            return super().generate_until(requests, disable_tqdm)
        end, answers, under_way = self.tok_decode(self.eot_token_id, skip_special_tokens=False), [], []
        try:
            for context, asked in (request.args for request in requests):
                wanted = normalize_gen_kwargs(asked, self.max_gen_toks)
                for name, value in wanted.items():
                    if value and name not in FOLLOWED and value != NEUTRAL.get(name):
                        raise ValueError(
                            f"{name}: expected none with llm=, which does not follow it, got {value!r:.80}; "
                            "leave it out of the task's generation_kwargs, or use --model hf"
                        )
                if wanted["max_gen_toks"] >= self.max_length:
                    raise ValueError(
                        f"max_gen_toks: expected less than max_length, {self.max_length}, got more; "
                        "leave room for the prompt"
                    )
                room, stops = wanted["max_gen_toks"], handle_stop_sequences(wanted["until"], eos=end)
                ids = self.tok_encode(context, left_truncate_len=self.max_length - room)
                written = _Written(Text(self.tokenizer, stops))
                sampling = Sampling.of_transformers(wanted) if wanted["do_sample"] else None
                written.handle = self.engine.submit(ids, room, listener=written, sampling=sampling)
                under_way.append((written, stops))
            bar = tqdm(under_way, disable=disable_tqdm or self.rank != 0, desc="generations")
            for request, (written, stops) in zip(requests, bar, strict=True):
                answer = postprocess_generated_text(written.whole(), stops, self.think_end_token)
                self.cache_hook.add_partial("generate_until", request.args, answer)
                answers.append(answer)
        finally:
            for written, _ in under_way:
                written.handle.cancel()
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of every text; for a text longer than the model's context, the sum over its windows."""
        texts = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
                )
            ]
            for request in requests
        ]
        answers = iter(self._loglikelihood_tokens([window for text in texts for window in text], disable_tqdm))
        totals = [sum(next(answers)[0] for _ in text) for text in texts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether the continuation is greedy) of every request; the longest contexts go first."""
        work = _by_context(requests, self.max_length)
        rows = [len(context) + sum(len(each) - 1 for each in following) for context, following in work]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="log-likelihoods") as bar:
            for start, stop in packs(rows, self.token_budget):
                part = work[start:stop]
                pairs = [(context, list(following)) for context, following in part]
                groups = self.scorer.logprobs_many(pairs, self.token_budget, return_greedy=True)
                flat = [outputs for group in groups for outputs in group]
                sums = torch.stack([logprob.sum() for logprob, _ in flat]).tolist()
                greedy = torch.stack([chosen.all() for _, chosen in flat]).tolist()
                places = [places for _, following in part for places in following.values()]
                for answer, indices in zip(zip(sums, greedy, strict=True), places, strict=True):
                    _keep(self, requests, answers, indices, answer)
                    bar.update(len(indices))
        return answers


@register_model("futurebridge-server")
class FutureBridgeServerLM(LocalCompletionsAPI):
    """lm-eval's `local-completions` for `futurebridge serve`: a context is sent once with all its continuations.

    Log-likelihoods come from the server's `/v1/continuations`, `num_concurrent` requests at once, and everything else,
    settings and key included, from `local-completions`.
    """

    def _loglikelihood_tokens(self, requests: Sequence[Request], **options: Any) -> list[tuple[float, bool]]:
        """(log-likelihood, whether the continuation is greedy) of every request.

        Raises:
            ServerError: no answer.
        """
        headers = {name: value.strip() for name, value in self.header.items()}  # without a key it ends in a space
        connections = Connections("", headers, self.timeout, self._concurrent)
        url = str(self.base_url).removesuffix("/completions")
        client = JSONClient(url, connections, model=self.model, retries=self.max_retries - 1, key=self.api_key)

        def ask(item: Item) -> list[tuple[float, bool]]:
            prefix, following = item
            body: dict[str, Any] = {"prefix": prefix, "continuations": list(following)}
            rows = client.post(f"{url}/continuations", body, sum(map(len, following)))["data"]
            return [(row["sum"], all(row["greedy"])) for row in rows]

        work = _by_context(requests, self.max_length)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        try:
            with ThreadPoolExecutor(self._concurrent) as pool:
                replies = tqdm(pool.map(ask, work), total=len(work), desc="contexts")
                for (_, following), reply in zip(work, replies, strict=True):
                    for indices, answer in zip(following.values(), reply, strict=True):
                        _keep(self, requests, answers, indices, answer)
        finally:
            connections.close()
        return answers


def _keep(lm: Any, requests: Sequence[Request], answers: list[Any], indices: Sequence[int], answer: Any) -> None:
    """Note the answer to some requests, in lm-eval's cache too."""
    for index in indices:
        answers[index] = answer
        if (texts := requests[index][0]) is not None:
            lm.cache_hook.add_partial("loglikelihood", texts, answer)


def _by_context(requests: Sequence[Request], most: int) -> list[Item]:
    """Contexts of at most so many tokens, the longest first, with their continuations.

    Raises:
        ValueError: an empty context or continuation, or a continuation that is too long.
    """
    shared: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for index, (texts, context, continuation) in enumerate(requests):
        if not continuation:
            text, after = ("", "") if texts is None else (texts[1][:40], texts[0][-40:])
            got = f"{text!r} after {after!r}, which the tokenizer joins with it" if text else "an empty one"
            raise ValueError(
                f"requests: expected a continuation that begins with a token of its own, got {got}; move a space "
                "or letters from one to the other"
            )
        if not context or len(continuation) > most:
            raise ValueError(
                f"requests: expected a context and 1 to {most} tokens to be scored after it, got "
                f"{len(context)} and {len(continuation)}; shorten the text or raise max_length"
            )
        seen = context[-(most + 1 - len(continuation)) :]
        shared.setdefault(tuple(seen), {}).setdefault(tuple(continuation), []).append(index)
    return sorted(shared.items(), key=lambda item: len(item[0]), reverse=True)


class _Written:
    """Collects the text of a sequence, and cancels the sequence at a stop string."""

    handle: Handle

    def __init__(self, text: Text) -> None:
        self._text = text
        self._pieces: list[str] = []
        self._ended = threading.Event()

    def __call__(self, token: Token | None) -> None:
        if token is None:
            self._ended.set()
            return
        self._pieces.append(self._text.add(token.id))
        if self._text.stopped and hasattr(self, "handle"):  # if it is not set yet, the next token cancels
            self.handle.cancel()

    def whole(self) -> str:
        """Wait for the sequence to end and return its text; raises its error, if there was one."""
        self._ended.wait()
        if not self._text.stopped:
            self.handle.result()
        return "".join([*self._pieces, self._text.end()])


if __name__ == "__main__":
    cli_evaluate()
