"""Layers around a recurrence: the short causal convolution before it, the gated norm after it."""

from __future__ import annotations

from typing import Any, Literal

import array_api_compat

from linattn import _checks
from linattn.layers._activations import ACTIVATIONS, GATED
from linattn.layers._params import (
    Params,
    Part,
    Pullback,
    Result,
    accumulated,
    all_tokens,
    as_part,
    check_pair,
    takes,
    with_pullback,
)
from linattn.layers.dense import rms_norm_vjp
from linattn.typing import Array

__all__ = [
    "causal_convolution",
    "causal_convolution_vjp",
    "gated_rms_norm",
    "gated_rms_norm_vjp",
]


@takes()
def causal_convolution(
    params: Params,
    x: Array,
    *,
    activation: str | None = None,
    state: Array | None = None,
    return_state: bool = False,
) -> Any:
    r"""Convolve each channel with a short kernel that sees a token and the ones before it.

    .. math::
        y_{tc} = \sigma\Bigl(b_c + \sum_{j=0}^{k-1} w_{c0j} \, x_{t-k+1+j,\,c}\Bigr)

    This is ``torch.nn.Conv1d`` with ``groups=c`` and ``padding=k - 1``, cut to L tokens. Letters:
    ``L`` tokens, ``c`` channels, ``k`` tokens of the kernel.

    Parameters
    ----------
    params : dict
        ``weight`` (c, 1, k) and, optional, ``bias`` (c,).
    x : array, (..., L, c)
        Floats of any array-API library; the parameters are of the same library and dtype.
    activation : str, optional
        One of :func:`feed_forward` without a gate, such as "silu". Default: none.
    state : array, (..., k - 1, c), optional
        The last tokens before x, in the dtype of x. Default zeros.
    return_state : bool, optional
        Also return the state after x. Default False.

    Returns
    -------
    output : array, (..., L, c)
        In the library, dtype and device of x.
    state : array, (..., k - 1, c)
        Only with ``return_state``: the last tokens of `state` and x together.

    Raises
    ------
    TypeError, ValueError
        Parameters are missing or unknown, or arrays have another shape, dtype or library; the
        activation is unknown.

    Notes
    -----
    Time O(L c k). float16 and bfloat16 are accumulated in float32. A padded token is a token here:
    multiply x by the mask first, as transformers does.

    References
    ----------
    ONNX operator set 27, ``CausalConvWithState``, which has the channels before the tokens.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> x = np.asarray([[1.0], [2.0], [3.0]])
    >>> params = {"weight": np.asarray([[[1.0, 10.0]]])}
    >>> output, state = layers.causal_convolution(params, x, return_state=True)
    >>> output[:, 0].tolist(), state.tolist()
    ([10.0, 21.0, 32.0], [[3.0]])
    """
    return_state = _checks.check_flag("return_state", return_state)
    part, padded = _after(params, x, state)
    output, _ = _convolved(part, padded, activation=activation)
    return (output, padded[..., x.shape[-2] :, :]) if return_state else output


@takes()
@with_pullback
def causal_convolution_vjp(params: Params, x: Array, *, activation: str | None = None) -> Result:
    """Return the output of :func:`causal_convolution` and a function that computes its gradients.

    Parameters
    ----------
    params, x, activation
        As for :func:`causal_convolution`.

    Returns
    -------
    output : array, (..., L, c)
        Output of :func:`causal_convolution` without a state.
    pullback : callable
        ``pullback(grad_output) -> (grad_params, grad_x)``.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = {"weight": np.ones((8, 1, 4), np.float32)}
    >>> output, pullback = layers.causal_convolution_vjp(params, np.ones((2, 5, 8), np.float32))
    >>> grad_params, grad_x = pullback(output)  # of |output|^2 / 2
    >>> grad_params["weight"].shape
    (8, 1, 4)
    """
    part, padded = _after(params, x, None)
    output, pull = _convolved(part, padded, activation=activation)

    def pullback(grad_output: Array) -> tuple[dict[str, Array], Array]:
        grads, grad = pull(grad_output)
        return grads, grad[..., grad.shape[-2] - x.shape[-2] :, :]

    return output, pullback


def _after(params: Params, x: Any, state: Any) -> tuple[Part, Array]:
    """Check the arguments; return the tokens after those of the state."""
    part = as_part(params, "weight", "bias")
    xp, (x,) = _checks.check_arrays(x=x)
    kernel, channels = tuple(part["weight"].shape), x.shape[-1]
    if len(kernel) != 3 or kernel[:2] != (channels, 1):
        raise ValueError(
            f"params[{part.path + 'weight'!r}] must have shape ({channels}, 1, k) for {channels} "
            f"channels on the last axis of x, got {kernel}; torch and ONNX have the tokens on the "
            f"last axis of x: swap the last two"
        )
    shape = (*x.shape[:-2], kernel[-1] - 1, channels)
    if state is None:
        state = xp.zeros(shape, dtype=x.dtype, device=array_api_compat.device(x))
    _checks.check_cotangent("state", state, "the tokens before x", shape, x)
    return part, xp.concat([state, x], axis=-2)


@accumulated(narrows=True)
def _convolved(params: Params, padded: Array, *, activation: str | None) -> Result:
    """Convolve tokens ``(..., k - 1 + L, c)``, of which the first have no output."""
    part = as_part(params)
    k = part["weight"].shape[-1]
    xp, weight = check_pair(part, "weight", padded, k)
    length = padded.shape[-2] - k + 1
    views = [padded[..., j : j + length, :] for j in range(k)]
    terms = [view * weight[:, 0, j] for j, view in enumerate(views)]
    out = sum(terms[1:], terms[0])
    if "bias" in part:
        out = out + check_pair(part, "bias", padded)[1]
    derivative = None
    if activation is not None:
        if activation not in ACTIVATIONS or activation in GATED:
            known = ", ".join(name for name in ACTIVATIONS if name not in GATED)
            raise ValueError(f"activation must be None or one of {known}, got {activation!r}")
        out, derivative = ACTIVATIONS[activation](xp, out)

    def pullback(grad_output: Array) -> tuple[dict[str, Array], Array]:
        _checks.check_cotangent("grad_output", grad_output, "output", tuple(out.shape), out)
        grad = grad_output if derivative is None else grad_output * derivative()
        taps = [xp.sum(all_tokens(grad * view), axis=0) for view in views]
        grads = {"weight": xp.stack(taps, axis=-1)[:, None, :]}
        if "bias" in part:
            grads["bias"] = xp.sum(all_tokens(grad), axis=0)
        edge = xp.zeros_like(padded[..., : k - 1, :])
        wide = xp.concat([edge, grad, edge], axis=-2)
        cuts = [slice(k - 1 - j, 2 * k - 2 - j + length) for j in range(k)]
        parts = [wide[..., cut, :] * weight[:, 0, j] for j, cut in enumerate(cuts)]
        return grads, sum(parts[1:], parts[0])

    return out, pullback


@takes()
def gated_rms_norm(
    params: Params,
    x: Array,
    gate: Array,
    *,
    activation: Literal["silu", "sigmoid"] = "silu",
    gate_first: bool = False,
    num_groups: int = 1,
    eps: float = 1e-6,
) -> Array:
    r"""Normalize tokens as :func:`rms_norm` and multiply them by a gate, in either order.

    .. math::
        y = \sigma(g) \odot w \odot \mathrm{rms}(x), \qquad
        y = w \odot \mathrm{rms}(\sigma(g) \odot x) \ \text{(gate first)}

    Gated DeltaNet and Kimi Delta Attention have the gate last ("silu" and "sigmoid"), Mamba-2 has
    it first ("silu"). Letters: ``d`` dim.

    Parameters
    ----------
    params : dict
        ``weight`` (d,).
    x, gate : array, (..., d)
        Floats of any array-API library, of one shape.
    activation : {"silu", "sigmoid"}, optional
        Function of the gate. Default "silu".
    gate_first : bool, optional
        Gate before the norm. Default False.
    num_groups : int, optional
        Groups of neighbouring channels with a mean square each. Default 1.
    eps : float, optional
        Added to the mean square. Default 1e-6.

    Returns
    -------
    array, (..., d)
        In the library, dtype and device of x.

    Raises
    ------
    TypeError, ValueError
        As :func:`rms_norm`; gate and x differ in shape, or d is no multiple of `num_groups`.

    References
    ----------
    Dao and Gu, "Transformers are SSMs" (2024), section 7.1; Yang et al., "Gated Delta Networks"
    (2024), section 3.4.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> x = np.asarray([[3.0, 4.0]])
    >>> params = layers.init_norm(2, bias=False, dtype=np.float64)
    >>> layers.gated_rms_norm(params, x, np.zeros((1, 2)), activation="sigmoid").round(2)
    array([[0.42, 0.57]])
    """
    return _gated_norm(params, x, gate, activation, gate_first, num_groups, eps)[0]


@takes()
@with_pullback
def gated_rms_norm_vjp(
    params: Params,
    x: Array,
    gate: Array,
    *,
    activation: Literal["silu", "sigmoid"] = "silu",
    gate_first: bool = False,
    num_groups: int = 1,
    eps: float = 1e-6,
) -> tuple[Array, Pullback]:
    """Return the output of :func:`gated_rms_norm` and a function that computes its gradients.

    Parameters
    ----------
    params, x, gate, activation, gate_first, num_groups, eps
        As for :func:`gated_rms_norm`.

    Returns
    -------
    output : array, (..., d)
        Output of :func:`gated_rms_norm`.
    pullback : callable
        ``pullback(grad_output) -> (grad_params, grad_x, grad_gate)``.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_norm(8, bias=False)
    >>> x, gate = np.ones((2, 3, 8), np.float32)
    >>> output, pullback = layers.gated_rms_norm_vjp(params, x, gate)
    >>> grad_params, grad_x, grad_gate = pullback(output)  # of |output|^2 / 2
    >>> sorted(grad_params)
    ['weight']
    """
    return _gated_norm(params, x, gate, activation, gate_first, num_groups, eps)


def _gated_norm(
    params: Params, x: Any, gate: Any, activation: Any, gate_first: Any, num_groups: Any, eps: Any
) -> tuple[Array, Pullback]:
    """Check the arguments; normalize x and the gate as one array."""
    xp, (x, gate) = _checks.check_arrays(1, x=x, gate=gate)
    groups = _checks.check_positive_int("num_groups", num_groups)
    if tuple(gate.shape) != tuple(x.shape) or x.shape[-1] % groups:
        raise ValueError(
            f"gate must have the shape of x, and num_groups={groups} must divide the last axis, "
            f"got shapes {tuple(gate.shape)} and {tuple(x.shape)}"
        )
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"activation must be silu or sigmoid, got {activation!r}")
    is_first = _checks.check_flag("gate_first", gate_first)
    output, pull = _gated(
        params,
        xp.stack([x, gate]),
        activation=activation,
        gate_first=is_first,
        groups=groups,
        eps=eps,
    )

    def pullback(grad_output: Array) -> tuple[dict[str, Array], Array, Array]:
        grads, grad = pull(grad_output)
        return grads, grad[0, ...], grad[1, ...]

    return output, pullback


@accumulated(narrows=False)
def _gated(
    params: Params, both: Array, *, activation: str, gate_first: bool, groups: int, eps: float
) -> Result:
    """Gate and normalize; ``both``: x and the gate, along a first axis."""
    part = as_part(params, "weight")
    xp, weight = check_pair(part, "weight", both)
    x, gate = both[0, ...], both[1, ...]
    sigmoid = 0.5 * (1 + xp.tanh(0.5 * gate))
    factor = sigmoid * gate if activation == "silu" else sigmoid
    shape = (*x.shape[:-1], groups, x.shape[-1] // groups)
    ones, weights = xp.ones_like(weight)[: shape[-1]], xp.reshape(weight, shape[-2:])
    inner = xp.reshape(x * factor if gate_first else x, shape)
    normal, pull_norm = rms_norm_vjp({"weight": ones}, inner, eps=eps)
    scaled = xp.reshape(normal * weights, tuple(x.shape))

    def pullback(grad_output: Array) -> tuple[dict[str, Array], Array]:
        _checks.check_cotangent("grad_output", grad_output, "output", tuple(x.shape), x)
        grad = xp.reshape(grad_output if gate_first else grad_output * factor, shape)
        of_weight = xp.sum(all_tokens(xp.reshape(grad * normal, tuple(x.shape))), axis=0)
        _, grad = pull_norm(grad * weights)
        grad = xp.reshape(grad, tuple(x.shape))
        of_factor = grad * x if gate_first else grad_output * scaled
        slope = sigmoid * (1 - sigmoid)
        slope = sigmoid + gate * slope if activation == "silu" else slope
        of_both = [grad * factor if gate_first else grad, of_factor * slope]
        return {"weight": of_weight}, xp.stack(of_both)

    return scaled if gate_first else scaled * factor, pullback
