"""Log-probs with the LM head sharded along the vocabulary over several processes.

Every process holds some rows of the head and computes its share with `linear_logprob_partials`: three numbers per row
(maximum, sum of exponentials, target's logit). These are gathered, and `combine_logprob_partials` turns them into
log-probs: each process sends 12 bytes per row instead of logits. As a check, `linear_logprob` runs with the whole head.
Run it with `torchrun --nproc-per-node 2 examples/vocab_parallel.py`; it uses gloo on CPUs and NCCL on GPUs. Without
torchrun a single process has the whole head.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from fb_kernels import combine_logprob_partials, linear_logprob, linear_logprob_partials

ROWS, HIDDEN, VOCABULARY = 32, 64, 1001  # odd, so that two shards are uneven


def parallel_logprob(hidden: Tensor, shard: Tensor, target: Tensor, vocab_start: int) -> tuple[Tensor, Tensor]:
    """(log-prob[N], lse[N]), the same in every process; `shard` is its own rows of the head."""
    mine = torch.stack(linear_logprob_partials(hidden, shard, target, vocab_start=vocab_start))  # [3, N]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return combine_logprob_partials(*torch.stack(everyone, 1))  # [3, S, N]


@torch.no_grad()
def main() -> None:
    """Score in parallel and whole, and compare."""
    on_gpu = torch.cuda.is_available()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpu else "gloo", **alone)
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu")
    rank, shards = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)  # the same everywhere: the check needs the whole head
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(device)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(device)
    target = torch.randint(VOCABULARY, (ROWS,), generator=generator).to(device)
    start, stop = (VOCABULARY * i // shards for i in (rank, rank + 1))
    logprob, lse = parallel_logprob(hidden, weight[start:stop], target, start)
    whole, whole_lse = linear_logprob(hidden, weight, target, return_lse=True)
    worst = max(float((logprob - whole).abs().max()), float((lse - whole_lse).abs().max()))
    print(f"process {rank} of {shards}: ids {start} to {stop}, largest difference from the whole head {worst:.1e}")
    dist.destroy_process_group()
    if worst > 1e-4:
        raise SystemExit("the shards do not agree with the whole head")


if __name__ == "__main__":
    main()
