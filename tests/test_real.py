"""Whole runs on real vLLM with the demo model: the same promises as on the stub, and the counts of a real engine."""

import json
import math
import os
import signal
import time
from collections.abc import Callable
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bulkgen.engine.demo_model import prepare_demo_model
from tests.harness import Job, bulkgen

pytestmark = pytest.mark.real

MakeJob = Callable[..., Job]
ROOT = Path(__file__).parent.parent


def real_job(make_job: MakeJob, rows: int, **engine: Any) -> Job:
    tickets = [json.loads(line) for line in (ROOT / "jobs/data/tickets.jsonl").read_text().splitlines()]
    data = [
        {
            "id": i,
            "messages": [
                {"role": "system", "content": "Summarize in one sentence."},
                {"role": "user", "content": f"{i}. {tickets[i % len(tickets)]['text']}"},
            ],
            "limit": 4 + i * 5 % 40,
        }
        for i in range(rows)
    ]
    job = make_job(
        model="demo",
        input={"prompt": None, "messages": "messages"},
        sampling={"temperature": 0, "max_tokens": {"column": "limit"}},
        output={"commit_rows": 8, "commit_s": 1.0},
        engine={
            "kind": "vllm",
            "config": str(ROOT / "configs/cpu.yaml"),
            "max_model_len": 512,
            "max_num_seqs": 16,
            "env": {"VLLM_CPU_KVCACHE_SPACE": 1},
            **engine,
        },
    )
    job.write(data)
    return job


def report_of(job: Job) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(bulkgen("report", str(job.output), "--json").out)["whole"]
    return whole


def assert_done(job: Job, number: int) -> None:
    rows = job.rows()
    assert [row["id"] for row in rows] == list(range(number))
    assert {row["status"] for row in rows} == {"done"}
    assert all(1 <= row["output_tokens"] <= row["limit"] for row in rows)
    keys = job.committed_keys()
    assert len(keys) == len(set(keys)) == number
    whole = report_of(job)
    for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
        assert whole[name] == sum(row[name] for row in rows)


def wait_until(true: Callable[[], Any], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def committed(job: Job) -> int:
    manifest = job.run_folder / "manifest.jsonl"
    return manifest.read_text().count('"record":"part"') if manifest.exists() else 0


def test_a_run_gives_real_answers_and_true_counts(make_job: MakeJob) -> None:
    job = real_job(make_job, 48)
    ended = job.run()
    assert ended.code == 0, ended.err
    assert_done(job, 48)
    whole = report_of(job)
    assert whole["engine_prompt_tokens"] == whole["prompt_tokens"]
    assert whole["engine_output_tokens"] == whole["output_tokens"]
    assert len({row["text"] for row in job.rows()}) > 24
    assert 0 < whole["job_percent"] < whole["engine_percent"]
    assert_same_counts_as_tokenizer(job)
    assert_never_drained(job)


def assert_same_counts_as_tokenizer(job: Job) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(prepare_demo_model(print))
    for row in job.rows()[:8]:
        ids = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
        assert row["prompt_tokens"] == len(ids)
        assert ids.count(tokenizer.bos_token_id) == 3  # this model begins each turn with the token that is its BOS
        assert ids[0] != ids[1]


def assert_never_drained(job: Job) -> None:
    """From the first sample with rows inside up to the last completion: when samples begin is up to the machine."""
    last = max(p["last_completed_at"] for p in job.manifest("part"))
    samples = pq.read_table(job.run_folder / "timeline.parquet").to_pylist()
    inside = [s["running"] + s["waiting"] for s in samples if s["time"] < last]
    begun = list(dropwhile(lambda rows: not rows, inside))
    assert begun, inside
    assert all(begun), inside


def test_killed_with_its_driver_and_gone_on_with(make_job: MakeJob) -> None:
    job = real_job(make_job, 64)
    process = job.start()
    wait_until(lambda: committed(job) >= 2, 120)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not job.processes(), 10)
    before = len(job.committed_keys())
    assert 0 < before < 64
    assert job.run().code == 0
    assert job.manifest("plan")[-1]["already_done"] == before
    assert_done(job, 64)


def test_two_replicas_share_the_cores_and_one_may_die(make_job: MakeJob) -> None:
    job = real_job(make_job, 64, replicas=2)
    process = job.start()
    wait_until(lambda: committed(job) and len(job.manifest("ready")) == 2, 180)
    victim = min(int(p.parts[2]) for p in job.processes() if p.readlink().name == "engine-1.log")
    assert_on_their_own_cores(job)
    os.kill(victim, signal.SIGKILL)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert "replica 1 died (killed by signal 9); starting it again" in out
    assert_done(job, 64)
    assert [r["replica"] for r in job.manifest("restart")] == [1]


def assert_on_their_own_cores(job: Job) -> None:
    """Each replica computes on one core that is its own, with one thread that is always busy."""
    pids = {link.readlink().name: int(link.parts[2]) for link in job.processes()}
    assert sorted(pids) == ["engine-0.log", "engine-1.log"]
    assert len({frozenset(os.sched_getaffinity(pid)) for pid in pids.values()}) == 2
    half = len(os.sched_getaffinity(0)) // 2
    for pid in pids.values():
        assert len(os.sched_getaffinity(pid)) == half
        ticks = [int(t.read_text().rpartition(")")[2].split()[11]) for t in Path(f"/proc/{pid}/task").glob("*/stat")]
        assert sum(t > max(ticks) / 3 for t in ticks) <= half


def test_a_row_that_kills_vllm_is_found_and_the_others_are_done(make_job: MakeJob) -> None:
    job = real_job(make_job, 24, max_num_seqs=4)
    lines = (job.folder / "in.jsonl").read_text().splitlines()
    job.write([json.loads(line) | ({"limit": 77} if i == 11 else {}) for i, line in enumerate(lines)])
    hook = {"PYTHONPATH": str(ROOT / "tests/poison"), "BULKGEN_TEST_POISON": "77"}
    ended = job.run(env=hook)
    assert ended.code == 3, ended.err
    assert {row["id"]: row["error_code"] for row in job.rows()} == {i: "poison" if i == 11 else None for i in range(24)}
    assert len(job.manifest("restart")) <= math.log2(8) + 2


def test_an_engine_setting_that_vllm_refuses_ends_with_its_words(make_job: MakeJob) -> None:
    job = real_job(make_job, 2, args={"no_such_argument": 1})
    ended = job.run()
    assert ended.code == 4
    assert "no_such_argument" in ended.err
    assert "Traceback" not in ended.err
