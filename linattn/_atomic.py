"""Files that are replaced as a whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import TypeAlias

__all__ = ["check_target", "write_bytes"]

Path: TypeAlias = str | os.PathLike[str]


def check_target(path: Path) -> os.stat_result | None:
    """Return what stands there, a regular file, or None for nothing.

    Raises
    ------
    FileExistsError
        It is a folder, a symbolic link or a device: replacing it is not what its owner expects,
        and following a link writes where somebody else said.
    OSError
        Its status cannot be read.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
        raise FileExistsError(errno.EEXIST, f"it is {kind}; name a regular file", os.fspath(path))
    return found


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, or replace a regular one in one step, keeping its permissions.

    Whatever happens, the old content or the new one is there, never half of it. The name used on
    the way cannot be guessed and must be new, so that nothing planted there is followed.

    Raises
    ------
    OSError
        The target is no regular file, or cannot be written.
    """
    old = check_target(path)
    folder, base = os.path.split(os.fspath(path))
    # Not by tempfile, whose files nobody else may read: what is saved is for other processes.
    name = os.path.join(folder, f".{base}-{os.urandom(8).hex()}")
    # Closed to others until it has the permissions of the file that it replaces.
    mode = 0o666 if old is None else 0o600
    try:
        with open(name, "xb", opener=lambda file, flags: os.open(file, flags, mode)) as file:
            if old is not None:
                os.chmod(name, old.st_mode & 0o777)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
