"""Checks of what samplers are called with."""

from __future__ import annotations

import operator


def check_integer(value: int, name: str, *, least: int) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got the bool {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an int, got {value!r} of type {type(value).__name__}"
        ) from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def check_shape(batch_shape: object) -> tuple[int, ...]:
    if not isinstance(batch_shape, tuple):
        kind = type(batch_shape).__name__
        raise TypeError(f"batch_shape must be a tuple of ints, got {batch_shape!r} of type {kind}")
    return tuple(check_integer(axis, "an axis of batch_shape", least=0) for axis in batch_shape)
