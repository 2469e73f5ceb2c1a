"""The data set as the rest of bulkgen sees it: its files, its rows in order, its columns, its tables.

How a format is read stands in the module of that name.
"""

import codecs
import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from bulkgen.dataset import jsonl, parquet
from bulkgen.dataset.damage import damage_in, nothing_readable
from bulkgen.dataset.files import InputFile, find_files
from bulkgen.errors import InputError
from bulkgen.records import BadRow, RowBatch

_BLANK_BYTES = 4096  # up to this size a JSON Lines file is looked into, to see whether it is blank


@dataclass(frozen=True, slots=True)
class TableBatch:
    """The same rows as a RowBatch has, as a table; `first`, `file` and `positions` mean the same there."""

    first: int
    file: str
    positions: Sequence[int]
    table: pa.RecordBatch


class _Pass(Protocol):
    """One reading of all rows of a data set, and what it has learned of their columns so far.

    Where a file is damaged, that place is the last in what `read` gives at once.
    """

    def read(self, file: InputFile) -> Iterator[tuple[Sequence[int], parquet.Rows]]: ...

    def names(self) -> list[str]: ...

    def schema(self) -> pa.Schema: ...


class DataSet:
    """Input files, all of one format, read as one sequence of rows.

    `fingerprint` changes when a file comes, goes, moves, grows or is written again; no file is read for it.
    `left_out` names data files in the job's folders that are not read since their names begin with `_` or
    `.`.
    """

    def __init__(self, files: tuple[InputFile, ...], left_out: tuple[str, ...] = ()) -> None:
        self.files = files
        self.left_out = left_out
        self.fingerprint = _fingerprint(files)
        self._parquet_schema: pa.Schema | None = None
        self._pass: _Pass | None = None
        self._complete = False
        self._sound: set[InputFile] = set()

    @property
    def format(self) -> str:
        return self.files[0].format

    def known_columns(self) -> list[str] | None:
        """The names of all columns where the files tell them without being read (Parquet), else None."""
        return list(self._known_schema().names) if self.format == "parquet" else None

    def rows(self, columns: Collection[str] | None) -> Iterator[RowBatch]:
        """All rows, in order, in batches of at most 1024 rows and some MB, each of one file and never empty.

        Of Parquet files only `columns` are made Python values (None: all), and a row holds those that any file of
        the data set has; a row of JSON Lines always holds its own keys, all of them. Where a file is damaged, one
        BadRow `damaged_file` stands for what cannot be read: for the rest of a JSON Lines file, for a row group of a
        Parquet file or for all of it. After the last batch, `schema` and `columns_seen` know the columns. Raises
        InputError where the system cannot read a file, and at the end if all files are damaged and hold no row.
        """
        this = self._pass = self._new_pass(columns)
        self._complete = False
        first = 0
        unreadable: list[BadRow] = []
        for file in self.files:
            damage: BadRow | None = None
            read = 0
            for positions, rows in this.read(file):
                yield RowBatch(first, file.name, positions, rows)
                first += len(rows)
                last = damage_in(rows)
                read += len(rows) - (last is not None)
                damage = last or damage
            if damage is None:
                self._sound.add(file)
            elif not read:
                unreadable.append(damage)
        if len(unreadable) == len(self.files):
            raise nothing_readable(unreadable)
        self._complete = True

    def schema(self) -> pa.Schema:
        """All columns of all rows with their types, in the order in which they first appear; after `rows`."""
        return self._complete_pass().schema()

    def columns_seen(self) -> list[str]:
        """The names of all columns; after `rows`."""
        return self._complete_pass().names()

    def tables(self, schema: pa.Schema) -> Iterator[TableBatch]:
        """The same rows in the same order as tables of `schema`: what `schema()` gave, in this process or
        before.

        A line that cannot be parsed and a place where a file is damaged are rows of nulls. At most 8192 rows and
        about 32 MB at once. Raises InputError where the system cannot read a file.
        """
        first = 0
        for file in self.files:
            for positions, table in self._tables_of(file, schema):
                yield TableBatch(first, file.name, positions, table)
                first += table.num_rows

    def _tables_of(self, file: InputFile, schema: pa.Schema) -> Iterator[tuple[Sequence[int], pa.RecordBatch]]:
        if self.format == "parquet":
            return parquet.read_tables(file, schema, sound=file in self._sound)
        return jsonl.read_tables(file, schema)

    def _new_pass(self, columns: Collection[str] | None) -> _Pass:
        if self.format == "parquet":
            return parquet.ParquetRows(self._known_schema(), columns)
        return jsonl.JsonlRows()

    def _known_schema(self) -> pa.Schema:
        if self._parquet_schema is None:
            self._parquet_schema = parquet.load_schema(self.files)
        return self._parquet_schema

    def _complete_pass(self) -> _Pass:
        if self._pass is None or not self._complete:
            raise RuntimeError("the columns of a data set are known when all its rows have been read")
        return self._pass


def open_dataset(paths: Sequence[str], base: Path, exclude: Sequence[Path] = ()) -> DataSet:
    """The data set that `paths` (each a file, folder or glob, relative to `base`) name; see `find_files`.

    `exclude` names files and folders that are never read: the job's own output. Raises InputError when a path
    leads to nothing, and when Parquet and JSON Lines come together.
    """
    found = find_files(paths, base, exclude)
    files = found.files
    if len({file.format for file in files}) > 1:
        files = tuple(file for file in files if not _is_blank(file))
    by_format = {file.format: file.name for file in reversed(files)}
    if len(by_format) > 1:
        raise InputError(
            f"{by_format['parquet']} is Parquet and {by_format['jsonl']} is JSON Lines; a job reads one "
            "format, name the files of one in input.path, or make two jobs"
        )
    return DataSet(files, found.left_out)


def _is_blank(file: InputFile) -> bool:
    """Whether a file is one of the empty ones that some tools leave beside their Parquet parts."""
    if file.format != "jsonl" or file.compression or file.size_bytes > _BLANK_BYTES:
        return False
    try:
        return not file.path.read_bytes().removeprefix(codecs.BOM_UTF8).strip()
    except OSError as error:
        raise InputError(f"{file.name}: cannot be read ({error.strerror}); check its rights") from error


def _fingerprint(files: Sequence[InputFile]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.name}\0{file.size_bytes}\0{file.mtime_ns}\n".encode())
    return digest.hexdigest()
