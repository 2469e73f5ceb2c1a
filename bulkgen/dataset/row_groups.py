"""The row groups of a Parquet file, each of which is read whole or not at all.

A group is decoded to its end, all columns of it, before any of its rows is given. So damage in a column that only the
output needs is met when rows are first read and not hours later, and what counts as damaged does not hang on who reads
which columns in which pieces.
"""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from bulkgen.dataset.damage import Damage, damaged_row, reading
from bulkgen.dataset.files import InputFile
from bulkgen.errors import InputError
from bulkgen.records import BadRow

ROWS_PER_PIECE, BYTES_PER_PIECE = 8192, 32 << 20
BYTES_HELD = 32 << 20  # a group of wanted columns up to this size is decoded once, a larger one once more
SAMPLE_ROWS = 64
BUFFER_BYTES = 1 << 20


def _nothing(_: pa.RecordBatch) -> None:
    """Nobody looks."""


def read_footer(file: InputFile) -> pa.Schema | BadRow:
    """The columns of a file, or what stands for all of it where its footer cannot be read."""
    try:
        with _opened(file) as (_, schema):
            return schema
    except Damage as damage:
        return _unreadable(file, damage)


def read_pieces(
    file: InputFile, wanted: Collection[str], sound: bool = False, look: Callable[[pa.RecordBatch], None] = _nothing
) -> Iterator[tuple[int, pa.RecordBatch | BadRow]]:
    """The file's rows with those of the `wanted` columns that it has, each piece with the number of its first row.

    Numbers count from 1 and include rows of damaged groups. A piece has at most 8192 rows and about 32 MB. One BadRow
    stands for a damaged group, or for all of a file without a readable footer. `sound` says that all of this was read
    before and no damage found; that saves looking for it. Otherwise `look` sees all columns of each piece before any of
    its group is given, and may raise. Raises InputError where the system cannot read the file,
    and for damage in a sound one.
    """
    with ExitStack() as stack:
        try:
            parquet, schema = stack.enter_context(_opened(file))
        except Damage as damage:
            yield 1, _unreadable(file, damage)
            return
        wanted = set(wanted)
        groups = _Groups(file, parquet, [name for name in schema.names if name in wanted], look)
        if not schema.names:
            yield from _numbered(1, _nameless(parquet.metadata.num_rows))
        elif sound:
            yield from _numbered(1, groups.stream(range(parquet.metadata.num_row_groups)))
        else:
            yield from _checked(file, groups)


def _checked(file: InputFile, groups: "_Groups") -> Iterator[tuple[int, pa.RecordBatch | BadRow]]:
    first = 1
    for number, rows in enumerate(groups.sizes()):
        try:
            pieces = groups.read(number, rows)
        except Damage as damage:
            what = f"the {rows} rows from row {first} on, row group {number}, cannot be read ({damage})"
            yield first, damaged_row(file, what)
        else:
            yield from _numbered(first, pieces)
        first += rows


def _numbered(first: int, pieces: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    for piece in pieces:
        yield first, piece
        first += piece.num_rows


class _Groups:
    """The groups of an open file; `names` are the columns that are given, `look` sees all of them when first read."""

    def __init__(
        self, file: InputFile, parquet: pq.ParquetFile, names: Sequence[str], look: Callable[[pa.RecordBatch], None]
    ) -> None:
        self._look = look
        self._file = file
        self._parquet = parquet
        self._names = names

    def sizes(self) -> list[int]:
        """The number of rows of each group."""
        return [self._parquet.metadata.row_group(i).num_rows for i in range(self._parquet.metadata.num_row_groups)]

    def read(self, number: int, rows: int) -> Iterator[pa.RecordBatch]:
        """The pieces of a group. Raises Damage if it does not decode to so many rows, before any is given."""
        held: list[pa.RecordBatch] = []
        size = found = 0
        with reading(self._file):
            for batch in self._decode([number], None):
                self._look(batch)
                piece = batch.select(self._names)
                found += batch.num_rows
                size += piece.nbytes
                if size <= BYTES_HELD:
                    held.append(piece)
                else:
                    held.clear()
        if found != rows:
            raise Damage(f"{found} rows where there should be {rows}")
        return iter(held) if size <= BYTES_HELD else self.stream([number])

    def stream(self, numbers: Sequence[int]) -> Iterator[pa.RecordBatch]:
        """The pieces of groups that are known to be sound."""
        try:
            with reading(self._file):
                # pyarrow takes names as dotted paths and may add columns of like names, which select() drops again
                for batch in self._decode(numbers, self._names):
                    yield batch.select(self._names)
        except Damage as damage:
            problem = f"{self._file.name}: can no longer be read ({damage}); it changed or its disk fails, run again"
            raise InputError(problem) from damage

    def _decode(self, numbers: Sequence[int], names: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """Rows with some columns (None: all), in pieces of bounded size."""
        at_once = self._rows_at_once(numbers, names)
        yield from self._parquet.iter_batches(at_once, row_groups=list(numbers), columns=names)

    def _rows_at_once(self, numbers: Sequence[int], names: Sequence[str] | None) -> int:
        """From the footer, and from a look at the first rows, since the footer counts a value that is repeated in all
        rows only once."""
        groups = [self._parquet.metadata.row_group(number) for number in numbers]
        rows: int = sum(group.num_rows for group in groups)
        within: int = rows * BYTES_PER_PIECE // max(1, sum(group.total_byte_size for group in groups))
        if rows > SAMPLE_ROWS:
            for sample in self._parquet.iter_batches(SAMPLE_ROWS, row_groups=list(numbers), columns=names):
                within = min(within, bounded(sample, ROWS_PER_PIECE, BYTES_PER_PIECE))
                break
        return max(1, min(ROWS_PER_PIECE, within))


def _unreadable(file: InputFile, damage: Damage) -> BadRow:
    return damaged_row(file, f"not a Parquet file that can be read ({damage})")


def bounded(batch: pa.RecordBatch, most_rows: int, most_bytes: int) -> int:
    """How many rows of a batch to take at once."""
    within: int = batch.num_rows * most_bytes // max(1, batch.nbytes)
    return max(1, min(most_rows, within))


def _nameless(rows: int) -> Iterator[pa.RecordBatch]:
    """What is left of a file without columns is a number of rows."""
    for start in range(0, rows, ROWS_PER_PIECE):
        yield pa.RecordBatch.from_arrays([pa.nulls(min(ROWS_PER_PIECE, rows - start))], [""]).select([])


@contextmanager
def _opened(file: InputFile) -> Iterator[tuple[pq.ParquetFile, pa.Schema]]:
    with ExitStack() as stack:
        with reading(file):
            source = stack.enter_context(pa.OSFile(os.fsencode(file.path)))
            parquet = pq.ParquetFile(
                source,
                buffer_size=BUFFER_BYTES,
                pre_buffer=False,  # would hold whole row groups in memory
                page_checksum_verification=True,
                # In nanoseconds, which are the default, dates before 1677 and after 2262 would turn into others.
                coerce_int96_timestamp_unit="us",
            )
            schema = parquet.schema_arrow
            _ = schema.names  # fails where they are no UTF-8
            _check_counts(parquet.metadata)
        yield parquet, schema


def _check_counts(footer: pq.FileMetaData) -> None:
    """Raise Damage where the rows of the groups are not those of the file: no row would have a number of its own."""
    sizes = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    if min(sizes, default=0) < 0 or sum(sizes) != footer.num_rows:
        raise Damage(f"its footer counts {footer.num_rows} rows, and {sum(sizes)} in its row groups")
