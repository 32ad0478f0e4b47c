"""Calls of six ops for Nsight Compute, which reads the GPU's counters in them: a part of `benchmarks.visit`.

A kernel that reaches neither the memory's nor the multiprocessors' limit waits for something; that is the next thing to
improve.
"""

from __future__ import annotations

import torch

from fb_kernels import calls

SIX = ("linear_logprob", "branch_attention", "skinny_linear", "branch_attention_qkv", "topk_entropy", "qk_norm_rope")


def main(device: str = "cuda", size: str = "timed") -> None:
    """Call each at every size: once to compile, once to be profiled."""
    for op in SIX:
        for _, call in calls.checked(op, size):
            ready = call.cast(torch.bfloat16).on(device)
            ready.run()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            ready.run()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
