"""The ``linattn`` command (extra ``cli``): see docs/cli.md.

Only :func:`main` lives here, so that importing this package loads nothing that the extra installs.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

__all__ = ["main"]


def main() -> None:
    """Run the command on ``sys.argv`` and exit.

    ``--version`` and ``info``, which bug reports need, run without the extra.

    Raises
    ------
    SystemExit
        Always: code 0; 130 after an interruption; 2 for anything wrong with what the user
        gave, a missing extra included.
    """
    missing = [name for name in ("typer", "rich", "matplotlib") if find_spec(name) is None]
    if missing:
        raise SystemExit(_without_extra(sys.argv[1:], missing))

    from linattn.cli.app import app

    app()


def _without_extra(arguments: list[str], missing: list[str]) -> int:
    from linattn._extras import remedy
    from linattn.cli import info
    from linattn.cli.text import say

    match arguments:
        case ["--version"]:
            print(info.version())
        case ["info"]:
            print(info.text())
        case _:
            needed = f"the command needs {', '.join(missing)}: {remedy('cli')}"
            say(f"linattn: error: {needed}; without, there are --version and info", error=True)
            return 2
    return 0
