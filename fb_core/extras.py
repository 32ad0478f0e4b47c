"""What extras bring, and the sentence that says that one is missing."""

from __future__ import annotations

from importlib.util import find_spec

RUN = ("accelerate", "jinja2", "math_verify", "matplotlib", "pyarrow", "rich", "typer", "yaml")


def require(what: str, *packages: str, extra: str = "run") -> None:
    """Refuse what needs packages that are not installed; nothing is imported.

    Args:
        what: the name of what needs them.
        packages: some that the extra brings.
        extra: its name.

    Raises:
        ImportError: some are not installed.
    """
    if absent := [package for package in packages if find_spec(package) is None]:
        raise ImportError(
            f"{what}: expected the extra [{extra}] to be installed, got no {', '.join(absent)}; "
            f"pip install 'futurebridge[{extra}]'"
        )
