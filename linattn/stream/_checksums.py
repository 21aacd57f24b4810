"""Checksums of the rows that were read and written, for a run that goes on later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from linattn import _arrays


class Record(NamedTuple):
    """What some rows of an array were."""

    name: str
    start: int
    stop: int
    crc: int


class Checksums:
    """A record of each row that was read or written: once, however often it is read."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records = list(records)
        self._known: dict[str, list[tuple[int, int]]] = {}
        for record in self.records:
            self._learn(record)

    def add(self, name: str, start: int, block: Any) -> None:
        """Record those rows of a block, which begins at row `start`, that no record is about."""
        for first, last in self._unknown(name, start, start + block.shape[-2]):
            rows = block[..., first - start : last - start, :]
            self.append(Record(name, first, last, checksum(rows)))

    def append(self, record: Record) -> None:
        """Record rows that no record is about."""
        self.records.append(record)
        self._learn(record)

    def _learn(self, record: Record) -> None:
        runs = sorted([*self._known.get(record.name, []), (record.start, record.stop)])
        joined = runs[:1]
        for start, stop in runs[1:]:
            if start == joined[-1][1]:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        self._known[record.name] = joined

    def _unknown(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        for first, last in [*self._known.get(name, []), (stop, stop)]:
            if start < min(first, stop):
                yield start, min(first, stop)
            start = max(start, last)


def checksum(array: Any) -> int:
    """Return the CRC-32 of the numbers of an array, whatever their order in memory."""
    numbers = _arrays.to_numpy(array)
    native = numbers.dtype.newbyteorder("=")
    # One head at a time: rows of a memory map are not copied.
    whole = numbers.flags.c_contiguous or numbers.ndim <= 2
    heads = [numbers] if whole else [numbers[i] for i in np.ndindex(numbers.shape[:-2])]
    crc = 0
    for head in heads:
        crc = crc32(np.ascontiguousarray(head, native).data, crc)
    return crc
