"""The merge: input and results side by side, in input order, whole or not at all."""

import datetime
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkgen.errors import BulkgenError, OutputError, Stopped
from bulkgen.records import EXTRA_COLUMNS, RESULT_COLUMNS, Completion, Failure, Logprobs, RefusedRow, Sample
from bulkgen.results import (
    About,
    CommittedPart,
    MergeResult,
    PartRow,
    RefusedWriter,
    disk,
    done_row,
    failed_row,
    merge,
    spool,
    write_part,
)

SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64())])


@dataclass(frozen=True)
class Batch:
    first: int
    file: str
    positions: Sequence[int]
    table: pa.RecordBatch


class Keys:
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def lookup(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.int64]:
        ordinals = [int.from_bytes(key.ljust(16, b"\0"), "big") for key in keys.tolist()]
        return np.array([o if o < self.rows else -1 for o in ordinals], np.int64)

    def keys_of(self, ordinals: npt.NDArray[np.int64]) -> list[bytes]:
        return [key(int(o)) for o in ordinals]


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def done(number: int, text: str | None = None) -> PartRow:
    text = f"text {number}" if text is None else text
    return done_row(
        About(key=key(number), shard=number % 7), Completion(number, text, "stop", number, 1, 2, 0.1, 0.2, None, 0.5)
    )


def failed(number: int) -> PartRow:
    return failed_row(About(key=key(number), shard=0), Failure(number, "refused_by_engine", f"no {number}"))


class Run:
    """A run folder and an output in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scratch = folder / "run"
        self.scratch.mkdir()
        self.output = folder / "out.parquet"
        self.failures = self.scratch / "failures.parquet"
        self.parts: list[Path] = []
        self.table = pa.table({"id": [], "n": []}, SCHEMA)
        self.told: list[int] = []
        self.refuse([])

    def input(self, rows: int, schema: pa.Schema = SCHEMA) -> None:
        self.table = pa.table({"id": [f"r{i}" for i in range(rows)], "n": range(rows)}, schema)

    def part(self, rows: Sequence[PartRow]) -> None:
        name = f"part-{len(self.parts)}.parquet"
        write_part(self.scratch, name, rows)
        self.parts.append(self.scratch / name)

    def refuse(self, rows: Sequence[RefusedRow]) -> None:
        writer = RefusedWriter(self.scratch / "refused.parquet")
        writer.add(rows)
        writer.close()

    def tables(self, at_once: int) -> Iterator[Batch]:
        for first in range(0, self.table.num_rows, at_once):
            piece = self.table.slice(first, at_once).combine_chunks()
            batch = pa.RecordBatch.from_arrays([c.chunk(0) for c in piece.columns], schema=self.table.schema)
            yield Batch(first, "in.jsonl", range(first + 1, first + 1 + batch.num_rows), batch)

    def merge(
        self,
        at_once: int = 100,
        file_rows: int = 1000,
        keys: Keys | None = None,
        progress: Callable[[int], None] | None = None,
        extra_columns: Sequence[str] = (),
    ) -> MergeResult:
        return merge(
            parts=[CommittedPart(part) for part in self.parts],
            keys=keys or Keys(self.table.num_rows),
            tables=self.tables(at_once),
            refused=self.scratch / "refused.parquet",
            input_schema=self.table.schema,
            output=self.output,
            text_column="answer",
            file_rows=file_rows,
            failures=self.failures,
            scratch=self.scratch,
            progress=progress or self.told.append,
            extra_columns=extra_columns,
        )

    def names(self) -> list[str]:
        return sorted(path.name for path in self.output.iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "_RANGE_BYTES", 2000)
    monkeypatch.setattr(spool, "_MAX_RANGE_BYTES", 4000)
    monkeypatch.setattr(spool, "_GATHER_BYTES", 5000)
    monkeypatch.setattr(spool, "_MAX_RANGES", 4)


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith((".tmp", "tmp"))]


def test_rows_come_out_in_input_order_with_their_own_results(run: Run) -> None:
    run.input(1000)
    order = np.random.default_rng(0).permutation(1000).tolist()
    for i in range(0, 1000, 150):
        run.part([done(n) if n % 10 else failed(n) for n in order[i : i + 150]])
    assert run.merge() == MergeResult(1000, 900, 100)
    table = pq.read_table(run.output)
    assert table.schema.names == ["id", "n", "status", "answer", *RESULT_COLUMNS]
    assert table.select(["id", "n"]).equals(run.table)
    assert table["answer"].to_pylist() == [f"text {n}" if n % 10 else None for n in range(1000)]
    assert table["row_key"].to_pylist() == [key(n).hex() for n in range(1000)]
    one, none = table.slice(1, 1).to_pylist()[0], table.slice(0, 1).to_pylist()[0]
    assert {name: one[name] for name in RESULT_COLUMNS} == {
        "finish_reason": "stop",
        "prompt_tokens": 1,
        "cached_tokens": 1,
        "output_tokens": 2,
        "queued_s": 0.1,
        "ttft_s": 0.2,
        "tpot_s": None,
        "e2e_s": 0.5,
        "error_code": None,
        "error": None,
        "warnings": None,
        "attempts": 1,
        "answer_from": "engine",
        "settings_key": "",
        "request_key": None,
        "row_key": key(1).hex(),
    }
    assert {name for name in none if none[name] is None} == {"answer", *RESULT_COLUMNS[:8], "warnings", "request_key"}
    assert (none["status"], none["error_code"], none["error"]) == ("failed", "refused_by_engine", "no 0")
    assert run.told[-1] == 1000
    assert temporaries(run.folder) == []


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize("texts", ["even", "long ones together"])
def test_more_results_than_memory_takes(run: Run, texts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    held = spool._sorted

    def noted(batches: Any) -> pa.Table:
        table = held(batches)
        sizes.append(table.nbytes)
        return table

    monkeypatch.setattr(spool, "_sorted", noted)
    rows = 2000
    run.input(rows)
    wanted = [f"{n} " * (100 if texts != "even" and n >= rows - 50 else 1) for n in range(rows)]
    order = np.random.default_rng(1).permutation(rows).tolist()
    for i in range(0, rows, 90):
        run.part([done(n, wanted[n]) for n in order[i : i + 90]])
    run.merge(at_once=77)
    assert pq.read_table(run.output)["answer"].to_pylist() == wanted
    assert max(sizes) <= 4000
    assert temporaries(run.folder) == []


@pytest.mark.usefixtures("small_ranges")
def test_one_row_that_is_larger_than_a_range(run: Run) -> None:
    run.input(40)
    run.part([done(n, "x" * 100_000 if n == 17 else "") for n in reversed(range(40))])
    run.merge()
    assert [len(text) for text in pq.read_table(run.output)["answer"].to_pylist()] == [0] * 17 + [100_000] + [0] * 22


def test_results_of_rows_that_are_no_longer_in_the_input_are_left_out(run: Run) -> None:
    run.input(3)
    run.part([done(9), done(2), done(0), failed(7)])
    run.part([done(1), done(100)])
    assert run.merge() == MergeResult(3, 3, 0)
    assert pq.read_table(run.failures).num_rows == 0


def test_no_rows_give_files_with_a_schema(run: Run) -> None:
    assert run.merge() == MergeResult(0, 0, 0)
    assert pq.read_schema(run.output).names == ["id", "n", "status", "answer", *RESULT_COLUMNS]
    assert pq.read_metadata(run.failures).num_rows == 0
    run.output = run.folder / "out"
    run.merge()
    assert run.names() == ["part-00000.parquet"]


def test_failures_hold_the_rows_of_engine_and_plan_in_order(run: Run) -> None:
    schema = pa.schema([("id", pa.string()), ("n", pa.int64()), ("b", pa.binary()), ("t", pa.timestamp("us"))])
    far = 253402300800000000  # the year 10000, which Python's datetime lacks
    values = {"id": ["ä", None, "c", "d"], "n": [0, 1, 2, 3], "b": [b"\xff", None, b"", b""], "t": [0, None, far, 0]}
    run.table = pa.table({f.name: pa.array(values[f.name], f.type) for f in schema}, schema)
    run.part([failed(2), failed(0), done(3)])
    run.refuse([RefusedRow(1, key(1), "in.jsonl", 2, "too_long", "long", '{"n": 1}', b"raw", 99)])
    assert run.merge(at_once=3) == MergeResult(4, 1, 3)
    rows = pq.read_table(run.failures).to_pylist()
    assert [row["ordinal"] for row in rows] == [0, 1, 2]
    assert [(r["file"], r["position"]) for r in rows] == [("in.jsonl", 1), ("in.jsonl", 2), ("in.jsonl", 3)]
    assert [r["error_code"] for r in rows] == ["refused_by_engine", "too_long", "refused_by_engine"]
    assert json.loads(rows[0]["row"]) == {
        "id": "ä",
        "n": 0,
        "b": {"base64": "/w=="},
        "t": {"datetime": str(datetime.datetime(1970, 1, 1))},
    }
    assert (rows[1]["row"], rows[1]["raw"], rows[1]["row_key"]) == ('{"n": 1}', b"raw", key(1).hex())
    assert json.loads(rows[2]["row"])["t"].startswith("10000-01-01")
    table = pq.read_table(run.output)
    assert table["status"].to_pylist() == ["failed"] * 3 + ["done"]
    assert table["prompt_tokens"].to_pylist() == [None, 99, None, 3]


@pytest.mark.parametrize("refused_at", [[0], [99], [0, 50, 99], list(range(100))])
def test_refused_rows_take_their_place(run: Run, refused_at: list[int]) -> None:
    run.input(100)
    run.part([done(n) for n in range(100) if n not in refused_at] or [done(1000)])
    run.refuse([RefusedRow(n, key(n), "in.jsonl", n + 1, "code", f"m{n}", "{}", None) for n in refused_at])
    assert run.merge(at_once=33).failed == len(refused_at)
    errors = pq.read_table(run.output)["error"].to_pylist()
    assert [n for n in range(100) if errors[n] == f"m{n}"] == refused_at


def test_types_and_metadata_of_the_input_stay(run: Run) -> None:
    schema = pa.schema(
        [
            pa.field("d", pa.dictionary(pa.int8(), pa.string())),
            pa.field("ls", pa.large_string(), metadata={"note": "mine"}),
            pa.field("at", pa.timestamp("ns", "Europe/Berlin")),
            pa.field("l", pa.list_(pa.field("item", pa.float32(), nullable=False))),
            pa.field("e", pa.list_(pa.field("element", pa.int8()))),
            pa.field("m", pa.map_(pa.string(), pa.decimal128(20, 3))),
            pa.field("u", pa.uint8(), nullable=False),
            pa.field("no", pa.null()),
        ],
        metadata={"pandas": "{}"},
    )
    columns = [pa.array([v], f.type) for v, f in zip(["a", "b", 1, [1.0], [2], [], 255, None], schema, strict=True)]
    run.table = pa.Table.from_arrays(columns, schema=schema)
    run.part([done(0)])
    run.merge()
    written = pq.read_table(run.output)
    assert written.schema.metadata == schema.metadata | {b"bulkgen.text_column": b"answer"}
    for field in schema:
        back = written.schema.field(field.name)
        assert (back.type, back.nullable, back.metadata) == (field.type, field.nullable, field.metadata)
    # Types are equal whatever the name of a list's items, so look at that too.
    assert [written.schema.field(name).type.value_field.name for name in "le"] == ["item", "element"]
    assert written.select(schema.names).equals(run.table)


# ---- several answers, log probabilities ----


def logprobs(number: int) -> Logprobs:
    """Of one to three tokens, each with one likely token less than the one before; -inf and NaN among them."""
    tokens = 1 + number % 3
    counts = [2 - i for i in range(tokens)]
    top = sum(counts)
    return Logprobs(
        tokens=[f"t{number}.{i}" for i in range(tokens)],
        token_ids=[number + i for i in range(tokens)],
        logprobs=[-math.inf if number % 5 == 0 else -float(i) for i in range(tokens)],
        top_counts=counts,
        top_tokens=[f"é{number}.{i}" for i in range(top)],
        top_token_ids=list(range(top)),
        top_logprobs=[math.nan if i == 1 else -math.inf for i in range(top)],
    )


def with_answers(number: int) -> PartRow:
    """Rows of one answer, of several, and with log probabilities, one kind after the other."""
    kind = number % 4
    samples = tuple(
        Sample(i, f"{number}/{i}" if i else "", "length", i, logprobs(number + i) if kind == 2 else None, i == 1)
        for i in range(1 + number % 3)
    )
    own = logprobs(number) if kind in (1, 2) else None
    several = samples if kind in (0, 2) else ()
    answer = Completion(
        number, f"text {number}", "stop", 1, 0, 2, 0.1, 0.2, None, 0.5, samples=several, logprobs=own, valid=kind == 0
    )
    return done_row(About(key=key(number), shard=0), answer)


def as_read(given: Logprobs | None) -> list[dict[str, Any]] | None:
    if given is None:
        return None
    top = iter(zip(given.top_tokens, given.top_token_ids, given.top_logprobs, strict=True))
    names = ("token", "token_id", "logprob")
    return [
        {**dict(zip(names, place, strict=True)), "top": [dict(zip(names, next(top), strict=True)) for _ in range(n)]}
        for place, n in zip(
            zip(given.tokens, given.token_ids, given.logprobs, strict=True), given.top_counts, strict=True
        )
    ]


@pytest.mark.parametrize("ranges", ["one", "many"])
def test_every_answer_comes_out_in_its_own_row(run: Run, ranges: str, request: pytest.FixtureRequest) -> None:
    if ranges == "many":
        request.getfixturevalue("small_ranges")
    rows = 400
    run.input(rows)
    order = np.random.default_rng(2).permutation(rows).tolist()
    given = [failed(n) if n % 7 == 0 else with_answers(n) for n in range(rows)]
    for i in range(0, rows, 90):
        run.part([given[n] for n in order[i : i + 90]])
    run.merge(at_once=77, extra_columns=EXTRA_COLUMNS)
    table = pq.read_table(run.output)
    assert table.schema.names == ["id", "n", "status", "answer", *EXTRA_COLUMNS, *RESULT_COLUMNS]
    for n, row in enumerate(table.to_pylist()):
        wanted = given[n]
        assert row["answer"] == wanted.text
        assert row["valid"] == wanted.valid
        assert repr(row["logprobs"]) == repr(as_read(wanted.logprobs))  # NaN is NaN in it
        samples = (
            None
            if wanted.samples is None
            else [
                {
                    "index": s.index,
                    "text": s.text,
                    "finish_reason": s.finish_reason,
                    "output_tokens": s.output_tokens,
                    "valid": s.valid,
                    "logprobs": as_read(s.logprobs),
                }
                for s in wanted.samples
            ]
        )
        assert repr(row["samples"]) == repr(samples)


def test_columns_that_no_row_fills_are_there_if_the_job_wants_them(run: Run) -> None:
    run.input(3)
    run.part([done(n) for n in range(3)])
    run.merge(extra_columns=("samples", "valid"))
    table = pq.read_table(run.output)
    assert table.schema.names == ["id", "n", "status", "answer", "samples", "valid", *RESULT_COLUMNS]
    assert (table["samples"].null_count, table["valid"].null_count) == (3, 3)


# ---- the two kinds of output ----


def test_a_folder_holds_files_of_so_many_rows(run: Run) -> None:
    run.output = run.folder / "out"
    run.input(25)
    run.part([done(n) for n in range(25)])
    run.merge(at_once=4, file_rows=10)
    assert run.names() == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    files = [pq.read_table(run.output / name)["n"].to_pylist() for name in run.names()]
    assert files == [list(range(10)), list(range(10, 20)), list(range(20, 25))]


def test_a_folder_of_exactly_full_files(run: Run) -> None:
    run.output = run.folder / "out"
    run.input(20)
    run.part([done(n) for n in range(20)])
    run.merge(at_once=7, file_rows=10)
    assert run.names() == ["part-00000.parquet", "part-00001.parquet"]


def test_a_folder_is_replaced_and_what_is_not_ours_stays(run: Run) -> None:
    run.output = run.folder / "out"
    run.input(25)
    run.part([done(n) for n in range(25)])
    run.merge(file_rows=5)
    (run.output / "part-00099.parquet").write_bytes(b"mine")
    (run.output / "notes.txt").write_text("mine")
    (run.output / ".tmp-part-00007.parquet").write_bytes(b"of a merge that was killed")
    run.merge(file_rows=20)
    assert run.names() == ["notes.txt", "part-00000.parquet", "part-00001.parquet", "part-00099.parquet"]
    assert pq.read_table(run.output / "part-00000.parquet").num_rows == 20


def test_a_foreign_file_where_ours_belongs_is_refused_and_nothing_changes(run: Run) -> None:
    run.output = run.folder / "out"
    run.input(6)
    run.part([done(n) for n in range(6)])
    run.merge(file_rows=6)
    pq.write_table(pa.table({"a": [1]}), run.output / "part-00001.parquet")
    before = (run.output / "part-00000.parquet").read_bytes()
    with pytest.raises(OutputError, match=r"part-00001\.parquet: is not an output of bulkgen .* move it away"):
        run.merge(file_rows=3)
    assert run.names() == ["part-00000.parquet", "part-00001.parquet"]
    assert (run.output / "part-00000.parquet").read_bytes() == before
    run.merge(file_rows=6)
    assert run.names() == ["part-00000.parquet", "part-00001.parquet"]


# ---- what goes wrong ----


def test_a_row_without_a_result_is_named(run: Run) -> None:
    run.input(10)
    run.part([done(n) for n in range(10) if n != 6])
    with pytest.raises(BulkgenError, match=r"in\.jsonl: row at 7 has no result"):
        run.merge(at_once=4)
    assert not run.output.exists()
    assert not run.failures.exists()
    assert temporaries(run.folder) == []


@pytest.mark.parametrize("ranges", ["one", "many"])
def test_a_row_with_two_results_is_named(run: Run, ranges: str, request: pytest.FixtureRequest) -> None:
    if ranges == "many":
        request.getfixturevalue("small_ranges")
    run.input(300)
    run.part([done(n) for n in range(300)])
    run.part([done(150)])
    with pytest.raises(BulkgenError, match=r"in\.jsonl: row at 151 has more than one result"):
        run.merge()
    assert not run.output.exists()


def test_a_row_that_is_refused_and_has_a_result_is_named(run: Run) -> None:
    run.input(3)
    run.part([done(n) for n in range(3)])
    run.refuse([RefusedRow(1, key(1), "in.jsonl", 2, "code", "m", None, None)])
    with pytest.raises(BulkgenError, match="row at 2 has more than one result"):
        run.merge()


def test_an_input_that_lost_rows_since_the_plan_is_told(run: Run) -> None:
    run.input(10)
    run.part([done(n) for n in range(12)])
    with pytest.raises(BulkgenError, match="10 rows to the merge and 12 to the plan"):
        run.merge(keys=Keys(12))
    assert not run.output.exists()


@pytest.mark.parametrize("name", ["run/.tmp-failures.parquet", ".tmp-out.parquet"])
def test_a_full_disk_names_the_file_and_leaves_what_was_there(
    run: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.input(10)
    run.part([failed(n) for n in range(10)])
    run.merge()
    before = run.output.read_bytes(), run.failures.read_bytes()
    made = os.open

    def full(path: Any, flags: int, *mode: int) -> int:
        """A new file on a disk without room."""
        if str(path) == str(run.failures.with_name(".tmp-failures.parquet")):
            Path(path).symlink_to("/dev/full")
            flags &= ~(os.O_CREAT | os.O_EXCL)
        return made(path, flags, *mode)

    if name.startswith("run/"):
        monkeypatch.setattr(os, "open", full)
    else:
        (run.folder / name).symlink_to("/dev/full")
    final = name.replace(".tmp-", "")
    with pytest.raises(OutputError, match=rf"{final}: cannot be written \(No space left on device\); make room"):
        run.merge()
    assert (run.output.read_bytes(), run.failures.read_bytes()) == before
    assert temporaries(run.folder) == []


def test_a_folder_that_cannot_be_made_is_named(run: Run) -> None:
    (run.folder / "file").write_text("")
    run.output = run.folder / "file" / "out"
    with pytest.raises(OutputError, match=r"file/out: cannot be written \(Not a directory\)"):
        run.merge()


def test_a_damaged_part_stops_the_merge(run: Run) -> None:
    run.input(10)
    run.part([done(n) for n in range(10)])
    run.parts[0].write_bytes(run.parts[0].read_bytes()[:-20])
    with pytest.raises(OutputError, match=r"part-0\.parquet: cannot be read"):
        run.merge()
    assert not run.output.exists()


@pytest.mark.parametrize("at", [0, 100])
def test_a_stop_in_the_middle_leaves_nothing(run: Run, at: int) -> None:
    run.input(300)
    run.part([done(n) for n in range(300)])

    def stop(rows: int) -> None:
        if rows == at:
            raise Stopped("stopped")

    with pytest.raises(Stopped):
        run.merge(progress=stop)
    assert not run.output.exists()
    assert temporaries(run.folder) == []


def test_row_groups_are_neither_tiny_nor_huge(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_GROUP_ROWS", 100)
    run.input(1000)
    run.part([done(n) for n in range(1000)])
    run.merge(at_once=30)
    metadata = pq.read_metadata(run.output)
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [120] * 8 + [40]
