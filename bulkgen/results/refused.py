"""Rows that planning refused, in input order, on disk: they have no result but their reason."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from bulkgen.records import ROW_KEY_BYTES, RefusedRow
from bulkgen.results.columns import as_column
from bulkgen.results.disk import ParquetSink, open_parquet, reading

REFUSED_SCHEMA = pa.schema(
    [
        ("ordinal", pa.int64()),
        ("key", pa.binary(ROW_KEY_BYTES)),
        ("file", pa.string()),
        ("position", pa.int64()),
        ("code", pa.string()),
        ("message", pa.string()),
        ("row", pa.string()),
        ("raw", pa.binary()),
        ("prompt_tokens", pa.int32()),
    ]
)
_CHUNK_ROWS, _CHUNK_BYTES = 4096, 16 << 20


class RefusedWriter:
    """Streams refused rows to a Parquet file; `rows` counts them. Raises OutputError."""

    def __init__(self, path: Path) -> None:
        self._sink = ParquetSink(path, path, REFUSED_SCHEMA)
        self._pending: list[RefusedRow] = []
        self._pending_bytes = 0
        self.rows = 0

    def add(self, rows: Sequence[RefusedRow]) -> None:
        """Add rows; ordinals only rise, over all calls."""
        self.rows += len(rows)
        for row in rows:
            self._pending.append(row)
            self._pending_bytes += len(row.row or "") + len(row.raw or b"") + len(row.message)
            if len(self._pending) >= _CHUNK_ROWS or self._pending_bytes >= _CHUNK_BYTES:
                self._flush()

    def close(self) -> None:
        """Write what is left and end the file."""
        self._flush()
        self._sink.close()

    def give_up(self) -> None:
        """Let go of a file that will not be ended."""
        self._sink.give_up()

    def _flush(self) -> None:
        columns = [as_column([getattr(row, f.name) for row in self._pending], f.type) for f in REFUSED_SCHEMA]
        self._sink.write(pa.Table.from_arrays(columns, schema=REFUSED_SCHEMA))
        self._pending, self._pending_bytes = [], 0


def read_refused(path: Path) -> Iterator[pa.Table]:
    """Refused rows in input order, as tables of bounded size. Raises OutputError."""
    with (
        reading(path, "remove the folder that it is in, so that the input is planned again"),
        open_parquet(path) as file,
    ):
        for number in range(file.num_row_groups):
            yield file.read_row_group(number)
