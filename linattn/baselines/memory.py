"""Older tokens compressed into a memory; and a memory that is learned."""

from __future__ import annotations

import numpy as np

from linattn import _arrays, _checks
from linattn.baselines import _shared
from linattn.typing import Array, ArrayT
from linattn.typing._shifts import largest

__all__ = ["compressive", "external"]


@_arrays.as_autocast("query", "key", "value")
def compressive(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    block_size: int,
    memory_size: int,
    compressed_size: int,
    rate: int = 2,
    is_causal: bool = True,
    scale: float | None = None,
) -> ArrayT:
    r"""Causal attention to a block, a memory of tokens before it, and means of still older ones.

    A query of the block that begins at b sees

    .. math::
        \{ j : b - n \le j \le i \} \;\cup\; \{ \text{the last } m \text{ means of } c \text{ tokens
        each that end before } b - n \}

    Parameters
    ----------
    query, key, value, scale
        As in :func:`local_window`.
    block_size : int
        The tokens that come in at once, a multiple of the rate.
    memory_size : int
        n, a multiple of the block size, or 0.
    compressed_size : int
        m means.
    rate : int, optional
        c, tokens of a mean. Default 2.
    is_causal : bool, optional
        Published for causal attention: False is rejected.

    Returns
    -------
    array, (..., L, e)
        In the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As :func:`local_window`; full attention; sizes that are no multiples.

    Notes
    -----
    Multiplications for a head: at most ``L (block + n + m) (d + e)``. Mean pooling is one of the
    paper's compressions; it also learns convolutions. A mean counts as a single key.

    Fails where an old token matters: its weight is lost in the mean, and tokens older than
    ``n + m c`` are forgotten.

    References
    ----------
    Rae et al., "Compressive Transformers for Long-Range Sequence Modelling" (2020), section 3.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import compressive
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 64, 16))
    >>> compressive(query, key, value, block_size=8, memory_size=16, compressed_size=8).shape
    (8, 64, 16)
    """
    _shared.causal_only("compressive", is_causal)
    inputs = _shared.prepare(query, key, value, scale, aligned=True)
    xp, length = inputs.xp, inputs.lengths[1]
    c = _checks.check_positive_int("rate", rate)
    size = _multiple("block_size", block_size, c, least=1)
    n = _multiple("memory_size", memory_size, size, least=0)
    m = _checks.check_positive_int("compressed_size", compressed_size, least=0)
    at = np.arange(length)[:, None]
    begin = at // size * size
    tokens = begin - n + np.arange(n + size)
    tokens = np.where((tokens >= 0) & (tokens <= at), tokens, -1)
    number = np.maximum(begin - n, 0) // c - m + np.arange(m)
    means = np.where(number >= 0, length + number, -1)
    runs = length // c
    mixing = inputs.array(_shared.one_hot(np.arange(runs * c) // c, runs).T / c)
    key, value = (
        xp.concat([x, xp.matmul(mixing, x[..., : runs * c, :])], axis=-2)
        for x in (inputs.key, inputs.value)
    )
    index = np.concatenate([means, tokens], axis=-1)
    return inputs.output(query, _shared.attend_to(inputs._replace(key=key, value=value), index))


@_arrays.as_autocast("query", "key_memory", "value_memory")
def external(
    query: ArrayT, *, key_memory: Array, value_memory: Array, is_causal: bool = False
) -> ArrayT:
    r"""Attention to m learned pairs of a key and a value, normalized twice.

    .. math::
        A_{ic} = \frac{\exp(q_i \cdot M^k_c)}{\sum_l \exp(q_l \cdot M^k_c)}, \qquad
        o_i = \frac{\sum_c A_{ic} M^v_c}{\sum_c A_{ic}}

    Parameters
    ----------
    query : array, (..., L, d)
        There are no keys and values: the inputs meet the memory only.
    key_memory, value_memory : array, (..., m, d) and (..., m, e)
        Learned, shared by all inputs.
    is_causal : bool, optional
        Published for full attention: True is rejected, since weights are normalized over queries.

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
    Multiplications for a head: ``L m (d + e)``.

    Fails untrained: tokens of a sequence meet each other in the normalization only.

    References
    ----------
    Guo et al., "Beyond Self-attention: External Attention using Two Linear Layers" (2021),
    equations (4) to (6), double normalization.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.baselines import external
    >>> rng = np.random.default_rng(0)
    >>> query, memory = rng.standard_normal((64, 16)), rng.standard_normal((8, 16))
    >>> external(query, key_memory=memory, value_memory=memory).shape
    (64, 16)
    """
    _shared.full_only("external", is_causal, "weights are normalized over the queries")
    inputs = _shared.prepare(query, key_memory, value_memory, 1.0)
    xp = inputs.xp
    logits = _shared.logits_of(inputs)
    # In logs: all weights of a query may be next to nothing beside those of the others.
    shifted = logits - largest(logits, axis=-2, keepdims=True)
    logs = shifted - xp.log(xp.sum(xp.exp(shifted), axis=-2, keepdims=True))
    return inputs.output(query, xp.matmul(_shared.softmax(logs, xp), inputs.value))


def _multiple(name: str, number: int, of: int, *, least: int) -> int:
    checked = _checks.check_positive_int(name, number, least=least)
    if checked % of:
        raise ValueError(f"{name} must be a multiple of {of}, got {checked}")
    return checked
