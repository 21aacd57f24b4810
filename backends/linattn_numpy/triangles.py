"""Causal attention sums of a tile by sub-blocks.

One product computes the triangles, the causal sums within each sub-block, of all sub-blocks. The
states between sub-blocks are added one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from linattn_numpy.borders import Border
from linattn_numpy.buffers import Floats, buffer
from linattn_numpy.decay import Decay, WeakDecay
from linattn_numpy.limits import rescale, rounded
from linattn_numpy.products import broadcast_lead, sum_products, transposed, weighted
from linattn_numpy.tiles import lower, moveaxis, split_tiles


class Triangles:
    """Compute ``out_i = q_i (kvz + sum_(j<=i) k_j v_j)`` for successive tiles of one shape.

    ``q``, ``k``: buffers ``(..., h, n, m / h)``; the caller writes the features of each tile into
    them and then calls `add`. h is 2 for features in two sign halves, which are stored apart, and
    1 otherwise. ``lead``: leading axes of values; ``kvz``: the state before the first tile,
    ``(..., m, e)``, which is copied; ``size``: rows of a sub-block; ``least``: smallest product
    of a query and a key, and number of a rescaled state, that is not 0.
    """

    lead: tuple[int, ...]
    """Leading axes of the sums."""

    def __init__(
        self, q: Floats, k: Floats, lead: tuple[int, ...], kvz: Floats, size: int, least: float = 0
    ) -> None:
        (h, n, r), e, dtype, self._least = q.shape[-3:], kvz.shape[-1], kvz.dtype, least
        count = n // size
        self._shape = count, size
        self._q, self._k = (x.reshape(*x.shape[:-2], count, size, r) for x in (q, k))
        heads = broadcast_lead(q.shape[:-3], k.shape[:-3])
        self._scores = buffer("scores", (*heads, h, count, size, size), dtype)
        self._parts = list(moveaxis(self._scores, -4, 0))
        self._visible = lower(size, dtype)
        # Sub-blocks come first: one state is added to the next as a row of numbers.
        lead = broadcast_lead(k.shape[:-3], lead, kvz.shape[:-2])
        states = buffer("states", (count + 1, *lead, h * r, e), dtype)
        by_head = list(states.reshape(count + 1, *lead, h * r * e))
        self._steps, self._states = list(pairwise(by_head)), states
        self._faded = buffer("faded", by_head[0].shape, dtype)
        halves = moveaxis(states.reshape(count + 1, *lead, h, r, e), 0, -3)
        self._before, self._added = halves[..., :count, :, :], halves[..., 1:, :, :]
        states[0] = kvz
        self.lead = broadcast_lead(lead, q.shape[:-3])
        self._reads = buffer("more", (*self.lead, h, count, size, e), dtype)
        self._read_parts = list(moveaxis(self._reads, -4, 0))

    def split(self, x: Floats) -> Floats:
        """Divide rows into tiles ``(..., n / size, size, .)`` along a new first axis, for `add`."""
        return split_tiles(x, *self._shape)

    def add(
        self,
        v: Floats,
        out: Floats,
        decay: Decay | WeakDecay | None = None,
        rises: Sequence[Floats | None] = (),
        borders: Sequence[Border] = (),
    ) -> list[Floats]:
        """Write the sums of a tile with values ``v`` to ``out``; the state moves to the tile's end.

        ``v``, ``out``: ``(..., n / size, size, e)``. ``decay``: factors of keys and states.
        ``borders``: sub-blocks in which sequences begin; they overwrite keys in ``k`` by 0.
        ``rises``: one factor for the state after each sub-block but the last, None for 1; it
        changes the state's scale. Returns these states before the factors are applied.
        """
        unscaled: list[Floats] = []
        first, *rest = self._parts
        np.matmul(self._q, transposed(self._k), out=self._scores)
        for part in rest:
            np.add(first, part, out=first)
        early = decay if isinstance(decay, Decay) else None
        late = decay if isinstance(decay, WeakDecay) else None
        np.multiply(first, self._visible if early is None else early.pairs, out=first)
        for place, _, _, pairs in borders:
            first[..., place, :, :] *= pairs
        if least := self._least or (early.least if early else 0):
            rounded(first, least)
        np.matmul(first, v, out=out)
        for border in borders:
            self._k[..., border.place, : border.last, :] = 0
        if early is not None:
            v = weighted(v, early.keys, "decayed_values")
            if least:
                rounded(v, least)
        sum_products(self._k, v[..., None, :, :, :], self._added)
        ends = {border.place for border in borders}
        for i, (before, after) in enumerate(self._steps):
            if early is not None:
                before = np.multiply(before, early.states[i], out=self._faded)
            if i not in ends:
                np.add(before, after, out=after)
            if early is not None and self._least:
                after[np.abs(after) < self._least] = 0
            if late is not None:
                np.multiply(after, late.states[i], out=after)
            if i < len(rises):
                state, factor = self._states[i + 1], rises[i]
                unscaled.append(state if factor is None else state.copy())
                if factor is not None:
                    rescale(state, factor, self._least)
        np.matmul(self._q, self._before, out=self._reads)
        for border in borders:
            self._reads[..., border.place, border.first :, :] = 0
        for read in self._read_parts:
            if early is not None:
                np.multiply(read, early.rows, out=read)
            np.add(out, read, out=out)
        # Where the next tile begins.
        self._states[0] = self._states[-1]
        return unscaled

    def state(self) -> Floats:
        """Return a copy of the state after the last tile, ``(..., m, e)``."""
        return np.array(self._states[0])
