"""Heads: projections, positions and grouping around an attention, whole or as a stream."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

from linattn import _arrays, _checks
from linattn.layers._params import Params, Part, Pullback, Result, check_pair, join, split
from linattn.layers.attentions import Alibi, Attention, Rotary, Scope
from linattn.layers.dense import product
from linattn.typing import Array
from linattn.typing.records import one_line

__all__ = ["AttentionState", "Heads", "Positions", "attend", "read", "remember", "stream"]

Positions: TypeAlias = Rotary | Alibi | None


class AttentionState(NamedTuple):
    """What self-attention keeps of a stream."""

    cache: Any
    """By the attention: a :class:`linattn.State`, keys and values, or a stream."""
    length: int
    """Tokens seen."""

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class Heads(NamedTuple):
    """What the calls of one attention layer have in common."""

    num_heads: int
    attention: Attention
    positions: Positions = None


class _Shape(NamedTuple):
    """How the width of projections is cut into heads."""

    queries: int
    """H d: rows of the queries in the projection."""
    axes: tuple[int, ...]
    """Of heads: (H,), or (G, H / G) where H queries share G keys."""

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
    """Attend to all tokens at once; the pullback serves only what is differentiated."""
    inner, outer, shape = _checked(params, x, heads)
    (query, key, value), pull_projections = _project(inner, x, memory, shape)
    scope = _scope(scope, x if memory is None else memory, heads, shape)
    rotation = heads.positions if isinstance(heads.positions, Rotary) else None
    if rotation is not None:
        query, key = rotation.rotate(query), rotation.rotate(key)
    pull_heads: Any = None
    if differentiate:
        out, pull_heads = heads.attention.vjp(query, key, value, scope)
    else:
        out = heads.attention(query, key, value, scope)
    y, pull_out = product(outer, _merge(out, shape))

    def pullback(grad_output: Array) -> tuple[Any, ...]:
        grads_out, grad = pull_out(grad_output)
        grad_query, grad_key, grad_value = pull_heads(_split(grad, shape.axes))
        if rotation is not None:
            grad_query, grad_key = map(rotation.rotate_back, (grad_query, grad_key))
        grads, *by_input = pull_projections(grad_query, grad_key, grad_value)
        return join({"in_proj_": grads, "out_proj.": grads_out}), *by_input

    return y, pullback


def stream(
    params: Params, x: Array, heads: Heads, state: AttentionState | None
) -> tuple[Array, AttentionState]:
    """Attend causally after the tokens of a state, and return the state after these."""
    inner, outer, shape = _checked(params, x, heads)
    (query, key, value), _ = _project(inner, x, None, shape)
    cache, length = (None, 0) if state is None else state
    if isinstance(heads.positions, Rotary):
        query, key = (heads.positions.rotate(array, length) for array in (query, key))
    scope = _scope(Scope(is_causal=True), x, heads, shape)
    out, cache = heads.attention.extend(query, key, value, cache, scope)
    y = product(outer, _merge(out, shape))[0]
    return y, AttentionState(cache, length + x.shape[-2])


def remember(params: Params, memory: Array, heads: Heads, key_mask: Array | None) -> Any:
    """Return what to keep of a memory, for :func:`read`."""
    inner, _, shape = _checked(params, memory, heads)
    key, value = _keys_and_values(product(_halves(inner, shape)[1], memory)[0], shape)
    scope = _scope(Scope(key_mask=key_mask), memory, heads, shape)
    return heads.attention.remember(key, value, scope)


def read(params: Params, x: Array, heads: Heads, cache: Any, start: int) -> Array:
    """Attend to the memory that :func:`remember` cached; the first query is at ``start``."""
    inner, outer, shape = _checked(params, x, heads)
    query = _split(product(_halves(inner, shape)[0], x)[0], shape.axes)
    return product(outer, _merge(heads.attention.read(query, cache, start), shape))[0]


def _checked(params: Params, x: Array, heads: Heads) -> tuple[Part, Part, _Shape]:
    """Parameters of the projections in and out, and how their rows are cut into heads."""
    inner, outer = split(params, "in_proj_", "out_proj.")
    check_pair(inner, "weight", x)
    num = _checks.check_positive_int("num_heads", heads.num_heads)
    _check_kind("attention", heads.attention, Attention, "SoftmaxAttention()")
    if heads.positions is not None:
        _check_kind("positions", heads.positions, Rotary | Alibi, "Rotary() or Alibi()")
    queries, rows = outer["weight"].shape[-1], inner["weight"].shape[0]
    dim, rest = divmod(queries, num)
    keys, left = divmod(rows - queries, 2 * dim) if dim else (0, 1)
    if rest or left or keys < 1 or num % keys:
        message = (
            f"num_heads must cut the projections into heads, got {num} for {queries} columns of "
            f"params[{outer.path + 'weight'!r}] and {rows} rows of "
            f"params[{inner.path + 'weight'!r}]; these are H d columns, and H d + 2 G d rows with "
            f"G keys for H heads"
        )
        raise ValueError(message)
    return inner, outer, _Shape(queries, (num,) if keys == num else (keys, num // keys))


def _check_kind(name: str, value: Any, kind: Any, wanted: str) -> None:
    if not isinstance(value, kind):
        message = f"{name} must be one of linattn.layers, such as {wanted}, got {value!r}"
        raise TypeError(message)


def _scope(scope: Scope, tokens: Array, heads: Heads, shape: _Shape) -> Scope:
    """Give a mask of tokens the axes of heads, and ALiBi its slopes."""
    mask = scope.key_mask
    if mask is not None:
        xp = _arrays.namespace(tokens)
        mask = _checks.check_key_mask(mask, tokens, xp, query_len=None, of="key")[..., 0]
        ones = (1,) * len(shape.axes)
        mask = xp.reshape(mask, (*mask.shape[:-1], *ones, mask.shape[-1]))
    slopes = heads.positions.slopes(shape.axes) if isinstance(heads.positions, Alibi) else None
    return scope._replace(key_mask=mask, head_axes=shape.axes, slopes=slopes)


def _project(
    inner: Part, x: Array, memory: Array | None, shape: _Shape
) -> tuple[tuple[Array, Array, Array], Pullback]:
    """Make queries, keys and values of heads; gradients by the projection and its inputs."""
    xp = _arrays.namespace(x)
    if memory is None:
        projected, pull = product(inner, x)
        query, rest = projected[..., : shape.queries], projected[..., shape.queries :]
    else:
        of_queries, of_keys = _halves(inner, shape)
        query, pull_queries = product(of_queries, x)
        rest, pull_keys = product(of_keys, memory)
    key, value = _keys_and_values(rest, shape)

    def pullback(grad_query: Array, grad_key: Array, grad_value: Array) -> tuple[Any, ...]:
        grad = _merge(grad_query, shape)
        grad_rest = xp.concat([_merge(g, shape) for g in (grad_key, grad_value)], axis=-1)
        if memory is None:
            return pull(xp.concat([grad, grad_rest], axis=-1))
        by_queries, grad_x = pull_queries(grad)
        by_keys, grad_memory = pull_keys(grad_rest)
        grads = {name: xp.concat([by_queries[name], by_keys[name]], axis=0) for name in by_keys}
        return grads, grad_x, grad_memory

    return (_split(query, shape.axes), key, value), pullback


def _halves(inner: Part, shape: _Shape) -> tuple[Part, Part]:
    """Rows of the projection that make queries, and those that make keys and values."""
    halves = []
    for rows in (slice(None, shape.queries), slice(shape.queries, None)):
        halves.append(Part({n: a[rows, ...] for n, a in inner.items()}, inner.path))
    return halves[0], halves[1]


def _keys_and_values(projected: Array, shape: _Shape) -> tuple[Array, Array]:
    width = projected.shape[-1] // 2
    key, value = projected[..., :width], projected[..., width:]
    return _split(key, shape.key_axes), _split(value, shape.key_axes)


def _split(x: Array, axes: tuple[int, ...]) -> Array:
    """(..., L, H d) to (..., H, L, d)."""
    xp, lead = _arrays.namespace(x), len(x.shape) - 2
    dim = x.shape[-1] // math.prod(axes)
    apart = xp.reshape(x, (*x.shape[:-1], *axes, dim))
    return xp.moveaxis(apart, lead, -2)


def _merge(x: Array, shape: _Shape) -> Array:
    """(..., H, L, d) to (..., L, H d)."""
    xp, lead = _arrays.namespace(x), len(x.shape) - 2 - len(shape.axes)
    together = xp.moveaxis(x, -2, lead)
    width = math.prod(together.shape[lead + 1 :])
    return xp.reshape(together, (*together.shape[: lead + 1], width))
