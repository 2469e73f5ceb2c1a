"""What `bulkgen status` says of a run that works, has ended, was stopped or was killed."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bulkgen.report import Status, load_status, render_status, status_json
from bulkgen.rundir import FORMAT


def start(number: int, **more: Any) -> dict[str, Any]:
    return {
        "record": "start",
        "start": number,
        "time": 1000.0 * number,
        "host": "box",
        "pid": 42,
        "version": "0.1.0",
        "identity": "x",
        "replicas": 2,
        "usd_per_hour": None,
        **more,
    }


def plan(number: int, rows: int, already: int = 0, refused: int = 0) -> dict[str, Any]:
    return {
        "record": "plan",
        "start": number,
        "plan": number,
        "rows": rows,
        "refused": refused,
        "already_done": already,
        "pending": rows - refused - already,
        "prompt_tokens": 1,
        "budget_tokens": 1,
        "shards": 1,
        "plan_s": 0.1,
        "fingerprint": "f",
    }


def part(number: int, done: int, failed: int = 0) -> dict[str, Any]:
    return {
        "record": "part",
        "start": number,
        "plan": number,
        "replica": 0,
        "incarnation": 0,
        "name": "p",
        "rows": done + failed,
        "done": done,
        "failed": failed,
        "prompt_tokens": 1,
        "cached_tokens": 0,
        "output_tokens": 1,
        "first_offered_at": 1.0,
        "last_completed_at": 2.0,
    }


def end(number: int, outcome: str, code: int, message: str = "") -> dict[str, Any]:
    return {
        "record": "end",
        "start": number,
        "time": 1.0,
        "outcome": outcome,
        "exit_code": code,
        "message": message,
    }


def write(folder: Path, *records: dict[str, Any]) -> Path:
    lines = [{"record": "format", "format": FORMAT, "bulkgen": "0.1.0"}, *records]
    folder.joinpath("manifest.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    return folder


def write_progress(folder: Path, **more: Any) -> None:
    progress = {
        "time": 1100.0,
        "start": 1,
        "pid": 42,
        "host": "box",
        "stage": "generating",
        "rows": 100,
        "done": 40,
        "failed": 1,
        "refused": 2,
        "tokens_done": 400,
        "tokens_planned": 1000,
        "output_tokens": 200,
        "output_tokens_per_s": 20.0,
        "total_tokens_per_s": 50.0,
        "running": 8,
        "waiting": 4,
        "kv_usage": 0.5,
        "eta_s": 12.0,
        "replicas": 2,
    }
    folder.joinpath("progress.json").write_text(json.dumps({**progress, **more}))


def shown(status: Status) -> str:
    stream = io.StringIO()
    render_status(status, Console(file=stream, width=200))
    return stream.getvalue()


def test_running(tmp_path: Path) -> None:
    write(tmp_path, start(1), plan(1, 100, refused=2), part(1, 30))
    write_progress(tmp_path)
    status = load_status(tmp_path, True, now=1101.0)
    assert (status.state, status.stage, status.age_s) == ("running", "generating", 1.0)
    assert (status.rows, status.done, status.failed, status.refused, status.pending) == (100, 40, 1, 2, 57)
    text = shown(status)
    assert "running, generating" in text
    assert "43 of 100 finished (43%): 40 done, 1 failed, 2 refused by planning, 57 pending" in text
    assert "output 20.0 tokens/s, total 50.0 tokens/s, running 8, waiting 4, KV 50%, ETA 12.0s" in text
    assert "start     1, process 42 on box, 2 replica(s)" in text
    assert "\x1b" not in text


def test_a_clock_that_was_set_back(tmp_path: Path) -> None:
    write(tmp_path, start(1), plan(1, 100))
    write_progress(tmp_path)
    status = load_status(tmp_path, True, now=500.0)
    assert status.age_s == 0.0
    assert "no news" not in status.next


def test_merged_rows_are_not_taken_for_rows_that_are_done(tmp_path: Path) -> None:
    write(tmp_path, start(1), plan(1, 100, refused=2), part(1, 90, 8))
    write_progress(tmp_path, stage="merging", done=55, failed=0, refused=0, tokens_planned=0, tokens_done=0)
    status = load_status(tmp_path, True, now=1101.0)
    assert (status.stage, status.done, status.failed, status.refused, status.pending) == ("merging", 90, 8, 2, 0)


def test_nothing_of_a_run_drives_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;title\x07\u202egnp\r\nbulkgen: all done"
    folder = tmp_path / f"a{evil.replace('/', '')}"
    folder.mkdir()
    write(folder, start(1, host=evil), plan(1, 100), end(1, "failed", 4, evil))
    for alive in (True, False):
        text = shown(load_status(folder, alive))
        assert not set("\x1b\x07\r\u202e") & set(text)
        assert not any(line.startswith("bulkgen: all done") for line in text.splitlines())


def test_running_without_news(tmp_path: Path) -> None:
    write(tmp_path, start(1), plan(1, 100))
    write_progress(tmp_path)
    assert "no news for 5m 00s" in load_status(tmp_path, True, now=1400.0).next


def test_a_new_start_does_not_show_the_old_ones_progress(tmp_path: Path) -> None:
    write(tmp_path, start(1), plan(1, 100), part(1, 30), end(1, "stopped", 75), start(2))
    write_progress(tmp_path)
    status = load_status(tmp_path, True, now=2001.0)
    assert (status.state, status.stage, status.progress) == ("running", "beginning", None)
    assert status.done == 30


def test_held_before_the_first_start(tmp_path: Path) -> None:
    status = load_status(write(tmp_path), True)
    assert (status.state, status.stage, status.rows) == ("running", "beginning", 0)


def test_held_again_after_an_end(tmp_path: Path) -> None:
    write(tmp_path, start(1), plan(1, 10), part(1, 10), end(1, "finished", 0))
    status = load_status(tmp_path, True)
    assert (status.state, status.stage, status.message) == ("running", "beginning", None)


def test_finished(tmp_path: Path) -> None:
    write(tmp_path, start(1), plan(1, 10), part(1, 10), end(1, "finished", 0))
    write_progress(tmp_path, stage="finished")
    status = load_status(tmp_path, False)
    assert (status.state, status.done, status.pending, status.progress) == ("finished", 10, 0, None)
    assert "10 of 10 committed (100%)" in shown(status)
    assert "nothing to do" in status.next


def test_finished_with_failures(tmp_path: Path) -> None:
    write(tmp_path, start(1), plan(1, 10, refused=1), part(1, 7, failed=2), end(1, "finished", 3))
    status = load_status(tmp_path, False)
    assert (status.done, status.failed, status.refused, status.pending) == (7, 2, 1, 0)
    assert "why 3 rows failed" in status.next


@pytest.mark.parametrize("outcome", ["stopped", "failed"])
def test_ended_early(tmp_path: Path, outcome: str) -> None:
    write(tmp_path, start(1), plan(1, 10), part(1, 4), end(1, outcome, 75, "device \x1b[31mgone"))
    status = load_status(tmp_path, False)
    assert (status.state, status.done, status.pending) == (outcome, 4, 6)
    assert "goes on; 4 rows are committed and will not be generated again" in status.next
    assert "device \\x1b[31mgone" in shown(status)


def test_killed_shows_what_is_committed_not_what_was_seen_last(tmp_path: Path) -> None:
    write(tmp_path, start(1), plan(1, 100), part(1, 30))
    write_progress(tmp_path)
    status = load_status(tmp_path, False)
    assert (status.state, status.done, status.pending) == ("killed", 30, 70)


def test_rows_of_several_starts(tmp_path: Path) -> None:
    first = (start(1), plan(1, 100), part(1, 30, failed=1))
    write(tmp_path, *first, start(2), plan(2, 100, already=31), part(2, 20), end(2, "stopped", 75))
    status = load_status(tmp_path, False)
    assert (status.done, status.failed, status.pending, status.start) == (50, 1, 49, 2)


def test_stale_rows_are_not_counted(tmp_path: Path) -> None:
    first = (start(1), plan(1, 100), part(1, 100), end(1, "finished", 0))
    write(tmp_path, *first, start(2), plan(2, 60, already=10), part(2, 5))
    status = load_status(tmp_path, False)
    assert (status.rows, status.done, status.pending) == (60, 15, 45)


def test_not_started(tmp_path: Path) -> None:
    status = load_status(write(tmp_path), False)
    assert (status.state, status.rows) == ("not started", 0)
    assert "not started" in shown(status)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"start": 1}'])
def test_damaged_progress_is_passed_over(tmp_path: Path, damage: str) -> None:
    write(tmp_path, start(1), plan(1, 100), part(1, 30))
    tmp_path.joinpath("progress.json").write_text(damage)
    status = load_status(tmp_path, True)
    assert (status.state, status.done, status.progress) == ("running", 30, None)


def test_json(tmp_path: Path) -> None:
    write(tmp_path, start(1), plan(1, 100))
    write_progress(tmp_path)
    data = json.loads(json.dumps(status_json(load_status(tmp_path, True, now=1101.0)), allow_nan=False))
    assert data["state"] == "running"
    assert data["progress"]["total_tokens_per_s"] == 50.0
    assert data["progress"]["eta_s"] == 12.0
