"""Attention over arrays that do not fit into memory: blocks are read, attended to and written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from linattn import _checks
from linattn._files import Path
from linattn.stream._inputs import Inputs
from linattn.stream._run import Run, run
from linattn.typing import Array, FeatureMap, State

__all__ = ["attend"]


def attend(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    feature_map: FeatureMap,
    *,
    is_causal: bool = False,
    block_size: int = 65536,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60.0,
    progress: Callable[[int, int], None] | None = None,
    key_mask: Any = None,
    key_bias: Any = None,
    log_decay: Array | float | None = None,
    initial_state: State | None = None,
    exact_window: int | None = None,
) -> State:
    r"""Linear attention from arrays on disk to an array on disk, a block of rows at a time.

    The equation is the one of :func:`linattn.linear_attention`. Letters: ``L`` queries, ``S`` keys,
    ``d`` dim, ``m`` features, ``e`` value dim, ``c`` rows a block, ``n`` blocks, ``...`` leading
    axes, which broadcast.

    Parameters
    ----------
    query, key, value : sliceable, (..., L, d), (..., S, d), (..., S, e)
        Whatever has a ``shape``, a ``dtype`` and rows that ``[..., start:stop, :]`` returns:
        ``numpy.memmap`` (``numpy.load(mmap_mode="r")``), arrays of zarr and h5py, or arrays in
        memory. float16, float32 or float64.
    out : sliceable, (..., L, e)
        Where results are written, in the dtype of the query. In an array of chunks (zarr, h5py)
        whole chunks are written.
    feature_map : FeatureMap
        As for :func:`linattn.linear_attention`. One that is fitted must have been before: to a
        sample of the rows.
    is_causal : bool, optional
        Query i sees keys 0..i only; needs L = S. Default False: two passes, over keys and values,
        then over queries.
    block_size : int, optional
        c, rows of a block; rounded up to whole chunks of ``out``. Default 65536.
    checkpoint : str, bytes or path-like, optional
        File that holds state, position and checksums while the run goes on. A run that finds it
        goes on from there, with ``out`` as it was left (mode "r+"), after it has read again all
        rows that were read and written before and found them unchanged. The file is replaced in
        one step every ``checkpoint_seconds`` and after an error or an interrupt, and removed at
        the end. Default: none.
    checkpoint_seconds : float, optional
        Default 60.
    progress : callable, optional
        ``progress(done, total)`` is called after every block, with rows read: of keys, and in
        full attention of queries too. Default: none.
    key_mask : boolean, (S,) or key.shape[:-1] with axes of 1, optional
        True = attend; an array or sliceable along its last axis, as is the next. Masked keys keep
        their positions: `log_decay` acts there too.
    key_bias : floating, of the shapes that a mask may have, optional
        Log weight of each key. Default 0.
    log_decay : float or floating array, key.shape[:-2] or key.shape[:-1] with axes of 1, optional
        What the state decays by before each token, at most 0; causal only. Default 0. Positions
        behind a mask still decay the state: ``np.where(mask, g, 0)`` leaves it unchanged.
    initial_state : State, optional
        Keys seen before these. Default: none.
    exact_window : int, optional
        w: near keys count exactly, as in :func:`linattn.linear_attention`. Default: no window.

    Returns
    -------
    State
        The state after the last key, as ``linear_attention(..., return_state=True)`` returns it.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.linear_attention`; an ``out`` of another shape or dtype, or not writable;
        an ``out`` that overlaps an input in memory, in a file or in a store; a ``checkpoint`` that
        is the file of an array; ``log_decay`` that is not causal. Nothing has been written then.
    StateFileError
        The checkpoint is damaged, or of another call; an input has changed in rows that were read
        before; ``out`` has lost its rows.
    OSError
        A file cannot be read or written, or the disk is full. Space for a memory-mapped ``out`` is
        reserved first.

    Warns
    -----
    UserWarning
        As :func:`linattn.linear_attention`, for a block; a checkpoint that was begun with another
        number of threads, or other kernels, so that last bits may differ.

    See Also
    --------
    linattn.linear_attention : the same in memory.

    Notes
    -----
    The output equals the output of one call in memory, to rounding. A run that was killed, at any
    moment and any number of times, ends in the same bits as one that was not, with the same
    versions, number of threads and kernels. Options of :func:`linattn.linear_attention` that are
    missing here cannot be served a block at a time, or are shapes of a mask.

    Time as in memory. With a checkpoint each row has a CRC-32 as well, one pass over all bytes that
    are read and written: about a sixth of the time of one thread for 256 features, less for more.
    Resuming takes one more pass over the rows of the earlier runs. A window reads keys twice when
    causal and up to four times else. Memory: a block of each array, ``(2 d + 2 e) c`` numbers a
    head, the state, and with a window that is not causal ``64 + n / 64`` states. Pages of memory
    maps are released after each block; the operating system caches them as long as it likes.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 8, 1000, 64), dtype=np.float32)  # or numpy.memmap
    >>> out = np.empty_like(v)
    >>> phi = linattn.feature_maps.PositiveFeatures(64, num_features=256, rng=0)
    >>> linattn.stream.attend(q, k, v, out, phi, is_causal=True, block_size=300).length
    1000
    >>> whole = linattn.linear_attention(q, k, v, phi, is_causal=True)
    >>> bool(np.allclose(out, whole, rtol=1e-4, atol=1e-5))
    True
    """
    is_causal = _checks.check_flag("is_causal", is_causal)
    block_size = _checks.check_positive_int("block_size", block_size)
    seconds = _checks.check_finite_number("checkpoint_seconds", checkpoint_seconds)
    weights = {"key_mask": key_mask, "key_bias": key_bias, "log_decay": log_decay}
    given = {name: weight for name, weight in weights.items() if weight is not None}
    inputs = Inputs(query, key, value, feature_map, given, is_causal, exact_window)
    return run(inputs, out, initial_state, Run(block_size, checkpoint, seconds, progress))
