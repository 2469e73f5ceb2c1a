"""Parquet: the columns of all files together, rows as Python values, tables as they stand in the file.

Third-party errors end here: whatever pyarrow cannot read becomes an InputError that names the file.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bulkgen.dataset.arrow_types import merge_schemas
from bulkgen.dataset.files import InputFile
from bulkgen.errors import InputError
from bulkgen.records import BadRow

Rows = list[dict[str, Any] | BadRow]

ROWS_PER_BATCH, BYTES_PER_BATCH = 1024, 8 << 20
ROWS_PER_TABLE, BYTES_PER_TABLE = 8192, 32 << 20
BUFFER_BYTES = 1 << 20
SAMPLE_ROWS = 64

# What pyarrow raises for values that Python's own types cannot hold: dates beyond the year 9999, nanoseconds,
# bytes that are no UTF-8 in text, time zones that this machine does not know.
_NO_PYTHON_VALUE = (ValueError, OverflowError, LookupError, pa.ArrowException)


def load_schema(files: Sequence[InputFile]) -> pa.Schema:
    """The columns of all files, from their footers alone. Raises InputError for files that do not agree."""
    return merge_schemas((file.name, _file_schema(file)) for file in files)


class ParquetRows:
    """One pass over the files of a data set whose columns are those of `schema`.

    A row holds the wanted columns that any file has, None where its own file lacks one.
    """

    def __init__(self, schema: pa.Schema, columns: Collection[str] | None) -> None:
        self._schema = schema
        self._wanted = [name for name in schema.names if columns is None or name in columns]

    def read(self, file: InputFile) -> Iterator[tuple[Sequence[int], Rows]]:
        first = 1
        for batch in _batches(file, self._wanted):
            most = _bounded(batch, ROWS_PER_BATCH, BYTES_PER_BATCH)
            for start in range(0, batch.num_rows, most):
                rows = self._rows(batch.slice(start, most))
                yield range(first, first + len(rows)), rows
                first += len(rows)

    def names(self) -> list[str]:
        return list(self._schema.names)

    def schema(self) -> pa.Schema:
        return self._schema

    def _rows(self, batch: pa.RecordBatch) -> Rows:
        names = self._wanted
        missing = [None] * batch.num_rows
        present = set(batch.schema.names)
        try:
            columns = [_values(batch[name]) if name in present else missing for name in names]
        except _NO_PYTHON_VALUE:
            return [self._careful_row(batch.slice(i, 1)) for i in range(batch.num_rows)]
        if not names:
            return [{} for _ in missing]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def _careful_row(self, batch: pa.RecordBatch) -> dict[str, Any] | BadRow:
        """One row by itself, without regard to its neighbours; a value that Python lacks is text."""
        row: dict[str, Any] = dict.fromkeys(self._wanted)
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                row[name] = _values(column)[0]
            except UnicodeDecodeError as error:
                problem = f"column {name!r} is not valid UTF-8: {error.reason} at byte {error.start + 1}"
                return BadRow("bad_utf8", problem, bytes(error.object))
            except _NO_PYTHON_VALUE:
                try:
                    row[name] = column.cast(pa.string())[0].as_py()
                except pa.ArrowException as error:
                    problem = f"column {name!r} holds a {column.type} that cannot be read: {error}"
                    return BadRow("bad_value", problem)
        return row


def read_tables(file: InputFile, schema: pa.Schema) -> Iterator[tuple[Sequence[int], pa.RecordBatch]]:
    """The file's rows as tables of `schema`, untouched where the file has a column in that type already."""
    first = 1
    for batch in _batches(file, schema.names):
        most = _bounded(batch, ROWS_PER_TABLE, BYTES_PER_TABLE)
        for start in range(0, batch.num_rows, most):
            with _translated(file):
                table = _conform(batch.slice(start, most), schema)
            yield range(first, first + table.num_rows), table
            first += table.num_rows


def _conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if not schema.names:
        return batch
    present = set(batch.schema.names)
    arrays = []
    for field in schema:
        array = batch[field.name] if field.name in present else pa.nulls(batch.num_rows, field.type)
        arrays.append(array if array.type.equals(field.type) else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _values(array: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(array.type) and array.type.unit == "ns":
        # pyarrow gives pandas objects where pandas happens to be installed; these are the same everywhere
        array = array.cast(pa.timestamp("us", array.type.tz))
    values: list[Any] = array.to_pylist()
    return values


def _batches(file: InputFile, wanted: Collection[str]) -> Iterator[pa.RecordBatch]:
    """The file's rows with those of the `wanted` columns that it has, in pieces of bounded size."""
    with _opened(file) as parquet:
        names = [name for name in parquet.schema_arrow.names if name in set(wanted)]
        if not names:  # what is left of such a file is a number of rows
            for start in range(0, parquet.metadata.num_rows, ROWS_PER_TABLE):
                rows = min(ROWS_PER_TABLE, parquet.metadata.num_rows - start)
                yield pa.RecordBatch.from_arrays([pa.nulls(rows)], [""]).select([])
            return
        # pyarrow takes names as dotted paths and may add columns of like names, which select() drops again
        with _translated(file):
            batches = parquet.iter_batches(_rows_at_once(parquet, names), columns=names)
        while True:
            with _translated(file):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch.select(names)


def _rows_at_once(parquet: pq.ParquetFile, names: Sequence[str]) -> int:
    """How many rows to decode at once: from the footer, and from a look at the first ones, since the footer
    counts a value that is repeated in all rows only once."""
    metadata = parquet.metadata
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    within: int = metadata.num_rows * BYTES_PER_TABLE // max(1, size)
    if metadata.num_rows > SAMPLE_ROWS:
        sample = next(parquet.iter_batches(SAMPLE_ROWS, columns=names))
        within = min(within, _bounded(sample, ROWS_PER_TABLE, BYTES_PER_TABLE))
    return max(1, min(ROWS_PER_TABLE, within))


def _bounded(batch: pa.RecordBatch, most_rows: int, most_bytes: int) -> int:
    """How many rows of a batch to take at once."""
    within: int = batch.num_rows * most_bytes // max(1, batch.nbytes)
    return max(1, min(most_rows, within))


def _file_schema(file: InputFile) -> pa.Schema:
    with _opened(file) as parquet:
        schema = parquet.schema_arrow
        for field in schema:
            if len(schema.get_all_field_indices(field.name)) > 1:
                raise InputError(f"{file.name}: has more than one column {field.name!r}; rename or drop all but one")
            if (key := _repeated_key(field.type)) is not None:
                raise InputError(
                    f"{file.name}: column {field.name!r} holds records with more than one field {key!r}; "
                    "rename or drop all but one"
                )
        return schema


def _repeated_key(arrow: pa.DataType) -> str | None:
    children = [arrow.field(i) for i in range(arrow.num_fields)]
    names: list[str] = [child.name for child in children]
    if pa.types.is_struct(arrow) and (twice := [name for name in names if names.count(name) > 1]):
        return twice[0]
    return next((key for child in children if (key := _repeated_key(child.type)) is not None), None)


@contextmanager
def _opened(file: InputFile) -> Iterator[pq.ParquetFile]:
    with _translated(file):
        source = pa.OSFile(os.fsencode(file.path))
    with source:
        with _translated(file):
            parquet = pq.ParquetFile(
                source,
                buffer_size=BUFFER_BYTES,
                pre_buffer=False,  # would hold whole row groups in memory
                page_checksum_verification=True,
            )
        yield parquet


@contextmanager
def _translated(file: InputFile) -> Iterator[None]:
    """Turns what pyarrow raises about a file into an InputError."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        what = str(error).strip().rstrip(".").splitlines()[0]
        problem = f"{file.name}: not a Parquet file that can be read ({what}); write or fetch it again"
        raise InputError(problem) from error
