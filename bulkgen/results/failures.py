"""Records of failed rows, for failures.parquet: where each stands, why it failed, and the row as it came in."""

import base64
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import pyarrow as pa

from bulkgen.results.columns import hex_keys

FAILURES_SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("position", pa.int64()),
        ("ordinal", pa.int64()),
        ("error_code", pa.string()),
        ("error", pa.string()),
        ("row", pa.string()),
        ("raw", pa.binary()),
        ("row_key", pa.string()),
    ]
)
_ROWS_AT_ONCE = 256

# What pyarrow raises for values that Python's own types cannot hold: dates beyond the year 9999, nanoseconds,
# bytes that are no UTF-8 in text, time zones that this machine does not know.
_NO_PYTHON_VALUE = (ValueError, OverflowError, LookupError, pa.ArrowException)


class InputTable(Protocol):
    """Consecutive input rows of one file, as dataset/ yields them."""

    @property
    def first(self) -> int: ...

    @property
    def file(self) -> str: ...

    @property
    def positions(self) -> Sequence[int]: ...

    @property
    def table(self) -> pa.RecordBatch | pa.Table: ...


def failure_records(batch: InputTable, in_engine: pa.Table, at_planning: pa.Table) -> pa.Table:
    """The failed rows of `batch` in input order: results of the engine's failures, refused rows of the plan's."""
    places = [ordinal - batch.first for ordinal in in_engine["ordinal"].to_pylist()]
    engines = {
        "file": [batch.file] * len(places),
        "position": [batch.positions[i] for i in places],
        "ordinal": in_engine["ordinal"],
        "error_code": in_engine["error_code"],
        "error": in_engine["error"],
        "row": list(rows_as_json(batch.table, places)),
        "raw": pa.nulls(len(places), pa.binary()),
        "row_key": hex_keys(in_engine["key"]),
    }
    plans = {
        "file": at_planning["file"],
        "position": at_planning["position"],
        "ordinal": at_planning["ordinal"],
        "error_code": at_planning["code"],
        "error": at_planning["message"],
        "row": at_planning["row"],
        "raw": at_planning["raw"],
        "row_key": hex_keys(at_planning["key"]),
    }
    both = [pa.table(columns, schema=FAILURES_SCHEMA) for columns in (engines, plans)]
    return pa.concat_tables(both).sort_by("ordinal")


def rows_as_json(table: pa.RecordBatch | pa.Table, places: Sequence[int]) -> Iterator[str]:
    """Some rows of a table as JSON, whatever they hold: what JSON does not know says what it was."""
    for start in range(0, len(places), _ROWS_AT_ONCE):
        some = pa.array(places[start : start + _ROWS_AT_ONCE])
        columns = {name: _python_values(table[name].take(some)) for name in table.schema.names}
        for i in range(len(some)):
            row = {name: values[i] for name, values in columns.items()}
            yield _dumped(row)


def _dumped(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, default=_tagged, allow_nan=False)
    except ValueError:
        # JSON has no NaN and no infinity.
        return json.dumps(_without_nan(row), ensure_ascii=False, default=_tagged)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    return [_without_nan(inner) for inner in value] if isinstance(value, list | tuple) else value


def _python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    try:
        return list(column.to_pylist())
    except _NO_PYTHON_VALUE:
        if len(column) > 1:
            return [value for i in range(len(column)) for value in _python_values(column.slice(i, 1))]
    for other in (pa.string(), pa.binary()):
        with suppress(*_NO_PYTHON_VALUE):
            return list(column.cast(other).to_pylist())
    return [{"unreadable": str(column.type)}]


def _tagged(value: Any) -> Any:
    """What JSON does not know, as text that says what it was."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return {type(value).__name__: str(value)}
