"""After attention has run: its error on rows that are computed exactly."""

from __future__ import annotations

from typing import NamedTuple

import array_api_compat
import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _arrays, _checks, _dispatch, _generic, _numerics
from linattn._driver.blocks import block_slices, token_block, values_and_one_block
from linattn._driver.pairs import biased_keys, biased_queries
from linattn._driver.problem import exact_problem
from linattn._generic.states import divide
from linattn.diagnostics._shared import Floats, error_and_bound, mean_distance
from linattn.sampling import Seed, as_generator
from linattn.typing import Array, Partial, Problem, Tokens
from linattn.typing.records import one_line

__all__ = ["HeldOutError", "held_out_error", "held_out_rows"]

BLOCK, ROWS = 512, 256
"""Keys and rows that are computed at a time: their logits stay in the cache."""


class HeldOutError(NamedTuple):
    """Error of an output on some of its rows.

    Attributes
    ----------
    relative : ndarray, (...)
        ``sqrt(sum |out - exact|^2 / sum |exact|^2)`` over the rows, of each head; 0 where both
        are 0, NaN where something is not finite.
    mean_square : ndarray, (...)
        ``sum |out - exact|^2 / h``: an unbiased estimate of its mean over all rows that could
        have been drawn.
    rows : ndarray of int, (h,)
        Which rows.
    bound : ndarray, (...)
        Upper bound of the relative error over all rows that could have been drawn, each at the
        probability that was asked for; ``relative`` where the rows are all there are, inf for a
        single one of many.

    Examples
    --------
    >>> import linattn
    >>> query, key, value = linattn.datasets.pretrained_qkv()
    >>> tokens = {"query": query, "key": key, "value": value}
    >>> zeros = 0 * value
    >>> error = linattn.diagnostics.held_out_error(zeros, **tokens, rng=0)
    >>> float(error.relative[0, 0]), bool(error.bound[0, 0] > 1), error.rows.shape
    (1.0, True, (64,))
    """

    relative: Floats
    mean_square: Floats
    rows: NDArray[np.intp]
    bound: Floats

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


def held_out_rows(
    length: int, num_rows: int, rng: Seed = None, exclude: ArrayLike | None = None
) -> NDArray[np.intp]:
    """Draw rows, one from each of h strata of equal length; all there are if too few.

    Parameters
    ----------
    length : int
        L, rows there are.
    num_rows : int
        h, rows wanted.
    rng : int, Generator, SeedSequence or None, optional
        Seed.
    exclude : array_like of int, optional
        Rows that must not be drawn, such as the probes that a map was fitted to.

    Returns
    -------
    ndarray of int, (at most h,)
        Ascending, no row twice.

    Raises
    ------
    TypeError, ValueError
        A length or a number that is not a count.

    Notes
    -----
    The strata start at a random row and go around the end, so that every row that is not
    excluded has the same chance. Time and memory O(h + excluded): nothing grows with the length.

    Examples
    --------
    >>> import linattn
    >>> linattn.diagnostics.held_out_rows(1000, 4, rng=0).shape
    (4,)
    """
    length = _checks.check_positive_int("length", length, least=0)
    num_rows = _checks.check_positive_int("num_rows", num_rows)
    generator = as_generator(rng)
    taken = np.unique(np.asarray([] if exclude is None else exclude, dtype=np.int64))
    taken = taken[(taken >= 0) & (taken < length)]
    free = length - len(taken)
    if free <= num_rows:
        ranks = np.arange(free)
    else:
        edges = np.floor((np.arange(num_rows + 1) / num_rows + generator.random()) * free)
        steps = np.floor(generator.random(num_rows) * np.diff(edges))
        ranks = np.sort((edges[:-1] + steps).astype(np.int64) % free)
    # Before the k-th excluded row there are as many free ones as its number less k.
    return ranks + np.searchsorted(taken - np.arange(len(taken)), ranks, side="right")


@_arrays.on_array_device
def held_out_error(
    output: Array,
    *,
    query: Array,
    key: Array,
    value: Array,
    is_causal: bool = False,
    key_mask: Array | None = None,
    key_bias: Array | None = None,
    scale: float | None = None,
    num_rows: int = 64,
    rows: ArrayLike | None = None,
    probability: float = 0.95,
    rng: Seed = None,
) -> HeldOutError:
    r"""Error of any approximation of softmax attention, from a few rows computed exactly.

    .. math::
        \sqrt{\frac{\sum_{i \in R} |o_i - o^*_i|^2}{\sum_{i \in R} |o^*_i|^2}}, \qquad
        o^*_i = \sum_j \mathrm{softmax}_j(s\, q_i \cdot k_j) \, v_j

    Letters: ``L`` queries, ``S`` keys, ``d`` dim, ``e`` value dim, ``h`` rows R, ``s`` scale.

    Parameters
    ----------
    output : array, (..., L, e)
        What the approximation gave.
    query, key, value : array, (..., L, d), (..., S, d), (..., S, e)
        Its inputs, of the same library, dtype and device. By name only: four arrays that may have
        one shape would be confused without a word.
    is_causal : bool, optional
        Query i sees keys 0..i only; needs L = S. Default False.
    key_mask : boolean array, (S,) or key.shape[:-1] with axes of 1, optional
        True = attend.
    key_bias : floating array, of the shapes that a mask may have, optional
        Log weight of each key. -inf masks a key. Default 0.
    scale : float, optional
        s; default ``1 / sqrt(d)``.
    num_rows : int, optional
        h; default 64. All rows where there are fewer.
    rows : array_like of int, optional
        R itself, instead of a draw.
    probability : float, optional
        Probability that the bound holds, between 0 and 1. Default 0.95.
    rng : int, Generator, SeedSequence or None, optional
        Seed of the draw.

    Returns
    -------
    HeldOutError

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.softmax_attention`; an output of another shape; rows out of range; a
        probability that is none.

    Notes
    -----
    The rows must say nothing that the map has not been told of all others: leave out the probes
    of a map fitted to these queries (``exclude`` of :func:`held_out_rows`).
    The mean square is then unbiased over draws of R. On the shipped sample (landmarks, with and
    without a window; rows that are no probes) 98 in 100 estimates of a head's relative error are
    within .70 and 1.23 times it.

    The bound is Bernstein's inequality for the residuals of the ratio. With
    ``a_i = |o_i - o*_i|^2``, ``b_i = |o*_i|^2``, ``r_i = a_i - relative^2 b_i`` and
    ``l = -log(1 - probability)``,

    .. math::
        \mathrm{bound}^2 = \frac{\bar a + \sqrt{2 l \, \overline{r^2} / h}
        + l \max(\max_i r_i, \overline{|o^* - \overline{o^*}|^2}) / h}{\bar b} .

    The inequality wants the variance and the largest of all residuals. The variance is taken
    from the rows. The largest is the rows' largest, or the squared error of an output that does not
    depend on its query, the mean output, where that is more: of h rows that agree, a share l / h of
    all may be unlike each of them (the rule of three). So 64 rows of outputs around 0 promise no
    error below .22, and 256 none below .11, whatever they show. The bound does not hold where rows
    that nobody has seen are further off than that: ``benchmarks/tolerance.py`` measures how often.

    Time O(h S (d + e)), memory O(h (d + e)) and a block of keys, whatever the length.

    References
    ----------
    Bounds with estimated variance: Audibert, Munos, Szepesvari, "Exploration-exploitation
    tradeoff using variance estimates in multi-armed bandits" (2009), theorem 1.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 50, 8))
    >>> output = linattn.softmax_attention(query, key, value)
    >>> tokens = {"query": query, "key": key, "value": value}
    >>> bool(linattn.diagnostics.held_out_error(output, **tokens, rng=0).relative < 1e-12)
    True
    """
    xp, (output, query, key, value) = _checks.check_arrays(
        output=output, query=query, key=key, value=value
    )
    is_causal = _checks.check_flag("is_causal", is_causal)
    problem = exact_problem(
        query,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        key_mask=key_mask,
        key_bias=key_bias,
        remedy="pass equal lengths",
    )
    L, e = query.shape[-2], value.shape[-1]
    if tuple(output.shape) != (*problem.lead, L, e):
        raise ValueError(
            f"output must have shape {(*problem.lead, L, e)}, got {tuple(output.shape)}"
        )
    probability = _checks.check_finite_number("probability", probability, positive=True)
    if probability >= 1:
        raise ValueError(f"probability must be between 0 and 1, got {probability}")
    if rows is None:
        num_rows = _checks.check_positive_int("num_rows", num_rows)
        chosen = held_out_rows(L, num_rows, rng)
    else:
        chosen = np.array(rows)
        whole = chosen.dtype.kind in "iu" or chosen.size == 0
        if not whole or chosen.ndim != 1 or np.any((chosen < 0) | (chosen >= L)):
            raise ValueError(f"rows must be numbers of queries from 0 to {L - 1}, got {rows!r}")
        chosen = chosen.astype(np.intp)
    with _numerics.ignore_fp_warnings(), _dispatch.limited_threads():
        exact = _arrays.to_numpy(_exact_rows(chosen, problem)).astype(np.float64)
        index = xp.asarray(chosen, device=array_api_compat.device(query))
        taken = xp.astype(xp.take(output, index, axis=-2), problem.dtype)
        given = _arrays.to_numpy(taken).astype(np.float64)
        # In float64: squares of small and large values leave the range of float32.
        squares = np.sum((given - exact) ** 2, axis=-1)
        units = np.sum(exact**2, axis=-1)
        all_rows = len(np.unique(chosen)) == L
        relative, bound = error_and_bound(
            squares, units, None if all_rows else probability, mean_distance(exact)
        )
        mean_square = np.sum(squares, axis=-1) / max(len(chosen), 1)
        return HeldOutError(relative, mean_square, chosen, bound)


def _exact_rows(chosen: NDArray[np.intp], problem: Problem) -> Array:
    """Softmax attention of some queries, over blocks of keys."""
    xp, device = problem.xp, array_api_compat.device(problem.query)
    functions = _dispatch.BlockFunctions(xp)
    outputs: list[Array] = []
    for place in block_slices(len(chosen), ROWS):
        first, last = int(chosen[place].min()), int(chosen[place].max())
        index = xp.asarray(chosen[place], device=device)
        taken = xp.take(problem.query, index, axis=-2)
        rows = Tokens(xp.astype(taken, problem.dtype, copy=False), None, 0)
        spec, rows = biased_queries(problem, problem.query_spec, rows)
        part: Partial | None = None
        is_causal = problem.sees.is_causal
        for block in block_slices(last + 1 if is_causal else problem.key.shape[-2], BLOCK):
            keys, values_and_one = (
                biased_keys(problem, token_block(problem, "key", block, 0)),
                values_and_one_block(problem, block),
            )
            visible = None
            if is_causal and block.stop > first + 1:
                visible = xp.arange(block.start, block.stop, device=device) <= index[:, None]
            if part is None:
                part = functions.exact_block(spec, rows, keys, values_and_one, visible)
            elif visible is None:
                part = functions.exact_more(spec, rows, keys, values_and_one, part)
            else:
                more = functions.exact_block(spec, rows, keys, values_and_one, visible)
                part = _generic.combine(part, more)
        if part is not None:
            outputs.append(divide(part))
    if not outputs:
        shape = (*problem.lead, len(chosen), problem.value.shape[-1])
        return xp.zeros(shape, dtype=problem.dtype, device=device)
    return xp.concat(outputs, axis=-2)
