"""The compiled kernel of `commit_`, `csrc/commit.cu`."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from fb_kernels._runtime import cuda
from fb_kernels.commit.arguments import Commit

TAKES = "all calls"


def commit_(call: Commit) -> None:
    """End a decode step in place."""
    (tokens, length, halt, budget), token, entropy, threshold, eos_ids, max_length, outcome = call
    flat = (length, halt, budget, token, entropy, eos_ids)
    conditions = [tokens.stride(-1) == 1, token.dtype == torch.int64, entropy.dtype == torch.float32]
    conditions += [threshold.dtype == torch.float64, eos_ids.dtype == torch.int64, max_length.dtype == torch.int32]
    conditions += [outcome is None or (outcome.stride(1) == 1 and outcome.dtype == torch.float32)]
    if not (all(conditions) and all(x.is_contiguous() for x in flat)):
        return NotImplemented
    rows, slots = tokens.shape
    steps = [x.stride(0) if x is not None and x.ndim else 0 for x in (threshold, max_length, outcome)]
    cuda.launch(
        "commit", tokens, tokens=tokens, tokens_stride=tokens.stride(0), slots=slots, length=length, halt=halt,
        budget=budget, token=token, entropy=entropy, threshold=threshold, threshold_stride=steps[0], eos_ids=eos_ids,
        eos_count=len(eos_ids), max_length=max_length, max_length_stride=steps[1], outcome=outcome,
        outcome_stride=steps[2], rows=rows,
    )  # fmt: skip
    increment_version((tokens, length, halt))  # as torch's own writes do: a layout may follow from a length
    return None
