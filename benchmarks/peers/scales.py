"""Time against the scale of inputs: queries and keys multiplied by s, beside the same at s = 1.

Where exponents are spread far apart, exponentials may leave the range of a dtype, blocks are done
again in another way, and processors take many times as long for numbers below the smallest normal
one. A case is a map and a mode, in float32 or float64, by the backend or on the generic path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from itertools import product
from math import inf
from time import process_time
from typing import Any

import numpy as np

import linattn
from benchmarks.peers.problem import Floats, Inputs, Sizes
from benchmarks.peers.processes import Child, PeerError
from benchmarks.peers.record import Record, Scaled
from linattn.feature_maps import (
    EluFeatures,
    HyperbolicFeatures,
    LandmarkFeatures,
    PositiveFeatures,
)
from linattn.typing import FeatureMap

__all__ = ["CASES", "measure", "seconds_by_scale"]

CHILD = "linattn-favor"
"""The peer whose process is told to compute; any of linattn's will do."""

WINDOW, LANDMARKS = 64, 64

DECODED = 64
"""Tokens that a decoder takes after those of the state."""

CALLS, TURN = 3, 0.1
"""Calls of a turn at most, and seconds after which no other begins."""

Call = Callable[[], Any]


MAPS: dict[str, Callable[[Sizes], FeatureMap]] = {
    "FAVOR+": lambda sizes: PositiveFeatures(sizes.dim, sizes.features, rng=0),
    "hyperbolic": lambda sizes: HyperbolicFeatures(sizes.dim, sizes.features, rng=0),
    "elu+1": lambda sizes: EluFeatures(),
}
MODES = {"full": False, "causal": True}


def _attention(
    name: str, options: dict[str, Any], sizes: Sizes, query: Floats, key: Floats, value: Floats
) -> Call:
    return partial(linattn.linear_attention, query, key, value, MAPS[name](sizes), **options)


def _gradients(
    name: str, options: dict[str, Any], sizes: Sizes, query: Floats, key: Floats, value: Floats
) -> Call:
    feature_map = MAPS[name](sizes)

    def call() -> Any:
        arrays = query, key, value
        _, pullback = linattn.linear_attention_vjp(*arrays, feature_map, **options)
        return pullback(value)

    return call


def _landmarks(sizes: Sizes, query: Floats, key: Floats, value: Floats) -> Call:
    """Fit and attend, as each call on other tokens has to."""

    def call() -> Any:
        found = LandmarkFeatures.fit(query, key, num_features=LANDMARKS, rng=0)
        return linattn.linear_attention(query, key, value, found)

    return call


def _coreset(sizes: Sizes, query: Floats, key: Floats, value: Floats) -> Call:
    return lambda: linattn.CoresetAttention(rng=0).extend(query, key, value)


def _decoder(sizes: Sizes, query: Floats, key: Floats, value: Floats) -> Call:
    """Take the last tokens one by one."""
    feature_map, lead = MAPS["FAVOR+"](sizes), key.shape[:-2]
    empty = linattn.init_state(feature_map, sizes.dim, batch_shape=lead, like=key)
    first = key.shape[-2] - min(DECODED, key.shape[-2] // 2)
    arrays = key[..., :first, :], value[..., :first, :]
    state = linattn.update_state(empty, *arrays, feature_map)

    def call() -> None:
        decoder = linattn.Decoder(feature_map, state)
        for i in range(first, key.shape[-2]):
            decoder.step(query[..., i, :], key[..., i, :], value[..., i, :])

    return call


def _cases() -> Iterator[tuple[str, Callable[[Sizes, Floats, Floats, Floats], Call]]]:
    for name, (mode, is_causal) in product(MAPS, MODES.items()):
        yield f"{name}, {mode}", partial(_attention, name, {"is_causal": is_causal})
    for mode, is_causal in MODES.items():
        options = {"is_causal": is_causal, "exact_window": WINDOW}
        yield f"window, {mode}", partial(_attention, "FAVOR+", options)
    yield "landmarks, full", _landmarks
    yield "coreset, causal", _coreset
    for name, (mode, is_causal) in product(MAPS, MODES.items()):
        yield f"{name} gradient, {mode}", partial(_gradients, name, {"is_causal": is_causal})
    yield "decoder, causal", _decoder


CASES = dict(_cases())
"""Everything that is timed at each scale."""

DTYPES, PATHS = ("float32", "float64"), ("backend", "generic")


def seconds_by_scale(
    case: str,
    dtype: str,
    path: str,
    sizes: Sizes,
    length: int,
    scales: Sequence[float],
    rounds: int,
) -> list[list[float]]:
    """Return processor seconds of a call at each scale, by rounds; scales take turns."""
    inputs = Inputs(sizes, length)
    query, key, value = (x.astype(dtype) for x in (inputs.query, inputs.key, inputs.value))
    rng = np.random.default_rng(0)
    with linattn.without_backends() if path == "generic" else nullcontext():
        calls = [
            CASES[case](sizes, (s * query).astype(dtype), (s * key).astype(dtype), value)
            for s in scales
        ]
        for call in calls:
            call()
        taken = []
        for _ in range(rounds):
            order = rng.permutation(len(calls))
            seconds = {int(place): _seconds(calls[place]) for place in order}
            taken.append([seconds[place] for place in range(len(calls))])
    return taken


def _seconds(call: Call) -> float:
    """Return the least of a few calls: one that finds its pages given back takes 1.5 times."""
    least, begun = inf, process_time()
    for _ in range(CALLS):
        started = process_time()
        call()
        ended = process_time()
        least = min(least, ended - started)
        if ended - begun > TURN:
            break
    return least


def measure(
    record: Record,
    length: int,
    scales: Sequence[float],
    cores: Sequence[int],
    say: Callable[[str], None],
) -> None:
    """Time every case on one thread, in one process."""
    sizes, rounds = record.sizes._replace(batch=1, heads=1), record.settings["rounds"]
    # What the others are compared with comes first.
    scales = [1.0, *sorted({*scales} - {1.0})]
    with closing(Child(CHILD, 1, cores)) as child:
        for dtype, path, case in product(DTYPES, PATHS, CASES):
            what = f"{case}, {dtype}, {path}"
            try:
                taken = child.ask("scales", case, dtype, path, sizes, length, scales, rounds)
            except PeerError as failure:
                say(f"left out: {what}: {failure}")
                continue
            rows = tuple(map(tuple, taken))
            record.scaled.append(Scaled(case, dtype, path, length, tuple(scales), rows))
            say(f"timed {what} at scales 1 to {scales[-1]:g}")
