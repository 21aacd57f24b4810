"""Specs of a problem: peeled, or given one more axis.

Block functions are only given the spec inside. `Affine` changes the coordinates of tokens before
they reach a block, and `ColumnNormalized` divides the state that queries read. `Corrected` widens
the state, then chooses for each row the corrected or the uncorrected sums. `SeparateDenominator`
reads numerators from one half of the state and denominators from the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from linattn import _generic
from linattn._arrays import moveaxis, namespace
from linattn._generic.column_means import normalize_state_vjp
from linattn._generic.corrected import guard, widen_state
from linattn._generic.separate import separate_state
from linattn._generic.specs import spec_axes
from linattn.typing import (
    Affine,
    Array,
    ColumnNormalized,
    Corrected,
    Exact,
    Features,
    MapSpec,
    Opaque,
    Partial,
    Problem,
    SeparateDenominator,
    Spec,
    State,
    Tokens,
)


def innermost(spec: MapSpec) -> Spec:
    """Spec that blocks are evaluated by."""
    while isinstance(spec, Affine | ColumnNormalized | Corrected | SeparateDenominator):
        spec = spec.spec
    return spec


def is_placed(problem: Problem) -> bool:
    """Whether a side of the map may depend on the positions of tokens."""
    return any(isinstance(innermost(s), Opaque) for s in (problem.query_spec, problem.key_spec))


def is_column_normalized(problem: Problem) -> bool:
    """Whether causal blocks need the normalizers of each feature token by token."""
    return isinstance(problem.query_spec, ColumnNormalized)


def read_spec(problem: Problem, state: State) -> tuple[Spec, State]:
    """Return the spec and the state that queries read by."""
    spec = problem.query_spec
    if isinstance(spec, ColumnNormalized):
        return spec.spec, _generic.normalize_state(state)
    if isinstance(spec, Corrected):
        return spec.spec, widen_state(spec, state)
    if isinstance(spec, SeparateDenominator):
        return spec.spec, separate_state(state)
    return spec, state


def select_rows(problem: Problem, part: Partial) -> Partial:
    """Return the rows of attention; ``part`` was read from the state of :func:`read_spec`."""
    return guard(part) if isinstance(problem.query_spec, Corrected) else part


def read_spec_vjp(problem: Problem, adjoint: State, state: State) -> State:
    """Pull the adjoint of the state that was read back to the state before :func:`read_spec`."""
    return normalize_state_vjp(adjoint, state) if is_column_normalized(problem) else adjoint


def with_position(spec: Any, change: Affine | None) -> Any:
    """Return the spec, and change of coordinates, of tokens whose last coordinate is their place.

    JAX maps a function of one token over them.
    """
    if isinstance(spec, ColumnNormalized | Corrected | SeparateDenominator):
        return replace(spec, spec=with_position(spec.spec, change))

    def of_token(x: Array, place: Array) -> list[Array]:
        token = Tokens(x[..., None, :], None, place)
        if change is not None:
            token = _generic.change_coordinates(change, token, weighted=True)
        return [None if a is None else a[..., 0, :] for a in _generic.evaluate(spec, token)]

    def features(tokens: Tokens) -> Features:
        x, place = tokens.x[..., :-1], tokens.x[..., -1]
        xp = namespace(x)
        # A masked key has none; other heads may see it.
        place = xp.max(xp.reshape(place, (-1, place.shape[-1])), axis=0)
        of_tokens = sys.modules["jax"].vmap(of_token, (-2, 0), -2)
        return Features(*of_tokens(x, xp.astype(place, xp.int32)))

    return Opaque(features)


# One more axis, of blocks or of packed sequences --------------------------------------------------

Change = Callable[[Array], Array]
"""Of an array ``(..., blocks, n, width)`` or back; of no array it makes none."""


def for_blocks(spec: Any) -> Any:
    """Return the spec of blocks that follow each other: the map sees them as one run of tokens."""

    def joined(x: Array) -> Array:
        *lead, blocks, n, width = x.shape
        return namespace(x).reshape(x, (*lead, blocks * n, width))

    def apart(like: Array) -> Change:
        blocks, n = like.shape[-3:-1]
        return lambda x: namespace(x).reshape(x, (*x.shape[:-2], blocks, n, x.shape[-1]))

    return _with_axis(spec, joined, apart)


def for_sequences(spec: Any, ndim: int) -> Any:
    """Return the spec of sequences that all begin at one position, for ``ndim`` leading axes.

    The map sees their axis in front of all others, where it meets no parameters of heads.
    """

    def in_front(x: Array) -> Array:
        xp, lead = namespace(x), tuple(x.shape[:-3])
        x = moveaxis(x, -3, 0)
        return xp.reshape(x, (x.shape[0], *(1,) * (ndim - len(lead)), *lead, *x.shape[-2:]))

    def behind(_: Array) -> Change:
        return lambda x: moveaxis(x, 0, -3)

    return _with_axis(spec, in_front, behind)


def _with_axis(spec: Any, change: Change, back: Callable[[Array], Change]) -> Any:
    """Give the parameters of heads one more axis, or change the tokens that a function is given."""
    if spec is None or isinstance(spec, Exact):
        return spec
    if isinstance(spec, Opaque):
        return _opaque(spec, change, back)
    changes: dict[str, Any] = {}
    for name, axes in spec_axes(spec).items():
        array = getattr(spec, name)
        if array is not None and not isinstance(array, float) and array.ndim > axes:
            changes[name] = namespace(array).expand_dims(array, axis=-axes - 1)
    if isinstance(spec, ColumnNormalized | Corrected | SeparateDenominator):
        changes["spec"] = _with_axis(spec.spec, change, back)
    return replace(spec, **changes) if changes else spec


def _opaque(spec: Opaque, change: Change, back: Callable[[Array], Change]) -> Opaque:
    def each(function: Change, *arrays: Array) -> list[Array]:
        return [None if x is None else function(x) for x in arrays]

    def tokens_of(tokens: Tokens) -> Tokens:
        x, log_weight = each(change, tokens.x, tokens.log_weight)
        return tokens._replace(x=x, log_weight=log_weight)

    def fn(tokens: Tokens) -> Features:
        return Features(*each(back(tokens.x), *spec.fn(tokens_of(tokens))))

    def vjp(tokens: Tokens, cotangent: Features) -> Array:
        assert spec.vjp is not None
        changed = Features(*each(change, *cotangent))
        return back(tokens.x)(spec.vjp(tokens_of(tokens), changed))

    return Opaque(fn, None if spec.vjp is None else vjp)
