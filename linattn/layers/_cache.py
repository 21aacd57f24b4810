"""Keys and values of a stream, in a buffer that grows."""

from __future__ import annotations

from typing import Any, NamedTuple

import array_api_compat

from linattn import _arrays
from linattn.typing import Array
from linattn.typing.records import one_line


class KeyValueCache(NamedTuple):
    """The rows ``[key, value]`` from ``start`` to ``stop`` of a buffer.

    Appending does not change a cache: several streams may continue from it.
    """

    buffer: Array
    """(..., capacity, d + e)"""
    start: int
    stop: int
    dim: int
    written: list[int]
    """How many rows of the buffer are in use, in one list for all caches that share it."""

    @classmethod
    def append(cls, cache: KeyValueCache | None, key: Array, value: Array) -> KeyValueCache:
        """Return a cache with these rows appended, in the same buffer if that part is unused."""
        xp = _arrays.namespace(key)
        rows = xp.concat([key, value], axis=-1)
        if cache is None:
            return cls(rows, 0, rows.shape[-2], key.shape[-1], [rows.shape[-2]])
        buffer, start, stop, dim, written = cache
        after = stop + rows.shape[-2]
        if written[0] != stop or after > buffer.shape[-2] or not _is_writable(buffer):
            held = buffer[..., start:stop, :]
            if not _is_writable(rows):
                joined = xp.concat([held, rows], axis=-2)
                return cls(joined, 0, joined.shape[-2], dim, [joined.shape[-2]])
            after -= start
            buffer = _empty_like(rows, 2 * after)
            buffer[..., : stop - start, :] = held
            start, stop, written = 0, stop - start, [0]
        buffer[..., stop:after, :] = rows
        written[0] = after
        return cls(buffer, start, after, dim, written)

    @property
    def key(self) -> Array:
        """The keys, (..., S, d)."""
        return self.buffer[..., self.start : self.stop, : self.dim]

    @property
    def value(self) -> Array:
        """The values, (..., S, e)."""
        return self.buffer[..., self.start : self.stop, self.dim :]

    def last(self, number: int) -> KeyValueCache:
        """Return a cache of the last ``number`` rows."""
        return self._replace(start=max(self.start, self.stop - number))

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


def _is_writable(array: Array) -> bool:
    # What is on a tape must not change any more.
    return array_api_compat.is_writeable_array(array) and not getattr(array, "requires_grad", False)


def _empty_like(rows: Array, capacity: int) -> Array:
    xp, device = _arrays.namespace(rows), array_api_compat.device(rows)
    shape = (*rows.shape[:-2], capacity, rows.shape[-1])
    return xp.empty(shape, dtype=rows.dtype, device=device)


def check_state(state: Any, *kinds: type) -> None:
    """Check that a state, or the cache in it, is of a kind that this call returns."""
    if state is not None and not isinstance(state, kinds):
        raise TypeError(
            f"initial_state must hold an object of type {kinds[0].__name__}, got "
            f"{type(state).__name__}; pass the state that return_state=True returned, of the same "
            f"function and attention"
        )
