"""The report as files: report.parquet, shards.parquet and timeline.parquet, each whole or not at all.

Columns, types and their explanations (each field's metadata, `doc`) come from model.py and timeline.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bulkgen.report.model import Report, ShardReport, StartReport, columns_of, values_of
from bulkgen.report.timeline import COLUMN_DOCS
from bulkgen.rundir import RunDir, whole_file

_TYPES: dict[Any, pa.DataType] = {
    int: pa.int64(),
    int | None: pa.int64(),
    float: pa.float64(),
    float | None: pa.float64(),
    str: pa.string(),
    str | None: pa.string(),
    bool: pa.bool_(),
    bool | None: pa.bool_(),
    list[int]: pa.list_(pa.int64()),
}
_CODES = pa.list_(pa.struct([("code", pa.string()), ("rows", pa.int64())]))
_MORE_FIELDS = (
    pa.field("error_codes", _CODES, metadata={"doc": "rows that failed in the engine, by code"}),
    pa.field("refused_codes", _CODES, metadata={"doc": "whole: rows that planning refused, by code"}),
    pa.field("warnings", _CODES, metadata={"doc": "rows with a warning, by its code; a row can have several"}),
    pa.field("left_out", pa.list_(pa.string()), metadata={"doc": "names of the first files that were left out"}),
    pa.field("restarts", pa.int64(), metadata={"doc": "replicas that died and were started again"}),
    pa.field("restart_reasons", pa.list_(pa.string()), metadata={"doc": "why, one reason a restart"}),
)


def write_reports(report: Report, run: RunDir) -> None:
    """Write the three files. Raises OutputError when one cannot be written."""
    sections = [*report.starts, report.whole]
    records = [
        {
            **dict(values_of(s)),
            "restarts": len(s.restarts),
            "restart_reasons": [r.reason for r in s.restarts],
            "left_out": list(s.left_out.names),
            **{name: _codes(getattr(s, name)) for name in ("error_codes", "refused_codes", "warnings")},
        }
        for s in sections
    ]
    _write(run.report, pa.Table.from_pylist(records, schema=_schema(StartReport, _MORE_FIELDS)))
    shards = [dict(values_of(s)) for s in report.shards]
    _write(run.shards, pa.Table.from_pylist(shards, schema=_schema(ShardReport)))
    table = report.timeline.to_arrow()
    fields = [field.with_metadata({"doc": COLUMN_DOCS[field.name]}) for field in table.schema]
    _write(run.timeline, table.cast(pa.schema(fields)))


def _codes(counts: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"code": code, "rows": rows} for code, rows in counts.items()]


def _schema(cls: type, more: "Sequence[pa.Field[Any]]" = ()) -> pa.Schema:
    fields = [pa.field(name, _TYPES[kind], metadata={"doc": doc}) for name, kind, doc in columns_of(cls)]
    return pa.schema([*fields, *more])


def _write(path: Path, table: pa.Table) -> None:
    with whole_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
