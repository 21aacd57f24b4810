"""Where the checkout is, and how its processes find it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["ROOT", "child_environment"]

ROOT = Path(__file__).resolve().parents[2]


def child_environment() -> dict[str, str]:
    """Return this process's environment, for a child that runs from the checkout."""
    known = [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, known))}
