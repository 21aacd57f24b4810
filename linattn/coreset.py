"""Causal softmax attention of a stream with a bounded state and nothing to fit beforehand.

The last two blocks of keys are exact. Older keys are merged into weighted centroids: after each
block the centroids and the block before it are clustered again, in the metric and around the mean
of the queries so far.

Shape letters: ``H`` heads (all leading axes as one), ``B`` tokens a block, ``n`` entries, ``m``
entries kept, ``r`` rows, ``d`` dim, ``e`` value dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from types import ModuleType
from typing import NamedTuple, Self

import array_api_compat
import numpy as np

from linattn import _arrays, _checks, _generic
from linattn._driver.blocks import Rows, token_block, values_and_one_block
from linattn._driver.problem import exact_problem
from linattn._generic.states import divide
from linattn.files import Arrays, Members, Path, read_arrays, write_arrays
from linattn.sampling import Seed, as_generator
from linattn.typing import Array, Partial, Problem

__all__ = ["CoresetAttention"]

JITTER = 1e-6
"""Added to the covariance of the queries, times their mean variance over the axes."""

FORMAT_VERSION = 1
ARRAYS = (
    "old_key",
    "old_log",
    "old_v1",
    "new_key",
    "new_log",
    "new_v1",
    "new_query",
    "count",
    "mean",
    "scatter",
)
"""Arrays of a file, with the leading axes of the stream, in the order of :func:`_arrays_of`."""
MEMBERS: Members = {
    "format_version": ("i", 0),
    "num_entries": ("i", 0),
    "block_size": ("i", 0),
    "scale": ("f", 0),
    "seed": ("i", 0),
    "length": ("i", 0),
} | {name: ("f", None) for name in ARRAYS}


class _Entries(NamedTuple):
    """Weighted keys: ``exp(q.key + log)`` is what a query gives to ``values_and_one``."""

    key: Array
    """(H, n, d)"""
    log: Array
    """(H, n), -inf for an entry that stands for nothing"""
    values_and_one: Array
    """(H, n, e + 1): values, and 1"""


class _Moments(NamedTuple):
    """Mean and scatter (sum of outer products about the mean) of the queries of whole blocks."""

    count: Array
    """(H, 1, 1)"""
    mean: Array
    """(H, 1, d)"""
    scatter: Array
    """(H, d, d)"""


class _Stream(NamedTuple):
    """All that is remembered; no array of it is ever written to."""

    lead: tuple[int, ...]
    old: _Entries
    """Older entries, at most m, then the keys of the previous block."""
    new: _Entries
    """Keys of the current block."""
    query: Array
    """(H, r, d): queries of the current block, times the scale; NaN where they do not count."""
    moments: _Moments
    length: int


# The method ---------------------------------------------------------------------------------------


def _read(query: Array, old: _Entries, new: _Entries, xp: ModuleType, lazy: bool) -> Partial:
    """Softmax over all old entries and, causally, the new: the last row sees all of the new.

    Each row has a scale of its own, and later values meet no weight at all, not even 0: nothing
    of a later token reaches a row.
    """
    rows, seen = query.shape[1], new.key.shape[1]
    index = xp.arange(seen, device=array_api_compat.device(query))
    live = new.log > -xp.inf
    visible = index[None, :] <= index[seen - rows :, None]
    near = xp.matmul(query, xp.matrix_transpose(new.key))
    none = xp.full_like(near[:, :1, :1], -float("inf"))
    near = xp.where(visible & live[:, None, :], near, none)
    top = xp.max(near, axis=-1, keepdims=True)
    number = xp.cumulative_sum(xp.astype(live, query.dtype), axis=-1)[:, seen - rows :, None]
    far = None
    if old.key.shape[1]:
        # The log masses as one more coordinate, which every query has as 1.
        query1 = xp.concat([query, xp.ones_like(query[..., :1])], axis=-1)
        key1 = xp.concat([old.key, old.log[..., None]], axis=-1)
        far = xp.matmul(query1, xp.matrix_transpose(key1))
        top = xp.maximum(top, xp.max(far, axis=-1, keepdims=True))
        number += xp.astype(xp.max(old.log, axis=-1) > -xp.inf, query.dtype)[:, None, None]
    # A row that sees no key is 0; one whose logits all overflow to -inf is NaN.
    shift = xp.where(number == 0, xp.zeros_like(top), top)
    num_den = _visible_product(xp.exp(_lowered(near, shift)), new.values_and_one, visible, xp, lazy)
    if far is not None:
        num_den += xp.matmul(xp.exp(_lowered(far, shift)), old.values_and_one)
    return Partial(num_den, top)


def _lowered(x: Array, shift: Array) -> Array:
    """Subtract a shift in place, unless a gradient tape holds what was there."""
    if getattr(x, "requires_grad", False):
        return x - shift
    # At these sizes a fresh array costs more than what is done to it.
    x -= shift
    return x


def _visible_product(
    weights: Array, values_and_one: Array, visible: Array, xp: ModuleType, lazy: bool
) -> Array:
    """``weights @ values_and_one``, where a weight of 0 of an invisible key silences even a NaN."""
    finite = xp.isfinite(values_and_one)
    if not lazy and bool(xp.all(finite)):
        return xp.matmul(weights, values_and_one)
    not_finite = (
        xp.matmul(
            xp.astype(visible, values_and_one.dtype), xp.astype(~finite, values_and_one.dtype)
        )
        > 0
    )
    num_den = xp.matmul(weights, xp.where(finite, values_and_one, xp.zeros_like(values_and_one)))
    return xp.where(not_finite, xp.full_like(num_den, float("nan")), num_den)


def _add_queries(moments: _Moments, query: Array, xp: ModuleType) -> _Moments:
    """Moments after one more block; queries whose square is not finite do not count."""
    good = xp.isfinite(xp.vecdot(query, query))[..., None]
    query = xp.where(good, query, xp.zeros_like(query[:, :1, :1]))
    good = xp.astype(good, query.dtype)
    row = xp.matrix_transpose(good)
    count = xp.matmul(row, good)
    mean = xp.matmul(row, query) / xp.maximum(count, xp.ones_like(count))
    centred = (query - mean) * good
    total = moments.count + count
    share = count / xp.maximum(total, xp.ones_like(total))
    change = mean - moments.mean
    scatter = moments.scatter + xp.matmul(xp.matrix_transpose(centred), centred)
    scatter = scatter + (moments.count * share * xp.matrix_transpose(change)) * change
    return _Moments(total, moments.mean + share * change, scatter)


def _half_covariance(moments: _Moments, xp: ModuleType) -> Array:
    """Half the covariance of the queries, ``(H, d, d)``, never singular."""
    heads, _, d = moments.mean.shape
    half = moments.scatter / (2 * xp.maximum(moments.count, xp.ones_like(moments.count)))
    eye = xp.eye(d, dtype=half.dtype, device=array_api_compat.device(half))
    trace = xp.matmul(xp.reshape(half, (heads, 1, d * d)), xp.reshape(eye, (d * d, 1)))
    spread = xp.where(trace > 0, trace / d, xp.ones_like(trace))
    return half + (JITTER * spread) * eye


def _rows(x: Array, index: Array, xp: ModuleType) -> Array:
    """Rows ``(H, n, w)`` of ``(H, m, w)`` at an index ``(H, n)``."""
    heads, m, width = x.shape
    start = xp.arange(heads, dtype=index.dtype, device=array_api_compat.device(x)) * m
    flat = xp.reshape(index + start[:, None], (-1,))
    taken = xp.take(xp.reshape(x, (heads * m, width)), flat, axis=0)
    return xp.reshape(taken, (heads, index.shape[1], width))


def _nearest(x1: Array, b: Array, metric: Array, xp: ModuleType) -> Array:
    """Index of the nearest centroid of each key by ``(x - b).metric (x - b)``, ``(H, n)``."""
    image = xp.matmul(b, metric)
    height = xp.vecdot(b, image)[..., None] / 2
    image1 = xp.concat([image, -height], axis=-1)
    return xp.argmax(xp.matmul(x1, xp.matrix_transpose(image1)), axis=-1)


def _membership(assigned: Array, m: int, like: Array, xp: ModuleType) -> Array:
    """1 where entry j is in cluster c, else 0: ``(H, m, n)``."""
    # Compared in the floating dtype, which is narrower than an index and exact up to 2^24.
    columns = xp.arange(m, dtype=like.dtype, device=array_api_compat.device(like))
    members = xp.astype(assigned, like.dtype)[:, None, :] == columns[:, None]
    return xp.astype(members, like.dtype)


def _sums(
    log: Array, x1: Array, assigned: Array, members: Array, xp: ModuleType, lazy: bool
) -> tuple[Array, Array]:
    """Sum ``exp(log_j) x1_j`` over each cluster; the sums are ``sums * exp(top)``: (sums, top)."""
    top = _generic.finite_shift(xp.max(log, axis=-1, keepdims=True), xp)
    floor = top + float(np.log(xp.finfo(log.dtype).smallest_normal)) / 2
    if not lazy and bool(xp.all((log > floor) | (log == -xp.inf))):
        return xp.matmul(members, xp.exp(log - top)[..., None] * x1), top[..., None]
    # One scale would lose whole clusters to underflow.
    none = xp.full_like(top, -float("inf"))[..., None]
    top = xp.max(xp.where(members > 0, log[:, None, :], none), axis=-1, keepdims=True)
    top = _generic.finite_shift(top, xp)
    weights = xp.exp(log[..., None] - _rows(top, assigned, xp))
    return xp.matmul(members, weights * x1), top


def _reduce(
    entries: _Entries, moments: _Moments, noise: Array, m: int, xp: ModuleType, lazy: bool
) -> _Entries:
    """Replace ``n > m`` entries by m weighted centroids."""
    d = entries.key.shape[-1]
    half = _half_covariance(moments, xp)
    live = xp.astype(entries.log > -xp.inf, entries.key.dtype)[:, None, :]
    number = xp.sum(live, axis=-1, keepdims=True)
    centre = xp.matmul(live, entries.key) / xp.maximum(number, xp.ones_like(number))
    x = entries.key - centre
    log_w = (entries.log + xp.vecdot(x, moments.mean + xp.matmul(x, half)))[..., None] / 2

    order = xp.argsort(-(log_w[..., 0] + noise), axis=-1)
    table = xp.concat([x, xp.ones_like(log_w), log_w], axis=-1)
    x1, ordered = table[..., :-1], _rows(table, order, xp)
    b1, b_log = ordered[:, :m, :-1], ordered[:, :m, -1:]
    other1, other_log = ordered[:, m:, :-1], ordered[:, m:, -1:]
    # First step: each landmark is its own, so only the others are compared. Their weights
    # relative to their landmark's are bounded by the noise. A landmark that stands for nothing
    # does no harm: there is one only where all that stand for something are landmarks too.
    assigned = _nearest(other1, b1[..., :d], half, xp)
    weights = xp.exp(other_log - _rows(_generic.finite_shift(b_log, xp), assigned, xp))
    sums = b1 + xp.matmul(_membership(assigned, m, x, xp), weights * other1)
    b = sums[..., :d] / sums[..., d:]

    assigned = _nearest(x1, b, half, xp)
    members = _membership(assigned, m, x, xp)
    sums, _ = _sums(log_w[..., 0], x1, assigned, members, xp, lazy)
    total = sums[..., d:]
    # Where an empty cluster is does not matter: its mass is 0.
    b = sums[..., :d] / (total + xp.astype(total == 0, x.dtype))

    mu = moments.mean + xp.matmul(b, half)
    mu1 = xp.concat([mu, -xp.vecdot(mu, b)[..., None]], axis=-1)
    log = entries.log + xp.vecdot(_rows(mu1, assigned, xp), x1)
    sums, top = _sums(log, entries.values_and_one, assigned, members, xp, lazy)
    total = sums[..., -1:]
    values_and_one = sums / (total + xp.astype(total == 0, x.dtype))
    return _Entries(b + centre, (top + xp.log(total))[..., 0], values_and_one)


def _noise(seed: int, block: int, like: Array) -> Array:
    """Gumbel noise of one block, drawn on the host: the same for every library and every cut."""
    xp = _arrays.namespace(like)
    sequence = np.random.SeedSequence(seed, spawn_key=(block,))
    noise = -np.log(np.random.default_rng(sequence).standard_exponential(tuple(like.shape)))
    return _arrays.device_array(noise, xp, like.dtype, array_api_compat.device(like))


def _joined(first: _Entries, second: _Entries, xp: ModuleType) -> _Entries:
    return _Entries(*(xp.concat(list(pair), axis=1) for pair in zip(first, second, strict=True)))


# The class ----------------------------------------------------------------------------------------


class CoresetAttention:
    r"""Causal softmax attention of a stream with a bounded state and nothing to fit beforehand.

    .. math::
        o_i = \frac{\sum_{j \in \mathrm{near}(i)} e^{s q_i \cdot k_j} v_j
                    + \sum_{c=1}^{m} e^{s q_i \cdot b_c + \sigma_c} u_c}
                   {\sum_{j \in \mathrm{near}(i)} e^{s q_i \cdot k_j}
                    + \sum_{c=1}^{m} e^{s q_i \cdot b_c + \sigma_c}}

    The tokens are cut into blocks of B. Near are the keys of the block before and those of the
    token's own block up to itself; everything older is in m entries: a centroid b, a log mass
    sigma and a mean value u each.

    Parameters
    ----------
    num_entries : int, optional
        m. Default 64.
    block_size : int, optional
        B. A larger block costs less time a token and is more exact, and the state holds two of
        them. Default 32.
    scale : float, optional
        s; default ``1 / sqrt(d)``.
    rng : int, Generator, SeedSequence, BitGenerator or None, optional
        Gives the seed of the stream, by one draw. Default None, entropy of the operating system.

    Attributes
    ----------
    num_entries, block_size : int
        m and B.
    length : int
        Tokens seen so far, masked ones included.

    Raises
    ------
    TypeError, ValueError
        A count below 1, a scale that is not a finite number, a bad rng.

    Notes
    -----
    *Reduction.* After block T the keys of block T - 1 become entries with log mass 0, and if there
    are then more than m entries they are reduced to m. With the mean c and the covariance Sigma
    of all scaled queries ``s q`` up to block T, and ``x_j = b_j - mean(b)``, entry j has the weight

    .. math::
        \log w_j = (\sigma_j + c \cdot x_j + x_j \cdot \Sigma x_j / 2) / 2 .

    The m largest ``log w + Gumbel noise`` are landmarks; two Lloyd steps in the metric
    ``x.Sigma x`` with w-weighted means give the centroids. At ``mu_c = c + Sigma x_c / 2`` the
    entries of cluster c and its centroid give the same weight and the same value:

    .. math::
        \sigma_c = \log \sum_j e^{\sigma_j + \mu_c \cdot (b_j - b_c)}, \qquad
        u_c = \sum_j e^{\sigma_j + \mu_c \cdot (b_j - b_c) - \sigma_c} u_j .

    Sigma has 1e-6 of its mean diagonal added to the diagonal (1e-6 if that is 0), so that keys
    which differ only where no query has varied yet are told apart.

    *Properties.* Exact for the first ``m + 2 B`` tokens where B divides m (else m rounded down to
    a multiple of B). Biased afterwards. All weights are positive: the output is a convex
    combination of values. Invariant under ``k -> k + b``. A token's output depends on no later
    token. Blocks count from the first token of the stream and the noise of a block depends on the
    seed and the block's number only: however a stream is cut into calls, outputs are equal to
    rounding. Another library, dtype or BLAS rounds otherwise, and a key near the border of two
    clusters may then fall to the other one; the result is as good.

    *Masks and non-finite numbers.* A masked position counts as a position, and in nothing else:
    neither its key and value nor its query enter the state. A query that is not finite makes its
    own row NaN and is left out of c and Sigma; a key or value that is not finite can affect its own
    row and later ones only. A row that sees no key is 0.

    *Leading axes* (batch, heads) of query, key and value broadcast against each other. The state
    has all of them: grouped queries have entries for each query head.

    *Cost.* Time O(B (m + 2 B) (d + e) + (m + B) m (d + e)) a block and head, memory
    (m + 2 B) (d + e + 2) + B d + d^2 numbers a head. float64 inputs are accumulated in float64,
    all others in float32; the output has the dtype of the query. One object serves one stream;
    ``copy.copy`` and ``copy.deepcopy`` fork it.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import CoresetAttention
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = rng.standard_normal((3, 8, 1000, 64), dtype=np.float32)
    >>> stream = CoresetAttention(rng=0)
    >>> stream.extend(query, key, value).shape
    (8, 1000, 64)
    >>> stream.step(query[:, 0], key[:, 0], value[:, 0]).shape
    (8, 64)
    >>> stream.length
    1001
    """

    def __init__(
        self,
        num_entries: int = 64,
        *,
        block_size: int = 32,
        scale: float | None = None,
        rng: Seed = None,
    ) -> None:
        self._num_entries = _checks.check_positive_int("num_entries", num_entries)
        self._block_size = _checks.check_positive_int("block_size", block_size)
        self._scale = None if scale is None else _checks.check_finite_number("scale", scale)
        self._seed = int(as_generator(rng).integers(2**63))
        self._stream: _Stream | None = None

    def __repr__(self) -> str:
        """Show the settings and how long the stream is, in place of its numbers."""
        return (
            f"CoresetAttention(num_entries={self.num_entries}, block_size={self.block_size}, "
            f"scale={self._scale}, length={self.length})"
        )

    @property
    def num_entries(self) -> int:
        """Entries m kept for older keys."""
        return self._num_entries

    @property
    def block_size(self) -> int:
        """Tokens B of a block."""
        return self._block_size

    @property
    def length(self) -> int:
        """Tokens seen so far, masked ones included."""
        return 0 if self._stream is None else self._stream.length

    @_arrays.on_array_device
    def extend(
        self, query: Array, key: Array, value: Array, *, key_mask: Array | None = None
    ) -> Array:
        """Take the next tokens of the stream.

        Parameters
        ----------
        query, key : array, (..., L, d)
            float16, bfloat16, float32 or float64, of any array-API library; one length.
        value : array, (..., L, e)
            Same library, dtype and device.
        key_mask : boolean array, (L,) or key.shape[:-1] with axes of 1, optional
            True = attend.

        Returns
        -------
        array, (..., L, e)
            The outputs of these tokens, in the library, dtype and device of the inputs.

        Raises
        ------
        TypeError, ValueError
            As :func:`linattn.softmax_attention`; and inputs that do not continue the stream:
            other leading axes, dim, value dim, library, device or accumulation dtype. The stream
            is then as before.

        Notes
        -----
        Memory beyond inputs, outputs and the state is that of one block, whatever L.
        """
        problem = exact_problem(
            query, key, value, scale=self._scale, is_causal=True, key_mask=key_mask
        )
        stream = _begun(problem) if self._stream is None else self._stream
        _check_continues(stream, problem)
        output = Rows(problem, problem.value.shape[-1], problem.query.dtype)
        with _generic.ignore_fp_warnings():
            for rows in self._pieces(stream.length, problem.query.shape[-2]):
                part, stream = self._piece(stream, problem, rows)
                out = divide(part)
                output.put((), rows, problem.xp.reshape(out, (*stream.lead, *out.shape[1:])))
        result = output.result()
        self._stream = stream
        return result

    @_arrays.on_array_device
    def step(self, query: Array, key: Array, value: Array) -> Array:
        """Take one token, ``(..., d)``, ``(..., d)``, ``(..., e)``; return its output ``(..., e)``.

        Raises
        ------
        TypeError, ValueError
            As :meth:`extend`; the stream is then as before.
        """
        _, token = _checks.check_arrays(1, query=query, key=key, value=value)
        return self.extend(*(x[..., None, :] for x in token))[..., 0, :]

    def save(self, path: Path) -> None:
        """Save the stream to a file, to go on elsewhere.

        Parameters
        ----------
        path : str, bytes or path-like
            As for :func:`linattn.save_state`.

        Raises
        ------
        TypeError, OSError
            As :func:`linattn.save_state`.

        Notes
        -----
        An uncompressed npz file without pickle, in the accumulation dtype.
        """
        numbers = {
            "format_version": np.int64(FORMAT_VERSION),
            "num_entries": np.int64(self._num_entries),
            "block_size": np.int64(self._block_size),
            "scale": np.float64(np.nan if self._scale is None else self._scale),
            "seed": np.int64(self._seed),
            "length": np.int64(self.length),
        }
        if self._stream is None:
            arrays = [np.zeros(0, dtype=np.float32)] * len(ARRAYS)
        else:
            lead = self._stream.lead
            arrays = [_arrays.to_numpy(x) for x in _arrays_of(self._stream)]
            arrays = [x.reshape((*lead, *x.shape[1:])) for x in arrays]
        write_arrays(path, numbers | dict(zip(ARRAYS, arrays, strict=True)))

    @classmethod
    @_arrays.on_array_device
    def load(cls, path: Path, like: Array | None = None) -> Self:
        """Load a stream saved by :meth:`save`; it goes on as the saved one would have.

        Parameters
        ----------
        path : str, bytes or path-like
            The file; it need not be trusted.
        like : array, optional
            Gives the library and device of the stream. Default NumPy.

        Returns
        -------
        CoresetAttention

        Raises
        ------
        StateFileError
            Not such a file, damaged, or of a newer format.
        OSError
            The file cannot be read.

        Notes
        -----
        Nothing is unpickled, and no more is read than the file holds.
        """
        xp = device = None
        if like is not None:
            xp, _ = _checks.check_arrays(1, like=like)
            device = array_api_compat.device(like)
        made, stream = read_arrays(path, "coreset", MEMBERS, FORMAT_VERSION, cls._build)
        if xp is not None and stream is not None:
            arrays = [xp.asarray(x, device=device) for x in _arrays_of(stream)]
            stream = _stream_of(stream.lead, arrays, stream.length)
        made._stream = stream
        return made

    @classmethod
    def _build(cls, arrays: Arrays) -> tuple[Self, _Stream | None]:
        scale = float(arrays["scale"])
        made = cls(
            int(arrays["num_entries"]),
            block_size=int(arrays["block_size"]),
            scale=None if np.isnan(scale) else scale,
            rng=0,
        )
        made._seed = int(arrays["seed"])
        length = int(arrays["length"])
        if length < 0 or made._seed < 0:
            message = f"length and seed must not be negative, got {length} and {made._seed}"
            raise ValueError(message)
        return made, _checked_stream(arrays, length, made) if length else None

    def _pieces(self, start: int, length: int) -> Iterator[slice]:
        """Rows of a call that lie in one block each."""
        first = 0
        while first < length:
            last = min(length, first + self._block_size - (start + first) % self._block_size)
            yield slice(first, last)
            first = last

    def _piece(self, stream: _Stream, problem: Problem, rows: slice) -> tuple[Partial, _Stream]:
        """Read a part of a block; if it is the last of its block, reduce."""
        query, fresh, counted = _tokens(stream.lead, problem, rows)
        xp, lazy = problem.xp, problem.lazy
        new = _joined(stream.new, fresh, xp)
        part = _read(query, stream.old, new, xp, lazy)
        queries = xp.concat([stream.query, counted], axis=1)
        length = stream.length + query.shape[1]
        old, moments = stream.old, stream.moments
        if length % self._block_size == 0:
            moments = _add_queries(moments, queries, xp)
            if old.key.shape[1] > self._num_entries:
                noise = _noise(self._seed, length // self._block_size - 1, old.log)
                old = _reduce(old, moments, noise, self._num_entries, xp, lazy)
            old = _joined(old, new, xp)
            new = _Entries(*(x[:, :0, ...] for x in new))
            queries = queries[:, :0, :]
        return part, _Stream(stream.lead, old, new, queries, moments, length)


# Arrays in and out --------------------------------------------------------------------------------


def _tokens(lead: tuple[int, ...], problem: Problem, rows: slice) -> tuple[Array, _Entries, Array]:
    """Return queries, keys, and the queries as they count, of a part; leading axes as one."""
    xp, heads = problem.xp, prod(lead)

    def flat(x: Array) -> Array:
        x = xp.broadcast_to(x, (*lead, *x.shape[-2:]))
        return xp.reshape(x, (heads, *x.shape[-2:]))

    query = flat(token_block(problem, "query", rows, 0).x) * problem.query_spec.scale
    tokens = token_block(problem, "key", rows, 0)
    key, values_and_one = flat(tokens.x), flat(values_and_one_block(problem, rows))
    if tokens.log_weight is None:
        return query, _Entries(key, xp.zeros_like(key[..., 0]), values_and_one), query
    log = flat(tokens.log_weight)
    # NaN where the position is masked.
    return query, _Entries(key, log[..., 0], values_and_one), query + 0 * log


def _begun(problem: Problem) -> _Stream:
    """Return the stream that has seen nothing."""
    xp, heads = problem.xp, prod(problem.lead)
    d, e = problem.key.shape[-1], problem.value.shape[-1]
    device = array_api_compat.device(problem.query)

    def zeros(*shape: int) -> Array:
        return xp.zeros((heads, *shape), dtype=problem.dtype, device=device)

    nothing = _Entries(zeros(0, d), zeros(0), zeros(0, e + 1))
    moments = _Moments(zeros(1, 1), zeros(1, d), zeros(d, d))
    return _Stream(problem.lead, nothing, nothing, zeros(0, d), moments, 0)


def _check_continues(stream: _Stream, problem: Problem) -> None:
    """Check that new tokens are of the kind of those seen."""
    key = stream.old.key
    xp = _arrays.namespace(key)
    if xp is not problem.xp:
        message = (
            f"query, key and value must come from the array library of the stream, "
            f"{_arrays.library_name(xp)}, got {_arrays.library_name(problem.xp)}"
        )
        raise TypeError(message)
    device = array_api_compat.device
    kinds = {
        "leading axes": (stream.lead, problem.lead),
        "dim": (key.shape[-1], problem.key.shape[-1]),
        "value dim": (stream.old.values_and_one.shape[-1] - 1, problem.value.shape[-1]),
        "accumulation dtype": (key.dtype, problem.dtype),
        "device": (device(key), device(problem.query)),
    }
    for name, (wanted, got) in kinds.items():
        # A traced array does not know its device.
        if got is not None and wanted != got:
            message = (
                f"query, key and value must have the {name} of the stream, {wanted}, got {got}"
            )
            raise ValueError(message)


def _arrays_of(stream: _Stream) -> list[Array]:
    return [*stream.old, *stream.new, stream.query, *stream.moments]


def _stream_of(lead: tuple[int, ...], arrays: list[Array], length: int) -> _Stream:
    old, new, query, moments = arrays[:3], arrays[3:6], arrays[6], arrays[7:]
    return _Stream(lead, _Entries(*old), _Entries(*new), query, _Moments(*moments), length)


def _checked_stream(arrays: Arrays, length: int, made: CoresetAttention) -> _Stream:
    """Check that the arrays of a file fit each other and its numbers."""
    found = [arrays[name] for name in ARRAYS]
    if found[0].ndim < 2 or found[2].ndim < 2:
        message = f"old_key and old_v1 have shapes {found[0].shape} and {found[2].shape}"
        raise ValueError(message)
    lead, d, width = found[0].shape[:-2], found[0].shape[-1], found[2].shape[-1]
    m, B = made.num_entries, made.block_size
    blocks, n = divmod(length, B)
    old = min(m, (blocks - 1) * B) + B if blocks else 0
    ends = ((old, d), (old,), (old, width), (n, d), (n,), (n, width), (n, d))
    for name, array, end in zip(ARRAYS, found, (*ends, (1, 1), (1, d), (d, d)), strict=True):
        wanted = (*lead, *end)
        if array.shape != wanted or array.dtype != found[0].dtype or d < 1 or width < 2:
            message = (
                f"{name} must be {found[0].dtype} of shape {wanted} after {length} tokens, got "
                f"{array.dtype} {array.shape}"
            )
            raise ValueError(message)
    heads = prod(lead)
    found = [x.reshape((heads, *x.shape[len(lead) :])) for x in found]
    return _stream_of(lead, found, length)
