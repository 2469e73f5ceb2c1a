"""Results on their way from finish order to input order, with bounded memory.

Where they fit in memory they are sorted there. Where they do not, the stretch of ordinals that they come from is
divided into ranges of consecutive ordinals; one pass writes each row into a temporary Arrow file, in record batches
that belong to a single range, and then range after range is put in order by the same rule. So a range that came out
too large, since long texts stand together in the input, is divided once more.
"""

import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bulkgen.results.columns import as_keys
from bulkgen.results.disk import reading, writing
from bulkgen.results.parts import PART_SCHEMA, part_bytes, read_part

# A range aims at the first figure and is divided again above the second; putting it in order takes three times as much.
_RANGE_BYTES = 16 << 20
_MAX_RANGE_BYTES = 2 * _RANGE_BYTES
# Rows that are sorted and divided at once. This many, and no more ranges than that, lest the record batches in the
# file become tiny and countless.
_GATHER_BYTES = 16 << 20
_MAX_RANGES = 256

RESULT_SCHEMA = pa.schema([("ordinal", pa.int64()), *PART_SCHEMA])


class Keys(Protocol):
    """What a plan knows of its rows."""

    rows: int

    def lookup(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.int64]:
        """Ordinals of keys, -1 where a key is not in the plan."""

    def keys_of(self, ordinals: npt.NDArray[np.int64]) -> list[bytes]:
        """The keys of rows; each row has its own."""


@dataclass(frozen=True, slots=True)
class CommittedPart:
    """A part, and the keys of those of its rows that were done again later, so that they no longer count."""

    path: Path
    retired: npt.NDArray[np.bytes_] | None = None


def results_in_order(
    parts: Sequence[CommittedPart], keys: Keys, scratch: Path, between_parts: Callable[[], None]
) -> Generator[pa.Table, None, None]:
    """The results of `parts` that belong to `keys` by rising ordinal, as tables of RESULT_SCHEMA of bounded size.

    Temporary data lies in the folder `scratch`, in files without a name, which no crash can leave behind.
    `between_parts` is called now and then while nothing comes out yet. Raises OutputError.
    """
    size = sum(part_bytes(part.path) for part in parts)
    return _in_order(_found(parts, keys, between_parts), _Stretch(0, keys.rows, size), scratch)


@dataclass(slots=True)
class _Stretch:
    """Consecutive ordinals, and how much memory their results take."""

    first: int
    rows: int
    size_bytes: int = 0
    batches: list[int] = field(default_factory=list)

    def take(self, batch: int, size_bytes: int) -> None:
        """Note that a record batch of the spool belongs here."""
        self.batches.append(batch)
        self.size_bytes += size_bytes


def _found(parts: Sequence[CommittedPart], keys: Keys, between_parts: Callable[[], None]) -> Iterator[pa.RecordBatch]:
    """The rows of all parts that have an ordinal, some MB at a time, each time sorted."""
    gathered: list[pa.RecordBatch] = []
    size = 0
    for part in parts:
        between_parts()
        for batch in read_part(part.path):
            if part.retired is not None:
                batch = batch.filter(pa.array(~np.isin(as_keys(batch.column(0)), part.retired)))
            gathered.append(batch)
            size += batch.nbytes
            if size >= _GATHER_BYTES:
                yield _with_ordinals(gathered, keys)
                gathered, size = [], 0
    yield _with_ordinals(gathered, keys)


def _with_ordinals(batches: list[pa.RecordBatch], keys: Keys) -> pa.RecordBatch:
    table = pa.Table.from_batches(batches, PART_SCHEMA)
    ordinals = keys.lookup(as_keys(table.column(0)))
    order = np.argsort(ordinals, kind="stable")
    # Rows that were generated for earlier data or settings have no ordinal now.
    order = order[np.searchsorted(ordinals[order], 0) :]
    return _one_batch(pa.Table.from_arrays([pa.array(ordinals), *table.columns], schema=RESULT_SCHEMA), order)


def _one_batch(table: pa.Table, order: npt.NDArray[np.int64]) -> pa.RecordBatch:
    columns = [
        column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
        for column in table.take(pa.array(order)).columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)


def _in_order(batches: Iterable[pa.RecordBatch], stretch: _Stretch, scratch: Path) -> Generator[pa.Table, None, None]:
    """All rows of `batches`, which are sorted each and come from one stretch, by rising ordinal."""
    if stretch.size_bytes <= _MAX_RANGE_BYTES or stretch.rows == 1:
        yield _sorted(batches)
        return
    with closing(_Spool(scratch, stretch)) as spool:
        for batch in batches:
            spool.add(batch)
        for range_ in spool.ranges():
            yield from _in_order(spool.read(range_), range_, scratch)
            # Arrow's pool would keep what the ranges before took, and grow by it.
            pa.default_memory_pool().release_unused()


def _sorted(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    table = pa.Table.from_batches(batches, RESULT_SCHEMA)
    order = np.argsort(table.column(0).to_numpy(), kind="stable")
    return pa.Table.from_batches([_one_batch(table, order)])


class _Spool:
    """A temporary Arrow file of results, divided into ranges of a stretch."""

    def __init__(self, scratch: Path, stretch: _Stretch) -> None:
        self._scratch = scratch
        self._first = stretch.first
        ranges = min(-(-stretch.size_bytes // _RANGE_BYTES), _MAX_RANGES)
        self._range_rows = -(-stretch.rows // ranges)
        self._ranges: dict[int, _Stretch] = {}
        self._written = 0
        with writing(scratch):
            self._file = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - `close` closes it
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writer = pa.ipc.new_file(self._file, RESULT_SCHEMA, options=options)

    def add(self, batch: pa.RecordBatch) -> None:
        """Write rows, sorted by ordinal, each piece to its range. Raises OutputError."""
        numbers = (batch.column(0).to_numpy() - self._first) // self._range_rows
        borders = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1))
        for a, b in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            piece = batch.slice(a, b - a)
            with writing(self._scratch):
                self._writer.write_batch(piece)
            self._range(int(numbers[a])).take(self._written, piece.nbytes)
            self._written += 1

    def _range(self, number: int) -> _Stretch:
        if number not in self._ranges:
            self._ranges[number] = _Stretch(self._first + number * self._range_rows, self._range_rows)
        return self._ranges[number]

    def ranges(self) -> list[_Stretch]:
        """Ends the writing; then the ranges that hold anything, in order. Raises OutputError."""
        with writing(self._scratch):
            self._writer.close()
            self._reader = pa.ipc.open_file(self._file)
        return [self._ranges[number] for number in sorted(self._ranges)]

    def read(self, range_: _Stretch) -> Iterator[pa.RecordBatch]:
        """The record batches of a range, as they were added. Raises OutputError."""
        for number in range_.batches:
            with reading(self._scratch, "what it had for a moment is gone; run again"):
                batch = self._reader.get_batch(number)
            yield batch

    def close(self) -> None:
        """Give the space back."""
        self._file.close()
