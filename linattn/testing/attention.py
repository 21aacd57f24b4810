"""What must hold of attention whatever the numbers are: nothing here is left to chance.

Every assertion takes a feature map, which :func:`linattn.linear_attention` then runs, or the user's
own ``attention(query, key, value, **options)`` with the options named there. Inputs are float64
NumPy, drawn from ``rng``; differences are compared with ``rtol`` times the largest output.

Letters: ``L`` tokens, ``d`` dim, ``e`` value dim.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn import _arrays, _checks
from linattn.sampling import Seed, as_generator
from linattn.testing._draws import check_map_or, feature_products, has_positions, lead_axes
from linattn.testing._evidence import Evidence, assert_close, check_not_empty, on_host
from linattn.typing import Array, FeatureMap

__all__ = [
    "Attention",
    "assert_batch_independent",
    "assert_causal",
    "assert_mask_is_slice",
    "assert_merge_associative",
    "assert_normalized",
    "assert_permutation_invariant",
    "assert_streaming",
]

Floats = NDArray[np.float64]
Attention = Callable[..., Array]
"""``attention(query, key, value, **options) -> output``, arrays ``(..., L, d)``."""


class _Case:
    """The attention under test, and inputs that suit it."""

    def __init__(
        self,
        feature_map: FeatureMap | None,
        attention: Attention | None,
        rng: Seed,
        length: int,
        size: float = 0.5,
    ) -> None:
        if feature_map is None and attention is None:
            message = "want a feature_map, or attention= (query, key, value, **options)"
            raise TypeError(message)
        check_map_or(feature_map, "attention", attention, "(query, key, value, **options)")
        if isinstance(length, int) and length < 2:
            message = f"length must be at least 2 tokens, got {length}"
            raise ValueError(message)
        _checks.check_positive_int("length", length)
        self.feature_map = feature_map
        self.attention = attention
        self.rng = as_generator(rng)
        self.dim = getattr(feature_map, "dim", None) or 4
        self.lead = () if feature_map is None else lead_axes(feature_map, self.dim)
        self.query, self.key = self.normal(length, size), self.normal(length, size)
        self.value = self.normal(length, 1.0, 3)

    def normal(self, length: int, size: float, width: int | None = None) -> Floats:
        shape = (2, *self.lead, length, self.dim if width is None else width)
        return size * self.rng.standard_normal(shape)

    def attend(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
        if self.attention is not None:
            return self.attention(query, key, value, **options)
        with warnings.catch_warnings():
            # Inputs are drawn for what must hold of every output, whatever its denominator.
            warnings.filterwarnings("ignore", ".* denominators are negative", UserWarning)
            return linattn.linear_attention(query, key, value, self.feature_map, **options)  # type: ignore[arg-type]

    @property
    def has_positions(self) -> bool:
        return self.feature_map is not None and has_positions(self.feature_map, self.dim)


@_arrays.on_array_device
def assert_causal(
    feature_map: FeatureMap | None = None,
    *,
    attention: Attention | None = None,
    magnitudes: tuple[float, ...] = (0.5, 30.0),
    length: int = 33,
    rtol: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    """Assert that changing token t changes no output before t.

    Parameters
    ----------
    feature_map : FeatureMap, optional
        Run with ``linear_attention(..., is_causal=True)``.
    attention : callable, optional
        Your own, called with ``is_causal=True``.
    magnitudes : tuple of float, optional
        Size of the tokens that replace the later ones. Large ones find shifts and scales that
        depend on the future. Default (0.5, 30).
    length : int, optional
        L. Default 33.
    rtol : float, optional
        Default 1e-9.
    rng : int, Generator, SeedSequence or None, optional
        Default 0.

    Returns
    -------
    Evidence

    Raises
    ------
    AssertionError
        An earlier output changed, or is not finite.
    TypeError
        Neither a map nor an attention.
    ValueError
        Fewer than 2 tokens, an ``rtol`` outside (0, 1), an empty list of what to try.

    Notes
    -----
    Tokens are replaced from position 1, L / 2 and L - 1 on. Time of seven calls.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures
    >>> from linattn.testing import assert_causal
    >>> evidence = assert_causal(EluFeatures())
    >>> evidence.check
    'assert_causal'
    """
    check = "assert_causal"
    check_not_empty("magnitudes", magnitudes)
    case = _Case(feature_map, attention, rng, length)
    whole = on_host(case.attend(case.query, case.key, case.value, is_causal=True))
    cuts = sorted({1, length // 2, length - 1})
    for cut in cuts:
        for size in magnitudes:
            changed = []
            for array in (case.query, case.key, case.value):
                later = case.normal(length - cut, size, array.shape[-1])
                changed.append(np.concatenate([array[..., :cut, :], later], axis=-2))
            output = on_host(case.attend(*changed, is_causal=True))
            what = f"outputs before token {cut}, later tokens replaced by others of size {size:g}"
            assert_close(check, what, output[..., :cut, :], whole[..., :cut, :], rtol)
    return Evidence(check, f"tokens from {cuts} on replaced, sizes {[*magnitudes]}", 0.0, rtol)


@_arrays.on_array_device
def assert_streaming(
    feature_map: FeatureMap | None = None,
    *,
    attention: Attention | None = None,
    step: Callable[[Array, Array, Array, Any], tuple[Array, Any]] | None = None,
    length: int = 33,
    rtol: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    """Assert that one token at a time, chunks and the whole sequence give the same.

    Parameters
    ----------
    feature_map : FeatureMap, optional
        Run whole, in chunks of 1, 7 and L, in two calls joined by a state, and by
        :func:`linattn.decode_step`.
    attention : callable, optional
        Your own, called whole with ``is_causal=True``.
    step : callable, optional
        Your own ``step(query, key, value, state) -> (output, state)`` of one token,
        ``(..., d)``; the first state is None. Needed with ``attention`` alone.
    length, rtol, rng
        As :func:`assert_causal`.

    Returns
    -------
    Evidence

    Raises
    ------
    AssertionError
        They differ.
    TypeError
        Neither a map nor both of the others.
    ValueError
        As :func:`assert_causal`.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures
    >>> from linattn.testing import assert_streaming
    >>> evidence = assert_streaming(EluFeatures())
    >>> evidence.check
    'assert_streaming'
    """
    check = "assert_streaming"
    case = _Case(feature_map, attention, rng, length)
    if step is None and feature_map is None:
        message = "want step= (query, key, value, state) beside attention="
        raise TypeError(message)
    arrays = (case.query, case.key, case.value)
    whole = on_host(case.attend(*arrays, is_causal=True))
    if feature_map is not None and attention is None:
        for size in (1, 7, length):
            parts = case.attend(*arrays, is_causal=True, chunk_size=size)
            assert_close(check, f"chunks of {size} against the whole", parts, whole, rtol)
        _assert_joined(check, case, whole, rtol)
    state: Any = None
    if step is None:
        known: Any = feature_map
        state = linattn.init_state(known, 3, batch_shape=case.value.shape[:-2], like=case.key)
        step = partial(_decode_step, known)
    outputs = []
    for t in range(length):
        query, key, value = (array[..., t, :] for array in arrays)
        output, state = step(query, key, value, state)
        outputs.append(on_host(output))
    assert_close(check, "steps against the whole", np.stack(outputs, axis=-2), whole, rtol)
    return Evidence(check, f"{length} tokens: steps, chunks and whole agree", 0.0, rtol)


def _decode_step(
    feature_map: Any, query: Array, key: Array, value: Array, state: Any
) -> tuple[Array, Any]:
    return linattn.decode_step(query, key, value, state, feature_map)


def _assert_joined(check: str, case: _Case, whole: Floats, rtol: float) -> None:
    cut = whole.shape[-2] // 2
    arrays = (case.query, case.key, case.value)
    head, tail = ([a[..., part, :] for a in arrays] for part in (slice(cut), slice(cut, None)))
    first, state = case.attend(*head, is_causal=True, return_state=True)
    rest = case.attend(*tail, is_causal=True, initial_state=state)
    joined = np.concatenate([on_host(first), on_host(rest)], axis=-2)
    assert_close(check, "two calls joined by a state against the whole", joined, whole, rtol)


@_arrays.on_array_device
def assert_mask_is_slice(
    feature_map: FeatureMap | None = None,
    *,
    attention: Attention | None = None,
    garbage: tuple[float, ...] = (1e3, np.nan),
    length: int = 33,
    rtol: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    """Assert that masked keys and values contribute nothing, as if they had been cut out.

    Parameters
    ----------
    feature_map : FeatureMap, optional
        Run with ``linear_attention(..., key_mask=mask)``.
    attention : callable, optional
        Your own, called with and without ``key_mask=``, ``(L,)`` boolean, True = attend.
    garbage : tuple of float, optional
        What masked keys and values hold. Default (1000, NaN).
    length, rtol, rng
        As :func:`assert_causal`.

    Returns
    -------
    Evidence

    Raises
    ------
    AssertionError
        Outputs differ from those without the masked keys.
    TypeError
        Neither a map nor an attention.
    ValueError
        As :func:`assert_causal`.

    Notes
    -----
    A map whose features depend on the position keeps its first keys, others a random half.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures
    >>> from linattn.testing import assert_mask_is_slice
    >>> evidence = assert_mask_is_slice(EluFeatures())
    >>> evidence.check
    'assert_mask_is_slice'
    """
    check = "assert_mask_is_slice"
    check_not_empty("garbage", garbage)
    case = _Case(feature_map, attention, rng, length)
    keep = case.rng.random(length) < 0.5
    keep[:2] = True, False
    if case.has_positions:
        keep = np.arange(length) < length // 2
    key, value = case.key[..., keep, :], case.value[..., keep, :]
    expected = case.attend(case.query, key, value)
    for content in garbage:
        masked_key, masked_value = case.key.copy(), case.value.copy()
        masked_key[..., ~keep, :] = content
        masked_value[..., ~keep, :] = content
        output = case.attend(case.query, masked_key, masked_value, key_mask=keep)
        what = f"masked tokens holding {content:g} against cutting them out"
        assert_close(check, what, output, expected, rtol)
    return Evidence(check, f"{int((~keep).sum())} of {length} keys masked", 0.0, rtol)


@_arrays.on_array_device
def assert_merge_associative(
    feature_map: FeatureMap | None = None,
    *,
    reduce: Callable[[Array, Array], Any] | None = None,
    merge: Callable[[Any, Any], Any] | None = None,
    read: Callable[[Array, Any], Array] | None = None,
    sizes: tuple[float, float, float] = (0.3, 1.0, 3.0),
    length: int = 11,
    rtol: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    """Assert that states of parts merge in any order and grouping into the state of all.

    Parameters
    ----------
    feature_map : FeatureMap, optional
        Gives the functions below that are not given.
    reduce : callable, optional
        ``reduce(key, value) -> state`` of a part. Default :func:`linattn.update_state`.
    merge : callable, optional
        ``merge(first, second) -> state``. Default :func:`linattn.merge_states`.
    read : callable, optional
        ``read(query, state) -> output``. Default :func:`linattn.read_state`.
    sizes : tuple of float, optional
        Size of the keys of the three parts; unequal ones have unequal scales. Default
        (0.3, 1, 3).
    length : int, optional
        Of each part. Default 11.
    rtol, rng
        As :func:`assert_causal`.

    Returns
    -------
    Evidence

    Raises
    ------
    AssertionError
        Some grouping reads differently from one state of all tokens.
    TypeError
        Neither a map nor all three functions.
    ValueError
        As :func:`assert_causal`.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures
    >>> from linattn.testing import assert_merge_associative
    >>> evidence = assert_merge_associative(EluFeatures())
    >>> evidence.check
    'assert_merge_associative'
    """
    check = "assert_merge_associative"
    functions = {"reduce": reduce, "merge": merge, "read": read}
    if feature_map is None and None in functions.values():
        missing = [name for name, function in functions.items() if function is None]
        message = f"want a feature_map, or {', '.join(missing)}= as well"
        raise TypeError(message)
    case = _Case(feature_map, linattn.linear_attention, rng, length)
    known: Any = feature_map

    def default_reduce(key: Array, value: Array) -> Any:
        empty = linattn.init_state(known, 3, batch_shape=value.shape[:-2], like=key)
        return linattn.update_state(empty, key, value, known)

    reduce = reduce or default_reduce
    merge = merge or linattn.merge_states
    read = read or (lambda query, state: linattn.read_state(query, state, known))
    keys = [case.normal(length, size) for size in sizes]
    values = [case.normal(length, 1.0, 3) for _ in sizes]
    a, b, c = (reduce(key, value) for key, value in zip(keys, values, strict=True))
    whole = reduce(np.concatenate(keys, axis=-2), np.concatenate(values, axis=-2))
    expected = read(case.query, whole)
    groupings = {
        "(a b) c": merge(merge(a, b), c),
        "a (b c)": merge(a, merge(b, c)),
        "c (b a)": merge(c, merge(b, a)),
    }
    for name, state in groupings.items():
        what = f"states merged as {name} against one state of all"
        assert_close(check, what, read(case.query, state), expected, rtol)
    return Evidence(check, "(a b) c, a (b c), c (b a) and the whole agree", 0.0, rtol)


@_arrays.on_array_device
def assert_permutation_invariant(
    feature_map: FeatureMap | None = None,
    *,
    attention: Attention | None = None,
    length: int = 33,
    rtol: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    """Assert that the order of keys does not matter, and that outputs follow their queries.

    Parameters
    ----------
    feature_map : FeatureMap, optional
        Run with ``linear_attention``.
    attention : callable, optional
        Your own, called without options.
    length, rtol, rng
        As :func:`assert_causal`.

    Returns
    -------
    Evidence

    Raises
    ------
    AssertionError
        An output changed, or did not move with its query.
    TypeError
        Neither a map nor an attention.
    ValueError
        As :func:`assert_causal`.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures
    >>> from linattn.testing import assert_permutation_invariant
    >>> evidence = assert_permutation_invariant(EluFeatures())
    >>> evidence.check
    'assert_permutation_invariant'
    """
    check = "assert_permutation_invariant"
    case = _Case(feature_map, attention, rng, length)
    expected = on_host(case.attend(case.query, case.key, case.value))
    order = case.rng.permutation(length)
    output = case.attend(case.query, case.key[..., order, :], case.value[..., order, :])
    assert_close(check, "keys and values in another order", output, expected, rtol)
    output = case.attend(case.query[..., order, :], case.key, case.value)
    assert_close(check, "queries in another order", output, expected[..., order, :], rtol)
    return Evidence(check, f"{length} keys and queries in another order", 0.0, rtol)


@_arrays.on_array_device
def assert_batch_independent(
    feature_map: FeatureMap | None = None,
    *,
    attention: Attention | None = None,
    is_causal: bool = False,
    garbage: tuple[float, ...] = (30.0, np.nan),
    length: int = 33,
    rtol: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    """Assert that the output of a batch element does not depend on the other elements.

    Parameters
    ----------
    feature_map : FeatureMap, optional
        Run with ``linear_attention``.
    attention : callable, optional
        Your own, called with ``is_causal=True`` or without options; arrays ``(2, L, d)``, then
        ``(1, L, d)``.
    is_causal : bool, optional
        Default False.
    garbage : tuple of float, optional
        Size of what the other element holds. Default (30, NaN).
    length, rtol, rng
        As :func:`assert_causal`.

    Returns
    -------
    Evidence

    Raises
    ------
    AssertionError
        Elements differ from themselves alone, or from themselves beside garbage.
    TypeError
        Neither a map nor an attention.
    ValueError
        As :func:`assert_causal`.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures
    >>> from linattn.testing import assert_batch_independent
    >>> evidence = assert_batch_independent(EluFeatures())
    >>> evidence.check
    'assert_batch_independent'
    """
    is_causal = _checks.check_flag("is_causal", is_causal)
    check = "assert_batch_independent"
    check_not_empty("garbage", garbage)
    case = _Case(feature_map, attention, rng, length)
    options = {"is_causal": True} if is_causal else {}
    arrays = (case.query, case.key, case.value)
    together = on_host(case.attend(*arrays, **options))
    for index in range(2):
        alone = on_host(case.attend(*(a[index : index + 1] for a in arrays), **options))
        what = f"element {index} alone against in the batch"
        assert_close(check, what, alone[0], together[index], rtol)
    for content in garbage:
        replaced = []
        for array in arrays:
            other = content * case.normal(length, 1.0, array.shape[-1])
            replaced.append(np.concatenate([array[:1], other[1:]]))
        output = on_host(case.attend(*replaced, **options))
        what = f"element 0 beside an element of size {content:g}"
        assert_close(check, what, output[0], together[0], rtol)
    beside = ", ".join(f"{content:g}" for content in garbage)
    return Evidence(check, f"alone, in a batch, beside others of size {beside}", 0.0, rtol)


@_arrays.on_array_device
def assert_normalized(
    feature_map: FeatureMap | None = None,
    *,
    attention: Attention | None = None,
    magnitudes: tuple[float, ...] = (0.5, 8.0),
    length: int = 33,
    rtol: float = 1e-9,
    rng: Seed = 0,
) -> Evidence:
    """Assert that the weights of a query sum to 1, so that values of 1 come out as 1.

    Parameters
    ----------
    feature_map : FeatureMap, optional
        Run with ``linear_attention``. A row whose features share no column with any key gives 0.
    attention : callable, optional
        Your own, called without options.
    magnitudes : tuple of float, optional
        Size of queries and keys. Large ones make denominators small, where a constant added to
        them shows. Default (0.5, 8).
    length, rtol, rng
        As :func:`assert_causal`.

    Returns
    -------
    Evidence

    Raises
    ------
    AssertionError
        Weights that do not sum to 1.
    TypeError
        Neither a map nor an attention.
    ValueError
        As :func:`assert_causal`.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures
    >>> from linattn.testing import assert_normalized
    >>> evidence = assert_normalized(EluFeatures())
    >>> evidence.check
    'assert_normalized'
    """
    check = "assert_normalized"
    check_not_empty("magnitudes", magnitudes)
    for size in magnitudes:
        case = _Case(feature_map, attention, rng, length, size)
        ones = np.ones_like(case.value)
        output = on_host(case.attend(case.query, case.key, ones))
        expected = ones
        if feature_map is not None and attention is None:
            products = feature_products(feature_map, case.query, case.key)
            silent = np.all(products == 0, axis=-1)[..., None] & (output == 0)
            expected = np.where(silent, 0.0, ones)
        assert_close(check, f"sum of weights, tokens of size {size:g}", output, expected, rtol)
    return Evidence(check, f"weights sum to 1, sizes {[*magnitudes]}", 0.0, rtol)
