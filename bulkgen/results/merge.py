"""The merge: input rows and results side by side, in input order, with bounded memory.

All are streams in ordinal order: the input as its tables are read again, results as the spool sorts them, refused
rows as the plan left them. Memory holds one range of results, one table of the input and one row group of the output:
some 250 MB at most, whatever the number of rows and the length of texts. Only a single row that is larger than a
range (16 MB) takes more, about eight times its size.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bulkgen.errors import BulkgenError
from bulkgen.records import FAILED, RESULT_COLUMNS, ROW_KEY_BYTES
from bulkgen.results.columns import hex_keys
from bulkgen.results.disk import ParquetSink
from bulkgen.results.failures import FAILURES_SCHEMA, InputTable, failure_records
from bulkgen.results.output import open_output, output_schema
from bulkgen.results.refused import REFUSED_SCHEMA, read_refused
from bulkgen.results.spool import RESULT_SCHEMA, CommittedPart, Keys, results_in_order
from bulkgen.rundir import whole_file


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What came out: rows = done + failed."""

    rows: int
    done: int
    failed: int


def merge(
    *,
    parts: Sequence[CommittedPart],
    keys: Keys,
    tables: Iterable[InputTable],
    refused: Path,
    input_schema: pa.Schema,
    output: Path,
    text_column: str,
    file_rows: int,
    failures: Path,
    scratch: Path,
    progress: Callable[[int], None],
    extra_columns: Sequence[str] = (),
    check: Callable[[], None] = lambda: None,
) -> MergeResult:
    """Write the output and failures.parquet, each whole or not at all.

    `tables` gives the input rows in ordinal order, `keys` their ordinals; temporary data lies in the folder
    `scratch`. `extra_columns` are those of EXTRA_COLUMNS that the output has.
    `progress` is told the rows merged so far, 0 while parts are read, and may raise to stop. `check` may raise too,
    when all is read and nothing is in its place yet: whether the input still is what it was. Raises
    BulkgenError if a row has no result or two, OutputError when the disk does not take it.
    """
    schema = output_schema(input_schema, text_column, extra_columns)
    with (
        open_output(output, schema, file_rows) as target,
        whole_file(failures) as failures_path,
        ParquetSink(failures_path, failures, FAILURES_SCHEMA) as failed_rows,
        closing(results_in_order(parts, keys, scratch, lambda: progress(0))) as results,
    ):
        rows = failed = 0
        stretches = _Stretches(results, _with_plan_keys(read_refused(refused), keys))
        for batch in tables:
            for first, end, finished, refusals in stretches.of(batch):
                result = _one_each(batch, first, end, finished, refusals)
                rows_in = batch.table.slice(first - batch.first, end - first)
                target.write(_output_rows(rows_in, result, extra_columns, schema))
                bad = finished.filter(pc.equal(finished["status"], FAILED))
                if bad.num_rows or refusals.num_rows:
                    failed_rows.write(failure_records(batch, bad, refusals))
                failed += bad.num_rows + refusals.num_rows
            rows += batch.table.num_rows
            progress(rows)
        if rows != keys.rows:
            raise BulkgenError(f"the input gave {rows} rows to the merge and {keys.rows} to the plan; run again")
        check()
    return MergeResult(rows, rows - failed, failed)


class _Stretches:
    """Results and refused rows cut along the input, so finely that no more than one table of each is in memory."""

    def __init__(self, results: Iterator[pa.Table], refused: Iterator[pa.Table]) -> None:
        self._results = _Ordered(results, RESULT_SCHEMA)
        self._refused = _Ordered(refused, REFUSED_SCHEMA)

    def of(self, batch: InputTable) -> Iterator[tuple[int, int, pa.Table, pa.Table]]:
        """Stretches of a batch as ordinals from (included) and to (not), with their results and refused rows."""
        first, end = batch.first, batch.first + batch.table.num_rows
        while first < end:
            until = min(end, self._results.reach(), self._refused.reach())
            yield first, until, self._results.take(until), self._refused.take(until)
            first = until


class _Ordered:
    """A stream of tables by rising ordinal, which is their first column; holds one of them."""

    def __init__(self, tables: Iterator[pa.Table], schema: pa.Schema) -> None:
        self._tables = tables
        self._ended = False
        self._hold(schema.empty_table())

    def _hold(self, table: pa.Table) -> None:
        self._table = table
        self._ordinals: npt.NDArray[np.int64] = table.column(0).to_numpy()

    def reach(self) -> int:
        """The ordinal up to which, not included, `take` can go now: the end of what is held."""
        while not len(self._ordinals) and not self._ended:
            following = next(self._tables, None)
            if following is None:
                self._ended = True
            else:
                self._hold(following)
        return int(self._ordinals[-1]) + 1 if len(self._ordinals) else sys.maxsize

    def take(self, end: int) -> pa.Table:
        """The rows that are left below `end`."""
        cut = int(np.searchsorted(self._ordinals, end))
        taken = self._table.slice(0, cut)
        self._table, self._ordinals = self._table.slice(cut), self._ordinals[cut:]
        return taken


def _one_each(batch: InputTable, first: int, end: int, finished: pa.Table, refused: pa.Table) -> pa.Table:
    """The results of a stretch, refused rows among them, one for each row of the input in its order.

    Raises BulkgenError where a row has none, or two.
    """
    found = pa.concat_tables([finished, _as_results(refused)]) if refused.num_rows else finished
    ordinals: npt.NDArray[np.int64] = found.column(0).to_numpy()
    order = np.argsort(ordinals, kind="stable")
    if not np.array_equal(ordinals[order], np.arange(first, end)):
        raise _mismatch(batch, first, end, ordinals)
    return found.take(pa.array(order)) if refused.num_rows else found


def _mismatch(batch: InputTable, first: int, end: int, ordinals: npt.NDArray[np.int64]) -> BulkgenError:
    there, counts = np.unique(ordinals, return_counts=True)
    twice, missing = there[counts > 1], np.setdiff1d(np.arange(first, end), there)
    ordinal = int((*twice, *missing, *there)[0])
    what = "more than one result" if len(twice) else "no result" if len(missing) else "a result that is not its own"
    inside = 0 <= ordinal - batch.first < batch.table.num_rows
    place = f"{batch.file}: row at {batch.positions[ordinal - batch.first]}" if inside else f"row {ordinal}"
    return BulkgenError(f"{place} has {what}; nothing was merged, and what was generated is still in the run folder")


def _with_plan_keys(tables: Iterator[pa.Table], keys: Keys) -> Iterator[pa.Table]:
    """Refused rows under the keys that the plan gave them, which differ even where the rows are equal."""
    for table in tables:
        own = pa.array(keys.keys_of(table.column("ordinal").to_numpy()), pa.binary(ROW_KEY_BYTES))
        yield table.set_column(table.schema.get_field_index("key"), "key", own)


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
        "attempts": pa.array(np.zeros(rows, np.int32)),
    }
    columns = [known[f.name] if f.name in known else pa.nulls(rows, f.type) for f in RESULT_SCHEMA]
    return pa.Table.from_arrays(columns, schema=RESULT_SCHEMA)


def _output_rows(
    table: pa.RecordBatch | pa.Table, result: pa.Table, extra_columns: Sequence[str], schema: pa.Schema
) -> pa.Table:
    shown = {"row_key": hex_keys(result["key"]), "request_key": hex_keys(result["request_key"])}
    added = [result["status"], result["text"]]
    added += [shown[name] if name in shown else result[name] for name in (*extra_columns, *RESULT_COLUMNS)]
    return pa.Table.from_arrays([*table.columns, *added], schema=schema)
