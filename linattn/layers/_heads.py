"""Heads: projections, positions and grouping around an attention, whole or as a stream."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

from linattn import _arrays, _checks
from linattn.coreset import CoresetAttention
from linattn.layers import attentions
from linattn.layers._cache import KeyValueCache, check_state
from linattn.layers._params import Params, Part, Pullback, Result, check_pair, join, split
from linattn.layers.attentions import Alibi, Attention, Rotary, Scope
from linattn.layers.dense import product, rms_norm_vjp
from linattn.state import Decoder
from linattn.typing import Array, State
from linattn.typing.records import one_line

Positions: TypeAlias = Rotary | Alibi | None

CACHES: dict[type, tuple[type, ...]] = {
    attentions.SoftmaxAttention: (KeyValueCache,),
    attentions.LinearAttention: (State, Decoder),
    attentions.BoundedAttention: (CoresetAttention,),
}
"""What a stream of each attention caches; classes of the user's may cache anything."""


class AttentionState(NamedTuple):
    """State of self-attention in a stream."""

    cache: Any
    """Depends on the attention: a :class:`linattn.State`, keys and values, or a stream."""
    length: int
    """Tokens seen."""

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class Heads(NamedTuple):
    """Options of one attention layer."""

    num_heads: int
    attention: Attention
    positions: Positions = None
    eps: float = 1e-6
    """``eps`` of the norms of queries and keys."""


class _Inner(NamedTuple):
    """Parameters of the input projection, and of the norms of queries and keys if any."""

    product: Part
    query_norm: Part
    key_norm: Part


class _Shape(NamedTuple):
    """How the columns of projections are split into heads."""

    queries: int
    """H d: rows of the queries in the projection."""
    axes: tuple[int, ...]
    """Axes of the heads: (H,), or (G, H / G) if H heads of queries share G heads of keys."""

    @property
    def key_axes(self) -> tuple[int, ...]:
        return (self.axes[0], *(1 for _ in self.axes[1:]))


def attend(
    params: Params,
    x: Array,
    memory: Array | None,
    heads: Heads,
    scope: Scope,
    *,
    differentiate: bool,
) -> Result:
    """Attend to all tokens; the pullback works only with ``differentiate=True``."""
    inner, outer, shape = _checked(params, x, heads)
    (query, key, value), pull_projections = _project(inner, x, memory, shape, heads.eps)
    scope = _scope(scope, x if memory is None else memory, heads, shape)
    rotation = heads.positions if isinstance(heads.positions, Rotary) else None
    if rotation is not None:
        query, key = rotation.rotate(query), rotation.rotate(key)
    pull_heads: Any = None
    if differentiate:
        out, pull_heads = heads.attention.vjp(query, key, value, scope)
    else:
        out = heads.attention(query, key, value, scope)
    y, pull_out = product(outer, _merge(out, shape.axes))

    def pullback(grad_output: Array) -> tuple[Any, ...]:
        grads_out, grad = pull_out(grad_output)
        grad_query, grad_key, grad_value = pull_heads(_split(grad, shape.axes))
        if rotation is not None:
            grad_query, grad_key = map(rotation.rotate_back, (grad_query, grad_key))
        grads, *by_input = pull_projections(grad_query, grad_key, grad_value)
        return grads | join({"out_proj.": grads_out}), *by_input

    return y, pullback


def stream(
    params: Params, x: Array, heads: Heads, state: AttentionState | None
) -> tuple[Array, AttentionState]:
    """Attend causally to the tokens of a state and to these; return the new state too."""
    inner, outer, shape = _checked(params, x, heads)
    (query, key, value), _ = _project(inner, x, None, shape, heads.eps)
    check_state(state, AttentionState)
    cache, length = (None, 0) if state is None else state
    check_state(cache, *CACHES.get(type(heads.attention), (object,)))
    if isinstance(heads.positions, Rotary):
        query, key = (heads.positions.rotate(array, length) for array in (query, key))
    scope = _scope(Scope(is_causal=True), x, heads, shape)
    out, cache = heads.attention.extend(query, key, value, cache, scope)
    y = product(outer, _merge(out, shape.axes))[0]
    return y, AttentionState(cache, length + x.shape[-2])


def remember(params: Params, memory: Array, heads: Heads, key_mask: Array | None) -> Any:
    """Return the cache of a memory, for :func:`read`."""
    inner, _, shape = _checked(params, memory, heads)
    projected = product(_halves(inner.product, shape)[1], memory)[0]
    key, value, _ = _keys_and_values(inner, projected, shape, heads.eps)
    scope = _scope(Scope(key_mask=key_mask), memory, heads, shape)
    return heads.attention.remember(key, value, scope)


def read(params: Params, x: Array, heads: Heads, cache: Any, start: int) -> Array:
    """Attend to the memory that :func:`remember` cached; the first query is at ``start``."""
    inner, outer, shape = _checked(params, x, heads)
    projected = product(_halves(inner.product, shape)[0], x)[0]
    query = _normal_heads(inner.query_norm, projected, shape.axes, heads.eps)[0]
    return product(outer, _merge(heads.attention.read(query, cache, start), shape.axes))[0]


def _checked(params: Params, x: Array, heads: Heads) -> tuple[_Inner, Part, _Shape]:
    """Check parameters; return the input and output projections, and the split into heads."""
    inner, outer, *norms = split(params, "in_proj_", "out_proj.", "q_norm.", "k_norm.")
    check_pair(inner, "weight", x)
    num = _checks.check_positive_int("num_heads", heads.num_heads)
    _check_kind("attention", heads.attention, Attention, "SoftmaxAttention()")
    if heads.positions is not None:
        _check_kind("positions", heads.positions, Rotary | Alibi, "Rotary() or Alibi()")
    queries, rows = outer["weight"].shape[-1], inner["weight"].shape[0]
    dim, rest = divmod(queries, num)
    keys, left = divmod(rows - queries, 2 * dim) if dim else (0, 1)
    if rest or left or keys < 1 or num % keys:
        raise ValueError(
            f"num_heads must cut the projections into heads, got {num} for {queries} columns of "
            f"params[{outer.path + 'weight'!r}] and {rows} rows of "
            f"params[{inner.path + 'weight'!r}]; these are H d columns, and H d + 2 G d rows with "
            f"G keys for H heads"
        )
    return (
        _Inner(inner, *norms),
        outer,
        _Shape(queries, (num,) if keys == num else (keys, num // keys)),
    )


def _check_kind(name: str, value: Any, kind: Any, wanted: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be one of linattn.layers, such as {wanted}, got {value!r}")


def _scope(scope: Scope, tokens: Array, heads: Heads, shape: _Shape) -> Scope:
    """Return a scope whose mask has the axes of heads, with ALiBi's slopes if it is used."""
    mask = scope.key_mask
    if mask is not None:
        xp = _arrays.namespace(tokens)
        mask = _checks.check_key_mask(mask, tokens, xp, query_len=None, of="key")[..., 0]
        ones = (1,) * len(shape.axes)
        mask = xp.reshape(mask, (*mask.shape[:-1], *ones, mask.shape[-1]))
    slopes = heads.positions.slopes(shape.axes) if isinstance(heads.positions, Alibi) else None
    return scope._replace(key_mask=mask, head_axes=shape.axes, slopes=slopes)


def _project(
    inner: _Inner, x: Array, memory: Array | None, shape: _Shape, eps: float
) -> tuple[tuple[Array, Array, Array], Pullback]:
    """Return queries, keys and values of the heads, and a pullback to parameters and inputs."""
    xp = _arrays.namespace(x)
    if memory is None:
        projected, pull = product(inner.product, x)
        query, rest = projected[..., : shape.queries], projected[..., shape.queries :]
    else:
        of_queries, of_keys = _halves(inner.product, shape)
        query, pull_queries = product(of_queries, x)
        rest, pull_keys = product(of_keys, memory)
    query, pull_query = _normal_heads(inner.query_norm, query, shape.axes, eps)
    key, value, pull_key = _keys_and_values(inner, rest, shape, eps)

    def pullback(grad_query: Array, grad_key: Array, grad_value: Array) -> tuple[Any, ...]:
        norms = {}
        norms["q_norm."], grad = pull_query(grad_query)
        norms["k_norm."], grad_key = pull_key(grad_key)
        grad_rest = xp.concat([grad_key, _merge(grad_value, shape.key_axes)], axis=-1)
        if memory is None:
            grads, *by_input = pull(xp.concat([grad, grad_rest], axis=-1))
            return join({"in_proj_": grads, **norms}), *by_input
        by_queries, grad_x = pull_queries(grad)
        by_keys, grad_memory = pull_keys(grad_rest)
        grads = {name: xp.concat([by_queries[name], by_keys[name]], axis=0) for name in by_keys}
        return join({"in_proj_": grads, **norms}), grad_x, grad_memory

    return (query, key, value), pullback


def _normal_heads(
    norm: Part, projected: Array, axes: tuple[int, ...], eps: float
) -> tuple[Array, Pullback]:
    """Split a projection into heads; normalize each head, or all together if the weight is long."""
    if not norm:
        return _split(projected, axes), lambda grad: ({}, _merge(grad, axes))
    if norm["weight"].shape[-1] == projected.shape[-1]:
        normal, pull = rms_norm_vjp(norm, projected, eps=eps)
        return _split(normal, axes), lambda grad: pull(_merge(grad, axes))
    normal, pull = rms_norm_vjp(norm, _split(projected, axes), eps=eps)

    def pullback(grad: Array) -> tuple[Any, ...]:
        grads, grad = pull(grad)
        return grads, _merge(grad, axes)

    return normal, pullback


def _halves(inner: Part, shape: _Shape) -> tuple[Part, Part]:
    """Split the input projection: rows for queries, and rows for keys and values."""
    halves = []
    for rows in (slice(None, shape.queries), slice(shape.queries, None)):
        halves.append(Part({n: a[rows, ...] for n, a in inner.items()}, inner.path))
    return halves[0], halves[1]


def _keys_and_values(
    inner: _Inner, projected: Array, shape: _Shape, eps: float
) -> tuple[Array, Array, Pullback]:
    """Split a projection into keys and values; also return the pullback of the keys."""
    width = projected.shape[-1] // 2
    key, value = projected[..., :width], projected[..., width:]
    key, pull = _normal_heads(inner.key_norm, key, shape.key_axes, eps)
    return key, _split(value, shape.key_axes), pull


def _split(x: Array, axes: tuple[int, ...]) -> Array:
    """Reshape (..., L, H d) to (..., H, L, d)."""
    xp, lead = _arrays.namespace(x), len(x.shape) - 2
    dim = x.shape[-1] // math.prod(axes)
    apart = xp.reshape(x, (*x.shape[:-1], *axes, dim))
    return _arrays.moveaxis(apart, lead, -2)


def _merge(x: Array, axes: tuple[int, ...]) -> Array:
    """Reshape (..., H, L, d) to (..., L, H d)."""
    xp, lead = _arrays.namespace(x), len(x.shape) - 2 - len(axes)
    together = _arrays.moveaxis(x, -2, lead)
    width = math.prod(together.shape[lead + 1 :])
    return xp.reshape(together, (*together.shape[: lead + 1], width))
