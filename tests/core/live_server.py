"""A model of ours behind llama.cpp's own server, a process: `python live_server.py model.gguf port api_key`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import gguf

SLOTS, CONTEXT = 4, 512  # requests under way at once, tokens of each


def write_gguf(path: Path, model: Any, tokenizer: Any) -> None:
    """A float32 Qwen3 and a byte-level BPE tokenizer, ids beyond the tokenizer's unused."""
    config = model.config
    made = gguf.GGUFWriter(path, "qwen3")
    made.add_context_length(CONTEXT)
    made.add_block_count(config.num_hidden_layers)
    made.add_embedding_length(config.hidden_size)
    made.add_feed_forward_length(config.intermediate_size)
    made.add_head_count(config.num_attention_heads)
    made.add_head_count_kv(config.num_key_value_heads)
    made.add_key_length(config.head_dim)
    made.add_value_length(config.head_dim)
    made.add_layer_norm_rms_eps(config.rms_norm_eps)
    made.add_rope_freq_base(config.rope_parameters["rope_theta"])

    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = tokenizer.all_special_tokens
    kinds = [gguf.TokenType.CONTROL if word in special else gguf.TokenType.NORMAL for word in words]
    unused = range(len(words), config.vocab_size)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    made.add_tokenizer_model("gpt2")
    made.add_tokenizer_pre("gpt-2")
    made.add_token_list([*words, *(f"<unused{token}>" for token in unused)])
    made.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in unused)])
    made.add_token_merges([" ".join(pair) for pair in merges])
    made.add_bos_token_id(tokenizer.bos_token_id)
    made.add_eos_token_id(tokenizer.eos_token_id)
    made.add_add_bos_token(True)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        made.add_tensor(names.get_name(name, (".weight",)) or name, tensor.numpy())
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


class LiveServer:
    """The server's process, on one port of the loopback from its first start on."""

    def __init__(self, model: Path, api_key: str = "") -> None:
        self.model, self.api_key = model, api_key
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when the server is ready."""
        command = [sys.executable, __file__, str(self.model), str(self.port), self.api_key]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        while self._health() != 200:
            time.sleep(0.01)

    def kill(self) -> None:
        """At once, whatever it is doing."""
        with self.process:
            self.process.kill()

    def _health(self) -> int:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5.0)
        connection.request("GET", "/health")
        status = connection.getresponse().status
        connection.close()
        return status


def main() -> None:
    """Serve until standard input ends, with defaults that no request should inherit."""
    import xllamacpp

    model, port, api_key = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.api_keys = [api_key] if api_key else []
    params.n_parallel, params.n_ctx = SLOTS, SLOTS * CONTEXT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
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
