"""Random files through the readers: nothing but InputError is raised, and each row is given once, as it is.

The number of inputs comes from the environment (`make soak` has 10,000). `python -m tests.test_random_input jsonl 17`
runs input 17 of JSON Lines again and shows its files.
"""

import contextlib
import json
import os
import random
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkgen.dataset import JSON_TEXT, DataSet, open_dataset
from bulkgen.errors import InputError
from bulkgen.records import BadRow
from bulkgen.results.disk import ParquetSink
from tests.random_input import damage, jsonl_files, parquet_tables, write_parquet

INPUTS = int(os.environ.get("BULKGEN_RANDOM_INPUTS", "300"))
_BLOCK = 50

Row = dict[str, Any] | BadRow


@dataclass(frozen=True)
class Place:
    """A row as `rows` gives it."""

    file: str
    position: int
    row: Row


# ---- both passes ----


def read(dataset: DataSet, columns: Sequence[str] | None = None) -> list[Place]:
    """All rows, after a check of how they come."""
    found: list[Place] = []
    for batch in dataset.rows(columns):
        assert batch.first == len(found)
        assert 0 < len(batch.rows) == len(batch.positions) <= 1024
        for position, row in zip(batch.positions, batch.rows, strict=True):
            if isinstance(row, BadRow):
                assert re.fullmatch(r"[a-z_0-9]+", row.code)
                assert row.message
                assert "\n" not in row.message
            found.append(Place(batch.file, position, row))
    assert len({(place.file, place.position) for place in found}) == len(found)
    order = {file.name: i for i, file in enumerate(dataset.files)}
    assert found == sorted(found, key=lambda place: (order[place.file], place.position))
    return found


def tables(dataset: DataSet, found: Sequence[Place]) -> pa.Table:
    """The second pass, by this data set and by one of another process, in step with the first."""
    schema = dataset.schema()
    whole: list[pa.Table] = []
    for same in (dataset, DataSet(dataset.files)):
        places: list[tuple[str, int]] = []
        batches = []
        for batch in same.tables(schema):
            assert batch.first == len(places)
            assert batch.table.schema.equals(schema, check_metadata=True)
            _validate(batch.table)
            places += [(batch.file, position) for position in batch.positions]
            batches.append(batch.table)
        assert places == [(place.file, place.position) for place in found]
        whole.append(pa.Table.from_batches(batches, schema))
    assert _same_columns(*whole)
    return whole[0]


def _validate(table: pa.RecordBatch) -> None:
    """All is as Arrow has it, but text that is no UTF-8 stays so, and so do words that a null record does not use."""
    table.validate()
    with contextlib.suppress(pa.ArrowInvalid):
        table.validate(full=True)
        return
    for column in table.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if not re.search("UTF8|Dictionary indices", str(error)):
                raise


def _same_columns(a: pa.Table, b: pa.Table) -> bool:
    return bool(
        a.schema.equals(b.schema) and all(_same_values(x, y) for x, y in zip(a.columns, b.columns, strict=True))
    )


def _same_values(a: pa.ChunkedArray, b: pa.ChunkedArray) -> bool:
    if a.equals(b) or a.type != b.type:
        return bool(a.type == b.type)
    try:
        return repr(a.to_pylist()) == repr(b.to_pylist())  # NaN is not equal to itself
    except (ValueError, OverflowError):
        return _in_full(a) == _in_full(b)


def _in_full(column: pa.ChunkedArray) -> str:
    text: str = pa.concat_arrays(column.chunks).to_string(window=column.length(), container_window=1000)
    return text


def through_output(table: pa.Table) -> pa.Table:
    """A table as the output has it, beside the columns that are added there."""
    table = table.append_column("the text", pa.array(["text"] * table.num_rows, pa.string()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.parquet"
        with ParquetSink(path, path, table.schema) as sink:
            sink.write(table)
        return pq.ParquetFile(path).read().drop_columns(["the text"])


# ---- JSON Lines, against Python's parser and zlib ----


def check_jsonl(rng: random.Random, folder: Path) -> str:
    """One data set of JSON Lines; returns how it came out."""
    files = jsonl_files(rng)
    for name, (_, packed) in files.items():
        (folder / name).write_bytes(packed)
    contents = [(name, *_unpacked(name, plain, packed)) for name, (plain, packed) in files.items()]
    dataset = open_dataset(["."], folder)
    try:
        found = read(dataset)
    except InputError as error:
        return _explained(str(error), contents)
    for name, content, sound in contents:
        mine = [place for place in found if place.file == name]
        if sound is None:  # nobody can tell what such bytes mean
            continue
        expected = list(_reference(name, content, sound))
        if not sound:
            assert isinstance(mine[-1].row, BadRow)
            assert mine[-1].row.code == "damaged_file"
            assert mine[-1].position == content.count(b"\n") + 1 or name.endswith(".zst")
            mine = mine[:-1]
            assert len(mine) == len(expected) or name.endswith(".zst")
        for place, (position, row) in zip(mine, expected, strict=sound):
            assert place.position == position
            assert _matches(place.row, row), f"{name}:{position}: {place.row!r} is not {row!r}"
    _check_columns(dataset, found)
    return "read"


def _explained(message: str, contents: Sequence[tuple[str, bytes, bool | None]]) -> str:
    """An InputError that is right: all damaged, or another encoding."""
    assert "\n" not in message
    if "UTF-16" in message:
        assert any(content.startswith((b"\xff\xfe", b"\xfe\xff")) for _, content, _ in contents)
        return "UTF-16"
    assert all(not sound for _, _, sound in contents), message
    assert any(message.startswith(f"{name}: ") for name, _, _ in contents), message
    return "damaged"


def _unpacked(name: str, plain: bytes, packed: bytes) -> tuple[bytes, bool | None]:
    """What a file holds up to where it is damaged, and whether it is sound; None where that cannot be told."""
    if name.endswith(".jsonl"):
        return packed, True
    if name.endswith(".gz"):
        return _gunzip(packed)
    try:
        content = pa.CompressedInputStream(pa.BufferReader(packed), "zstd").read()
    except OSError:
        return plain, False if packed and plain.startswith(_zstd_prefix(packed)) else None
    return content, bool(packed)


def _zstd_prefix(packed: bytes) -> bytes:
    stream = pa.CompressedInputStream(pa.PythonFile(_Drops(packed), "r"), "zstd")
    found = b""
    try:
        while block := stream.read(1):
            found += block
    except OSError:
        pass
    return found


class _Drops:
    """Bytes that are given one by one."""

    closed = False

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read(self, size: int = -1) -> bytes:
        self._at += 1
        return self._data[self._at - 1 : self._at]

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return True


def _gunzip(packed: bytes) -> tuple[bytes, bool]:
    found, rest = b"", packed
    while rest:
        member = zlib.decompressobj(31)
        for i in range(len(rest)):
            try:
                found += member.decompress(rest[i : i + 1])
            except zlib.error:
                return found, False
            if member.eof:
                break
        if not member.eof:
            return found, False
        rest = rest[i + 1 :]
    return found, bool(packed)


def _reference(name: str, content: bytes, sound: bool) -> Iterator[tuple[int, Any]]:
    """Each row by its line: the object, or the code of what it is instead. Of a damaged file, whole lines alone."""
    lines = content.split(b"\n")
    for number, line in enumerate(lines if sound else lines[:-1], 1):
        line = line.removesuffix(b"\r")
        text = line
        while text.startswith(b"\xef\xbb\xbf"):
            text = text[3:]
        if text and not text.isspace():
            yield number, (line, _parsed(text))


def _parsed(text: bytes) -> Any:
    try:
        value = json.loads(text.decode(), parse_constant=_refuse, parse_float=_finite)
    except UnicodeDecodeError:
        return "bad_utf8"
    except (ValueError, RecursionError):
        return "bad_json"
    if re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)):
        return "bad_unicode"
    if _depth(value) > 500:
        return "bad_json"
    return value if isinstance(value, dict) else "not_an_object"


def _refuse(name: str) -> None:
    raise ValueError(name)


def _finite(digits: str) -> float:
    if float(digits) in (float("inf"), float("-inf")):
        raise ValueError(digits)
    return float(digits)


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return depth


def _matches(row: Row, expected: tuple[bytes, Any]) -> bool:
    line, value = expected
    if isinstance(row, BadRow):
        return (row.code, row.raw) == (value, line)
    return repr(row) == repr(value)  # tells 1 from 1.0 and True, and 0.0 from -0.0


def _check_columns(dataset: DataSet, found: Sequence[Place]) -> None:
    """The second pass has the same values, and they come out as they went in."""
    whole = tables(dataset, found)
    names = list(dict.fromkeys(name for place in found if isinstance(place.row, dict) for name in place.row))
    assert whole.schema.names == names == dataset.columns_seen()
    back = through_output(whole)
    for name in names:
        field = whole.schema.field(name)
        is_text = field.metadata is not None and field.metadata.items() >= JSON_TEXT.items()
        for place, got in zip(found, back.column(names.index(name)).to_pylist(), strict=True):
            value = place.row.get(name) if isinstance(place.row, dict) else None
            if is_text and value is not None:
                got = json.loads(got)
                assert repr(got) == repr(value), f"{name} of {place}: {got!r}"
            else:
                assert _holds(got, value), f"{name} of {place}: {got!r}"


def _holds(got: Any, value: Any) -> bool:
    """Whether a typed value is that of JSON: records have all keys, whole numbers may stand among others."""
    if isinstance(value, dict):
        return got.keys() >= value.keys() and all(_holds(inner, value.get(key)) for key, inner in got.items())
    if isinstance(value, list):
        return len(got) == len(value) and all(_holds(a, b) for a, b in zip(got, value, strict=True))
    if isinstance(got, float) and type(value) is int:
        return got == value
    return repr(got) == repr(value)


# ---- Parquet, against pyarrow's plain reader ----


def check_parquet(rng: random.Random, folder: Path) -> str:
    """One data set of Parquet; returns how it came out."""
    written = parquet_tables(rng)
    paths = [folder / f"part-{i}.parquet" for i in range(len(written))]
    for path, table in zip(paths, written, strict=True):
        write_parquet(rng, table, path)
    stored = [pq.ParquetFile(path).read() for path in paths]
    damaged = rng.random() < 0.4
    if damaged:
        damage(rng, rng.choice(paths))
    dataset = open_dataset(["."], folder)
    columns: Sequence[str] | None = None
    refused = ""
    try:
        known = dataset.known_columns()
        assert known is not None
        columns = None if rng.random() < 0.5 else [name for name in known if rng.random() < 0.5]
        found = read(dataset, columns)
        whole = tables(dataset, found)
    except InputError as error:
        refused = str(error)
    if refused:
        assert any(path.name in refused for path in paths), refused
        assert damaged or _clash(refused, stored), refused
        return "refused"
    if not damaged:
        _check_parquet(dataset, found, whole, stored, columns)
        _check_output(whole)
    return "damaged" if damaged else "read"


def _clash(message: str, stored: Sequence[pa.Table]) -> bool:
    return len(stored) > 1 and ("rewrite one of the files so that they agree" in message or "cannot become" in message)


def _check_parquet(
    dataset: DataSet, found: Sequence[Place], whole: pa.Table, stored: Sequence[pa.Table], columns: Sequence[str] | None
) -> None:
    names = list(dict.fromkeys(name for table in stored for name in table.column_names))
    assert dataset.known_columns() == names
    places = [(f"part-{i}.parquet", p + 1) for i, table in enumerate(stored) for p in range(table.num_rows)]
    assert [(place.file, place.position) for place in found] == places
    first = 0
    wanted = [name for name in names if columns is None or name in columns]
    for table in stored:
        mine = whole.slice(first, table.num_rows)
        rows = [place.row for place in found[first : first + table.num_rows]]
        first += table.num_rows
        for name in names:
            got = mine.column(names.index(name))
            if name not in table.column_names or pa.types.is_null(table.schema.field(name).type):
                assert got.null_count == table.num_rows
                continue
            column = table.column(name)
            assert _kept(got, column), name
        _check_values(rows, table, wanted)


def _kept(got: pa.ChunkedArray, column: pa.ChunkedArray) -> bool:
    """Untouched where the type is the same, and else without loss, so that the way back leads to the same."""
    if got.type.equals(column.type):
        return _same_values(got, column)
    if pa.types.is_decimal(column.type):  # of 32 bits, it has no sound way back
        return bool(got.to_pylist() == column.to_pylist())
    if pa.types.is_dictionary(column.type):
        return _same_values(got.cast(column.type.value_type).cast(column.type), column)
    return _same_values(got.cast(column.type), column)


def _check_values(rows: Sequence[Row], table: pa.Table, wanted: Sequence[str]) -> None:
    for i, row in enumerate(rows):
        if isinstance(row, BadRow):
            assert row.code in ("bad_utf8", "bad_value"), row
            assert any(not _is_readable(table, name, i) for name in wanted if name in table.column_names), row
            continue
        assert list(row) == list(wanted)
        for name in wanted:
            if name not in table.column_names:
                assert row[name] is None
                continue
            scalar = table.column(name)[i]
            assert (row[name] is None) == (not scalar.is_valid)
            plain, is_plain = _plain(scalar)
            assert not is_plain or repr(row[name]) == repr(plain), f"{name}: {row[name]!r} is not {plain!r}"


def _plain(scalar: pa.Scalar) -> tuple[Any, bool]:
    """Python's value, and whether there is one."""
    if "[ns" in str(scalar.type):
        return None, False
    try:
        return scalar.as_py(), True
    except (ValueError, OverflowError, LookupError, pa.ArrowException):
        return None, False


def _is_readable(table: pa.Table, name: str, i: int) -> bool:
    return _plain(table.column(name)[i])[1]


def _check_output(whole: pa.Table) -> None:
    """What is read again, written as the output is and read once more is the same."""
    back = through_output(whole)
    assert _same_columns(back, whole), [
        (a, b) for a, b in zip(back.schema, whole.schema, strict=True) if not a.equals(b)
    ]


# ---- the tests ----

CHECKS: dict[str, Callable[[random.Random, Path], str]] = {"jsonl": check_jsonl, "parquet": check_parquet}


def run(kind: str, number: int, folder: Path) -> str:
    """Run one input in an empty folder."""
    return CHECKS[kind](random.Random(f"{kind} {number}"), folder)


@pytest.mark.parametrize("first", range(0, INPUTS // 2, _BLOCK))
@pytest.mark.parametrize("kind", CHECKS)
def test_no_random_input_breaks_a_reader_or_loses_a_row(kind: str, first: int, tmp_path: Path) -> None:
    for number in range(first, min(first + _BLOCK, INPUTS // 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            run(kind, number, folder)
        except BaseException as error:
            error.add_note(f"python -m tests.test_random_input {kind} {number} shows it")
            raise


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        try:
            print(run(sys.argv[1], int(sys.argv[2]), Path(place)))
        finally:
            for path in sorted(Path(place).iterdir()):
                print(f"{path.name}: {path.read_bytes()[:2000]!r}")
