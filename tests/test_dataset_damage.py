"""Damaged files: what can be read of them is read, one row says where that ends, and the other files go on."""

import contextlib
import errno
import gzip
import json
import os
import random
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkgen.dataset import DataSet, open_dataset, row_groups, streams
from bulkgen.dataset.damage import Damage
from bulkgen.errors import InputError
from bulkgen.records import BadRow

CURE = "fetch or write the file again, then run again"


def read(dataset: DataSet, columns: list[str] | None = None) -> list[tuple[str, int, dict[str, Any] | BadRow]]:
    """All rows with their places, after a check that tables have the same ones, in this process and in another."""
    found = [(b.file, p, row) for b in dataset.rows(columns) for p, row in zip(b.positions, b.rows, strict=True)]
    bad = {(file, place) for file, place, row in found if isinstance(row, BadRow)}
    schema = dataset.schema()
    for same in (dataset, DataSet(dataset.files)):
        places: list[tuple[str, int]] = []
        for batch in same.tables(schema):
            assert batch.first == len(places)
            assert batch.table.schema.equals(schema, check_metadata=True)
            batch.table.validate(full=True)
            places += [(batch.file, p) for p in batch.positions]
            for place, row in zip(batch.positions, batch.table.to_pylist(), strict=True):
                assert (batch.file, place) not in bad or set(row.values()) <= {None}
        assert places == [(file, place) for file, place, _ in found]
    return found


def damages(found: list[tuple[str, int, dict[str, Any] | BadRow]]) -> list[tuple[str, int]]:
    """The places of damage, after a check of what stands there."""
    places = []
    for file, place, row in found:
        if isinstance(row, BadRow):
            assert (row.code, row.raw) == ("damaged_file", None)
            assert row.message.startswith(f"{file}: ")
            assert row.message.endswith(f"; {CURE}")
            assert "\n" not in row.message
            places.append((file, place))
    return places


# ---- JSON Lines ----


def noise(rows: int) -> bytes:
    draw = random.Random(rows)
    return b"".join(json.dumps({"id": i, "p": draw.random()}).encode() + b"\n" for i in range(rows))


def packed(suffix: str, content: bytes) -> bytes:
    if suffix == "gz":
        return gzip.compress(content, 1)
    found: bytes = pa.compress(content, "zstd", asbytes=True)
    return found


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("cut", [-1, -9, 100_000, 70_000, 2000])
def test_a_cut_file_is_read_up_to_the_cut(tmp_path: Path, suffix: str, cut: int) -> None:
    content = noise(10_000)
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(packed(suffix, b'{"id": "first"}\n') + packed(suffix, content)[:cut])
    (tmp_path / "b.jsonl").write_bytes(b'{"id": "last"}\n')
    found = read(open_dataset(["."], tmp_path))
    read_before = len(found) - 2
    assert damages(found) == [(f"a.jsonl.{suffix}", read_before + 1)]
    assert [row for _, _, row in found[1:read_before]] == [
        json.loads(x) for x in content.splitlines()[: read_before - 1]
    ]
    assert found[-1] == ("b.jsonl", 1, {"id": "last"})
    if suffix == "gz" and cut < 0:
        assert read_before == 10_001  # all there is, but the file's own check at its end is not
    if cut > 50_000:
        assert read_before > cut // 30


def test_all_that_zlib_can_give_is_read(tmp_path: Path) -> None:
    draw = random.Random(8)
    whole = gzip.compress(noise(6000), 6)
    for _ in range(6):
        broken = bytearray(whole[: draw.randrange(20, len(whole))])
        if draw.random() < 0.6:
            broken[draw.randrange(20, len(broken))] ^= 0xFF
        (tmp_path / "in.jsonl.gz").write_bytes(broken)
        inflate, inflated = zlib.decompressobj(31), bytearray()
        try:
            for byte in broken:
                inflated += inflate.decompress(bytes([byte]))
        except zlib.error:
            pass
        dataset = open_dataset(["."], tmp_path)
        given = bytearray()
        with contextlib.suppress(Damage):
            for block in streams.read_blocks(dataset.files[0]):
                given += block
        assert given == inflated


def test_a_torn_last_line_of_a_cut_file_is_no_row_even_if_it_looks_like_one(tmp_path: Path) -> None:
    squeeze = zlib.compressobj(wbits=31)
    content = squeeze.compress(b'{"id": 1}\n\n{"id": 2}') + squeeze.flush(zlib.Z_SYNC_FLUSH)
    (tmp_path / "in.jsonl.gz").write_bytes(content)
    found = read(open_dataset(["."], tmp_path))
    assert found[:-1] == [("in.jsonl.gz", 1, {"id": 1})]
    assert damages(found) == [("in.jsonl.gz", 3)]
    whole = content + squeeze.flush()
    (tmp_path / "in.jsonl.gz").write_bytes(whole)
    assert [row for _, _, row in read(open_dataset(["."], tmp_path))] == [{"id": 1}, {"id": 2}]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_rows_before_the_damage_keep_their_places_when_the_file_is_mended(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.jsonl.{suffix}"
    whole = packed(suffix, b"\n\r\n" + noise(20_000))
    path.write_bytes(whole[: len(whole) // 2])
    before = read(open_dataset(["."], tmp_path))
    path.write_bytes(whole)
    after = read(open_dataset(["."], tmp_path))
    assert 3000 < len(before) < 19_000
    assert before[:-1] == after[: len(before) - 1]
    assert damages(after) == []


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_broken_checksum_and_what_follows_the_end_are_damage(tmp_path: Path, suffix: str) -> None:
    whole = packed(suffix, noise(50))
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    for content in [whole + b"garbage", whole + b"\0" * 512, *([bytes(flipped)] if suffix == "gz" else [])]:
        (tmp_path / f"in.jsonl.{suffix}").write_bytes(content)
        found = read(open_dataset(["."], tmp_path))
        assert len(found) == 51
        assert damages(found) == [(f"in.jsonl.{suffix}", 51)]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_files_of_which_nothing_can_be_read_end_a_job_only_if_there_are_no_others(tmp_path: Path, suffix: str) -> None:
    contents = [b"", packed(suffix, noise(5))[:5], noise(50)]  # the last one is not compressed at all
    for i, content in enumerate(contents):
        (tmp_path / f"{i}.jsonl.{suffix}").write_bytes(content)
        with pytest.raises(InputError, match=rf"^{i}.jsonl.{suffix}: cannot be read from line 1 on \(.*; {CURE}$"):
            list(open_dataset([f"{i}.jsonl.{suffix}"], tmp_path).rows(None))
    dataset = open_dataset(["."], tmp_path)
    with pytest.raises(InputError, match=rf"^0.jsonl.{suffix}: .*no bytes at all.* \(and nothing in 2 more\)$"):
        list(dataset.rows(None))
    with pytest.raises(RuntimeError):
        dataset.schema()
    (tmp_path / "empty.jsonl").write_bytes(b"")
    found = read(open_dataset(["."], tmp_path))
    assert damages(found) == [(f"{i}.jsonl.{suffix}", 1) for i in range(3)]


# ---- Parquet ----


def table(first: int, rows: int) -> pa.Table:
    ids = range(first, first + rows)
    return pa.table({"id": [f"r{i}" for i in ids], "prompt": [f"text {i * 7919}" for i in ids], "n": list(ids)})


def spoil(path: Path, group: int, column: int) -> None:
    """Flip a byte within the data of one column of one row group."""
    chunk = pq.read_metadata(path).row_group(group).column(column)
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("groups", [[0], [1], [3], [0, 3], [1, 2]])
def test_a_damaged_row_group_is_one_bad_row_and_the_others_are_read(
    tmp_path: Path, groups: list[int], column: int
) -> None:
    path = tmp_path / "a.parquet"
    whole = table(0, 350)
    pq.write_table(whole, path, row_group_size=100, write_page_checksum=True, use_dictionary=False)
    for group in groups:
        spoil(path, group, column)
    pq.write_table(table(900, 2), tmp_path / "b.parquet")
    found = read(open_dataset(["."], tmp_path), ["id"])  # whichever columns are read
    expected: list[tuple[str, int]] = []
    for group in range(4):
        rows = range(100 * group, min(350, 100 * group + 100))
        expected += [("a.parquet", i + 1) for i in (rows[:1] if group in groups else rows)]
    assert [(file, place) for file, place, _ in found] == [*expected, ("b.parquet", 1), ("b.parquet", 2)]
    assert damages(found) == [("a.parquet", 100 * group + 1) for group in groups]
    assert [row["id"] for _, _, row in found if isinstance(row, dict)] == [
        *(f"r{i}" for i in range(350) if i // 100 not in groups),
        *("r900", "r901"),
    ]
    bad = next(row for _, _, row in found if isinstance(row, BadRow))
    assert f"the {50 if groups[0] == 3 else 100} rows from row {100 * groups[0] + 1} on" in bad.message


def test_values_beside_damage_come_out_as_they_went_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = pa.schema([pa.field("id", pa.string(), nullable=False), pa.field("n", pa.int64(), nullable=False)])
    path = tmp_path / "a.parquet"
    whole = table(0, 5000).select(["id", "n"]).cast(strict)
    pq.write_table(whole, path, row_group_size=1000, write_page_checksum=True, use_dictionary=False)
    spoil(path, 2, 1)
    for held in (row_groups.BYTES_HELD, 1000):
        monkeypatch.setattr(row_groups, "BYTES_HELD", held)
        dataset = open_dataset(["."], tmp_path)
        rows = [row for _, _, row in read(dataset)]
        assert all(field.nullable for field in dataset.schema())
        back = pa.Table.from_batches([batch.table for batch in dataset.tables(dataset.schema())])
        expected = whole.to_pylist()
        assert rows[:2000] + rows[2001:] == expected[:2000] + expected[3000:]
        assert back.to_pylist() == [*expected[:2000], {"id": None, "n": None}, *expected[3000:]]
        pq.write_table(back, tmp_path / "out.table")


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b'{"id": 1}\n', b"PAR1" + b"\0" * 100 + b"PAR1", b"PAR1" + b"x" * 99 + b"\xff\0\0\0PAR1"]
)
@pytest.mark.parametrize("first", [True, False])
def test_a_file_without_a_footer_is_one_bad_row_and_has_no_columns(tmp_path: Path, content: bytes, first: bool) -> None:
    strict = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    pq.write_table(pa.table({"id": [1, 2]}, strict), tmp_path / "b.parquet")
    name = "a.parquet" if first else "c.parquet"
    (tmp_path / name).write_bytes(content)
    dataset = open_dataset(["."], tmp_path)
    assert dataset.known_columns() == ["id"]
    found = read(dataset, ["id"])
    assert damages(found) == [(name, 1)]
    assert "not a Parquet file that can be read (" in next(r.message for _, _, r in found if isinstance(r, BadRow))
    assert [row for _, _, row in found if isinstance(row, dict)] == [{"id": 1}, {"id": 2}]
    assert dataset.schema().field("id").nullable


def test_a_cut_parquet_file_is_one_bad_row_wherever_it_is_cut(tmp_path: Path) -> None:
    pq.write_table(table(0, 50), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    pq.write_table(table(50, 5), tmp_path / "b.parquet")
    for cut in [*range(0, len(whole), 97), len(whole) - 1]:
        (tmp_path / "a.parquet").write_bytes(whole[:cut])
        found = read(open_dataset(["."], tmp_path))
        assert damages(found) == [("a.parquet", 1)]
        assert len(found) == 6
    (tmp_path / "a.parquet").write_bytes(whole)
    assert len(read(open_dataset(["."], tmp_path))) == 55


def test_parquet_files_of_which_nothing_can_be_read_end_a_job_only_if_there_are_no_others(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet"):
        (tmp_path / name).write_bytes(b"")
    dataset = open_dataset(["."], tmp_path)
    message = rf"^a.parquet: not a Parquet file that can be read \(.*0 bytes\); {CURE} \(and nothing in 1 more\)$"
    with pytest.raises(InputError, match=message):
        dataset.known_columns()
    with pytest.raises(InputError, match=message):
        next(dataset.rows(None))
    path = tmp_path / "b.parquet"
    pq.write_table(table(0, 150), path, row_group_size=100, write_page_checksum=True, use_dictionary=False)
    spoil(path, 0, 0)
    assert damages(read(open_dataset(["."], tmp_path))) == [("a.parquet", 1), ("b.parquet", 1)]
    spoil(path, 1, 0)
    with pytest.raises(InputError, match=r"^a.parquet: .*more\)$"):
        list(open_dataset(["."], tmp_path).rows(None))


# ---- no damage ----


class FailingDisk:
    """A file on a disk that fails after so many reads."""

    def __init__(self, path: bytes, error: OSError, reads: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: PTH123, SIM115  # bytes
        self._error, self._reads = error, reads

    def read(self, size: int) -> bytes:
        self._reads -= 1
        if self._reads < 0:
            raise self._error
        return self._file.read(size) or b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_what_the_system_says_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(table(0, 20_000), path, use_dictionary=False, row_group_size=1000)
    else:
        suffix = name.removeprefix("a.jsonl").removeprefix(".")
        path.write_bytes(packed(suffix, noise(20_000)) if suffix else noise(100_000))
    dataset = open_dataset(["."], tmp_path)
    dataset.known_columns()
    error = OSError(number, "as the system says")
    for reads in (0, 1, 2):
        opened = partial(FailingDisk, error=error, reads=reads)
        with monkeypatch.context() as patched:
            patched.setattr(pa, "OSFile", lambda path, opened=opened: pa.PythonFile(opened(path), "r"))
            message = rf"^{name}: cannot be read \({os.strerror(number)}\); check the file and its rights$"
            with pytest.raises(InputError, match=message):
                list(dataset.rows(None))
            with pytest.raises(InputError, match=message):
                list(dataset.tables(pa.schema([("other", pa.string())])))
    path.unlink()
    with pytest.raises(InputError, match=rf"^{name}: cannot be read \(No such file or directory\)"):
        list(dataset.rows(None))


def test_a_lack_of_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(table(0, 5), tmp_path / "a.parquet")
    dataset = open_dataset(["."], tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 9 failed")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fail)
    with pytest.raises(InputError, match=r"^a.parquet: takes more memory than there is \(malloc of size 9 failed\)"):
        list(dataset.rows(None))


@pytest.mark.parametrize("number", [b"\x99\x01", b"\x98\x01"])  # -77 and 76 as a footer spells them
def test_a_footer_that_miscounts_rows_gives_no_two_rows_one_place(tmp_path: Path, number: bytes) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(87)}), path, row_group_size=77)
    pq.write_table(pa.table({"id": [99]}), tmp_path / "b.parquet")
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    path.write_bytes(content[:footer] + content[footer:].replace(b"\x9a\x01", number))
    found = read(open_dataset(["."], tmp_path))
    assert damages(found) == [("a.parquet", 1)]
    assert found[1:] == [("b.parquet", 1, {"id": 99})]
