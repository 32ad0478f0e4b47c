"""How a serving engine with a page table calls `branch_attention`: candidates of several requests in one launch.

The engine keeps keys and values in the pages of one pool, and a table of page numbers for every request, as vLLM and
SGLang do. A request need not fill its last page, and nothing is copied or gathered. Each request has some candidate
branches; in one call all of them attend to their request's pages and to themselves. As a check, the prefixes are laid
out contiguously and the op is called again. Run it with `python examples/serving_engine.py`, on a CPU or a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from fb_kernels import BranchLayout, branch_attention

HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 2, 32, 16


@dataclass
class PagedCache:
    """A pool of pages for one layer, handed out to requests as they grow."""

    keys: Tensor  # [pages, page, Hkv, E]
    values: Tensor
    free: list[int]
    pages: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    @classmethod
    def make(cls, pages: int, device: str) -> PagedCache:
        pool = [torch.full((pages, PAGE, KV_HEADS, HEAD_DIM), torch.nan, device=device) for _ in range(2)]
        return cls(pool[0], pool[1], torch.randperm(pages).tolist())

    def append(self, request: str, k: Tensor, v: Tensor) -> None:
        """Write k, v [n, Hkv, E] after the request's present tokens."""
        own, start = self.pages.setdefault(request, []), self.lengths.get(request, 0)
        stop = start + len(k)
        while len(own) * PAGE < stop:
            own.append(self.free.pop())
        slots = torch.tensor([own[i // PAGE] * PAGE + i % PAGE for i in range(start, stop)], device=k.device)
        self.keys.flatten(0, 1)[slots], self.values.flatten(0, 1)[slots] = k, v
        self.lengths[request] = stop


@torch.no_grad()
def main() -> None:
    """Fill the cache, call once, and compare."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cache = PagedCache.make(64, device)
    prefixes = {"first": 100, "second": 37, "third": 256}
    requests = list(prefixes)
    kept = {}
    for request, length in prefixes.items():
        kept[request] = [torch.randn(length, KV_HEADS, HEAD_DIM, device=device) for _ in range(2)]
        for start in range(0, length, 29):  # a prefill in chunks that do not match the page size
            cache.append(request, *(x[start : start + 29] for x in kept[request]))

    candidates = [13, 4, 8]  # per request; branches of one token, as in a rerank event
    rows = sum(candidates)
    q = torch.randn(rows, HEADS, HEAD_DIM, device=device)
    k, v = (torch.randn(rows, KV_HEADS, HEAD_DIM, device=device) for _ in range(2))
    branches = [[1] * count for count in candidates]
    held = [cache.lengths[request] for request in requests]
    table = [cache.pages[request] for request in requests]
    layout = BranchLayout.of(branches, [(0, length) for length in held], block_table=table, device=device)
    out, lse = branch_attention(q, k, v, cache.keys, cache.values, layout, return_lse=True)
    whole = [torch.cat([kept[request][i] for request in requests]) for i in range(2)]
    layout = BranchLayout.of(branches, list(zip(accumulate(held, initial=0), held, strict=False)), device=device)
    want, want_lse = branch_attention(q, k, v, *whole, layout, return_lse=True)
    worst = max(float((out - want).abs().max()), float((lse - want_lse).abs().max()))
    used = sum(map(len, cache.pages.values()))
    print(f"{len(requests)} requests in {used} pages of {PAGE}, {rows} candidates, one call")
    print(f"largest difference from contiguous prefixes: {worst:.1e}")
    if not worst <= 1e-5:
        raise SystemExit("the paged call does not agree with its contiguous twin")


if __name__ == "__main__":
    main()
