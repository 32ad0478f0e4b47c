"""How an op is attached to torch.library, and which implementation of it runs.

Every op has one definition (`fb::<op>`), a fake for tracing and a reference that runs on any device. Compiled
implementations replace the reference on the devices they are made for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload

LIBRARY = torch.library.Library("fb", "DEF")


def define(name: str, signature: str, *, reference: Callable, fake: Callable) -> OpOverload:
    """Define `fb::<name><signature>`, attach its reference and its fake, and return the overload to call."""
    LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, reference, device)
    torch.library.register_fake(f"fb::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fb, name).default


def differentiate(name: str, *, setup_context: Callable, backward: Callable) -> None:
    """Attach the gradient of `fb::<name>`."""
    torch.library.register_autograd(f"fb::{name}", backward, setup_context=setup_context, lib=LIBRARY)
