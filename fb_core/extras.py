"""What the extra `run` brings, and the sentence that says that it is missing."""

from __future__ import annotations

from importlib.util import find_spec

RUN = ("accelerate", "jinja2", "math_verify", "matplotlib", "pyarrow", "pydantic", "rich", "typer", "yaml")


def require(what: str, *packages: str) -> None:
    """Refuse what needs packages of `run` that are not installed; nothing is imported.

    Args:
        what: the name of what needs them.
        packages: some of `RUN`.

    Raises:
        ImportError: some are not installed.
    """
    if absent := [package for package in packages if find_spec(package) is None]:
        raise ImportError(
            f"{what}: expected the extra [run] to be installed, got no {', '.join(absent)}; "
            "pip install 'futurebridge[run]'"
        )
