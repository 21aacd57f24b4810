"""Gradients against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn.sampling import Seed, as_generator
from linattn.testing._evidence import Evidence, check_function, check_not_empty, fail, on_host
from linattn.typing import Array

__all__ = ["assert_gradient"]


@_arrays.on_array_device
def assert_gradient(
    function: Callable[..., Array],
    vjp: Callable[..., Any],
    *arrays: Array,
    step: float = 1e-3,
    num_directions: int = 3,
    rtol: float = 1e-6,
    rng: Seed = 0,
) -> Evidence:
    r"""Assert that a vector-Jacobian product is the derivative of its function.

    .. math::
        \langle \bar x, u \rangle = \frac{d}{dh} \langle \bar y, f(x + h u) \rangle
        \quad \text{for random directions } u \text{ and cotangents } \bar y

    Parameters
    ----------
    function : callable
        ``function(*arrays) -> output``, one array.
    vjp : callable
        ``vjp(*arrays) -> (output, pullback)`` and ``pullback(cotangent) -> gradients``, one for
        each array (more are ignored), as ``linear_attention_vjp`` and ``jax.vjp``.
    *arrays : array
        float64, where the function is smooth.
    step : float, optional
        h, in units of the size of the array. Default 1e-3.
    num_directions : int, optional
        For each array. Default 3.
    rtol : float, optional
        Default 1e-6.
    rng : int, Generator, SeedSequence or None, optional
        Default 0.

    Returns
    -------
    Evidence

    Raises
    ------
    AssertionError
        ``vjp`` and ``function`` return different outputs; a gradient has another shape or type than
        its array, or is not the derivative.
    TypeError, ValueError
        Arrays that are not float64, or none; directions that are not a whole, positive number.

    Notes
    -----
    Central differences with steps h and h / 2, extrapolated: an error of order h^4. A wrong entry
    of the gradient is invisible in a random direction with probability 0. Time of
    ``4 num_directions`` calls an array.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.testing import assert_gradient
    >>> def vjp(x):
    ...     return np.sin(x), lambda cotangent: (cotangent * np.cos(x),)
    >>> assert_gradient(np.sin, vjp, np.linspace(0, 1, 5)).check
    'assert_gradient'
    """
    check = "assert_gradient"
    check_function("function", function, "(*arrays) -> output")
    check_function("vjp", vjp, "(*arrays) -> (output, pullback)")
    check_not_empty("arrays", arrays)
    _checks.check_positive_int("num_directions", num_directions)
    named = {f"arrays[{index}]": array for index, array in enumerate(arrays)}
    xp, _ = _checks.check_arrays(1, **named)
    if arrays[0].dtype != xp.float64:
        raise TypeError(f"arrays must be float64 for finite differences, got {arrays[0].dtype}")
    generator = as_generator(rng)
    device = array_api_compat.device(arrays[0])
    expected = on_host(function(*arrays))
    output, pullback = vjp(*arrays)
    if not np.allclose(on_host(output), expected, rtol=1e-9, atol=1e-12):
        fail(check, "the output of vjp is not that of the function")
    cotangent = generator.standard_normal(expected.shape)
    gradients = pullback(xp.asarray(cotangent, device=device))
    if len(gradients) < len(arrays):
        fail(check, f"want {len(arrays)} gradients, got {len(gradients)}")
    for index, (array, gradient) in enumerate(zip(arrays, gradients, strict=False)):
        if type(gradient) is not type(array) or tuple(gradient.shape) != tuple(array.shape):
            fail(
                check,
                f"gradient {index} must be {type(array).__name__} of shape {tuple(array.shape)}, "
                f"got {type(gradient).__name__} of shape {tuple(getattr(gradient, 'shape', ()))}",
            )
        size = max(float(np.sqrt(np.mean(on_host(array) ** 2))), 1e-3)
        for _ in range(num_directions):
            u = generator.standard_normal(tuple(array.shape))

            def along(h: float, index: int = index, u: NDArray[np.float64] = u) -> float:
                moved = list(arrays)
                moved[index] = arrays[index] + xp.asarray(h * u, device=device)
                return float(np.sum(cotangent * on_host(function(*moved))))

            h = step * size
            wide = (along(h) - along(-h)) / (2 * h)
            narrow = (along(h / 2) - along(-h / 2)) / h
            difference = (4 * narrow - wide) / 3
            terms = on_host(gradient) * u
            slope, scale = float(np.sum(terms)), float(np.sqrt(np.sum(terms**2)))
            if not abs(slope - difference) <= rtol * max(abs(difference), scale, 1e-9):
                message = (
                    f"gradient {index}: slope {slope:.9g} along a random direction, finite "
                    f"difference {difference:.9g}"
                )
                fail(check, message)
    return Evidence(check, f"{len(arrays)} arrays, {num_directions} directions each", 0.0, rtol)
