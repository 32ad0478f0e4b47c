"""How an op is attached to torch.library, and which implementation of it runs.

Every op has one definition (`fb::<op>`), a fake for tracing and a reference that runs on any device. Compiled
implementations replace the reference on the devices they are made for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._ops import OpOverload

LIBRARY = torch.library.Library("fb", "DEF")


def define(name: str, signature: str, *, reference: Callable, fake: Callable) -> OpOverload:
    """Define `fb::<name><signature>`, attach its reference and its fake, and return the overload to call."""
    LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("cpu", "cuda"):
        LIBRARY.impl(name, _without_autocast(reference, device), device.upper())
    torch.library.register_fake(f"fb::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fb, name).default


def _without_autocast(reference: Callable, device: str) -> Callable:
    """The reference with its own precision: autocast would silently lower the products inside."""

    @wraps(reference)
    def run(*arguments: Any) -> Any:
        if not torch.is_autocast_enabled(device):
            return reference(*arguments)
        with torch.autocast(device, enabled=False):
            return reference(*arguments)

    return run


def differentiate(name: str, *, setup_context: Callable, backward: Callable) -> None:
    """Attach the gradient of `fb::<name>`; where it is an op, `fb::<name>_backward`, that one has none."""
    torch.library.register_autograd(f"fb::{name}", backward, setup_context=setup_context, lib=LIBRARY)
    if hasattr(torch.ops.fb, f"{name}_backward"):

        def refuse(*_: Any) -> None:
            raise NotImplementedError(f"{name}: only first derivatives exist; call it without create_graph=True")

        torch.library.register_autograd(f"fb::{name}_backward", refuse, lib=LIBRARY)
