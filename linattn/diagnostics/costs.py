"""The length from which linear attention pays, from operation counts."""

from __future__ import annotations

import math

from linattn import _checks

__all__ = ["crossover_length"]


def crossover_length(
    dim: int,
    value_dim: int,
    num_features: int,
    *,
    is_causal: bool = False,
    chunk_size: int = 128,
    exact_rate: float = 1.0,
    linear_rate: float = 1.0,
) -> int:
    r"""Length from which linear attention takes less time than exact attention.

    Operations of the matrix products, for one head and ``N = L = S``:

    .. math::
        \text{exact: } 2 N^2 (d + e), \qquad \text{linear: } 4 N m (d + e + 1)

    and with a causal mask, where exact attention skips one half and linear attention computes
    blocks of c tokens by pairs,

    .. math::
        \text{exact: } N (N + 1) (d + e), \qquad
        \text{linear: } 4 N m (d + e + 1) + 2 N c (m + e + 1)

    Parameters
    ----------
    dim, value_dim, num_features : int
        d, e and m.
    is_causal : bool, optional
        Default False.
    chunk_size : int, optional
        c, for causal attention. Default 128.
    exact_rate, linear_rate : float, optional
        Operations a second of the two, as measured where it will run; only their ratio counts.
        Exact attention usually has the higher rate on a GPU. Default 1 and 1.

    Returns
    -------
    int
        The smallest such N, at least 1.

    Raises
    ------
    TypeError, ValueError
        Sizes that are not positive integers, rates that are not positive.

    Notes
    -----
    A formula, not a measurement: exponentials (N^2 of them against 2 N m), memory traffic, which
    favours linear attention, and the half of its projection that a paired map saves are left out.

    Examples
    --------
    >>> from linattn.diagnostics import crossover_length
    >>> crossover_length(64, 64, 256)
    517
    """
    is_causal = _checks.check_flag("is_causal", is_causal)
    sizes = {"dim": dim, "value_dim": value_dim, "num_features": num_features}
    d, e, m = (_checks.check_positive_int(name, size) for name, size in sizes.items())
    c = _checks.check_positive_int("chunk_size", chunk_size)
    rates = {"exact_rate": exact_rate, "linear_rate": linear_rate}
    exact, linear = (
        _checks.check_finite_number(name, rate, positive=True) for name, rate in rates.items()
    )
    operations = 4 * m * (d + e + 1)
    if is_causal:
        equal = (operations + 2 * c * (m + e + 1)) / (d + e) * (exact / linear) - 1
    else:
        equal = operations / (2 * (d + e)) * (exact / linear)
    return max(1, math.floor(equal) + 1)
