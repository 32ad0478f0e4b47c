"""`python -m benchmarks.pretrained MODEL`: decoding and scoring by a pretrained model on a CPU, float32 and bfloat16.

MODEL is a folder of a Llama, such as `examples/pretrained_model.py` writes. Its weights also go to a GGUF file each,
for llama.cpp (`pip install xllamacpp`), which runs in this process on as many threads. All take turns after their
greedy tokens were compared, up to the first near tie. The floor is the time to read the weights once, as fast as a sum.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks import harness
from benchmarks.bench_decode import decoder, settled
from benchmarks.harness import OURS, Result
from fb_core import CompatibilityScorer

PROMPT, NEW = 64, 128
PREFIX, CANDIDATES, FUTURE = 256, 13, 32
DTYPES = (torch.float32, torch.bfloat16)
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


def write_gguf(model: PreTrainedModel, tokenizer: Path, path: Path) -> None:
    """The weights as they are, matrices in their dtype and norms in float32, with the tokens of a tokenizer.json."""
    config, words = model.config, json.loads(tokenizer.read_text(encoding="utf-8"))["model"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(words["vocab"], key=words["vocab"].get))
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in words["merges"]])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.float()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp turns neighbours, not halves
            width = config.hidden_size // config.num_attention_heads
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
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = name.rpartition(".")
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{kind}"


def llama_cpp(file: Path, prompt: list[int]) -> Callable[[], str]:
    """The greedy text behind the prompt, which is read anew in every call."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.warmup = 1024, 1, True
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
    server = xllamacpp.Server(settings)
    asked = {"prompt": prompt, "max_tokens": NEW, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
    return lambda: server.handle_completions(asked)["choices"][0]["text"]


def rounds_of(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, taking turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - began)
    return found


def read_rate() -> float:
    """Bytes a second of a sum over memory that no cache holds."""
    values = torch.ones(1 << 28)
    seconds = min(rounds_of({"sum": values.sum}, 5)["sum"])
    return values.nbytes / seconds


def decoding(models: dict[str, PreTrainedModel], folder: Path, rounds: int, rate: float) -> list[Result]:
    """Greedy tokens of all, prompt included, as the time of one."""
    generator = torch.Generator()
    runs: dict[str, Callable[[], Any]] = {}
    rows: list[Result] = []
    words = AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as scratch:
        for name, model in models.items():
            ids = torch.randint(model.config.vocab_size, (PROMPT,), generator=generator.manual_seed(0))
            fast, mask = decoder(model), torch.ones_like(ids[None])
            options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
            file = Path(scratch) / f"{name}.gguf"
            write_gguf(model, folder / "tokenizer.json", file)
            runs[f"{OURS} {name}"] = lambda fast=fast, ids=ids: fast.generate(ids, NEW).token_ids
            runs[f"HF generate {name}"] = lambda model=model, ids=ids, mask=mask, options=options: model.generate(
                ids[None], attention_mask=mask, **options
            )[0, PROMPT:]
            runs[f"llama.cpp {name}"] = llama_cpp(file, ids.tolist())
        for name, model in models.items():
            wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
            found = {impl: run() for impl, run in runs.items() if impl.endswith(name)}
            ours = found[f"{OURS} {name}"]
            sure = settled(model, wide, ids, ours)
            for impl, tokens in found.items():
                text = tokens if isinstance(tokens, str) else words.decode(tokens)
                equal = text.startswith(words.decode(ours[:sure]))
                error = 0.0 if equal else float("inf")
                details = {"tokens compared": sure, "weights' bytes": _bytes(model), "read rate": rate}
                rows.append(_row("pretrained_decode", f"{PROMPT} + {NEW} tokens, time of one", impl, error, details))
        seconds = rounds_of({row.impl: runs[row.impl] for row in rows if row.ok}, rounds)
    return [_timed(row, [each / NEW for each in seconds.get(row.impl, [])]) for row in rows]


def scoring(models: dict[str, PreTrainedModel], rounds: int) -> list[Result]:
    """A group of candidates with one shared future, against a forward each."""
    generator = torch.Generator()
    runs: dict[str, Callable[[], Tensor]] = {}
    rows = []
    for name, model in models.items():
        ids = torch.randperm(model.config.vocab_size, generator=generator.manual_seed(1))
        prefix, candidates, future = ids[: PREFIX + CANDIDATES + FUTURE].split((PREFIX, CANDIDATES, FUTURE))
        scorer = CompatibilityScorer(model)
        runs[f"{OURS} {name}"] = lambda s=scorer, p=prefix, c=candidates, f=future: s.score(p, c, f)

        @torch.no_grad()
        def full(model=model, prefix=prefix, candidates=candidates, future=future) -> Tensor:
            found = []
            for candidate in candidates:
                ids = torch.cat([prefix, candidate[None], future])[None]
                logits = model(ids, logits_to_keep=FUTURE + 1).logits[0, :-1].float()
                found.append(logits.log_softmax(-1).gather(1, future[:, None])[:, 0])
            return torch.stack(found)

        runs[f"K full forwards {name}"] = full
        ours, theirs = runs[f"{OURS} {name}"](), full()
        error = float((ours.float() - theirs).abs().max())
        shape = f"P={PREFIX} K={CANDIDATES} H={FUTURE}"
        tolerance = 1e-3 if name == "float32" else 0.5  # some ulps of a logit's 8 bits
        for impl in (f"{OURS} {name}", f"K full forwards {name}"):
            row = _row("pretrained_score", shape, impl, error, {})
            rows.append(replace(row, ok=error <= tolerance))
    seconds = rounds_of({row.impl: runs[row.impl] for row in rows if row.ok}, rounds)
    return [_timed(row, seconds.get(row.impl, [])) for row in rows]


def _bytes(model: PreTrainedModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _row(op: str, shape: str, impl: str, error: float, details: dict[str, float]) -> Result:
    return Result(op, shape, impl, impl.rpartition(" ")[2], None, None, None, error, error == 0.0, details=details)


def _timed(row: Result, seconds: list[float]) -> Result:
    median, low, high = harness.quantiles_us(seconds)
    return replace(row, median_us=median, p10_us=low, p90_us=high)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="decoding and scoring by a pretrained model on a CPU")
    parser.add_argument("model", type=Path, help="a directory with a Llama")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write-results", type=Path, help="directory of results")
    options = parser.parse_args()
    torch.set_num_threads(harness.cores())
    models = {
        str(dtype).removeprefix("torch."): AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        for dtype in DTYPES
    }
    rate = read_rate()
    rows = decoding(models, options.model, options.rounds, rate) + scoring(models, options.rounds)
    print(f"a sum reads {rate / 1e9:.1f} GB/s")
    for row in rows:
        read = row.details.get("weights' bytes")
        share = f", {read / row.median_us * 1e6 / rate:.0%} of the read rate" if read and row.median_us else ""
        spent = "wrong" if row.median_us is None else f"{row.median_us / 1e3:,.2f} ms{share}"
        print(f"{row.op} {row.shape} {row.impl}: {spent}, error {row.max_error:.1e}")
    if options.write_results:
        harness.write_results(options.write_results, {"pretrained": rows})


if __name__ == "__main__":
    main()
