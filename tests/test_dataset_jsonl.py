"""JSON Lines: what is a line, what is a row, what is a bad row, and which types the columns get."""

import gzip
import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkgen.dataset import JSON_TEXT, DataSet, json_rows, jsonl, open_dataset, streams
from bulkgen.dataset import lines as line_reading
from bulkgen.errors import InputError
from bulkgen.records import BadRow

Read = list[tuple[int, dict[str, Any] | BadRow]]


def data(tmp_path: Path, content: bytes, name: str = "in.jsonl") -> DataSet:
    (tmp_path / name).write_bytes(content)
    return open_dataset([name], tmp_path)


def read(dataset: DataSet) -> Read:
    found: Read = []
    for batch in dataset.rows(None):
        assert batch.first == len(found)
        assert 0 < len(batch.rows) <= 1024
        found.extend(zip(batch.positions, batch.rows, strict=True))
    return found


def read_back(dataset: DataSet) -> list[dict[str, Any]]:
    """The rows of the tables, after a check that they are of one schema and in step with rows()."""
    places = [(b.file, p) for b in dataset.rows(None) for p in b.positions]
    schema = dataset.schema()
    found: list[dict[str, Any]] = []
    table_places: list[tuple[str, int]] = []
    for batch in dataset.tables(schema):
        assert batch.first == len(found)
        assert batch.table.schema.equals(schema, check_metadata=True)
        batch.table.validate(full=True)
        found.extend(batch.table.to_pylist())
        table_places.extend((batch.file, p) for p in batch.positions)
    assert table_places == places
    return found


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def column(tmp_path: Path, *values: Any) -> tuple[pa.Field, list[Any]]:
    """The field and the values that a column `v` with these values gets."""
    dataset = data(tmp_path, lines(*({"v": value} for value in values)))
    back = [row["v"] for row in read_back(dataset)]
    return dataset.schema().field("v"), back


# ---- lines ----


def test_blank_lines_are_no_rows_but_are_counted(tmp_path: Path) -> None:
    content = b'{"id":"a"}\r\n\n \t\r\n{"id":"b","p":"two\\r\\nlines"}\r\n\x0b\n   \n{"id":"c"}'
    assert read(data(tmp_path, content)) == [
        (1, {"id": "a"}),
        (4, {"id": "b", "p": "two\r\nlines"}),
        (7, {"id": "c"}),
    ]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x7f", "\ufeff", "😀", "\\u0000", "\\f"])
def test_only_a_newline_ends_a_line(tmp_path: Path, character: str) -> None:
    text = f'{{"id":"a","p":"one{character}two"}}\n{{"id":"b"}}\n'
    rows = read(data(tmp_path, text.encode()))
    assert [row["p"] if i == 0 else row for i, (_, row) in enumerate(rows) if isinstance(row, dict)] == [
        json.loads(f'"one{character}two"'),
        {"id": "b"},
    ]


def test_a_byte_order_mark_is_dropped_at_the_start_and_between_files_put_together(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    rows = read(data(tmp_path, mark + b'{"id":"a"}\n{"id":"b"}\n' + mark + b'{"id":"c"}\n'))
    assert rows == [(1, {"id": "a"}), (2, {"id": "b"}), (3, {"id": "c"})]
    assert read(data(tmp_path, mark)) == []
    content = mark * 2 + b'{"id":"a"}\r\n' + mark + b"\r\n" + mark * 2 + b" \n" + mark + b'{"id":"b"}\n' + mark
    assert read(data(tmp_path, content)) == [(1, {"id": "a"}), (4, {"id": "b"})]
    (_, bad), *_ = read(data(tmp_path, b"\n" + mark + b"{\n"))
    assert isinstance(bad, BadRow)
    assert bad.raw == mark + b"{"


def test_utf16_is_refused_as_such(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"in.jsonl: encoded as UTF-16"):
        read(data(tmp_path, '{"id":"a"}\n'.encode("utf-16")))


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64, 1 << 20])
def test_lines_are_the_same_whatever_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(streams, "BLOCK_BYTES", block)
    content = '{"a":"ä"}\n\n\r\n{"a":"b"}\n{"a":\n\n{"a":"last"}'.encode()
    rows = read(data(tmp_path, content))
    assert [place for place, _ in rows] == [1, 4, 5, 7]
    assert [row["a"] for _, row in rows if isinstance(row, dict)] == ["ä", "b", "last"]


def test_a_very_long_line_is_one_row(tmp_path: Path) -> None:
    text = "x" * (20 << 20)
    dataset = data(tmp_path, lines({"p": "a"}, {"p": text}, {"p": "b"}))
    assert [len(row["p"]) for _, row in read(dataset) if isinstance(row, dict)] == [1, len(text), 1]
    assert [len(row["p"]) for row in read_back(dataset)] == [1, len(text), 1]


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_a_line_that_is_too_long_is_one_bad_row_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(line_reading, "MAX_LINE_BYTES", 2 << 20)
    most = b'{"p":"' + b"x" * ((2 << 20) - 8) + b'"}'
    rest = [b"x" + most, b'{"p":"b"}', most, b"[" + b"1," * (3 << 20), b'{"p":"c"}', b"[" + b"1," * (3 << 20)]
    content = b"\n".join([b'{"p":"a"}', *rest])
    dataset = data(tmp_path, gzip.compress(content, 1) if name.endswith("gz") else content, name)
    rows = read(dataset)
    assert [place for place, _ in rows] == [1, 2, 3, 4, 5, 6, 7]
    bad = [row for _, row in rows if isinstance(row, BadRow)]
    assert [(row.code, row.raw) for row in bad] == [("line_too_long", None)] * 3
    assert bad[0].message.startswith("the line has 2,097,153 bytes, a row may have 2 MiB")
    assert [len(row["p"]) for _, row in rows if isinstance(row, dict)] == [1, 1, (2 << 20) - 8, 1]
    assert [row["p"] is None for row in read_back(dataset)] == [False, True, False, False, True, False, True]


def test_how_deep_a_row_may_be_does_not_hang_on_who_reads_it(tmp_path: Path) -> None:
    levels = [json_rows.MAX_DEPTH - 1, json_rows.MAX_DEPTH, 900, 960, 990]
    content = b"".join(b'{"v":' + b"[" * n + b"]" * n + b"}\n" for n in levels)
    dataset = data(tmp_path, content)

    def read_from(depth: int) -> list[bool]:
        return read_from(depth - 1) if depth else [isinstance(row, BadRow) for _, row in read(dataset)]

    assert read_from(0) == read_from(300) == [False, True, True, True, True]
    assert [row["v"] is None for row in read_back(dataset)] == [False, True, True, True, True]
    wide = b'{"v":[' + b"[]," * 9999 + b"[]]}\n"
    assert [isinstance(row, dict) for _, row in read(data(tmp_path, wide))] == [True]


# ---- bad rows ----


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (b'{"id":"b", "p":', "bad_json", "Expecting value at character 16 of the line; the line seems to be cut"),
        (b'{"id":"b", "p":"half', "bad_json", "Unterminated string.*seems to be cut off"),
        (b'{"id":"b"', "bad_json", "seems to be cut off"),
        (b'{"id":"b",}', "bad_json", "not valid JSON"),
        (b"\0" * 64, "bad_json", "not valid JSON: Expecting value at character 1"),
        (b'{"id":"x"}{"id":"y"}', "bad_json", "more than one JSON value on the line.*character 11"),
        (b'{"id":"b","v":NaN}', "bad_json", "NaN is not JSON"),
        (b'{"id":"b","v":[-Infinity]}', "bad_json", "-Infinity is not JSON"),
        (b'{"id":"b","v":1e999}', "bad_json", "1e999 is beyond the range of a double"),
        (b'{"id":"b","v":' + b"9" * 5000 + b"}", "bad_json", "digits"),
        (b'{"v":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "bad_json", "nested more than 500 levels deep"),
        (b'{"id":"b","p":"caf\xe9"}', "bad_utf8", "invalid continuation byte at byte 19 of the line"),
        (b'{"id":"b","p":"\xc0\xaf"}', "bad_utf8", "invalid start byte"),
        (b'{"id":"b","p":"half \xc3', "bad_utf8", "unexpected end of data"),
        (b'{"id":"b","p":"\\ud83d"}', "bad_unicode", r"\\ud83d, half of a surrogate pair"),
        (b'{"id":"b","p":"\\uDE00\\ud83d"}', "bad_unicode", r"\\ude00, half"),
        (b'{"id":"b","p":"\\\\ud83d\\ude00"}', "bad_unicode", r"\\ude00, half"),
        (b'{"id":"b","\\ud83d\\ud83d\\ude00":1}', "bad_unicode", r"\\ud83d, half"),
        (b"[1,2]", "not_an_object", "holds a list"),
        (b'"text"', "not_an_object", "holds a string"),
        (b"null", "not_an_object", "holds null"),
        (b"42", "not_an_object", "holds a number"),
        (b"true", "not_an_object", "holds true or false"),
    ],
)
def test_a_bad_line_is_one_bad_row_and_the_others_are_read(
    tmp_path: Path, line: bytes, code: str, message: str
) -> None:
    for ending in (b"\n", b"\r\n", b""):
        after = b'{"id":"c"}\n' if ending else b""
        dataset = data(tmp_path, b'{"id":"a"}\n' + line + ending + after)
        rows = read(dataset)
        assert rows[0] == (1, {"id": "a"})
        assert rows[2:] == ([(3, {"id": "c"})] if ending else [])
        place, bad = rows[1]
        assert place == 2
        assert isinstance(bad, BadRow)
        assert bad.code == code
        assert re.search(message, bad.message), bad.message
        assert bad.raw == line
        assert read_back(dataset)[1] == {"id": None}
        assert dataset.columns_seen() == ["id"]


def test_escaped_pairs_and_backslashes_are_no_halves(tmp_path: Path) -> None:
    content = b'{"a":"\\ud83d\\ude00"}\n{"a":"\\\\ud83d"}\n{"a":"\\uD83D\\uDE00\\ud83d\\ude00"}\n'
    assert [row for _, row in read(data(tmp_path, content))] == [{"a": "😀"}, {"a": "\\ud83d"}, {"a": "😀😀"}]


def test_of_a_repeated_key_the_last_value_counts(tmp_path: Path) -> None:
    assert read(data(tmp_path, b'{"p":"first","p":"second"}\n')) == [(1, {"p": "second"})]


# ---- compression ----


def packed(name: str, content: bytes) -> bytes:
    if name == "gz":
        return gzip.compress(content)
    found: bytes = pa.compress(content, "zstd", asbytes=True)
    return found


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_all_members_and_frames_are_read(tmp_path: Path, suffix: str) -> None:
    content = lines(*({"id": i} for i in range(9)))
    cuts = [0, 20, 47, len(content)]  # within lines
    joined = b"".join(packed(suffix, content[a:b]) for a, b in pairwise(cuts))
    rows = read(data(tmp_path, joined, f"in.jsonl.{suffix}"))
    assert rows == [(i + 1, {"id": i}) for i in range(9)]
    assert read(data(tmp_path, packed(suffix, b""), f"in.ndjson.{suffix}")) == []


# ---- types ----

BIG = 2**63


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["a", None], pa.string()),
        ([True, None, False], pa.bool_()),
        ([1, -BIG, BIG - 1], pa.int64()),
        ([0, BIG], pa.uint64()),
        ([2**64 - 1], pa.uint64()),
        ([1.5, None], pa.float64()),
        ([1, 1.5, 2**53, -(2**53)], pa.float64()),
        ([None, None], pa.null()),
        ([[1, 2], [], None], pa.list_(pa.int64())),
        ([[], None], pa.list_(pa.null())),
        ([[None], [["a"]]], pa.list_(pa.list_(pa.string()))),
        ([{"a": 1}, {"b": "x", "a": None}], pa.struct([("a", pa.int64()), ("b", pa.string())])),
        ([[{"a": {"": 1.0}}]], pa.list_(pa.struct([("a", pa.struct([("", pa.float64())]))]))),
    ],
)
def test_a_column_gets_the_type_that_holds_its_values(tmp_path: Path, values: list[Any], expected: pa.DataType) -> None:
    field, back = column(tmp_path, *values)
    assert field.type.equals(expected)
    assert field.metadata is None
    if not pa.types.is_nested(expected) or not any(isinstance(v, dict) for v in values):
        assert back == values
    pq.write_table(pa.table([pa.array(back, expected)], pa.schema([field])), tmp_path / "out.parquet")


@pytest.mark.parametrize(
    "values",
    [
        [1, "1", 1.0, True, None],
        [1, True],
        ["a", ["a"]],
        [{"a": 1}, {"a": "x"}],
        [[1, "é"], None],
        [BIG, -1],
        [2**64],
        [123456789012345678901234567890, 5],
        [2**53 + 1, 0.5],
        [-(2**53) - 1, 0.5],
        [{}, None],
        [[{}]],
        [[{"content": "text"}], [{"content": [{"type": "text", "text": "part"}]}]],
    ],
)
def test_values_of_no_common_type_become_json_text(tmp_path: Path, values: list[Any]) -> None:
    field, back = column(tmp_path, *values)
    assert field.type.equals(pa.string())
    assert field.metadata == JSON_TEXT
    assert back == [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]


def test_the_mark_of_a_json_column_survives_serialization(tmp_path: Path) -> None:
    dataset = data(tmp_path, lines({"v": 1}, {"v": "1"}))
    read(dataset)
    schema = pa.ipc.read_schema(pa.py_buffer(dataset.schema().serialize().to_pybytes()))
    again = open_dataset(["in.jsonl"], tmp_path)  # as the merge of a later process does, without rows()
    assert [row for batch in again.tables(schema) for row in batch.table.to_pylist()] == [
        {"v": "1"},
        {"v": '"1"'},
    ]


def test_free_form_objects_become_json_text(tmp_path: Path) -> None:
    field, back = column(tmp_path, *({f"key {i}": i} for i in range(1500)))
    assert field.metadata == JSON_TEXT
    assert back[1400] == '{"key 1400": 1400}'
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    field, back = column(tmp_path, deep, deep)
    assert field.metadata == JSON_TEXT
    assert json.loads(back[1]) == deep


def test_too_many_columns_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_COLUMNS", 50)
    with pytest.raises(InputError, match=r"in.jsonl: more than 50 different keys by line 60"):
        read(data(tmp_path, lines(*({f"k{i}": 1} for i in range(60)))))


def test_keys_of_all_rows_of_all_files_are_columns_in_the_order_of_their_first_appearance(tmp_path: Path) -> None:
    data(tmp_path, lines(*[{"b": 1}] * 3000, {"late": "x", "b": None}), "in-1.jsonl")
    data(tmp_path, lines({"a.b": 1, "": 2, "b": 0.5}), "in-2.jsonl")
    data(tmp_path, b"\n", "in-3.jsonl")
    dataset = open_dataset(["in-*.jsonl"], tmp_path)
    assert dataset.known_columns() is None
    back = read_back(dataset)
    assert dataset.columns_seen() == ["b", "late", "a.b", ""]
    assert [str(field.type) for field in dataset.schema()] == ["double", "string", "int64", "int64"]
    assert back[3000] == {"b": None, "late": "x", "a.b": None, "": None}
    assert back[3001] == {"b": 0.5, "late": None, "a.b": 1, "": 2}
    assert len(back) == 3002


def test_rows_hold_all_keys_whatever_columns_are_asked_for(tmp_path: Path) -> None:
    dataset = data(tmp_path, lines({"a": 1, "b": 2}))
    assert [batch.rows for batch in dataset.rows(["a"])] == [[{"a": 1, "b": 2}]]


@pytest.mark.parametrize(("content", "count"), [(b"", 0), (b"\n\n", 0), (b"{}\nnull\n{}", 3)])
def test_files_without_columns(tmp_path: Path, content: bytes, count: int) -> None:
    dataset = data(tmp_path, content)
    assert len(read(dataset)) == count
    assert dataset.schema().names == []
    assert sum(batch.table.num_rows for batch in dataset.tables(dataset.schema())) == count


def test_the_columns_are_not_told_before_all_rows_were_read(tmp_path: Path) -> None:
    dataset = data(tmp_path, lines(*[{"a": 1}] * 2000))
    for unread in (dataset.schema, dataset.columns_seen):
        with pytest.raises(RuntimeError, match="when all its rows have been read"):
            unread()
    reading = dataset.rows(None)
    next(reading)
    with pytest.raises(RuntimeError, match="when all its rows have been read"):
        dataset.schema()
    assert sum(len(batch.rows) for batch in reading) == 2000 - 1024
    assert dataset.columns_seen() == ["a"]


def test_batches_are_bounded_in_rows_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "BYTES_PER_BATCH", 1000)
    monkeypatch.setattr(jsonl, "BYTES_PER_TABLE", 10_000)
    monkeypatch.setattr(jsonl, "CELLS_PER_TABLE", 60)
    dataset = data(tmp_path, lines(*[{"a": "x" * 90, "b": 1}] * 100))
    assert {len(batch.rows) for batch in dataset.rows(None)} == {10}
    assert [batch.table.num_rows for batch in dataset.tables(dataset.schema())] == [30, 30, 30, 10]


def test_a_file_that_was_changed_after_reading_is_told(tmp_path: Path) -> None:
    dataset = data(tmp_path, lines({"a": 1}))
    read(dataset)
    data(tmp_path, lines({"a": "text"}))
    with pytest.raises(InputError, match=r"in.jsonl: lines 1 to 1 do not have the types"):
        list(dataset.tables(dataset.schema()))
    (tmp_path / "in.jsonl").unlink()
    with pytest.raises(InputError, match=r"in.jsonl: cannot be read \(No such file or directory\)"):
        read(dataset)


def test_random_rows_come_back_as_they_were(tmp_path: Path) -> None:
    draw = random.Random(5)

    def value(depth: int = 0) -> Any:
        scalars = [None, True, 7, -(2**40), 2**70, 0.25, "é\u2028\0", ""]
        choice = draw.randrange(12 if depth < 3 else 8)
        if choice < 8:
            return scalars[choice]
        if choice < 10:
            return [value(depth + 1) for _ in range(draw.randrange(3))]
        return {draw.choice("abc"): value(depth + 1) for _ in range(draw.randrange(3))}

    rows = [{name: value() for name in "uvwxyz" if draw.random() < 0.8} for _ in range(3000)]
    dataset = data(tmp_path, lines(*rows))
    assert [row for _, row in read(dataset)] == rows
    for row, back in zip(rows, read_back(dataset), strict=True):
        assert all(json.loads(back[k]) == v for k, v in row.items() if v is not None)
