"""Random arguments for the block functions of a backend, and what the generic code makes of them.

Everything is drawn and prepared in float64 NumPy; :func:`cast` brings it to the dtype and library
under test, and what was rounded there back for the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import cycle, islice, product
from typing import Any, NamedTuple

import numpy as np

from linattn import _generic
from linattn._generic.block_vjps import row_cotangent
from linattn._generic.hierarchical import scan_hierarchical
from linattn.typing import (
    ELU_PLUS_ONE,
    HEAVISIDE,
    RELU,
    SQUARED_RELU,
    Activation,
    Array,
    Assigned,
    Clusters,
    Exact,
    Exponential,
    Features,
    Normalized,
    Opaque,
    Pointwise,
    Spec,
    State,
    Tokens,
)

DIM, FEATURES, VALUE_DIM = 6, 8, 5

LENGTHS = (33, 1, 150, 4)
"""Tokens a block: several sub-blocks, one token, more than a tile, few."""

MASKS = ("no mask", "masked", "log weights", "all masked")

STATES = ("state", "empty state", "state e^100 above", "state e^100 below")
LOG_GAP = 100.0
"""How far, in logs, a far state is from the keys of its block: float32 ends at 88."""


class Heads(NamedTuple):
    """Leading axes of query, key and value."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]

    def __str__(self) -> str:
        if self.query == self.key == self.value:
            return f"heads {self.query}"
        return f"heads {self.query} of query, {self.key} of key, {self.value} of value"


HEADS = (
    Heads((3,), (3,), (3,)),
    Heads((2, 4), (2, 1), (2, 1)),
    Heads((), (), ()),
    Heads((2, 3), (2, 1), (2, 3)),
    Heads((2, 3), (3,), (3,)),
)


# Specs ------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Specs of the two sides of a map."""

    name: str
    query: Spec
    key: Spec
    differentiable: bool = True


def _squared(u: Array, xp: Any) -> tuple[Array, None]:
    return u * u, None


def _squared_vjp(u: Array, g: Array, xp: Any) -> Array:
    return 2 * u * g


CALLERS = Activation("relu", _squared, _squared_vjp)
"""A caller's function under a name that linattn has: a backend must not know it by that."""


def _exponential_features(tokens: Tokens) -> Features:
    return Features(tokens.x - 0.5, None)


def _pairs(rng: np.random.Generator, heads: tuple[int, ...]) -> Iterator[Pair]:
    """Yield specs that backends may support, and some that they cannot; ``heads`` of the keys."""
    d, m = DIM, FEATURES

    def matrix(*lead: int, width: int = m) -> Any:
        return rng.standard_normal((*lead, d, width)) / np.sqrt(d)

    def logs(*lead: int) -> Any:
        return 0.5 * rng.standard_normal((*lead, m))

    A = matrix(width=d)
    exponential = Exponential(matrix(), 1.0, logs())
    yield Pair("Exponential", exponential, exponential)
    paired = Exponential(matrix(width=m // 2), 1.0, logs(), paired=True)
    yield Pair("Exponential, paired", paired, paired)
    tilted = Exponential(matrix(), A @ A.T, logs())
    yield Pair("Exponential, Q a matrix", tilted, tilted)
    each = Exponential(matrix(*heads), 0.5, logs(*heads))
    yield Pair("Exponential, a matrix a head", each, each)
    for f in (ELU_PLUS_ONE, RELU, SQUARED_RELU, HEAVISIDE, CALLERS):
        spec = Pointwise(f, matrix(), None, None, 0.0, 0.5)
        name = "of a caller, named relu" if f is CALLERS else f.name
        yield Pair(f"Pointwise, {name}", spec, spec, differentiable=f is not HEAVISIDE)
    full = Pointwise(RELU, matrix(), logs(), -0.1, 0.1, np.exp(logs()))
    yield Pair("Pointwise, relu with all its parts", full, full)
    normalized = Normalized(matrix(), logs(), np.full((1, 1), 0.7), matrix(width=1))
    yield Pair("Normalized keys", exponential, normalized)
    probes = matrix(width=4), 0.1 * rng.standard_normal(4), rng.standard_normal((4, m))
    landmarks = rng.standard_normal((m, d)), A @ A.T
    keys = Assigned(matrix(), logs(), *probes, False, *landmarks)
    yield Pair("Assigned keys", Exponential(matrix(), 0.0, logs()), keys)
    opaque = Opaque(_exponential_features)
    yield Pair("Opaque", opaque, opaque, differentiable=False)


# Blocks -----------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A block of tokens with all that any block function is given."""

    name: str
    differentiable: bool
    arguments: dict[str, tuple[Any, ...]]
    """By function."""


def blocks(rng: np.random.Generator, count: int) -> Iterator[Block]:
    """Draw blocks: every spec, every kind of heads; the other choices alternate."""
    settings = zip(
        cycle(LENGTHS), cycle(MASKS[:3] + MASKS), cycle(STATES + STATES[:1]), strict=False
    )
    pairs = [(i, heads) for heads, i in product(HEADS, range(len(list(_pairs(rng, ())))))]
    order = [pairs[i] for i in rng.permutation(len(pairs))]
    for (which, heads), (n, mask, state) in islice(
        zip(cycle(order), settings, strict=False), count
    ):
        pair = list(_pairs(rng, heads.key))[which]
        yield _block(rng, pair, heads, n, mask, state)


def _log_weight(rng: np.random.Generator, mask: str, shape: tuple[int, ...]) -> Any:
    if mask == "no mask":
        return None
    visible = np.zeros(shape, bool) if mask == "all masked" else rng.random(shape) > 0.3
    weight = rng.standard_normal(shape) if mask == "log weights" else np.zeros(shape)
    return np.where(visible, weight, -np.inf)


def _masked(x: Any, log_weight: Any) -> Any:
    return x if log_weight is None else np.where(log_weight > -np.inf, x, 0.0)


def _block(
    rng: np.random.Generator, pair: Pair, heads: Heads, n: int, mask: str, kind: str
) -> Block:
    e, start = VALUE_DIM, 20
    lead = np.broadcast_shapes(heads.key, heads.value)
    m = DIM if isinstance(pair.key, Opaque) else FEATURES
    name = f"{pair.name}, {n} tokens, {heads}, {mask}, {kind}"

    def tokens(lead: tuple[int, ...], n: int, start: int) -> Tokens:
        return Tokens(rng.standard_normal((*lead, n, DIM)), None, start)

    def values_and_one(lead: tuple[int, ...], n: int) -> Any:
        v = rng.standard_normal((*lead, n, e))
        return np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)

    nothing = _generic.empty_state(lead, m, e, np.empty(0))
    state = nothing
    if kind != "empty state":
        seen = tokens(heads.key, start, 0), values_and_one(heads.value, start)
        state = _generic.reduce_block(pair.key, *seen, nothing)
    ahead = {"state e^100 above": LOG_GAP, "state e^100 below": -LOG_GAP}.get(kind, 0.0)
    state = State(state.kvz, state.log_scale + ahead, start)
    query = tokens(heads.query, n, start)
    log_weight = _log_weight(rng, mask, (*heads.key, n, 1))
    key = Tokens(_masked(tokens(heads.key, n, start).x, log_weight), log_weight, start)
    values = values_and_one(heads.value, n)
    want_log = bool(rng.integers(2))
    strongest = float(rng.choice([0.0, 0.1, 3.0, 200.0]))
    decayed = key._replace(log_decay=-strongest * rng.random((*heads.key, n, 1)))
    specs = (pair.query, pair.key)
    arguments: dict[str, tuple[Any, ...]] = {
        "reduce_block": (pair.key, key, values, state),
        "read_block": (pair.query, query, state, want_log),
        "scan_block": (*specs, query, key, values, state, want_log),
        "scan_decayed_block": (*specs, query, decayed, values, state, want_log),
        "sequences_block": (
            *specs,
            query,
            key,
            values,
            np.diff(np.unique([0, n, *rng.integers(0, n, 3)])),
            bool(rng.integers(2)),
            want_log,
        ),
    } | _exact_arguments(rng, heads, query, key, values)
    counts = None if log_weight is None else log_weight > -np.inf
    arguments["reduce_values"] = pair.key, key, values[..., :-1], counts, state
    part = _generic.read_block(pair.query, query, state, True)
    out = None if want_log else np.empty(part.num_den[..., :-1].shape)
    arguments["divide"] = part, out
    arguments["read_output"] = pair.query, query, state, out
    if isinstance(pair.key, Assigned):
        arguments |= _cluster_arguments(rng, pair, (query, key, values), state)
    if pair.differentiable:
        arguments |= _gradient_arguments(rng, pair, (query, key, values), state, nothing, ahead)
    held = {name: given for name, given in arguments.items() if _fits_float32(given)}
    return Block(name, pair.differentiable, held)


def _fits_float32(arguments: tuple[Any, ...]) -> bool:
    """Whether float32 holds all numbers: gradients of rows that see next to nothing are huge."""
    largest = np.finfo(np.float32).max
    return not any(np.any(np.isfinite(x) & (abs(x) > largest)) for x in leaves(arguments))


def _exact_arguments(
    rng: np.random.Generator, heads: Heads, query: Tokens, key: Tokens, values: Any
) -> dict[str, tuple[Any, ...]]:
    """Arguments of what softmax attention needs; a token counts or does not.

    In gradients it is weighed: a bias of keys is a coordinate of theirs only on the way forwards.
    """
    spec, n, weighed = Exact(0.4), key.x.shape[-2], key
    if key.log_weight is not None:
        key = key._replace(log_weight=np.where(key.log_weight > -np.inf, 0.0, -np.inf))
    visible = np.tri(n, n, int(rng.integers(3)), dtype=bool) if rng.integers(2) else None
    earlier = Tokens(rng.standard_normal((*heads.key, 7, DIM)), None, 0)
    other_values = rng.standard_normal((*heads.value, 7, VALUE_DIM + 1))
    other_values[..., -1] = 1
    part = _generic.exact_block(spec, query, earlier, other_values)
    both = _generic.exact_more(spec, query, key, values, part)
    grad = rng.standard_normal(both.num_den[..., :-1].shape)
    scale = _generic.block_vjps.row_scale(both, grad)
    pulled = (spec, query, weighed, values, row_cotangent(scale, grad), scale.log, visible)
    size = key.x.shape[-2]
    rows = Tokens(rng.standard_normal((*heads.query, size, DIM)), None, 0)
    low = -int(rng.integers(size))
    band = (low, int(rng.integers(size)))
    return {
        "exact_block": (spec, query, key, values, visible),
        "exact_more": (spec, query, key, values, part),
        "band_block": (spec, rows, key, _masked(values, key.log_weight), band),
        "exact_vjp": pulled,
    }


def _cluster_arguments(
    rng: np.random.Generator, pair: Pair, block: tuple[Tokens, Tokens, Any], state: State
) -> dict[str, tuple[Any, ...]]:
    """Return arguments for the functions of exact clusters, by name of the function."""
    query, key, values = block
    count, bias = int(rng.integers(1, FEATURES + 1)), rng.standard_normal(FEATURES)
    n, positions = query.x.shape[-2], rng.permutation(40)
    index = rng.integers(1, FEATURES, len(positions))
    order = np.lexsort((positions, index))
    bounds = np.searchsorted(index[order], np.arange(FEATURES + 1))
    x, few = rng.standard_normal((len(order), DIM)), rng.standard_normal((n, DIM))
    one_head, earlier = np.ones((2, len(order), VALUE_DIM + 1)), rng.standard_normal((7, DIM))
    one_head[..., :-1] = rng.standard_normal((2, len(order), VALUE_DIM))
    spec, queries = Exact(0.4), Tokens(few, None, 0)
    diagonal = rng.integers(FEATURES, size=n), rng.standard_normal((n, 1))
    return {
        "assign_block": (pair.key, key, values, state),
        "choose_block": (
            pair.query,
            query,
            state,
            bias,
            count,
            diagonal if rng.integers(2) else None,
        ),
        "clusters_block": (
            spec,
            queries,
            rng.random((n, FEATURES)) < 0.3,
            Clusters(Tokens(x, None, 0), one_head[0], bounds, positions[order]),
            None if rng.integers(2) else 4,
            _generic.exact_block(spec, queries, Tokens(earlier, None, 0), one_head[1, :7]),
        ),
    }


def _gradient_arguments(
    rng: np.random.Generator,
    pair: Pair,
    block: tuple[Tokens, Tokens, Any],
    state: State,
    nothing: State,
    ahead: float,
) -> dict[str, tuple[Any, ...]]:
    query, key, values = block
    lead = np.broadcast_shapes(query.x.shape[:-2], state.kvz.shape[:-2])
    grad = rng.standard_normal((*lead, query.x.shape[-2], VALUE_DIM))
    later = Tokens(rng.standard_normal((*query.x.shape[:-2], 11, DIM)), None, 200)
    later_grad = rng.standard_normal((*lead, 11, VALUE_DIM))
    seen = _generic.reduce_block(pair.key, key, values, state)
    _, adjoint = _generic.read_block_vjp(pair.query, later, seen, later_grad, nothing)
    return {
        "read_block_vjp": (pair.query, query, state, grad, adjoint),
        "reduce_block_vjp": (pair.key, key, values, adjoint),
        "scan_vjp": (pair.query, pair.key, *block, state, adjoint, grad),
    }


# References -------------------------------------------------------------------------------------


def _scan_block(*arguments: Any) -> Any:
    """Causal attention in which every row is right, where the one of one scale may lose some."""
    return scan_hierarchical(*arguments[:-1])


REFERENCES: dict[str, Callable[..., Any]] = {
    "scan_block": _scan_block,
    "scan_decayed_block": _scan_block,
} | {
    name: getattr(_generic, name)
    for name in (
        "reduce_block",
        "reduce_values",
        "read_block",
        "read_output",
        "sequences_block",
        "exact_block",
        "exact_more",
        "divide",
        "band_block",
        "assign_block",
        "choose_block",
        "clusters_block",
        "read_block_vjp",
        "reduce_block_vjp",
        "scan_vjp",
        "exact_vjp",
    )
}


# Dtypes -----------------------------------------------------------------------------------------


def cast(record: Any, convert: Callable[[Any], Any], specs: dict[int, Any] | None = None) -> Any:
    """Convert all arrays in tuples, records and specs; one spec of both sides stays one."""
    specs = {} if specs is None else specs
    if isinstance(record, tuple):
        parts = [cast(part, convert, specs) for part in record]
        return type(record)(*parts) if hasattr(record, "_fields") else tuple(parts)
    if is_dataclass(record) and not isinstance(record, Activation | type):
        if id(record) not in specs:
            values = {field.name: getattr(record, field.name) for field in fields(record)}
            changes = {name: cast(value, convert, specs) for name, value in values.items()}
            specs[id(record)] = replace(record, **changes)
        return specs[id(record)]
    is_array = (
        hasattr(record, "dtype") and hasattr(record, "shape") and not isinstance(record, type)
    )
    return convert(record) if is_array else record


def leaves(record: Any) -> list[Any]:
    """All arrays in tuples, records and specs."""
    found: list[Any] = []

    def collect(array: Any) -> Any:
        found.append(array)
        return array

    cast(record, collect)
    return found
