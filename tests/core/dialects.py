"""A tiny model behind HTTP in the dialects of vLLM and SGLang."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from tiny import EOS, V, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FAMILY, SEED = "llama", 2
MAX_LOGPROBS = 20  # of vLLM
OLD = "/old"  # in front of a path: a vLLM that does not know logprob_token_ids

Filter = Callable[[torch.Tensor], torch.Tensor]  # of logits [V]
Choose = Callable[[torch.Tensor], int]  # a token by its logits [V]


def byte_tokenizer(swapped: bool = False, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """Three special tokens, then the 256 bytes, then the merged ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if swapped:
        alphabet[:2] = alphabet[1::-1]
    merged = [left + right for left, right in merges]
    words = {word: token for token, word in enumerate(["<pad>", "<eos>", "<bos>", *alphabet, *merged])}
    made = Tokenizer(models.BPE(words, list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


class Refused(Exception):
    """A request that the server answers with status 400."""


class Model:
    """The tiny model's log-probabilities, from a full forward each."""

    def __init__(self, size: int) -> None:
        self.model = tiny(FAMILY, SEED, vocab_size=size)
        self.tokenizer = byte_tokenizer()
        self.lock = threading.Lock()

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """[P, V]: logits after each token."""
        with self.lock:
            return self.model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)

    def top(self, row: torch.Tensor, k: int) -> list[tuple[int, float]]:
        values, ids = row.topk(min(k, len(row)))
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    def write(self, ids: list[int], n: int, ends: list[int], choose: Choose) -> list[tuple[int, torch.Tensor]]:
        """New tokens, the end included, and the log-probabilities that each was taken from."""
        new: list[tuple[int, torch.Tensor]] = []
        while len(new) < n and not (new and new[-1][0] in (EOS, *ends)):
            row = self.logprobs(ids + [token for token, _ in new])[-1]
            new.append((choose(row), row))
        return new


MODEL: Model  # of the server that runs


def top_k(row: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest logits, all below 1."""
    return row if k < 1 else row.where(row >= row.topk(min(k, len(row))).values[-1], -torch.inf)


def top_p(row: torch.Tensor, p: float) -> torch.Tensor:
    """The logits of the fewest tokens that hold the probability p."""
    chances, ids = row.double().softmax(-1).sort(descending=True)
    return row.index_fill(0, ids[chances.cumsum(-1) - chances >= p], -torch.inf)


def chooser(temperature: float, seed: int | None, *filters: Filter) -> Choose:
    """The largest logit at temperature 0, else a draw from what the filters leave, one after the other."""
    if temperature == 0:
        return lambda row: int(row.argmax())
    if seed is None or not 0 <= seed < 2**31:
        raise Refused(f"expected a seed, got {seed}")
    source = torch.Generator().manual_seed(seed)

    def choose(row: torch.Tensor) -> int:
        for kept in filters:
            row = kept(row)
        return int(row.double().softmax(-1).multinomial(1, generator=source))

    return choose


def vllm(fields: dict[str, Any], old: bool) -> dict[str, Any]:
    """/v1/completions."""
    wanted = None if old else fields.get("logprob_token_ids")
    logprobs, prompt_logprobs = fields.get("logprobs"), fields.get("prompt_logprobs")
    if max(logprobs or 0, prompt_logprobs or 0) > MAX_LOGPROBS:
        raise Refused(f"Requested sample logprobs of {logprobs}, which is greater than max allowed: {MAX_LOGPROBS}")
    if wanted == [] or (wanted and logprobs is None):
        raise Refused("when using `logprob_token_ids`, `logprobs` must be set.")
    temperature, k, p = fields["temperature"], fields.get("top_k", 0), fields.get("top_p", 1.0)
    choose = chooser(
        temperature,
        fields.get("seed"),
        lambda row: row / temperature,
        lambda row: top_k(row, k),
        lambda row: top_p(row, p),
    )
    prompt = fields["prompt"]
    choices = []
    for ids in prompt if isinstance(prompt[0], list) else [prompt]:
        new = MODEL.write(ids, fields["max_tokens"], fields.get("stop_token_ids") or [], choose)
        choice: dict[str, Any] = {
            "index": len(choices),
            "text": MODEL.tokenizer.decode([token for token, _ in new]),
            "logprobs": None,
            "finish_reason": "stop" if new[-1][0] == EOS else "length",
            "stop_reason": None,
            "token_ids": [token for token, _ in new] if fields.get("return_token_ids") else None,
            "prompt_logprobs": None,
            "prompt_token_ids": ids if fields.get("return_token_ids") else None,
        }
        if logprobs is not None:
            by_id = fields.get("return_tokens_as_token_ids")
            name = "token_id:{}".format if by_id else lambda token: MODEL.tokenizer.decode([token])
            tops = []
            for token, row in new:
                listed = [token, *(wanted or [other for other, _ in MODEL.top(row, logprobs)])]
                tops.append({name(other): max(float(row[other]), -9999.0) for other in listed})
            choice["logprobs"] = {
                "text_offset": list(range(len(new))),
                "token_logprobs": [float(row[token]) for token, row in new],
                "tokens": [name(token) for token, _ in new],
                "top_logprobs": tops,
            }
        if prompt_logprobs is not None:
            rows = MODEL.logprobs(ids)
            choice["prompt_logprobs"] = [None] + [
                {
                    str(token): {
                        "logprob": float(row[token]),
                        "rank": int((row > row[token]).sum()) + 1,
                        "decoded_token": MODEL.tokenizer.decode([token]),
                    }
                    for token in dict.fromkeys([after, *(one for one, _ in MODEL.top(row, prompt_logprobs))])
                }
                for row, after in zip(rows, ids[1:], strict=False)
            ]
        choices.append(choice)
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": choices, "usage": usage}


def sglang(fields: dict[str, Any]) -> dict[str, Any]:
    """/generate, started with --enable-deterministic-inference; top_p is of all probabilities."""
    ids, sampling = fields["input_ids"], fields["sampling_params"]
    temperature, k, p = sampling["temperature"], sampling.get("top_k", -1), sampling.get("top_p", 1.0)
    if k == 0 or "seed" in sampling:
        raise Refused(f"top_k must be -1 (disable) or at least 1, got {k}; or Unexpected keyword argument 'seed'")
    choose = chooser(
        temperature,
        sampling.get("sampling_seed"),
        lambda row: row / temperature,
        lambda row: top_p(row, p),
        lambda row: top_k(row, k),
    )
    new = MODEL.write(ids, sampling["max_new_tokens"], sampling.get("stop_token_ids") or [], choose)
    tokens = [token for token, _ in new]
    meta: dict[str, Any] = {
        "id": "1",
        "finish_reason": {"type": "length", "length": len(new)},
        "prompt_tokens": len(ids),
        "completion_tokens": len(new),
        "cached_tokens": 0,
        "e2e_latency": 0.1,
    }
    if fields.get("return_logprob"):
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[float(row[token]), token, None] for token, row in new]
        if k := fields.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [
                [[value, token, None] for token, value in MODEL.top(row, k)] for _, row in new
            ]
        if wanted := fields.get("token_ids_logprob"):
            meta["output_token_ids_logprobs"] = [
                [[float(row[token]), token, None] for token in wanted] for _, row in new
            ]
    return {"text": MODEL.tokenizer.decode(tokens), "output_ids": tokens, "meta_info": meta}


def tokenize(fields: dict[str, Any]) -> dict[str, Any]:
    """/tokenize."""
    tokens = MODEL.tokenizer.encode(fields["prompt"], add_special_tokens=fields["add_special_tokens"])
    return {"count": len(tokens), "max_model_len": 128, "tokens": tokens, "token_strs": None}


def answer(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    if path.endswith("/v1/completions"):
        return vllm(fields, path.startswith(OLD))
    return {"/generate": sglang, "/tokenize": tokenize}[path](fields)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            status, result = 200, answer(self.path, fields)
        except Refused as problem:
            status, result = 400, {"error": {"message": str(problem), "type": "BadRequestError", "code": 400}}
        except KeyError:
            status, result = 404, {"detail": "Not Found"}
        body = json.dumps(result).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(size: int = V) -> Iterator[str]:
    """The server's address; `size` of the vocabulary."""
    global MODEL
    MODEL = Model(size)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
