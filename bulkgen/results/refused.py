"""Rows that planning refused, in input order, on disk: they have no result but their reason."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bulkgen.errors import OutputError
from bulkgen.records import ROW_KEY_BYTES, RefusedRow

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
_GROUP_ROWS = 4096
_GROUP_BYTES = 32 << 20


class RefusedWriter:
    """Streams refused rows to a Parquet file; `rows` counts them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[RefusedRow] = []
        self._bytes = 0
        self.rows = 0
        try:
            self._writer = pq.ParquetWriter(path, REFUSED_SCHEMA, compression="zstd")
        except OSError as e:
            raise OutputError(f"{path}: cannot be written ({e.strerror or e})") from e

    def add(self, rows: Sequence[RefusedRow]) -> None:
        """Add rows in ordinal order."""
        self.rows += len(rows)
        self._pending += rows
        self._bytes += sum(len(r.row or "") + len(r.raw or b"") for r in rows)
        if len(self._pending) >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        columns = [pa.array([_value(r, f.name) for r in self._pending], f.type) for f in REFUSED_SCHEMA]
        try:
            self._writer.write_table(pa.Table.from_arrays(columns, schema=REFUSED_SCHEMA))
        except OSError as e:
            raise OutputError(f"{self._path}: cannot be written ({e.strerror or e})") from e
        self._pending, self._bytes = [], 0

    def close(self) -> None:
        """Write what is left and end the file."""
        self._flush()
        self._writer.close()


def _value(row: RefusedRow, name: str) -> object:
    value = getattr(row, name)
    # A lone surrogate has no UTF-8 form; its escape says which one it was.
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
