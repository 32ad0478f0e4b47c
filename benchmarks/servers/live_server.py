"""Servers as processes, which tests ask and benchmarks measure: llama.cpp's, vLLM's, and ours beside them.

`python live_server.py SETTINGS` is llama.cpp's, with the JSON that `LlamaCpp` passes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
VLLM_COMMAND = Path(os.environ.get("VLLM", ROOT / ".venv-servers" / "bin" / "vllm"))  # `make test-servers` makes it
PATIENCE = 1800.0  # seconds for a start on a busy machine
CONTEXT = 512  # tokens of a sequence of llama.cpp's


class LiveServer(ABC):
    """A server's process on the loopback, on the same port after each start; ready once constructed, or it raises."""

    port = 0

    def __init__(self, api_key: str = "") -> None:
        self.api_key = api_key
        self.log = tempfile.TemporaryFile("a+")  # noqa: SIM115  a pipe that nobody reads holds up what writes to it
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @abstractmethod
    def launch(self) -> subprocess.Popen[str]:
        """The process, which leads a group of its own; sets the port."""

    def start(self) -> None:
        """Returns when the server is ready."""
        self.process, stop = self.launch(), time.monotonic() + PATIENCE
        try:
            while self._health() != 200:
                if self.process.poll() is not None:
                    self.log.seek(0)
                    raise RuntimeError(f"{type(self).__name__}: expected a server, got {self.log.read()[-2000:]}")
                if time.monotonic() > stop:
                    raise TimeoutError(f"{type(self).__name__}: expected a server within {PATIENCE:.0f} s, got none")
                time.sleep(0.01)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """At once, whatever it is doing, and all processes that it has started."""
        with self.process, suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def post(self, path: str, fields: dict[str, Any]) -> Any:
        """The JSON answer to a JSON request."""
        connection = HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"{self.url}{path}: expected status 200, got {response.status}: {answer[:300]!r}")
        return json.loads(answer)

    def _health(self) -> int | None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except OSError:
            return None
        finally:
            connection.close()


Served = tuple[dict[str, LiveServer], dict[str, str]]
"""Servers of one model by name, and why others are missing."""


class LlamaCpp(LiveServer):
    """llama.cpp's server with a GGUF file.

    It has `slots` requests under way at once, each of `context` tokens. If `exact`, keys and values are float32 and
    attention is by plain products. Without xllamacpp this is an ImportError.
    """

    def __init__(
        self,
        file: Path,
        api_key: str = "",
        *,
        slots: int = 4,
        context: int = CONTEXT,
        threads: int = 1,
        exact: bool = True,
    ) -> None:
        if find_spec("xllamacpp") is None:
            raise ImportError("xllamacpp is not installed")
        self.file = file
        self.settings = {"slots": slots, "context": context, "threads": threads, "exact": exact}
        super().__init__(api_key)

    def launch(self) -> subprocess.Popen[str]:
        settings = self.settings | {"file": str(self.file), "port": self.port, "api_key": self.api_key}
        command = [sys.executable, __file__, json.dumps(settings)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
        assert process.stdout is not None
        self.port = int(process.stdout.readline() or self.port)
        return process


class VLLM(LiveServer):
    """vLLM's server with a folder, on the CPU; a FileNotFoundError if it is not installed.

    If `eager`, nothing is compiled, which starts sooner.
    """

    def __init__(
        self,
        folder: Path,
        api_key: str = "",
        *,
        context: int = 2048,
        threads: int = 1,
        eager: bool = True,
        dtype: str = "float32",
    ) -> None:
        if not VLLM_COMMAND.is_file():
            raise FileNotFoundError(f"expected vLLM at {VLLM_COMMAND}; make test-servers installs it")
        self.folder, self.context, self.threads, self.eager, self.dtype = folder, context, threads, eager, dtype
        self.port = free_port()
        super().__init__(api_key)

    def launch(self) -> subprocess.Popen[str]:
        command = [str(VLLM_COMMAND), "serve", str(self.folder), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", self.dtype, "--max-model-len", str(self.context), "--max-logprobs", "64"]
        command += ["--api-key", self.api_key] * bool(self.api_key) + ["--enforce-eager"] * self.eager
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_API_KEY": self.api_key,
            "OMP_NUM_THREADS": str(self.threads),
            "HF_HUB_OFFLINE": "1",
        }
        outer = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.Popen(
            command, stdout=self.log, stderr=self.log, text=True, env=outer | environment, start_new_session=True
        )


class Ours(LiveServer):
    """`futurebridge serve` with one model as both of its pair.

    Options are further ones of the command, and other names further environment variables.
    """

    def __init__(
        self, model: Path | str, *options: str, context: int = 2048, threads: int = 1, **environment: str
    ) -> None:
        self.command = [sys.executable, "-m", "fb_core", "serve", "--slm", str(model), "--llm", str(model)]
        self.command += ["--max-length", str(context), *options]
        self.environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | environment
        self.port = free_port()
        super().__init__()

    def launch(self) -> subprocess.Popen[str]:
        command = [*self.command, "--port", str(self.port)]
        return subprocess.Popen(
            command, stdout=self.log, stderr=self.log, text=True, env=self.environment, start_new_session=True
        )


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def write_gguf(path: Path, model: Any, tokenizer: Any = None) -> None:
    """Write a Llama or a Qwen3, matrices in their dtype and norms in float32.

    A tokenizer is a byte-level BPE one; ids beyond its own are unused. Without one the words are "<0>", "<1>" and so
    on, and the last one ends a text.
    """
    import gguf
    import torch

    config = model.config
    kind = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}[config.model_type]
    made = gguf.GGUFWriter(path, config.model_type)
    numbers = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        **dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), config.head_dim),
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": config.rope_parameters["rope_theta"],
    }
    for name, number in numbers.items():
        getattr(made, f"add_{name}")(number)
    _write_words(made, config.vocab_size, tokenizer)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.float()
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            paired = value.view(-1, 2, config.head_dim // 2, value.shape[1])  # it rotates neighbours, not halves
            value = paired.transpose(1, 2).reshape(value.shape)
        data, dtype = value.numpy(), gguf.GGMLQuantizationType.F32
        if value.ndim > 1 and tensor.dtype == torch.bfloat16:
            dtype = gguf.GGMLQuantizationType.BF16
            data = gguf.quants.quantize(data, dtype)
        made.add_tensor(names.get_name(name, (".weight",)) or name, data, raw_dtype=dtype)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


def _write_words(made: Any, count: int, tokenizer: Any) -> None:
    import gguf

    made.add_tokenizer_model("gpt2")
    made.add_tokenizer_pre("gpt-2")
    if tokenizer is None:
        made.add_token_list([f"<{token}>" for token in range(count)])
        made.add_token_merges(["< 0"])
        made.add_eos_token_id(count - 1)
        return
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = tokenizer.all_special_tokens
    kinds = [gguf.TokenType.CONTROL if word in special else gguf.TokenType.NORMAL for word in words]
    unused = range(len(words), count)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    made.add_token_list([*words, *(f"<unused{token}>" for token in unused)])
    made.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in unused)])
    made.add_token_merges([" ".join(pair) for pair in merges])
    made.add_bos_token_id(tokenizer.bos_token_id)
    made.add_eos_token_id(tokenizer.eos_token_id)
    made.add_add_bos_token(True)


def main() -> None:
    """Serve until standard input ends, with defaults that no request should inherit."""
    import xllamacpp

    settings = json.loads(sys.argv[1])
    params = xllamacpp.CommonParams()
    params.model.path = settings["file"]
    params.hostnames, params.port = ["127.0.0.1"], settings["port"]
    params.api_keys = [settings["api_key"]] if settings["api_key"] else []
    params.n_parallel, params.n_ctx = settings["slots"], settings["slots"] * settings["context"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    if settings["exact"]:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.verbosity = 1
    params.sampling.temp = 2.0
    params.sampling.penalty_repeat = params.sampling.penalty_present = 1.5
    params.sampling.ignore_eos = True
    server = xllamacpp.Server(params)
    print(server.listening_address.rpartition(":")[2], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
