"""Parquet files as the rest of results/ uses them, and the one place where what the disk says becomes an OutputError.

What the files hold is the business of the other modules.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bulkgen.errors import OutputError

_GROUP_ROWS = 131_072
_GROUP_BYTES = 32 << 20


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the system or pyarrow say about writing into an OutputError that names `path`."""
    try:
        yield
    except (OSError, pa.ArrowException) as e:
        raise OutputError(
            f"{path}: cannot be written ({reason(e)}); make room or give rights there and run again"
        ) from e


@contextmanager
def reading(path: Path, cure: str) -> Iterator[None]:
    """Turns what the system or pyarrow say about reading into an OutputError that names `path` and the cure."""
    try:
        yield
    except (OSError, pa.ArrowException) as e:
        raise OutputError(f"{path}: cannot be read ({reason(e)}); {cure}") from e


def reason(error: Exception) -> str:
    """The system's own words where there are some, else the first line of the library's."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file that bulkgen wrote, read a piece at a time and proven against its checksums."""
    with (
        pa.OSFile(os.fsencode(path)) as source,
        pq.ParquetFile(source, pre_buffer=False, page_checksum_verification=True) as file,
    ):
        yield file


class ParquetSink:
    """One Parquet file in the writing; small tables are gathered to row groups of a good size.

    `path` is where it is written, `final` what errors name. Leaving the block well ends the file; leaving it by an
    error gives it up, and what is on disk then is for the caller to remove.
    """

    def __init__(self, path: Path, final: Path, schema: pa.Schema, dictionary: list[str] | bool = True) -> None:
        self._final = final
        self._pending: list[pa.Table] = []
        self._pending_rows = self._pending_bytes = 0
        with writing(final):
            self._file = pa.OSFile(os.fsencode(path), "wb")
            self._writer = pq.ParquetWriter(
                self._file,
                schema,
                compression="zstd",
                use_dictionary=dictionary,
                write_page_checksum=True,
                # The fields inside of lists keep the names that they have in the input.
                use_compliant_nested_type=False,
            )

    def write(self, table: pa.Table) -> None:
        """Append rows of the file's schema. Raises OutputError."""
        if not table.num_rows:
            return
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self._pending_bytes += table.nbytes
        if self._pending_rows >= _GROUP_ROWS or self._pending_bytes >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        table = pa.concat_tables(self._pending)
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0
        try:
            with writing(self._final):
                self._writer.write_table(table, row_group_size=table.num_rows)
        except BaseException:
            self.give_up()
            raise

    def close(self) -> None:
        """Write what is left and end the file. Raises OutputError."""
        try:
            self._flush()
            with writing(self._final):
                self._writer.close()
                self._file.close()
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Let go of a file that shall not or cannot be ended."""
        with suppress(OSError, ValueError, pa.ArrowException):
            self._writer.close()
        # Where closing failed, the writer would try again at its end and complain to standard error.
        self._writer.is_open = False
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> "ParquetSink":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.give_up()
