"""Take barriers and waits out of the kernels one at a time, and swap fragments: is it noticed?

    tests/fake_gpu/run.sh python -m tests.ptx.mutants [FIRST LAST]

Runs a case of `benchmarks/gpu/cases.py` on one multiprocessor, so that a block walks several tiles.
The exit code is 1 if a mutant that is not in `REDUNDANT` passed. On demand: about fifteen minutes.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.run import ROOT, Tree

KERNELS = "backends/linattn_cupy/kernels"
FULL, CAUSAL = "bfloat16 favor long full", "bfloat16 favor long causal"
BLIND, FLOAT32 = "bfloat16 favor blind causal", "float32 favor blind causal"
CASES = {
    "segment_states": FULL,
    "read_states": FULL,
    "causal_rows": CAUSAL,
    "segment_adjoints": "float16 favor long gradient full",
    "read_gradients": "float16 favor long gradient full",
    "causal_gradients": "float16 favor long gradient causal",
    "decode": "bfloat16 favor decoder",
    "redo_rows": "bfloat16 favor jump causal",
    "softmax_rows": "float32 favor softmax causal",
}
"""What shows a defect of a kernel; what stands before all kernels is the last one's."""

LAST = {"gradients.cu": "causal_gradients", "steps.cu": "redo_rows", "common.cuh": "decode"}
SWAPS = [
    (
        "tiles.cuh",
        "column + lane / 16 * 8 + lane % 8) * stride + row + lane / 8 % 2 * 8",
        "column + lane / 8 % 2 * 8 + lane % 8) * stride + row + lane / 16 * 8",
        "float16 elu long causal",
    ),
    (
        "tiles.cuh",
        "(row + lane / 16 * 8 + lane % 8) * stride + column + lane / 8 % 2 * 8",
        "(row + lane / 8 % 2 * 8 + lane % 8) * stride + column + lane / 16 * 8",
        CAUSAL,
    ),
    ("tiles.cuh", "constexpr int DS = D + 8,", "constexpr int DS = D + 4,", CAUSAL),
    ("device.cuh", "int bytes = valid ? 16 : 0;", "int bytes = 16;", BLIND),
    ("device.cuh", "cp.async.wait_all;", "", FULL),
    ("fused.cu", "has_queries ? M * ES * 2 : 0)", "has_queries ? M * E * 2 : 0)", CAUSAL),
    ("common.cuh", "x += shuffle_xor(x, lanes);", "x += shuffle_xor(x, lanes / 2);", FLOAT32),
    ("common.cuh", "fmaxf(x, shuffle_xor(x, lanes))", "fmaxf(x, shuffle_xor(x, 1))", FLOAT32),
]
"""Defects that neither `tests/mutants/code.toml` holds nor the tests of single instructions see."""

REDUNDANT = ("features.cu", "block_any")
"""Words of mutants that may pass: `finish_rows` asks the block whether any row is rejected, or any
feature was seen before; the first warp alone knows it unless one row of another is rejected, whose
result another computation does not change, or no key had any of the first 32 features."""


def mutants() -> Iterator[tuple[str, str, str, str]]:
    """Yield what is changed, the file, its changed text, and the case that should notice."""
    files = "fused.cu", "gradients.cu", "steps.cu", "features.cu", "tiles.cuh", "common.cuh"
    for name in (*files, "softmax.cu"):
        lines = (ROOT / KERNELS / name).read_text().splitlines(keepends=True)
        kernel = LAST.get(name, "causal_rows")
        for i, line in enumerate(lines):
            begun = (k for k in CASES if line.strip().startswith((f"{k}(", f"KERNEL {k}(")))
            kernel = next(begun, kernel)
            case = FLOAT32 if name == "features.cu" else CASES[kernel]
            word = line.strip().split(";")[0]
            if word in ("block_sync()", "copies_done()", "warp_sync()"):
                changed = ";\n"
            elif "= block_any(" in line:
                changed, word = line.replace("block_any(", "warp_any("), "block_any of the block"
            else:
                continue
            text = "".join([*lines[:i], changed, *lines[i + 1 :]])
            yield f"{name}:{i + 1} in {kernel} without {word}", name, text, case
    for name, old, new, case in SWAPS:
        text = (ROOT / KERNELS / name).read_text()
        if old not in text:
            raise SystemExit(f"{name} does not hold {old!r}")
        yield f"{name} with {new}", name, text.replace(old, new), case


def noticed(tree: Tree, name: str, text: str, case: str) -> str:
    """Return how the check fails on a copy with this text, "" if it passes."""
    (tree.folder / KERNELS / name).write_text(text)
    _, said = tree.run(f"python -m benchmarks.gpu.first_contact --run --only {shlex.quote(case)}")
    (tree.folder / KERNELS / name).write_text((ROOT / KERNELS / name).read_text())
    results = [line for line in said.splitlines() if line.startswith(("ok ", "FAIL"))]
    if not results:
        raise SystemExit(f"{case} did not end: {said[-600:]}")
    return results[-1] if results[-1].startswith("FAIL") else ""


def main() -> int:
    """Try the mutants with these numbers, or all."""
    first, last = (int(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else (0, 10**9)
    missed, tried = [], 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"FAKE_GPU_SMS": "1", "CUPY_CACHE_DIR": f"{folder}/cache"}
        tree = Tree(Path(folder))
        for number, (what, *mutant) in enumerate(mutants()):
            if not first <= number <= last:
                continue
            seen, tried = noticed(tree, *mutant), tried + 1
            missed += [] if seen else [what]
            print(f"{number} {'noticed' if seen else 'MISSED '} {what}: {seen[:160]}", flush=True)
    print(f"{tried - len(missed)} of {tried} noticed; not: {missed}")
    return int(any(word not in what for what in missed for word in REDUNDANT))


if __name__ == "__main__":
    sys.exit(main())
