"""The `futurebridge` command, also as `python -m fb_core`: without the extra `run` it is one sentence."""

from __future__ import annotations

import sys

from fb_core._util import RUN, require


def main() -> None:
    """Entry point: the command line is imported once all that it needs is there."""
    try:
        require("futurebridge", *RUN)
    except ImportError as problem:
        print(problem, file=sys.stderr)
        raise SystemExit(2) from None
    from fb_core.apps.cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
