"""Specs around a spec, peeled here: block functions are only ever given the spec inside.

`Affine` changes the coordinates of tokens before they reach a block, `ColumnNormalized` divides
the state that queries read, `Corrected` widens it and chooses row by row what was read,
`SeparateDenominator` leaves to each half of it what is read from there.
"""

from __future__ import annotations

from linattn import _generic
from linattn._generic.column_means import normalize_state_vjp
from linattn._generic.corrected import guard, widen_state
from linattn._generic.separate import separate_state
from linattn.typing import (
    Affine,
    ColumnNormalized,
    Corrected,
    MapSpec,
    Partial,
    Problem,
    SeparateDenominator,
    Spec,
    State,
)

__all__ = [
    "innermost",
    "is_column_normalized",
    "peel_affine",
    "read_spec",
    "read_spec_vjp",
    "select_rows",
]


def innermost(spec: MapSpec) -> Spec:
    """Spec that blocks are evaluated by."""
    while isinstance(spec, Affine | ColumnNormalized | Corrected | SeparateDenominator):
        spec = spec.spec
    return spec


def peel_affine(spec: MapSpec) -> tuple[MapSpec, Affine | None]:
    """Separate a change of coordinates from what is evaluated in the new ones."""
    return (spec.spec, spec) if isinstance(spec, Affine) else (spec, None)


def is_column_normalized(problem: Problem) -> bool:
    """Whether causal blocks need the normalizers of each feature token by token."""
    return isinstance(problem.query_spec, ColumnNormalized)


def read_spec(problem: Problem, state: State) -> tuple[Spec, State]:
    """Spec and state by which queries read."""
    spec = problem.query_spec
    if isinstance(spec, ColumnNormalized):
        return spec.spec, _generic.normalize_state(state)
    if isinstance(spec, Corrected):
        return spec.spec, widen_state(spec, state)
    if isinstance(spec, SeparateDenominator):
        return spec.spec, separate_state(state)
    return spec, state


def select_rows(problem: Problem, part: Partial) -> Partial:
    """Rows of attention in what was read from the state of :func:`read_spec`."""
    return guard(part) if isinstance(problem.query_spec, Corrected) else part


def read_spec_vjp(problem: Problem, adjoint: State, state: State) -> State:
    """Pull the adjoint of the state that was read back to the state before :func:`read_spec`."""
    return normalize_state_vjp(adjoint, state) if is_column_normalized(problem) else adjoint
