"""Public fault cases about engines that die, hang or err; whole runs on the stub engine, told to misbehave."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import Job, bulkgen

MakeJob = Callable[..., Job]

ROWS = [{"id": f"r{i:03d}", "prompt": f"row {i:03d} {'word ' * (i * 7 % 40)}"} for i in range(40)]
SMALL: dict[str, Any] = {"max_num_seqs": 8}


def outcome(job: Job) -> dict[str, str]:
    """Code by id, `done` for rows that are."""
    return {row["id"]: row["error_code"] or row["status"] for row in job.rows()}


def all_done_but(bad: dict[str, str], rows: list[dict[str, Any]] = ROWS) -> dict[str, str]:
    return {row["id"]: bad.get(row["id"], "done") for row in rows}


def answers_are_their_own(job: Job) -> bool:
    return all(row["text"] == f"echo:{row['prompt']}" for row in job.rows() if row["status"] == "done")


def test_60a_engine_dies_once_in_the_middle(make_job: MakeJob) -> None:
    job = make_job(ROWS, engine={**SMALL, "stub": {"die_at": [17]}})
    assert job.run().code == 0
    assert outcome(job) == all_done_but({})
    assert answers_are_their_own(job)
    assert len(job.manifest("restart")) == 1
    report = json.loads(bulkgen("report", str(job.output), "--json").out)["whole"]
    assert len(report["restarts"]) == 1


@pytest.mark.parametrize("guilty", ["row 000", "row 020", "row 039"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_60b_a_row_that_kills_the_engine_is_singled_out(make_job: MakeJob, guilty: str, replicas: int) -> None:
    job = make_job(ROWS, engine={**SMALL, "replicas": replicas, "stub": {"poison": [guilty]}})
    ended = job.run()
    assert ended.code == 3, ended.err
    assert outcome(job) == all_done_but({f"r{guilty[-3:]}": "poison"})
    assert answers_are_their_own(job)
    bad = job.failures()
    assert [row["error_code"] for row in bad] == ["poison"]
    assert "the engine died" in bad[0]["error"]
    # The engine holds a batch and as much again in its queue.
    assert len(job.manifest("restart")) <= math.log2(16) + 2
    (row,) = [row for row in job.rows() if row["status"] == "failed"]
    assert row["attempts"] >= 2
    assert len(set(job.committed_keys())) == len(job.committed_keys()) == 40


def test_60b_several_of_them(make_job: MakeJob) -> None:
    job = make_job(ROWS, engine={**SMALL, "max_restarts": 6, "stub": {"poison": ["row 003", "row 021", "row 022"]}})
    ended = job.run()
    assert ended.code == 3, ended.err
    assert outcome(job) == all_done_but({"r003": "poison", "r021": "poison", "r022": "poison"})


def test_60b_the_only_row_that_is_left(make_job: MakeJob) -> None:
    job = make_job(ROWS[:20], engine={**SMALL, "stub": {"poison": ["row 020"]}})
    assert job.run().code == 0
    job.write(ROWS[:21])
    ended = job.run()
    assert ended.code == 3, ended.err
    assert outcome(job) == all_done_but({"r020": "poison"}, ROWS[:21])


def test_60b_a_poison_row_stays_failed_and_can_be_retried(make_job: MakeJob) -> None:
    job = make_job(ROWS, engine={**SMALL, "stub": {"poison": ["row 020"]}})
    assert job.run().code == 3
    assert job.run().code == 3
    assert len(job.manifest("ready")) == len(job.manifest("restart")) + 1
    assert job.run("--retry", "poison", "--set", "engine.stub.poison=[]").code == 0
    assert outcome(job) == all_done_but({})


def test_60c_an_engine_that_dies_of_everything_ends_the_run(make_job: MakeJob) -> None:
    job = make_job(ROWS, engine={**SMALL, "stub": {"poison": ["row"]}})
    ended = job.run()
    assert ended.code == 4
    assert "killed by signal 9" in ended.err
    assert not job.manifest("part")
    assert len(job.manifest("restart")) == 3
    assert job.run("--set", "engine.stub.poison=[]").code == 0
    assert outcome(job) == all_done_but({})


def test_60c_an_engine_that_never_starts(make_job: MakeJob) -> None:
    job = make_job(ROWS, engine={**SMALL, "stub": {"die_on_start": 99}})
    ended = job.run()
    assert ended.code == 4
    assert "could not start" in ended.err
    assert not job.manifest("part")


def test_60d_a_row_that_never_returns(make_job: MakeJob) -> None:
    job = make_job(ROWS, engine={**SMALL, "row_timeout_s": 1.5, "stub": {"stuck": ["row 005"], "step_s": 0.001}})
    ended = job.run()
    assert ended.code == 3, ended.err
    assert outcome(job) == all_done_but({"r005": "row_timeout"})
    assert "engine.row_timeout_s" in job.failures()[0]["error"]


def test_60d_an_engine_that_falls_silent(make_job: MakeJob) -> None:
    job = make_job(ROWS, engine={**SMALL, "stall_s": 1.0, "stub": {"hang_at": [17], "step_s": 0.001}})
    ended = job.run()
    assert ended.code == 0, ended.err
    assert outcome(job) == all_done_but({})
    assert "engine.stall_s" in job.manifest("restart")[0]["reason"]


def test_60d_an_engine_whose_rows_all_hang(make_job: MakeJob) -> None:
    job = make_job(ROWS[:4], engine={**SMALL, "stall_s": 0.5, "max_restarts": 1, "stub": {"stuck": ["row"]}})
    ended = job.run()
    assert ended.code == 4
    assert "stood still" in ended.err


def test_60d_an_engine_that_hangs_while_it_loads(make_job: MakeJob) -> None:
    job = make_job(ROWS[:4], engine={"start_timeout_s": 1.0, "stub": {"start_s": 600}})
    ended = job.run()
    assert ended.code == 4
    assert "engine.start_timeout_s" in ended.err


@pytest.mark.parametrize(("fault", "words"), [("double_rate", "returned row"), ("swap_rate", "answer to another row")])
def test_answers_that_come_twice_or_to_the_wrong_row_are_noticed(make_job: MakeJob, fault: str, words: str) -> None:
    job = make_job(ROWS, engine={**SMALL, "stub": {fault: 0.1, "seed": 3}})
    ended = job.run()
    assert ended.code == 0, ended.err
    assert outcome(job) == all_done_but({})
    assert answers_are_their_own(job)
    assert words in job.manifest("restart")[0]["reason"]


def test_answers_that_never_come_are_noticed(make_job: MakeJob) -> None:
    job = make_job(ROWS, engine={**SMALL, "stub": {"lose_rate": 0.1, "seed": 3}})
    assert job.run().code == 0
    assert outcome(job) == all_done_but({})
    assert "has lost" in job.manifest("restart")[0]["reason"]


def test_what_fails_for_a_passing_reason_is_tried_again(make_job: MakeJob) -> None:
    job = make_job(ROWS, engine={**SMALL, "stub": {"flaky_rate": 0.4}})
    assert job.run().code == 0
    assert {row["attempts"] for row in job.rows()} == {1, 2}
    job = make_job(ROWS, engine={**SMALL, "max_attempts": 1, "stub": {"flaky_rate": 0.4}})
    assert job.run().code == 3
    assert {row["error_code"] for row in job.rows()} == {None, "ended_by_engine"}
    assert job.run("--retry", "ended_by_engine", "--set", "engine.stub.flaky_rate=0").code == 0
    assert outcome(job) == all_done_but({})


def test_a_row_that_can_never_be_in_the_kv_cache_fails_before_it_is_sent(make_job: MakeJob) -> None:
    rows = [*ROWS[:3], {"id": "big", "prompt": "word " * 2000}, *ROWS[3:6]]
    job = make_job(rows, engine={**SMALL, "stub": {"kv_tokens": 512}})
    assert job.run().code == 3
    assert outcome(job) == all_done_but({"big": "larger_than_kv_cache"}, rows)
    assert "lower sampling.max_tokens" in job.failures()[0]["error"]
