"""Positions of tokens: rotary embeddings, sinusoids, and the slopes of ALiBi."""

from __future__ import annotations

from typing import Any

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn.typing import Array, ArrayT

__all__ = ["alibi_slopes", "rotary", "sinusoidal"]


@_arrays.on_array_device
def rotary(
    x: ArrayT,
    positions: Any = None,
    *,
    base: float = 10_000,
    frequencies: Any = None,
    interleaved: bool = False,
    dim: int | None = None,
) -> ArrayT:
    r"""Return queries or keys rotated by their positions (rotary embedding).

    .. math::
        R_t x = \left( x_a \cos \theta_c t - x_b \sin \theta_c t, \;
        x_b \cos \theta_c t + x_a \sin \theta_c t \right)_{c = 0, \ldots, r / 2 - 1}, \qquad
        \theta_c = B^{-2 c / r}

    in each pair of coordinates a and b. Inner products then depend on positions only through their
    differences: :math:`R_i q \cdot R_j k = q \cdot R_{j - i} k`. Letters: ``L`` tokens, ``d`` dim,
    ``r`` rotated coordinates, ``B`` base.

    Parameters
    ----------
    x : array, (..., L, d)
        Queries or keys, of any array-API library: both have to be rotated, before the feature map.
    positions : array_like, (L,) or (..., L), optional
        t of each token: integers, or floats for interpolated positions. Leading axes broadcast to
        the ones of x and add none. Default ``0, ..., L - 1``. Rotate by ``-positions`` for the
        inverse, which is also the transpose that pulls gradients back.
    base : float, optional
        B. Default 10,000.
    frequencies : array_like of real numbers, (r / 2,), optional
        The angles theta_c, one for each pair. Models trained for longer inputs (Llama 3, YaRN)
        change some of them: ``model.model.rotary_emb.inv_freq`` in transformers. Default: computed
        from `base`.
    interleaved : bool, optional
        Pairs are coordinates 2 c and 2 c + 1, as in the paper and GPT-J. Default False: c and
        c + r / 2, as in GPT-NeoX and LLaMA.
    dim : int, optional
        r, even: the first coordinates, which are rotated; the others stay. Default all, or two for
        each of the frequencies.

    Returns
    -------
    array, (..., L, d)
        In the library, dtype and device of x.

    Raises
    ------
    TypeError
        Not an array, not a real floating dtype, positions that are no real numbers.
    ValueError
        A number of coordinates that is odd or above d, positions or frequencies of another shape,
        positions, frequencies or a base that are not finite.

    Notes
    -----
    Angles are computed in float64 on the host, whatever the dtype of x: position 1,000,000 is as
    accurate as the first. Positions traced by JAX are multiplied in the widest float that JAX has
    switched on. Time O(L d) for each head, and O(L r) for cosines and sines. Memory O(L r) beyond
    the result.

    Rotated queries and keys work with every map. Exact attention and maps of the softmax kernel
    then weigh by ``exp(scale q.R k)``, random features without bias.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), eq. 15 and
    34.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.positions import rotary
    >>> query, key = np.random.default_rng(0).standard_normal((2, 5, 8))
    >>> at = np.arange(5)
    >>> here, there = (rotary(query, t) @ rotary(key, t).T for t in (at, at + 9))
    >>> bool(np.allclose(here, there))
    True
    """
    interleaved = _checks.check_flag("interleaved", interleaved)
    base = _checks.check_finite_number("base", base, positive=True)
    xp, (array,) = _checks.check_arrays(x=x)
    d: int = array.shape[-1]
    given = None if frequencies is None else _checked_frequencies(frequencies, d, dim)
    if dim is None and given is not None:
        dim = 2 * len(given)
    r = d if dim is None else _checks.check_positive_int("dim", dim, most=d)
    if r % 2:
        raise ValueError(
            f"dim must be even, for coordinates are rotated in pairs, got {r}; give an even dim "
            f"below the {d} coordinates of x"
        )
    dtype = _arrays.accumulation_dtype(xp, array.dtype, None)
    thetas = base ** (-np.arange(0, r, 2) / r) if given is None else given
    angles, of = _angles(array, positions, thetas)
    cos, sin = of.cos(angles), of.sin(angles)
    if of is np:
        device = array_api_compat.device(array)
        cos, sin = (_arrays.device_array(part, xp, dtype, device) for part in (cos, sin))
    cos, sin = (xp.astype(part, dtype, copy=False) for part in (cos, sin))
    pairs = xp.astype(array[..., :r], dtype, copy=False)
    if interleaved:
        a, b = pairs[..., 0::2], pairs[..., 1::2]
        rotated = xp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
        rotated = xp.reshape(rotated, (*array.shape[:-1], r))
    else:
        a, b = pairs[..., : r // 2], pairs[..., r // 2 :]
        rotated = xp.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)
    rotated = xp.astype(rotated, array.dtype, copy=False)
    return rotated if r == d else xp.concat([rotated, array[..., r:]], axis=-1)  # type: ignore[no-any-return]


def _checked_frequencies(frequencies: Any, d: int, dim: Any) -> NDArray[np.float64]:
    is_array = array_api_compat.is_array_api_obj(frequencies)
    found = np.asarray(_arrays.to_numpy(frequencies) if is_array else frequencies)
    is_number = found.dtype.kind in "iuf" and bool(np.isfinite(found).all())
    wanted = range(1, d // 2 + 1) if dim is None else [_checks.check_positive_int("dim", dim) // 2]
    if not is_number or found.ndim != 1 or len(found) not in wanted:
        raise ValueError(
            f"frequencies must be finite real numbers, one for each pair of coordinates, "
            f"{wanted[-1]}{' at most' if dim is None else ''}, got shape {found.shape} of "
            f"{found.dtype}"
        )
    return found.astype(np.float64)


def _angles(x: Array, positions: Any, frequencies: NDArray[np.float64]) -> tuple[Array, Any]:
    """Angles ``(..., L, r / 2)``, and the namespace that they are in: NumPy unless traced."""
    length = x.shape[-2]
    if positions is None:
        positions = np.arange(length)
    is_array = array_api_compat.is_array_api_obj(positions)
    shape = tuple(positions.shape) if is_array else np.shape(positions)
    lead, x_lead = shape[:-1], tuple(x.shape[:-2])
    fits = len(lead) <= len(x_lead) and all(
        n in (1, m) for n, m in zip(reversed(lead), reversed(x_lead), strict=False)
    )
    if shape[-1:] != (length,) or not fits:
        raise ValueError(
            f"positions must have shape ({length},), or leading axes too that broadcast to those "
            f"of x, {(*x_lead, length)}, got {shape}"
        )
    if is_array and array_api_compat.is_jax_array(positions) and _arrays.is_lazy(positions):
        xp = _arrays.namespace(positions)
        wide = xp.result_type(xp.float32, xp.asarray(0.0).dtype)
        return xp.astype(positions, wide)[..., None] * xp.asarray(frequencies, dtype=wide), xp
    host = _arrays.to_numpy(positions) if is_array else np.asarray(positions)
    if host.dtype.kind not in "iuf":
        raise TypeError(f"positions must be integers or real numbers, got dtype {host.dtype}")
    host = host.astype(np.float64)
    if not np.isfinite(host).all():
        raise ValueError("positions must be finite, got NaN or inf")
    return host[..., None] * frequencies, np


def alibi_slopes(heads: int) -> NDArray[np.float64]:
    r"""Return the slopes of ALiBi, one per head: logits fall by the slope times the distance.

    .. math::
        \mathrm{softmax}_j(s \, q_i \cdot k_j - m_h |i - j|), \qquad
        m_h = 2^{-8 h / H}, \quad h = 1, \ldots, H

    for H heads, a power of two. For other H let P be the largest power of two below H: the slopes
    of P heads come first, then every other slope of 2 P heads.

    Parameters
    ----------
    heads : int
        H.

    Returns
    -------
    ndarray, (H,), float64
        All positive, at most 1.

    Raises
    ------
    TypeError, ValueError
        Not a positive integer.

    Notes
    -----
    Causal attention with these slopes is decay by ``exp(-m_h)`` a token. In exact attention it
    is a key bias too: all keys of a row have ``-m_h i`` in common, which cancels, so that
    ``key_bias = m_h j`` is left.

    References
    ----------
    Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation" (2022), section 3; its code has the rule for other numbers of heads.

    Examples
    --------
    >>> from linattn.positions import alibi_slopes
    >>> alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])
    """
    heads = _checks.check_positive_int("heads", heads)
    power = 1 << (heads.bit_length() - 1)
    first, between = (2.0 ** (-8 / n * np.arange(1, n + 1)) for n in (power, 2 * power))
    return np.concatenate([first, between[0::2][: heads - power]])


def sinusoidal(length: int, dim: int) -> NDArray[np.float64]:
    r"""Return sinusoids to add to the input of a model, as in the first transformer.

    .. math::
        p_{t, 2 c} = \sin(t \, 10000^{-2 c / d}), \qquad
        p_{t, 2 c + 1} = \cos(t \, 10000^{-2 c / d})

    Parameters
    ----------
    length : int
        L: positions t are 0, ..., L - 1.
    dim : int
        d, even.

    Returns
    -------
    ndarray, (L, d), float64
        Cast it to the dtype of your inputs before adding: ``x + sinusoidal(L, d).astype(x.dtype)``.

    Raises
    ------
    TypeError, ValueError
        Sizes that are not positive integers, an odd dim.

    References
    ----------
    Vaswani et al., "Attention Is All You Need" (2017), section 3.5.

    Examples
    --------
    >>> from linattn.positions import sinusoidal
    >>> sinusoidal(2, 2).round(3)
    array([[0.   , 1.   ],
           [0.841, 0.54 ]])
    """
    length = _checks.check_positive_int("length", length)
    dim = _checks.check_positive_int("dim", dim)
    if dim % 2:
        raise ValueError(f"dim must be even: a sine and a cosine for each frequency, got {dim}")
    angles = np.arange(length)[:, None] * 10_000.0 ** (-np.arange(0, dim, 2) / dim)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, dim)
