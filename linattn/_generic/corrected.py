"""Reads of a least-squares correction of the state, with a guard on every query."""

from __future__ import annotations

from math import log

from linattn._arrays import namespace
from linattn._numerics import LEAST, finite_shift, rescaled
from linattn.typing import Corrected, Partial, State
from linattn.typing._shifts import largest

LARGEST_RATIO = 2
"""Largest ratio, either way, of the corrected denominator to the uncorrected one."""

LARGEST_CANCELLATION = 4
"""Largest sum of absolute terms of the corrected denominator, relative to their sum."""


def widen_state(spec: Corrected, state: State) -> State:
    """Return a state that one read turns into both corrected and uncorrected sums.

    Columns of values: the corrected ``[v, 1]``, the absolute value of its last, the uncorrected
    ``[v, 1]``. Log scales are taken from the uncorrected sums. If a corrected sum is far larger,
    its log scale less a margin is taken, so that both stay in range. O(m (m + p) e) time.
    """
    xp = namespace(state.kvz)
    m = spec.half_log.shape[-1]
    scaled = xp.concat(
        [state.log_scale[..., :m] + spec.half_log, state.log_scale[..., m:]], axis=-1
    )
    shift = finite_shift(largest(scaled, keepdims=True), xp)
    corrected = xp.matmul(spec.matrix, rescaled(state.kvz, scaled - shift, LEAST))
    top = shift - spec.half_log
    margin = log(float(xp.finfo(state.kvz.dtype).max)) / 2
    log_scale = xp.maximum(state.log_scale[..., :m], top - margin)
    corrected = corrected * xp.exp(top - log_scale)[..., None]
    uncorrected = state.kvz[..., :m, :] * xp.exp(state.log_scale[..., :m] - log_scale)[..., None]
    kvz = xp.concat([corrected, xp.abs(corrected[..., -1:]), uncorrected], axis=-1)
    return State(kvz, log_scale, state.length)


def guard(part: Partial) -> Partial:
    """Return for each query its corrected sums if they can be trusted, else the uncorrected."""
    xp = namespace(part.num_den)
    width = (part.num_den.shape[-1] - 1) // 2
    corrected, uncorrected = part.num_den[..., :width], part.num_den[..., width + 1 :]
    d1, d0, size = corrected[..., -1:], uncorrected[..., -1:], part.num_den[..., width : width + 1]
    near = (LARGEST_RATIO * d1 > d0) & (d1 < LARGEST_RATIO * d0)
    # Where the correction overflowed or is NaN, both comparisons are False.
    trusted = near & (size < LARGEST_CANCELLATION * d1)
    return Partial(xp.where(trusted, corrected, uncorrected), part.log)
