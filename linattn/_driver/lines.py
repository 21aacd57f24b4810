"""A line: one state that takes up keys in order, and the queries that read it on the way.

Every mode is *how many first keys a query reads by the map* (`Line`), *from which key on* (the line
from the end, ``reverse``), and exact pairs beside. A line takes the steps of `steps` forward here;
`linear_vjps` pulls the same steps back, from the last to the first. Decay is a matter of times: the
state has the time of the last key that it has taken up, a query its own.

`runner`, `window` and `traced` run lines; `sinks` and the pullbacks add keys by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import (
    add_block,
    block_slices,
    decay_of_rows,
    key_block,
    rows_at,
    token_block,
    total_decay,
    values_and_one_block,
)
from linattn._driver.causal_blocks import causal_block
from linattn._driver.specs import is_placed, read_spec, select_rows
from linattn._driver.steps import MIN_RUN, Step, steps_of
from linattn._generic.decay import decay_since, decay_until, fade, near_one, weighed
from linattn.typing import Array, Features, MapSpec, Opaque, Partial, Problem, State, Tokens


class Line(NamedTuple):
    """A direction in which a problem's queries read its keys by the map.

    Slices of steps are rows of the problem, also in reverse, where the last come first.
    """

    problem: Problem
    functions: BlockFunctions
    start: int
    """Position of the first key for the map."""
    reverse: bool = False
    bias: Array = None
    """``(..., 1, 1)``: log weight of all pairs, or None."""

    def steps(
        self,
        stops: NDArray[np.int64] | None,
        block_size: int,
        *,
        keys: slice | None = None,
        queries: slice | None = None,
        min_run: int = MIN_RUN,
    ) -> Iterator[Step]:
        """Yield the steps through some keys and queries, of all by default.

        ``stops``: how many of the keys each query sees, in the order of the line; None for the
        problem's own mode, full or causal.
        """
        problem = self.problem
        keys = slice(0, problem.key.shape[-2]) if keys is None else keys
        queries = slice(0, problem.query.shape[-2]) if queries is None else queries
        num_keys, num_queries = keys.stop - keys.start, queries.stop - queries.start
        min_run = 2 if is_placed(problem) else min_run
        if stops is not None:
            steps = steps_of(stops, num_keys, block_size, min_run=min_run)
        elif problem.sees.ahead:
            none = slice(num_keys, num_keys)
            adding = (Step(rows, slice(0, 0)) for rows in block_slices(num_keys, block_size))
            reading = (Step(none, rows) for rows in block_slices(num_queries, block_size))
            steps = chain(adding, reading)
        else:
            steps = (Step(rows, rows) for rows in block_slices(num_keys, block_size))
        for step in steps:
            of = self._place(step.keys, keys), self._place(step.queries, queries)
            yield step._replace(keys=of[0], queries=of[1])

    def _place(self, part: slice, whole: slice) -> slice:
        """Return the rows of the problem of a part of some rows, in the order of the line."""
        if self.reverse:
            return slice(whole.stop - part.stop, whole.stop - part.start)
        return slice(whole.start + part.start, whole.start + part.stop)

    # Forward

    def add(self, keys: slice, state: State) -> State:
        """Add keys and their values to a state. O(n m (d + e)) time."""
        tokens, state = self.keys_at_end(keys), self.faded(keys, state)
        return add_block(self.problem, keys, tokens, state, self.functions)

    def add_all(self, keys: slice, state: State, block_size: int) -> State:
        """Add keys block by block."""
        for part in block_slices(keys.stop - keys.start, block_size):
            state = self.add(self._place(part, keys), state)
        return state

    def take(self, step: Step, state: State) -> tuple[Partial | None, State]:
        """Take a step: the sums of its queries, None without any, and the state after it."""
        if not step.num_queries:
            return None, self.add(step.keys, state)
        part, after = self.scan(step, state) if step.num_keys else (self.read(step, state), state)
        log = self.log_weight(step)
        if log is not None:
            log = self.problem.xp.astype(log, self.problem.dtype, copy=False)
            if self.bias is None:
                part = Partial(part.num_den, part.log + log)
            else:
                part = weighed_rows(part, log)
        return part, after

    def read(self, step: Step, state: State) -> Partial:
        """Read the state with queries, before any decay since its last key."""
        problem, query = self.problem, token_block(self.problem, "query", step.queries, self.start)
        spec, seen = read_spec(problem, state)
        if problem.weights.log_decay is None:
            part = self.functions.read_block(spec, query, seen, problem.want_log)
            return select_rows(problem, part)
        seen, top = near_one(seen)
        part = self.functions.read_block(spec, query, seen, problem.want_log)
        return Partial(part.num_den, part.log + top)

    def scan(self, step: Step, state: State) -> tuple[Partial, State]:
        """Compute the causal block of a step; rows may decay further than its keys."""
        problem = self.in_order()
        part, after = causal_block(problem, self.functions, *self.block(step), state)
        part = step.queries_of_part(part)
        if self.reverse:
            part = Partial(flip(part.num_den), flip(part.log))
        return part, State(after.kvz, after.log_scale, state.length + step.num_keys)

    # What a step is given

    def in_order(self) -> Problem:
        """Return the problem with specs that take tokens in the order of the line."""
        if not self.reverse:
            return self.problem
        names = ("query_spec", "key_spec")
        return self.problem.replace(
            **{name: _from_the_end(getattr(self.problem, name)) for name in names}
        )

    def block(self, step: Step) -> tuple[Tokens, Tokens, Array]:
        """Return queries, keys and ``[v, 1]`` of a causal block, at their positions."""
        query = token_block(self.problem, "query", step.queries, self.start)
        key = key_block(self.problem, step.keys, self.start)
        values = values_and_one_block(self.problem, step.keys)
        if self.reverse:
            query, key, values = _turned(query), _turned(key), flip(values)
        key, values = step.place_keys(key, values)
        return query.each(step.place_queries), key, values

    def keys_at_end(self, keys: slice) -> Tokens:
        """Return keys as they have decayed when the last of them has been added."""
        tokens = token_block(self.problem, "key", keys, self.start)
        if self.problem.weights.log_decay is None:
            return tokens
        decay = decay_of_rows(self.problem, keys)
        if self.reverse:
            return weighed(tokens, decay_since(decay) - decay[..., :1, :])
        return weighed(tokens, decay_until(decay))

    def faded(self, keys: slice, state: State) -> State:
        """Return a state, or an adjoint, decayed over the time of some keys.

        In the line from the end all tokens of a head have one decay.
        """
        if self.problem.weights.log_decay is None:
            return state
        return fade(state, total_decay(self.problem, keys)[..., None])

    def log_weight(self, step: Step) -> Array:
        """Log weight to add to what rows of a step read, ``(..., n, 1)``, or None for 0."""
        decay = self.elapsed(step)
        if decay is None or self.bias is None:
            return self.bias if decay is None else decay
        return decay + self.bias

    def elapsed(self, step: Step) -> Array:
        """Log decay between a query and the last key in what it reads; None where all are 0."""
        if self.problem.weights.log_decay is None:
            return None
        place = np.arange(step.queries.start, step.queries.stop) + self.problem.sees.query_start
        if self.reverse:
            key = step.keys.stop - step.num_seen[::-1]
        else:
            key = step.keys.start - 1 + step.num_seen
        key = np.minimum(key, self.problem.key.shape[-2] - 1)
        if not len(key) or (key == place).all():
            return None
        early, late = np.minimum(key, place), np.maximum(key, place)
        first = int(early.min())
        decay = decay_of_rows(self.problem, slice(first + 1, int(late.max()) + 1))
        clock = self.problem.xp.cumulative_sum(decay, axis=-2, include_initial=True)
        return rows_at(clock, late - first) - rows_at(clock, early - first)


def weighed_rows(part: Partial, log: Array) -> Partial:
    """Add log weights to rows; one of -inf leaves nothing of a row, not even NaN."""
    xp, is_nothing = _arrays.namespace(part.num_den), log == -float("inf")
    num_den = xp.where(is_nothing, xp.zeros_like(part.num_den), part.num_den)
    return Partial(num_den, xp.where(is_nothing, log, part.log + log))


# In the order from the end ------------------------------------------------------------------------


def flip(x: Array) -> Array:
    """Reverse the order of tokens, in memory too; None stays None."""
    if x is None:
        return None
    xp = _arrays.namespace(x)
    # asarray(copy=True) leaves the tape of older versions of PyTorch, and warns in newer ones.
    return xp.concat([xp.flip(x, axis=-2)], axis=-2)


def _turned(tokens: Tokens) -> Tokens:
    """Tokens in reverse order; ``start`` is minus the position after the last of them."""
    end, decay = tokens.start + tokens.x.shape[-2], tokens.log_decay
    if decay is not None:
        # A view, by which a backend sees one decay for all tokens.
        decay = _arrays.namespace(decay).flip(decay, axis=-2)
    return Tokens(flip(tokens.x), flip(tokens.log_weight), -end, decay)


def _from_the_end(spec: MapSpec) -> MapSpec:
    """Spec of turned tokens: a function may depend on the position of a token."""
    if not isinstance(spec, Opaque):
        return spec

    def again(tokens: Tokens) -> Tokens:
        start = -tokens.start - tokens.x.shape[-2]
        return Tokens(flip(tokens.x), flip(tokens.log_weight), start)

    def features(tokens: Tokens) -> Features:
        return Features(*map(flip, spec.fn(again(tokens))))

    def vjp(tokens: Tokens, cotangent: Features) -> Array:
        assert spec.vjp is not None
        return flip(spec.vjp(again(tokens), Features(*map(flip, cotangent))))

    return Opaque(features, None if spec.vjp is None else vjp)
