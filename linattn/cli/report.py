"""The files that a run writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from linattn import _files
from linattn.cli.errors import CommandError

__all__ = ["FILES", "FRONTIER", "as_json", "check_file", "prepare_folder", "write"]

FILES = ("compare.json", "error.png", "time.png")
"""What a run leaves in its folder."""

FRONTIER = "frontier.png"
"""Files that it also writes where published attentions were measured."""


def as_json(record: Any) -> bytes:
    """Return a record as JSON; infinite and NaN numbers, which JSON does not have, as null.

    What else it does not have, such as paths, is text.
    """
    return (json.dumps(_finite(record), indent=2, allow_nan=False, default=str) + "\n").encode()


def prepare_folder(folder: Path, names: Iterable[str]) -> None:
    """Make the folder if need be, and find out now whether these files can be written into it.

    Raises
    ------
    CommandError
        They cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(
            f"--out {folder}: cannot be written to: {error.strerror or error}"
        ) from None
    for name in names:
        with _named_error(folder / name):
            _files.check_target(folder / name)


def check_file(option: str, path: Path) -> None:
    """Find out now whether a file can be written.

    Raises
    ------
    CommandError
        It cannot.
    """
    try:
        _files.check_target(path)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise CommandError(
            f"{option} {path}: cannot be written: {error.strerror or error}"
        ) from None


def write(path: Path, content: bytes) -> None:
    """Write a file as a whole or not at all: nobody ever finds half of it.

    Raises
    ------
    CommandError
        It cannot be written.
    """
    with _named_error(path):
        _files.write_bytes(path, content)


@contextmanager
def _named_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path}: cannot be written: {error.strerror or error}") from None


def _finite(record: Any) -> Any:
    if isinstance(record, dict):
        return {name: _finite(entry) for name, entry in record.items()}
    if isinstance(record, list | tuple):
        return [_finite(entry) for entry in record]
    if isinstance(record, float) and not math.isfinite(record):
        return None
    return record
