"""Full attention that decays with distance: a causal scan, and one from the end without itself.

Both give rows on scales of their own, combined by their logs: nothing is subtracted. What the first
scan has read is held for all rows, ``(..., L, e + 2)`` in the accumulation dtype. In the second
each query goes along with the key after it, which is one step of decay away.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from linattn import _arrays, _generic
from linattn._driver.blocks import OutputRows, block_slices, token_block, values_and_one_block
from linattn._driver.causal_blocks import causal_block
from linattn._driver.decay import key_block
from linattn._driver.modifiers import decay_of_rows
from linattn.typing import Array, Features, MapSpec, Opaque, Partial, Problem, State, Tokens

__all__ = ["RowsSoFar", "rows_from_the_end"]


class RowsSoFar:
    """What all rows have read so far."""

    def __init__(self, problem: Problem, functions: Any) -> None:
        self._xp = problem.xp
        width = problem.value.shape[-1] + 1
        self._num_den = OutputRows(problem, width, problem.dtype, functions)
        self._log = OutputRows(problem, 1, problem.dtype, functions)

    def write(self, rows: slice, part: Partial) -> None:
        self._num_den.write((), rows, part.num_den)
        log = self._xp.broadcast_to(part.log, (*part.num_den.shape[:-1], 1))
        self._log.write((), rows, log)

    def result(self) -> Partial:
        return Partial(self._num_den.result(), self._log.result())


def rows_from_the_end(
    problem: Problem, functions: Any, block_size: int, state: State, before: Partial
) -> Iterator[tuple[slice, Partial]]:
    """Add to what rows have read what they read of the tokens after them, last block first.

    ``state``: that of no tokens.
    """
    length, start = problem.query.shape[-2], 0 if problem.state is None else problem.state.length
    last = slice(max(length - 1, 0), length)
    yield last, Partial(before.num_den[..., last, :], before.log[..., last, :])
    step = problem.xp.astype(decay_of_rows(problem, slice(0, 1)), problem.dtype)
    specs = {name: _from_the_end(getattr(problem, name)) for name in ("query_spec", "key_spec")}
    turned = problem.replace(**specs)
    for rows in reversed(list(block_slices(length - 1, block_size))):
        keys = slice(rows.start + 1, rows.stop + 1)
        after, state = causal_block(
            turned,
            functions,
            _turned(token_block(problem, "query", rows, start)),
            _turned(key_block(problem, keys, start)),
            flip(values_and_one_block(problem, keys)),
            state,
        )
        after = Partial(flip(after.num_den), flip(after.log) + step)
        seen = Partial(before.num_den[..., rows, :], before.log[..., rows, :])
        yield rows, _generic.combine(seen, after)


def _turned(tokens: Tokens) -> Tokens:
    """Tokens in reverse order; they start at the end of them, counted below 0."""
    end, decay = tokens.start + tokens.x.shape[-2], tokens.log_decay
    if decay is not None:
        # A view, by which a backend sees one decay for all tokens.
        decay = _arrays.namespace(decay).flip(decay, axis=-2)
    return Tokens(flip(tokens.x), flip(tokens.log_weight), -end, decay)


def _from_the_end(spec: MapSpec) -> MapSpec:
    """Spec of turned tokens: a function may ask where a token stands."""
    if not isinstance(spec, Opaque):
        return spec

    def features(tokens: Tokens) -> Features:
        start = -tokens.start - tokens.x.shape[-2]
        found = spec.fn(Tokens(flip(tokens.x), flip(tokens.log_weight), start))
        return Features(flip(found.log), flip(found.values))

    return Opaque(features)


def flip(x: Array) -> Array:
    """Reverse the order of tokens, in memory too; None stays None."""
    if x is None:
        return None
    xp = _arrays.namespace(x)
    # asarray(copy=True) leaves the tape of older versions of PyTorch, and warns in newer ones.
    return xp.concat([xp.flip(x, axis=-2)], axis=-2)
