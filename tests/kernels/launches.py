"""Which kernels a launcher launches."""

from __future__ import annotations

from types import ModuleType

import pytest


def count_kernels(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[str]:
    """The list to which every launch of the module's kernels adds its name."""
    names: list[str] = []

    class Counted:
        def __init__(self, kernel: object) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple) -> object:
            names.append(self.kernel.fn.__name__)
            return self.kernel[grid]

    for name in [name for name in vars(module) if name.endswith("_kernel")]:
        monkeypatch.setattr(module, name, Counted(getattr(module, name)))
    return names
