"""Fixed patterns of pairs: windows, strides, tokens that all see, random blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn.baselines import _shared
from linattn.sampling._seeds import Seed, as_generator
from linattn.typing import Array, ArrayT

__all__ = ["bigbird", "fixed", "local_window", "longformer", "strided"]

Index = NDArray[np.int64]


@_arrays.as_autocast("query", "key", "value")
def local_window(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    window_size: int,
    is_causal: bool = False,
    scale: float | None = None,
) -> ArrayT:
    r"""Softmax attention to near keys only.

    .. math::
        o_i = \sum_{j \in S_i} \mathrm{softmax}_{j \in S_i}(s \, q_i \cdot k_j) \, v_j, \qquad
        S_i = \{ j : |i - j| \le w \}

    Letters: ``L`` tokens, ``d`` dim, ``e`` value dim, ``w`` the window size.

    Parameters
    ----------
    query, key : array, (..., L, d)
        Leading axes of query, key and value broadcast.
    value : array, (..., L, e)
        float16 and bfloat16 are computed in float32.
    window_size : int
        w, the number of keys on each side; ``linattn.softmax_attention(local_window_size=w)`` is
        the same, made to be fast.
    is_causal : bool, optional
        Whether query i sees no key after i. Default False.
    scale : float, optional
        s. Default ``1 / sqrt(d)``.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError
        Not arrays, or of different libraries; a window that is no integer.
    ValueError
        Shapes that do not fit, or no token.

    Notes
    -----
    Multiplications for a head: ``L (2 w + 1) (d + e)``, causal ``L (w + 1) (d + e)``.

    Fails where what a query attends to is far away: a pair beyond the window has no weight at all.

    References
    ----------
    Parmar et al., "Image Transformer" (2018), section 3.2; Beltagy et al., "Longformer" (2020),
    section 3.1, *sliding window*.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> from linattn.baselines import local_window
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> output = local_window(query, key, value, window_size=63)
    >>> bool(np.allclose(output, linattn.softmax_attention(query, key, value)))
    True
    """
    inputs = _shared.prepare(query, key, value, scale, aligned=True)
    w = _checks.check_positive_int("window_size", window_size, least=0)
    after = 0 if _checks.check_flag("is_causal", is_causal) else w
    index = _window(inputs.lengths[1], w, after)
    return inputs.output(query, _shared.attend_to(inputs, index))


@_arrays.as_autocast("query", "key", "value")
def strided(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    stride: int,
    is_causal: bool = True,
    scale: float | None = None,
) -> ArrayT:
    r"""Causal attention to the last l tokens and to every l-th one before them.

    .. math::
        S_i = \{ j : \max(0, i - l) \le j \le i \} \cup \{ j \le i : (i - j) \bmod l = 0 \}

    Parameters
    ----------
    query, key, value, scale
        As in :func:`local_window`.
    stride : int
        l.
    is_causal : bool, optional
        Published for causal attention: False is rejected.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`; full attention.

    Notes
    -----
    The two patterns of the paper as one head that sees both (its *merged* heads).
    Multiplications for a head: at most ``L (l + 1 + L / l) (d + e)``, least at l = sqrt(L).

    Fails on sequences without a period of l: far tokens count by their position, not by content.

    References
    ----------
    Child et al., "Generating Long Sequences with Sparse Transformers" (2019), section 4.3
    (*strided attention*), equation (7) for merged heads.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import strided
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> strided(query, key, value, stride=8).shape
    (8, 64, 16)
    """
    _shared.causal_only("strided", is_causal)
    inputs = _shared.prepare(query, key, value, scale, aligned=True)
    length, step = inputs.lengths[1], _checks.check_positive_int("stride", stride)
    before = np.arange(length)[:, None] - step * np.arange(2, length // step + 1)
    index = np.concatenate([_window(length, step, 0), np.maximum(before, -1)], axis=-1)
    return inputs.output(query, _shared.attend_to(inputs, index))


@_arrays.as_autocast("query", "key", "value")
def fixed(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    stride: int,
    num_summary: int = 1,
    is_causal: bool = True,
    scale: float | None = None,
) -> ArrayT:
    r"""Causal attention to a token's own block and to the last c tokens of each block.

    .. math::
        S_i = \{ j \le i : \lfloor j / l \rfloor = \lfloor i / l \rfloor \}
        \cup \{ j \le i : j \bmod l \ge l - c \}

    Parameters
    ----------
    query, key, value, scale
        As in :func:`local_window`.
    stride : int
        l, the length of a block.
    num_summary : int, optional
        c, at most l. Default 1; the paper has 8, 16 or 32 for l of 128 or 256.
    is_causal : bool, optional
        Published for causal attention: False is rejected.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`; full attention; more summaries than a block has tokens.

    Notes
    -----
    Multiplications for a head: at most ``L (l + c L / l) (d + e)``.

    Fails on a model that was not trained with it: nothing makes the last tokens of a block
    summaries of it.

    References
    ----------
    Child et al., "Generating Long Sequences with Sparse Transformers" (2019), section 4.3
    (*fixed attention*), equation (7) for merged heads.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import fixed
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> fixed(query, key, value, stride=8).shape
    (8, 64, 16)
    """
    _shared.causal_only("fixed", is_causal)
    inputs = _shared.prepare(query, key, value, scale, aligned=True)
    length, size = inputs.lengths[1], _checks.check_positive_int("stride", stride)
    count = _checks.check_positive_int("num_summary", num_summary, most=size)
    at = np.arange(length)[:, None]
    block = at // size * size + np.arange(size)
    summaries = np.arange(length)[np.arange(length) % size >= size - count]
    # Those of a token's own block are there already.
    earlier = np.where(summaries < at // size * size, summaries, -1)
    index = np.concatenate([np.where(block <= at, block, -1), earlier], axis=-1)
    return inputs.output(query, _shared.attend_to(inputs, index))


@_arrays.as_autocast("query", "key", "value")
def longformer(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    window_size: int,
    num_global: int = 1,
    is_causal: bool = False,
    scale: float | None = None,
) -> ArrayT:
    r"""Attend within a window; the first tokens see all and are seen by all.

    .. math::
        S_i = \{ j : |i - j| \le w \} \cup \{ j < g \}, \qquad S_i = \{ \text{all} \}
        \text{ for } i < g

    Parameters
    ----------
    query, key, value, scale
        As in :func:`local_window`.
    window_size : int
        w, the number of keys on each side.
    num_global : int, optional
        g. Default 1, the classification token.
    is_causal : bool, optional
        Published for full attention: True is rejected, since global tokens see later ones.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`; causal attention; more global tokens than tokens.

    Notes
    -----
    Multiplications for a head: ``(L (2 w + 1 + g) + g L) (d + e)``. The projections of their own
    that the paper gives to global tokens are left out: they are weights of a model.

    Fails where a far token matters that is not global. Trained models do put much weight on their
    first token.

    References
    ----------
    Beltagy et al., "Longformer: The Long-Document Transformer" (2020), section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import longformer
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> longformer(query, key, value, window_size=8).shape
    (8, 64, 16)
    """
    _shared.full_only("longformer", is_causal, "global tokens see the whole sequence")
    inputs = _shared.prepare(query, key, value, scale, aligned=True)
    length = inputs.lengths[1]
    w = _checks.check_positive_int("window_size", window_size, least=0)
    g = _checks.check_positive_int("num_global", num_global, least=0, most=length)
    window = _window(length, w, w)
    seen_by_all = np.broadcast_to(np.arange(g), (length, g))
    index = np.concatenate([seen_by_all, np.where(window < g, -1, window)], axis=-1)
    return _with_global_rows(query, inputs, index, g)


@_arrays.as_autocast("query", "key", "value")
def bigbird(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    block_size: int,
    num_global: int = 2,
    num_random: int = 3,
    is_causal: bool = False,
    rng: Seed = None,
    scale: float | None = None,
) -> ArrayT:
    r"""Attend to a window of three blocks, the first ones, which see all, and random ones.

    A block of b queries sees its own block and the two beside it, the first g blocks, and r blocks
    drawn without replacement from the others. The first g blocks see everything.

    Parameters
    ----------
    query, key, value, scale
        As in :func:`local_window`.
    block_size : int
        b.
    num_global, num_random : int, optional
        g and r blocks. Default 2 and 3, as in the paper's base model.
    is_causal : bool, optional
        Published for full attention: True is rejected, since global blocks see later ones.
    rng : int, numpy.random.Generator or None, optional
        Draws the random blocks, alike for all leading axes.

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
    Multiplications for a head: ``(L b (3 + g + r) + L b g) (d + e)``. A last block may be shorter;
    where fewer than r blocks are left to draw from, all of them are taken.

    Fails as a window does: random keys carry little of a sharp distribution.

    References
    ----------
    Zaheer et al., "Big Bird: Transformers for Longer Sequences" (2020), section 2 and appendix D;
    global tokens as its internal construction (ITC).

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import bigbird
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> bigbird(query, key, value, block_size=4, rng=0).shape
    (8, 64, 16)
    """
    _shared.full_only("bigbird", is_causal, "global blocks see the whole sequence")
    inputs = _shared.prepare(query, key, value, scale, aligned=True)
    length, size = inputs.lengths[1], _checks.check_positive_int("block_size", block_size)
    num_blocks = -(-length // size)
    g = min(_checks.check_positive_int("num_global", num_global, least=0), num_blocks)
    r = _checks.check_positive_int("num_random", num_random, least=0)
    generator = as_generator(rng)
    blocks = np.full((num_blocks, g + 3 + r), -1)
    for b in range(num_blocks):
        near = {*range(g), *range(max(0, b - 1), min(num_blocks, b + 2))}
        remaining = np.array([other for other in range(num_blocks) if other not in near], dtype=int)
        drawn = generator.choice(remaining, min(r, len(remaining)), replace=False)
        seen = [*sorted(near), *drawn]
        blocks[b, : len(seen)] = seen
    tokens = blocks[:, :, None] * size + np.arange(size)
    tokens = np.where((blocks[:, :, None] < 0) | (tokens >= length), -1, tokens)
    index = np.repeat(tokens.reshape(num_blocks, -1), size, axis=0)[:length]
    return _with_global_rows(query, inputs, index, min(g * size, length))


def _window(length: int, before: int, after: int) -> Index:
    """Positions from ``before`` tokens back to ``after`` tokens on; -1 beyond the ends."""
    offsets = np.arange(-min(before, length - 1), min(after, length - 1) + 1)
    index = np.arange(length)[:, None] + offsets
    return np.where((index >= 0) & (index < length), index, -1)


def _with_global_rows(
    query: ArrayT, inputs: _shared.Inputs, index: Index, num_global: int
) -> ArrayT:
    """Attention by a table, of the first queries to all keys."""
    xp = inputs.xp
    parts = []
    if num_global:
        first = inputs._replace(query=inputs.query[..., :num_global, :])
        parts.append(_shared.attend(first, inputs.key, inputs.value))
    if num_global < inputs.lengths[0]:
        rest = inputs._replace(query=inputs.query[..., num_global:, :])
        parts.append(_shared.attend_to(rest, index[num_global:]))
    return inputs.output(query, xp.concat(parts, axis=-2))
