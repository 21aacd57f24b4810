"""The oracle of recurrences: a loop over the tokens, with the rules as published.

Shape letters: ``L`` tokens, ``d`` dim, ``e`` value dim; ``...`` are leading axes (batch, heads),
which broadcast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Float64 = npt.NDArray[np.float64]

__all__ = ["recurrence"]


@np.errstate(all="ignore")
def recurrence(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    *,
    update_rule: str,
    log_decay: npt.ArrayLike | None = None,
    beta: npt.ArrayLike | None = None,
    erase_key: npt.ArrayLike | None = None,
    read_key: npt.ArrayLike | None = None,
    scale: float | None = None,
    initial_state: npt.ArrayLike | None = None,
) -> tuple[Float64, Float64]:
    """Run a recurrence token by token in float64.

    With ``S' = exp(g_t) S_{t-1}``, row by row where ``g_t`` has a number a key channel, and
    ``o_t = scale q_t^T S_t``::

        linear        S_t = S_{t-1} + k_t v_t^T
        gated         S_t = S' + k_t v_t^T
        delta         S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T
        gated_delta   S_t = S' + beta_t k_t (v_t - S'^T k_t)^T
        dplr          S_t = S' + k_t v_t^T - (beta_t a_t) (S_{t-1}^T b_t)^T

    Parameters
    ----------
    query : array_like, (..., L, d)
        Any real dtype; computed in float64, whatever comes in.
    key : array_like, (..., L, d)
        The leading axes of all arrays broadcast.
    value : array_like, (..., L, e)
        What the keys store.
    update_rule : {"linear", "gated", "delta", "gated_delta", "dplr"}
        How a token changes the state.
    log_decay : array_like, (..., L) or (..., L, d), optional
        g, of as many axes as ``key`` for a number a channel and one fewer for a number a token.
        Of the gated rules, and optional (0) for "dplr".
    beta : array_like, (..., L) or (..., L, d), optional
        Of the delta rules, a number a token; optional (1) for "dplr", also one a channel of a.
    erase_key, read_key : array_like, (..., L, d), optional
        a and b, of "dplr" only.
    scale : float, optional
        Default ``1 / sqrt(d)``.
    initial_state : array_like, (..., d, e), optional
        S before the first token; default zeros.

    Returns
    -------
    output : ndarray, (..., L, e), float64
    state : ndarray, (..., d, e), float64
        S after the last token, with the leading axes of the output.

    Raises
    ------
    ValueError
        An unknown rule, or arguments that do not go with it.

    Notes
    -----
    Time O(L d e) a head, one token after another.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 50, 8))
    >>> output, _ = linattn.reference.recurrence(query, key, value, update_rule="linear")
    >>> fast = linattn.linear_recurrence(query, key, value, update_rule="linear")
    >>> bool(np.allclose(output, fast))
    True
    """
    if update_rule not in ("linear", "gated", "delta", "gated_delta", "dplr"):
        raise ValueError(
            f"update_rule must be linear, gated, delta, gated_delta or dplr, got {update_rule!r}"
        )
    is_general = update_rule == "dplr"
    for name, array, rules in (
        ("log_decay", log_decay, ("gated", "gated_delta")),
        ("beta", beta, ("delta", "gated_delta")),
        ("erase_key", erase_key, ("dplr",)),
        ("read_key", read_key, ("dplr",)),
    ):
        is_optional = is_general and name in ("log_decay", "beta")
        if not is_optional and (array is not None) != (update_rule in rules):
            wanted = "an array" if update_rule in rules else "None"
            raise ValueError(f"{name} must be {wanted} for update_rule={update_rule!r}")

    q, k, v = (_float64(array) for array in (query, key, value))
    dim, length, value_dim = k.shape[-1], k.shape[-2], v.shape[-1]
    g = np.zeros((length, 1)) if log_decay is None else _float64(log_decay)
    if log_decay is not None and g.ndim < k.ndim:
        g = g[..., None]
    b = np.ones((length, 1)) if beta is None else _float64(beta)
    if beta is not None and not (is_general and b.ndim == k.ndim):
        b = b[..., None]
    erase, read = (np.zeros_like(k) if x is None else _float64(x) for x in (erase_key, read_key))
    initial = np.zeros((dim, value_dim)) if initial_state is None else _float64(initial_state)
    lead = np.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v, g, b, erase, read, initial)))
    q, k, v, g, b, erase, read = (
        np.broadcast_to(x, (*lead, length, x.shape[-1])) for x in (q, k, v, g, b, erase, read)
    )
    factor = dim**-0.5 if scale is None else scale

    state = np.array(np.broadcast_to(initial, (*lead, dim, value_dim)))
    output = np.empty((*lead, length, value_dim))
    for t in range(length):
        removed = np.sum(read[..., t, :, None] * state, axis=-2)
        state = np.exp(g[..., t, :])[..., None] * state
        stored = v[..., t, :]
        if update_rule in ("delta", "gated_delta"):
            found = np.sum(k[..., t, :, None] * state, axis=-2)
            stored = b[..., t, :] * (stored - found)
        state = state + k[..., t, :, None] * stored[..., None, :]
        if is_general:
            state = state - (b * erase)[..., t, :, None] * removed[..., None, :]
        output[..., t, :] = factor * np.sum(q[..., t, :, None] * state, axis=-2)
    return output, state


def _float64(array: Any) -> Float64:
    copy = np.asarray(array)
    if copy.dtype.kind not in "fiub":
        raise TypeError(f"arrays must be real, got dtype {copy.dtype}")
    return copy.astype(np.float64)
