"""The ``linattn`` command (extra ``cli``): see docs/cli.md.

Only :func:`main` lives here, so that importing this package loads nothing that the extra installs.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

__all__ = ["main"]


def main() -> None:
    """Run the command on ``sys.argv`` and exit.

    Raises
    ------
    SystemExit
        Always: code 0; 130 after an interruption; 2 for anything wrong with what the user
        gave, a missing extra included.
    """
    missing = [name for name in ("typer", "rich", "matplotlib") if find_spec(name) is None]
    if missing:
        print(
            f"linattn: error: the command needs {', '.join(missing)}: pip install 'linattn[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2)

    from linattn.cli.app import app

    app(prog_name="linattn")
