"""Rows with the same request: one is sent and the others get its answer, unless the job wants each one sent."""

import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import Job, bulkgen

MakeJob = Callable[..., Job]
GREEDY = {"temperature": 0, "max_tokens": 8}


def asked(number: int, different: int) -> list[dict[str, Any]]:
    """Rows that ask so many different things, over and over."""
    return [{"id": i, "prompt": f"question number {i % different}"} for i in range(number)]


def whole(job: Job) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(bulkgen("report", str(job.output), "--json").out)["whole"]
    return report


def sources(job: Job) -> Counter[str]:
    return Counter(row["answer_from"] for row in job.rows())


def assert_all_answered(job: Job, rows: int) -> None:
    assert [row["id"] for row in job.rows()] == list(range(rows))
    assert all(row["text"] == f"echo:{row['prompt']}" for row in job.rows())
    assert len(set(job.committed_keys())) == len(job.committed_keys()) == rows


def test_sent_once_marked_and_accounted_apart(make_job: MakeJob) -> None:
    job = make_job(asked(60, 20), sampling=GREEDY)
    assert job.run().code == 0
    assert_all_answered(job, 60)
    assert sources(job) == {"engine": 20, "repeat": 40}
    assert [row["answer_from"] for row in job.rows()][:20] == ["engine"] * 20
    repeats = [row for row in job.rows() if row["answer_from"] == "repeat"]
    assert all(row["attempts"] == 0 for row in repeats)
    times = ("queued_s", "ttft_s", "tpot_s", "e2e_s", "cached_tokens")
    assert {row[name] for row in repeats for name in times} == {None}
    sent = [row for row in job.rows() if row["answer_from"] == "engine"]
    report = whole(job)
    assert (report["done"], report["repeated"]) == (60, 40)
    for name in ("prompt_tokens", "output_tokens"):
        assert report[name] == report[f"engine_{name}"] == sum(row[name] for row in sent)
        assert report[f"spared_{name}"] == sum(row[name] for row in repeats)


@pytest.mark.parametrize(
    ("sampling", "repeats", "sent"),
    [
        (GREEDY, "each", 60),
        (GREEDY | {"temperature": 0.7}, "once", 60),
        (GREEDY | {"temperature": 0.7, "seed": 5}, "once", 60),
        (GREEDY | {"temperature": 0.7, "seed": {"column": "seed"}}, "once", 40),
        (GREEDY | {"max_tokens": {"column": "limit"}}, "once", 40),
    ],
    ids=["turned off", "drawn anew", "a seed for each row", "own seeds", "own budgets"],
)
def test_only_where_the_answer_is_decided(make_job: MakeJob, sampling: Any, repeats: str, sent: int) -> None:
    rows = [row | {"seed": row["id"] // 30, "limit": 8 + row["id"] // 30} for row in asked(60, 20)]
    job = make_job(rows, sampling=sampling, repeats=repeats)
    assert job.run().code == 0
    assert_all_answered(job, 60)
    assert sources(job)["engine"] == sent


def test_a_failure_is_one_of_all_that_ask_the_same(make_job: MakeJob) -> None:
    job = make_job(asked(40, 10), sampling=GREEDY, engine={"stub": {"poison": ["number 3"]}})
    assert job.run().code == 3
    assert {row["id"] for row in job.rows() if row["error_code"] == "poison"} == {3, 13, 23, 33}
    assert Counter(row["status"] for row in job.rows()) == {"done": 36, "failed": 4}
    assert sources(job) == {"engine": 10, "repeat": 30}
    assert [row["attempts"] > 0 for row in job.rows() if row["status"] == "failed"] == [True, False, False, False]
    report = whole(job)
    assert (report["done"], report["failed"], report["repeated"]) == (36, 4, 30)


def test_all_of_them_go_again_when_one_is_retried(make_job: MakeJob) -> None:
    job = make_job(asked(40, 10), sampling=GREEDY, engine={"stub": {"cut": ["number 3"]}})
    assert job.run().code == 0
    before = len(job.committed_keys())
    assert job.run("--retry", "truncated").code == 0
    assert len(job.committed_keys()) == before + 4
    assert job.manifest("plan")[-1]["following"] == 3


def test_rows_that_came_later_are_sent_once_too(make_job: MakeJob) -> None:
    job = make_job(asked(20, 10), sampling=GREEDY)
    assert job.run().code == 0
    job.write(asked(50, 10))
    assert job.run().code == 0
    assert_all_answered(job, 50)
    assert job.manifest("plan")[-1]["pending"] == 30
    assert sources(job) == {"engine": 20, "repeat": 30}


def test_killed_again_and_again(make_job: MakeJob) -> None:
    job = make_job(
        asked(400, 40),
        sampling=GREEDY,
        output={"commit_rows": 3},
        engine={"stub": {"step_s": 0.01}, "max_num_seqs": 4},
    )
    for kill in range(3):
        process = job.start()
        until = time.monotonic() + 60
        while len(job.manifest("part") if job.run_folder.exists() else []) < 2 * (kill + 1):
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert job.run().code == 0
    assert_all_answered(job, 400)


def test_with_a_replica_that_dies(make_job: MakeJob) -> None:
    job = make_job(
        asked(300, 30),
        sampling=GREEDY,
        output={"commit_rows": 5},
        engine={"replicas": 2, "stub": {"die_at": [7, 5]}},
    )
    assert job.run().code == 0
    assert_all_answered(job, 300)


def test_no_row_is_committed_before_those_that_follow_it(make_job: MakeJob) -> None:
    """Else a death between the two parts would leave rows that follow nothing."""
    job = make_job(asked(300, 3), sampling=GREEDY, output={"commit_rows": 1})
    assert job.run().code == 0
    assert_all_answered(job, 300)
    first = {row["row_key"]: row["answer_from"] for row in job.rows()}
    assert [first[key.hex()] for key in job.committed_keys()].index("engine") == 99
