"""Layers that act on each token separately: products, feed-forward, norms."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn.layers._activations import ACTIVATIONS, GATED
from linattn.layers._params import (
    Params,
    Part,
    Result,
    accumulated,
    all_tokens,
    as_part,
    check_pair,
    floating,
    join,
    normal_numbers,
    split,
    takes,
    with_pullback,
)
from linattn.typing import Array

__all__ = [
    "Activation",
    "feed_forward",
    "feed_forward_vjp",
    "init_feed_forward",
    "init_linear",
    "init_norm",
    "layer_norm",
    "layer_norm_vjp",
    "linear",
    "linear_vjp",
    "product",
    "rms_norm",
    "rms_norm_vjp",
]

Activation: TypeAlias = Literal[
    "relu",
    "squared_relu",
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "silu",
    "swiglu",
    "geglu",
    "geglu_tanh",
]


@takes()
def linear(params: Params, x: Array) -> Array:
    r"""Multiply each token by a matrix and add a bias, as ``torch.nn.Linear``.

    .. math::
        y = x W^\top + b

    Letters: ``i`` and ``o`` features in and out.

    Parameters
    ----------
    params : dict
        ``weight`` (o, i) and, optional, ``bias`` (o,).
    x : array, (..., i)
        Floats of any array-API library; the parameters are of the same library and dtype.

    Returns
    -------
    array, (..., o)
        In the library, dtype and device of x.

    Raises
    ------
    TypeError, ValueError
        Parameters are missing or unknown, or have another shape, dtype or library.

    Notes
    -----
    Time O(n i o) for n tokens.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> rng = np.random.default_rng(0)
    >>> params = layers.init_linear(rng, 8, 16)
    >>> layers.linear(params, np.ones((2, 5, 8), np.float32)).shape
    (2, 5, 16)
    """
    return product(params, x)[0]


@takes()
@with_pullback
def linear_vjp(params: Params, x: Array) -> Result:
    """Return the output of :func:`linear` and a function that computes its gradients.

    Parameters
    ----------
    params, x
        As for :func:`linear`.

    Returns
    -------
    output : array, (..., o)
        Output of :func:`linear`.
    pullback : callable
        ``pullback(grad_output) -> (grad_params, grad_x)``.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_linear(np.random.default_rng(0), 8, 16)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> output, pullback = layers.linear_vjp(params, x)
    >>> grad_params, grad_x = pullback(output)  # of |output|^2 / 2
    >>> sorted(grad_params)
    ['bias', 'weight']
    """
    return product(params, x)


@accumulated(narrows=True)
def product(params: Params, x: Array) -> Result:
    """Return :func:`linear` and its pullback, for layers that call it."""
    part = as_part(params, "weight", "bias")
    xp, weight = check_pair(part, "weight", x)
    rows = all_tokens(x)
    out = rows @ xp.matrix_transpose(weight)
    if "bias" in part:
        out = out + check_pair(part, "bias", x, weight.shape[0])[1]
    shape = (*x.shape[:-1], weight.shape[0])

    def pullback(grad_output: Array) -> tuple[dict[str, Array], Array]:
        _checks.check_cotangent("grad_output", grad_output, "output", shape, x)
        grad = all_tokens(grad_output)
        grads = {"weight": xp.matrix_transpose(grad) @ rows}
        if "bias" in part:
            grads["bias"] = xp.sum(grad, axis=0)
        return grads, xp.reshape(grad @ weight, tuple(x.shape))

    return xp.reshape(out, shape), pullback


@takes()
def init_linear(
    rng: np.random.Generator,
    in_features: int,
    out_features: int,
    *,
    bias: bool = True,
    dtype: Any = np.float32,
) -> dict[str, NDArray[Any]]:
    """Draw the parameters of :func:`linear`: normal numbers of variance 1 / i, and a bias of 0.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of the numbers.
    in_features, out_features : int
        i and o.
    bias : bool, optional
        Whether there is a bias. Default True.
    dtype : dtype, optional
        float16, float32 (the default) or float64.

    Returns
    -------
    dict
        NumPy arrays ``weight`` and ``bias``.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_linear(np.random.default_rng(0), 8, 16)
    >>> sorted(params)
    ['bias', 'weight']
    """
    i = _checks.check_positive_int("in_features", in_features)
    o = _checks.check_positive_int("out_features", out_features)
    params = {"weight": normal_numbers(rng, (o, i), i**-0.5, dtype)}
    has_bias = _checks.check_flag("bias", bias)
    return params | {"bias": np.zeros(o, dtype)} if has_bias else params


@takes()
def feed_forward(params: Params, x: Array, *, activation: Activation = "relu") -> Array:
    r"""Apply two products with an activation in between to each token.

    .. math::
        y = W_2 \, \sigma(W_1 x + b_1) + b_2, \qquad
        y = W_2 \left( \sigma(W_1 x + b_1) \odot (W_3 x + b_3) \right) + b_2
        \ \text{("swiglu", "geglu")}

    Letters: ``d`` dim, ``h`` hidden dim.

    Parameters
    ----------
    params : dict
        ``linear1.weight`` (h, d), ``linear2.weight`` (d, h), for gated activations
        ``linear3.weight`` (h, d), and optional biases, ``linear1.bias`` and so on.
    x : array, (..., d)
        Floats of any array-API library.
    activation : str, optional
        "relu", the default; "squared_relu", its square; "gelu", ``x Phi(x)``; "gelu_tanh", its
        approximation by tanh; "silu", ``x / (1 + exp(-x))``; "quick_gelu",
        ``x / (1 + exp(-1.702 x))``. Gated, times a third product: "swiglu" with "silu", "geglu"
        with "gelu", "geglu_tanh" with "gelu_tanh".

    Returns
    -------
    array, (..., d)
        In the library, dtype and device of x.

    Raises
    ------
    TypeError, ValueError
        As :func:`linear`; the activation is unknown.

    Notes
    -----
    Time O(n d h) for n tokens. The array API has no error function for "gelu". It is computed here,
    with errors of 1e-8 in float32 and 4e-16 in float64.

    References
    ----------
    Vaswani et al., "Attention Is All You Need" (2017), eq. 2; Hendrycks and Gimpel, "Gaussian Error
    Linear Units" (2016); Shazeer, "GLU Variants Improve Transformer" (2020), eq. 6; So et al.,
    "Primer: Searching for Efficient Transformers for Language Modeling" (2021), squared ReLU.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_feed_forward(np.random.default_rng(0), 8)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> layers.feed_forward(params, x, activation="gelu").shape
    (2, 5, 8)
    """
    return feed_forward_vjp(params, x, activation=activation)[0]


@takes()
@with_pullback
@accumulated(narrows=True)
def feed_forward_vjp(params: Params, x: Array, *, activation: Activation = "relu") -> Result:
    """Return the output of :func:`feed_forward` and a function that computes its gradients.

    Parameters
    ----------
    params, x, activation
        As for :func:`feed_forward`.

    Returns
    -------
    output : array, (..., d)
        Output of :func:`feed_forward`.
    pullback : callable
        ``pullback(grad_output) -> (grad_params, grad_x)``.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_feed_forward(np.random.default_rng(0), 8)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> output, pullback = layers.feed_forward_vjp(params, x)
    >>> grad_params, grad_x = pullback(output)  # of |output|^2 / 2
    >>> sorted(grad_params)
    ['linear1.bias', 'linear1.weight', 'linear2.bias', 'linear2.weight']
    """
    _check_activation(activation)
    is_gated = activation in GATED
    first, second, *third = split(
        params, "linear1.", "linear2.", *(["linear3."] if is_gated else [])
    )
    inner, pull_1 = product(first, x)
    active, derivative = ACTIVATIONS[activation](_arrays.namespace(x), inner)
    hidden = active
    if is_gated:
        gate, pull_3 = product(third[0], x)
        hidden = active * gate
    out, pull_2 = product(second, hidden)

    def pullback(grad_output: Array) -> tuple[dict[str, Array], Array]:
        grads_2, grad_hidden = pull_2(grad_output)
        grads = {"linear2.": grads_2}
        grad_active = grad_hidden * gate if is_gated else grad_hidden
        grads["linear1."], grad = pull_1(grad_active * derivative())
        if is_gated:
            grads["linear3."], grad_3 = pull_3(grad_hidden * active)
            grad = grad + grad_3
        return join(grads), grad

    return out, pullback


@takes()
def init_feed_forward(
    rng: np.random.Generator,
    dim: int,
    hidden_dim: int | None = None,
    *,
    activation: Activation = "relu",
    bias: bool = True,
    dtype: Any = np.float32,
) -> dict[str, NDArray[Any]]:
    """Draw the parameters of :func:`feed_forward`, each product as :func:`init_linear`.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of the numbers.
    dim : int
        d.
    hidden_dim : int, optional
        h; default 4 d.
    activation : str, optional
        "swiglu", "geglu" and "geglu_tanh" have a third product. Default "relu".
    bias, dtype : optional
        As for :func:`init_linear`.

    Returns
    -------
    dict
        NumPy arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_feed_forward(np.random.default_rng(0), 8)
    >>> sorted(params)
    ['linear1.bias', 'linear1.weight', 'linear2.bias', 'linear2.weight']
    """
    dim = _checks.check_positive_int("dim", dim)
    hidden = 4 * dim if hidden_dim is None else _checks.check_positive_int("hidden_dim", hidden_dim)
    shapes = {"linear1.": (dim, hidden), "linear2.": (hidden, dim)}
    _check_activation(activation)
    if activation in GATED:
        shapes["linear3."] = (dim, hidden)
    drawn = {n: init_linear(rng, *shape, bias=bias, dtype=dtype) for n, shape in shapes.items()}
    return join(drawn)


@takes()
def layer_norm(params: Params, x: Array, *, eps: float = 1e-5) -> Array:
    r"""Scale tokens to mean 0 and variance 1, then apply weight and bias, as torch's ``LayerNorm``.

    .. math::
        y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \odot w + b

    Letters: ``d`` dim.

    Parameters
    ----------
    params : dict
        ``weight`` (d,) and, optional, ``bias`` (d,).
    x : array, (..., d)
        Floats of any array-API library.
    eps : float, optional
        Added to the variance. Default 1e-5.

    Returns
    -------
    array, (..., d)
        In the library, dtype and device of x.

    Raises
    ------
    TypeError, ValueError
        As :func:`linear`; eps is not a positive number.

    References
    ----------
    Ba, Kiros and Hinton, "Layer Normalization" (2016), eq. 4.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> x = np.asarray([[1.0, 2.0, 3.0]])
    >>> params = layers.init_norm(3, dtype=np.float64)
    >>> layers.layer_norm(params, x).round(2)
    array([[-1.22,  0.  ,  1.22]])
    """
    return layer_norm_vjp(params, x, eps=eps)[0]


@takes()
@with_pullback
@accumulated(narrows=False)
def layer_norm_vjp(params: Params, x: Array, *, eps: float = 1e-5) -> Result:
    """Return the output of :func:`layer_norm` and a function that computes its gradients.

    Parameters
    ----------
    params, x, eps
        As for :func:`layer_norm`.

    Returns
    -------
    output : array, (..., d)
        Output of :func:`layer_norm`.
    pullback : callable
        ``pullback(grad_output) -> (grad_params, grad_x)``.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_norm(8)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> output, pullback = layers.layer_norm_vjp(params, x)
    >>> grad_params, grad_x = pullback(output)  # of |output|^2 / 2
    >>> sorted(grad_params)
    ['bias', 'weight']
    """
    part = as_part(params, "weight", "bias")
    xp = check_pair(part, "weight", x)[0]
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    out, pull = _normalized(part, centred, eps)

    def pullback(grad_output: Array) -> tuple[dict[str, Array], Array]:
        grads, grad = pull(grad_output)
        return grads, grad - xp.mean(grad, axis=-1, keepdims=True)

    return out, pullback


@takes()
def rms_norm(params: Params, x: Array, *, eps: float = 1e-6) -> Array:
    r"""Scale each token to mean square 1, then multiply by the weight, as ``torch.nn.RMSNorm``.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \odot w

    Letters: ``d`` dim.

    Parameters
    ----------
    params : dict
        ``weight`` (d,).
    x : array, (..., d)
        Floats of any array-API library.
    eps : float, optional
        Added to the mean square. Default 1e-6.

    Returns
    -------
    array, (..., d)
        In the library, dtype and device of x.

    Raises
    ------
    TypeError, ValueError
        As :func:`layer_norm`.

    References
    ----------
    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), eq. 4.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> x = np.asarray([[3.0, 4.0]])
    >>> params = layers.init_norm(2, bias=False, dtype=np.float64)
    >>> layers.rms_norm(params, x).round(2)
    array([[0.85, 1.13]])
    """
    return rms_norm_vjp(params, x, eps=eps)[0]


@takes()
@with_pullback
@accumulated(narrows=False)
def rms_norm_vjp(params: Params, x: Array, *, eps: float = 1e-6) -> Result:
    """Return the output of :func:`rms_norm` and a function that computes its gradients.

    Parameters
    ----------
    params, x, eps
        As for :func:`rms_norm`.

    Returns
    -------
    output : array, (..., d)
        Output of :func:`rms_norm`.
    pullback : callable
        ``pullback(grad_output) -> (grad_params, grad_x)``.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_norm(8, bias=False)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> output, pullback = layers.rms_norm_vjp(params, x)
    >>> grad_params, grad_x = pullback(output)  # of |output|^2 / 2
    >>> sorted(grad_params)
    ['weight']
    """
    part = as_part(params, "weight")
    check_pair(part, "weight", x)
    return _normalized(part, x, eps)


def _normalized(part: Part, x: Array, eps: float) -> Result:
    """Divide tokens by their root mean square; scale, and shift where there is a bias."""
    eps = _checks.check_finite_number("eps", eps, positive=True)
    xp, weight = check_pair(part, "weight", x)
    inverse = 1 / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps)
    normal = x * inverse
    out = normal * weight
    if "bias" in part:
        out = out + check_pair(part, "bias", x)[1]

    def pullback(grad_output: Array) -> tuple[dict[str, Array], Array]:
        _checks.check_cotangent("grad_output", grad_output, "output", tuple(x.shape), x)
        grads = {"weight": xp.sum(all_tokens(grad_output * normal), axis=0)}
        if "bias" in part:
            grads["bias"] = xp.sum(all_tokens(grad_output), axis=0)
        scaled = grad_output * weight
        along = xp.mean(scaled * normal, axis=-1, keepdims=True)
        return grads, inverse * (scaled - normal * along)

    return out, pullback


@takes()
def init_norm(dim: int, *, bias: bool = True, dtype: Any = np.float32) -> dict[str, NDArray[Any]]:
    """Return the parameters of :func:`layer_norm`; without a bias also of :func:`rms_norm`.

    Parameters
    ----------
    dim : int
        d.
    bias, dtype : optional
        As for :func:`init_linear`.

    Returns
    -------
    dict
        NumPy arrays ``weight`` and ``bias``.

    Examples
    --------
    >>> from linattn import layers
    >>> layers.init_norm(2)["weight"].tolist()
    [1.0, 1.0]
    """
    dim = _checks.check_positive_int("dim", dim)
    params = {"weight": np.ones(dim, floating(dtype))}
    has_bias = _checks.check_flag("bias", bias)
    return params | {"bias": np.zeros(dim, dtype)} if has_bias else params


def _check_activation(activation: Activation) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
