"""What the kernels are meant to reach on the main case, and what a run reached."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.gpu.floors import (
    Floor,
    Rates,
    attention_work,
    decode_work,
    executed_flops,
    floor,
)
from benchmarks.gpu.record import Record
from benchmarks.gpu.timings import DECODED, MAIN, SIZES

__all__ = ["Goal", "executed_of", "floor_of", "goals", "seconds"]

SPEEDUP = 5.0
FRACTION = 0.5
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


class Goal(NamedTuple):
    """A goal, what a run reached, and whether that is enough; None: not measured."""

    wanted: str
    reached: str
    met: bool | None


def seconds(record: Record, way: str, feature_map: str, kind: str, length: int) -> float | None:
    """Return how long a call took."""
    found = record.items("timings").get(f"{way} {feature_map} {kind} {length}", {})
    return found.get("seconds")


def floor_of(record: Record, item: dict[str, Any]) -> Floor | None:
    """Return the floor of a timed item of linattn, by the ceilings of the same run."""
    tf32 = item["way"].endswith("tf32")
    rates = [_rate(record, name) for name in ("copy", "tf32" if tf32 else item["dtype"], "exp")]
    copy, product, exp = rates
    if copy is None or product is None or exp is None:
        return None
    if item["kind"] == "decode":
        work = decode_work(DECODED)
    else:
        work = attention_work(
            item["map"],
            SIZES,
            item["length"],
            itemsize=ITEMSIZE[item["dtype"]],
            is_causal=item["kind"] == "causal",
        )
    return floor(work, Rates(copy, product, exp))


def executed_of(record: Record, item: dict[str, Any]) -> tuple[float, float] | None:
    """Return the flops that a fused item executes, and their seconds at mma.sync's ceiling."""
    rate = _rate(record, "mma.sync")
    if rate is None or not item["way"].startswith("fused"):
        return None
    flops = executed_flops(item["map"], SIZES, item["length"], is_causal=item["kind"] == "causal")
    return flops, flops / rate


def _rate(record: Record, name: str) -> float | None:
    return record.items("ceilings").get(name, {}).get("rate")


def goals(record: Record) -> list[Goal]:
    """Compare the main case with what was wanted of it."""
    found = []
    for kind in ("full", "causal"):
        slow = seconds(record, "step 1, generic", "favor", kind, MAIN)
        fast = seconds(record, "step 2, float32", "favor", kind, MAIN)
        ratio = None if slow is None or fast is None else slow / fast
        wanted = f"{kind}: float32 blocks {SPEEDUP:g} times generic code"
        found.append(_goal(wanted, ratio, "times", SPEEDUP))
    causal = record.items("timings").get(f"fused bfloat16 favor causal {MAIN}", {})
    share = None
    if "seconds" in causal:
        least = floor_of(record, causal)
        # Causal attention reads keys and values twice: 3 / 2 of the least bytes.
        share = None if least is None else 1.5 * least.memory / causal["seconds"]
    wanted = "causal bfloat16: half of memory's rate, K and V twice"
    found.append(_goal(wanted, share, "of it", FRACTION))
    for length in (4096, MAIN, 16384, 65536):
        exact = [f"torch SDPA {how} causal {length}" for how in ("flash", "cuDNN")]
        times = [record.items("peers").get(name, {}).get("seconds") for name in exact]
        peer = min((took for took in times if took is not None), default=None)
        fused = seconds(record, "fused bfloat16", "favor", "causal", length)
        ratio = None if peer is None or fused is None else peer / fused
        found.append(_goal(f"causal {length:,}: ahead of torch SDPA", ratio, "times", 1.0))
    return found


def _goal(wanted: str, value: float | None, unit: str, least: float) -> Goal:
    if value is None:
        return Goal(wanted, "not measured", None)
    return Goal(wanted, f"{value:.2f} {unit}", value >= least)
