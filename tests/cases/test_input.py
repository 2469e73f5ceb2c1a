"""Public fault cases about input files: whole runs on the stub engine, each with inputs that are near to it."""

import codecs
import gzip
import json
import math
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cases.outcomes import Rows
from tests.cases.outcomes import run as run_to_end
from tests.harness import Job

MakeJob = Callable[..., Job]

BOM = codecs.BOM_UTF8
CURE = "fetch or write the file again, then run again"


def put(job: Job, name: str, content: bytes | str | pa.Table | Rows, **settings: Any) -> Path:
    """Write an input file in the format and the compression that its name says."""
    path = job.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list) and name.endswith(".parquet"):
        keys = dict.fromkeys(key for row in content for key in row)
        content = pa.table({key: [row.get(key) for row in content] for key in keys})
    if isinstance(content, pa.Table):
        pq.write_table(content, path, **settings)
    else:
        raw = lines(content) if isinstance(content, list) else content
        path.write_bytes(packed(name, raw.encode() if isinstance(raw, str) else raw))
    return path


def packed(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content, 1)
    if name.endswith(".zst"):
        return bytes(pa.compress(content, "zstd", asbytes=True))
    return content


def lines(rows: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def questions(first: int, end: int) -> Rows:
    return [{"id": f"r{i}", "prompt": f"question {i} {i * 7919 % 1000}"} for i in range(first, end)]


def run(job: Job, code: int) -> Rows:
    """Run a job, which must end with `code`; its rows, after a check that they add up and answer their prompts."""
    rows = run_to_end(job, code)
    if "template" not in job.spec["input"]:
        assert all(row["text"] == f"echo:{row['prompt']}" for row in rows if row["status"] == "done")
    return rows


def refused(job: Job, *words: str) -> None:
    """A run that must end with exit 6 before an engine is loaded."""
    ended = job.run()
    assert ended.code == 6, ended.out + ended.err
    assert "Traceback" not in ended.err
    for word in words:
        assert word in ended.err
    assert not job.run_folder.exists() or not job.manifest("ready")
    assert not job.output.is_file()


def outcome(rows: Sequence[dict[str, Any]], key: str = "id") -> list[tuple[Any, str]]:
    """Id and error code of each row, `done` for those that are."""
    return [(row[key], row["error_code"] or row["status"]) for row in rows]


def places(job: Job) -> list[tuple[str, int, str]]:
    return [(row["file"], row["position"], row["error_code"]) for row in job.failures()]


def pending(job: Job) -> list[int]:
    """The rows that were to be generated, start by start."""
    return [plan["pending"] for plan in job.manifest("plan")]


# ---- lines ----


@pytest.mark.parametrize(("name", "row_id"), [("in.jsonl", "id"), ("in.jsonl", None), ("in.ndjson.zst", "id")])
def test_01_blank_lines_crlf(make_job: MakeJob, name: str, row_id: str | None) -> None:
    job = make_job(input={"path": name, "id": row_id})
    content = (
        b'\r\n{"id":"a","prompt":"first"}\r\n\n\t \r\n{"id":"b","prompt":"one\\r\\ntwo"}\n\x0c\n'
        b'   \r\n{"id":"c"\r\n{"id":"d","prompt":"last"}'
    )
    put(job, name, content)
    rows = run(job, 3)
    assert outcome(rows) == [("a", "done"), ("b", "done"), (None, "bad_json"), ("d", "done")]
    assert [row["text"] for row in rows] == ["echo:first", "echo:one\r\ntwo", None, "echo:last"]
    assert places(job) == [(name, 8, "bad_json")]
    assert job.failures()[0]["raw"] == b'{"id":"c"'
    put(job, name, content.replace(b'"c"', b'"c","prompt":"third"}'))
    assert outcome(run(job, 0)) == [("a", "done"), ("b", "done"), ("c", "done"), ("d", "done")]
    assert pending(job) == [3, 1]


def test_02_utf8_bom(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in"})
    put(job, "in/1.jsonl", BOM + b'{"id":"a","prompt":"one"}\n{"id":"b","prompt":"two"}\n')
    put(job, "in/2.jsonl", b'{"id":"c","prompt":"three"}\n' + BOM + b'{"id":"d","prompt":"four"}\n')
    put(job, "in/3.jsonl", BOM)
    put(job, "in/4.jsonl", BOM + b"\r\n" + BOM + BOM + b'{"id":"e","prompt":"five"}\r\n' + BOM)
    put(job, "in/5.jsonl.gz", BOM + b'{"id":"f","prompt":"six","\\ufeffodd":"\\ufeffkept"}\n')
    rows = run(job, 0)
    assert outcome(rows) == [(row_id, "done") for row_id in "abcdef"]
    assert pq.read_schema(job.output).names[:3] == ["id", "prompt", "\ufeffodd"]
    assert rows[5]["\ufeffodd"] == "\ufeffkept"  # a character in a string is no mark
    assert not any("\ufeff" in row["prompt"] + row["text"] for row in rows)


SEPARATORS = {"ls": "\u2028", "ps": "\u2029", "nel": "\x85", "vt": "\x0b", "ff": "\x0c", "fs": "\x1c", "cr": "\r"}


def test_03_unicode_line_separators(make_job: MakeJob) -> None:
    job = make_job(engine={"max_model_len": 200})
    raw = {"ls", "ps", "nel"}  # JSON wants the others escaped
    given = [{"id": name, "prompt": f"before{c}after"} for name, c in SEPARATORS.items()]
    given.append({"id": "long", "prompt": "too\u2028long\x85" * 100})
    put(job, "in.jsonl", "".join(json.dumps(row, ensure_ascii=row["id"] not in raw | {"long"}) + "\n" for row in given))
    rows = run(job, 3)
    assert outcome(rows) == [*((name, "done") for name in SEPARATORS), ("long", "prompt_too_long")]
    assert [{"id": row["id"], "prompt": row["prompt"]} for row in rows] == given
    assert json.loads(job.failures()[0]["row"]) == given[-1]
    job.output.unlink()
    assert run(job, 3) == rows
    assert pending(job) == [7, 0]
    for name in ("in.parquet", "in.jsonl.gz"):  # what came out goes in again
        again = make_job(input={"path": name}, engine={"max_model_len": 200})
        put(again, name, pq.read_table(job.output, columns=["id", "prompt"]).to_pylist())
        assert outcome(run(again, 3)) == outcome(rows)


def test_04_valid_json_not_an_object(make_job: MakeJob) -> None:
    odd = ["[1,2,3]", '"some text"', "null", "42", "true", "-0.5", '[{"id":"x","prompt":"in a list"}]', '""']
    job = make_job([{"id": "a", "prompt": "fine"}, *odd, {"id": "b", "prompt": "fine too"}])
    rows = run(job, 3)
    assert outcome(rows) == [("a", "done"), *[(None, "not_an_object")] * len(odd), ("b", "done")]
    assert places(job) == [("in.jsonl", i + 2, "not_an_object") for i in range(len(odd))]
    assert [row["raw"].decode() for row in job.failures()] == odd


@pytest.mark.parametrize("row_id", ["id", None])
def test_05_torn_last_input_line(make_job: MakeJob, row_id: str | None) -> None:
    ends = {
        "torn": '{"id":"r4","prompt":"half a ü'.encode()[:-1],
        "garbage": b"\0" * 64,
        "two": b'{"id":"x","prompt":"p"}{"id":"y","prompt":"q"}\n',
        "key": b'{"id":"r4","pro',
        "cr": b'{"id":"r4","prompt":"',
    }
    job = make_job(input={"path": "in", "id": row_id})
    for name, end in ends.items():
        rows = [{"id": f"{name}{i}", "prompt": f"question {i} ünïcode"} for i in range(4)]
        put(job, f"in/{name}.jsonl", json.dumps(rows[0], ensure_ascii=False) + "\n" + lines(rows[1:]).decode())
        with (job.folder / f"in/{name}.jsonl").open("ab") as file:
            file.write(end)
    done = run(job, 3)
    assert len(done) == 25
    codes = {"torn": "bad_utf8"}
    assert places(job) == [(f"in/{name}.jsonl", 5, codes.get(name, "bad_json")) for name in sorted(ends)]
    assert [row["raw"] for row in job.failures()] == [ends[name].removesuffix(b"\n") for name in sorted(ends)]
    for name in ends:
        assert [row["status"] for row in done if str(row["id"]).startswith(name)] == ["done"] * 4
    assert "x" not in {row["id"] for row in done}


def test_06_invalid_utf8_line(make_job: MakeJob) -> None:
    bad = {
        2: b'{"id":"b","prompt":"caf\xe9"}',
        4: b'{"id":"d","prompt":"\xc0\xaf"}',
        6: b'{"id":"f","prompt":"\xed\xa0\x80"}',  # half of a surrogate pair
        7: b'{"id":"g","prompt":"\xf4\x90\x80\x80"}',  # beyond the last character
        8: '{"id":"h","prompt":"x"}'.encode("utf-16-le"),
    }
    good = {i: json.dumps({"id": f"ok{i}", "prompt": "é fine"}, ensure_ascii=False).encode() for i in (1, 3, 5, 9)}
    both = bad | good
    job = make_job()
    put(job, "in.jsonl", b"\n".join(both[i] for i in sorted(both)))
    rows = run(job, 3)
    assert [row["id"] for row in rows if row["status"] == "done"] == ["ok1", "ok3", "ok5", "ok9"]
    assert [place[1] for place in places(job)] == sorted(bad)
    assert [row["raw"] for row in job.failures()] == [bad[i] for i in sorted(bad)]
    assert [row["error_code"] for row in job.failures()][:4] == ["bad_utf8"] * 4
    assert "at byte 24 of the line" in job.failures()[0]["error"]


def test_06_invalid_utf8_in_parquet(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in.parquet"})
    prompts = pa.array([b"good", b"caf\xe9", b"good again"]).view(pa.string())
    put(job, "in.parquet", pa.table({"id": [1, 2, 3], "prompt": prompts, "other": ["x", "y", "z"]}))
    rows = pq.read_table(job.folder / "in.parquet")
    assert job.run().code == 3
    assert places(job) == [("in.parquet", 2, "bad_utf8")]
    assert job.failures()[0]["raw"] == b"caf\xe9"
    out = pq.read_table(job.output)
    assert out["status"].to_pylist() == ["done", "failed", "done"]
    assert out.select(["id", "prompt", "other"]).equals(rows)


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet"])
def test_08_nul_character(make_job: MakeJob, name: str) -> None:
    given = [
        {"id": "a", "prompt": "clean"},
        {"id": "b", "prompt": "nul \0 inside"},
        {"id": "c\0", "prompt": "nul in the id"},
        {"id": "c", "prompt": "nul in the id"},
        {"id": "\0/../c;$(id)", "prompt": "\0\0x"},
    ]
    job = make_job(input={"path": name})
    put(job, name, given)
    rows = run(job, 0)
    assert [{"id": row["id"], "prompt": row["prompt"]} for row in rows] == given
    given.append({"id": "c\0\0", "prompt": "nul in the id"})
    put(job, name, given)
    assert outcome(run(job, 0)) == [(row["id"], "done") for row in given]
    assert pending(job) == [5, 1]


# ---- keys, types and numbers ----


@pytest.mark.parametrize("ends", ["jsonl", "parquet"])
def test_09_key_first_seen_late(make_job: MakeJob, ends: str) -> None:
    job = make_job(input={"path": "in", "prompt": None, "template": "[{{ lang | default('en') }}] {{ q }}"})
    given: list[dict[str, Any]] = [{"id": i, "q": f"translate {i}"} for i in range(1500)]
    for row in given[1400:1429]:
        row["lang"] = "fr" if row["id"] % 2 else "de"
    given[1450]["deep"] = {"b": [1]}
    given[1499]["deep"] = {"a": "late"}
    for i, (start, end) in enumerate(pairwise([0, 900, 1400, 1500])):
        put(job, f"in/{i}.{ends}", given[start:end])
    rows = run(job, 0)
    assert [row["lang"] for row in rows] == [row.get("lang") for row in given]
    assert sum(row["lang"] is not None for row in rows) == 29
    assert [rows[i]["text"] for i in (0, 1400, 1401, 1429)] == [
        f"echo:[{lang}] translate {i}" for i, lang in [(0, "en"), (1400, "de"), (1401, "fr"), (1429, "en")]
    ]
    assert rows[1450]["deep"] == {"b": [1], "a": None}
    assert rows[1499]["deep"] == {"b": None, "a": "late"}


def test_11_mixed_scalar_types(make_job: MakeJob) -> None:
    given: list[dict[str, Any]] = [
        {"id": 1, "q": "same", "temperature": 0},
        {"id": "1", "q": "same", "temperature": "0.7"},
        {"id": 1.0, "q": "same", "temperature": 0},
        {"id": True, "q": "same", "temperature": None},
        {"id": "5", "q": 123, "temperature": 0.1},
        {"id": None, "q": "no id", "temperature": "hot"},
        {"q": "no id key", "temperature": 0.2},
        {"id": [1], "q": "same", "temperature": False},
        {"id": {"a": 1}, "q": "same"},
        {"id": None, "q": "no id key"},
    ]
    job = make_job(given, input={"prompt": "q"}, sampling={"temperature": {"column": "temperature"}})
    codes = ["done", "bad_sampling", "done", "done", "not_text", "bad_sampling", "done", "bad_sampling", "done", "done"]
    assert job.run().code == 3
    rows = job.rows()
    assert [row["error_code"] or row["status"] for row in rows] == codes
    assert [row["id"] for row in rows] == [None if row.get("id") is None else json.dumps(row["id"]) for row in given]
    assert [row["text"] for row in rows if row["status"] == "done"] == [
        "echo:" + row["q"] for row, code in zip(given, codes, strict=True) if code == "done"
    ]
    assert "temperature" in job.failures()[0]["error"]
    assert "0.7" in job.failures()[0]["error"]
    assert len(set(job.committed_keys())) == len(job.committed_keys()) == 6
    given[4]["q"] = "123"
    given[1]["temperature"] = 0.7
    job.write(given)
    assert job.run().code == 3
    assert [row["status"] for row in job.rows()][:5] == ["done"] * 5
    assert pending(job) == [6, 2]


def test_12_uint64_and_huge_ids(make_job: MakeJob) -> None:
    ids = [2**63 + 5, 2**63 - 1, -1, 10**29 + 123456789, 2**53 + 1, 2**53, -(2**200), 0, 2**64 - 1]
    given = [{"id": row_id, "prompt": f"p{i}"} for i, row_id in enumerate(ids)]
    job = make_job(given[:-2])
    assert [row["id"] for row in run(job, 0)] == [str(row_id) for row_id in ids[:-2]]
    job.write(given)
    assert [row["id"] for row in run(job, 0)] == [str(row_id) for row_id in ids]
    assert pending(job) == [7, 2]
    unsigned = make_job(given[:2] + given[-2:])
    rows = run(unsigned, 0)
    assert [row["id"] for row in rows] == ids[:2] + ids[-2:]
    assert pq.read_schema(unsigned.output).field("id").type == pa.uint64()


def test_13_nan_and_infinity_literals(make_job: MakeJob) -> None:
    bad = ["NaN", "-Infinity", "Infinity", "[1, NaN]", '{"a": -Infinity}', "1e999", "-1e999"]
    job = make_job(
        [
            '{"id": "a", "prompt": "ok", "score": 1.5}',
            *(f'{{"id": "b", "prompt": "bad", "score": {literal}}}' for literal in bad),
            '{"id": "c", "prompt": "ok", "score": 2}',
            '{"id": "d", "prompt": "ok", "score": 1e-999, "text of it": "NaN"}',
        ]
    )
    rows = run(job, 3)
    assert outcome(rows) == [("a", "done"), *[(None, "bad_json")] * len(bad), ("c", "done"), ("d", "done")]
    assert [row["score"] for row in rows if row["id"]] == [1.5, 2.0, 0.0]
    parquet = make_job(input={"path": "in.parquet"})
    scores = [float("nan"), float("-inf"), None, 0.5]
    put(parquet, "in.parquet", pa.table({"id": [1, 2, 3, 4], "prompt": ["p"] * 4, "score": scores}))
    found = [row["score"] for row in run(parquet, 0)]
    assert math.isnan(found[0])
    assert found[1:] == scores[1:]


# ---- compression and damage ----


def test_14_multi_frame_compressed(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in", "id": None})
    rows = [{"id": f"f{i}r{j}", "prompt": f"frame {i} row {j}"} for i in range(3) for j in range(3)]
    content = lines(rows)
    third = len(content) // 3
    for name in ("members.jsonl.gz", "frames.jsonl.zst"):
        put(job, f"in/{name}", b"").write_bytes(b"".join(packed(name, lines(rows[i : i + 3])) for i in (0, 3, 6)))
        cut = [content[:30], content[30:third], b"", content[third:]]  # a row lies in three of them
        put(job, f"in/across-{name}", b"").write_bytes(b"".join(packed(name, piece) for piece in cut))
    found = run(job, 0)
    assert [row["id"] for row in found] == [row["id"] for row in rows] * 4


def assert_mended(job: Job, whole: list[dict[str, Any]], done_before: int) -> None:
    """After a mend all rows are done, and those that were done before were not done again."""
    assert outcome(run(job, 0)) == [(row["id"], "done") for row in whole]
    assert pending(job) == [done_before, len(whole) - done_before]
    assert len(job.committed_keys()) == len(whole)


@pytest.mark.parametrize(("suffix", "row_id"), [("gz", None), ("zst", "id")])
def test_15_truncated_compressed_file(make_job: MakeJob, suffix: str, row_id: str | None) -> None:
    job = make_job(input={"path": ["cut.jsonl." + suffix, "whole.jsonl." + suffix], "id": row_id})
    rows, others = questions(0, 16_000), questions(20_000, 20_400)
    path = put(job, "cut.jsonl." + suffix, rows)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    put(job, "whole.jsonl." + suffix, others)
    found = run(job, 3)
    complete = len(found) - 401
    assert 2000 < complete < 15_000
    assert outcome(found) == [
        *((row["id"], "done") for row in rows[:complete]),
        (None, "damaged_file"),
        *((row["id"], "done") for row in others),
    ]
    assert places(job) == [("cut.jsonl." + suffix, complete + 1, "damaged_file")]
    assert f"cut.jsonl.{suffix}: cannot be read from line {complete + 1} on" in job.failures()[0]["error"]
    assert job.failures()[0]["error"].endswith(CURE)
    put(job, "cut.jsonl." + suffix, rows)
    assert_mended(job, rows + others, complete + 400)


def test_15_torn_line_that_looks_whole(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in.jsonl.gz"})
    squeeze = zlib.compressobj(wbits=31)
    content = squeeze.compress(lines(questions(0, 2)) + b'{"id": "r2", "prompt": "1"}') + squeeze.flush(
        zlib.Z_SYNC_FLUSH
    )
    path = put(job, "in.jsonl.gz", b"")
    path.write_bytes(content)
    assert outcome(run(job, 3)) == [("r0", "done"), ("r1", "done"), (None, "damaged_file")]
    path.write_bytes(content[:-20])
    assert [row["status"] for row in run(job, 3)][-1] == "failed"


def test_15_damaged_parquet(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in", "id": None})
    table = pa.Table.from_pylist([row | {"unread": i * 7919} for i, row in enumerate(questions(0, 500))])
    settings = {"row_group_size": 100, "write_page_checksum": True, "use_dictionary": False}
    page = put(job, "in/page.parquet", table, **settings)
    chunk = pq.read_metadata(page).row_group(2).column(2)  # which no prompt needs
    whole = page.read_bytes()
    broken = bytearray(whole)
    broken[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 0xFF
    page.write_bytes(broken)
    cut = put(job, "in/cut.parquet", table.slice(0, 10), **settings)
    whole_cut = cut.read_bytes()
    cut.write_bytes(whole_cut[:-1])
    put(job, "in/empty.parquet", b"")
    put(job, "in/good.parquet", table.slice(0, 10), **settings)
    found = run(job, 3)
    assert places(job) == [
        ("in/cut.parquet", 1, "damaged_file"),
        ("in/empty.parquet", 1, "damaged_file"),
        ("in/page.parquet", 201, "damaged_file"),
    ]
    assert "the 100 rows from row 201 on" in job.failures()[2]["error"]
    assert len(found) == 1 + 1 + 10 + 401
    assert [row["id"] for row in found[12:]] == [
        *(f"r{i}" for i in range(200)),
        None,
        *(f"r{i}" for i in range(300, 500)),
    ]
    page.write_bytes(whole)
    cut.write_bytes(whole_cut)
    put(job, "in/empty.parquet", table.slice(0, 1))
    assert len(run(job, 0)) == 521
    assert pending(job) == [410, 111]
    put(job, "in/page.parquet", b"")
    for name in ("cut", "empty", "good"):
        (job.folder / f"in/{name}.parquet").unlink()
    ended = job.run()
    assert ended.code == 6
    assert "in/page.parquet: not a Parquet file that can be read" in ended.err


# ---- Parquet parts ----


@pytest.mark.parametrize("order", ["0123", "3120"])
def test_16_null_typed_part(make_job: MakeJob, order: str) -> None:
    parts = [
        pa.table({"id": ["a", "b"], "prompt": ["p a", "p b"], "note": pa.nulls(2)}),
        pa.table({"note": ["x", None], "id": ["c", "d"], "prompt": ["p c", "p d"]}),
        pa.table({"id": ["e"], "prompt": ["p e"], "note": ["y"], "extra": [1], "all": pa.nulls(1)}),
        pa.table({"id": ["f", "g"], "prompt": pa.nulls(2)}),
    ]
    job = make_job(input={"path": "in"})
    for i, part in enumerate(order):
        put(job, f"in/part-{i}.parquet", parts[int(part)])
    rows = {row["id"]: row for row in run(job, 3)}
    assert dict(outcome(list(rows.values()))) == {
        **dict.fromkeys("abcde", "done"),
        **dict.fromkeys("fg", "null_prompt"),
    }
    assert {row_id: row["note"] for row_id, row in rows.items() if row["note"]} == {"c": "x", "e": "y"}
    assert [row_id for row_id, row in rows.items() if row["extra"] is not None] == ["e"]
    types = {field.name: str(field.type) for field in pq.read_schema(job.output)}
    assert (types["note"], types["extra"], types["all"]) == ("string", "int64", "null")


def test_17_string_variants(make_job: MakeJob) -> None:
    kinds = {
        "s": pa.string(),
        "ls": pa.large_string(),
        "sv": pa.string_view(),
        "dict": pa.dictionary(pa.int8(), pa.string()),
        "dictls": pa.dictionary(pa.int32(), pa.large_string()),
    }
    job = make_job(input={"path": "in"})
    for kind, arrow in kinds.items():
        prompts = pa.array([f"{kind} one", f"{kind} two"]).cast(pa.large_string()).cast(arrow)
        put(job, f"in/{kind}.parquet", pa.table({"id": [f"{kind}1", f"{kind}2"], "prompt": prompts}))
    rows = run(job, 0)
    assert sorted(row["text"] for row in rows) == sorted(f"echo:{kind} {n}" for kind in kinds for n in ("one", "two"))
    put(job, "in/bytes.parquet", pa.table({"id": ["b1", "b2"], "prompt": [b"bin one", b"\xff"]}))
    ended = job.run()
    rows = job.rows()
    assert ended.code == 3
    assert [row["id"] for row in rows if row["status"] == "failed"] in (["b1", "b2"], ["b2"])
    assert all("b'" not in (row["text"] or "") for row in rows)
    assert pending(job)[1] in (0, 1)


@pytest.mark.parametrize("column", ["prompt", "other"])
def test_18_duplicate_columns(make_job: MakeJob, column: str) -> None:
    job = make_job(input={"path": "in.parquet"})
    arrays = [pa.array([1]), pa.array(["p"]), pa.array(["q"]), pa.array(["r"])]
    put(job, "in.parquet", pa.Table.from_arrays(arrays, ["id", "prompt", column, "other"]))
    refused(job, "in.parquet", repr(column))


def test_18_names_that_are_nearly_alike(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in.parquet"})
    table = pa.table({"id": [1, 2], "prompt": ["lower a", "lower b"], "Prompt": ["A", "B"], "prompt ": ["c", "d"]})
    put(job, "in.parquet", table.append_column("a.b", table["id"]).append_column("a", pa.array([{"b": 1}, {"b": 2}])))
    run(job, 0)
    assert pq.read_table(job.output).select(list(range(6))).equals(pq.read_table(job.folder / "in.parquet"))
    keys = make_job(['{"id":1,"prompt":"first","prompt":"second"}', '{"id":2,"Prompt":"no","prompt":"p"}'])
    rows = run(keys, 0)
    assert [(row["prompt"], row["Prompt"]) for row in rows] == [("second", None), ("p", "no")]


@pytest.mark.parametrize("ends", ["parquet", "jsonl"])
def test_19_hive_partitions(make_job: MakeJob, ends: str) -> None:
    job = make_job(input={"path": "in", "id": None})
    parts = {
        "day=06/lang=en": [{"id": "06-0", "prompt": "p", "lang": "EN"}, {"id": "06-1", "prompt": None, "lang": "EN"}],
        "day=10/lang=de": [{"id": "10-0", "prompt": "p", "lang": "DE"}, {"id": "10-1", "prompt": None, "lang": "DE"}],
        "day=9/lang=__HIVE_DEFAULT_PARTITION__": [{"id": "9-0", "prompt": "p", "lang": None}],
    }
    for folder, rows in parts.items():
        put(job, f"in/{folder}/data.{ends}", rows)
    rows = run(job, 3)
    assert [(row["id"], row["lang"], row["status"]) for row in rows] == [
        ("06-0", "EN", "done"),
        ("06-1", "EN", "failed"),
        ("9-0", None, "done"),
        ("10-0", "DE", "done"),
        ("10-1", "DE", "failed"),
    ]
    assert "day" not in rows[0]
    assert [place[:2] for place in places(job)] == [
        (f"in/day=06/lang=en/data.{ends}", 2),
        (f"in/day=10/lang=de/data.{ends}", 2),
    ]
    job.output.unlink()
    assert run(job, 3) == rows
    assert pending(job) == [3, 0]


def test_20_underscore_and_hidden_parts(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in"})
    for name, row_id in [("2025/part", "n1"), ("2025/_part-extra", "f1"), ("_2024/part", "u1"), ("2025/.hidden", "h1")]:
        put(job, f"in/{name}.parquet", pa.table({"id": [row_id], "prompt": ["p"]}))
    for name in ("_SUCCESS", "README.md", "2025/.part.parquet.crc", "2025/part.parquet.tmp", "_2024/_metadata"):
        (job.folder / "in" / name).write_bytes(b"x")
    ended = job.run()
    assert ended.code == 0
    left_out = ["in/2025/.hidden.parquet", "in/2025/_part-extra.parquet", "in/_2024/part.parquet"]
    for name in left_out:
        assert name in ended.err + ended.out
        assert name in (job.run_folder / "run.log").read_text()
    assert "SUCCESS" not in ended.err + ended.out
    assert outcome(job.rows()) == [("n1", "done")]
    named = make_job(input={"path": ["in", "in/_2024", "in/2025/_part-extra.parquet"]})
    (named.folder / "in").symlink_to(job.folder / "in")
    assert outcome(run(named, 0)) == [(row_id, "done") for row_id in ("n1", "u1", "f1")]
    (job.folder / "in/2025/part.parquet").unlink()
    job.output.unlink()
    ended = job.run()
    assert ended.code == 6
    assert "are left out" in ended.err


def test_21_zero_row_files(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in"})
    schema = pa.schema([("id", pa.string()), ("prompt", pa.string())])
    put(job, "in/0.parquet", schema.empty_table())
    with pq.ParquetWriter(job.folder / "in/1.parquet", schema):
        pass  # no row group
    put(job, "in/2.parquet", pa.table({"id": ["a"], "prompt": ["p"]}))
    put(job, "in/3.jsonl", b"")
    put(job, "in/4.jsonl", BOM + b"\r\n\n")
    put(job, "in/5.parquet", pa.table({"x": [1]}).select([]).slice(0, 0))
    assert outcome(run(job, 0)) == [("a", "done")]
    empty = make_job(input={"path": "in/[01].parquet", "allow_empty": True})
    (empty.folder / "in").symlink_to(job.folder / "in")
    assert run(empty, 0) == []
    assert pq.read_schema(empty.output).names[:2] == ["id", "prompt"]
    blank = make_job(input={"path": "in/*.jsonl", "allow_empty": True})
    (blank.folder / "in").symlink_to(job.folder / "in")
    assert run(blank, 0) == []


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("in", "in: no data files in this folder"),
        ("none/*.parquet", "none/*.parquet: no input files match"),
        ("fifo.jsonl", "fifo.jsonl: not a regular file"),
        ("link.jsonl", "link.jsonl: a link to gone.jsonl, which leads nowhere"),
        ("loop.jsonl", "loop.jsonl: a link to loop.jsonl, which leads nowhere"),
    ],
)
def test_21_no_files(make_job: MakeJob, path: str, words: str) -> None:
    job = make_job(input={"path": path})
    put(job, "in/.keep", b"")
    os.mkfifo(job.folder / "fifo.jsonl")
    (job.folder / "link.jsonl").symlink_to("gone.jsonl")
    (job.folder / "loop.jsonl").symlink_to("loop.jsonl")
    refused(job, words)


def test_23_nullable_bigint(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in.parquet", "id": "row_id"})
    table = pa.table(
        {
            "row_id": pa.array([2**53 + 1, 2**53, None, 5]),
            "prompt": ["a", "b", "c", "d"],
            "flag": pa.array([True, None, False, None]),
            "n": pa.array([1, None, 2**31 - 1, 0], pa.int32()),
            "small": pa.array([255, None, 0, 1], pa.uint8()),
            "cents": pa.array([1, None, 10**15 + 1, 3], pa.int64()).cast(pa.decimal128(25, 2)),
        }
    )
    put(job, "in.parquet", table.slice(0, 2))
    run(job, 0)
    put(job, "in.parquet", table)
    rows = run(job, 0)
    assert pq.read_table(job.output).select(table.column_names).equals(table)
    assert [row["text"] for row in rows] == ["echo:a", "echo:b", "echo:c", "echo:d"]
    assert pending(job) == [2, 2]


@pytest.mark.parametrize("ends", ["parquet", "jsonl"])
def test_27_part_order(make_job: MakeJob, ends: str) -> None:
    job = make_job(
        input={"path": "in"},
        output={"path": "out/", "file_rows": 2},
        engine={"max_num_seqs": 3, "replicas": 2, "stub": {"shuffle": True, "step_s": 0.001}},
        shards={"target_rows": 3},
    )
    ids = []
    for i in range(12):
        part = [{"id": f"{i}-{j}", "prompt": f"part {i} row {j} {'long ' * (12 - i)}"} for j in range(2)]
        ids += [row["id"] for row in part]
        put(job, f"in/{i}.{ends}", part)
    assert [row["id"] for row in run(job, 0)] == ids
    assert [path.name for path in sorted(job.output.glob("*.parquet"))] == [f"part-{i:05d}.parquet" for i in range(12)]
    again = make_job(input={"path": "in/*." + ends}, engine={"max_num_seqs": 1, "stub": {"shuffle": True}})
    (again.folder / "in").symlink_to(job.folder / "in")
    assert [row["id"] for row in run(again, 0)] == ids


def test_27_a_file_reached_twice_is_read_once(make_job: MakeJob) -> None:
    job = make_job(input={"path": ["in", "../other/b.jsonl", "in/../in/a.jsonl", "sub/../c.jsonl"]})
    put(job, "in/a.jsonl", questions(0, 1))
    put(job, "../other/b.jsonl", questions(1, 2))
    put(job, "../other/c.jsonl", questions(2, 3))
    put(job, "c.jsonl", questions(3, 4))
    (job.folder / "../other/deep").mkdir()
    (job.folder / "sub").symlink_to("../other/deep")
    (job.folder / "in/b.jsonl").symlink_to("../../other/b.jsonl")
    (job.folder / "in/round").symlink_to("../in")
    assert outcome(run(job, 0)) == [("r0", "done"), ("r1", "done"), ("r2", "done")]


# ---- output and size ----


@pytest.mark.parametrize("way", ["itself", "link to it", "link", "folder"])
def test_64_output_is_the_input(make_job: MakeJob, way: str) -> None:
    path, output = {
        "itself": ("in.parquet", "in.parquet"),
        "link to it": ("in.parquet", "link.parquet"),
        "link": ("link.parquet", "in.parquet"),
        "folder": ("data", "data/"),
    }[way]
    job = make_job(input={"path": path}, output={"path": output})
    given = [put(job, name, questions(0, 2)) for name in ("in.parquet", "data/part-00000.parquet")]
    (job.folder / "link.parquet").symlink_to("in.parquet")
    before = [file.read_bytes() for file in given]
    ended = job.run()
    assert ended.code == 6, ended.err
    assert "output" in ended.err
    assert [file.read_bytes() for file in given] == before
    assert (job.folder / "link.parquet").is_symlink()
    assert not job.run_folder.exists()


def test_64_output_folder_in_the_input_folder(make_job: MakeJob) -> None:
    job = make_job(input={"path": "data"}, output={"path": "data/out"})
    put(job, "data/part-0.parquet", questions(0, 2))
    assert outcome(run(job, 0)) == [("r0", "done"), ("r1", "done")]
    put(job, "data/part-1.parquet", questions(2, 3))
    assert outcome(run(job, 0)) == [("r0", "done"), ("r1", "done"), ("r2", "done")]
    assert pending(job) == [2, 1]


def test_68_many_rows_memory_and_files(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in"}, engine={"replicas": 2})
    for i in range(200):
        put(job, f"in/{i}.jsonl{'.gz' if i % 2 else ''}", questions(100 * i, 100 * i + 100))
    with (job.folder / "in/0.jsonl").open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "short", "text of it": "x" * (50 << 20)}) + "\n")
    command = f"ulimit -n 128 && exec {sys.executable} -m bulkgen run -q {job.path}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = pq.read_table(job.output, columns=["id", "prompt", "status", "text"])
    ids = [f"r{i}" for i in range(20_000)]
    assert out["id"].to_pylist() == [*ids[:100], "long", *ids[100:]]
    assert out["status"].to_pylist() == ["done"] * 20_001
    assert out["text"].to_pylist() == [f"echo:{prompt}" for prompt in out["prompt"].to_pylist()]
    (long,) = pq.read_table(job.output, columns=["text of it"], filters=[("id", "=", "long")]).to_pylist()
    assert long == {"text of it": "x" * (50 << 20)}
