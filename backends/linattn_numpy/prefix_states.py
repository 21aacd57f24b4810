"""Prefix scan over the states of blocks: all that is far of each block of an exact window."""

from __future__ import annotations

import numpy as np

from linattn.typing import State
from linattn_numpy import limits
from linattn_numpy.buffers import Floats
from linattn_numpy.causal_scales import running_scales

__all__ = ["far_states"]


def far_states(
    before: State, states: State, after: State | None, lazy: bool
) -> tuple[State, State]:
    """Add up the far blocks before and behind each block."""
    ends = [before] if after is None else [before, after]
    g = states.log_scale.shape[-2] - len(ends)
    top = np.max([*(end.log_scale for end in ends), states.log_scale.max(axis=-2)], axis=0)
    front = _prefixes(before, states.kvz[..., :g, :, :], states.log_scale[..., :g, :], top)
    kvz, c = front.kvz[..., :g, :, :], front.log_scale[..., :g, :]
    last = State(front.kvz[..., g, :, :].copy(), front.log_scale[..., g, :], 0)
    if after is not None:
        following = states.kvz[..., :2:-1, :, :], states.log_scale[..., :2:-1, :]
        behind = _prefixes(after, *following, top)
        kvz_behind, c_behind = behind.kvz[..., ::-1, :, :], behind.log_scale[..., ::-1, :]
        both = np.maximum(c, c_behind)
        for sums, log in ((kvz, c), (kvz_behind, c_behind)):
            # Where there are no keys, there is nothing to put on another scale.
            if ((log != both) & (log > -np.inf)).any():
                sums *= limits.exp(log - limits.finite_shift(both))[..., None]
        kvz += kvz_behind
        c = both
    return State(kvz, c, 0), last


def _prefixes(first: State, kvz: Floats, log: Floats, top: Floats) -> State:
    """Add to a state none of the blocks, the first, the first two and so on, to all.

    A feature of each sum is on the largest log scale so far, or on ``top`` where that is near.
    """
    log = np.concatenate([first.log_scale[..., None, :], log], axis=-2)
    c, shift, rises = running_scales(log, top[..., None, :])
    shares = limits.exp(log - shift)[..., None]
    lead = np.broadcast_shapes(first.kvz.shape[:-2], kvz.shape[:-3])
    sums = np.empty((*lead, log.shape[-2], *kvz.shape[-2:]), kvz.dtype)
    np.multiply(first.kvz, shares[..., 0, :, :], out=sums[..., 0, :, :])
    np.multiply(kvz, shares[..., 1:, :, :], out=sums[..., 1:, :, :])
    # A loop: np.cumsum does not add whole states at once.
    for i, factor in enumerate(rises):
        so_far = sums[..., i, :, :]
        sums[..., i + 1, :, :] += so_far if factor is None else so_far * factor
    return State(sums, c, 0)
