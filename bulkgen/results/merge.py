"""The merge: input rows and results side by side, in input order, with bounded memory.

Both are streams in ordinal order: the input as its tables are read again, the results range by range from the spool,
refused rows from the plan. Memory holds one range of results, one batch of the input and one row group of the output:
some 300 MB at most, whatever the number of rows and the length of texts (a single longer row excepted).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bulkgen.errors import BulkgenError, OutputError
from bulkgen.records import FAILED, RESULT_COLUMNS, ROW_KEY_BYTES
from bulkgen.results.output import opened, output_schema
from bulkgen.results.refused import REFUSED_SCHEMA
from bulkgen.results.spool import SPOOL_SCHEMA, Keys, Spool
from bulkgen.rundir import whole_file

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


class InputTable(Protocol):
    """Consecutive input rows, as dataset/ yields them."""

    first: int
    file: str
    positions: Sequence[int]
    table: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What came out: rows = done + failed."""

    rows: int
    done: int
    failed: int


def merge(
    *,
    parts: Sequence[Path],
    keys: Keys,
    tables: Iterable[Any],
    refused: Path,
    input_schema: pa.Schema,
    output: Path,
    text_column: str,
    file_rows: int,
    failures: Path,
    scratch: Path,
    progress: Callable[[int], None],
) -> MergeResult:
    """Write the output and failures.parquet, each whole or not at all.

    `tables` gives the input rows in ordinal order, `keys` their ordinals; `scratch` is a folder for the spool;
    `progress` is told the rows merged so far. Raises BulkgenError if a row has no result or two, OutputError when
    the disk does not take it.
    """
    spool_path = scratch / ".tmp-spool.arrow"
    failed = rows = 0
    schema = output_schema(input_schema, text_column)
    try:
        with (
            opened(output, schema, file_rows) as target,
            whole_file(failures) as failures_path,
            pq.ParquetWriter(failures_path, FAILURES_SCHEMA, compression="zstd") as failures_writer,
        ):
            results = _Aligned(Spool(spool_path, parts, keys).ranges(), SPOOL_SCHEMA)
            refusals = _Aligned(_read_refused(refused), REFUSED_SCHEMA)
            for batch in tables:
                end = batch.first + batch.table.num_rows
                finished, refused_rows = results.take(batch.first, end), refusals.take(batch.first, end)
                result = _in_order(batch.first, end, finished, _as_results(refused_rows))
                target.write(_output_rows(batch.table, result, schema))
                bad = finished.filter(pc.equal(finished["status"], FAILED))
                if bad.num_rows or refused_rows.num_rows:
                    failures_writer.write_table(_failures(batch, bad, refused_rows))
                rows += result.num_rows
                failed += bad.num_rows + refused_rows.num_rows
                progress(rows)
            if rows != keys.rows:
                raise BulkgenError(f"the input gave {rows} rows to the merge and {keys.rows} to the plan")
    finally:
        spool_path.unlink(missing_ok=True)
    return MergeResult(rows, rows - failed, failed)


class _Aligned:
    """A stream of tables in ordinal order (their first column), of which stretches are asked for in the same order."""

    def __init__(self, tables: Iterator[pa.Table], schema: pa.Schema) -> None:
        self._tables = tables
        self._held = schema.empty_table()

    def take(self, first: int, end: int) -> pa.Table:
        """The rows with ordinals from `first` up to, not including, `end`."""
        taken = []
        while True:
            cut = int(np.searchsorted(self._held.column(0).to_numpy(), end))
            taken.append(self._held.slice(0, cut))
            self._held = self._held.slice(cut)
            if self._held.num_rows or (following := next(self._tables, None)) is None:
                return pa.concat_tables(taken)
            self._held = following


def _read_refused(path: Path) -> Iterator[pa.Table]:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(8192):
                yield pa.Table.from_batches([batch])
    except (OSError, pa.ArrowException) as e:
        raise OutputError(f"{path}: cannot be read ({e}); remove the plan folder and run again") from e


def _as_results(refused: pa.Table) -> pa.Table:
    """Refused rows in the shape of results."""
    rows = refused.num_rows
    known = {
        "ordinal": refused["ordinal"],
        "key": refused["key"],
        "shard": pa.array(np.full(rows, -1, np.int32)),
        "status": pa.array([FAILED] * rows, pa.string()),
        "prompt_tokens": refused["prompt_tokens"],
        "error_code": refused["code"],
        "error": refused["message"],
    }
    columns = [known[f.name] if f.name in known else pa.nulls(rows, f.type) for f in SPOOL_SCHEMA]
    return pa.Table.from_arrays(columns, schema=SPOOL_SCHEMA)


def _in_order(first: int, end: int, finished: pa.Table, refused: pa.Table) -> pa.Table:
    """One record for each row of a stretch of the input. Raises BulkgenError where a row has none, or two."""
    found = pa.concat_tables([finished, refused])
    ordinals: npt.NDArray[np.int64] = found.column(0).to_numpy()
    order = np.argsort(ordinals, kind="stable")
    expected = np.arange(first, end)
    if len(order) != len(expected) or np.any(ordinals[order] != expected):
        odd = sorted(set(expected.tolist()) ^ set(ordinals.tolist())) or ordinals[order][:1].tolist()
        raise BulkgenError(f"row {odd[0]} of the input has no result, or two; nothing was merged")
    return found.take(pa.array(order)) if refused.num_rows else found


def _output_rows(table: pa.RecordBatch, result: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = {
        **{name: result[name] for name in RESULT_COLUMNS if name != "row_key"},
        "row_key": _hex(result["key"]),
    }
    added = [result["status"], result["text"], *(columns[name] for name in RESULT_COLUMNS)]
    return pa.Table.from_arrays([*table.columns, *added], schema=schema)


def _hex(keys: pa.ChunkedArray) -> pa.Array:
    digits = b"".join(keys.to_pylist()).hex()
    width = 2 * ROW_KEY_BYTES
    return pa.array([digits[i : i + width] for i in range(0, len(digits), width)], pa.string())


def _failures(batch: InputTable, bad: pa.Table, refused: pa.Table) -> pa.Table:
    """Records of failed rows in input order, each with the row as it came in: as JSON, or raw where it is none."""
    places = [ordinal - batch.first for ordinal in bad["ordinal"].to_pylist()]
    rows = [json.dumps(batch.table.slice(i, 1).to_pylist()[0], ensure_ascii=False, default=str) for i in places]
    in_engine = {
        "file": [batch.file] * len(places),
        "position": [batch.positions[i] for i in places],
        "ordinal": bad["ordinal"],
        "error_code": bad["error_code"],
        "error": bad["error"],
        "row": rows,
        "raw": pa.nulls(len(places), pa.binary()),
        "row_key": _hex(bad["key"]),
    }
    at_planning = {
        "file": refused["file"],
        "position": refused["position"],
        "ordinal": refused["ordinal"],
        "error_code": refused["code"],
        "error": refused["message"],
        "row": refused["row"],
        "raw": refused["raw"],
        "row_key": _hex(refused["key"]),
    }
    both = [pa.table(columns, schema=FAILURES_SCHEMA) for columns in (in_engine, at_planning)]
    return pa.concat_tables(both).sort_by("ordinal")
