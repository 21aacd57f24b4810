"""torch without its autograd: FAVOR+ and its gradients by hand, all heads at once, by chunks.

Features are kept for the way back, states one a chunk; the second pass goes from the last chunk to
the first and carries the sum of ``phi_q^T g`` of those behind, as linattn's does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.peers import oracle
from benchmarks.peers.problem import Floats, Inputs, Prepared

__all__ = ["prepare", "set_threads"]

Tensor = Any

CHUNK = 64
"""Tokens of a causal chunk: 128 take 1.1 times as long, 256 1.4."""


def set_threads(threads: int) -> None:
    """Use so many threads."""
    torch.set_num_threads(threads)


def prepare(name: str, kind: str, inputs: Inputs) -> Prepared:
    """Prepare the one peer of this module."""
    q, k, v, g = (
        torch.from_numpy(x).flatten(0, 1)
        for x in (inputs.query, inputs.key, inputs.value, inputs.cotangent)
    )
    projection = torch.from_numpy(inputs.rows.T * inputs.sizes.dim**-0.25).float().contiguous()
    attend = causal if kind.startswith("causal") else full

    def call() -> tuple[Tensor, ...]:
        with torch.inference_mode():
            return attend(q, k, v, g, projection)

    def fetch(results: tuple[Tensor, ...]) -> Floats:
        return np.stack([x.numpy().reshape(inputs.query.shape) for x in results])

    return Prepared(
        call,
        lambda: np.stack(oracle.recipe_vjp(inputs, inputs.rows, is_causal=attend is causal)),
        fetch,
    )


def full(q: Tensor, k: Tensor, v: Tensor, g: Tensor, projection: Tensor) -> tuple[Tensor, ...]:
    """Return output and gradients of attention to all keys, ``(heads, n, d)``."""
    phi_q, phi_k = (q @ projection).exp_(), (k @ projection).exp_()
    weight, values = weighed(k, v)
    state = phi_k.mT @ values
    out, grad_sums = divided(phi_q @ state, g)
    adjoint = phi_q.mT @ grad_sums
    grad_values = phi_k @ adjoint
    grad_q = (grad_sums @ state.mT).mul_(phi_q) @ projection.T
    grad_k = (values @ adjoint.mT).mul_(phi_k) @ projection.T
    return out, grad_q, *weighed_vjp(k, v, weight, grad_values, grad_k)


def causal(q: Tensor, k: Tensor, v: Tensor, g: Tensor, projection: Tensor) -> tuple[Tensor, ...]:
    """Return output and gradients of attention to the keys so far, ``(heads, n, d)``."""
    phi_q, phi_k = (q @ projection).exp_(), (k @ projection).exp_()
    weight, values = weighed(k, v)
    sums, grad_values = torch.empty_like(values), torch.empty_like(values)
    chunks = [slice(i, i + CHUNK) for i in range(0, q.shape[-2], CHUNK)]
    states = [torch.zeros(len(q), projection.shape[-1], values.shape[-1])]
    squares = []
    for c in chunks:
        squares.append(torch.bmm(phi_q[:, c], phi_k[:, c].mT).tril_())
        torch.bmm(phi_q[:, c], states[-1], out=sums[:, c]).baddbmm_(squares[-1], values[:, c])
        states.append(torch.baddbmm(states[-1], phi_k[:, c].mT, values[:, c]))
    out, grad_sums = divided(sums, g)
    adjoint = torch.zeros_like(states[0])
    grad_q, grad_k = torch.empty_like(q), torch.empty_like(k)
    for c, state, square in zip(chunks[::-1], states[-2::-1], squares[::-1], strict=True):
        grad_square = torch.bmm(grad_sums[:, c], values[:, c].mT).tril_()
        grad_phi = torch.bmm(grad_square, phi_k[:, c]).baddbmm_(grad_sums[:, c], state.mT)
        grad_q[:, c] = grad_phi.mul_(phi_q[:, c]) @ projection.T
        grad_phi = torch.bmm(grad_square.mT, phi_q[:, c]).baddbmm_(values[:, c], adjoint.mT)
        grad_k[:, c] = grad_phi.mul_(phi_k[:, c]) @ projection.T
        torch.bmm(square.mT, grad_sums[:, c], out=grad_values[:, c])
        grad_values[:, c].baddbmm_(phi_k[:, c], adjoint)
        adjoint.baddbmm_(phi_q[:, c].mT, grad_sums[:, c])
    return out, grad_q, *weighed_vjp(k, v, weight, grad_values, grad_k)


def weighed(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``w = exp(-|k|^2 / (2 sqrt(d)))`` and ``[v w, w]``."""
    weight = torch.linalg.vecdot(k, k)[..., None].mul_(-0.5 * k.shape[-1] ** -0.5).exp_()
    return weight, torch.cat([v * weight, weight], dim=-1)


def divided(sums: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the cotangent of numerator and denominator."""
    out, grad = sums[..., :-1] / sums[..., -1:], g / sums[..., -1:]
    return out, torch.cat([grad, -torch.linalg.vecdot(grad, out)[..., None]], dim=-1)


def weighed_vjp(
    k: Tensor, v: Tensor, weight: Tensor, grad_values: Tensor, grad_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients by key, added to that of its features, and by value."""
    grad_v, grad_one = grad_values[..., :-1], grad_values[..., -1:]
    grad_weight = torch.linalg.vecdot(grad_v, v)[..., None] + grad_one
    return grad_k.addcmul_(
        grad_weight.mul_(weight), k, value=-(k.shape[-1] ** -0.5)
    ), grad_v * weight
