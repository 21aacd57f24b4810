"""The files that a run leaves behind."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from linattn.cli.errors import CommandError

__all__ = ["as_json", "prepare_folder", "write"]


def as_json(record: Any) -> bytes:
    """Return a record as JSON; infinite and NaN numbers, which JSON does not have, as null."""
    return (json.dumps(_finite(record), indent=2, allow_nan=False) + "\n").encode()


def prepare_folder(folder: Path) -> None:
    """Make the folder if need be, and find out now whether files can be written into it.

    Raises
    ------
    CommandError
        They cannot.
    """
    probe = _unfinished(folder / "probe")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        message = f"--out {folder}: cannot be written to: {error.strerror or error}"
        raise CommandError(message) from None


def write(path: Path, content: bytes) -> None:
    """Write a file as a whole or not at all: nobody ever finds half of it.

    Raises
    ------
    CommandError
        It cannot be written.
    """
    unfinished = _unfinished(path)
    try:
        try:
            unfinished.write_bytes(content)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        message = f"{path}: cannot be written: {error.strerror or error}"
        raise CommandError(message) from None


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _finite(record: Any) -> Any:
    if isinstance(record, dict):
        return {name: _finite(entry) for name, entry in record.items()}
    if isinstance(record, list | tuple):
        return [_finite(entry) for entry in record]
    if isinstance(record, float) and not math.isfinite(record):
        return None
    return record
