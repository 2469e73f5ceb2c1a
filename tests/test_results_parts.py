"""Part files and refused rows: whole or not there, and readable to the last byte of a key."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkgen.errors import OutputError
from bulkgen.records import Completion, Failure, RefusedRow, Sample
from bulkgen.results import (
    PART_SCHEMA,
    About,
    PartRow,
    RefusedWriter,
    done_row,
    failed_row,
    parts,
    read_keys,
    write_part,
)
from bulkgen.results.columns import as_column
from bulkgen.results.refused import read_refused


def key(number: int) -> bytes:
    """Little end first, so that most keys end in zero bytes."""
    return number.to_bytes(16, "little")


def done(number: int, text: str = "text") -> PartRow:
    return done_row(About(key=key(number), shard=3), Completion(number, text, "stop", 10, 2, 5, 0.1, 0.2, None, 0.4))


def test_a_part_holds_what_it_was_given(tmp_path: Path) -> None:
    rows = [done(1, "é\n\0"), failed_row(About(key=key(2), shard=4), Failure(2, "refused_by_engine", "no"))]
    write_part(tmp_path, "part.parquet", rows)
    table = pq.read_table(tmp_path / "part.parquet")
    assert table.schema.equals(PART_SCHEMA)
    assert [tuple(row.values()) for row in table.to_pylist()] == [tuple(row) for row in rows]


@pytest.mark.parametrize(
    ("texts", "warnings"), [(["a", "b"], None), (["", "b"], ["empty_output"]), (["a", ""], ["empty_output"])]
)
def test_a_row_of_several_answers_counts_them_and_says_that_one_is_empty(
    texts: list[str], warnings: list[str] | None
) -> None:
    samples = tuple(Sample(i, text, "stop", 1) for i, text in enumerate(texts))
    row = done_row(
        About(key=key(1), shard=0), Completion(1, texts[0], "stop", 1, 0, 2, 0.1, 0.2, None, 0.4, samples=samples)
    )
    assert (row.answers, row.warnings) == (2, warnings)
    assert (done(1).answers, done(1, "").warnings) == (1, ["empty_output"])
    assert failed_row(About(key=key(1), shard=0), Failure(1, "code", "m")).answers is None


def test_long_answers_of_a_row_are_chunked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_CHUNK_CHARACTERS", 1000)
    sizes: list[int] = []

    def noted(values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
        sizes.append(len(values))
        return as_column(values, arrow_type)

    monkeypatch.setattr("bulkgen.results.parts.as_column", noted)
    samples = tuple(Sample(i, "x" * 300, "stop", 1) for i in range(2))
    answer = Completion(1, "", "stop", 1, 0, 2, 0.1, 0.2, None, 0.4, samples=samples)
    write_part(tmp_path, "part.parquet", [done_row(About(key=key(i), shard=0), answer) for i in range(5)])
    assert set(sizes) == {1, 2}
    assert pq.read_table(tmp_path / "part.parquet").num_rows == 5


def test_a_part_is_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str]]] = []
    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        seen.append((str(Path(f"/proc/self/fd/{fd}").readlink()), sorted(p.name for p in tmp_path.iterdir())))
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    write_part(tmp_path, "part.parquet", [done(1)])
    assert seen[-2:] == [
        (str(tmp_path / ".tmp-part.parquet"), [".tmp-part.parquet"]),
        (str(tmp_path), ["part.parquet"]),
    ]


def test_keys_come_back_with_their_trailing_zeros(tmp_path: Path) -> None:
    write_part(tmp_path, "part.parquet", [done(i) for i in (0, 256, 7)])
    keys = read_keys(tmp_path / "part.parquet").tolist()
    assert [bytes(k).ljust(16, b"\0") for k in keys] == [key(i) for i in (0, 256, 7)]


@pytest.mark.parametrize("content", [None, b"PAR1 not really", b""])
def test_a_part_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "part.parquet").write_bytes(content)
    with pytest.raises(OutputError, match=r"part\.parquet"):
        read_keys(tmp_path / "part.parquet")


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"gone/part\.parquet"):
        write_part(tmp_path / "gone", "part.parquet", [done(1)])


def test_refused_rows_stream_through(tmp_path: Path) -> None:
    rows = [RefusedRow(i, key(i), "f", i + 1, "bad_json", "torn \udcff", None, b"\xff" * i, i) for i in range(10_000)]
    writer = RefusedWriter(tmp_path / "refused.parquet")
    for start in range(0, len(rows), 999):
        writer.add(rows[start : start + 999])
    writer.close()
    assert writer.rows == 10_000
    back = [row for table in read_refused(tmp_path / "refused.parquet") for row in table.to_pylist()]
    assert [row["ordinal"] for row in back] == list(range(10_000))
    assert back[3]["raw"] == b"\xff" * 3
    assert back[3]["message"] == "torn \\udcff"
