"""The finished output: one Parquet file, or a folder of them, put in place only when everything is written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bulkgen.errors import OutputError
from bulkgen.records import RESULT_COLUMNS
from bulkgen.results.parts import PART_SCHEMA
from bulkgen.rundir import sync_folder

_PART = "part-{:05d}.parquet"
_GROUP_ROWS = 131_072
_GROUP_BYTES = 64 << 20


def output_schema(input_schema: pa.Schema, text_column: str) -> pa.Schema:
    """The input's columns untouched, then status, the text, and RESULT_COLUMNS."""
    types = {field.name: field.type for field in PART_SCHEMA} | {"row_key": pa.string()}
    added = [pa.field("status", pa.string()), pa.field(text_column, pa.string())]
    added += [pa.field(name, types[name]) for name in RESULT_COLUMNS]
    schema = pa.schema([*input_schema, *added])
    return schema.with_metadata(input_schema.metadata) if input_schema.metadata else schema


class Output:
    """Takes rows in input order; `finish` makes them appear. Until then only temporaries are there.

    A folder's files are renamed one after the other, and those that an earlier finish left beyond them are removed
    last: a reader in that moment can see files of both, so wait for the exit code. Foreign files are never touched.
    """

    def __init__(self, path: Path, schema: pa.Schema, file_rows: int) -> None:
        self._path = path
        self._schema = schema
        self._is_file = path.suffix == ".parquet"
        self._file_rows = None if self._is_file else file_rows
        self._temporaries: list[Path] = []
        self._writer: pq.ParquetWriter | None = None
        self._rows_in_file = 0
        self._group: list[pa.Table] = []
        self._group_rows = self._group_bytes = 0
        if not self._is_file:
            path.mkdir(parents=True, exist_ok=True)

    def write(self, table: pa.Table) -> None:
        """Append rows of the output's schema."""
        while table.num_rows:
            room = (
                table.num_rows if self._file_rows is None else self._file_rows - self._rows_in_file - self._group_rows
            )
            piece, table = table.slice(0, room), table.slice(room)
            self._group.append(piece)
            self._group_rows += piece.num_rows
            self._group_bytes += piece.nbytes
            full = self._file_rows is not None and self._rows_in_file + self._group_rows >= self._file_rows
            if full or self._group_rows >= _GROUP_ROWS or self._group_bytes >= _GROUP_BYTES:
                self._flush()
            if full:
                self._close_file()

    def _flush(self) -> None:
        if self._writer is None:
            self._open_file()
        assert self._writer is not None
        if self._group_rows:
            self._writer.write_table(pa.concat_tables(self._group))
        self._rows_in_file += self._group_rows
        self._group, self._group_rows, self._group_bytes = [], 0, 0

    def _open_file(self) -> None:
        name = self._path.name if self._is_file else _PART.format(len(self._temporaries))
        folder = self._path.parent if self._is_file else self._path
        temporary = folder / f".tmp-{name}"
        self._temporaries.append(temporary)
        self._writer = pq.ParquetWriter(temporary, self._schema, compression="zstd")

    def _close_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._rows_in_file = 0
            with self._temporaries[-1].open("rb+") as f:
                os.fsync(f.fileno())

    def finish(self) -> None:
        """Put the files in their place."""
        if self._group_rows or not self._temporaries:
            self._flush()
        self._close_file()
        for temporary in self._temporaries:
            temporary.replace(temporary.with_name(temporary.name.removeprefix(".tmp-")))
        folder = self._path.parent if self._is_file else self._path
        if not self._is_file:
            number = len(self._temporaries)
            while (old := folder / _PART.format(number)).exists():
                old.unlink()
                number += 1
        sync_folder(folder)

    def discard(self) -> None:
        """Remove temporaries."""
        if self._writer is not None:
            with suppress(OSError, pa.ArrowException):
                self._writer.close()
        for temporary in self._temporaries:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextmanager
def opened(path: Path, schema: pa.Schema, file_rows: int) -> Iterator[Output]:
    """An output that appears if the block ends well and leaves nothing behind otherwise. Raises OutputError."""
    try:
        output = Output(path, schema, file_rows)
        try:
            yield output
            output.finish()
        finally:
            output.discard()
    except OSError as e:
        raise OutputError(f"{path}: cannot be written ({e.strerror or e}); free the place and run again") from e
