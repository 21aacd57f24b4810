"""Activation functions: each returns its values, and a function that returns its derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import TypeAlias

from linattn.typing import Array

Activation: TypeAlias = Callable[[ModuleType, Array], tuple[Array, Callable[[], Array]]]

# erfc(x) = exp(-x^2) t p(2 t - 1) with t = 2 / (2 + x), x >= 0: polynomials p that interpolate at
# Chebyshev points, found with 60 digits. The errors of erfc are 1e-8 and 4e-16 (tests).
_ERFC = {
    32: (
        *(0.5107913526210115, 0.3435803125493544, 0.13973594579655535, 0.01822174911458144),
        *(-0.010753310882746258, -0.003243733067797946, 0.0015338470443377152),
        *(0.0004310400216422833, -0.0003047190864122867, -3.676436163571195e-05),
        *(4.428841467145517e-05,),
    ),
    64: (
        *(0.5107913526210115, 0.3435803422069066, 0.13973604627802544, 0.018221115753306545),
        *(-0.010755330944543402, -0.0032395925298231458, 0.0015453060235237155),
        *(0.00041864797455347, -0.0003315366672107297, -1.7185277049606434e-05),
        *(7.223470153006039e-05, -1.7076546276097942e-05, -1.0844830478580393e-05),
        *(8.066868949358842e-06, -5.732747033044422e-07, -1.8346763716451883e-06),
        *(1.023671759497573e-06, 1.527560153078624e-08, -3.1904880762943956e-07),
        *(1.5002373169874064e-07, 3.1237899528464255e-08, -5.1579015426615876e-08),
        *(8.331398302988539e-09, 6.618547737616718e-09, -2.2124653785049848e-09),
    ),
}


def relu(xp: ModuleType, x: Array) -> tuple[Array, Callable[[], Array]]:
    """``max(x, 0)``; the derivative at 0 is taken to be 0."""
    # Times the mask would make NaN of inf; NaN itself stays.
    return xp.where(x <= 0, xp.zeros_like(x), x), lambda: xp.astype(x > 0, x.dtype)


def squared_relu(xp: ModuleType, x: Array) -> tuple[Array, Callable[[], Array]]:
    """``max(x, 0)^2``."""
    positive, _ = relu(xp, x)
    return positive * positive, lambda: 2 * positive


def gelu(xp: ModuleType, x: Array) -> tuple[Array, Callable[[], Array]]:
    """``x Phi(x)`` with the distribution function of the normal distribution."""
    size = xp.abs(x) * math.sqrt(0.5)
    bell = xp.exp(-(size * size))
    t = 2 / (2 + size)
    y = 2 * t - 1
    first, *rest = reversed(_ERFC[64 if x.dtype == xp.float64 else 32])
    polynomial = xp.full_like(x, first)
    for coefficient in rest:
        polynomial = polynomial * y + coefficient
    tail = 0.5 * bell * t * polynomial
    phi = xp.where(x < 0, tail, 1 - tail)
    return x * phi, lambda: phi + x * bell * (1 / math.sqrt(2 * math.pi))


def gelu_tanh(xp: ModuleType, x: Array) -> tuple[Array, Callable[[], Array]]:
    """``x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2``, the older form of GELU."""
    c = math.sqrt(2 / math.pi)
    tanh = xp.tanh(c * (x + 0.044715 * (x * x * x)))

    def derivative() -> Array:
        inner = c * (1 + 3 * 0.044715 * (x * x))
        return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner

    return 0.5 * x * (1 + tanh), derivative


def silu(xp: ModuleType, x: Array) -> tuple[Array, Callable[[], Array]]:
    """``x / (1 + exp(-x))``."""
    # By tanh, which does not overflow.
    sigmoid = 0.5 * (1 + xp.tanh(0.5 * x))
    return x * sigmoid, lambda: sigmoid * (1 + x * (1 - sigmoid))


def quick_gelu(xp: ModuleType, x: Array) -> tuple[Array, Callable[[], Array]]:
    """``x / (1 + exp(-1.702 x))``, as CLIP has it."""
    c = 1.702
    value, derivative = silu(xp, c * x)
    return value / c, derivative


GATED: dict[str, Activation] = {"swiglu": silu, "geglu": gelu, "geglu_tanh": gelu_tanh}
"""Activations of gated layers, which multiply by a third product."""

ACTIVATIONS: dict[str, Activation] = {
    "relu": relu,
    "squared_relu": squared_relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": silu,
    **GATED,
}
"""All activations of a feed-forward layer, by name."""
