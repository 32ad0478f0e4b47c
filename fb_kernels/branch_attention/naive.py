"""What `branch_attention` means, a row at a time."""

import torch
from torch import Tensor


def branch_attention(
    q: Tensor,  # [T, Hq, E]
    k: Tensor | None,  # [T, Hkv, E]
    v: Tensor | None,
    prefix_k: Tensor,  # [Tp, Hkv, E], or pages [pages, page, Hkv, E]
    prefix_v: Tensor,
    *,
    cu_branch: Tensor,  # [B + 1]
    cu_group: Tensor,  # [G + 1]
    prefix_start: Tensor,  # [G]
    prefix_len: Tensor,  # [G]
    block_table: Tensor | None = None,  # [G, n]
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v over the group's slice of P keys, then the branch's own rows: (out[T, Hq, E], lse[Hq, T]).

    Slice key j is at position j, row i of a branch at P + i; a row sees the last `window` positions up to its own.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    repeat = q.shape[1] // prefix_k.shape[-2]  # query heads per key head
    out, lse = q.clone(), q.new_empty(q.shape[1], q.shape[0])  # every row is written below
    for g in range(len(prefix_len)):
        length = int(prefix_len[g])
        j = prefix_start[g] + torch.arange(length, device=q.device)
        slice_k, slice_v = (
            x[j] if block_table is None else x[block_table[g, j // x.shape[1]].long(), j % x.shape[1]]
            for x in (prefix_k, prefix_v)
        )  # [P, Hkv, E]
        for b in range(int(cu_group[g]), int(cu_group[g + 1])):
            first = int(cu_branch[b])
            for row in range(first, int(cu_branch[b + 1])):
                keys, values = slice_k, slice_v
                if k is not None and v is not None:
                    keys, values = torch.cat([slice_k, k[first : row + 1]]), torch.cat([slice_v, v[first : row + 1]])
                unseen = 0 if window is None else max(0, length + row - first + 1 - window)
                keys, values = (x[unseen:].repeat_interleave(repeat, 1) for x in (keys, values))  # [n, Hq, E]
                scores = torch.einsum("he,nhe->hn", q[row], keys) * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                empty = (scores == -torch.inf).all(-1)  # no key is seen
                scores = scores.masked_fill(empty[:, None], 0.0)
                total = scores.logsumexp(-1).masked_fill(empty, -torch.inf)
                p = scores.softmax(-1).masked_fill(empty[:, None], 0.0)
                out[row] = torch.einsum("hn,nhe->he", p, values)
                lse[:, row] = total.masked_fill(total == torch.inf, torch.nan)
    return out, lse
