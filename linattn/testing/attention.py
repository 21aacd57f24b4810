"""What must hold of attention whatever the numbers are: nothing here is left to chance.

Every assertion takes a feature map, which :func:`linattn.linear_attention` then runs, or the user's
own ``attention(query, key, value, **options)`` with the options named there. Inputs are NumPy
arrays, drawn from ``rng``, of every length, number of heads and dtype asked for, any two of them
together; the result says which. Differences are compared with ``rtol`` times the largest output.
In float32 tokens have a size of at most 8.

Letters: ``L`` tokens, ``d`` dim, ``e`` value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn import _arrays, _checks
from linattn.testing._attention_cases import (
    Attention,
    Case,
    Floats,
    Inputs,
    cases_of,
    evidence_of,
)
from linattn.testing._draws import (
    feature_products,
    has_positions,
    lead_axes,
)
from linattn.testing._evidence import Evidence, check_not_empty, on_host
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


@_arrays.on_array_device
def assert_causal(
    feature_map: FeatureMap | None = None,
    *,
    attention: Attention | None = None,
    magnitudes: tuple[float, ...] = (0.5, 30.0),
    **inputs: Unpack[Inputs],
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
    length : int or sequence of int, optional
        L. Default (33, 70, 333), at most the map's ``max_length``.
    heads : sequence of int, optional
        Heads between batch and length; 0 for no such axis. Default (0, 3). A map with axes of its
        own has only these.
    dtype : {"float64", "float32", "float16"} or sequence of them, optional
        Of the inputs. Default float64 and float32; float64 alone for a map with negative features,
        whose sums may cancel.
    rtol : float, optional
        Default 1e-9; in float32 at least 1e-4, in float16 at least 0.03.
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
        Fewer than 2 tokens, an unknown dtype, an ``rtol`` outside (0, 1), an empty list of what to
        try.

    Notes
    -----
    Tokens are replaced from position 1, L / 2, 3 L / 4 and L - 1 on, and from the borders of blocks
    of 64, 128 and 256. Up to 15 calls for each length, number of heads and dtype.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures
    >>> from linattn.testing import assert_causal
    >>> evidence = assert_causal(EluFeatures())
    >>> evidence.check
    'assert_causal'
    """
    check_not_empty("magnitudes", magnitudes)
    cases = cases_of("assert_causal", feature_map, attention, **inputs)
    for case in cases:
        n, whole = case.length, on_host(case.attend(*case.arrays, is_causal=True))
        cuts = {1, n // 2, 3 * n // 4, n - 1} | {cut for cut in (64, 128, 256) if cut < n}
        for cut, size in product(sorted(cuts), magnitudes):
            changed = []
            for array in case.arrays:
                later = case.normal(n - cut, size, array.shape[-1])
                changed.append(np.concatenate([array[..., :cut, :], later], axis=-2))
            output = on_host(case.attend(*changed, is_causal=True))
            what = f"outputs before token {cut}, later tokens replaced by others of size {size:g}"
            case.close(what, output[..., :cut, :], whole[..., :cut, :])
    return evidence_of(f"later tokens replaced, sizes {[*magnitudes]}", cases)


@_arrays.on_array_device
def assert_streaming(
    feature_map: FeatureMap | None = None,
    *,
    attention: Attention | None = None,
    step: Callable[[Array, Array, Array, Any], tuple[Array, Any]] | None = None,
    **inputs: Unpack[Inputs],
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
    length, heads, dtype, rtol, rng
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
    cases = cases_of("assert_streaming", feature_map, attention, **inputs)
    if step is None and feature_map is None:
        raise TypeError("want step= (query, key, value, state) beside attention=")
    known: Any = feature_map
    step_function: Any = linattn.decode_step
    take: Any = step or (lambda *token: step_function(*token, known))
    for case in cases:
        whole = on_host(case.attend(*case.arrays, is_causal=True))
        if feature_map is not None and attention is None:
            for size in (1, 7, case.length) if case.length < 100 else (64, case.length):
                parts = case.attend(*case.arrays, is_causal=True, chunk_size=size)
                case.close(f"chunks of {size} against the whole", parts, whole)
            _assert_joined(case, whole)
        state: Any = None
        if step is None:
            batch_shape = case.value.shape[:-2]
            state = linattn.init_state(known, case.width, batch_shape=batch_shape, like=case.key)
        outputs = []
        for t in range(case.length):
            output, state = take(*(array[..., t, :] for array in case.arrays), state)
            outputs.append(on_host(output))
        case.close("steps against the whole", np.stack(outputs, axis=-2), whole)
    return evidence_of("steps, chunks and whole agree", cases)


def _assert_joined(case: Case, whole: Floats) -> None:
    cut = whole.shape[-2] // 2
    head, tail = ([a[..., part, :] for a in case.arrays] for part in (slice(cut), slice(cut, None)))
    first, state = case.attend(*head, is_causal=True, return_state=True)
    rest = case.attend(*tail, is_causal=True, initial_state=state)
    joined = np.concatenate([on_host(first), on_host(rest)], axis=-2)
    case.close("two calls joined by a state against the whole", joined, whole)


@_arrays.on_array_device
def assert_mask_is_slice(
    feature_map: FeatureMap | None = None,
    *,
    attention: Attention | None = None,
    is_causal: bool = False,
    garbage: tuple[float, ...] = (1e3, np.nan),
    **inputs: Unpack[Inputs],
) -> Evidence:
    """Assert that masked keys and values contribute nothing, as if they had been cut out.

    Parameters
    ----------
    feature_map : FeatureMap, optional
        Run with ``linear_attention(..., key_mask=mask)``.
    attention : callable, optional
        Your own, called with and without ``key_mask=``, ``(L,)`` boolean, True = attend; also with
        ``is_causal=True`` if that is asked for.
    is_causal : bool, optional
        Compare the outputs of tokens that are not masked, in causal attention. Default False.
    garbage : tuple of float, optional
        What masked keys and values hold. Default (1000, NaN).
    length, heads, dtype, rtol, rng
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
    Masked are a random half, the last half, all but the last key, the first half, the first 64, 128
    and 256 keys (a first block that is masked whole) and a run in the middle; for a map whose
    features depend on the position only the last half.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures
    >>> from linattn.testing import assert_mask_is_slice
    >>> evidence = assert_mask_is_slice(EluFeatures())
    >>> evidence.check
    'assert_mask_is_slice'
    """
    is_causal = _checks.check_flag("is_causal", is_causal)
    check_not_empty("garbage", garbage)
    cases = cases_of("assert_mask_is_slice", feature_map, attention, **inputs)
    options = {"is_causal": True} if is_causal else {}
    for case in cases:
        for name, keep in _masks(case).items():
            rows = keep if is_causal else slice(None)
            cut_out = (case.query[..., rows, :], case.key[..., keep, :], case.value[..., keep, :])
            expected = case.attend(*cut_out, **options)
            for content in garbage:
                masked_key, masked_value = case.key.copy(), case.value.copy()
                masked_key[..., ~keep, :] = content
                masked_value[..., ~keep, :] = content
                output = case.attend(case.query, masked_key, masked_value, key_mask=keep, **options)
                what = f"{name} masked, holding {content:g}, against cutting them out"
                case.close(what, on_host(output)[..., rows, :], expected)
    names = ", ".join(dict.fromkeys(name for case in cases for name in _masks(case)))
    return evidence_of(f"masked {names}", cases)


def _masks(case: Case) -> dict[str, NDArray[np.bool_]]:
    """Which keys are kept, by the names of those that are masked."""
    n, index = case.length, np.arange(case.length)
    runs = {"the last half": (n // 2, n)}
    if case.feature_map is not None and has_positions(case.feature_map, case.dim):
        return {name: index < start for name, (start, _) in runs.items()}
    runs |= {"the first half": (0, n // 2), "all but the last": (0, n - 1)}
    runs |= {"a run in the middle": (n // 3, n - n // 3)}
    runs |= {f"the first {cut}": (0, cut) for cut in (64, 128, 256) if cut < n}
    masks = {name: (index < start) | (index >= stop) for name, (start, stop) in runs.items()}
    half = np.random.default_rng(n).random(n) < 0.5
    half[:2] = True, False
    return masks | {"a random half": half}


@_arrays.on_array_device
def assert_merge_associative(
    feature_map: FeatureMap | None = None,
    *,
    reduce: Callable[[Array, Array], Any] | None = None,
    merge: Callable[[Any, Any], Any] | None = None,
    read: Callable[[Array, Any], Array] | None = None,
    sizes: tuple[float, float, float] = (0.3, 1.0, 3.0),
    **inputs: Unpack[Inputs],
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
    length : int or sequence of int, optional
        Of the second part; the others have two and three times as many. Default (11, 110).
    heads, dtype, rtol, rng
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
        raise TypeError(f"want a feature_map, or {', '.join(missing)}= as well")
    inputs.setdefault("length", (11, 110))
    cases = cases_of(check, feature_map, linattn.linear_attention, **inputs)
    known: Any = feature_map

    def default_reduce(key: Array, value: Array) -> Any:
        empty = linattn.init_state(known, value.shape[-1], batch_shape=value.shape[:-2], like=key)
        return linattn.update_state(empty, key, value, known)

    reduce = reduce or default_reduce
    merge = merge or linattn.merge_states
    read = read or (lambda query, state: linattn.read_state(query, state, known))
    for case in cases:
        lengths = [case.length * part for part in (2, 1, 3)]
        keys = [case.normal(n, size) for n, size in zip(lengths, sizes, strict=True)]
        values = [case.normal(n, 1.0, case.width) for n in lengths]
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
            case.close(what, read(case.query, state), expected)
    return evidence_of("(a b) c, a (b c), c (b a) and the whole agree", cases)


@_arrays.on_array_device
def assert_permutation_invariant(
    feature_map: FeatureMap | None = None,
    *,
    attention: Attention | None = None,
    **inputs: Unpack[Inputs],
) -> Evidence:
    """Assert that the order of keys does not matter, and that outputs follow their queries.

    Parameters
    ----------
    feature_map : FeatureMap, optional
        Run with ``linear_attention``.
    attention : callable, optional
        Your own, called without options.
    length, heads, dtype, rtol, rng
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
    cases = cases_of("assert_permutation_invariant", feature_map, attention, **inputs)
    for case in cases:
        expected = on_host(case.attend(*case.arrays))
        order = case.rng.permutation(case.length)
        output = case.attend(case.query, case.key[..., order, :], case.value[..., order, :])
        case.close("keys and values in another order", output, expected)
        output = case.attend(case.query[..., order, :], case.key, case.value)
        case.close("queries in another order", output, expected[..., order, :])
    return evidence_of("keys and queries in another order", cases)


@_arrays.on_array_device
def assert_batch_independent(
    feature_map: FeatureMap | None = None,
    *,
    attention: Attention | None = None,
    is_causal: bool = False,
    garbage: tuple[float, ...] = (30.0, np.nan),
    **inputs: Unpack[Inputs],
) -> Evidence:
    """Assert that the output of a batch element, or head, does not depend on the others.

    Parameters
    ----------
    feature_map : FeatureMap, optional
        Run with ``linear_attention``.
    attention : callable, optional
        Your own, called with ``is_causal=True`` or without options; arrays ``(2, ..., L, d)``, then
        ``(1, ..., L, d)`` and ``(2, 1, L, d)``.
    is_causal : bool, optional
        Default False.
    garbage : tuple of float, optional
        Size of what the other element holds. Default (30, NaN).
    length, heads, dtype, rtol, rng
        As :func:`assert_causal`.

    Returns
    -------
    Evidence

    Raises
    ------
    AssertionError
        Elements or heads differ from themselves alone, or elements beside garbage.
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
    check_not_empty("garbage", garbage)
    cases = cases_of("assert_batch_independent", feature_map, attention, **inputs)
    options = {"is_causal": True} if is_causal else {}
    for case in cases:
        together = on_host(case.attend(*case.arrays, **options))
        parts: dict[str, Any] = {f"element {i}": np.s_[i : i + 1] for i in range(2)}
        if case.lead and (case.feature_map is None or not lead_axes(case.feature_map, case.dim)):
            parts |= {f"head {i}": np.s_[:, i : i + 1] for i in range(case.lead[0])}
        for name, part in parts.items():
            alone = case.attend(*(array[part] for array in case.arrays), **options)
            case.close(f"{name} alone against beside others", alone, together[part])
        for content in garbage:
            replaced = []
            for array in case.arrays:
                other = content * case.normal(case.length, 1.0, array.shape[-1])
                replaced.append(np.concatenate([array[:1], other[1:].astype(case.dtype)]))
            output = on_host(case.attend(*replaced, **options))
            case.close(f"element 0 beside an element of size {content:g}", output[0], together[0])
    beside = ", ".join(f"{content:g}" for content in garbage)
    return evidence_of(f"alone, in a batch, beside others of size {beside}", cases)


@_arrays.on_array_device
def assert_normalized(
    feature_map: FeatureMap | None = None,
    *,
    attention: Attention | None = None,
    magnitudes: tuple[float, ...] = (0.5, 8.0),
    **inputs: Unpack[Inputs],
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
    length, heads, dtype, rtol, rng
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
    check_not_empty("magnitudes", magnitudes)
    cases = cases_of("assert_normalized", feature_map, attention, **inputs)
    for case, size in product(cases, magnitudes):
        query, key = case.normal(case.length, size), case.normal(case.length, size)
        ones = np.ones_like(case.value)
        output = on_host(case.attend(query, key, ones))
        expected = ones
        if feature_map is not None and attention is None:
            products = feature_products(feature_map, query, key)
            silent = np.all(products == 0, axis=-1)[..., None] & (output == 0)
            expected = np.where(silent, 0.0, ones)
        case.close(f"sum of weights, tokens of size {size:g}", output, expected)
    return evidence_of(f"weights sum to 1, sizes {[*magnitudes]}", cases)
