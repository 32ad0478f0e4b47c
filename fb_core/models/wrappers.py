"""Models in wrappers: DistributedDataParallel, FSDP2, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

Result = TypeVar("Result")


def through(model: Any, ask: Callable[[], Result]) -> Result:
    """`ask()` as the forward of the model: FSDP2 gathers weights for it, DistributedDataParallel sees its gradients.

    Code that torch.compile has made of the model's own forward is not used.
    """
    while hasattr(model, "_orig_mod"):
        model = model._orig_mod
    module: Any = model
    if isinstance(model, DistributedDataParallel) and torch.is_grad_enabled():
        module = model.module
    elif not sharded(model):
        return ask()
    before = vars(module).get("forward")
    module.forward = lambda: tree_map_only(Tensor, torch.clone, ask())  # hooks on views would be lost in place
    try:
        return model()
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards the parameters of the module itself."""
    return any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__)


def unwrapped(model: Any) -> Any:
    """The model in the wrappers of torch.compile and DistributedDataParallel."""
    while hasattr(model, "_orig_mod") or isinstance(model, DistributedDataParallel):
        model = getattr(model, "_orig_mod", None) or model.module
    return model
