"""JSON Lines, plain or compressed: lines out of blocks, rows out of lines, tables out of rows.

A line ends at "\\n" and nowhere else. Every line is one row, good or bad, but for blank ones, which are none.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from bulkgen.dataset.files import InputFile
from bulkgen.dataset.json_columns import JSON_TEXT, JsonColumns
from bulkgen.errors import InputError
from bulkgen.records import BadRow

Rows = list[dict[str, Any] | BadRow]

BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 30
MAX_COLUMNS = 10_000
ROWS_PER_BATCH, BYTES_PER_BATCH = 1024, 8 << 20
ROWS_PER_TABLE, BYTES_PER_TABLE, CELLS_PER_TABLE = 8192, 16 << 20, 1 << 20

_BOM = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_HALF_A_PAIR = re.compile(rb"\\u[dD][89aAbB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89aAbB]..)\\u[dD][c-fC-F]")


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
    parse = _LineParser()
    positions: list[int] = []
    rows: Rows = []
    size = 0
    for number, line in enumerate(_lines(file), 1):
        if not line or line.isspace():
            continue
        positions.append(number)
        rows.append(parse(line))
        size += len(line)
        if len(rows) >= most_rows or size >= most_bytes:
            yield positions, rows
            positions, rows, size = [], [], 0
    if rows:
        yield positions, rows


def _lines(file: InputFile) -> Iterator[bytes]:
    """The lines of a file without their ends; the last one need not have any."""
    pending: list[bytes] = []  # pieces of a line that no block so far has ended
    length = 0
    for block in _blocks(file):
        cut = block.rfind(b"\n")
        if cut >= 0:
            pending.append(block[:cut])
            yield from b"".join(pending).split(b"\n")
            pending, length = [], 0
        pending.append(block[cut + 1 :])
        length += len(pending[-1])
        if length > MAX_LINE_BYTES:
            raise InputError(
                f"{file.name}: a line of more than {MAX_LINE_BYTES >> 20} MiB; JSON Lines has one object a "
                "line, so convert the file if it holds one big JSON value"
            )
    if length:
        yield b"".join(pending)


def _blocks(file: InputFile) -> Iterator[bytes]:
    """The file's bytes, uncompressed, less a mark at their start. Raises InputError if it is cut or
    damaged."""
    if file.compression and not file.size_bytes:
        raise InputError(f"{file.name}: cut off, it has no bytes at all; fetch it again")
    try:
        with pa.OSFile(os.fsencode(file.path)) as plain:
            stream = pa.CompressedInputStream(plain, file.compression) if file.compression else plain
            block = stream.read(BLOCK_BYTES)
            if block.startswith(_UTF16_MARKS):
                raise InputError(f"{file.name}: encoded as UTF-16, JSON Lines is UTF-8; convert it with iconv")
            yield block.removeprefix(_BOM)
            while block := stream.read(BLOCK_BYTES):
                yield block
    except (OSError, pa.ArrowException) as error:
        problem = f"{file.name}: cannot be read to its end ({error}); fetch or write the file again"
        raise InputError(problem) from error


class _NotJson(ValueError):
    """A number that Python's parser would take and JSON does not have."""


class _LineParser:
    """From a line to its row. Of a key that an object has twice the last value counts, as in Python.

    The codes of bad rows: bad_utf8, bad_json, bad_unicode, not_an_object.
    """

    def __init__(self) -> None:
        self._decode = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite).decode

    def __call__(self, line: bytes) -> dict[str, Any] | BadRow:
        raw = line.removesuffix(b"\r")
        line = raw.removeprefix(_BOM)  # stands where files that have one were put one after the other
        try:
            value = self._decode(line.decode())
            if _may_hold_half_a_pair(line):
                json.dumps(value, ensure_ascii=False).encode()  # fails if so
        except (ValueError, RecursionError) as error:
            return BadRow(*_explain(error), raw)
        if type(value) is dict:
            return value
        return BadRow("not_an_object", f"the line holds {_kind(value)}, a row must be an object", raw)


def _may_hold_half_a_pair(line: bytes) -> bool:
    """Whether a string on the line may hold an escaped surrogate without its other half; quick when none can."""
    if b"\\ud" not in line and b"\\uD" not in line:
        return False
    return b"\\\\" in line or _HALF_A_PAIR.search(line) is not None  # an escaped backslash would mislead the search


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _refuse_constant(name: str) -> None:
    raise _NotJson(f"{name} is not JSON; write null or a number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _NotJson(f"the number {digits[:40]} is beyond the range of a double")
    return value


def _explain(error: Exception) -> tuple[str, str]:
    """Code and message for what was wrong with a line."""
    match error:
        case UnicodeDecodeError():
            return "bad_utf8", f"not valid UTF-8: {error.reason} at byte {error.start + 1} of the line"
        case UnicodeEncodeError():
            half = f"\\u{ord(error.object[error.start]):04x}"
            return "bad_unicode", f"a string holds {half}, half of a surrogate pair, which is no character"
        case json.JSONDecodeError():
            return "bad_json", _explain_syntax(error)
        case RecursionError():
            return "bad_json", "not readable JSON: lists and objects are nested too deeply"
        case _:  # _NotJson, or more digits than Python turns into an integer
            return "bad_json", f"not readable JSON: {error}"


def _explain_syntax(error: json.JSONDecodeError) -> str:
    place = f"at character {error.pos + 1} of the line"
    if error.msg == "Extra data":
        return f"more than one JSON value on the line, or something else after it, {place}"
    cut = error.msg.startswith("Unterminated string") or error.pos >= len(error.doc.rstrip())
    return f"not valid JSON: {error.msg.removesuffix(' at')} {place}" + (
        "; the line seems to be cut off" if cut else ""
    )
