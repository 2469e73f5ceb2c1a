"""The finished output: one Parquet file, or a folder of them, put in place only when everything is written."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bulkgen.errors import OutputError
from bulkgen.records import RESULT_COLUMNS
from bulkgen.results.disk import ParquetSink, writing
from bulkgen.results.parts import PART_SCHEMA
from bulkgen.rundir import RunDir, sync

# Metadata of an output: which of its columns holds the text.
TEXT_COLUMN = b"bulkgen.text_column"
_NAME = "part-{:05d}.parquet"
_NAMED = re.compile(r"part-\d{5,}\.parquet")
_TEMPORARY = ".tmp-{}"


def output_files(path: Path) -> list[Path]:
    """The files of an output that are there, by their names: of a folder those that a merge would give its files.

    What another job keeps in the folder as an output of its own, with a run folder beside it, is not among them.
    """
    if path.suffix == ".parquet":
        return [path] if path.is_file() else []
    named = sorted(file for file in path.glob("part-*.parquet") if _NAMED.fullmatch(file.name))
    return [file for file in named if not RunDir.of_output(file).path.exists()]


def output_schema(input_schema: pa.Schema, text_column: str, extra_columns: Sequence[str]) -> pa.Schema:
    """The input's columns untouched, then status, the text, `extra_columns` and RESULT_COLUMNS."""
    types = {field.name: field.type for field in PART_SCHEMA} | dict.fromkeys(("row_key", "request_key"), pa.string())
    added = [pa.field("status", pa.string()), pa.field(text_column, pa.string())]
    added += [pa.field(name, types[name]) for name in (*extra_columns, *RESULT_COLUMNS)]
    return pa.schema([*input_schema, *added], metadata={**(input_schema.metadata or {}), TEXT_COLUMN: text_column})


class Output:
    """Takes rows in input order; until `finish` only temporaries are there.

    `file_rows` is the most that a file of a folder holds, None for an output that is a single file.
    """

    def __init__(self, path: Path, schema: pa.Schema, file_rows: int | None) -> None:
        self._path = path
        self._schema = schema
        self._file_rows = file_rows
        self._folder = path.parent if file_rows is None else path
        self._files: list[Path] = []
        self._sink: ParquetSink | None = None
        self._room = 0
        with writing(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            if file_rows is not None:
                _remove(self._folder.glob(_TEMPORARY.format("part-*.parquet")))  # of a merge that was killed

    def write(self, table: pa.Table) -> None:
        """Append rows of the output's schema. Raises OutputError."""
        while table.num_rows:
            sink = self._sink or self._open_file()
            if self._file_rows is None:
                sink.write(table)
                return
            sink.write(table.slice(0, self._room))
            table, self._room = table.slice(self._room), max(0, self._room - table.num_rows)
            if not self._room:
                self._close_file()

    def _open_file(self) -> ParquetSink:
        file = self._path if self._file_rows is None else self._path / _NAME.format(len(self._files))
        self._files.append(file)
        self._room = self._file_rows or 0
        self._sink = ParquetSink(_temporary(file), file, self._schema)
        return self._sink

    def _close_file(self) -> None:
        if self._sink is None:
            return
        self._sink.close()
        self._sink = None
        with writing(self._files[-1]):
            sync(_temporary(self._files[-1]))

    def finish(self) -> None:
        """Put the files in their place. Raises OutputError.

        What an earlier finish left in a folder is removed before the first new file appears there. So a reader in
        that moment misses rows, and sees that, but never has rows of both; a crash in it costs another merge.
        """
        if not self._files:
            self._open_file()
        self._close_file()
        earlier = [] if self._file_rows is None else self._earlier_files()
        with writing(self._path):
            for file in earlier:
                file.unlink()
            for file in self._files:
                _temporary(file).replace(file)
            sync(self._folder)

    def _earlier_files(self) -> list[Path]:
        """The files that an earlier finish left in the folder. Raises OutputError for another's where ours belong."""
        found = [file for file in output_files(self._path) if _is_output(file)]
        for file in self._files:
            if file.exists() and file not in found:
                raise OutputError(
                    f"{file}: is not an output of bulkgen and stands where one belongs; move it away and run again"
                )
        return found

    def discard(self) -> None:
        """Remove what was not finished."""
        if self._sink is not None:
            self._sink.give_up()
        _remove(map(_temporary, self._files))


@contextmanager
def open_output(path: Path, schema: pa.Schema, file_rows: int) -> Iterator[Output]:
    """An output that appears if the block ends well and leaves nothing behind otherwise. Raises OutputError.

    A path that ends in .parquet is a single file, any other a folder of files with `file_rows` rows at most.
    Foreign files in the folder are never touched.
    """
    output = Output(path, schema, None if path.suffix == ".parquet" else file_rows)
    try:
        yield output
        output.finish()
    finally:
        output.discard()


def _temporary(file: Path) -> Path:
    return file.with_name(_TEMPORARY.format(file.name))


def _remove(files: Iterator[Path]) -> None:
    for file in files:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def _is_output(file: Path) -> bool:
    try:
        names = pq.read_schema(file).names
    except (OSError, pa.ArrowException):
        return False
    return tuple(names[-len(RESULT_COLUMNS) :]) == RESULT_COLUMNS
