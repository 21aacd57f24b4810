"""Arrays out as arrays in, inputs left alone, and objects that survive pickling."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import array_api_compat
import numpy as np

from linattn import _arrays, _checks
from linattn.sampling import Seed, as_generator
from linattn.testing._draws import check_map_or
from linattn.testing._evidence import (
    Evidence,
    check_function,
    check_not_empty,
    fail,
    name_of,
    on_host,
)
from linattn.typing import Array, FeatureMap

__all__ = ["assert_inputs_unchanged", "assert_namespace_preserved", "assert_picklable"]


def _arrays_in(result: Any) -> Iterator[Array]:
    if isinstance(result, tuple | list):
        for part in result:
            yield from _arrays_in(part)
    elif array_api_compat.is_array_api_obj(result):
        yield result


@_arrays.on_array_device
def assert_namespace_preserved(function: Callable[..., Any], *arrays: Array) -> Evidence:
    """Assert that a function returns arrays of the library, type, dtype and device of its inputs.

    Parameters
    ----------
    function : callable
        ``function(*arrays)``, returning an array or a (named, nested) tuple with arrays in it.
    *arrays : array
        Of one library, dtype and device.

    Returns
    -------
    Evidence

    Raises
    ------
    AssertionError
        Another library, type, dtype or device; no array at all.
    TypeError, ValueError
        Inputs that are not of one library, dtype and device, or none.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> from linattn.testing import assert_namespace_preserved
    >>> evidence = assert_namespace_preserved(linattn.softmax_attention, *np.ones((3, 5, 4)))
    >>> evidence.check
    'assert_namespace_preserved'
    """
    check = "assert_namespace_preserved"
    check_function("function", function, "(*arrays)")
    check_not_empty("arrays", arrays)
    named = {f"arrays[{index}]": array for index, array in enumerate(arrays)}
    xp, _ = _checks.check_arrays(1, **named)
    given = arrays[0]
    wanted = (type(given), given.dtype, array_api_compat.device(given))
    results = list(_arrays_in(function(*arrays)))
    if not results:
        fail(check, "the function returned no array")
    for result in results:
        got = (type(result), result.dtype, array_api_compat.device(result))
        for what, ours, theirs in zip(("type", "dtype", "device"), wanted, got, strict=True):
            if ours != theirs:
                fail(check, f"want {what} {ours}, got {theirs}")
    return Evidence(check, f"{_arrays.library_name(xp)} {given.dtype}: {len(results)} arrays")


@_arrays.on_array_device
def assert_inputs_unchanged(function: Callable[..., Any], *arrays: Array) -> Evidence:
    """Assert that a function changes none of its inputs.

    Parameters
    ----------
    function : callable
        ``function(*arrays)``.
    *arrays : array
        Its inputs.

    Returns
    -------
    Evidence

    Raises
    ------
    AssertionError
        An input holds other numbers afterwards.
    TypeError, ValueError
        Not a function, not arrays, or none.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> from linattn.testing import assert_inputs_unchanged
    >>> evidence = assert_inputs_unchanged(linattn.softmax_attention, *np.ones((3, 5, 4)))
    >>> evidence.check
    'assert_inputs_unchanged'
    """
    check = "assert_inputs_unchanged"
    check_function("function", function, "(*arrays)")
    check_not_empty("arrays", arrays)
    for index, array in enumerate(arrays):
        if not array_api_compat.is_array_api_obj(array):
            raise TypeError(f"arrays[{index}] must be an array, got {name_of(array)}")
    before = [on_host(array) for array in arrays]
    function(*arrays)
    for index, (array, old) in enumerate(zip(arrays, before, strict=True)):
        if not np.array_equal(on_host(array), old, equal_nan=True):
            fail(check, f"arrays[{index}] was changed")
    return Evidence(check, f"{len(arrays)} inputs")


@_arrays.on_array_device
def assert_picklable(feature_map: FeatureMap, *, rng: Seed = 0) -> Evidence:
    """Assert that pickled and deep-copied maps give the same features, bit for bit.

    Parameters
    ----------
    feature_map : FeatureMap
        The map.
    rng : int, Generator, SeedSequence or None, optional
        Of the vectors they are compared at. Default 0.

    Returns
    -------
    Evidence

    Raises
    ------
    AssertionError
        Pickling or copying fails, or gives other features.

    Examples
    --------
    >>> from linattn.feature_maps import PositiveFeatures
    >>> from linattn.testing import assert_picklable
    >>> evidence = assert_picklable(PositiveFeatures(4, num_features=8, rng=0))
    >>> evidence.check
    'assert_picklable'
    """
    check = "assert_picklable"
    if feature_map is None:
        raise TypeError("feature_map must be a feature map, got None")
    check_map_or(feature_map, "")
    dim = getattr(feature_map, "dim", None) or 4
    x = as_generator(rng).standard_normal((5, dim))
    ways: dict[str, Callable[[Any], Any]] = {
        "pickle": lambda original: pickle.loads(pickle.dumps(original)),
        "copy.deepcopy": copy.deepcopy,
    }
    for name, duplicate in ways.items():
        try:
            twin = duplicate(feature_map)
        except Exception as error:  # a broken __reduce__ may raise anything, and is to be reported
            fail(check, f"{name} raises {type(error).__name__}: {error}")
        for side in ("query_features", "key_features"):
            ours, theirs = getattr(feature_map, side)(x), getattr(twin, side)(x)
            same = [np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)]
            if not all(same):
                fail(check, f"{side} differ after {name}")
    return Evidence(check, "pickle and deepcopy give the same features")
