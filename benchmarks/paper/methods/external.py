"""External checkpoints: methods that change or retrain the SLM itself, decoded as the SLM is.

Definition: the checkpoint decodes the run's prompts greedily, from their token ids, with the run's budget and verifier.
A method is evaluated by its checkpoint or, if its forward needs code of its own, by the model that its software loads:
anything that is called like a transformers causal LM.

Sources: TSD-KD, arXiv 2603.13260, kmswin1/TSD-KD (a plain checkpoint); TaH, arXiv 2511.08577, thu-nics/TaH (its looped
forward is code of its own); Multiplex Thinking, arXiv 2601.08808, GMLR-Penn/Multiplex-Thinking (its thinking steps feed
back merged embeddings, so that what is decoded here is its trained checkpoint with discrete tokens).
"""

from __future__ import annotations

from benchmarks.paper.methods import Context, Method
from benchmarks.paper.settings import EXTERNAL
from fb_core.apps.pipeline.models import Generate, greedy_decoder
from fb_core.models.checkpoints import load_model, load_tokenizer, tokenizer_hash
from fb_core.models.facts import CausalLM, Tokenizer


def load_external(path: str, tokenizer: Tokenizer, device: str = "auto", dtype: str = "auto") -> CausalLM:
    """A checkpoint that shares the run's token ids; safetensors only, without code of its own."""
    own = load_tokenizer(path)
    if tokenizer_hash(own) != tokenizer_hash(tokenizer):
        raise ValueError(
            f"{path}: expected the run's tokenizer of {len(tokenizer)} ids, got one of {len(own)} with other rules, "
            "special tokens or chat template; use a checkpoint made from the run's SLM, its tokenizer files unchanged"
        )
    return load_model(path, device, dtype)[0]


def decode(run: Context, seed: int | None) -> Generate:
    """Decoding by the checkpoint that the run's settings give this name."""
    settings = run.settings
    path = run.compare.external[run.method.removeprefix(EXTERNAL)]
    model = load_external(path, run.models.tokenizer, settings.models.device, settings.models.dtype)
    return greedy_decoder(model, **run.options).generate_many


METHOD = Method(name="external", label="{name}", decode=decode)
