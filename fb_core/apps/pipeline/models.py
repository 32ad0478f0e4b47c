"""What a run decodes with: models, problems, request policy, rerankers, and the decoders of its methods.

Models are loaded when first used, and identified by hashes before that.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fb_core.apps.demo import DEMO, checkpoint
from fb_core.apps.pipeline.files import Artefact, digest
from fb_core.apps.pipeline.problems import Problem, load_problems, prompt_ids, split, without_overlap
from fb_core.apps.settings.run import ModelSettings, ProblemSettings, RunSettings, ServerSettings, VerifierSettings
from fb_core.decode.decoder import CollaborativeDecoder, Generation, LowLatencyDecoder
from fb_core.decode.deployment import Deployed
from fb_core.decode.policy import RequestPolicy
from fb_core.decode.selectors import FutureBridgeSelector, LLMPreference, Selector
from fb_core.llm.local import LLM, LocalLLM
from fb_core.llm.remote import ServerLLM, key_in
from fb_core.models.checkpoints import (
    checkpoint_ends,
    checkpoint_files,
    checkpoint_hash,
    checkpoint_memory,
    checkpoint_size,
    checkpoint_vocabulary,
    has_tokenizer,
    load_model,
    load_tokenizer,
    tokenizer_hash,
)
from fb_core.models.facts import CausalLM, Tokenizer, free_memory, known_ids
from fb_core.rerank.reranker import TokenReranker
from fb_core.score.scorer import CompatibilityScorer
from fb_core.verify.verifier import Verifier

POOLS = ("collect.slm_k", "futures.llm_k", "score.pool")  # settings of the candidate pool at an event
DEPLOYED = (*POOLS, "evaluate.max_events", "train.scope")  # and of the choice

log = logging.getLogger(__name__)


class Models:
    """SLM, LLM and tokenizer; make it with `models_of`."""

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self._checkpoints = {"slm": checkpoint(settings.slm, "slm"), "llm": checkpoint(settings.llm, "llm")}
        self._hashes: dict[str, str | int | None] = {}  # by role

    @cached_property
    def slm(self) -> CausalLM:
        """The small model."""
        return self._load("slm")[0]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The SLM's, which the LLM must share."""
        return load_tokenizer(self._checkpoints["slm"])

    @property
    def tokenizer_here(self) -> Tokenizer | None:
        """The tokenizer if it is on this machine, else None; downloads nothing."""
        return self.tokenizer if has_tokenizer(self._checkpoints["slm"]) else None

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the tokenizer knows."""
        return known_ids(self.tokenizer)

    def prompts(self, problems: Sequence[Problem], settings: ProblemSettings) -> list[Tensor]:
        """The prompt ids [P] of every problem, on the SLM's device."""
        ids = (prompt_ids(self.tokenizer, problem, settings.prompt, settings.thinking) for problem in problems)
        return [torch.tensor(prompt, device=self.slm.device) for prompt in ids]

    def longest_prompt(self, problems: Sequence[Problem], settings: ProblemSettings) -> int:
        """The number of tokens of the longest prompt; 0 if the tokenizer is not on this machine."""
        if (tokenizer := self.tokenizer_here) is None:
            return 0
        ids = (prompt_ids(tokenizer, problem, settings.prompt, settings.thinking) for problem in problems)
        return max(map(len, ids), default=0)

    @cached_property
    def local_slm(self) -> LocalLLM:
        """The SLM as a writer of whole continuations."""
        return LocalLLM(self.slm, batch_tokens=self.settings.batch_tokens, tokenizer=self.tokenizer)

    @cached_property
    def scorer(self) -> CompatibilityScorer:
        """The compatibility scorer over the SLM, without padding ids."""
        return CompatibilityScorer(self.slm, tokenizer=self.tokenizer)

    @cached_property
    def slm_writer(self) -> LLM:
        """The writer of the SLM's own trajectories: its server, or the SLM in this process."""
        return self._connect(self.settings.slm_server, "slm") if self.settings.slm_server else self.local_slm

    @cached_property
    def llm(self) -> LLM:
        """The large model; ValueError if its tokenizer, or its server's, is not the SLM's."""
        if self.settings.llm_server:
            return self._connect(self.settings.llm_server, "llm")
        model, tokenizer = self._load("llm")
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            words = f"expected the vocabulary of {self.settings.slm}, got another in {self.settings.llm}"
            raise ValueError(f"llm: {words}; use two models of one family")
        return LocalLLM(model, batch_tokens=self.settings.batch_tokens, tokenizer=tokenizer)

    @property
    def device(self) -> str:
        """The hardware that the SLM runs on, such as "cpu" or "NVIDIA H200"."""
        wanted = self.settings.device
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.cuda.get_device_name(torch.device(wanted)) if wanted.startswith("cuda") else wanted

    @property
    def free(self) -> float:
        """Bytes that are free on the device; infinite where it is not of this machine."""
        try:
            auto = "cuda" if torch.cuda.is_available() else "cpu"
            return free_memory(torch.device(auto if self.settings.device == "auto" else self.settings.device))
        except (RuntimeError, AssertionError):  # as torch has it; loading a model there says what is wrong
            return math.inf

    def hashes(self, *roles: str) -> dict[str, Any]:
        """Hashes of "slm", "llm" and "tokenizer", made without loading a model, and the models' dtype.

        "valid_vocab" is the number of ids that are no padding, present only if the SLM's embedding has rows of padding.
        """
        for role in roles:
            if role not in self._hashes:
                self._hashes[role] = self._hash(role)
        hashes = {role: self._hashes[role] for role in roles if self._hashes[role] is not None}
        if self.settings.slm_server:
            hashes["slm_server"] = self.settings.slm_server.model or self.settings.slm
        return {"dtype": self.settings.dtype} | hashes

    def _hash(self, role: str) -> str | int | None:
        if role == "valid_vocab":
            return self.vocabulary if self.vocabulary < checkpoint_vocabulary(self._checkpoints["slm"]) else None
        if role == "tokenizer":
            return tokenizer_hash(self.tokenizer)
        if role == "llm" and self.settings.llm_server:
            return digest(["server", self.settings.llm_server.model or self.settings.llm])
        return checkpoint_hash(self._checkpoints[role])

    def memory(self, role: str) -> tuple[int, int] | None:
        """Bytes of the weights of "slm" or "llm", and of keys and values of a batch; None as of `parameters`."""
        if role == "llm" and self.settings.llm_server is not None:
            return None
        found = checkpoint_memory(self._checkpoints[role], self.settings.dtype)
        return None if found is None else (found[0], found[1] * self.settings.batch_tokens)

    def fetch(self, role: str) -> int:
        """Download the files of "slm" or "llm", as far as they are not on this machine; returns their bytes."""
        path = self._checkpoints[role]
        load_tokenizer(path)
        return sum(file.stat().st_size for file in checkpoint_files(path))

    def parameters(self, role: str) -> int | None:
        """The number of weights of "slm" or "llm", from its files; None if a server has them or they are not here."""
        served = role == "llm" and self.settings.llm_server is not None
        return None if served else checkpoint_size(self._checkpoints[role])

    def _load(self, role: str) -> tuple[CausalLM, Tokenizer]:
        return load_model(self._checkpoints[role], self.settings.device, self.settings.dtype)

    def _connect(self, server: ServerSettings, role: str) -> ServerLLM:
        """The model of a role behind its server."""
        llm = ServerLLM(
            server.url,
            server.flavour,
            model=server.model or getattr(self.settings, role),
            vocabulary=self.vocabulary,
            ends=checkpoint_ends(self._checkpoints[role], self.tokenizer),
            api_key=key_in(server.api_key_variable),
            **server.model_dump(include={"timeout", "retries", "in_flight"}),
        )
        llm.check_tokenizer(self.tokenizer)
        return llm


@lru_cache(maxsize=1)
def models_of(settings: ModelSettings) -> Models:
    """The models of these settings; a process keeps only the last ones."""
    return Models(settings)


@lru_cache(maxsize=1)
def verifier_of(settings: VerifierSettings) -> Verifier:
    """This process's verifier; its workers end with the process."""
    return Verifier(**settings.model_dump())


@lru_cache(maxsize=1)
def splits_of(settings: ProblemSettings) -> dict[str, list[Problem]]:
    """A run's own problems as "train", "validation" and "certification", disjoint and without held-out problems.

    Only the first two have trajectories and states. Raises as `read_problems`, and ValueError if there are too few.
    """
    problems = read_problems(settings.train, settings.limit, "train", settings.seed)
    for source in settings.held_out:
        problems = without_overlap(problems, load_problems(source))
    if (aside := settings.validation + settings.certification) >= len(problems):
        raise ValueError(
            f"problems: expected more than {aside} in {settings.train}, which problems.validation "
            f"({settings.validation}) and problems.certification ({settings.certification}) set aside, got "
            f"{len(problems)}; lower one of them, or give more problems"
        )
    train, held_out = split(problems, aside, settings.seed)
    certification, validation = list[Problem](), held_out
    if settings.certification:
        certification, validation = split(held_out, settings.validation, settings.seed)
        if not validation:
            raise ValueError(
                f"problems.validation: expected room for at least one of {len(held_out)} held-out problems, got "
                f"{settings.validation}, too few for a problem together with those of equal text; raise it"
            )
    return {"train": train, "validation": validation, "certification": certification}


def read_problems(source: str, limit: int | None, role: Literal["train", "test"], seed: int) -> list[Problem]:
    """The problems of a known set or local file, or fresh ones of a demo world, drawn for a role by a seed.

    OSError if a set cannot be found, ValueError for a damaged file or a demo world without a limit.
    """
    if not source.startswith(DEMO):
        return load_problems(source)[:limit]
    from fb_core.apps.demo.worlds import WORLDS

    name = source.removeprefix(DEMO)
    if name not in WORLDS or limit is None:
        words = f"expected a world among {', '.join(WORLDS)} and a limit, got {source!r} and {limit}; set both"
        raise ValueError(f"problems: {words}")
    problems = WORLDS[name].problems(limit, seed, role)
    return [Problem(f"{name}/{problem.prompt}", problem.prompt, problem.answer) for problem in problems]


def benchmark_problems(settings: RunSettings) -> dict[str, list[Problem]]:
    """The problems of every benchmark, without those whose gold answer is not judged to be right.

    Raises as `read_problems`, and ValueError for a gold answer that takes too long to judge.
    """
    evaluate = settings.evaluate
    return _benchmark_problems(evaluate.benchmarks, evaluate.limit, settings.verify, settings.problems.seed)


@lru_cache(maxsize=4)
def _benchmark_problems(
    benchmarks: Sequence[str], limit: int | None, verify: VerifierSettings, seed: int
) -> dict[str, list[Problem]]:
    by_name = {}
    for name in benchmarks:
        problems = read_problems(name, limit, "test", seed)
        verdicts = verifier_of(verify).judge_golds([problem.answer for problem in problems])
        if "timeout" in verdicts:
            late = problems[verdicts.index("timeout")].id
            words = f"expected every gold answer judged in time, got {late}, which was not"
            raise ValueError(f"{name}: {words}; raise verify.timeout")
        by_name[name] = [problem for problem, verdict in zip(problems, verdicts, strict=True) if verdict == "correct"]
        if left := len(problems) - len(by_name[name]):
            log.warning("%s: left out %d problems whose gold answer cannot be judged", name, left)
    return by_name


def file_stem(name: str) -> str:
    """A benchmark's name in file names: its words joined by hyphens, the last 100 characters."""
    return "-".join(re.findall(r"[\w.]+", name))[-100:]


def problems_hash(problems: Sequence[Problem]) -> str:
    """A hash of problems in their order."""
    return digest([[problem.id, problem.text, problem.answer] for problem in problems])


POLICY, RERANKER, DEPLOYED_STAGE = "policy", "reranker", "deployed"  # names of stages
TOGETHER = 64  # most prompts decoded at once
LABELS = {
    "greedy": "Greedy",
    "s2t": "S2T",
    "direct": "Direct LLM score",
    "deployed": "FutureBridge",
    "published": "Published recipe",
}

Generate: TypeAlias = Callable[[Sequence[Tensor], int], Sequence[Generation]]
"""From prompts and max_new_tokens to one generation a prompt."""


def frozen_policy(run: Path) -> RequestPolicy:
    """The request policy of a run; raises ValueError if that stage is not finished."""
    folder = Artefact(run, POLICY)
    folder.finished()
    return RequestPolicy(**json.loads(folder.read("policy", "jsonl")))


def adapter_folder(run: Path, stage: str, seed: int) -> Path:
    """The folder of one seed's adapter in a stage's; raises ValueError if it is not finished or is damaged."""
    adapters, shard = Artefact(run, stage), f"seed-{seed}"
    if adapters.receipt(shard) is None:
        first = "set problems.certification and " if stage == DEPLOYED_STAGE else ""
        raise ValueError(f"{adapters.path}: expected {shard}, got none; {first}run `futurebridge train`")
    return adapters.path / shard


def chosen_reranker(settings: RunSettings, run: Path, seed: int) -> TokenReranker:
    """The chosen reranker of one seed; raises ValueError if it is not finished or is damaged."""
    folder, slm = adapter_folder(run, RERANKER, seed), models_of(settings.models).slm
    return TokenReranker.from_pretrained(folder, slm, scope=settings.train.scope)


def pool_options(settings: RunSettings) -> dict[str, Any]:
    """`pool`, `slm_k`, `llm_k` and `max_events` of a decoder with the pools that the settings train on."""
    pool, slm_k, llm_k = settings.score.pool, settings.collect.slm_k, settings.futures.llm_k
    if pool == "slm-wide":
        pool, slm_k = "slm", slm_k + llm_k
    return {"pool": pool, "slm_k": slm_k, "llm_k": llm_k, "max_events": settings.evaluate.max_events}


class Context:
    """What a run offers a method; files and models are read when first used.

    The fast loop decodes up to `max_batch` prompts, with answers of at most `max_length` tokens each; without a length
    it is the plain loop. `options` are those of a decoder, `batched` those of everything that decodes in batches.
    """

    def __init__(self, settings: RunSettings, run: Path, max_length: int | None = None, max_batch: int = 1) -> None:
        self.settings, self.run = settings, run
        self.models = models_of(settings.models)
        self.batched = {"tokenizer": self.models.tokenizer, "batch_tokens": settings.models.batch_tokens}
        self.options: dict[str, Any] = {**self.batched, "max_length": max_length, "max_batch": max_batch}

    @cached_property
    def policy(self) -> RequestPolicy:
        """When the LLM is asked."""
        return frozen_policy(self.run)

    def reranker(self, seed: int) -> TokenReranker:
        """The chosen reranker of a seed."""
        return chosen_reranker(self.settings, self.run, seed)

    def decoder(self, selector: Selector, *, ask: bool = True, **options: Any) -> CollaborativeDecoder:
        """A decoder with the run's models, policy, pool sizes and budget, and a selector; with `ask=False` no LLM."""
        settings, llm = self.settings, self.models.llm if ask else None
        pools = {"slm_k": settings.collect.slm_k, "llm_k": settings.futures.llm_k}
        options = self.options | pools | {"max_events": settings.evaluate.max_events} | options
        return decoder_of(self.models.slm, llm, selector, self.policy, **options)

    def decoder_named(self, name: str, seed: int | None) -> CollaborativeDecoder:
        """The decoder of one of `LABELS`, with a seed's reranker if it has one; ValueError if that is not trained."""
        if name == "greedy":
            return greedy_decoder(self.models.slm, **self.options)
        if name in ("direct", "s2t"):
            return self.decoder(LLMPreference(), pool="joint" if name == "direct" else "slm")
        assert seed is not None
        if name == "published":
            return self.reranking_decoder(self.reranker(seed))
        folder = adapter_folder(self.run, DEPLOYED_STAGE, seed)
        deployed = Deployed.load(folder)
        assert deployed is not None
        reranker = TokenReranker.from_pretrained(folder, self.models.slm, scope=self.settings.train.scope).eval()
        return self.decoder_for(deployed, reranker)

    def decoder_for(self, deployed: Deployed, reranker: TokenReranker | None) -> CollaborativeDecoder:
        """The decoder of a recipe; "published" and "value" need the reranker."""
        models, selector = self.models, deployed.selector(reranker)
        if selector is None:
            return decoder_of(models.slm, None, None, deployed.policy, **self.options, max_events=0)
        pools = deployed.pools.model_dump()
        return decoder_of(models.slm, models.llm, selector, deployed.policy, **self.options, **pools)

    def reranking_decoder(self, reranker: TokenReranker) -> CollaborativeDecoder:
        """The decoder with a reranker, as published."""
        ask = self.settings.score.pool not in ("slm", "slm-wide")  # to rank the SLM's candidates needs no LLM
        return self.decoder(FutureBridgeSelector(reranker), ask=ask, **pool_options(self.settings))


def decoder_of(
    slm: CausalLM,
    llm: LLM | CausalLM | None,
    selector: Selector | None,
    policy: RequestPolicy,
    *,
    max_length: int | None = None,
    max_batch: int = 1,
    **options: Any,
) -> CollaborativeDecoder:
    """A `LowLatencyDecoder` for `max_batch` sequences of `max_length` tokens; without a length, the plain decoder."""
    if max_length is None:
        return CollaborativeDecoder(slm, llm, selector, policy, **options)
    return LowLatencyDecoder(slm, llm, selector, policy, max_length=max_length, max_batch=max_batch, **options)


def greedy_decoder(slm: CausalLM, **options: Any) -> CollaborativeDecoder:
    """The decoder that never asks; its options are those of `decoder_of`."""
    return decoder_of(slm, None, None, RequestPolicy(math.inf), max_events=0, **options)


def together_of(settings: RunSettings, length: int) -> int:
    """How many prompts to decode at once, if a prompt with its answer has at most `length` tokens."""
    return max(1, min(TOGETHER, settings.models.batch_tokens // length))
