"""How a tensor may lie in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fb_kernels.testing import poison_

PAD = 5


def laid(x: Tensor, *, step: int = 1, pad: int = 0, reverse: bool = False, around: int = PAD) -> Tensor:
    """The values of x with a step in each dimension and `pad` places after each row; other memory is poison."""
    order = list(range(x.ndim))[:: -1 if reverse else 1]
    sizes = [step * x.shape[dimension] + pad for dimension in order]
    flat = poison_(x.new_empty(torch.Size(sizes).numel() + 2 * around))
    view = flat[around : len(flat) - around].view(sizes)
    for place, dimension in enumerate(order):
        view = view.narrow(place, 0, step * x.shape[dimension])
    view = view[tuple(slice(None, None, step) for _ in order)].permute([order.index(d) for d in range(x.ndim)])
    with torch.no_grad():
        return view.copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "offset": laid,
    "steps of 2": lambda x: laid(x, step=2),
    "rows apart": lambda x: laid(x, pad=3),
    "packed": lambda x: laid(x, around=16),
    "aligned": lambda x: laid(x, pad=16, around=16),  # in rows of 16 bytes, so are all their ends
    "transposed": lambda x: laid(x, reverse=True),
    "transposed, steps of 3": lambda x: laid(x, step=3, reverse=True),
    "expanded": lambda x: laid(x[:1]).expand_as(x) if x.ndim else x,
    "expanded columns": lambda x: laid(x[..., :1]).expand_as(x) if x.ndim else x,
}
WHOLE = tuple(name for name in LAYOUTS if not name.startswith("expanded"))  # that hold all values
ROUGH = "transposed, steps of 3"


def outside(view: Tensor) -> Tensor:
    """The elements of the view's memory that are not its own."""
    flat = view.new_empty(0).set_(view.untyped_storage())
    own = torch.zeros(flat.shape, dtype=torch.bool, device=view.device)
    own.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return flat[~own].clone()
