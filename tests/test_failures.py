"""`bulkgen failures`: what failed and why, at any state of a run, and the rows, to be mended and fed back."""

import gzip
import json
import re
import shutil
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness import Ended, Job, bulkgen

MakeJob = Callable[..., Job]

BAD: list[Any] = [
    {"id": "a", "prompt": "fine"},
    '{"id": "torn", "prom',
    {"id": "c", "other": 1},
    "",
    {"id": "d", "prompt": ""},
    {"id": "e", "prompt": "refuse me", "big": 2**70, "words": "größe \u2028"},
    '{"id": "f",  "prompt": "", "half": "\\ud83d\\ude00"}',
    {"id": "g", "prompt": "also fine"},
]
CODES = {"bad_json": 1, "missing_column": 1, "empty_prompt": 2}


def failures(place: Job | Path, *options: str) -> Ended:
    ended = bulkgen("failures", str(place.output if isinstance(place, Job) else place), *options)
    assert "Traceback" not in ended.err
    return ended


def as_json(job: Job, *options: str) -> dict[str, Any]:
    ended = failures(job, "--json", *options)
    assert (ended.code, ended.err) == (0, "")
    data: dict[str, Any] = json.loads(ended.out)
    return data


def counts(data: dict[str, Any]) -> dict[str, int]:
    return {entry["code"]: entry["rows"] for entry in data["codes"]}


def exported(job: Job, *options: str, name: str = "bad.jsonl") -> list[bytes]:
    path = job.folder / name
    path.unlink(missing_ok=True)
    ended = failures(job, "--export", str(path), *options)
    assert (ended.code, ended.out) == (0, ""), ended.err
    return path.read_bytes().splitlines(keepends=False) if path.exists() else []


def test_after_the_end(make_job: MakeJob) -> None:
    job = make_job(BAD)
    assert job.run().code == 3
    shown = failures(job)
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert lines[0] == "4 of 7 rows failed"
    assert re.match(r" +2  empty_prompt +\S", lines[3])  # the most frequent first
    assert any(line.startswith("in.jsonl:2  bad_json: ") for line in lines)
    assert any(line.startswith("in.jsonl:3  id c  missing_column: ") for line in lines)
    assert any(line.startswith("in.jsonl:5  id d  empty_prompt: ") for line in lines)
    data = as_json(job)
    assert (data["state"], data["final"], data["rows"], data["failed"]) == ("finished", True, 7, 4)
    assert counts(data) == CODES
    assert [(f["file"], f["position"], f["row"], f["id"], f["code"]) for f in data["first"]] == [
        ("in.jsonl", 2, 2, None, "bad_json"),
        ("in.jsonl", 3, 3, "c", "missing_column"),
        ("in.jsonl", 5, 4, "d", "empty_prompt"),
        ("in.jsonl", 7, 6, "f", "empty_prompt"),
    ]
    assert all(entry["example"] for entry in data["codes"])
    assert all(f["error"] for f in data["first"])


def test_number_and_code(make_job: MakeJob) -> None:
    job = make_job(BAD)
    job.run()
    assert len(as_json(job, "-n", "1")["first"]) == 1
    assert "in.jsonl:" not in failures(job, "-n", "0").out
    assert "3 more: -n shows" in failures(job, "-n", "1").out
    some = as_json(job, "--code", "bad_json", "--code", "missing_column")
    assert counts(some) == {"bad_json": 1, "missing_column": 1}
    assert some["failed"] == 4  # of the run
    assert [f["code"] for f in some["first"]] == ["bad_json", "missing_column"]
    none = failures(job, "--code", "poison")
    assert none.code == 0
    assert "none with such a code; there are: empty_prompt, bad_json, missing_column" in none.out
    assert failures(job, "-n", "-1").code == 2
    wrong = failures(job, "--code", "emty_prompt")
    assert (wrong.code, wrong.out) == (2, "")
    assert "--code emty_prompt: no such code; did you mean empty_prompt?" in wrong.err


def test_nothing_failed(make_job: MakeJob) -> None:
    job = make_job([{"id": 1, "prompt": "x"}])
    assert job.run().code == 0
    assert failures(job).out == "0 of 1 rows failed\n"
    assert counts(as_json(job)) == {}
    ended = failures(job, "--export", str(job.folder / "bad.jsonl"))
    assert (ended.code, ended.err) == (0, "no rows to write\n")
    assert not (job.folder / "bad.jsonl").exists()


def test_the_run_folder_and_a_place_in_it_name_the_run_too(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = make_job(BAD, output={"path": "out dir/"})
    job.run()
    expected = failures(job).out
    assert f"failures '{job.output}' --export" in expected  # as a shell takes it
    assert failures(job.run_folder).out == expected
    for place, words in ((job.output, "."), (job.run_folder, "."), (job.run_folder / "parts", "..")):
        monkeypatch.chdir(place)
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
        ended = failures(Path(words))
        assert ended.code == 0, ended.err
        assert ended.out.splitlines()[:-1] == expected.splitlines()[:-1]
        ended = failures(Path(words), "--export", str(job.output / "bad.jsonl"))
        assert ended.code == 6
        assert "is the job's own output, or lies in it" in ended.err
    assert failures(tmp_path / "nothing").code == 6


def test_before_the_end(make_job: MakeJob) -> None:
    """Refusals stand in the plan, the engine's failures in parts; where those rows are is read from the input."""
    rows = [*BAD, *({"id": f"n{i}", "prompt": f"row {i}"} for i in range(60))]
    stub = {"fail_rate": 0.5, "seed": 1, "step_s": 0.01, "die_at": [20]}
    commits = {"commit_rows": 1, "commit_s": 0.1}
    job = make_job(rows, engine={"stub": stub, "max_restarts": 0, "max_num_seqs": 4}, output=commits)
    ended = job.run()
    assert ended.code == 4, ended.err
    assert not (job.run_folder / "failures.parquet").exists()
    before = as_json(job, "-n", "999")
    assert (before["state"], before["final"]) == ("failed", False)
    assert "so far (the run is failed)" in failures(job).out
    found = {f["id"]: f for f in before["first"]}
    engines = [f for f in before["first"] if f["code"] == "refused_by_engine"]
    assert engines
    for f in engines:
        assert (f["file"], f["position"]) == ("in.jsonl", f["row"] + 1)  # a blank line stands before them
        assert f["id"].startswith("n") or f["id"] in "aeg"
    assert found["d"]["code"] == "empty_prompt"
    assert [json.loads(line)["id"] for line in exported(job, "--code", "refused_by_engine")] == [
        f["id"] for f in engines
    ]
    # The same in the end, and what came later.
    assert job.run("--set", "engine.stub.die_at=[]").code == 3
    after = as_json(job, "-n", "999")
    assert after["final"]
    assert [f for f in after["first"] if f["row"] in {e["row"] for e in before["first"]}] == before["first"]
    assert after["failed"] == sum(row["status"] == "failed" for row in job.rows()) == len(after["first"])


def test_rows_that_were_retried_are_no_failures(make_job: MakeJob) -> None:
    job = make_job([{"id": i, "prompt": f"row {i}"} for i in range(60)], engine={"stub": {"fail_rate": 0.4}})
    assert job.run().code == 3
    assert as_json(job)["failed"] > 0
    assert job.run("--retry", "failed", "--set", "engine.stub.fail_rate=0", "--for", "0.001s").code == 75
    dies = ("--set", "engine.stub.poison=[row]", "--set", "engine.stub.fail_rate=0", "--set", "engine.max_restarts=0")
    assert job.run("--retry", "failed", *dies).code == 4
    assert as_json(job)["failed"] == 0  # they are pending
    assert job.run("--set", "engine.stub.fail_rate=0").code == 0
    assert as_json(job)["failed"] == 0


def test_while_a_run_works(make_job: MakeJob) -> None:
    job = make_job(BAD, engine={"stub": {"start_s": 600}})
    process = job.start()
    end = time.monotonic() + 60
    while not (job.run_folder / "plan" / "refused.parquet").exists() or not job.manifest("plan"):
        assert time.monotonic() < end
        time.sleep(0.02)
    data = as_json(job)
    process.kill()
    process.communicate()
    assert (data["state"], data["final"], data["rows"]) == ("running", False, 7)
    assert counts(data) == CODES


# ---- the rows themselves ----


def test_exported_rows_can_be_mended_and_fed_back(make_job: MakeJob) -> None:
    job = make_job(BAD, engine={"stub": {"fail_rate": 0}})
    job.run()
    ended = failures(job, "--export", str(job.folder / "bad.jsonl"))
    assert (ended.code, ended.err) == (0, f"4 rows written to {job.folder / 'bad.jsonl'}\n")
    lines = (job.folder / "bad.jsonl").read_bytes().splitlines()
    assert lines[0] == b'{"id": "torn", "prom'  # byte for byte
    assert json.loads(lines[1]) == {"id": "c", "other": 1}  # no key more than it had
    assert json.loads(lines[2]) == {"id": "d", "prompt": ""}
    assert json.loads(lines[3])["half"] == "\U0001f600"
    # Mended, in a job of its own.
    lines[0] = b'{"id": "torn", "prompt": "mended"}'
    mended = [json.dumps(json.loads(line) | {"prompt": f"mended {i}"}) for i, line in enumerate(lines)]
    other = make_job(mended)
    assert other.run().code == 0
    assert [row["text"] for row in other.rows()] == [f"echo:mended {i}" for i in range(4)]
    # And beside the first input, which holds them still.
    (job.folder / "mended.jsonl").write_text("\n".join(mended))
    assert job.run("--set", "input.path=[in.jsonl, mended.jsonl]").code == 3
    assert [row["status"] for row in job.rows()].count("done") == 3 + 4
    assert as_json(job)["failed"] == 4


def test_exported_rows_are_those_of_the_engine_too(make_job: MakeJob) -> None:
    rows = [
        {"id": i, "prompt": f"row {i}", "big": 2**70 + i, "n": None if i % 2 else 0.1, "ä": "\u2028"} for i in range(60)
    ]
    job = make_job(rows, engine={"stub": {"fail_rate": 0.4}})
    assert job.run().code == 3
    failed = [row["id"] for row in job.rows() if row["status"] == "failed"]
    assert [json.loads(line) for line in exported(job)] == [rows[i] for i in failed]
    # Where the input has changed, as they were noted down.
    job.write(rows[::-1])
    ended = failures(job, "--export", str(job.folder / "noted.jsonl"))
    assert "the input has changed since the run has read it: rows are given as they were noted down" in ended.err
    noted = [json.loads(line) for line in (job.folder / "noted.jsonl").read_bytes().splitlines()]
    assert [(row["id"], row["prompt"], int(row["big"])) for row in noted] == [
        (i, f"row {i}", 2**70 + i) for i in failed
    ]
    (job.folder / "in.jsonl").unlink()
    ended = failures(job, "--export", str(job.folder / "gone.jsonl"))
    assert "the input is not at hand" in ended.err
    assert (job.folder / "gone.jsonl").read_bytes() == (job.folder / "noted.jsonl").read_bytes()


def test_export_of_parquet_keeps_types(make_job: MakeJob) -> None:
    table = pa.table(
        {
            "id": pa.array([1, 2, 2**63 + 5], pa.uint64()),
            "prompt": ["fine", "", None],
            "price": pa.array([Decimal("1.10"), Decimal("2.20"), None], pa.decimal128(9, 2)),
            "raw": pa.array([b"\xff", b"\x00", None]),
            "when": pa.array([0, 1, 2], pa.timestamp("us", "UTC")),
        }
    )
    job = make_job(input={"path": "in.parquet"})
    pq.write_table(table, job.folder / "in.parquet")
    assert job.run().code == 3
    assert failures(job, "--export", str(job.folder / "bad.parquet")).code == 0
    assert pq.read_table(job.folder / "bad.parquet").equals(table.slice(1))
    assert [(f["position"], f["id"]) for f in as_json(job)["first"]] == [(2, 2), (3, 2**63 + 5)]
    rows = [json.loads(line) for line in exported(job)]
    assert [row["id"] for row in rows] == [2, 2**63 + 5]
    other = make_job(input={"path": "in.parquet"})
    mended = pq.read_table(job.folder / "bad.parquet").set_column(1, "prompt", pa.array(["b", "c"]))
    pq.write_table(mended, other.folder / "in.parquet")
    assert other.run().code == 0
    assert pq.read_table(other.output).select(table.column_names).equals(mended)


def test_export_of_hive_partitions_and_compressed_files(make_job: MakeJob) -> None:
    job = make_job(input={"path": "data/"})
    (job.folder / "data" / "lang=de").mkdir(parents=True)
    (job.folder / "data" / "lang=de" / "x.jsonl.gz").write_bytes(gzip.compress(b'{"id": 1, "prompt": ""}\n{broken\n'))
    assert job.run().code in (3, 6)
    assert b"{broken" in exported(job)
    ended = failures(job, "--export", str(job.folder / "data" / "bad.jsonl"))
    assert ended.code == 6
    assert "lies where the job looks for its input" in ended.err


def test_lines_of_a_batch_have_their_custom_id(make_job: MakeJob) -> None:
    bodies = [{"messages": [{"role": "user", "content": "x"}]}, {"messages": "no"}]
    rows = [
        {"custom_id": f"q-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    job = make_job(rows, input={"batch": True, "id": None, "prompt": None})
    assert job.run().code == 3
    assert [f["id"] for f in as_json(job)["first"]] == ["q-1"]
    assert [json.loads(line) for line in exported(job)] == [rows[1]]


@pytest.mark.parametrize(
    ("pattern", "name", "is_input"),
    [
        ("in.jsonl", "bad.jsonl", False),
        ("*.jsonl", "bad.jsonl", True),
        ("*.jsonl", "other/bad.jsonl", False),
        ("**/*.jsonl", "bad.jsonl", True),
        ("**/*.jsonl", "other/deep/bad.jsonl", True),
        ("i*.jsonl", "bad.jsonl", False),
    ],
)
def test_export_never_becomes_input(make_job: MakeJob, pattern: str, name: str, is_input: bool) -> None:
    job = make_job(BAD, input={"path": pattern})
    assert job.run().code == 3
    (job.folder / "other" / "deep").mkdir(parents=True)
    ended = failures(job, "--export", str(job.folder / name))
    if is_input:
        assert ended.code == 6
        assert "lies where the job looks for its input" in ended.err
    else:
        assert ended.code == 0, ended.err
    assert (job.folder / name).exists() != is_input
    assert "nothing to do" in job.run().out


def test_where_export_writes(make_job: MakeJob) -> None:
    job = make_job(BAD)
    job.run()
    there = job.folder / "there.jsonl"
    there.write_text("precious")
    (job.folder / "link.jsonl").symlink_to(job.folder / "nowhere")
    for name, code, words in (
        ("there.jsonl", 6, "is there already"),
        ("link.jsonl", 6, "is there already"),
        ("bad.csv", 2, "must end in .jsonl"),
        ("bad.parquet", 2, "JSON Lines, which has no types"),
        ("none/bad.jsonl", 6, "No such file or directory"),
    ):
        ended = failures(job, "--export", str(job.folder / name))
        assert ended.code == code, ended.err
        assert words in ended.err
    assert there.read_text() == "precious"
    assert not (job.folder / "nowhere").exists()
    assert not list(job.folder.glob(".tmp-*"))


def test_a_damaged_file_has_no_row_to_export(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in.jsonl.gz", "id": None})
    whole = gzip.compress(b"".join(b'{"prompt": "row %d"}\n' % i for i in range(2000)))
    (job.folder / "in.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    assert job.run().code == 3
    assert counts(as_json(job)) == {"damaged_file": 1}
    ended = failures(job, "--export", str(job.folder / "bad.jsonl"))
    assert ended.err == (
        "no rows to write\n1 failures are places in a file where there is no row to be had; mend the file there\n"
    )


def test_a_copied_run_folder_still_tells_what_failed(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(BAD)
    job.run()
    shutil.copytree(job.run_folder, tmp_path / "elsewhere.parquet.bulkgen")
    shutil.rmtree(job.folder)
    ended = failures(tmp_path / "elsewhere.parquet", "--json")
    assert counts(json.loads(ended.out)) == CODES
    ended = failures(tmp_path / "elsewhere.parquet", "--export", str(tmp_path / "bad.jsonl"))
    assert ended.code == 0
    lines = (tmp_path / "bad.jsonl").read_bytes().splitlines()
    assert lines[0] == b'{"id": "torn", "prom'
    assert [json.loads(line)["id"] for line in lines[1:]] == ["c", "d", "f"]


def test_a_run_tells_why_rows_failed_and_where_to_look(make_job: MakeJob) -> None:
    ended = make_job(BAD).run()
    assert "4 of 7 rows failed\n" in ended.out
    assert re.search(r"^ +2  empty_prompt ", ended.out, re.MULTILINE)
    assert "--export FILE.jsonl` writes their rows out" in ended.out
    assert "failed\n" not in make_job([{"id": 1, "prompt": "x"}]).run().out
