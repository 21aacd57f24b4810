"""Checks of arguments: every error names the argument, the expected value and the given one."""

from __future__ import annotations

import numbers
import operator
from types import ModuleType
from typing import Any

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn._arrays import (
    _is_ordinary,
    accumulation_dtype,
    dtype_bits,
    has_float64,
    is_lazy,
    is_sparse_tensor,
    library_name,
    namespace,
    not_supported,
    to_numpy,
)
from linattn.typing import Array, FeatureMap, Features, State


def _one_array(name: str, array: Any) -> tuple[ModuleType, Array]:
    if _is_ordinary(array) and array.ndim:
        return namespace(array), array
    if isinstance(array, np.ndarray):
        if type(array) not in (np.ndarray, np.memmap):
            raise TypeError(
                f"{name} must be an ordinary array, got {type(array).__module__}."
                f"{type(array).__name__}, whose extra meaning (mask, unit, shape) would be lost; "
                f"convert it first, for a mask use key_mask"
            )
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
    try:
        if isinstance(array, numbers.Number | np.generic | str | bytes) or is_sparse_tensor(array):
            raise TypeError
        xp = namespace(array)
    except TypeError:
        raise TypeError(
            f"{name} must be an array of NumPy, CuPy, torch, JAX, Dask or another array-API "
            f"library, {not_supported(name, array)}"
        ) from None
    if array.ndim == 0:
        raise TypeError(f"{name} must be an array with axes (..., length, dim), got a 0-d array")
    return xp, array


def check_array(name: str, array: Any) -> Array:
    """Check that this is an array with axes, and return it in native byte order.

    Raises
    ------
    TypeError
        Not an array, one of no axes, or a subclass that means more than its numbers.
    """
    return _one_array(name, array)[1]


def _check_float(name: str, array: Array, xp: ModuleType) -> None:
    dtype = array.dtype
    try:
        floating = bool(xp.isdtype(dtype, "real floating")) or str(dtype) == "bfloat16"
    except (TypeError, ValueError):
        # CuPy computes with the bfloat16 of ml_dtypes; its isdtype raises, that of Dask says no.
        floating = str(dtype) == "bfloat16"
    if not floating or dtype_bits(dtype) not in (16, 32, 64):
        hint = ""
        if "int" in str(dtype) or "bool" in str(dtype):
            hint = "; convert it to a floating dtype first"
        raise TypeError(
            f"{name} must have dtype float16, bfloat16, float32 or float64, got {dtype}{hint}"
        )


def _check_device(first: str, first_array: Array, name: str, array: Array) -> None:
    devices = (array_api_compat.device(first_array), array_api_compat.device(array))
    # A traced array does not know its device.
    if None not in devices and devices[0] != devices[1]:
        raise ValueError(
            f"{first} and {name} must be on one device, got {devices[0]} and {devices[1]}"
        )


def check_together(first: str, first_array: Array, name: str, array: Array) -> None:
    """Check that two arrays have one library and device; dtypes may differ."""
    xps = namespace(first_array), namespace(array)
    if xps[0] is not xps[1]:
        raise TypeError(
            f"{first} and {name} must come from one array library, got {library_name(xps[0])} and "
            f"{library_name(xps[1])}"
        )
    _check_device(first, first_array, name, array)


def check_log_weights(name: str, array: Array) -> None:
    """Check logarithms of weights: -inf is allowed (weight 0), NaN and +inf are not."""
    xp = namespace(array)
    _check_float(name, array, xp)
    if not is_lazy(array) and not bool(xp.all(array < xp.inf)):
        raise ValueError(
            f"{name} must hold no NaN and no +inf (-inf leaves a pair out), got some; mend it first"
        )


def check_arrays(min_ndim: int = 2, /, **named: Any) -> tuple[ModuleType, list[Array]]:
    """Check that all are floating arrays of one library, device and dtype.

    Returns the namespace and the arrays, in native byte order.

    Raises
    ------
    TypeError
        Not an array, a subclass that means more than its numbers, not real floating, or arrays
        of different libraries.
    ValueError
        Too few axes, an empty dim, different dtypes or devices.
    """
    checked = {name: _one_array(name, array) for name, array in named.items()}
    first, (xp, first_array) = next(iter(checked.items()))
    for name, (other_xp, array) in checked.items():
        if other_xp is not xp:
            raise TypeError(
                f"{first} and {name} must come from one array library, got "
                f"{library_name(xp)} and {library_name(other_xp)}"
            )
        if not _is_ordinary(array):
            _check_float(name, array, xp)
            _check_device(first, first_array, name, array)
            if any(length is None or isinstance(length, float) for length in array.shape):
                raise ValueError(
                    f"{name} must have a known shape, got {tuple(array.shape)}; for an array of "
                    f"Dask call {name}.compute_chunk_sizes() first, for ONNX interop.onnx.export"
                )
        if array.ndim < min_ndim:
            raise ValueError(
                f"{name} must have at least 2 axes (..., length, dim), got shape "
                f"{tuple(array.shape)}; for one number in each row pass {name}[:, None]"
            )
        if array.shape[-1] == 0:
            raise ValueError(
                f"{name} must have a last axis of at least 1, got {tuple(array.shape)}"
            )
        if array.dtype != first_array.dtype:
            raise ValueError(
                f"{first} and {name} must have one dtype, got {first_array.dtype} and {array.dtype}"
            )
    return xp, [array for _, array in checked.values()]


def check_positive_int(name: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    """Check a count: an integer between ``least`` and ``most``, no bool."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise TypeError(f"{name} must be {kind}, got {value!r}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, got {number}")
    return number


def check_finite_number(name: str, value: Any, *, positive: bool = False) -> float:
    """Check a finite real number, no bool."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    if not np.isfinite(number := float(value)) or (positive and number <= 0):
        wanted = "a positive finite number" if positive else "a finite number"
        raise ValueError(f"{name} must be {wanted}, got {number}")
    return number


def check_flag(name: str, value: Any) -> bool:
    """Check that a flag is True or False: the truth value of other objects would mislead."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_parameter(name: str, value: Any, last_axes: tuple[int, ...] = ()) -> NDArray[np.float64]:
    """Copy a parameter of a map to float64; NaN, inf and other last axes are errors."""
    copy = np.array(value, dtype=np.float64)
    if copy.shape[copy.ndim - len(last_axes) :] != last_axes or copy.ndim < len(last_axes):
        raise ValueError(f"{name} must have last axes {last_axes}, got shape {copy.shape}")
    if not np.isfinite(copy).all():
        raise ValueError(f"{name} must be finite, got NaN or inf")
    return copy


def check_leading_axes(**shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Broadcast leading axes; the error shows every shape."""
    first, *rest = shapes.values()
    if all(shape == first for shape in rest):
        return first
    try:
        return np.broadcast_shapes(*shapes.values())
    except ValueError:
        came = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"leading axes must broadcast against each other, got {came}{_grouping(shapes)}"
        ) from None


def _grouping(shapes: dict[str, tuple[int, ...]]) -> str:
    """Return a hint to reshape, if the leading axes look like queries that share keys."""
    first, second = ("x", "y") if "x" in shapes else ("query", "key")
    query, key = shapes.get(first, ()), shapes.get(second, shapes.get("state", ()))
    for axis in range(1, min(len(query), len(key)) + 1):
        few, shared = key[-axis], query[-axis] // max(1, key[-axis])
        if few > 1 and shared > 1 and query[-axis] == few * shared:
            lead = (*query[:-axis], few, shared, *query[len(query) - axis + 1 :])
            grouped, places = ", ".join(map(str, lead)), ":, " * (len(key) - axis + 1)
            sides = "y" if first == "x" else "key, value and any state"
            reshaped = f"for {shared} queries to each key reshape {first} to ({grouped}, ...)"
            return f"; {reshaped}, and give {sides} an axis of 1, {second}[{places}None]"
    return ""


def check_key_mask(
    key_mask: Any, key: Array, xp: ModuleType, *, query_len: int | None, of: str = "key"
) -> Array:
    """Check a boolean mask of keys (or of what ``of`` names) and return it as ``(..., S, 1)``.

    Raises
    ------
    TypeError
        Not a boolean array of the library of ``key``.
    ValueError
        Not of shape ``(S,)`` or ``key.shape[:-1]`` up to axes of 1.
    """
    name = "query_mask" if of == "query" else "key_mask"
    mask = _same_library(name, key_mask, of, key, xp)
    if mask.dtype != xp.bool:
        remedy = "give mask == 1, or mask == 0 of a mask of 0 and -inf that is added to logits"
        raise TypeError(f"{name} must be boolean (True = attend), got dtype {mask.dtype}; {remedy}")
    return _one_each(name, mask, of, key, query_len)


def check_key_bias(
    key_bias: Any, key: Array, xp: ModuleType, dtype: Any, *, query_len: int | None
) -> Array:
    """Check log weights of keys and return them as ``(..., S, 1)`` in this dtype.

    Raises
    ------
    TypeError
        Not a floating array of the library of ``key``.
    ValueError
        Not of shape ``(S,)`` or ``key.shape[:-1]`` up to axes of 1; NaN or +inf.
    """
    bias = _same_library("key_bias", key_bias, "key", key, xp)
    _check_float("key_bias", bias, xp)
    bias = _one_each("key_bias", bias, "key", key, query_len)
    if not is_lazy(bias) and not bool(xp.all(bias < xp.inf)):
        raise ValueError(
            "key_bias must hold no NaN and no +inf (-inf leaves a key out), got some; mend it first"
        )
    return xp.astype(bias, dtype, copy=False)


def check_state_decay(log_decay: Any, key: Array, xp: ModuleType, dtype: Any) -> Array:
    """Check the log decay of tokens; return it as ``(..., S, 1)``, or ``(..., 1, 1)`` for all.

    Raises
    ------
    TypeError
        Neither a number nor a floating array of the library of ``key``.
    ValueError
        A shape that fits neither heads nor tokens; NaN, infinite or positive numbers.
    """
    lead, length = tuple(key.shape[:-2]), key.shape[-2]
    wide = xp.float64 if has_float64(key) else dtype
    if isinstance(log_decay, numbers.Real) and not isinstance(log_decay, bool | np.bool_):
        device = array_api_compat.device(key)
        log_decay = xp.full((1,) * (key.ndim - 1), float(log_decay), dtype=wide, device=device)
    elif array_api_compat.is_array_api_obj(log_decay) and not log_decay.ndim:
        log_decay = log_decay[(None,) * (key.ndim - 1)]
    decay = _same_library("log_decay", log_decay, "key", key, xp)
    _check_float("log_decay", decay, xp)
    if decay.ndim == len(lead):
        decay = decay[..., None]
    wanted, shape = (*lead, length), tuple(decay.shape)
    if len(shape) != len(wanted) or any(
        a not in (1, b) for a, b in zip(shape, wanted, strict=True)
    ):
        raise ValueError(
            f"log_decay must be a number, or have one axis for each leading axis of key, "
            f"{lead}, and then perhaps one for its length, {length}, each 1 or equal; got shape "
            f"{tuple(log_decay.shape)}. For a decay of each head key needs an axis of heads"
        )
    if not is_lazy(decay) and not bool(xp.all((decay <= 0) & (decay > -xp.inf))):
        raise ValueError(
            "log_decay must hold finite numbers of at most 0, logs of what the state is multiplied "
            "by before each token, got others; a factor gamma is log_decay=log(gamma)"
        )
    return xp.astype(decay, wide, copy=False)[..., None]


def _same_library(name: str, array: Any, of: str, key: Array, xp: ModuleType) -> Array:
    """Check that something is an array of the library and device of the keys."""
    other_xp, array = _one_array(name, array)
    if other_xp is not xp:
        raise TypeError(
            f"{of} and {name} must come from one array library, got {library_name(xp)} and "
            f"{library_name(other_xp)}"
        )
    _check_device(of, key, name, array)
    return array


def _one_each(name: str, array: Array, of: str, key: Array, query_len: int | None) -> Array:
    """Check that an array has one number for each key, and return it as ``(..., S, 1)``."""
    xp, wanted, shape = namespace(array), tuple(key.shape[:-1]), tuple(array.shape)
    fits = len(shape) == len(wanted) and all(
        a in (1, b) for a, b in zip(shape, wanted, strict=True)
    )
    if not fits and shape != wanted[-1:]:
        noun = name.partition("_")[2]
        message = (
            f"{name} must have shape ({wanted[-1]},), or one axis for each axis of {of} but "
            f"the last, each 1 or equal, that is {wanted}; got {shape}. A {noun} of shape (batch, "
            f"length) is given to a {of} with a heads axis as {noun}[:, None, :]"
        )
        if query_len is not None and shape[-2:] == (query_len, wanted[-1]):
            message += (
                f". A {noun} for each pair of query and key cannot be honoured: memory that does "
                f"not grow with the length never forms the pairs; use is_causal"
            )
        raise ValueError(message)
    if len(shape) == 1:
        array = array[(*[None] * (len(wanted) - 1), slice(None))]
    if array.shape[-1] != wanted[-1]:  # Dask's expressions have no `broadcast_to`.
        nothing = xp.zeros(wanted[-1:], dtype=array.dtype, device=array_api_compat.device(key))
        array = array | nothing if array.dtype == xp.bool else array + nothing
    return array[..., None]


def check_key_lengths(key_lengths: Any, key: Array, xp: ModuleType) -> Array:
    """Check how many leading keys count, and return the mask of these keys, ``(..., S, 1)``.

    Raises
    ------
    TypeError
        Not integers, or an array of another library.
    ValueError
        Not of shape ``key.shape[:-2]`` up to axes of 1, or not between 0 and S.
    """
    device = array_api_compat.device(key)
    if isinstance(key_lengths, int | list | tuple | np.integer | np.ndarray):
        host = np.asarray(key_lengths)
        # An empty list has no integers that would tell its dtype.
        lengths = xp.asarray(host if host.size else host.astype(np.int64), device=device)
    else:
        is_number = getattr(key_lengths, "ndim", None) == 0
        given = key_lengths[None] if is_number else key_lengths
        lengths = _same_library("key_lengths", given, "key", key, xp)
        lengths = lengths[0] if is_number else lengths
    if not xp.isdtype(lengths.dtype, "integral"):
        raise TypeError(f"key_lengths must be integers, got dtype {lengths.dtype}")
    lead, shape, num_keys = tuple(key.shape[:-2]), tuple(lengths.shape), int(key.shape[-2])
    fits = len(shape) == len(lead) and all(a in (1, b) for a, b in zip(shape, lead, strict=True))
    if shape and not fits:
        raise ValueError(
            f"key_lengths must be one integer, or have one axis for each leading axis of key, each "
            f"1 or equal, that is {lead}; got shape {shape}. Lengths of shape (batch,) are given "
            f"to a key with a heads axis as key_lengths[:, None]"
        )
    if not is_lazy(lengths) and lengths.size:
        least, most = int(xp.min(lengths)), int(xp.max(lengths))
        if least < 0 or most > num_keys:
            raise ValueError(
                f"key_lengths must be between 0 and the number of keys, {num_keys}, got "
                f"{least if least < 0 else most}"
            )
    position = xp.arange(num_keys, device=device)
    return (position < xp.astype(lengths, position.dtype)[..., None])[..., None]


def check_features(name: str, features: Any, x: Array, feature_map: FeatureMap) -> Features:
    """Check that a map returned ``Features`` whose shapes fit the tokens x, ``(..., n, d)``."""
    if not isinstance(features, Features):
        raise TypeError(
            f"{name} must be linattn.typing.Features(log, values), got "
            f"{type(features).__name__}; return Features(None, values) for features as they are"
        )
    log, values = features
    n, m = x.shape[-2], feature_map.num_features or x.shape[-1]
    wide = log if values is None else values
    shapes: Any = [None if part is None else tuple(part.shape) for part in features]
    fits = wide is not None and tuple(wide.shape[-2:]) == (n, m)
    if not fits or (values is not None and log is not None and shapes[0][-2:] != (n, 1)):
        raise ValueError(
            f"{name} must have values (..., {n}, {m}) and log None or (..., {n}, 1), or values "
            f"None and log (..., {n}, {m}), for {n} tokens and num_features="
            f"{feature_map.num_features}, got values {shapes[1]} and log {shapes[0]}"
        )
    return features


def check_state_record(name: str, state: Any) -> tuple[ModuleType, State]:
    """Check that an object is a state whose arrays fit each other.

    Returns the namespace of the arrays, and the state in native byte order.
    """
    if not isinstance(state, State):
        raise TypeError(f"{name} must be a linattn.State, got {type(state).__name__}")
    named = {f"{name}.kvz": state.kvz, f"{name}.log_scale": state.log_scale}
    xp, (kvz, log_scale) = check_arrays(1, **named)
    shape, scale_shape = tuple(kvz.shape), tuple(log_scale.shape)
    if len(shape) < 2 or shape[-1] < 2 or scale_shape != shape[:-1]:
        raise ValueError(
            f"{name} must have kvz of shape (..., m, e + 1) and log_scale of shape (..., m), got "
            f"{shape} and {scale_shape}"
        )
    decay = state.log_decay
    if decay is not None and (
        getattr(decay, "shape", None) != shape[:-2] or decay.dtype != kvz.dtype
    ):
        raise ValueError(
            f"{name} must have log_decay None or of shape {shape[:-2]} and dtype {kvz.dtype}, got "
            f"{decay!r}"
        )
    if kvz is state.kvz and log_scale is state.log_scale:
        return xp, state
    return xp, state._replace(kvz=kvz, log_scale=log_scale)


def check_state(name: str, state: Any, *, m: int, e: int, dtype: Any, like: Array) -> State:
    """Check that a state belongs to a map with ``m`` columns and values of dim ``e``."""
    xp = namespace(like)
    state_xp, state = check_state_record(name, state)
    if state_xp is not xp:
        raise TypeError(
            f"{name} must come from the array library of the other arguments, got "
            f"{library_name(state_xp)} and {library_name(xp)}; load_state and init_state take like"
        )
    if not (_is_ordinary(like) and _is_ordinary(state.kvz)):
        _check_device("the other arguments", like, name, state.kvz)
    if state.kvz.dtype != dtype:
        raise ValueError(
            f"{name} must have the accumulation dtype {getattr(dtype, '__name__', dtype)}, got "
            f"{state.kvz.dtype}; a state is "
            f"float64 for float64 inputs and float32 for all narrower ones"
        )
    if tuple(state.kvz.shape[-2:]) != (m, e + 1):
        raise ValueError(
            f"{name} must have kvz (..., {m}, {e + 1}) and log_scale (..., {m}) for this feature "
            f"map and values of dim {e}, got {tuple(state.kvz.shape)} and "
            f"{tuple(state.log_scale.shape)}"
        )
    return state  # type: ignore[no-any-return]


def check_like_key(name: str, array: Any, key: Array) -> Array:
    """Check that a floating array has the library and device of ``key``; its dtype may differ."""
    xp, array = _one_array(name, array)
    check_together("key", key, name, array)
    _check_float(name, array, xp)
    return array


def check_token_numbers(name: str, numbers: Any, key: Array, *, by_channel: bool = False) -> Array:
    """Check one number per token of a key ``(..., L, d)``, and return ``(..., L, 1)``.

    ``by_channel`` also accepts one number per key channel, with one axis more: ``(..., L, d)``.
    """
    array = check_like_key(name, numbers, key)
    length, dim = key.shape[-2:]
    shape = tuple(array.shape)
    if by_channel and array.ndim == key.ndim:
        fits = shape[-2] in (1, length) and shape[-1] in (1, dim)
    else:
        fits = array.ndim < key.ndim and shape[-1] in (1, length)
        array = array[..., None]
    if not fits:
        channels = f", or (..., {length}, {dim}) with as many" if by_channel else ""
        raise ValueError(
            f"{name} must have a number for each token, shape (..., {length}) with fewer axes "
            f"than key{channels}; got {shape} for a key {tuple(key.shape)}"
        )
    shape = (*array.shape[:-2], length, array.shape[-1])
    return array if array.shape == shape else namespace(array).broadcast_to(array, shape)


def check_log_decay(
    log_decay: Any, key: Array, *, by_channel: bool = False, mask: Array | None = None
) -> Array:
    """Check log decays (at most 0, if values can be inspected); return ``(..., L, 1 or d)``.

    Where ``mask``, ``(..., L, 1)``, is False they are replaced by 0.
    """
    array = check_token_numbers("log_decay", log_decay, key, by_channel=by_channel)
    xp = namespace(array)
    if mask is not None:
        array = xp.where(mask, array, xp.zeros_like(array))
    if not is_lazy(array) and bool(xp.any(array > 0)):
        raise ValueError(
            f"log_decay must be at most 0, got {float(xp.max(array)):.3g}: it is the logarithm of "
            f"what is left of a state after a token; for decays between 0 and 1 give log(decay)"
        )
    return array


def check_integers(name: str, value: Any) -> NDArray[np.int64]:
    """Return integers as NumPy, from the host or from an array whose values can be inspected."""
    host = np.asarray(value) if isinstance(value, int | list | tuple) else None
    if host is None:
        host = to_numpy(value, name) if hasattr(value, "shape") else np.asarray(value)
    if host.dtype.kind not in "iu" and host.size:
        raise TypeError(f"{name} must be integers, got dtype {host.dtype}")
    return host.astype(np.int64)


def check_cu_seqlens(cu_seqlens: Any, length: int) -> NDArray[np.int64]:
    """Check the borders of packed sequences against the length of the axis that holds them."""
    borders = check_integers("cu_seqlens", cu_seqlens)
    is_one_axis = borders.ndim == 1 and len(borders) >= 2
    if not is_one_axis or borders[0] != 0 or borders[-1] != length or (np.diff(borders) < 0).any():
        brief = np.array2string(borders, threshold=8, edgeitems=3, separator=", ")
        raise ValueError(
            f"cu_seqlens must rise from 0 to the length, {length}, with shape (n + 1,) for n "
            f"sequences, got {brief}; it is the cumulative sum of their lengths, with 0 in front, "
            f"alike for all leading axes"
        )
    return borders


def check_cotangent(
    name: str, cotangent: Any, of: str, shape: tuple[int, ...], like: Array
) -> None:
    """Check that a cotangent has the shape, dtype, library and device of its output."""
    check_arrays(1, **{f"the array that {name} belongs to": like, name: cotangent})
    if tuple(cotangent.shape) != shape:
        raise ValueError(
            f"{name} must have the shape of {of}, {shape}, got {tuple(cotangent.shape)}"
        )


def check_pairing(query: Array, key: Array, value: Array, *, is_causal: bool, remedy: str) -> None:
    """Check that each key has a value and, where causal, a query."""
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have one last axis (dim), got shapes {tuple(query.shape)} and "
            f"{tuple(key.shape)}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"key and value must have one length (axis -2), got shapes {tuple(key.shape)} and "
            f"{tuple(value.shape)}"
        )
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"under is_causal query and key must have equal length, got {query.shape[-2]} and "
            f"{key.shape[-2]}; {remedy}"
        )


def of_one_token(name: str, weight: Any, key: Array) -> Any:
    """Give a token's number, or ``(...)``, the axis of length that its key has, ``(..., 1, d)``."""
    if name == "log_decay" and not getattr(weight, "ndim", 0):
        return weight
    if isinstance(weight, numbers.Real) and not isinstance(weight, bool | np.bool_):
        xp, device = namespace(key), array_api_compat.device(key)
        dtype = accumulation_dtype(xp, key.dtype, None)
        return xp.full((1,) * (key.ndim - 1), float(weight), dtype=dtype, device=device)
    if array_api_compat.is_array_api_obj(weight) and not weight.ndim:
        return namespace(weight).reshape(weight, (1,) * (key.ndim - 1))
    return weight[..., None] if hasattr(weight, "ndim") else weight
