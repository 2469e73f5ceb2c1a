"""Parquet: rows and tables as the files have them, parts that differ, names of all kinds, damage."""

import datetime as dt
import decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkgen.dataset import DataSet, open_dataset, parquet
from bulkgen.dataset.arrow_types import merge_types
from bulkgen.errors import InputError
from bulkgen.records import BadRow


def write(folder: Path, *tables: pa.Table, **settings: Any) -> DataSet:
    """A data set of one part a table."""
    for i, table in enumerate(tables):
        pq.write_table(table, folder / f"part-{i}.parquet", **settings)
    return open_dataset(["."], folder)


def rows(dataset: DataSet, columns: list[str] | None = None) -> list[dict[str, Any] | BadRow]:
    found: list[dict[str, Any] | BadRow] = []
    for batch in dataset.rows(columns):
        assert batch.first == len(found)
        assert len(batch.rows) == len(batch.positions)
        assert 0 < len(batch.rows) <= 1024
        found.extend(batch.rows)
    return found


def table(dataset: DataSet) -> pa.Table:
    """All tables in one, after a check that they are of one schema and in step with rows()."""
    places = [(b.file, p) for b in dataset.rows([]) for p in b.positions]
    schema = dataset.schema()
    batches = list(dataset.tables(schema))
    assert [(b.file, p) for b in batches for p in b.positions] == places
    assert [b.first for b in batches] == [sum(c.table.num_rows for c in batches[:i]) for i in range(len(batches))]
    for batch in batches:
        assert batch.table.schema.equals(schema, check_metadata=True)
        batch.table.validate(full=True)
    return pa.Table.from_batches([batch.table for batch in batches], schema)


EVERY_TYPE = {
    "bool": pa.array([True, None, False]),
    "int8": pa.array([1, None, -1], pa.int8()),
    "int64": pa.array([2**53 + 1, None, 2**53]),
    "uint64": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "half": pa.array([1.5, None, float("nan")], pa.float16()),
    "double": pa.array([0.1, None, float("-inf")]),
    "string": pa.array(["a\0b", None, ""]),
    "large": pa.array(["a", None, "\u2028"], pa.large_string()),
    "view": pa.array(["a", None, "a string that is too long for a view"], pa.string_view()),
    "binary": pa.array([b"\xff", None, b""]),
    "fixed": pa.array([b"ab", None, b"cd"], pa.binary(2)),
    "category": pa.array(["x", None, "x"]).dictionary_encode(),
    "small category": pa.array(["x", None, "y"], pa.dictionary(pa.int8(), pa.string(), ordered=True)),
    "decimal": pa.array([decimal.Decimal("1.20"), None, decimal.Decimal("-3.00")], pa.decimal128(20, 2)),
    "date": pa.array([dt.date(2024, 2, 29), None, dt.date(1, 1, 1)]),
    "stamp": pa.array([dt.datetime(2024, 1, 1), None, dt.datetime(1900, 1, 1)], pa.timestamp("us", "Europe/Berlin")),
    "nanos": pa.array([10**9, None, 5], pa.timestamp("ns")),
    "seconds": pa.array([1, None, 2], pa.time64("us")),
    "span": pa.array([1, None, 2], pa.duration("ms")),
    "list": pa.array([[1, None], None, []], pa.list_(pa.int32())),
    "large list": pa.array([["a"], None, []], pa.large_list(pa.string())),
    "struct": pa.array([{"a": 1, "b": {"c": "x"}}, None, {"a": None, "b": None}]),
    "messages": pa.array([[{"role": "user", "content": "hi"}], None, []]),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "null": pa.nulls(3),
}


def test_every_type_passes_untouched(tmp_path: Path) -> None:
    whole = pa.table(EVERY_TYPE)
    dataset = write(tmp_path, whole, row_group_size=2)
    stored = pq.read_table(tmp_path / "part-0.parquet")  # some types are stored as others
    found = table(dataset)
    assert found.schema.equals(stored.schema)
    assert found.schema.names == list(EVERY_TYPE)
    for name in EVERY_TYPE:
        if name != "half":  # NaN is not equal to itself
            assert found[name].cast(stored[name].type).equals(stored[name]), name
    for name in ("large", "view", "category", "uint64", "stamp"):
        assert found[name].type.equals(EVERY_TYPE[name].type), name


def test_rows_are_python_values(tmp_path: Path) -> None:
    first, second, third = rows(write(tmp_path, pa.table(EVERY_TYPE)))
    assert isinstance(first, dict)
    assert first["int64"] == 9007199254740993
    assert first["view"] == first["large"] == "a"
    assert first["category"] == "x"
    assert first["binary"] == b"\xff"
    assert first["messages"] == [{"role": "user", "content": "hi"}]
    assert first["nanos"] == dt.datetime(1970, 1, 1, 0, 0, 1)
    assert type(first["nanos"]) is dt.datetime
    assert second == dict.fromkeys(EVERY_TYPE)
    assert isinstance(third, dict)
    assert third["nanos"] == "1970-01-01 00:00:00.000000005"  # no datetime has nanoseconds


def test_what_python_has_no_value_for_is_text_and_bad_text_is_a_bad_row(tmp_path: Path) -> None:
    broken = pa.array([b"good", b"caf\xe9", None]).view(pa.string())
    far = pa.array([0, 0, 2**55], pa.timestamp("us"))
    dataset = write(tmp_path, pa.table({"text": broken, "far": far}))
    first, bad, last = rows(dataset)
    assert isinstance(first, dict)
    assert (first["text"], first["far"]) == ("good", dt.datetime(1970, 1, 1))
    assert isinstance(bad, BadRow)
    assert (bad.code, bad.raw) == ("bad_utf8", b"caf\xe9")
    assert bad.message.startswith("column 'text' is not valid UTF-8: ")
    assert isinstance(last, dict)
    assert str(last["far"]).startswith("3111-")
    assert all(isinstance(row, dict) for row in rows(dataset, ["far"]))


def test_a_value_that_cannot_even_be_text_is_a_bad_row(tmp_path: Path) -> None:
    zone = pa.array([0, None], pa.timestamp("s", "Nowhere/Land"))
    dataset = write(tmp_path, pa.table({"id": [1, 2], "at": zone}))
    bad, good = rows(dataset)
    assert isinstance(bad, BadRow)
    assert bad.code == "bad_value"
    assert "column 'at' holds a timestamp[" in bad.message
    assert good == {"id": 2, "at": None}
    assert table(dataset)["at"].null_count == 1


def test_only_the_wanted_columns_are_read(tmp_path: Path) -> None:
    dataset = write(tmp_path, pa.table({"a": [1, 2], "b": ["x", None], "c": [[1], []]}))
    assert rows(dataset, ["b", "a", "no such"]) == [{"a": 1, "b": "x"}, {"a": 2, "b": None}]
    assert rows(dataset, []) == [{}, {}]
    assert dataset.known_columns() == dataset.columns_seen() == ["a", "b", "c"]
    assert dataset.schema().names == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["a.b", "a", "b", "first name", "", "1st", "a.b.c", "é", "`x`", "items"])
def test_awkward_column_names(tmp_path: Path, name: str) -> None:
    columns: dict[str, list[Any]] = {
        "a.b": ["dotted"],
        "a": [{"b": 1, "b.c": 2, "c": 3}],
        "b": ["plain"],
        "a.b.c": ["twice"],
        "first name": [1],
        "": [2],
        "1st": [3],
        "é": [4],
        "`x`": [5],
        "items": [6],
        "Items": [7],
    }
    dataset = write(tmp_path, pa.table(columns))
    assert rows(dataset, [name]) == [{name: columns[name][0]}]
    assert table(dataset).to_pydict() == columns


def test_files_without_rows_or_columns(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.string())])
    empty = schema.empty_table()
    nameless = pa.table({"x": [1, 2]}).select([])
    dataset = write(tmp_path, empty, pa.table({"id": ["a"]}), nameless, empty)
    with pq.ParquetWriter(tmp_path / "part-9.parquet", schema):
        pass  # no row group
    dataset = open_dataset(["."], tmp_path)
    expected = [{"id": "a"}] + [{"id": None}] * pq.read_metadata(tmp_path / "part-2.parquet").num_rows
    assert rows(dataset) == expected
    assert table(dataset).to_pylist() == expected
    alone = open_dataset(["part-9.parquet"], tmp_path)
    assert rows(alone) == []
    assert alone.schema().equals(schema)


# ---- parts that differ ----


def test_parts_with_null_missing_and_further_columns(tmp_path: Path) -> None:
    parts = [
        pa.table({"id": ["a"], "note": pa.nulls(1)}),
        pa.table({"id": ["b"], "note": ["x"]}),
        pa.table({"note": ["y"], "extra": [1], "id": ["c"]}),
        pa.table({"id": ["d"]}),
    ]
    dataset = write(tmp_path, *parts)
    assert dataset.known_columns() == ["id", "note", "extra"]
    expected = [
        {"id": "a", "note": None, "extra": None},
        {"id": "b", "note": "x", "extra": None},
        {"id": "c", "note": "y", "extra": 1},
        {"id": "d", "note": None, "extra": None},
    ]
    assert rows(dataset) == expected
    assert table(dataset).to_pylist() == expected
    for i, part in enumerate(reversed(parts)):
        pq.write_table(part, tmp_path / f"part-{i}.parquet")
    assert table(open_dataset(["."], tmp_path)).to_pylist() == expected[::-1]


def test_text_of_all_kinds_goes_together(tmp_path: Path) -> None:
    kinds = ["string", "large", "view", "category"]
    dataset = write(tmp_path, *(pa.table({"p": EVERY_TYPE[kind]}) for kind in kinds))
    values = [value for kind in kinds for value in EVERY_TYPE[kind].to_pylist()]
    assert dataset.known_columns() == ["p"]
    found = table(dataset)
    assert found.schema.field("p").type == pa.large_string()
    assert found["p"].to_pylist() == [row["p"] for row in rows(dataset) if isinstance(row, dict)] == values


def test_a_dictionary_stays_one_where_all_parts_have_it(tmp_path: Path) -> None:
    part = pa.table({"p": pa.array(["x", "y"]).dictionary_encode()})
    other = pa.table({"p": pa.array(["z", "x"]).dictionary_encode()})
    found = table(write(tmp_path, part, other))
    assert pa.types.is_dictionary(found.schema.field("p").type)
    assert found["p"].to_pylist() == ["x", "y", "z", "x"]


def test_numbers_widen_without_loss(tmp_path: Path) -> None:
    parts = [
        pa.table({"a": pa.array([1], pa.int8()), "b": pa.array([1], pa.uint32()), "c": pa.array([1], pa.int32())}),
        pa.table({"a": pa.array([2**60]), "b": pa.array([-1], pa.int32()), "c": pa.array([0.5], pa.float32())}),
    ]
    found = table(write(tmp_path, *parts))
    assert [str(field.type) for field in found.schema] == ["int64", "int64", "double"]
    assert found.to_pylist() == [{"a": 1, "b": 1, "c": 1.0}, {"a": 2**60, "b": -1, "c": 0.5}]


def test_records_get_the_fields_of_all_parts(tmp_path: Path) -> None:
    parts = [
        pa.table({"m": [[{"role": "user", "content": "a"}]]}),
        pa.table({"m": [[{"name": "n", "content": "b", "n": {"x": 1}}], None]}),
        pa.table({"m": pa.array([[]], pa.list_(pa.null()))}),
    ]
    found = table(write(tmp_path, *parts))
    assert found["m"].to_pylist() == [
        [{"role": "user", "content": "a", "name": None, "n": None}],
        [{"role": None, "content": "b", "name": "n", "n": {"x": 1}}],
        None,
        [],
    ]


def test_clashing_parts_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    dataset = write(tmp_path, pa.table({"v": pa.nulls(1)}), pa.table({"v": [1]}), pa.table({"v": ["x"]}))
    message = r"part-2.parquet: column 'v' is string, in part-1.parquet it is int64; rewrite"
    with pytest.raises(InputError, match=message):
        dataset.known_columns()
    with pytest.raises(InputError, match=message):
        next(dataset.rows(None))


def test_a_column_that_is_not_null_in_one_part_and_missing_in_another_may_be_null(tmp_path: Path) -> None:
    strict = pa.schema([pa.field("a", pa.int64(), nullable=False, metadata={"unit": "kg"})])
    part = pa.table({"a": [1]}, strict)
    alone = write(tmp_path, part)
    assert table(alone).schema.field("a").equals(strict.field("a"), check_metadata=True)
    both = table(write(tmp_path, part, pa.table({"b": [2]})))
    assert both.schema.field("a").nullable
    assert both.schema.field("a").metadata == {b"unit": b"kg"}
    assert both.to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": 2}]


@pytest.mark.parametrize(
    ("a", "b", "merged"),
    [
        (pa.int16(), pa.uint8(), pa.int16()),
        (pa.uint8(), pa.uint32(), pa.uint32()),
        (pa.uint64(), pa.int8(), None),
        (pa.float16(), pa.float32(), pa.float32()),
        (pa.int64(), pa.float64(), None),
        (pa.bool_(), pa.int8(), None),
        (pa.string(), pa.int64(), None),
        (pa.string(), pa.binary(), pa.binary()),
        (pa.large_string(), pa.binary(4), pa.large_binary()),
        (pa.binary(3), pa.binary(4), pa.binary()),
        (pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.string()), pa.string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.null(), pa.dictionary(pa.int8(), pa.string())),
        (pa.decimal128(10, 2), pa.decimal128(12, 4), pa.decimal128(12, 4)),
        (pa.decimal128(38, 0), pa.decimal128(38, 10), pa.decimal256(48, 10)),
        (pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("us")),
        (pa.timestamp("us"), pa.timestamp("ns"), None),
        (pa.timestamp("us", "UTC"), pa.timestamp("us"), None),
        (pa.duration("ms"), pa.duration("s"), pa.duration("ms")),
        (pa.date32(), pa.timestamp("us"), None),
        (pa.list_(pa.int8()), pa.large_list(pa.int32()), pa.large_list(pa.int32())),
        (pa.list_(pa.int8(), 2), pa.list_(pa.int8()), pa.list_(pa.int8())),
        (pa.list_(pa.int8()), pa.list_(pa.string()), None),
        (pa.list_(pa.int8()), pa.int8(), None),
        (pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.string()), None),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.string())]), None),
    ],
)
def test_which_types_go_together(a: pa.DataType, b: pa.DataType, merged: pa.DataType | None) -> None:
    for pair in ((a, b), (b, a)):
        found = merge_types(*pair)
        assert (found is None) if merged is None else merged.equals(found)


# ---- size ----


def test_batches_are_bounded_in_rows_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = 20_000
    dataset = write(tmp_path, pa.table({"p": [f"{i:0100}" for i in range(number)]}), row_group_size=5000)
    assert [row["p"] for row in rows(dataset) if isinstance(row, dict)] == [f"{i:0100}" for i in range(number)]
    assert max(b.table.num_rows for b in dataset.tables(dataset.schema())) <= 8192
    monkeypatch.setattr(parquet, "BYTES_PER_BATCH", 10_000)
    monkeypatch.setattr(parquet, "BYTES_PER_TABLE", 100_000)
    assert 50 < max(len(batch.rows) for batch in dataset.rows(None)) < 100
    assert 500 < max(b.table.num_rows for b in dataset.tables(dataset.schema())) < 1000
    assert table(dataset).num_rows == number


def test_a_large_value_in_all_rows_does_not_make_large_batches(tmp_path: Path) -> None:
    dataset = write(tmp_path, pa.table({"document": ["x" * 100_000] * 1000}))
    assert (tmp_path / "part-0.parquet").stat().st_size < 50_000  # stored once
    assert max(len(batch.rows) for batch in dataset.rows(None)) * 100_000 <= parquet.BYTES_PER_BATCH
    batches = list(dataset.tables(dataset.schema()))
    assert max(batch.table.nbytes for batch in batches) <= parquet.BYTES_PER_TABLE
    assert sum(batch.table.num_rows for batch in batches) == 1000


def test_many_files_do_not_stay_open(tmp_path: Path) -> None:
    dataset = write(tmp_path, *[pa.table({"a": [i]}) for i in range(30)])
    before = len(list(Path("/proc/self/fd").iterdir()))
    reading = dataset.rows(None)
    for _ in range(20):
        next(reading)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2
    assert [row["a"] for row in rows(dataset) if isinstance(row, dict)] == list(range(30))


# ---- files that are refused ----


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["id", "v", "v"])
    with pytest.raises(InputError, match=r"part-0.parquet: has more than one column 'v'"):
        write(tmp_path, twice).known_columns()
    inner = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"])
    with pytest.raises(InputError, match=r"part-0.parquet: column 'm' holds records with more than one field 'x'"):
        write(tmp_path, pa.table({"m": pa.array([None], pa.list_(inner.type))})).known_columns()
    assert rows(write(tmp_path, pa.table({"prompt": ["a"], "Prompt": ["b"]}))) == [{"prompt": "a", "Prompt": "b"}]


def test_a_file_that_went_away_is_told(tmp_path: Path) -> None:
    dataset = write(tmp_path, pa.table({"a": [1]}))
    (tmp_path / "part-0.parquet").unlink()
    with pytest.raises(InputError, match=r"part-0.parquet: "):
        rows(dataset)


def test_records_that_a_part_lacks_are_null_whatever_their_fields_must_be(tmp_path: Path) -> None:
    """They go into the output, which has no null in a field that must not be null."""
    inner = pa.struct([pa.field("n", pa.int64(), nullable=False), pa.field("s", pa.string())])
    pair = pa.list_(pa.field("item", inner, nullable=False), 2)
    records = pa.array([{"n": 1, "s": "x"}], inner)
    pairs = pa.FixedSizeListArray.from_arrays(pa.concat_arrays([records, records]), type=pair)
    full = pa.table({"id": [1], "record": records, "pair": pairs})
    found = table(write(tmp_path, full, pa.table({"id": [2]})))
    pq.write_table(found, tmp_path / "out.parquet")
    back = pq.read_table(tmp_path / "out.parquet").to_pylist()
    record = {"n": 1, "s": "x"}
    assert back == [{"id": 1, "record": record, "pair": [record, record]}, {"id": 2, "record": None, "pair": None}]


def test_old_timestamps_keep_their_dates(tmp_path: Path) -> None:
    dates = [dt.datetime(1, 1, 1), dt.datetime(2024, 5, 6, 7, 8, 9, 123456), dt.datetime(9999, 12, 31), None]
    old = pa.table({"d": pa.array(dates, pa.timestamp("us"))})
    dataset = write(tmp_path, old, use_deprecated_int96_timestamps=True)
    assert [row["d"] for row in rows(dataset) if isinstance(row, dict)] == dates
    assert table(dataset).column("d").to_pylist() == dates


def test_a_value_that_the_type_of_other_files_cannot_hold_is_met_when_rows_are_first_read(tmp_path: Path) -> None:
    far, near = pa.array([9_300_000_000_000_000], pa.timestamp("ms")), pa.array([1], pa.timestamp("us"))
    dataset = write(tmp_path, pa.table({"x": [1], "d": far}), pa.table({"x": [2], "d": near}))
    with pytest.raises(InputError, match=r"part-0.parquet: column 'd' .* give it the same type in all files"):
        rows(dataset, ["x"])
