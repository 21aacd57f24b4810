"""What goes wrong because of what the user gave."""

from __future__ import annotations

__all__ = ["CommandError"]


class CommandError(Exception):
    """Ends the command with one line on stderr and exit code 2."""
