"""How to install an extra: the one place that says so."""

from __future__ import annotations


def remedy(*extras: str) -> str:
    """Return the command that installs an extra, or one of several."""
    # No release yet: the name in the registry is nobody's, or somebody else's.
    commands = " or ".join(f"'.[{extra}]'" for extra in extras)
    return f"pip install {commands} in a clone of linattn"
