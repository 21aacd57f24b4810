"""Causal softmax attention of a stream with a bounded state and nothing to fit beforehand.

The last two blocks of keys are exact. Older keys are merged into weighted centroids: after each
block the centroids and the block before it are clustered again, in the metric and around the mean
of the queries so far.

Shape letters: ``H`` heads (all leading axes as one), ``B`` tokens a block, ``n`` entries, ``m``
entries kept, ``r`` rows, ``d`` dim, ``e`` value dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import array_api_compat
import numpy as np

from linattn import _arrays, _checks
from linattn._files import Arrays, Path
from linattn._numerics import ignore_fp_warnings
from linattn.coreset import _entries, _stream
from linattn.sampling import Seed, as_generator
from linattn.typing import Array, Partial, Problem

__all__ = ["CoresetAttention"]


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
    *Reduction.* After block T the keys of block T - 1 become entries, whose log mass is the key's
    bias or 0, and if there are then more than m entries they are reduced to m. With the mean c and
    the covariance Sigma of all scaled queries ``s q`` up to block T, and ``x_j = b_j - mean(b)``,
    entry j has the weight

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
        self._stream: _stream.Stream | None = None

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

    @_arrays.as_autocast("query", "key", "value")
    def extend(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        key_mask: Array | None = None,
        key_bias: Array | None = None,
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
        key_bias : floating array, of the shapes that a mask may have, optional
            Log weight of each key, for all queries that will see it. -inf masks a key. Default 0.

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
        problem = _stream.problem_of(
            query,
            key,
            value,
            scale=self._scale,
            key_mask=key_mask,
            key_bias=key_bias,
        )
        stream = _stream.begin(problem) if self._stream is None else self._stream
        _stream.check_continues(stream, problem)
        output = _stream.output_of(problem)
        with ignore_fp_warnings():
            for rows in self._block_rows(stream.length, problem.query.shape[-2]):
                partial, stream = self._take(stream, problem, rows)
                output.write_divided((), rows, _stream.with_leading_axes(partial, stream.lead))
        result = output.result()
        self._stream = stream
        return result

    @_arrays.as_autocast("query", "key", "value")
    def step(
        self, query: Array, key: Array, value: Array, *, key_bias: Array | float | None = None
    ) -> Array:
        """Take one token, ``(..., d)``, ``(..., d)``, ``(..., e)``; return its output ``(..., e)``.

        ``key_bias``, a number or ``(...)``, is the log weight of its key.

        Raises
        ------
        TypeError, ValueError
            As :meth:`extend`; the stream is then as before.
        """
        _, token = _checks.check_arrays(1, query=query, key=key, value=value)
        query, key, value = (x[..., None, :] for x in token)
        bias = None if key_bias is None else _checks.of_one_token("key_bias", key_bias, key)
        return self.extend(query, key, value, key_bias=bias)[..., 0, :]

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
            "num_entries": np.int64(self._num_entries),
            "block_size": np.int64(self._block_size),
            "scale": np.float64(np.nan if self._scale is None else self._scale),
            "seed": np.int64(self._seed),
            "length": np.int64(self.length),
        }
        if self._stream is None:
            arrays = [np.zeros(0, dtype=np.float32)] * len(_stream.ARRAYS)
        else:
            lead = self._stream.lead
            arrays = [_arrays.to_numpy(x) for x in _stream.arrays_of(self._stream)]
            arrays = [x.reshape((*lead, *x.shape[1:])) for x in arrays]
        _stream.FORMAT.write(path, numbers | dict(zip(_stream.ARRAYS, arrays, strict=True)))

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
        made, stream = _stream.FORMAT.read(path, cls._build)
        if xp is not None and stream is not None:
            arrays = [xp.asarray(x, device=device) for x in _stream.arrays_of(stream)]
            stream = _stream.stream_of(stream.lead, arrays, stream.length)
        made._stream = stream
        return made

    @classmethod
    def _build(cls, arrays: Arrays) -> tuple[Self, _stream.Stream | None]:
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
            raise ValueError(f"length and seed must not be negative, got {length} and {made._seed}")
        if not length:
            return made, None
        return made, _stream.checked_stream(arrays, length, made.num_entries, made.block_size)

    def _block_rows(self, start: int, length: int) -> Iterator[slice]:
        """Rows of a call that lie in one block each."""
        first = 0
        while first < length:
            last = min(length, first + self._block_size - (start + first) % self._block_size)
            yield slice(first, last)
            first = last

    def _take(
        self, stream: _stream.Stream, problem: Problem, rows: slice
    ) -> tuple[Partial, _stream.Stream]:
        """Read rows of one block; if they are the last of it, reduce."""
        query, fresh, counted = _stream.block_tokens(stream.lead, problem, rows)
        xp, lazy = problem.xp, problem.policy.lazy
        new = _entries.joined(stream.new, fresh, xp)
        partial = _entries.read(query, stream.old, new, xp, lazy)
        queries = xp.concat([stream.query, counted], axis=1)
        length = stream.length + query.shape[1]
        old, moments = stream.old, stream.moments
        if length % self._block_size == 0:
            moments = _entries.add_queries(moments, queries, xp)
            if old.key.shape[1] > self._num_entries:
                noise = _entries.gumbel_noise(self._seed, length // self._block_size - 1, old.log)
                old = _entries.reduce(old, moments, noise, self._num_entries, xp, lazy)
            old = _entries.joined(old, new, xp)
            new = _entries.Entries(*(x[:, :0, ...] for x in new))
            queries = queries[:, :0, :]
        return partial, _stream.Stream(stream.lead, old, new, queries, moments, length)
