"""Parquet: the columns of all files together, rows as Python values, tables as they stand in the file."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa

from bulkgen.dataset.arrow_types import merge_schemas, optional
from bulkgen.dataset.damage import nothing_readable
from bulkgen.dataset.files import InputFile
from bulkgen.dataset.python_values import NO_PYTHON_VALUE, careful_value, python_values
from bulkgen.dataset.row_groups import bounded, read_footer, read_pieces
from bulkgen.errors import InputError
from bulkgen.records import BadRow

Rows = list[dict[str, Any] | BadRow]

ROWS_PER_BATCH, BYTES_PER_BATCH = 1024, 8 << 20
ROWS_PER_TABLE, BYTES_PER_TABLE = 8192, 32 << 20
_ONE_ROW = pa.RecordBatch.from_arrays([pa.nulls(1)], [""]).select([])


def load_schema(files: Sequence[InputFile]) -> pa.Schema:
    """The columns of all files, from their footers alone; a file without a readable one has none.

    Raises InputError for files that do not agree, and if there is no file that can be read.
    """
    schemas: list[tuple[str, pa.Schema]] = []
    damaged: list[BadRow] = []
    for file in files:
        schema = read_footer(file)
        if isinstance(schema, BadRow):
            damaged.append(schema)
            schema = pa.schema([])
        _refuse_repeated(file, schema)
        schemas.append((file.name, schema))
    if len(damaged) == len(files):
        raise nothing_readable(damaged)
    return merge_schemas(schemas)


class ParquetRows:
    """One pass over the files of a data set whose columns are those of `schema`.

    A row holds the wanted columns that any file has, None where its own file lacks one.
    """

    def __init__(self, schema: pa.Schema, columns: Collection[str] | None) -> None:
        self._schema = schema
        self._wanted = [name for name in schema.names if columns is None or name in columns]
        self._damaged = False

    def read(self, file: InputFile) -> Iterator[tuple[Sequence[int], Rows]]:
        for first, piece in read_pieces(file, self._wanted, look=lambda batch: self._look(file, batch)):
            if isinstance(piece, BadRow):
                self._damaged = True
                yield range(first, first + 1), [piece]
                continue
            most = bounded(piece, ROWS_PER_BATCH, BYTES_PER_BATCH)
            for start in range(0, piece.num_rows, most):
                rows = self._rows(piece.slice(start, most))
                yield range(first + start, first + start + len(rows)), rows

    def _look(self, file: InputFile, batch: pa.RecordBatch) -> None:
        """Raise InputError for a value that cannot be in the output: now, and not when all rows are done."""
        own = [f for f in self._schema if f.name in batch.schema.names and not f.type.equals(batch[f.name].type)]
        _conform(file, batch, pa.schema(own))

    def names(self) -> list[str]:
        return list(self._schema.names)

    def schema(self) -> pa.Schema:
        if not self._damaged:
            return self._schema
        return pa.schema([optional(field) for field in self._schema])  # damage is a row of nulls

    def _rows(self, batch: pa.RecordBatch) -> Rows:
        names = self._wanted
        missing = [None] * batch.num_rows
        present = set(batch.schema.names)
        try:
            columns = [python_values(batch[name]) if name in present else missing for name in names]
        except NO_PYTHON_VALUE:
            return [self._careful_row(batch.slice(i, 1)) for i in range(batch.num_rows)]
        if not names:
            return [{} for _ in missing]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def _careful_row(self, batch: pa.RecordBatch) -> dict[str, Any] | BadRow:
        """One row by itself, without regard to its neighbours."""
        row: dict[str, Any] = dict.fromkeys(self._wanted)
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                row[name] = careful_value(column[0])
            except UnicodeDecodeError as error:
                problem = f"column {name!r} is not valid UTF-8: {error.reason} at byte {error.start + 1}"
                return BadRow("bad_utf8", problem, bytes(error.object))
            except NO_PYTHON_VALUE as error:
                problem = f"column {name!r} holds a {column.type} that cannot be read: {error}"
                return BadRow("bad_value", problem)
        return row


def read_tables(file: InputFile, schema: pa.Schema, sound: bool) -> Iterator[tuple[Sequence[int], pa.RecordBatch]]:
    """The file's rows as tables of `schema`, untouched where the file has a column in that type already.

    `sound`: no damage was found when its rows were read.
    """
    for first, piece in read_pieces(file, schema.names, sound):
        if isinstance(piece, BadRow):
            yield range(first, first + 1), _conform(file, _ONE_ROW, schema)
            continue
        most = bounded(piece, ROWS_PER_TABLE, BYTES_PER_TABLE)
        for start in range(0, piece.num_rows, most):
            table = _conform(file, piece.slice(start, most), schema)
            yield range(first + start, first + start + table.num_rows), table


def _conform(file: InputFile, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if not schema.names:
        return batch
    present = set(batch.schema.names)
    arrays = []
    for field in schema:
        array = batch[field.name] if field.name in present else pa.nulls(batch.num_rows, field.type)
        try:
            arrays.append(array if array.type.equals(field.type) else array.cast(field.type))
        except pa.ArrowException as error:
            problem = (
                f"{file.name}: column {field.name!r} is {array.type} and cannot become {field.type}, which other files "
                f"have ({error}); give it the same type in all files"
            )
            raise InputError(problem) from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _refuse_repeated(file: InputFile, schema: pa.Schema) -> None:
    """Raise InputError for names that stand twice: which of the two is meant is for the user to say."""
    for field in schema:
        if len(schema.get_all_field_indices(field.name)) > 1:
            raise InputError(f"{file.name}: has more than one column {field.name!r}; rename or drop all but one")
        if (key := _repeated_key(field.type)) is not None:
            raise InputError(
                f"{file.name}: column {field.name!r} holds records with more than one field {key!r}; "
                "rename or drop all but one"
            )


def _repeated_key(arrow: pa.DataType) -> str | None:
    children = [arrow.field(i) for i in range(arrow.num_fields)]
    names: list[str] = [child.name for child in children]
    if pa.types.is_struct(arrow) and (twice := [name for name in names if names.count(name) > 1]):
        return twice[0]
    return next((key for child in children if (key := _repeated_key(child.type)) is not None), None)
