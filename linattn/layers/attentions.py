"""Objects for the arguments ``attention=`` and ``positions=`` of the layers."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn._settings import current_settings
from linattn.automatic import attention as automatic_attention
from linattn.coreset import CoresetAttention
from linattn.feature_maps import LandmarkFeatures
from linattn.functional import decode_step, linear_attention, softmax_attention
from linattn.gradients import linear_attention_vjp, softmax_attention_vjp
from linattn.layers._cache import KeyValueCache
from linattn.positions import alibi_slopes, rotary
from linattn.sampling import Seed
from linattn.state import Decoder, init_state, read_state, update_state
from linattn.typing import Array, FeatureMap
from linattn.typing._shifts import largest
from linattn.typing.records import one_line

__all__ = [
    "Alibi",
    "Attention",
    "AutomaticAttention",
    "BoundedAttention",
    "LandmarkAttention",
    "LinearAttention",
    "Rotary",
    "Scope",
    "SoftmaxAttention",
]


class Scope(NamedTuple):
    """Which keys queries see, and how weights fall with distance."""

    is_causal: bool = False
    key_mask: Array | None = None
    """(S,), or the shape of the keys without the last axis."""
    head_axes: tuple[int, ...] = ()
    """Axes of the heads: (H,), or (G, H / G) if H heads of queries share G heads of keys."""
    slopes: NDArray[np.float64] | None = None
    """Slopes of ALiBi, with the axes of heads."""

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class Attention:
    """Base class of the objects for ``attention=``; derive your own attention from it.

    Letters: ``L`` queries, ``S`` keys, ``d`` dim, ``e`` value dim. Leading axes are batch and
    heads. If queries share keys, heads have two axes (G, H / G), and keys and values (G, 1).

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> class Uniform(layers.Attention):
    ...     def __call__(self, query, key, value, scope):
    ...         return np.broadcast_to(np.mean(value, axis=-2, keepdims=True), query.shape)
    >>> x = np.ones((2, 5, 8))
    >>> Uniform()(x, x, x, layers.Scope()).shape
    (2, 5, 8)
    """

    def __call__(self, query: Array, key: Array, value: Array, scope: Scope) -> Array:
        """Return outputs (..., L, e) for query (..., L, d), key (..., S, d), value (..., S, e)."""
        raise NotImplementedError

    def vjp(self, query: Array, key: Array, value: Array, scope: Scope) -> tuple[Array, Any]:
        """Return outputs, and a function that computes gradients by query, key and value."""
        _raise(f"{self!r} must have gradients here, and has none", "train with another attention")

    def extend(
        self, query: Array, key: Array, value: Array, cache: Any, scope: Scope
    ) -> tuple[Array, Any]:
        """Continue a stream: attend causally to the cached tokens and to these.

        Return the outputs and the new cache. ``cache`` is None at the start.
        """
        _raise(f"{self!r} must go on token by token here, and cannot", "generate with another one")

    def for_steps(self, cache: Any) -> Any:
        """Return a cache for one stream of single tokens: :meth:`extend` may change it."""
        return cache

    def remember(self, key: Array, value: Array, scope: Scope) -> Any:
        """Return the cache of a memory, which all later queries see as a whole."""
        return key, value, scope

    def read(self, query: Array, cache: Any, start: int) -> Array:
        """Attend to the memory that :meth:`remember` cached.

        Queries and memory both count from 0: the first query is at position ``start``.
        """
        key, value, scope = cache
        return self(query, key, value, scope)


def _raise_by_distance(attention: Attention) -> NoReturn:
    _raise(f"{attention!r} sees a memory by distance", "give cross_attention= another one")


def _raise(problem: str, remedy: str) -> NoReturn:
    raise NotImplementedError(f"attention must suit the call: {problem}; {remedy}")


@dataclass(frozen=True)
class SoftmaxAttention(Attention):
    """Exact attention, by :func:`linattn.softmax_attention`.

    Parameters
    ----------
    scale : float, optional
        Scale of the logits; default ``1 / sqrt(d)``.
    window : int, optional
        A query sees keys up to this distance on either side. Default: no bound.

    Notes
    -----
    A stream stores all keys and values, or only the last ones with a window.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_multi_head_attention(np.random.default_rng(0), 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> attention = layers.SoftmaxAttention(window=2)
    >>> layers.multi_head_attention(params, x, num_heads=2, attention=attention).shape
    (2, 5, 8)
    """

    scale: float | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        """Check the window."""
        if self.window is not None:
            _checks.check_positive_int("window", self.window, least=0)

    def __call__(self, query: Array, key: Array, value: Array, scope: Scope) -> Array:
        """Attend."""
        return softmax_attention(query, key, value, **self._options(query, scope))

    def vjp(self, query: Array, key: Array, value: Array, scope: Scope) -> tuple[Array, Any]:
        """Attend, with a pullback."""
        return softmax_attention_vjp(query, key, value, **self._options(query, scope))

    def extend(
        self, query: Array, key: Array, value: Array, cache: Any, scope: Scope
    ) -> tuple[Array, Any]:
        """Attend to the cache and to these keys; store all of them, or the window."""
        cache = KeyValueCache.append(cache, key, value)
        if self.window is not None:
            cache = cache.last(self.window + query.shape[-2])
        if query.shape[-2] == 1:
            out = self._read_one(query, cache, scope)
        elif self.window is None and scope.slopes is None:
            out = softmax_attention(
                query, cache.key, cache.value, scale=self.scale, is_causal="lower_right"
            )
        else:
            out = self._with_queries_before(query, cache, scope)
        return out, cache if self.window is None else cache.last(self.window)

    def remember(self, key: Array, value: Array, scope: Scope) -> Any:
        """Return keys and values of the memory."""
        if self.window is not None:
            _raise_by_distance(self)
        return super().remember(key, value, scope)

    @_arrays.on_array_device
    def _read_one(self, query: Array, cache: KeyValueCache, scope: Scope) -> Array:
        """Attend with the last query, which sees the whole cache, one product for all heads."""
        xp = _arrays.namespace(query)
        precision = current_settings().precision
        dtype = _arrays.accumulation_dtype(xp, query.dtype, precision, query)
        q, key, value = (xp.astype(x, dtype, copy=False) for x in (query, cache.key, cache.value))
        scale = query.shape[-1] ** -0.5 if self.scale is None else float(self.scale)
        logits = (q * scale) @ xp.matrix_transpose(key)
        if scope.slopes is not None:
            distance = np.arange(1 - key.shape[-2], 1)
            logits = logits + _like(q, scope.slopes[..., None, None] * distance)
        weights = xp.exp(logits - largest(logits, keepdims=True))
        out = weights @ value / xp.sum(weights, axis=-1, keepdims=True)
        return xp.astype(out, query.dtype, copy=False)

    def _with_queries_before(self, query: Array, cache: KeyValueCache, scope: Scope) -> Array:
        """Attend with zero queries in front, one for each earlier key, as a window needs."""
        xp, length = _arrays.namespace(query), query.shape[-2]
        before = cache.stop - cache.start - length
        shape = (*query.shape[:-2], before, query.shape[-1])
        zeros = xp.zeros(shape, dtype=query.dtype, device=array_api_compat.device(query))
        whole = xp.concat([zeros, query], axis=-2)
        return self(whole, cache.key, cache.value, scope)[..., before:, :]

    def _options(self, query: Array, scope: Scope) -> dict[str, Any]:
        bias = None
        if scope.slopes is not None:
            length = max(1, query.shape[-2])
            bias = _like(query, -scope.slopes[..., None] * abs(np.arange(1 - length, length)))
        return {
            "scale": self.scale,
            "is_causal": scope.is_causal,
            "key_mask": scope.key_mask,
            "local_window_size": self.window,
            "window_bias": bias,
        }


@dataclass(frozen=True)
class LinearAttention(Attention):
    """Linear attention with a feature map, by :func:`linattn.linear_attention`.

    Parameters
    ----------
    feature_map : FeatureMap
        From :mod:`linattn.feature_maps`, for heads of dim d.
    log_decay : float or sequence of floats, one a head, optional
        Log of the factor that weights are multiplied by for each token of distance, at most 0.
        Masked tokens count as distance. Default 0.
    exact_window : int, optional
        Nearby keys count exactly, all others through the map, as for
        :func:`linattn.linear_attention`. Has no gradient and no stream. Default: none.

    Notes
    -----
    A stream stores a :class:`linattn.State`, whose size does not grow.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import feature_maps, layers
    >>> params = layers.init_multi_head_attention(np.random.default_rng(0), 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> attention = layers.LinearAttention(feature_maps.EluFeatures(), log_decay=-0.1)
    >>> layers.multi_head_attention(params, x, num_heads=2, attention=attention).shape
    (2, 5, 8)
    """

    feature_map: FeatureMap
    log_decay: Any = None
    exact_window: int | None = None

    def __call__(self, query: Array, key: Array, value: Array, scope: Scope) -> Array:
        """Attend."""
        key, value, options = self._options(query, key, value, scope)
        options["exact_window"] = self.exact_window
        return linear_attention(query, key, value, self.feature_map, **options)

    def vjp(self, query: Array, key: Array, value: Array, scope: Scope) -> tuple[Array, Any]:
        """Attend, with a pullback."""
        if self.exact_window is not None:
            return super().vjp(query, key, value, scope)
        given = key, value
        key, value, options = self._options(query, key, value, scope)
        out, pull = linear_attention_vjp(query, key, value, self.feature_map, **options)

        def pullback(grad: Array) -> tuple[Array, ...]:
            grad_query, *by_keys = pull(grad)[:3]
            return grad_query, *map(_summed_like, by_keys, given)

        return out, pullback

    def extend(
        self, query: Array, key: Array, value: Array, cache: Any, scope: Scope
    ) -> tuple[Array, Any]:
        """Attend after a state; return the new state too."""
        if self.exact_window is not None:
            return super().extend(query, key, value, cache, scope)
        key, value, options = self._options(query, key, value, scope)
        phi, decay = self.feature_map, options["log_decay"]
        if isinstance(cache, Decoder):
            q, k, v = (array[..., 0, :] for array in (query, key, value))
            return cache.step(q, k, v, log_decay=decay)[..., None, :], cache
        if cache is not None and query.shape[-2] == 1:
            q, k, v = (array[..., 0, :] for array in (query, key, value))
            out, state = decode_step(q, k, v, cache, phi, log_decay=decay)
            return out[..., None, :], state
        out, state = linear_attention(
            query, key, value, phi, initial_state=cache, return_state=True, **options
        )
        return out, state

    def for_steps(self, cache: Any) -> Any:
        """Return a :class:`linattn.Decoder`, whose steps are faster."""
        return Decoder(self.feature_map, cache)

    def remember(self, key: Array, value: Array, scope: Scope) -> Any:
        """Return the state of the memory."""
        phi, lead = self.feature_map, tuple(key.shape[:-2])
        if self.exact_window is not None or self._decay(scope) is not None:
            _raise_by_distance(self)
        state = init_state(phi, value.shape[-1], batch_shape=lead, like=key)
        return update_state(state, key, value, phi, key_mask=scope.key_mask)

    def read(self, query: Array, cache: Any, start: int) -> Array:
        """Attend to the state of the memory."""
        # Positions count from `length`: here that of the query, not of the memory.
        return read_state(query, cache._replace(length=start), self.feature_map)

    def _decay(self, scope: Scope) -> NDArray[np.float64] | None:
        """Return the log decay per token, one for all heads or with the axes of heads."""
        if self.log_decay is None and scope.slopes is None:
            return None
        decay = np.asarray(0 if self.log_decay is None else self.log_decay, dtype=np.float64)
        if decay.ndim:
            if decay.shape != (math.prod(scope.head_axes),):
                raise ValueError(
                    f"log_decay must be a number or one for each of the "
                    f"{math.prod(scope.head_axes)} heads, got shape {decay.shape}"
                )
            decay = decay.reshape(scope.head_axes)
        return decay if scope.slopes is None else np.asarray(decay - scope.slopes)

    def _options(
        self, query: Array, key: Array, value: Array, scope: Scope
    ) -> tuple[Array, Array, dict[str, Any]]:
        """Return keys, values and options; keys and values get a heads axis if decays differ."""
        options: dict[str, Any] = {"is_causal": scope.is_causal, "key_mask": scope.key_mask}
        decay = self._decay(scope)
        if decay is None:
            return key, value, options | {"log_decay": None}
        if not decay.ndim:
            return key, value, options | {"log_decay": float(decay)}
        xp = _arrays.namespace(key)
        lead = (*key.shape[: key.ndim - 2 - decay.ndim], *scope.head_axes)
        key, value = (xp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (key, value))
        by_head = _with_axes(_like(query, decay), key.ndim - 2)
        return key, value, options | {"log_decay": by_head}


@dataclass(frozen=True)
class LandmarkAttention(Attention):
    """Full attention with landmarks that are fitted to the queries and keys of each call.

    Parameters
    ----------
    num_features : int, optional
        Landmarks a head. Default 64.
    exact_window, exact_clusters : int, optional
        As for :func:`linattn.linear_attention`; they have no gradient. Default: none.
    rng : int, Generator, SeedSequence or None, optional
        Seed of the fits. An integer makes calls repeatable.

    Notes
    -----
    In gradients the landmarks are constants.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_multi_head_attention(np.random.default_rng(0), 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> attention = layers.LandmarkAttention(num_features=4, rng=0)
    >>> layers.multi_head_attention(params, x, num_heads=2, attention=attention).shape
    (2, 5, 8)
    """

    num_features: int = 64
    exact_window: int | None = None
    exact_clusters: int | None = None
    rng: Seed = None

    def __call__(self, query: Array, key: Array, value: Array, scope: Scope) -> Array:
        """Fit and attend."""
        if _is_nothing(query, key):
            return SoftmaxAttention()(query, key, value, scope)
        return linear_attention(
            query,
            key,
            value,
            self._fit(query, key, scope),
            is_causal=scope.is_causal,
            key_mask=scope.key_mask,
            exact_window=self.exact_window,
            exact_clusters=self.exact_clusters,
        )

    def vjp(self, query: Array, key: Array, value: Array, scope: Scope) -> tuple[Array, Any]:
        """Fit and attend, with a pullback."""
        if self.exact_window is not None or self.exact_clusters is not None:
            return super().vjp(query, key, value, scope)
        if _is_nothing(query, key):
            return SoftmaxAttention().vjp(query, key, value, scope)
        phi = self._fit(query, key, scope)
        return linear_attention_vjp(
            query, key, value, phi, is_causal=scope.is_causal, key_mask=scope.key_mask
        )

    def remember(self, key: Array, value: Array, scope: Scope) -> Any:
        """Raise an error: landmarks need all queries, and a stream has only the past ones."""
        _raise(f"{self!r} is fitted to all queries", "give cross_attention= another one")

    def _fit(self, query: Array, key: Array, scope: Scope) -> LandmarkFeatures:
        _check_no_slopes(self, scope)
        num = self.num_features
        return LandmarkFeatures.fit(
            query, key, num_features=num, key_mask=scope.key_mask, rng=self.rng
        )


@dataclass(frozen=True)
class AutomaticAttention(Attention):
    """The method that :func:`linattn.attention` chooses for each head; no gradient, no stream.

    Parameters
    ----------
    tolerance, rng
        As for :func:`linattn.attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_multi_head_attention(np.random.default_rng(0), 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> attention = layers.AutomaticAttention(rng=0)
    >>> layers.multi_head_attention(params, x, num_heads=2, attention=attention).shape
    (2, 5, 8)
    """

    tolerance: float | None = 0.1
    rng: Seed = None

    def __call__(self, query: Array, key: Array, value: Array, scope: Scope) -> Array:
        """Attend."""
        _check_no_slopes(self, scope)
        return automatic_attention(
            query,
            key,
            value,
            is_causal=scope.is_causal,
            key_mask=scope.key_mask,
            tolerance=self.tolerance,
            rng=self.rng,
        )


@dataclass(frozen=True)
class BoundedAttention(Attention):
    """Causal softmax attention in bounded memory, by :class:`linattn.CoresetAttention`.

    Parameters
    ----------
    num_entries, block_size, rng
        As for :class:`linattn.CoresetAttention`; each call begins a stream of its own.

    Notes
    -----
    Has no gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_multi_head_attention(np.random.default_rng(0), 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> attention = layers.BoundedAttention(num_entries=4, block_size=4, rng=0)
    >>> options = {"num_heads": 2, "attention": attention, "is_causal": True}
    >>> layers.multi_head_attention(params, x, **options).shape
    (2, 5, 8)
    """

    num_entries: int = 64
    block_size: int = 32
    rng: Seed = 0

    def __call__(self, query: Array, key: Array, value: Array, scope: Scope) -> Array:
        """Attend."""
        if not scope.is_causal:
            _raise(f"{self!r} is causal, got is_causal=False", "give another one here")
        return self.extend(query, key, value, None, scope)[0]

    def extend(
        self, query: Array, key: Array, value: Array, cache: Any, scope: Scope
    ) -> tuple[Array, Any]:
        """Attend with a copy of the stream; return the copy as the new cache."""
        _check_no_slopes(self, scope)
        if cache is None:
            stream = CoresetAttention(self.num_entries, block_size=self.block_size, rng=self.rng)
        else:
            stream = copy.copy(cache)
        return stream.extend(query, key, value, key_mask=scope.key_mask), stream


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding: queries and keys are rotated by their positions before any feature map.

    Parameters
    ----------
    base, interleaved, dim
        As for :func:`linattn.positions.rotary`.
    frequencies : sequence of float, optional
        As for :func:`linattn.positions.rotary`; stored as a tuple. YaRN also multiplies cosines and
        sines by a number f: use ``SoftmaxAttention(scale=f**2 / d**0.5)`` for that.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_multi_head_attention(np.random.default_rng(0), 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> layers.multi_head_attention(params, x, num_heads=2, positions=layers.Rotary()).shape
    (2, 5, 8)
    """

    base: float = 10_000
    interleaved: bool = False
    dim: int | None = None
    frequencies: Any = None

    def __post_init__(self) -> None:
        """Store the frequencies as numbers, which compare and hash."""
        if self.frequencies is not None:
            object.__setattr__(self, "frequencies", tuple(map(float, self.frequencies)))

    def rotate(self, x: Array, start: int = 0) -> Array:
        """Rotate tokens (..., L, d) at positions ``start``, ``start + 1``, ..."""
        return self._at(x, np.arange(start, start + x.shape[-2]))

    def rotate_back(self, grad: Array) -> Array:
        """Pull a gradient back through :meth:`rotate` from position 0: the inverse rotation."""
        return self._at(grad, -np.arange(grad.shape[-2]))

    def _at(self, x: Array, positions: NDArray[np.int64]) -> Array:
        return rotary(x, positions, **vars(self))


@dataclass(frozen=True)
class Alibi:
    """ALiBi: logits fall with the distance, by a slope for each head.

    The slopes are :func:`linattn.positions.alibi_slopes`. :class:`SoftmaxAttention` adds them to
    the logits, :class:`LinearAttention` uses them as a decay; other attentions raise an error.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_multi_head_attention(np.random.default_rng(0), 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> layers.multi_head_attention(params, x, num_heads=2, positions=layers.Alibi()).shape
    (2, 5, 8)
    """

    def slopes(self, head_axes: tuple[int, ...]) -> NDArray[np.float64]:
        """Return the slopes, with the axes of heads."""
        return alibi_slopes(math.prod(head_axes)).reshape(head_axes)


def _is_nothing(query: Array, key: Array) -> bool:
    """Whether there is no pair of tokens to fit landmarks to."""
    return 0 in query.shape or 0 in key.shape


def _check_no_slopes(attention: Attention, scope: Scope) -> None:
    if scope.slopes is not None:
        raise ValueError(
            f"positions must not be Alibi() with {attention!r}, whose weights do not fall with "
            f"distance; it goes with SoftmaxAttention and LinearAttention"
        )


def _like(query: Array, numbers: NDArray[np.float64]) -> Array:
    """Return host numbers in the library, dtype and device of the queries."""
    xp, device = _arrays.namespace(query), array_api_compat.device(query)
    return _arrays.device_array(np.asarray(numbers), xp, query.dtype, device)


def _with_axes(array: Array, ndim: int) -> Array:
    """Put axes of 1 in front."""
    shape = tuple(array.shape)
    return _arrays.namespace(array).reshape(array, (1,) * (ndim - len(shape)) + shape)


def _summed_like(grad: Array, array: Array) -> Array:
    """Sum a gradient over the heads that one key or value was broadcast to."""
    axes = tuple(i for i, (m, n) in enumerate(zip(grad.shape, array.shape, strict=True)) if m != n)
    if not axes:
        return grad
    xp = _arrays.namespace(grad)
    wide = xp.astype(grad, _arrays.accumulation_dtype(xp, grad.dtype, None), copy=False)
    return xp.astype(xp.sum(wide, axis=axes, keepdims=True), grad.dtype, copy=False)
