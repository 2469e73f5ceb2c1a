"""Whole runs on the stub engine, from the command line: what goes in comes out, once, in order."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkgen.preparation import open_job_model
from bulkgen.rundir import RunDir
from bulkgen.spec import load_spec
from tests.harness import Job, assert_nobody_left, bulkgen, prompts

MakeJob = Callable[..., Job]


def assert_whole(job: Job, ids: list[str], texts: bool = True) -> None:
    """Every row once, in input order, with its own answer, and no row committed twice."""
    rows = job.rows()
    assert [row["id"] for row in rows] == ids
    if texts:
        assert all(row["text"] == "echo:" + row["prompt"] for row in rows if row["status"] == "done")
    keys = job.committed_keys()
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_row_comes_out_once_in_order(make_job: MakeJob, output: str, replicas: int) -> None:
    rows = prompts(500)
    job = make_job(rows, output={"path": output, "file_rows": 200}, engine={"replicas": replicas})
    assert job.run().code == 0
    assert_whole(job, [row["id"] for row in rows])
    assert [row["extra"] for row in job.rows()] == [row["extra"] for row in rows]
    if output == "out/":
        assert [p.name for p in sorted(job.output.glob("*.parquet"))] == [f"part-{i:05d}.parquet" for i in range(3)]


def test_columns_stand_as_documented(make_job: MakeJob) -> None:
    job = make_job(prompts(3))
    assert job.run().code == 0
    assert pq.read_schema(job.output).names == [
        *("id", "prompt", "extra", "status", "text", "finish_reason", "prompt_tokens", "cached_tokens"),
        *("output_tokens", "queued_s", "ttft_s", "tpot_s", "e2e_s", "error_code", "error"),
        *("warnings", "attempts", "answer_from", "settings_key", "request_key", "row_key"),
    ]
    row = job.rows()[0]
    assert row["status"] == "done"
    assert 1 <= row["output_tokens"] <= 8
    assert row["queued_s"] <= row["ttft_s"] <= row["e2e_s"]
    assert len(row["row_key"]) == 32


def test_parquet_columns_come_out_as_they_went_in(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in.parquet"})
    table = pa.table(
        {
            "id": pa.array([1, 2, 2**63 + 5], pa.uint64()),
            "prompt": pa.array(["a", "b", "c"], pa.large_string()),
            "kind": pa.array(["x", None, "x"]).dictionary_encode(),
            "when": pa.array([0, 1, None], pa.timestamp("us", "Europe/Berlin")),
            "nested": pa.array([[{"a": 1}], [], None], pa.list_(pa.struct([("a", pa.int8())]))),
            "bytes": pa.array([b"\x00\xff", b"", None], pa.binary()),
        }
    )
    pq.write_table(table, job.folder / "in.parquet")
    assert job.run().code == 0
    assert pq.read_table(job.output).select(table.column_names).equals(table)


def test_bad_rows_fail_with_a_reason_and_the_rest_goes_on(make_job: MakeJob) -> None:
    job = make_job(
        [
            {"id": "a", "prompt": "fine"},
            '{"id": "torn", "prom',
            {"id": "c"},
            {"id": "d", "prompt": None},
            "",
            {"id": "e", "prompt": "x" * 400},
            {"id": "f", "prompt": "fine too"},
        ],
        engine={"max_model_len": 100},
    )
    ended = job.run()
    assert ended.code == 3
    rows = job.rows()
    assert [(row["id"], row["status"]) for row in rows] == [
        ("a", "done"),
        (None, "failed"),
        ("c", "failed"),
        ("d", "failed"),
        ("e", "failed"),
        ("f", "done"),
    ]
    failures = job.failures()
    assert [(f["position"], f["error_code"]) for f in failures] == [
        (2, "bad_json"),
        (3, "missing_column"),
        (4, "null_prompt"),
        (6, "prompt_too_long"),
    ]
    assert failures[0]["raw"] == b'{"id": "torn", "prom'
    assert json.loads(failures[1]["row"]) == {"id": "c"}
    assert "134 tokens" in failures[3]["error"]
    assert "100" in failures[3]["error"]
    assert job.run().code == 3


def test_rows_that_the_engine_refuses_fail_with_the_row_beside(make_job: MakeJob) -> None:
    job = make_job(prompts(200), engine={"stub": {"fail_rate": 0.2, "seed": 3}})
    assert job.run().code == 3
    failed = [row for row in job.rows() if row["status"] == "failed"]
    assert 10 < len(failed) < 90
    assert [json.loads(f["row"])["id"] for f in job.failures()] == [row["id"] for row in failed]
    assert {f["error_code"] for f in job.failures()} == {"refused_by_engine"}
    # A failed row is not tried again by itself, and the run is as finished as before.
    parts = len(job.manifest("part"))
    assert job.run().code == 3
    assert len(job.manifest("part")) == parts


def test_sampling_comes_from_columns_where_the_spec_says_so(make_job: MakeJob) -> None:
    rows = [{"id": i, "prompt": f"p{i}", "limit": n} for i, n in enumerate([1, 3, 5, None, 0, "many"])]
    job = make_job(rows, sampling={"max_tokens": {"column": "limit"}}, engine={"stub": {"output_tokens": 100}})
    assert job.run().code == 3
    assert [row["output_tokens"] for row in job.rows()] == [1, 3, 5, 100, None, None]
    assert [f["error_code"] for f in job.failures()] == ["bad_sampling"] * 2


def test_a_template_and_a_system_prompt_make_the_prompt(make_job: MakeJob) -> None:
    job = make_job(
        [{"id": 1, "a": "one", "label-x": "two"}],
        input={
            "path": "in.jsonl",
            "id": "id",
            "prompt": None,
            "template": "{{ a }} and {{ row['label-x'] }}",
            "system": "Be {{ a }}.",
        },
    )
    assert job.run().code == 0
    assert job.rows()[0]["text"] == "echo:system: Be one.\nuser: one and two"


# ---- going on ----


def test_a_finished_job_does_nothing_and_says_so(make_job: MakeJob) -> None:
    job = make_job(prompts(50))
    job.run()
    before = (job.run_folder / "manifest.jsonl").read_bytes()
    ended = job.run()
    assert ended.code == 0
    assert "nothing to do" in ended.out
    assert (job.run_folder / "manifest.jsonl").read_bytes() == before


def test_a_price_that_comes_later_counts_for_the_whole_run(make_job: MakeJob) -> None:
    job = make_job(prompts(50))
    job.run()
    assert "per 1M output" not in bulkgen("report", str(job.output)).out
    ended = job.run("--set", "price.usd_per_hour=3600")
    assert "nothing to do" in ended.out
    whole = json.loads(bulkgen("report", str(job.output), "--json").out)["whole"]
    assert whole["usd"] == pytest.approx(whole["start_s"] + whole["generate_s"])


def test_only_new_and_changed_rows_are_generated(make_job: MakeJob) -> None:
    rows = prompts(100)
    job = make_job(rows)
    job.run()
    rows[10]["prompt"] = "changed"
    rows.insert(5, {"id": "new", "prompt": "a new row in between", "extra": -1})
    job.write(rows)
    assert job.run().code == 0
    assert_whole(job, [row["id"] for row in rows])
    assert [plan["pending"] for plan in job.manifest("plan")] == [100, 2]


def test_rows_that_left_the_input_leave_the_output(make_job: MakeJob) -> None:
    rows = prompts(60)
    job = make_job(rows)
    job.run()
    job.write(rows[::2])
    assert job.run().code == 0
    assert_whole(job, [row["id"] for row in rows[::2]])
    assert job.manifest("plan")[-1]["pending"] == 0


@pytest.mark.parametrize(
    ("override", "again"),
    [
        ("sampling.temperature=0.5", True),
        ("sampling.max_tokens=4", True),
        ("input.chat=false", False),  # the stub model's chat format adds nothing to a single message
        ("price.usd_per_hour=3", False),
        ("engine.max_num_seqs=4", False),
        ("shards.target_rows=7", False),
        ("output.commit_rows=3", False),
        ("name=other", False),
    ],
)
def test_what_changes_a_rows_identity(make_job: MakeJob, override: str, again: bool) -> None:
    job = make_job(prompts(30))
    job.run()
    committed = len(job.committed_keys())
    assert job.run("--set", override, "--changed", "again").code == 0
    assert len(job.committed_keys()) == committed * (2 if again else 1)
    assert_whole(job, [row["id"] for row in prompts(30)])


def test_rows_without_an_id_are_known_by_their_place(make_job: MakeJob) -> None:
    rows = [{"prompt": "same"}] * 20
    job = make_job(rows, input={"id": None})
    assert job.run().code == 0
    job.write([*rows, {"prompt": "same"}])
    assert job.run().code == 0
    assert len(job.rows()) == 21
    assert job.manifest("plan")[-1]["pending"] == 1


def test_equal_rows_with_equal_ids_are_each_done_once(make_job: MakeJob) -> None:
    job = make_job([{"id": "x", "prompt": "same"}] * 5)
    assert job.run().code == 0
    assert len(job.rows()) == 5
    keys = {row["row_key"] for row in job.rows()}
    assert len(keys) == 5


def test_equal_rows_that_are_refused_keep_keys_of_their_own(make_job: MakeJob) -> None:
    job = make_job([{"id": "x", "prompt": ""}] * 3 + [{"id": "x", "prompt": "fine"}])
    assert job.run().code == 3
    assert len({row["row_key"] for row in job.rows()}) == 4
    assert [f["row_key"] for f in job.failures()] == [row["row_key"] for row in job.rows()[:3]]


def test_a_merge_that_was_cut_off_is_done_again(make_job: MakeJob) -> None:
    job = make_job(prompts(20))
    job.run()
    manifest = job.run_folder / "manifest.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(line for line in lines if '"record":"merged"' not in line and '"end"' not in line))
    parts = job.manifest("part")
    job.output.write_bytes(b"half of another merge")
    assert job.run().code == 0
    assert_whole(job, [row["id"] for row in prompts(20)])
    assert job.manifest("part") == parts


@pytest.mark.parametrize(
    ("output", "damage"),
    [
        ("out.parquet", "removed"),
        ("out.parquet", "emptied"),
        ("out.parquet", "no failures"),
        ("out/", "removed"),
        ("out/", "no failures"),
    ],
)
def test_an_output_that_is_no_longer_whole_is_made_again_without_the_engine(
    make_job: MakeJob, output: str, damage: str
) -> None:
    job = make_job(prompts(30), output={"path": output, "file_rows": 10})
    job.run()
    file = job.output if output == "out.parquet" else job.output / "part-00001.parquet"
    if damage == "no failures":
        (job.run_folder / "failures.parquet").unlink()
    elif damage == "removed":
        file.unlink()
    else:
        file.write_bytes(b"")
    ended = job.run("--set", "engine.stub.die_on_start=9")
    assert ended.code == 0, ended.err
    assert_whole(job, [row["id"] for row in prompts(30)])
    assert job.failures() == []


def test_another_layout_is_made_without_the_engine(make_job: MakeJob) -> None:
    job = make_job(prompts(30), output={"path": "out/"})
    job.run()
    assert job.run("--set", "output.file_rows=7", "--set", "engine.stub.die_on_start=9").code == 0
    assert len(list(job.output.glob("*.parquet"))) == 5


def test_a_spec_that_went_and_came_back_is_merged_again(make_job: MakeJob) -> None:
    job = slow(make_job, 100)
    job.run()
    process = job.start("--set", "sampling.temperature=0.5", "--changed", "again")
    wait_for_parts(job, len(job.manifest("part")) + 1, process)
    process.terminate()
    process.communicate()
    assert job.run("--changed", "again").code == 0
    assert_whole(job, [row["id"] for row in prompts(100)])
    report = json.loads(bulkgen("report", str(job.output), "--json").out)["whole"]
    assert (report["outcome"], report["done"], report["pending"]) == ("finished", 100, 0)
    assert json.loads(bulkgen("status", str(job.output), "--json").out)["state"] == "finished"


@pytest.mark.parametrize("name", ["schema.bin", "bucket-00.arrow", "refused.parquet", "keys.bin"])
def test_a_plan_that_is_no_longer_whole_is_made_again(make_job: MakeJob, name: str) -> None:
    job = make_job(prompts(30))
    job.run()
    job.output.unlink()
    (job.run_folder / "plan" / name).unlink()
    assert job.run().code == 0
    assert_whole(job, [row["id"] for row in prompts(30)])


def test_a_start_that_died_before_its_first_record_is_no_obstacle(make_job: MakeJob) -> None:
    job = make_job(prompts(3), output={"path": "out/"})
    (job.output / "_bulkgen" / "parts").mkdir(parents=True)
    assert job.run().code == 0


def test_what_the_stub_makes_up_never_stands_for_a_models_answers(make_job: MakeJob) -> None:
    job = make_job(prompts(3), model="demo", engine={"max_model_len": 512})
    models = [
        open_job_model(load_spec(job.path, [f"engine.kind={kind}"]), print).fingerprint for kind in ("stub", "vllm")
    ]
    assert models[0] != models[1]


def test_modules_in_the_working_directory_are_not_ours(make_job: MakeJob) -> None:
    job = make_job(prompts(3))
    (job.folder / "queue.py").write_text("raise SystemExit('not this one')")
    (job.folder / "bulkgen").mkdir()
    script = str(Path(sys.executable).with_name("bulkgen"))
    done = subprocess.run([script, "run", "-q", "job.yaml"], cwd=job.folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- deaths and stops ----


def test_nohup_survives_the_hang_up(make_job: MakeJob) -> None:
    job = slow(make_job, 100)
    command = ["nohup", sys.executable, "-m", "bulkgen", "run", "-q", str(job.path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_parts(job, 1, process)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0


def test_looking_does_not_get_in_the_way(make_job: MakeJob) -> None:
    run = RunDir(make_job(prompts(1)).folder)
    script = (
        "from pathlib import Path\nfrom bulkgen.rundir import RunDir\n"
        f"while True: RunDir(Path({str(run.path)!r})).is_held()"
    )
    with run.held():
        pass
    looker = subprocess.Popen([sys.executable, "-c", script])
    try:
        for _ in range(200):
            with run.held():
                pass
    finally:
        looker.kill()
        looker.wait()


def wait_for_parts(job: Job, parts: int, process: object) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        manifest = job.run_folder / "manifest.jsonl"
        if manifest.exists() and manifest.read_text().count('"record":"part"') >= parts:
            return
        time.sleep(0.02)
    pytest.fail("no part was committed in a minute")


def slow(make_job: MakeJob, rows: int = 300, **engine: object) -> Job:
    return make_job(
        prompts(rows),
        output={"commit_rows": 10, "commit_s": 0.2},
        engine={"max_num_seqs": 8, "stub": {"step_s": 0.004}, **engine},
        sampling={"max_tokens": 20},
    )


def test_killed_again_and_again_no_row_is_lost_or_done_twice(make_job: MakeJob) -> None:
    job = slow(make_job, replicas=2)
    for _ in range(4):
        process = job.start()
        wait_for_parts(job, len(job.manifest("part")) + 2 if job.run_folder.exists() else 2, process)
        process.kill()
        process.communicate()
        assert_nobody_left(job)
    assert job.run().code == 0
    assert_whole(job, [row["id"] for row in prompts(300)])
    report = json.loads(bulkgen("report", str(job.output), "--json").out)
    assert report["whole"]["done"] == 300
    assert report["whole"]["output_tokens"] == sum(row["output_tokens"] for row in job.rows())
    assert [start["outcome"] for start in report["starts"]] == ["killed"] * 4 + ["finished"]


def test_parts_that_never_reached_the_manifest_are_removed(make_job: MakeJob) -> None:
    job = slow(make_job, 40)
    job.run()
    manifest = job.run_folder / "manifest.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    last_part = max(i for i, line in enumerate(lines) if '"record":"part"' in line)
    # As if killed between the last part's rename and its record.
    manifest.write_text("".join(lines[:last_part]) + lines[last_part][:40])
    job.output.unlink()
    assert job.run().code == 0
    assert_whole(job, [row["id"] for row in prompts(40)])
    known = {part["name"] for part in job.manifest("part")}
    assert {p.name for p in (job.run_folder / "parts").iterdir()} == known


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_commits_what_is_finished_and_exits_75(make_job: MakeJob, number: signal.Signals) -> None:
    job = slow(make_job)
    process = job.start()
    wait_for_parts(job, 1, process)
    process.send_signal(number)
    began = time.monotonic()
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 75
    assert time.monotonic() - began < 10
    assert number.name in out
    assert "run the same command again" in out
    assert_nobody_left(job)
    assert 0 < len(job.committed_keys()) < 300
    assert job.manifest("end")[-1]["outcome"] == "stopped"
    assert job.run().code == 0
    assert_whole(job, [row["id"] for row in prompts(300)])


def test_a_second_ctrl_c_ends_at_once(make_job: MakeJob) -> None:
    job = slow(make_job, stub={"step_s": 0.004, "hang_at": [5]})
    process = job.start()
    until = time.monotonic() + 30
    while '"record":"ready"' not in (_text(job.run_folder / "manifest.jsonl")) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert time.monotonic() - began < 2
    assert_nobody_left(job)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_rows_in_a_long_first_step_are_seen_inside(make_job: MakeJob) -> None:
    job = make_job(prompts(4), engine={"stub": {"step_s": 2.5}}, sampling={"max_tokens": 1})
    assert job.run().code == 0
    samples = pq.read_table(job.run_folder / "timeline.parquet").to_pylist()
    inside = [s["running"] + s["waiting"] for s in samples if not s["steps"]]
    assert max(inside, default=0) == 4, samples


def test_a_second_run_is_told_who_holds_the_output(make_job: MakeJob) -> None:
    job = slow(make_job, stub={"step_s": 0.1})  # not finished before the others have looked at it
    process = job.start()
    wait_for_parts(job, 1, process)
    ended = job.run()
    assert ended.code == 5
    assert f"held by process {process.pid}" in ended.err
    status = json.loads(bulkgen("status", str(job.output), "--json").out)
    assert status["state"] == "running"
    process.terminate()
    process.communicate()


def test_a_replica_that_dies_is_started_again_and_its_rows_go_again(make_job: MakeJob) -> None:
    job = slow(make_job, replicas=2, stub={"step_s": 0.002, "die_at": [40, 40]})
    assert job.run().code == 0
    assert_whole(job, [row["id"] for row in prompts(300)])
    restarts = job.manifest("restart")
    assert len(restarts) >= 2
    assert all("killed by signal 9" in r["reason"] for r in restarts)
    report = json.loads(bulkgen("report", str(job.output), "--json").out)
    assert len(report["whole"]["restarts"]) == len(restarts)


def test_an_engine_that_keeps_dying_ends_the_run_with_4_and_keeps_what_is_done(make_job: MakeJob) -> None:
    job = make_job(prompts(40), engine={"max_restarts": 2})
    job.run()
    job.write(prompts(80))
    ended = job.run("--set", "engine.stub.poison=[row]")
    assert ended.code == 4
    assert "died 3 times in a row without having finished a row" in ended.err
    assert "Traceback" not in ended.err
    assert len(job.committed_keys()) == 40
    assert job.run().code == 0
    assert_whole(job, [row["id"] for row in prompts(80)])


def test_an_engine_that_dies_now_and_then_gets_to_the_end(make_job: MakeJob) -> None:
    job = slow(make_job, stub={"step_s": 0.002, "die_at": [60] * 10}, max_restarts=2)
    assert job.run().code == 0
    assert_whole(job, [row["id"] for row in prompts(300)])
    assert not [row for row in job.rows() if row["status"] != "done"]


def test_an_engine_that_cannot_start_ends_the_run_with_its_words(make_job: MakeJob) -> None:
    job = make_job(prompts(5), engine={"stub": {"die_on_start": 9}})
    ended = job.run()
    assert ended.code == 4
    assert "could not start" in ended.err
    assert "told to die at start" in ended.err


# ---- what a user sees ----


def test_quiet_prints_nothing(make_job: MakeJob) -> None:
    ended = make_job(prompts(5)).run("--quiet")
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_a_log_file_gets_plain_lines(make_job: MakeJob) -> None:
    ended = make_job(prompts(5)).run()
    assert "\r" not in ended.err + ended.out
    assert "\x1b" not in ended.err + ended.out


def test_the_report_adds_up(make_job: MakeJob) -> None:
    job = make_job(prompts(400), price={"usd_per_hour": 36.0}, engine={"replicas": 2})
    job.run()
    whole = json.loads(bulkgen("report", str(job.output), "--json").out)["whole"]
    rows = job.rows()
    for name in ("prompt_tokens", "output_tokens"):
        assert whole[name] == sum(row[name] for row in rows) == whole[f"engine_{name}"]
    assert whole["usd"] == pytest.approx(0.01 * 2 * (whole["start_s"] + whole["generate_s"]))
    shards = pq.read_table(job.run_folder / "shards.parquet").to_pylist()
    assert sum(shard["rows"] for shard in shards) == 400


def test_status_of_a_finished_run(make_job: MakeJob) -> None:
    job = make_job(prompts(7))
    job.run()
    status = json.loads(bulkgen("status", str(job.output), "--json").out)
    assert (status["state"], status["done"]) == ("finished", 7)


def test_render_shows_what_is_sent(make_job: MakeJob) -> None:
    job = make_job([{"id": "a", "prompt": "first"}, {"id": "b", "prompt": "second"}, {"id": "c"}])
    shown = bulkgen("render", str(job.path))
    assert shown.code == 0
    assert "first" in shown.out
    assert "missing_column" in shown.out
    one = bulkgen("render", str(job.path), "--row", "b")
    assert "second" in one.out
    assert "first" not in one.out
    assert bulkgen("render", str(job.path), "--row", "zzz").code == 6
