"""What goes wrong because of what the user gave."""

from __future__ import annotations

__all__ = ["CommandError", "RunError", "UserCodeError"]


class CommandError(Exception):
    """Ends the command with one line on stderr and exit code 2."""


class RunError(Exception):
    """What had begun broke off: ends the command with one line on stderr and exit code 1."""


class UserCodeError(BaseException):
    """Code of the user's raised: ends the command with one line on stderr and exit code 4.

    No Exception, because what checks a map reports those as failures of the map.
    """
