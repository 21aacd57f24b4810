"""Interrupt a call before one of its lines or instructions."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection
from typing import Any


def is_interrupted_at(
    step: int,
    call: Callable[[], Any],
    files: tuple[str, ...],
    *,
    events: Collection[str] = ("line",),
    skipped: Collection[tuple[str, int]] = (),
    kept: list[KeyboardInterrupt] | None = None,
) -> bool:
    """Interrupt a call at an event of that number in code of these files; say whether it was.

    ``skipped``: files and lines that do not count. ``kept``: where the error goes, as into
    ``sys.last_value`` of a session.
    """
    seen = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal seen
        name = frame.f_code.co_filename
        if not name.startswith(files):
            return None
        frame.f_trace_opcodes = "opcode" in events
        if event in events and (name, frame.f_lineno) not in skipped:
            seen += 1
            if seen == step:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before, was_interrupted = sys.gettrace(), False
    # An interrupt that falls while garbage is collected is lost in Python itself.
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt as error:
        # Not kept here: it holds all frames, and what these would do at their end.
        was_interrupted = True
        if kept is not None:
            kept.append(error)
    finally:
        sys.settrace(before)
        gc.enable()
    return was_interrupted
