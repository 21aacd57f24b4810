"""Exact attention of torch's CPU tensors by torch's own operator, where it computes the same.

Called by :func:`linattn._home.at_home` in place of the driver's forward pass and pullback.
``scaled_dot_product_attention`` has no windows, sinks, offsets and stops; no bias of keys that has
a gradient; no mask beside ``is_causal``; and numbers that are not finite, which a mask hides, reach
other rows. Such problems are left to NumPy, as float16 and bfloat16 are, whose weights it rounds.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from linattn.typing import Array, Cotangent, Problem


class Forward(NamedTuple):
    """Results of a forward pass that make its pullback faster."""

    output: Array
    log: Array

    def of(self, _: Problem) -> None:
        """Return None: only torch's own pullback has a use for them."""


FORWARD = "_scaled_dot_product_flash_attention_for_cpu"


def solve(problem: Problem, *, return_state: bool, checkpoints: Any = None) -> Any:
    """Return the output, None for a state, and the log normalizer; None to decline."""
    arguments = _arguments(problem)
    if arguments is None:
        return None
    output, log = _attend(*arguments)
    shape = problem.query.shape
    log = log.reshape(shape[:-1]) if problem.want_log else None
    return output.reshape(*shape[:-1], -1), None, log


def pull(problem: Problem, cotangent: Cotangent, stored: Any = None) -> Any:
    """Return the gradients by query, key and value; None to decline."""
    arguments = None if problem.weights.key_bias is not None else _arguments(problem)
    if arguments is None:
        return None
    tensors, options = arguments
    backward = getattr(sys.modules["torch"].ops.aten, FORWARD + "_backward")
    grad = _heads(cotangent.output)
    if isinstance(stored, Forward):
        output, log = _heads(stored.output), stored.log.reshape(grad.shape[:-1])
    else:
        output, log = _attend(tensors, options)
    causal = options.pop("is_causal")
    found = backward(grad, *tensors, output, log, 0.0, causal, **options)
    arrays = problem.query, problem.key, problem.value
    return tuple(x.reshape(like.shape) for x, like in zip(found, arrays, strict=True))


def _attend(tensors: Any, options: dict[str, Any]) -> Any:
    torch = sys.modules["torch"]
    with torch.no_grad():
        return getattr(torch.ops.aten, FORWARD)(*tensors, 0.0, **options)


def _arguments(problem: Problem) -> tuple[list[Array], dict[str, Any]] | None:
    """Return tensors of four axes and the operator's options; None where it would not do."""
    torch, sees, weights = sys.modules["torch"], problem.sees, problem.weights
    tensors = [problem.query, problem.key, problem.value]
    length, size = problem.query.shape[-2], problem.key.shape[-2]
    is_covered = (
        problem.mode == "exact"
        and hasattr(torch.ops.aten, FORWARD)
        and problem.query.dtype == problem.dtype
        and all(x is None for x in (sees.key_stop, sees.left, sees.cu_seqlens))
        and weights.relative_bias is None
        and (sees.right is None or (sees.is_causal and not sees.query_start and length == size))
        and not problem.exact.sinks
        and not (sees.is_causal and any(x is not None for x in weights[:2]))
        and len({(tuple(x.shape[:-2]), x.shape[-1]) for x in tensors}) == 1
        and all(problem.query.shape[:-1])
        and size > 0
        # The operator reads rows as they lie.
        and all(x.stride(-1) == 1 for x in tensors)
        and problem.policy.num_threads in (None, torch.get_num_threads())
    )
    # One number that is not finite makes the sum so.
    if not is_covered or not all(bool(torch.isfinite(x.sum())) for x in tensors[1:]):
        return None
    mask = _mask(problem)
    if mask is False:
        return None
    options = {"is_causal": sees.is_causal, "attn_mask": mask}
    return [_heads(x) for x in tensors], options | {"scale": float(problem.query_spec.scale)}


def _mask(problem: Problem) -> Any:
    """Return log weights of keys ``(b, h, 1, S)``; None for none, False if a row sees no key."""
    torch, (mask, bias) = sys.modules["torch"], problem.weights[:2]
    if mask is None and bias is None:
        return None
    zero = torch.zeros((), dtype=problem.dtype)
    log = zero if bias is None else bias
    log = log if mask is None else torch.where(mask, log, -torch.inf)
    if not bool(torch.isfinite(log).any(dim=-2).all()) or bool((log == torch.inf).any()):
        return False
    shape = (*problem.lead, *log.shape[-2:])
    return _heads(log.expand(shape).transpose(-1, -2))


def _heads(x: Array) -> Array:
    """Return a tensor with two leading axes."""
    if x.ndim <= 4:
        return x[(None,) * (4 - x.ndim)]
    return x.reshape(1, -1, *x.shape[-2:])
