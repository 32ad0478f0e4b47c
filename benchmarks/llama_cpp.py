"""llama.cpp as a peer on CPUs: a transformers Llama written as GGUF, decoded by `xllamacpp` in a separate process.

In one process its threads and torch's would disturb each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

NAMES = {  # of a layer's tensors in a GGUF file
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """Write a Llama's weights, matrices in their dtype and norms in float32; the vocabulary is "<0>", "<1>", ..."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    config = model.config
    width = config.hidden_size // config.num_attention_heads
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"<{token}>" for token in range(config.vocab_size)])
    writer.add_token_merges(["< 0"])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.float()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp rotates neighbouring pairs, not halves
            value = value.view(-1, 2, width // 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
        data, kind = value.numpy(), GGMLQuantizationType.F32
        if value.ndim > 1 and tensor.dtype == torch.bfloat16:
            kind = GGMLQuantizationType.BF16
            data = quants.quantize(data, kind)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{kind}"


class LlamaCpp:
    """A call gives greedy tokens [new] after a prompt, which is prefilled in every call; made by `serving`."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        assert pipe.recv() == "ready"

    def __call__(self) -> Tensor:
        self.pipe.send("go")
        return torch.tensor([int(token) for token in re.findall(r"<(\d+)>", self.pipe.recv())])


@contextmanager
def serving(file: Path, prompt: list[int], new: int, threads: int) -> Iterator[LlamaCpp]:
    """llama.cpp with the model of a file.

    Raises:
        ImportError: xllamacpp is not installed.
    """
    import xllamacpp  # noqa: F401  (only to check that it is installed)

    context = get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_serve, args=(other, str(file), prompt, new, threads), daemon=True)
    process.start()
    other.close()
    try:
        yield LlamaCpp(pipe)
    finally:
        pipe.close()  # which ends the process
        process.join(30)
        process.kill()


def _serve(pipe: Connection, file: str, prompt: list[int], new: int, threads: int) -> None:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = file
    settings.n_ctx, settings.n_parallel, settings.warmup = 1024, 1, True
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(settings)
    asked = {"prompt": prompt, "max_tokens": new, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
    pipe.send("ready")
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send(server.handle_completions(asked)["choices"][0]["text"])
