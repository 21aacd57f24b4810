"""Causal attention of long sequences in JAX: one chunk of tokens is compiled, and a loop runs it.

A state leads from chunk to chunk. The pullback stores the states before some chunks, as many as the
square root of their number, and computes those between again.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import eval_shape, lax
from jax.tree_util import tree_map

CHUNK = 128
"""Tokens of a chunk: compiling one takes seconds, and longer with its length."""


class Chunks(NamedTuple):
    """A sequence that is solved chunk by chunk.

    ``solve(tokens, state, start) -> (rows, state)`` solves a chunk, and ``pull(tokens, state,
    start, after, grad_rows, grad_state) -> (gradients by name, grad_state)`` pulls back through it;
    ``after``: the state after it. ``start``: how many tokens come before it.
    """

    solve: Callable[..., Any]
    pull: Callable[..., Any]
    tokens: dict[str, Any]
    """Arrays with an axis of tokens, by name, padded to whole chunks."""
    axes: dict[str, int]
    length: int

    @classmethod
    def of(cls, solve: Any, pull: Any, tokens: dict[str, tuple[Any, int]]) -> Chunks:
        """Take arrays with their axes of tokens; zeros in all must leave the state unchanged."""
        array, axis = tokens["query"]
        length = array.shape[axis]
        padded = {name: _padded(a, axis, -length % CHUNK) for name, (a, axis) in tokens.items()}
        axes = {name: axis for name, (_, axis) in tokens.items()}
        return cls(solve, pull, padded, axes, length)

    @property
    def num_chunks(self) -> int:
        return -(-self.length // CHUNK)

    def attend(self, state: Any) -> tuple[Any, Any]:
        """Return all rows and the last state."""
        rows, _ = eval_shape(self._solve, 0, state)
        shape = (*rows.shape[:-2], self.num_chunks * CHUNK, rows.shape[-1])

        def step(i: Any, carry: Any) -> Any:
            state, output = carry
            rows, state = self._solve(i, state)
            return state, lax.dynamic_update_slice_in_dim(output, rows, i * CHUNK, -2)

        start = state, jnp.zeros(shape, rows.dtype)
        state, output = lax.fori_loop(0, self.num_chunks, step, start)
        return output[..., : self.length, :], state

    def pull_back(self, state: Any, grad_output: Any, grad_state: Any) -> tuple[Any, Any]:
        """Return the gradients of the tokens by name, and the gradient of the first state."""
        group = isqrt(self.num_chunks - 1) + 1
        groups = -(-self.num_chunks // group)
        grad_output = _padded(grad_output, -2, -self.length % CHUNK)
        stored = self._states(state, 0, self.num_chunks, group, groups + 1)
        shapes, _ = eval_shape(self._pull, 0, state, state, grad_output, grad_state)
        gradients = {
            name: jnp.zeros(self.tokens[name].shape, a.dtype) for name, a in shapes.items()
        }

        def group_back(j: Any, carry: Any) -> Any:
            first = (groups - 1 - j) * group
            stop = jnp.minimum(first + group, self.num_chunks)
            states = self._states(_at(stored, groups - 1 - j), first, stop, 1, group + 1)

            def chunk_back(i: Any, carry: Any) -> Any:
                gradients, grad_state = carry
                at = stop - 1 - i
                before, after = _at(states, at - first), _at(states, at - first + 1)
                found, grad_state = self._pull(at, before, after, grad_output, grad_state)
                return {
                    n: self._updated(gradients[n], a, at, n) for n, a in found.items()
                }, grad_state

            return lax.fori_loop(0, stop - first, chunk_back, carry)

        gradients, grad_state = lax.fori_loop(0, groups, group_back, (gradients, grad_state))
        cut = {
            n: lax.slice_in_dim(a, 0, self.length, axis=self._axis(n)) for n, a in gradients.items()
        }
        return cut, grad_state

    def _states(self, state: Any, first: Any, stop: Any, stride: int, size: int) -> Any:
        """Return the states before the chunks ``first``, ``first + stride``, ... and the last."""

        def step(i: Any, carry: Any) -> Any:
            state, stored = carry
            _, state = self._solve(first + i, state)
            place = (i + stride) // stride
            stored = tree_map(
                lambda whole, new: lax.dynamic_update_index_in_dim(whole, new, place, 0),
                stored,
                state,
            )
            return state, stored

        stored = tree_map(lambda a: jnp.zeros((size, *a.shape), a.dtype).at[0].set(a), state)
        return lax.fori_loop(0, stop - first, step, (state, stored))[1]

    def _solve(self, i: Any, state: Any) -> Any:
        return self.solve(self._cut(i), state, i * CHUNK)

    def _pull(self, i: Any, state: Any, after: Any, grad_output: Any, grad_state: Any) -> Any:
        rows = lax.dynamic_slice_in_dim(grad_output, i * CHUNK, CHUNK, -2)
        return self.pull(self._cut(i), state, i * CHUNK, after, rows, grad_state)

    def _cut(self, i: Any) -> dict[str, Any]:
        return {
            name: lax.dynamic_slice_in_dim(a, i * CHUNK, CHUNK, self._axis(name))
            for name, a in self.tokens.items()
        }

    def _updated(self, whole: Any, chunk: Any, i: Any, name: str) -> Any:
        return lax.dynamic_update_slice_in_dim(whole, chunk, i * CHUNK, self._axis(name))

    def _axis(self, name: str) -> int:
        return int(self.tokens[name].ndim) + self.axes[name]


def _padded(array: Any, axis: int, count: int) -> Any:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, count)
    return jnp.pad(array, widths) if count else array


def _at(states: Any, i: Any) -> Any:
    return tree_map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), states)
