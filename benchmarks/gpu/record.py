"""What a run found, as JSON: saved after each item."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "CHECKED",
    "OUT_OF_TIME",
    "SECTIONS",
    "STOPPED",
    "Item",
    "LeftOut",
    "Record",
    "attempt",
]

SECTIONS = ("ceilings", "parity", "timings", "peers", "behaviour")
"""In the order in which they run."""

CHECKED = ("parity", "behaviour")
"""Sections whose items pass or fail."""

OUT_OF_TIME = "out of time"
STOPPED = "stopped: too many processes ended"
"""Reasons for leaving out what a later run may do."""

MAX_TRACE_LENGTH = 3000


class LeftOut(Exception):
    """An item that cannot be done here, and why."""


class Item(NamedTuple):
    """One thing to be found out; ``run`` returns what there is to say about it.

    ``seconds`` is about how long that takes: it is not begun with less time left.
    """

    name: str
    run: Callable[[], dict[str, Any]]
    seconds: float = 10.0


class Record:
    """A run's results in a file.

    Attributes
    ----------
    machine : dict
        What it ran on.
    sections : dict
        Items of each section by name. Each has ``seconds_taken`` and what it found; ``exception``
        or ``left_out`` say why there is nothing. Those of checked sections have ``passed``.
    running : str or None
        ``section: item`` that is running, so that one that ends its process has a name.
    """

    def __init__(self, path: Path, machine: dict[str, Any] | None = None) -> None:
        self.path = path
        self.machine = {} if machine is None else machine
        self.sections: dict[str, dict[str, dict[str, Any]]] = {}
        self.running: str | None = None

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read what :meth:`save` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        record = cls(path, content["machine"])
        record.sections, record.running = content["sections"], content["running"]
        return record

    def save(self) -> None:
        """Write the file in one step: it is whole at any moment."""
        content = {"machine": self.machine, "running": self.running, "sections": self.sections}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".new")
        # Numbers of array libraries become Python's: nothing that was found may be lost to JSON.
        text = json.dumps(content, indent=1, default=_as_python)
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, self.path)

    def resume(self) -> None:
        """Forget what an earlier run left for a later one."""
        for items in self.sections.values():
            for name, found in list(items.items()):
                if found.get("left_out") in (OUT_OF_TIME, STOPPED):
                    del items[name]

    def items(self, section: str) -> dict[str, dict[str, Any]]:
        """Items of a section that are done."""
        return self.sections.setdefault(section, {})

    def begin(self, section: str, name: str) -> None:
        """Say what comes next."""
        self.running = f"{section}: {name}"
        self.save()

    def store(self, section: str, name: str, found: dict[str, Any]) -> None:
        """Store what an item found."""
        self.items(section)[name] = found
        self.running = None
        self.save()

    def blame(self, reason: str) -> bool:
        """Blame the running item for the end of its process; False where none was running."""
        if self.running is None:
            return False
        section, _, name = self.running.partition(": ")
        self.store(section, name, {"exception": reason, "passed": False})
        return True

    def failures(self) -> list[str]:
        """Name the items of checked sections that did not pass."""
        return [
            f"{section}: {name}"
            for section in CHECKED
            for name, found in self.sections.get(section, {}).items()
            if "left_out" not in found and not found.get("passed")
        ]


def _as_python(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def attempt(item: Item) -> dict[str, Any]:
    """Run an item; whatever it raises becomes what it found."""
    try:
        return item.run()
    except LeftOut as reason:
        return {"left_out": str(reason)}
    except Exception:  # of CUDA, of compilers, of other people's libraries: none may end the run
        return {"exception": traceback.format_exc()[-MAX_TRACE_LENGTH:], "passed": False}
