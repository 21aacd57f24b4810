"""The CUDA kernels, interpreted, against dense formulas: listed cases, or cases drawn at random.

    tests/fake_gpu/run.sh python -m tests.ptx.check                  all cases of benchmarks/gpu
    tests/fake_gpu/run.sh python -m tests.ptx.check bfloat16 causal  those that these words name
    tests/fake_gpu/run.sh python -m tests.ptx.check --random 0 --count 500

Sizes are small, so that a case takes a second; `FAKE_GPU_SMS=1` (132 unless set) lets one block
walk several tiles, `PTX_SEED` (1) draws another order of warps and blocks. A case fails where an
error is above its bound, two runs differ, generic code ran in the place of a kernel, or the
interpreter found a race, a wrong address or a value that nobody wrote. The exit code is then 1.
"""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

import argparse
import sys
import time
import warnings
from dataclasses import replace

import cupy
import numpy as np

from benchmarks.gpu import parity
from benchmarks.gpu.cases import MAPS, Case, cases
from benchmarks.gpu.library import CupyLibrary
from tests.fake_gpu.log import counts, findings


class Interpreted(CupyLibrary):
    """CuPy on the fake GPU, where each array has memory of its own that begins undefined."""

    def poison(self, byte: int) -> None:
        """Leave memory alone: the interpreter knows what nobody wrote."""


def small(case: Case) -> Case:
    """Return a case of few heads and tokens; those of many heads walk several tiles."""
    if case.distinct:
        return replace(case, lead=(2,), distinct=0, queries=300, keys=300, dim=32, features=128)
    lead = (1, 2) if case.lead == (2, 3) else case.lead
    lengths = {700: 150, 300: 90, 131: 77}
    queries, keys = (lengths.get(n, n) for n in (case.queries, case.keys))
    return replace(case, lead=lead, queries=queries, keys=keys)


def drawn(seed: int) -> Case:
    """Return a case of any shape that kernels take."""
    rng = np.random.default_rng(seed)

    def pick(*options):
        return options[rng.integers(len(options))]

    kind = pick("plain", "gradient", "masked", "continued", "one_key_head", "moved_axes")
    length = int(rng.integers(1, 200))
    case = Case(
        name=f"seed {seed} {kind}",
        feature_map=pick(*MAPS),
        dtype=pick("float16", "bfloat16", "float32"),
        is_causal=pick(False, True),
        lead=pick((1,), (2,), (2, 1, 2)),
        queries=length,
        keys=length,
        dim=pick(8, 16, 24, 40, 48, 64, 96, 128),
        features=pick(2, 6, 16, 40, 64, 100, 130, 200, 256),
        value_dim=pick(8, 16, 40, 64, 72, 128, 200),
    )
    if kind == "gradient":
        # Tokens of few dims often share no feature of ReLU, which generic code pulls back.
        return replace(case, operation="gradient", dim=max(48, case.dim))
    if kind == "continued":
        return replace(case, continued=True, queries=length + 2, keys=length + 2)
    return case if kind == "plain" else replace(case, **{kind: True})


def outcome(library: CupyLibrary, case: Case) -> tuple[bool, str]:
    """Run a case; return whether it passed, and errors and findings."""
    findings()
    try:
        found = parity.check(library, case)
        passed = found["passed"]
        said = ", ".join(f"{name} {error:.1e}" for name, error in found["errors"].items())
        if not passed:
            said += f" (at most {case.bound}, {found['kernels']}, same {found['deterministic']})"
    except Exception as error:  # whatever a kernel leads to
        passed, said = False, f"{type(error).__name__}: {str(error)[:300]}"
    lines = findings()
    return passed and not lines, "; ".join([said, *lines[:3]])


def main() -> int:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--exactly", action="store_true", help="the words are one name")
    parser.add_argument("--random", type=int, metavar="SEED", help="cases from this seed on")
    parser.add_argument("--count", type=int, default=100, help="how many of them")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin none after so many")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "OF"))
    parser.add_argument("--counts", action="store_true", help="say what kernels did")
    given = parser.parse_args()
    if given.random is None:
        chosen = [small(case) for case in cases() if set(given.words) <= set(case.name.split())]
        if given.exactly:
            chosen = [case for case in chosen if case.name == " ".join(given.words)]
    else:
        chosen = [drawn(seed) for seed in range(given.random, given.random + given.count)]
    first, step = given.part
    chosen = chosen[first::step]
    library = Interpreted(0)
    cupy.cuda.set_allocator(None)
    warnings.simplefilter("ignore", UserWarning)
    begun, failed, done = time.time(), [], 0
    for case in chosen:
        if time.time() - begun > given.seconds:
            break
        start = time.process_time()
        passed, said = outcome(library, case)
        what = case.name if passed or given.random is None else case
        took = time.process_time() - start
        line = f"{'ok  ' if passed else 'FAIL'} {what}: {said}  [{took:.1f} s]"
        print(line, flush=True)
        done += 1
        failed += [] if passed else [line]
    left, took = len(chosen) - done, time.time() - begun
    print(f"{len(failed)} of {done} failed, {left} not run, {took:.0f} s")
    print(*failed, sep="\n", end="\n" if failed else "")
    if given.counts:
        print("kernel, instructions of warps, those of mma:", *counts().items(), sep="\n")
    return int(bool(failed) or not done)


if __name__ == "__main__":
    sys.exit(main())
