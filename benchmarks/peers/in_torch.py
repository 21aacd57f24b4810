"""torch: exact attention, linattn's own recipe in plain operations, elu + 1 as usually written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.peers import oracle
from benchmarks.peers.in_numpy import EXPONENTIALS, factors
from benchmarks.peers.limits import CAUSAL_BLOCK, ROWS
from benchmarks.peers.problem import Floats, Inputs, Prepared, Sizes
from benchmarks.peers.registry import GRADIENT

__all__ = ["Recipe", "chunks", "chunks_at_once", "elu_attention", "prepare", "set_threads"]

Tensor = Any

CAUSAL_ROWS = 256
"""Tokens whose features are made at once in causal attention."""

MAX_EXPONENT = 40.0
"""Exponents up to this size are exponentiated as they are."""

CHUNK = 64
"""Tokens of a causal square of elu + 1, and of what is differentiated chunk by chunk."""

WHOLE_CHUNK = 128
"""Tokens of a chunk where all are differentiated at once: 64 take 1.1 times as long, 32 1.4."""


def set_threads(threads: int) -> None:
    """Use so many threads."""
    torch.set_num_threads(threads)


def prepare(name: str, kind: str, inputs: Inputs) -> Prepared:
    """Prepare a peer of this module."""
    if name == "torch-rates":
        return _rate(kind, inputs)
    if name == "torch-cache":
        return _cache(inputs)
    if name == "torch-text":
        text = [torch.from_numpy(x)[None] for x in inputs.text]
        return Prepared(
            _without_gradients(lambda: functional.scaled_dot_product_attention(*text)[0]),
            lambda: oracle.softmax_attention(*inputs.text),
            _fetch,
        )
    if kind in GRADIENT:
        return _gradient(name, kind, inputs)
    q, k, v = (torch.from_numpy(x) for x in (inputs.query, inputs.key, inputs.value))
    is_causal = kind == "causal"
    attend: Callable[..., Tensor] = {
        "torch-exact": functional.scaled_dot_product_attention,
        "torch-elu": elu_attention,
        "torch-favor": Recipe(inputs.sizes, inputs.rows).attend,
    }[name]
    return Prepared(
        _without_gradients(lambda: attend(q, k, v, is_causal=is_causal)),
        lambda: oracle.attention(_weights(name, inputs), inputs.value, is_causal=is_causal),
        _fetch,
    )


def _weights(name: str, inputs: Inputs) -> Floats:
    if name == "torch-exact":
        return oracle.softmax_weights(inputs.query, inputs.key)
    if name == "torch-elu":
        q, k = (oracle.elu_plus_one(x) for x in (inputs.query, inputs.key))
    else:
        q, k = (oracle.exponentials(x, inputs.rows) for x in (inputs.query, inputs.key))
    return q @ k.swapaxes(-1, -2)


def _gradient(name: str, kind: str, inputs: Inputs) -> Prepared:
    """Output and gradients by torch's own differentiation."""
    arrays = (inputs.query, inputs.key, inputs.value)
    tensors = [torch.from_numpy(x).requires_grad_() for x in arrays]
    cotangent = torch.from_numpy(inputs.cotangent)
    is_causal = kind.startswith("causal")
    projection = torch.from_numpy(inputs.rows.T * inputs.sizes.dim**-0.25).float()
    recipe_vjp = partial(oracle.recipe_vjp, rows=inputs.rows)
    recipes: dict[str, tuple[Callable[..., Tensor], Callable[..., list[Floats]]]] = {
        "torch-exact": (functional.scaled_dot_product_attention, oracle.softmax_vjp),
        "torch-chunks": (partial(chunks, projection=projection), recipe_vjp),
        "torch-whole": (
            lambda *tokens, is_causal: chunks_at_once(*tokens, projection=projection),
            recipe_vjp,
        ),
    }
    attend, wanted = recipes[name]

    def call() -> tuple[Tensor, ...]:
        out = attend(*tensors, is_causal=is_causal)
        return out, *torch.autograd.grad(out, tensors, cotangent)

    return Prepared(
        call,
        lambda: np.stack(wanted(inputs, is_causal=is_causal)),
        lambda results: np.stack([_fetch(x.detach()) for x in results]),
    )


def _without_gradients(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def guarded() -> Tensor:
        with torch.inference_mode():
            return call()

    return guarded


def _fetch(tensor: Tensor) -> Floats:
    return np.asarray(tensor.numpy())


class Recipe:
    """FAVOR+ a head at a time, in blocks of features that stay in cache, with ``out=``.

    Keys carry ``exp(-|k|^2 / 2)`` on ``[v, 1]``, queries nothing, since it cancels. Each block of
    exponents is looked at once; beyond +-40 it would need a shift, which is not written here.
    """

    def __init__(self, sizes: Sizes, rows: Floats) -> None:
        d, m = sizes.dim, sizes.features
        self.scale = d**-0.5
        self.projection = torch.from_numpy(rows.T * d**-0.25).float().contiguous()
        self.keys, self.queries = (torch.empty(ROWS, m) for _ in range(2))
        self.v1 = torch.empty(ROWS, d + 1)
        self.squares = torch.empty(ROWS // CAUSAL_BLOCK, CAUSAL_BLOCK, CAUSAL_BLOCK)
        self.states = torch.empty(ROWS // CAUSAL_BLOCK + 1, m, d + 1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        """Attend, ``(batch, heads, n, d)``; causal lengths are padded to whole blocks of 32."""
        n = query.shape[-2]
        padding = -n % CAUSAL_BLOCK if is_causal else 0
        if padding:
            query, key, value = (functional.pad(x, (0, 0, 0, padding)) for x in (query, key, value))
        out = torch.empty_like(query)
        one_head = self._causal if is_causal else self._full
        for tensors in zip(*(x.flatten(0, 1) for x in (query, key, value, out)), strict=True):
            one_head(*tensors)
        return out[..., :n, :]

    def _full(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        state = torch.zeros(self.states.shape[1:])
        for k, v in zip(key.split(ROWS), value.split(ROWS), strict=True):
            state.addmm_(self._features(k, self.keys).T, self._weighed(k, v))
        for q, o in zip(query.split(ROWS), out.split(ROWS), strict=True):
            sums = torch.mm(self._features(q, self.queries), state, out=self.v1[: len(q)])
            torch.div(sums[:, :-1], sums[:, -1:], out=o)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        c = CAUSAL_BLOCK
        states = self.states
        states[0] = 0
        blocks = (x.split(CAUSAL_ROWS) for x in (query, key, value, out))
        for q, k, v, o in zip(*blocks, strict=True):
            count = len(q) // c
            phi_q, phi_k, v1 = (
                x.unflatten(0, (count, c))
                for x in (
                    self._features(q, self.queries),
                    self._features(k, self.keys),
                    self._weighed(k, v),
                )
            )
            squares = torch.bmm(phi_q, phi_k.mT, out=self.squares[:count])
            sums = torch.bmm(squares.tril_(), v1)
            torch.bmm(phi_k.mT, v1, out=states[1 : count + 1])
            for i in range(count):
                states[i + 1] += states[i]
            sums.baddbmm_(phi_q, states[:count])
            torch.div(sums[..., :-1], sums[..., -1:], out=o.unflatten(0, (count, c)))
            states[0] = states[count]

    def _features(self, x: Tensor, buffer: Tensor) -> Tensor:
        exponents = torch.mm(x, self.projection, out=buffer[: len(x)])
        low, high = torch.aminmax(exponents)
        if not max(-float(low), float(high)) <= MAX_EXPONENT:
            raise ValueError(f"exponents: want at most {MAX_EXPONENT} in size, got {low} to {high}")
        return exponents.exp_()

    def _weighed(self, k: Tensor, v: Tensor) -> Tensor:
        """Return ``[v w, w]`` with ``w = exp(-|k|^2 / 2)``."""
        v1 = self.v1[: len(k)]
        weight = v1[:, -1:]
        torch.linalg.vecdot(k, k, out=weight[:, 0])
        weight.mul_(-0.5 * self.scale).exp_()
        torch.mul(v, weight, out=v1[:, :-1])
        return v1


def chunks(
    query: Tensor, key: Tensor, value: Tensor, *, projection: Tensor, is_causal: bool
) -> Tensor:
    """FAVOR+ as :class:`Recipe` has it, in operations that torch differentiates.

    All heads at once; causal, one chunk of 64 tokens after the other, which was the fastest of
    chunks of 64 to 256, all at once or one by one, all heads at once or one by one.
    """
    if not is_causal:
        sums = (key @ projection).exp().mT @ _weighed(key, value)
        return _divided((query @ projection).exp() @ sums)
    state: Tensor = 0.0
    outs: list[Tensor] = []
    for q, k, v in zip(*(x.split(CHUNK, dim=-2) for x in (query, key, value)), strict=True):
        phi_q, phi_k, v1 = (q @ projection).exp(), (k @ projection).exp(), _weighed(k, v)
        sums = (phi_q @ phi_k.mT).tril() @ v1
        outs.append(_divided(sums + phi_q @ state if outs else sums))
        state = state + phi_k.mT @ v1
    return torch.cat(outs, dim=-2)


def chunks_at_once(query: Tensor, key: Tensor, value: Tensor, *, projection: Tensor) -> Tensor:
    """Attend causally as :func:`chunks` does, as usually written: whole arrays, one cumsum."""
    n = query.shape[-2]
    phi_q, phi_k, v1 = (
        functional.pad(x, (0, 0, 0, -n % WHOLE_CHUNK)).unflatten(-2, (-1, WHOLE_CHUNK))
        for x in ((query @ projection).exp(), (key @ projection).exp(), _weighed(key, value))
    )
    states = phi_k.mT @ v1
    before = states.cumsum(dim=-3) - states
    sums = ((phi_q @ phi_k.mT).tril() @ v1 + phi_q @ before).flatten(-3, -2)
    return _divided(sums[..., :n, :])


def _weighed(key: Tensor, value: Tensor) -> Tensor:
    """Return ``[v w, w]`` with ``w = exp(-|k|^2 / (2 sqrt(d)))``."""
    weight = (key.square().sum(dim=-1, keepdim=True) * (-0.5 * key.shape[-1] ** -0.5)).exp()
    return torch.cat([value * weight, weight], dim=-1)


def _divided(sums: Tensor) -> Tensor:
    return sums[..., :-1] / sums[..., -1:]


def elu_attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """Whole-array elu + 1; causal by squares of 64 tokens and running sums of their states."""
    q, k = functional.elu(query) + 1, functional.elu(key) + 1
    v1 = functional.pad(value, (0, 1), value=1.0)
    if not is_causal:
        sums = q @ (k.mT @ v1)
        return sums[..., :-1] / sums[..., -1:]
    n = q.shape[-2]
    q, k, v1 = (
        functional.pad(x, (0, 0, 0, -n % CHUNK)).unflatten(-2, (-1, CHUNK)) for x in (q, k, v1)
    )
    states = k.mT @ v1
    before = states.cumsum(dim=-3) - states
    sums = ((q @ k.mT).tril() @ v1 + q @ before).flatten(-3, -2)[..., :n, :]
    return sums[..., :-1] / sums[..., -1:]


def _cache(inputs: Inputs) -> Prepared:
    """One token over a cache that has room for it."""
    n = inputs.length
    query, key, value = (torch.from_numpy(x) for x in inputs.token)
    keys, values = (
        functional.pad(torch.from_numpy(x), (0, 0, 0, 1)) for x in (inputs.key, inputs.value)
    )

    def call() -> Tensor:
        keys[..., n, :] = key
        values[..., n, :] = value
        attend = functional.scaled_dot_product_attention
        return attend(query[..., None, :], keys, values)[..., 0, :]

    def wanted() -> Floats:
        q, all_keys, all_values = oracle.next_token(inputs)
        weights = oracle.softmax_weights(q, all_keys)
        return oracle.attention(weights, all_values, is_causal=False)[..., 0, :]

    return Prepared(_without_gradients(call), wanted, _fetch)


def _rate(kind: str, inputs: Inputs) -> Prepared:
    if kind == "exp":
        x = torch.from_numpy(
            np.random.default_rng(0).standard_normal(EXPONENTIALS, dtype=np.float32)
        )
        y = torch.empty_like(x)
        call = _without_gradients(lambda: torch.exp(x, out=y))
        return Prepared(call, lambda: np.exp(x.numpy().astype(np.float64)), _fetch)
    a, b = (torch.from_numpy(factor) for factor in factors(kind, inputs))
    product = torch.empty(*a.shape[:-1], b.shape[-1])
    if kind == "small":
        call = _without_gradients(lambda: torch.bmm(a, b.expand(len(a), *b.shape), out=product))
    else:
        call = _without_gradients(lambda: torch.mm(a, b, out=product))
    return Prepared(call, lambda: np.asarray((a.double() @ b.double()).numpy()), _fetch)
