"""Checks that the packages of an extra are installed."""

from __future__ import annotations

from importlib.util import find_spec

RUN = ("accelerate", "jinja2", "math_verify", "matplotlib", "pyarrow", "rich", "typer", "yaml")


def require(what: str, *packages: str, extra: str = "run") -> None:
    """ImportError, which names `what` needs them, if packages of an extra are not installed; nothing is imported."""
    if absent := [package for package in packages if find_spec(package) is None]:
        raise ImportError(
            f"{what}: expected the extra [{extra}] to be installed, got no {', '.join(absent)}; "
            f"pip install '.[{extra}]' in the clone"
        )
