"""How `branch_attention` is called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fb_kernels import BranchLayout
from fb_kernels.branch_attention import naive
from fb_kernels.calls import INDICES, Call, Calls, Part, randn


def layout(g: int, k: int, l: int, p: int) -> BranchLayout:  # noqa: E741
    """G groups of K branches of L rows, each group with its own prefix of P keys."""
    return BranchLayout.of([[l] * k] * g, [(group * p, p) for group in range(g)], device="cpu")


def branch_attention(
    g: int = 1,
    k: int = 13,
    l: int = 1,  # noqa: E741
    p: int = 2048,
    hq: int = 16,
    hkv: int = 8,
    e: int = 128,
    *,
    whole: bool = False,
) -> Call:
    """A call on G groups of K branches of L rows after P keys; if `whole` it returns lse too."""
    rows, pairs = g * k * l, g * k * l * p + g * k * l * (l + 1) // 2
    tail = (torch.arange(g)[:, None] * k * l + torch.arange((k - 1) * l, k * l)).flatten()  # each group's last branch
    tensors = {"q": randn(rows, hq, e)}
    tensors |= {name: randn(rows, hkv, e, seed=seed) for name, seed in (("k", 1), ("v", 2))}
    shared = (("prefix_k", 3), ("prefix_v", 4))
    tensors |= {name: randn(g * p, hkv, e, seed=seed, heavy=5) for name, seed in shared}

    def take_rows(call: Call) -> Call:
        return call.with_(**{name: call.arguments[name][tail] for name in ("q", "k", "v")}, layout=layout(g, 1, l, p))

    def of(results: Sequence[Tensor]) -> list[Tensor]:
        return [results[0][tail], *(lse[:, tail] for lse in results[1:])]

    def sdpa(q: Tensor, prefix_k: Tensor, prefix_v: Tensor, **rest: Tensor) -> Tensor:
        """SDPA over copies of the prefix, which every call makes."""
        own = [x.unflatten(0, (g * k, l)).transpose(1, 2) for x in (q, rest["k"], rest["v"])]
        copies = (x.unflatten(0, (g, p)).transpose(1, 2).repeat_interleave(k, 0) for x in (prefix_k, prefix_v))
        keys, values = (torch.cat(parts, 2) for parts in zip(copies, own[1:], strict=True))
        mask = torch.ones(l, p + l, dtype=torch.bool, device=q.device).tril(p) if l > 1 else None
        out = F.scaled_dot_product_attention(own[0], keys, values, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return Call(
        "branch_attention",
        tensors | {"layout": layout(g, k, l, p), "return_lse": whole},
        gradients=tuple(tensors),
        outputs=(0, 1)[: 1 + whole],
        shape=f"G={g} K={k} L={l} P={p} E={e}",
        scales=(None, 8.0)[: 1 + whole],
        flops=4.0 * hq * e * pairs,
        bytes=4.0 * ((g * p + rows) * hkv + rows * hq) * e,
        part=Part(take_rows, of),
        plain={"SDPA over copies of the prefix": sdpa},
    )


def definition(call: Call) -> list[Tensor]:
    """[out], or [out, lse] where the call returns both."""
    arguments = dict(call.arguments)
    layout, with_lse = arguments.pop("layout"), arguments.pop("return_lse", False)
    state = naive.branch_attention(**arguments, **{name: getattr(layout, name) for name in INDICES})
    return list(state[: 1 + with_lse])


def _checked(size: str) -> Iterator[Call]:
    lengths, (groups, candidates, *rest) = {
        "small": ((1, 3), (2, 3, 20, 4, 2, 16)),
        "checked": ((1, 8), (2, 4, 300, 8, 4, 128)),
        "timed": ((1, 128), (4, 13, 2048, 16, 8, 128)),
    }[size]
    yield from (branch_attention(groups, candidates, length, *rest, whole=True) for length in lengths)


OPS = (
    Calls(
        "branch_attention",
        branch_attention,
        definition,
        checked=_checked,
        takes="q[T, Hq, E], (k[T, Hkv, E]), (v), prefix_k[Tp, Hkv, E] or pages [pages, page, Hkv, E], prefix_v, layout",
        gives="out[T, Hq, E], on request lse[Hq, T] fp32",
        cpu="fp32, bf16",
        cuda="bf16, fp16",
    ),
)
