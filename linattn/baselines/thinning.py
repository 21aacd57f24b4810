"""Few keys chosen so that a kernel hardly sees the difference: WildCat, Thinformer."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn._numerics import ignore_fp_warnings
from linattn.baselines import _shared
from linattn.sampling._seeds import Seed, as_generator
from linattn.typing import Array, ArrayT
from linattn.typing._shifts import largest

__all__ = ["thinformer", "wildcat"]

Float64 = NDArray[np.float64]

RHO = 3.94582
"""Of the temperature of WildCat, as its authors' code has it."""

DELTA = 0.5
"""Probability with which Thinformer's halving may fail, as its authors have it."""


@_arrays.as_autocast("query", "key", "value")
def wildcat(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    num_keys: int,
    temperature: float | None = None,
    is_causal: bool = False,
    rng: Seed = None,
    scale: float | None = None,
) -> ArrayT:
    r"""Attention to r keys drawn by pivoted Cholesky, with Nyström weights of all keys.

    With centred keys, a set T of r of them and the kernel h of the rescaled keys

    .. math::
        h(k, k') = \exp(s \, k \cdot k' / \tau^2), \qquad W = h(k_T, k_T)^{-1} h(k_T, k), \qquad
        o = \frac{\exp(s \, q k_T^T) \, W v}{\exp(s \, q k_T^T) \, W 1}

    clipped to the range of the values, channel by channel. Each key of T is drawn with a
    probability proportional to what the kernel's diagonal has left after those drawn before.

    Parameters
    ----------
    query, key, value, scale
        As in :func:`local_window`, but for a length S of keys and values of their own.
    num_keys : int
        r, at most S; with r = S attention is exact.
    temperature : float, optional
        tau. Default ``sqrt(3.94582 max |k| / max |q|)``.
    is_causal : bool, optional
        Published for full attention: True is rejected, since weights gather later keys.
    rng : int, numpy.random.Generator or None, optional
        Draws the keys, alike for all leading axes.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`; causal attention.

    Notes
    -----
    Multiplications for a head: ``S r (d + r + e) + L r (d + e)``. The authors' bins, which draw
    from parts of the sequence at once, are left out. Nyström weights may be negative; a denominator
    that is not positive gives 0 before the clipping.

    Fails where keys are long: their kernel has no low rank then, and a key that was not drawn is
    replaced by next to nothing.

    References
    ----------
    Schröder and Mackey, "WildCat: Near-Linear Attention in Theory and Practice" (2026),
    arXiv:2602.10056; the temperature as in the authors' ``compress_kv``.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> from linattn.baselines import wildcat
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> output = wildcat(query, key, value, num_keys=64, rng=0)
    >>> bool(np.allclose(output, linattn.softmax_attention(query, key, value)))
    True
    """
    _shared.full_only("wildcat", is_causal, "weights gather the whole sequence")
    inputs = _shared.prepare(query, key, value, scale)
    xp, S = inputs.xp, inputs.lengths[1]
    r = _checks.check_positive_int("num_keys", num_keys, most=S)
    if temperature is not None:
        temperature = _checks.check_finite_number("temperature", temperature, positive=True)
    generators = _shared.alike(as_generator(rng))
    centred = inputs.key - xp.mean(inputs.key, axis=-2, keepdims=True)
    index, weights, log_scales = [], [], []
    for q, k in _shared.heads(inputs.query, centred):
        tau = temperature or math.sqrt(RHO * inputs.scale * _longest(k) / _longest(q))
        x = k * math.sqrt(inputs.scale) / tau
        drawn, W, log_scale = _pivoted_cholesky(x, r, next(generators))
        index.append(drawn)
        weights.append(W)
        log_scales.append(log_scale)
    lead = tuple(inputs.query.shape[:-2])
    W = inputs.array(np.reshape(weights, (*lead, r, S)))
    picks = _shared.one_hot(np.reshape(index, (*lead, r)), S)
    logits = xp.matmul(inputs.query, xp.matrix_transpose(xp.matmul(inputs.array(picks), centred)))
    logits = logits + inputs.array(np.reshape(log_scales, (*lead, 1, r)))
    with ignore_fp_warnings():
        scores = xp.exp(logits - largest(logits, keepdims=True))
        numerator = xp.matmul(scores, xp.matmul(W, inputs.value))
        denominator = xp.matmul(scores, xp.sum(W, axis=-1, keepdims=True))
        output = xp.where(denominator > 0, numerator / denominator, xp.zeros_like(numerator))
    least = xp.min(inputs.value, axis=-2, keepdims=True)
    most = xp.max(inputs.value, axis=-2, keepdims=True)
    return inputs.output(query, xp.minimum(xp.maximum(output, least), most))


@_arrays.as_autocast("query", "key", "value")
def thinformer(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    oversampling: int = 2,
    is_causal: bool = False,
    rng: Seed = None,
    scale: float | None = None,
) -> ArrayT:
    r"""Softmax attention to ``2^g sqrt(n)`` keys, halved again and again by a kernel.

    .. math::
        o = \mathrm{softmax}(s \, q k_T^T) \, v_T, \qquad
        h((k, v), (k', v')) = \exp(s \, k \cdot k') (v \cdot v' + \max |v|^2)

    T begins as n keys at equal distances, n the largest power of 4 up to S. Buckets of 4^(g+1)
    keys are halved, joined in pairs and halved again, until 2^g sqrt(n) keys are left. To halve a
    bucket, a random walk chooses one of each two neighbours such that the sums of h over the chosen
    and the others stay near each other.

    Parameters
    ----------
    query, key, value, scale
        As in :func:`local_window`, but for a length S of keys and values of their own.
    oversampling : int, optional
        g. Default 2; of fewer than 4^(g+1) keys all are taken.
    is_causal : bool, optional
        Published for full attention: True is rejected, since the choice sees the whole sequence.
    rng : int, numpy.random.Generator or None, optional
        Draws the walks, alike for all leading axes.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`; causal attention.

    Notes
    -----
    Multiplications for a head: about ``4^(g+1) n (d + e) log_4(n / 4^g)`` at most and
    ``L 2^g sqrt(n) (d + e)``. With a length that is no power of 4, up to three quarters of the keys
    are never seen.

    Fails where few keys carry the weight: all chosen keys count alike, and the kernel of keys has
    no query in it.

    References
    ----------
    Carrell et al., "Low-Rank Thinning" (2025), section 4 (*Thinformer*) with KH-Compress; the walk
    as in the authors' code.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import thinformer
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> thinformer(query, key, value, rng=0).shape
    (8, 64, 16)
    """
    _shared.full_only("thinformer", is_causal, "keys are chosen from the whole sequence")
    inputs = _shared.prepare(query, key, value, scale)
    xp, S = inputs.xp, inputs.lengths[1]
    g = _checks.check_positive_int("oversampling", oversampling, least=0)
    generators = _shared.alike(as_generator(rng))
    index = [
        _compress(k * math.sqrt(inputs.scale), v, g, next(generators))
        for k, v in _shared.heads(inputs.key, inputs.value)
    ]
    picks = _shared.one_hot(np.reshape(index, (*inputs.query.shape[:-2], -1)), S)
    T = inputs.array(picks)
    return inputs.output(
        query, _shared.attend(inputs, xp.matmul(T, inputs.key), xp.matmul(T, inputs.value))
    )


def _longest(x: Float64) -> float:
    return float(np.sqrt(np.sum(x**2, axis=-1)).max()) or 1.0


def _pivoted_cholesky(
    x: Float64, num: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], Float64, Float64]:
    """Drawn tokens ``(num,)`` and the Nyström weights ``(num, S)`` of the kernel exp(x.x').

    Weights are at most 1 in size, on a log scale ``(num,)`` for each drawn token.
    """
    half_squares = np.sum(x**2, axis=-1) / 2
    left, factors = np.ones(len(x)), np.zeros((num, len(x)))
    drawn: list[int] = []
    for i in range(num):
        # In the kernel with ones on its diagonal, so that nothing overflows.
        with np.errstate(divide="ignore"):
            odds = np.log(np.maximum(left, 0)) + 2 * half_squares + rng.gumbel(size=len(x))
        odds[drawn] = -np.inf
        j = int(np.argmax(odds))
        row = np.exp(x @ x[j] - half_squares - half_squares[j]) - factors[:i, j] @ factors[:i]
        if row[j] <= 0:
            break  # The keys that are drawn reproduce all others.
        row[drawn] = 0
        factors[i] = row / math.sqrt(row[j])
        left = left - factors[i] ** 2
        drawn.append(j)
    count = len(drawn)
    weights, log_scale = np.zeros((num, len(x))), np.full(num, -np.inf)
    solved = np.linalg.solve(factors[:count, drawn], factors[:count])
    with np.errstate(divide="ignore"):
        logs = np.log(np.abs(solved)) + half_squares
    most = logs.max(axis=-1)
    weights[:count] = np.sign(solved) * np.exp(logs - most[:, None])
    log_scale[:count] = most - half_squares[drawn]
    return np.array(drawn + drawn[:1] * (num - count), dtype=np.int64), weights, log_scale


def _compress(k: Float64, v: Float64, g: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Keys that are left, ``2^g sqrt(n)`` of them, by halving buckets that grow."""
    rounds = (len(k).bit_length() - 1) // 2
    n = 4**rounds
    index: NDArray[np.int64] = np.arange(n) * (len(k) // n)
    if n < 4 ** (g + 1):
        return index
    shift, most = np.sum(k**2, axis=-1).max(), np.abs(v).max() ** 2
    delta = DELTA / 4 ** (g + 1) / (rounds - g) / n
    size = 4 ** (g + 1)
    for _ in range(rounds - g):
        halves = []
        for bucket in index.reshape(-1, size):
            kernel = np.exp(k[bucket] @ k[bucket].T - shift) * (v[bucket] @ v[bucket].T + most)
            halves.append(bucket[_halve(kernel, delta * size**2, rng)])
        index = np.concatenate(halves)
        size *= 2
    return index


def _halve(kernel: Float64, delta: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Choose one of each two neighbours, such that both halves have like sums of the kernel."""
    num = len(kernel) // 2
    pairs = kernel[:, ::2] - kernel[:, 1::2]
    pairs = pairs[::2] - pairs[1::2]
    sizes = np.sqrt(np.maximum(np.diag(pairs), 0))
    bound = 0.5 + math.log(2 * len(kernel) / delta)
    thresholds = rng.uniform(-bound, bound, num) * sizes * np.maximum.accumulate(sizes)
    second = np.zeros(num, dtype=bool)
    walk = pairs[0]
    for i in range(1, num):
        second[i] = thresholds[i] <= walk[i]
        walk = walk + (1 - 2 * second[i]) * pairs[i]
    complement = rng.random() < 0.5
    return np.asarray(2 * np.arange(num) + (second ^ complement))
