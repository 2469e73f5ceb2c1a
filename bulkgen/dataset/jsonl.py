"""JSON Lines: rows out of lines, tables out of rows. Every line is one row, good or bad, but blank ones are none."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from bulkgen.dataset.files import InputFile
from bulkgen.dataset.json_columns import JSON_TEXT, JsonColumns
from bulkgen.dataset.json_rows import LineParser
from bulkgen.dataset.lines import read_lines
from bulkgen.errors import InputError
from bulkgen.records import BadRow

Rows = list[dict[str, Any] | BadRow]

MAX_COLUMNS = 10_000
ROWS_PER_BATCH, BYTES_PER_BATCH = 1024, 8 << 20
ROWS_PER_TABLE, BYTES_PER_TABLE, CELLS_PER_TABLE = 8192, 16 << 20, 1 << 20

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class JsonlRows:
    """One pass over the files of a data set; a line is parsed whole and given whole."""

    def __init__(self) -> None:
        self._columns = JsonColumns()

    def read(self, file: InputFile) -> Iterator[tuple[Sequence[int], Rows]]:
        for positions, rows in _batches(file, ROWS_PER_BATCH, BYTES_PER_BATCH):
            self._columns.observe(rows)
            if len(self._columns.names) > MAX_COLUMNS:
                raise InputError(
                    f"{file.name}: more than {MAX_COLUMNS} different keys by line {positions[-1]}; put keys "
                    "that differ from row to row into one object under a common key"
                )
            yield positions, rows

    def names(self) -> list[str]:
        return self._columns.names

    def schema(self) -> pa.Schema:
        return self._columns.schema()


def read_tables(file: InputFile, schema: pa.Schema) -> Iterator[tuple[Sequence[int], pa.RecordBatch]]:
    """The file's rows as tables of `schema`; a bad row becomes a row of nulls."""
    most = max(1, min(ROWS_PER_TABLE, CELLS_PER_TABLE // max(1, len(schema))))
    for positions, rows in _batches(file, most, BYTES_PER_TABLE):
        dicts = [row if type(row) is dict else {} for row in rows]
        if not schema.names:  # only bad rows and empty objects
            yield positions, pa.RecordBatch.from_arrays([pa.nulls(len(rows))], [""]).select([])
            continue
        try:
            arrays = [_array([row.get(field.name) for row in dicts], field) for field in schema]
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InputError(
                f"{file.name}: lines {positions[0]} to {positions[-1]} do not have the types that they had "
                f"before ({error}); a file must not change while a job runs, start the job again"
            ) from error
        yield positions, pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: list[Any], field: pa.Field) -> pa.Array:
    if field.metadata and field.metadata.items() >= JSON_TEXT.items():
        values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    return pa.array(values, type=field.type)


def _batches(file: InputFile, most_rows: int, most_bytes: int) -> Iterator[tuple[list[int], Rows]]:
    parse = LineParser()
    positions: list[int] = []
    rows: Rows = []
    size = 0
    for number, line in enumerate(read_lines(file), 1):
        row = parse(line) if isinstance(line, bytes) else line
        if row is None:
            continue
        if isinstance(line, bytes):
            size += len(line)
            if number == 1 and line.startswith(_UTF16_MARKS):
                raise InputError(f"{file.name}: encoded as UTF-16, JSON Lines is UTF-8; convert it with iconv")
        positions.append(number)
        rows.append(row)
        if len(rows) >= most_rows or size >= most_bytes:
            yield positions, rows
            positions, rows, size = [], [], 0
    if rows:
        yield positions, rows
