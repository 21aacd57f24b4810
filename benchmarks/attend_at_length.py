"""`linattn attend` on files larger than memory: killed and gone on with, and what it costs.

    python -m benchmarks.attend_at_length --folder DIR [--gigabytes 0.5] [--kills 3] ...
    python -m benchmarks.attend_at_length --folder DIR --cost

Makes q.npy, k.npy and v.npy, a quarter of the size each (the output is the last quarter), and runs
`linattn attend` on them, causal: once undisturbed, whose output is hashed and removed, and once
killed with SIGKILL at moments drawn at random and gone on with. Prints the time of each, the most
memory that a process held (resident, and of that what is no file), and whether the outputs are the
same bytes. The processes run under RLIMIT_DATA: more private memory than --limit-gib is an error in
them. Everything that was made is removed.

``--cost`` compares `linattn.stream.attend` on memory maps, which the system has cached, with the
call in memory, in turn: medians of process time, and peak memory for one length and for four times
it.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import linattn

NAMES = ("q", "k", "v")
SAMPLE_SECONDS = 0.02


class Finished(NamedTuple):
    """How a process ended."""

    code: int
    seconds: float
    resident: int
    """Bytes at most, pages of files included."""
    private: int
    """Bytes at most without them."""
    said: str


def make(folder: Path, shape: tuple[int, ...], dtype: Any, seed: int) -> None:
    """Make the inputs, some rows at a time."""
    for number, name in enumerate(NAMES):
        path = folder / f"{name}.npy"
        array = np.lib.format.open_memmap(path, "w+", dtype, shape)
        for start in range(0, shape[-2], 1 << 17):
            rows = array[..., start : start + (1 << 17), :]
            rng = np.random.default_rng((seed, number, start))
            rows[:] = rng.standard_normal(rows.shape, np.float32)
        array.flush()


def command(folder: Path, *options: str) -> list[str]:
    """Return the command line that is measured."""
    files = [str(folder / f"{name}.npy") for name in NAMES]
    return [sys.executable, "-m", "linattn", "attend", *files, "--out", str(folder / "o.npy"),
            "--causal", "--map", "PositiveFeatures", "--tolerance", "inf", *options]  # fmt: skip


def watch(words: list[str], limit: int, kill_after: float | None = None) -> Finished:
    """Run a command under a limit of memory, and sample what it holds; kill it at a time."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    start = time.monotonic()
    resident = private = 0
    with subprocess.Popen(
        words, preexec_fn=limited, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        while process.poll() is None:
            held = _held(process.pid)
            resident, private = max(resident, held[0]), max(private, held[1])
            if kill_after is not None and time.monotonic() - start > kill_after:
                process.kill()
                break
            time.sleep(SAMPLE_SECONDS)
        said, _ = process.communicate()
    return Finished(process.returncode, time.monotonic() - start, resident, private, said.strip())


def _held(pid: int) -> tuple[int, int]:
    """Resident bytes of a process, and those of them that are no pages of files."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    found = {
        line.partition(":")[0]: line.split()[1]
        for line in lines
        if line.startswith(("VmRSS", "RssFile"))
    }
    resident, files = (int(found.get(name, 0)) * 1024 for name in ("VmRSS", "RssFile"))
    return resident, resident - files


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _show(what: str, end: Finished) -> None:
    sizes = (
        f"resident {end.resident / 2**20:,.0f} MiB, without files {end.private / 2**20:,.0f} MiB"
    )
    print(f"{what}: {end.seconds:.1f} s, exit code {end.code}; {sizes}", flush=True)
    for line in end.said.splitlines():
        print(f"    {line}", flush=True)


def kill_and_resume(arguments: argparse.Namespace) -> bool:
    """Run undisturbed and killed; return whether the bytes are the same."""
    folder, limit = arguments.folder, int(arguments.limit_gib * 2**30)
    dtype = np.dtype(arguments.dtype)
    row = 4 * arguments.heads * arguments.dim * dtype.itemsize
    shape = (arguments.heads, int(arguments.gigabytes * 1e9) // row, arguments.dim)
    sizes = f"{arguments.heads} heads of {shape[1]:,} tokens, d = {arguments.dim}, {dtype}"
    size = f"{row * shape[1] / 1e9:.1f} GB with the output"
    print(f"{sizes}, m = {arguments.features}: {size}", flush=True)
    start = time.monotonic()
    make(folder, shape, dtype, arguments.seed)
    print(f"made in {time.monotonic() - start:.0f} s", flush=True)
    line = command(folder, "--num-features", str(arguments.features))
    undisturbed = watch(line, limit)
    _show("undisturbed", undisturbed)
    if undisturbed.code:
        return False
    wanted = checksum(folder / "o.npy")
    (folder / "o.npy").unlink()
    print(f"    SHA-256 {wanted}", flush=True)
    rng = random.Random(arguments.seed)
    for _ in range(arguments.kills):
        end = watch([*line, "--resume"], limit, undisturbed.seconds * rng.uniform(0.1, 0.5))
        _show("killed", end)
        saved = (folder / "o.npy.checkpoint").exists()
        print(f"    there is {'a' if saved else 'no'} checkpoint", flush=True)
    _show("gone on with", watch([*line, "--resume", "--check", "16"], limit))
    found = checksum(folder / "o.npy")
    print(
        f"    SHA-256 {found}: {'the same bytes' if found == wanted else 'OTHER BYTES'}", flush=True
    )
    return found == wanted


def cost(arguments: argparse.Namespace) -> None:
    """Compare a run from memory maps with the call in memory."""
    folder = arguments.folder
    attend: Any = linattn.stream.attend
    attention: Any = linattn.linear_attention
    phi = linattn.feature_maps.PositiveFeatures(arguments.dim, arguments.features, rng=0)
    for is_causal in (False, True):
        peaks = []
        for length in (arguments.tokens // 4, arguments.tokens):
            make(folder, (arguments.heads, length, arguments.dim), np.float32, arguments.seed)
            maps = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in NAMES]
            out = np.lib.format.open_memmap(folder / "o.npy", "w+", np.float32, maps[2].shape)
            tracemalloc.start()
            from_maps = partial(attend, *maps, out, phi, is_causal=is_causal)
            from_maps()
            peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
            tracemalloc.stop()
        arrays = [np.array(array) for array in maps]
        in_memory = partial(attention, *arrays, phi, is_causal=is_causal)
        times = [_in_turn(in_memory, from_maps) for _ in range(arguments.rounds)]
        memory, mapped = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(b / a for a, b in times)
        print(f"{'causal' if is_causal else 'full'}, {arguments.tokens:,} tokens, medians of "
              f"{arguments.rounds}: in memory {memory:.2f} s, from maps {mapped:.2f} s, "
              f"ratio {ratio:.3f}; peak memory {peaks[0]:.0f} MiB at a quarter of the length, "
              f"{peaks[1]:.0f} MiB at all of it", flush=True)  # fmt: skip


def _in_turn(*calls: Callable[[], Any]) -> list[float]:
    """Process time of each call, made in random order."""
    seconds = [0.0] * len(calls)
    for index in random.sample(range(len(calls)), len(calls)):
        start = time.process_time()
        calls[index]()
        seconds[index] = time.process_time() - start
    return seconds


def main(words: list[str] | None = None) -> int:
    """Run what the options say; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="an empty one, or none yet")
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--limit-gib", type=float, default=1.0)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args(words)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if any(arguments.folder.iterdir()):
        parser.error(f"--folder {arguments.folder}: want an empty folder")
    try:
        if arguments.cost:
            cost(arguments)
            return 0
        return 0 if kill_and_resume(arguments) else 1
    finally:
        for name in ("q.npy", "k.npy", "v.npy", "o.npy", "o.npy.checkpoint"):
            (arguments.folder / name).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
