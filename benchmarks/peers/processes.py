"""Child processes, one a peer and number of threads, and how they are told what to do."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["REMOVED", "Child", "PeerError", "child_environment"]

ROOT = Path(__file__).parents[2]

REMOVED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Taken from the environment of children: they would force kernels that the CPU does not want."""

PATIENCE = 900.0
"""Seconds after which a child that does not answer is given up."""


class PeerError(Exception):
    """A peer could not do what it was told; the message says why."""


def child_environment(threads: int) -> dict[str, str]:
    """Return the environment of a child with so many threads; it runs this tree's linattn."""
    kept = {name: value for name, value in os.environ.items() if name not in REMOVED}
    paths = [str(ROOT), str(ROOT / "backends"), *filter(None, [kept.get("PYTHONPATH")])]
    threading = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)
    )
    return kept | threading | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}


class Child:
    """The process of one peer, started at its first command.

    Parameters
    ----------
    name : str
        The peer.
    threads : int
        Threads that it may use.
    cores : sequence of int
        Where it may run; the first ``threads`` of them are used.

    Raises
    ------
    PeerError
        Raised by :meth:`ask` when the peer fails, dies, or is silent for too long.
    """

    def __init__(self, name: str, threads: int, cores: Sequence[int]) -> None:
        self.name = name
        self.threads = threads
        self._cores = ",".join(str(core) for core in cores[:threads])
        self._process: subprocess.Popen[str] | None = None
        self._printed = tempfile.TemporaryFile(  # noqa: SIM115 (closed with the child)
            "w+", encoding="utf-8", errors="replace"
        )

    def ask(self, command: str, *arguments: Any) -> Any:
        """Send a command, wait, and return the answer."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([command, arguments]) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
            line = process.stdout.readline() if ready else None
        except BrokenPipeError:
            line = ""
        if line is None:
            process.kill()
            raise PeerError(f"no answer within {PATIENCE:.0f} seconds")
        if not line:
            raise PeerError(f"ended with exit code {process.wait()}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["answer"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.kill()
            self._process.wait()
            with suppress(BrokenPipeError):  # of a child that died before it read
                self._process.stdin.close()
            self._process.stdout.close()
            self._process = None
        self._printed.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.peers.worker"),
                    *(self.name, str(self.threads), self._cores),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                cwd=ROOT,
                env=child_environment(self.threads),
                text=True,
                encoding="utf-8",
            )
        return self._process

    def _last_words(self) -> str:
        self._printed.seek(0)
        lines = self._printed.read().strip().splitlines()
        return lines[-1] if lines else "it printed nothing"
