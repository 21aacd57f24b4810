"""Count what the kernels are compiled to: ``python -m benchmarks.gpu.counts [WORD ...]``.

Compiles the variants that the tests compile, or those whose name holds all of the words, as CuPy
does, for compute capability 9.0, and prints registers and instructions by class: of what is in no
loop, and of each loop without those in it. Nothing runs, and there need be no GPU. A loop's
instructions are those of one round, of a warp that skips none of it.

Needs the wheels ``nvidia-cuda-nvrtc`` (extra ``test-kernels``) and ``nvidia-cuda-nvdisasm``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.library import register
from benchmarks.gpu.machine_code import Part, disassemble, parts_of
from benchmarks.gpu.paths import ROOT
from tests import nvrtc
from tests.test_kernel_compilation import SHIPPED

__all__ = ["ARCH", "SHOWN", "count", "main", "table_of"]

ARCH = "sm_90"
KERNELS = ROOT / "backends" / "linattn_cupy" / "kernels"
SHOWN = tuple(
    ["total", "HMMA", "LDSM", "MUFU", "FFMA", "LDS", "STS", "LDG", "STG", "LDGSTS", "SHFL", "BAR"]
)
"""Classes that the table has columns for."""

MAPS = ("FAVOR+", "elu + 1", "relu")


def count(words: Iterable[str] = ()) -> dict[str, Any]:
    """Compile and count the variants whose name holds all of the words."""
    wanted = [
        (source, options)
        for source, options, _ in SHIPPED
        if all(word in _name(source, options) for word in words)
    ]

    def one(variant: tuple[str, Mapping[str, int]]) -> dict[str, Any]:
        source, options = variant
        compiled = nvrtc.compile_source(KERNELS / source, options, ARCH, include=KERNELS)
        parts = parts_of(disassemble(compiled.cubin))
        return {
            name: {
                "registers": needs.registers,
                "spill_bytes": needs.spill_bytes,
                "stack_bytes": needs.stack_bytes,
                "static_shared_bytes": needs.shared_bytes,
                "dynamic_shared_bytes": _dynamic_bytes(source, name, options),
                "outside": _as_json(parts[name][0]),
                "loops": [
                    {"line": loop.line, "depth": loop.depth, **_as_json(loop.part)}
                    for loop in parts[name][1]
                ],
            }
            for name, needs in compiled.kernels.items()
        }

    with ThreadPoolExecutor(2) as pool:
        found = pool.map(one, wanted)
        return {_name(*variant): kernels for variant, kernels in zip(wanted, found, strict=True)}


def _name(source: str, options: Mapping[str, int]) -> str:
    given = {name: value for name, value in options.items() if name != "MAP"}
    kind = MAPS[options["MAP"]] if "MAP" in options else ""
    return " ".join([source, kind, *(f"{name}={value}" for name, value in given.items())])


def _dynamic_bytes(source: str, function: str, options: Mapping[str, int]) -> int | None:
    """Dynamic shared memory of a block of the fused kernels, None for others."""
    from linattn_cupy.fused import Variant
    from linattn_cupy.parameters import FAMILIES

    uses = {
        "segment_states": {"keys": True, "queries": False},
        "read_states": {"keys": False, "queries": True},
        "causal_rows": {"keys": True, "queries": True},
    }
    if source != "fused.cu" or function not in uses:
        return None
    family = next(name for name, number in FAMILIES.items() if number == options["MAP"])
    sizes = (options[name] for name in ("HEAD_DIM", "FEATURES", "VALUE_TILE", "WARPS"))
    variant = Variant(family, bool(options["FP16"]), *sizes)
    return variant.shared(options["TOKEN_TILE"], **uses[function])


def _as_json(part: Part) -> dict[str, Any]:
    return {"instructions": part.counts, "wavefronts": part.wavefronts}


def table_of(counts: Mapping[str, Any]) -> str:
    """Lay out the counts, a line for each part of a kernel."""
    head = [f"{'':44}", *(f"{name:>6}" for name in (*SHOWN, "waves"))]
    lines = ["".join(head)]
    for variant, kernels in counts.items():
        lines += ["", variant]
        for name, kernel in kernels.items():
            needs = f"{kernel['registers']} registers, {kernel['spill_bytes']} B spilled"
            shared = kernel["dynamic_shared_bytes"]
            needs += "" if shared is None else f", {shared:,} B shared"
            lines += [f"  {name}: {needs}", _row("    in no loop", kernel["outside"])]
            lines += [
                _row(f"{'  ' * loop['depth']}      loop at {loop['line']}", loop)
                for loop in kernel["loops"]
            ]
    return "\n".join(lines)


def _row(name: str, part: Mapping[str, Any]) -> str:
    numbers = [part["instructions"].get(kind, 0) for kind in SHOWN]
    return f"{name:44}" + "".join(f"{number or '':>6}" for number in (*numbers, part["wavefronts"]))


def main() -> None:
    """Print the table, and write the counts where they are wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("words", nargs="*", help="what the names of variants must hold")
    parser.add_argument("--out", type=Path, help="file for the counts as JSON")
    given = parser.parse_args()
    register()
    counts = count(given.words)
    print(table_of(counts))
    if given.out:
        version = importlib.metadata.version(nvrtc.DISTRIBUTION)
        record = {"arch": ARCH, "nvrtc": version, "variants": counts}
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
