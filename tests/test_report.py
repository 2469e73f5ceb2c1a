"""The report: sums over starts, percentiles, KV usage, cost, the files, the JSON and the tables.

Runs are written by hand here, as a run would leave them, so that each figure can be counted on fingers.
"""

import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from bulkgen.errors import OutputError
from bulkgen.report import Computed, Report, render_report, report_json, summarize, write_reports
from bulkgen.rundir import FORMAT, RunDir, read_manifest
from tests.harness import bulkgen

PART_SCHEMA = pa.schema(
    [
        ("key", pa.binary(16)),
        ("shard", pa.int32()),
        ("status", pa.string()),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("queued_s", pa.float64()),
        ("ttft_s", pa.float64()),
        ("tpot_s", pa.float64()),
        ("e2e_s", pa.float64()),
        ("error_code", pa.string()),
        ("error", pa.string()),
        ("warnings", pa.list_(pa.string())),
        ("attempts", pa.int32()),
        ("answer_from", pa.string()),
        ("answers", pa.int32()),
    ]
)


def key(number: int) -> bytes:
    # Ends in a zero byte, which fixed-width strings of numpy do not show.
    return number.to_bytes(8, "little") + b"\1" * 7 + b"\0"


def row(number: int, **more: Any) -> dict[str, Any]:
    done = {
        "key": key(number),
        "shard": 0,
        "status": "done",
        "text": "words",
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 5,
        "queued_s": 0.5,
        "ttft_s": 1.0,
        "tpot_s": 0.25,
        "e2e_s": 2.0,
        "answer_from": "engine",
    }
    return {**done, **more}


def failed(number: int, code: str = "too_long_for_engine") -> dict[str, Any]:
    return {
        "key": key(number),
        "shard": 0,
        "status": "failed",
        "prompt_tokens": 7,
        "cached_tokens": 0,
        "output_tokens": 0,
        "error_code": code,
        "error": "no",
        "answer_from": "engine",
    }


class Run:
    """A run folder, record by record."""

    def __init__(self, folder: Path) -> None:
        self.dir = RunDir(folder / "out.parquet.bulkgen")
        self.dir.create()
        self.start_number = 0
        self.parts = 0
        self.record(record="format", format=FORMAT, bulkgen="0.1.0")

    def record(self, **fields: Any) -> None:
        with self.dir.manifest.open("a") as f:
            f.write(json.dumps(fields) + "\n")

    def start(self, time: float, *, rows: int, before: int = 0, refused: int = 0, **more: Any) -> None:
        self.start_number += 1
        begun = {
            "host": "box",
            "pid": 1,
            "version": "0.1.0",
            "identity": "x",
            "replicas": 1,
            "usd_per_hour": 3.6,
        }
        self.record(record="start", start=self.start_number, time=time, **{**begun, **more})
        self.record(
            record="plan",
            start=self.start_number,
            plan=self.start_number,
            rows=rows,
            refused=refused,
            already_done=before,
            pending=rows - before - refused,
            prompt_tokens=0,
            budget_tokens=0,
            shards=1,
            plan_s=1.5,
            fingerprint="f",
        )

    def ready(self, start_s: float, replica: int = 0, incarnation: int = 0) -> None:
        self.record(
            record="ready",
            start=self.start_number,
            replica=replica,
            incarnation=incarnation,
            start_s=start_s,
            kv_tokens=1,
            block_size=1,
            max_num_seqs=1,
            max_model_len=1,
        )

    def part(
        self,
        rows: Iterable[dict[str, Any]],
        offered: float,
        completed: float,
        replica: int = 0,
        incarnation: int = 0,
    ) -> Path:
        rows = list(rows)
        name = f"part-s{self.start_number:04d}-r{replica}-i{incarnation}-{self.parts:06d}.parquet"
        self.parts += 1
        pq.write_table(pa.Table.from_pylist(rows, PART_SCHEMA), self.dir.parts / name)
        done = sum(r["status"] == "done" for r in rows)
        tokens = {n: sum(r[n] for r in rows) for n in ("prompt_tokens", "cached_tokens", "output_tokens")}
        self.record(
            record="part",
            start=self.start_number,
            plan=self.start_number,
            replica=replica,
            incarnation=incarnation,
            name=name,
            rows=len(rows),
            done=done,
            failed=len(rows) - done,
            **tokens,
            write_s=0.25,
            first_offered_at=offered,
            last_completed_at=completed,
        )
        return self.dir.parts / name

    def closed(self, prompt: int, output: int, preemptions: int = 0, replica: int = 0, incarnation: int = 0) -> None:
        counters = {
            "prompt_tokens": prompt,
            "cached_tokens": 0,
            "output_tokens": output,
            "preemptions": preemptions,
        }
        where = {"start": self.start_number, "replica": replica, "incarnation": incarnation}
        self.record(record="closed", **where, counters=counters)

    def end(self, time: float, outcome: str = "finished", code: int = 0, message: str = "") -> None:
        where = {"start": self.start_number, "time": time}
        self.record(record="end", **where, outcome=outcome, exit_code=code, message=message)

    def sample(self, time: float, **more: Any) -> None:
        sample = {
            "time": time,
            "start": self.start_number,
            "replica": 0,
            "incarnation": 0,
            "running": 1,
            "waiting": 0,
            "kv_usage": 0.0,
            "preemptions": 0,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "output_tokens": 0,
            "done": 0,
            "failed": 0,
        }
        self.log(json.dumps({**sample, **more}) + "\n")

    def log(self, text: str) -> None:
        with self.dir.timeline_log.open("a") as f:
            f.write(text)

    def report(self, **options: Any) -> Report:
        return summarize(self.dir, read_manifest(self.dir.manifest), **options)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


TOLD = {"flops_s": 7.0}


class TestPhysicalLimit:
    """How near to what the device allows the committed rows came."""

    def start(self, run: Run, time: float, planned: bool = True) -> None:
        """Two replicas; one row with one answer, one with two, and a failed one. 8 s of generation, 20 s in all."""
        run.start(time, rows=3, replicas=2)
        if planned:
            run.record(record="planned", start=run.start_number, physics=TOLD)
        run.ready(1.0)
        first = 3 * run.start_number
        two = row(first + 1, prompt_tokens=3, cached_tokens=0, output_tokens=8, answers=2)
        nothing = dict.fromkeys(("prompt_tokens", "cached_tokens", "output_tokens"), 0)
        run.part([row(first, answers=1), two, failed(first + 2) | nothing], time + 2, time + 10)
        counters = {"prompt_tokens": 16, "cached_tokens": 4, "output_tokens": 13, "preemptions": 0, "steps": 9}
        run.record(record="closed", start=run.start_number, replica=0, incarnation=0, counters=counters)
        run.end(time + 20)

    def test_of_what_was_computed_in_the_steps_that_were_taken(self, run: Run) -> None:
        self.start(run, 100.0)
        asked: list[tuple[object, Computed, int]] = []

        def least_s(*about: Any) -> float:
            asked.append(about)
            return 3.0

        limit = run.report(least_s=least_s).whole.limit
        assert (limit.limit_s, limit.engine_percent, limit.job_percent) == (1.5, 100 * 1.5 / 8, 100 * 1.5 / 20)
        # A prompt of 10 with 4 cached looks at 55 - 10 tokens, its 4 decode steps at 11 + 12 + 13 + 14; a prompt of 3
        # at 6, and the 3 decode steps of each of its two answers at 4 + 5 + 6.
        computed = Computed(answers=3, prefill_tokens=9, decode_tokens=10, prefill_pairs=51, decode_pairs=80)
        assert asked == [(TOLD, computed, 9)]

    def test_over_the_starts_that_knew_their_device(self, run: Run) -> None:
        self.start(run, 100.0)
        self.start(run, 200.0, planned=False)
        report = run.report(least_s=lambda *about: 4.0)
        assert [start.limit.limit_s for start in report.starts] == [2.0, None]
        assert (report.whole.limit.engine_percent, report.whole.limit.job_percent) == (25.0, 10.0)

    def text(self, report: Report) -> str:
        stream = io.StringIO()
        render_report(report, Console(file=stream, width=160))
        return stream.getvalue()

    def test_shown_where_it_is_known(self, run: Run) -> None:
        self.start(run, 100.0)
        assert "device" not in self.text(run.report())
        text = self.text(run.report(least_s=lambda *about: 4.0))
        assert re.search(r"device, generation +25% +of what the device allows at its rates: 2.0s at least", text)
        assert re.search(r"device, wall time +10%", text)


def one_start(run: Run) -> None:
    """Ten rows: seven done (one cut), two failed in the engine, one refused."""
    run.start(1000.0, rows=10, refused=1)
    run.ready(20.0)
    run.part([*(row(i) for i in range(5)), failed(7)], 1021.0, 1026.0)
    cut = row(6, finish_reason="length", output_tokens=1, tpot_s=None, shard=1)
    run.part([row(5, shard=1), cut, failed(8, "other")], 1022.0, 1031.0)
    run.closed(prompt=84, output=31, preemptions=2)
    run.record(record="merged", start=1, plan=1, time=1032.0, merge_s=0.5, rows=10, done=7, failed=3)
    run.end(1033.0, code=3)


class TestOneStart:
    def test_rows_and_tokens(self, run: Run) -> None:
        one_start(run)
        report = run.report()
        whole, start = report.whole, report.starts[0]
        rows = whole.rows
        assert (rows.rows, rows.done, rows.failed, rows.refused, rows.pending) == (10, 7, 2, 1, 0)
        assert (rows.finish_stop, rows.finish_length, rows.finish_other) == (6, 1, 0)
        assert (start.rows.rows, start.rows.done, start.rows.failed, start.rows.refused) == (9, 7, 2, 1)
        tokens = whole.tokens
        assert (tokens.prompt_tokens, tokens.cached_tokens, tokens.output_tokens) == (84, 28, 31)
        assert start.tokens == tokens
        assert whole.finish_reasons == {"stop": 6, "length": 1}
        assert whole.error_codes == {"other": 1, "too_long_for_engine": 1}
        assert whole.outcome == "finished"

    def test_times_apart(self, run: Run) -> None:
        one_start(run)
        seconds = run.report().whole.seconds
        assert (seconds.plan_s, seconds.start_s, seconds.generate_s) == (1.5, 20.0, 10.0)
        assert (seconds.write_s, seconds.merge_s, seconds.wall_s, seconds.lost_s) == (0.5, 0.5, 33.0, 0.0)

    def test_speed_is_over_generation(self, run: Run) -> None:
        one_start(run)
        speed = run.report().whole.speed
        assert speed.rows_per_s == pytest.approx(0.9)
        assert speed.prompt_tokens_per_s == pytest.approx(8.4)
        assert speed.cached_tokens_per_s == pytest.approx(2.8)
        assert speed.output_tokens_per_s == pytest.approx(3.1)
        assert speed.total_tokens_per_s == pytest.approx(11.5)

    def test_cost(self, run: Run) -> None:
        one_start(run)
        cost = run.report().whole.cost
        assert cost.usd == pytest.approx(0.030)  # 3.6 $/h is 0.001 $/s; 20 s + 10 s
        assert cost.generate_usd == pytest.approx(0.010)
        assert cost.lost_usd == 0.0
        assert cost.usd_per_1k_rows == pytest.approx(0.030 / 7 * 1000)
        assert cost.usd_per_million_prompt_tokens == pytest.approx(0.030 / 84 * 1e6)
        assert cost.usd_per_million_output_tokens == pytest.approx(0.030 / 31 * 1e6)

    def test_engine_counters_equal_the_rows(self, run: Run) -> None:
        one_start(run)
        engine = run.report().whole.engine
        assert (engine.engine_prompt_tokens, engine.engine_output_tokens, engine.preemptions) == (84, 31, 2)
        assert (engine.lost_prompt_tokens, engine.lost_output_tokens) == (0, 0)

    def test_shards(self, run: Run) -> None:
        one_start(run)
        first, second = run.report().shards
        assert (first.plan, first.shard, first.rows, first.done, first.failed) == (1, 0, 7, 5, 2)
        assert (first.prompt_tokens, first.output_tokens, first.service_s) == (64, 25, 10.0)
        assert (second.shard, second.rows, second.output_tokens, second.service_s) == (1, 2, 6, 4.0)
        assert (second.starts, second.replicas) == ([1], [0])

    def test_no_price(self, run: Run) -> None:
        run.start(1000.0, rows=1, usd_per_hour=None)
        run.ready(20.0)
        run.part([row(1)], 1021.0, 1026.0)
        cost = run.report().whole.cost
        assert cost.usd is None
        assert cost.usd_per_1k_rows is None

    def test_replicas_cost_each(self, run: Run) -> None:
        run.start(1000.0, rows=2, replicas=2)
        run.ready(10.0, replica=0)
        run.ready(14.0, replica=1)
        run.part([row(1)], 1010.0, 1020.0, replica=0)
        run.part([row(2)], 1014.0, 1030.0, replica=1)
        whole = run.report().whole
        assert (whole.seconds.start_s, whole.seconds.generate_s) == (10.0, 20.0)
        assert whole.cost.usd == pytest.approx(0.060)
        assert run.report().shards[0].replicas == [0, 1]


class TestPercentiles:
    def test_exact_over_all_parts(self, run: Run) -> None:
        values = np.random.default_rng(1).random(1000)
        run.start(0.0, rows=1000)
        for i in range(0, 1000, 100):
            run.part([row(j, e2e_s=values[j]) for j in range(i, i + 100)], 1.0, 2.0)
        e2e = run.report().whole.latency.e2e_s
        expected = [float(np.quantile(values, q)) for q in (0.5, 0.9, 0.95, 0.99, 1.0)]
        assert [e2e.p50, e2e.p90, e2e.p95, e2e.p99, e2e.max] == pytest.approx(expected)
        assert e2e.count == 1000

    def test_rows_without_the_figure_do_not_count(self, run: Run) -> None:
        one_start(run)
        latency = run.report().whole.latency
        assert latency.e2e_s.count == 7
        assert latency.tpot_s.count == 6
        assert latency.tpot_s.max == 0.25

    def test_none_at_all(self, run: Run) -> None:
        run.start(0.0, rows=1)
        run.part([failed(1)], 1.0, 2.0)
        ttft = run.report().whole.latency.ttft_s
        assert (ttft.count, ttft.p50, ttft.max) == (0, None, None)

    def test_by_start_and_whole(self, run: Run) -> None:
        run.start(0.0, rows=3)
        run.part([row(1, ttft_s=1.0)], 1.0, 2.0)
        run.start(10.0, rows=3, before=1)
        run.part([row(2, ttft_s=3.0), row(3, ttft_s=5.0)], 11.0, 12.0)
        report = run.report()
        assert [s.latency.ttft_s.p50 for s in report.starts] == [1.0, 4.0]
        assert report.whole.latency.ttft_s.p50 == 3.0


def killed_and_resumed(run: Run) -> None:
    """Start 1 is killed with work in flight, start 2 before it commits; start 3 restarts a replica."""
    run.start(1000.0, rows=6)
    run.ready(10.0)
    run.part([row(0), row(1)], 1010.0, 1014.0)
    run.sample(1012.0, prompt_tokens=20, output_tokens=6)
    run.sample(1017.0, prompt_tokens=40, output_tokens=13, preemptions=1)
    run.start(2000.0, rows=6, before=2)
    run.ready(10.0)
    run.sample(2011.0, running=3, prompt_tokens=30, output_tokens=2)
    run.log('{"time": 2012.0, "start": 2, "repl')  # torn by the kill, and the next start goes on in its line
    run.start(3000.0, rows=6, before=2)
    run.ready(10.0)
    run.sample(3010.0, prompt_tokens=1000)  # lost together with the torn line before it
    run.part([row(2)], 3010.0, 3012.0)
    run.sample(3013.0, prompt_tokens=15, output_tokens=8)
    run.record(record="restart", start=3, replica=0, incarnation=1, time=3014.0, reason="killed by signal 9")
    run.ready(9.0, incarnation=1)
    run.part([row(3), row(4), row(5)], 3024.0, 3030.0, incarnation=1)
    run.closed(prompt=30, output=15, incarnation=1)
    run.end(3031.0)


class TestSeveralStarts:
    def test_totals_are_right(self, run: Run) -> None:
        killed_and_resumed(run)
        report = run.report()
        assert [s.outcome for s in report.starts] == ["killed", "killed", "finished"]
        assert [s.rows.rows for s in report.starts] == [2, 0, 4]
        whole = report.whole
        assert (whole.rows.rows, whole.rows.done, whole.rows.pending) == (6, 6, 0)
        assert (whole.tokens.prompt_tokens, whole.tokens.output_tokens) == (60, 30)
        assert sum(s.tokens.output_tokens for s in report.starts) == whole.tokens.output_tokens

    def test_seconds_add_up_and_restarts_are_inside(self, run: Run) -> None:
        killed_and_resumed(run)
        report = run.report()
        assert [s.seconds.generate_s for s in report.starts] == [4.0, 0.0, 20.0]
        assert [s.seconds.start_s for s in report.starts] == [10.0, 10.0, 10.0]
        assert [s.seconds.wall_s for s in report.starts] == [17.0, 11.0, 31.0]
        assert [s.seconds.lost_s for s in report.starts] == [3.0, 0.0, 0.0]
        assert report.whole.seconds.generate_s == 24.0
        assert report.whole.seconds.wall_s == 59.0
        assert report.whole.speed.output_tokens_per_s == pytest.approx(30 / 24)

    def test_work_lost_by_kills(self, run: Run) -> None:
        killed_and_resumed(run)
        report = run.report()
        assert [s.engine.lost_prompt_tokens for s in report.starts] == [20, 30, 5]
        assert [s.engine.lost_output_tokens for s in report.starts] == [3, 2, 3]
        assert report.whole.engine.engine_prompt_tokens == 40 + 30 + 15 + 30
        assert report.whole.engine.lost_output_tokens == 8
        assert report.whole.engine.preemptions == 1

    def test_an_engine_that_was_never_sampled_did_what_is_committed(self, run: Run) -> None:
        run.start(0.0, rows=1)
        run.ready(1.0)
        run.part([row(1)], 1.0, 2.0)
        engine = run.report().whole.engine
        assert (engine.engine_prompt_tokens, engine.engine_output_tokens) == (10, 5)
        assert (engine.lost_prompt_tokens, engine.lost_output_tokens) == (0, 0)

    def test_restarts_with_reasons(self, run: Run) -> None:
        killed_and_resumed(run)
        report = run.report()
        (restart,) = report.whole.restarts
        assert (restart.start, restart.replica, restart.reason) == (3, 0, "killed by signal 9")
        assert report.starts[0].restarts == ()

    def test_cost_is_the_sum(self, run: Run) -> None:
        killed_and_resumed(run)
        cost = run.report().whole.cost
        assert cost.usd == pytest.approx(0.054)
        assert cost.lost_usd == pytest.approx(0.003)
        assert cost.usd_per_hour == 3.6

    def test_different_prices(self, run: Run) -> None:
        run.start(0.0, rows=2, usd_per_hour=3.6)
        run.part([row(1)], 0.0, 10.0)
        run.start(100.0, rows=2, before=1, usd_per_hour=7.2)
        run.part([row(2)], 100.0, 110.0)
        cost = run.report().whole.cost
        assert cost.usd == pytest.approx(0.030)
        assert cost.usd_per_hour is None

    def test_one_start_without_a_price_makes_the_cost_unknown(self, run: Run) -> None:
        run.start(0.0, rows=2, usd_per_hour=None)
        run.part([row(1)], 0.0, 10.0)
        run.start(100.0, rows=2, before=1)
        run.part([row(2)], 100.0, 110.0)
        assert run.report().whole.cost.usd is None

    def test_a_start_that_did_nothing_needs_no_price(self, run: Run) -> None:
        run.start(0.0, rows=1, usd_per_hour=None)
        run.start(100.0, rows=1)
        run.part([row(1)], 100.0, 110.0)
        assert run.report().whole.cost.usd == pytest.approx(0.010)

    def test_a_start_at_work_is_running(self, run: Run) -> None:
        killed_and_resumed(run)
        run.start(4000.0, rows=8, before=6)
        report = run.report(alive=True)
        assert [s.outcome for s in report.starts] == ["killed", "killed", "finished", "running"]
        assert (report.whole.rows.rows, report.whole.rows.pending) == (8, 2)


class TestChangedInput:
    def change(self, run: Run) -> None:
        run.start(0.0, rows=4)
        run.part([row(i) for i in range(3)], 0.0, 10.0)
        run.part([row(3, finish_reason="length"), failed(4)], 0.0, 10.0)
        # Rows 2, 3 and 4 are gone from the input, row 9 is new.
        run.start(100.0, rows=3, before=2)
        run.part([row(9)], 100.0, 110.0)

    @staticmethod
    def in_plan(part: Path, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.bool_]:
        assert keys.dtype == np.dtype("S16")
        return np.isin(keys, np.array([key(0), key(1), key(9)], "S16"))

    def test_the_whole_is_of_the_data_as_it_is(self, run: Run) -> None:
        self.change(run)
        report = run.report(in_plan=self.in_plan)
        whole = report.whole
        assert (whole.rows.rows, whole.rows.done, whole.rows.failed, whole.rows.pending) == (3, 3, 0, 0)
        assert (whole.tokens.prompt_tokens, whole.tokens.output_tokens) == (30, 15)
        assert (whole.stale.stale_rows, whole.stale.stale_prompt_tokens) == (3, 27)
        assert not whole.stale.stale_in_sums
        assert whole.finish_reasons == {"stop": 3}
        assert whole.rows.finish_length == 0

    def test_starts_speed_and_cost_are_of_all_work(self, run: Run) -> None:
        self.change(run)
        report = run.report(in_plan=self.in_plan)
        assert report.starts[0].rows.rows == 5
        assert report.starts[0].stale.stale_rows == 3
        assert report.whole.speed.output_tokens_per_s == pytest.approx(25 / 20)
        assert report.whole.cost.usd_per_1k_rows == pytest.approx(0.020 / 5 * 1000)

    def test_without_the_plan_the_sums_say_that_they_hold_more(self, run: Run) -> None:
        self.change(run)
        stale = run.report().whole.stale
        assert (stale.stale_rows, stale.stale_in_sums) == (3, True)

    def test_the_plan_is_not_asked_when_nothing_is_stale(self, run: Run) -> None:
        def never(part: Path, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.bool_]:
            raise AssertionError

        killed_and_resumed(run)
        assert run.report(in_plan=never).whole.stale.stale_rows == 0


class TestTimeline:
    def test_kv_usage_over_the_steady_part(self, run: Run) -> None:
        one_start(run)
        # It fills, is full, and empties once there is no new prompt.
        for t, prompts, done, usage in (
            (1, 10, 0, 0.1),
            (2, 30, 0, 0.5),
            (3, 40, 2, 0.9),
            (4, 50, 5, 0.8),
            (5, 60, 9, 1.0),
            (6, 60, 10, 0.6),
            (7, 60, 12, 0.2),
        ):
            run.sample(1020.0 + t, running=9, prompt_tokens=prompts, done=done, kv_usage=usage)
        kv = run.report().whole.kv
        assert kv.kv_usage_mean == pytest.approx(0.9)
        assert (kv.kv_usage_peak, kv.kv_usage_covers) == (1.0, "steady")

    def test_each_engine_has_its_own_steady_part(self, run: Run) -> None:
        one_start(run)
        for replica, first, usage in ((0, 1021.0, 0.5), (1, 1025.0, 0.7)):
            for t in range(3):
                told = {"running": 3, "prompt_tokens": 10 * t, "done": 2 * t, "kv_usage": usage if t else 0.1}
                run.sample(first + t, replica=replica, **told)
        # All that a third one got was inside at once.
        run.sample(1022.0, replica=2, running=3, prompt_tokens=30, kv_usage=0.2)
        run.sample(1023.0, replica=2, running=1, prompt_tokens=30, done=2, kv_usage=0.1)
        assert run.report().whole.kv.kv_usage_mean == pytest.approx(0.6)

    def test_an_engine_that_got_all_at_once_has_no_steady_part(self, run: Run) -> None:
        one_start(run)
        run.sample(1021.0, running=0, kv_usage=0.0)
        run.sample(1022.0, running=2, kv_usage=0.4)
        kv = run.report().whole.kv
        assert (kv.kv_usage_mean, kv.kv_usage_covers) == (0.4, "running")

    def test_no_samples(self, run: Run) -> None:
        one_start(run)
        kv = run.report().whole.kv
        assert (kv.kv_usage_mean, kv.kv_usage_peak, kv.kv_usage_covers) == (None, None, None)

    def test_rates_are_within_one_engine(self, run: Run) -> None:
        one_start(run)
        for t in range(3):
            run.sample(1021.0 + 2 * t, prompt_tokens=100 * t, output_tokens=10 * t)
            run.sample(1021.5 + 2 * t, replica=1, output_tokens=1000 * t)
        run.log('{"time": 1030.0, "sta')
        timeline = run.report().timeline
        assert timeline["output_tokens_per_s"].to_list() == [None, 5.0, 5.0, None, 500.0, 500.0]
        assert timeline["prompt_tokens_per_s"].to_list()[:3] == [None, 50.0, 50.0]
        assert timeline["t_s"].to_list()[:3] == [21.0, 23.0, 25.0]

    def test_a_torn_line_costs_only_itself(self, run: Run) -> None:
        killed_and_resumed(run)
        assert run.report().timeline["time"].to_list() == [1012.0, 1017.0, 2011.0, 3013.0]


class TestWarnings:
    def rows(self, run: Run) -> None:
        run.start(0.0, rows=8, refused=2, left_out={"files": 5, "names": ["_a.parquet", ".b.parquet", "_c", "_d"]})
        empty = {"text": "", "warnings": ["prompt_truncated", "empty_output"]}
        run.part([row(0), row(1, **empty), row(2, **empty, finish_reason="length")], 1.0, 2.0)
        run.part([row(3, warnings=["prompt_truncated"], attempts=3), row(4, attempts=1), failed(5)], 1.0, 2.0)
        codes = pa.table({"code": ["empty_prompt", "damaged_file"], "row": ["a", "b"]})
        run.dir.refused.parent.mkdir()
        pq.write_table(codes, run.dir.refused)

    def test_they_are_counted_by_code(self, run: Run) -> None:
        self.rows(run)
        whole = run.report().whole
        assert whole.warnings == {"prompt_truncated": 3, "empty_output": 2}
        assert (whole.rows.empty, whole.rows.empty_at_length, whole.rows.retried) == (2, 1, 1)
        assert whole.refused_codes == {"damaged_file": 1, "empty_prompt": 1}
        assert whole.error_codes == {"too_long_for_engine": 1}

    def test_those_of_stale_rows_are_not(self, run: Run) -> None:
        self.rows(run)
        run.start(100.0, rows=3, before=3)

        def in_plan(part: Path, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.bool_]:
            return np.isin(keys, np.array([key(0), key(2), key(4)], "S16"))

        whole = run.report(in_plan=in_plan).whole
        assert whole.warnings == {"prompt_truncated": 1, "empty_output": 1}
        assert (whole.rows.empty, whole.rows.empty_at_length, whole.rows.retried) == (1, 1, 0)

    def test_refused_rows_of_another_plan_are_not(self, run: Run) -> None:
        self.rows(run)
        run.start(100.0, rows=8, before=5, refused=1)
        assert run.report().whole.refused_codes == {}

    def test_they_are_in_the_table_the_json_and_the_file(self, run: Run) -> None:
        self.rows(run)
        report = run.report()
        write_reports(report, run.dir)
        whole = pq.read_table(run.dir.report).to_pylist()[-1]
        assert whole["warnings"] == [{"code": "prompt_truncated", "rows": 3}, {"code": "empty_output", "rows": 2}]
        assert (whole["empty"], whole["empty_at_length"], whole["retried"], whole["left_out_files"]) == (2, 1, 1, 5)
        assert whole["left_out"] == ["_a.parquet", ".b.parquet", "_c", "_d"]
        data = report_json(report)["whole"]
        assert data["warnings"] == {"prompt_truncated": 3, "empty_output": 2}
        assert data["left_out"] == ["_a.parquet", ".b.parquet", "_c", "_d"]
        text = TestTables().show(report, width=120)
        shown = [re.sub(r"\s{2,}", " | ", line.strip()) for line in text.splitlines()]
        for line in (
            "3 | warning: prompt_truncated",
            "1 | refused by planning: damaged_file",
            "rows empty | 2 | done without text, 1 of them cut",
            "rows retried | 1 | an engine was given them more than once",
            "files left out | 5 | names begin with _ or a dot: _a.parquet, .b.parquet, _c, ...",
        ):
            assert line in shown


class TestClockSetBack:
    """Wall-clock times that fall, as after a clock was set: nothing is negative, nothing fails."""

    def test_no_figure_is_negative(self, run: Run) -> None:
        run.start(1000.0, rows=4)
        run.ready(1.0)
        run.part([row(0), row(1)], offered=1010.0, completed=400.0)
        for t in (1011.0, 1012.0, 411.0, 412.0):
            run.sample(t, waiting=1, output_tokens=int(t) % 1000, kv_usage=0.5)
        run.record(record="restart", start=1, replica=0, incarnation=1, time=420.0, reason="killed by signal 9")
        run.end(430.0, "stopped", 75)
        run.start(200.0, rows=4, before=2)
        run.part([row(2), row(3)], offered=300.0, completed=100.0)
        run.end(90.0)
        report = run.report()
        write_reports(report, run.dir)

        def numbers(value: Any) -> Iterable[float]:
            if isinstance(value, dict):
                return [n for name, inner in value.items() if name != "time" for n in numbers(inner)]
            if isinstance(value, list):
                return [n for inner in value for n in numbers(inner)]
            return [value] if isinstance(value, int | float) else []

        data = report_json(report)
        for section in (data["whole"], *data["starts"]):
            own = {name: value for name, value in section.items() if not name.startswith("lost_")}
            assert all(n >= 0 for n in numbers(own))
            assert section["lost_s"] >= 0
        timeline = report.timeline
        for name in ("t_s", "output_tokens_per_s"):
            assert all(value >= 0 for value in timeline[name].drop_nulls())
        assert timeline["time"].to_list() == [1011.0, 1012.0, 411.0, 412.0]
        text = TestTables().show(report)
        assert not re.search(r"[\s+]-\d", text)


class TestBeginnings:
    def test_no_start(self, run: Run) -> None:
        report = run.report()
        assert (report.whole.outcome, report.starts, report.shards) == ("not started", (), ())
        assert report.whole.speed.rows_per_s is None

    def test_killed_while_planning(self, run: Run) -> None:
        run.record(record="start", start=1, time=5.0, host="h", pid=1, replicas=1, usd_per_hour=1.0)
        report = run.report()
        assert report.starts[0].outcome == "killed"
        assert report.whole.rows.rows == 0
        assert report.whole.cost.usd is None

    def test_all_rows_refused(self, run: Run) -> None:
        run.start(0.0, rows=3, refused=3)
        run.end(1.0, code=3)
        rows = run.report().whole.rows
        assert (rows.rows, rows.done, rows.refused, rows.pending) == (3, 0, 3, 0)

    def test_first_engine_died_while_loading(self, run: Run) -> None:
        run.start(0.0, rows=1)
        run.ready(12.0, incarnation=1)
        assert run.report().starts[0].seconds.start_s == 12.0

    def test_a_part_that_is_gone(self, run: Run) -> None:
        one_start(run)
        run.start(2000.0, rows=11, before=9)
        run.part([row(99)], 2001.0, 2002.0).unlink()
        with pytest.raises(OutputError, match=r"part-s0002-r0-i0-000002.parquet: in the manifest but not there"):
            run.report()

    def test_a_part_that_is_damaged(self, run: Run) -> None:
        run.start(0.0, rows=1)
        run.part([row(1)], 1.0, 2.0).write_bytes(b"PAR1 nothing PAR1")
        with pytest.raises(OutputError, match=r"a part cannot be read"):
            run.report()


class TestFiles:
    def test_one_record_a_start_and_one_for_the_whole(self, run: Run) -> None:
        killed_and_resumed(run)
        write_reports(run.report(), run.dir)
        records = pq.read_table(run.dir.report).to_pylist()
        assert [(r["scope"], r["start"]) for r in records] == [
            ("start", 1),
            ("start", 2),
            ("start", 3),
            ("whole", None),
        ]
        whole = records[-1]
        assert (whole["rows"], whole["output_tokens"], whole["generate_s"]) == (6, 30, 24.0)
        assert (whole["restarts"], whole["restart_reasons"]) == (1, ["killed by signal 9"])
        assert whole["e2e_s_p99"] == 2.0

    def test_columns_explain_themselves(self, run: Run) -> None:
        one_start(run)
        run.sample(1021.0)
        write_reports(run.report(), run.dir)
        for path in (run.dir.report, run.dir.shards, run.dir.timeline):
            for field in pq.read_schema(path):
                assert (field.metadata or {}).get(b"doc"), field.name
        ttft = pq.read_schema(run.dir.report).field("ttft_s_p50")
        assert ttft.type == pa.float64()
        assert ttft.metadata[b"doc"] == b"arrival in the engine to the first token: median"

    def test_types_do_not_depend_on_what_happened(self, run: Run) -> None:
        write_reports(run.report(), run.dir)
        empty = [pq.read_schema(p) for p in (run.dir.report, run.dir.shards, run.dir.timeline)]
        killed_and_resumed(run)
        write_reports(run.report(), run.dir)
        assert [pq.read_schema(p) for p in (run.dir.report, run.dir.shards, run.dir.timeline)] == empty

    def test_shards_and_timeline(self, run: Run) -> None:
        killed_and_resumed(run)
        write_reports(run.report(), run.dir)
        shards = pq.read_table(run.dir.shards).to_pylist()
        assert [(s["plan"], s["shard"], s["rows"], s["starts"]) for s in shards] == [
            (1, 0, 2, [1]),
            (3, 0, 4, [3]),
        ]
        assert pq.read_table(run.dir.timeline).num_rows == 4
        assert not list(run.dir.path.glob(".tmp-*"))

    def test_a_folder_that_cannot_be_written(self, run: Run) -> None:
        one_start(run)
        report = run.report()
        run.dir.report.mkdir()
        with pytest.raises(OutputError, match=r"report.parquet: cannot be written"):
            write_reports(report, run.dir)

    def test_the_command_needs_no_report_file(self, run: Run) -> None:
        killed_and_resumed(run)
        shown = json.loads(bulkgen("report", str(run.dir.path), "--json").out)
        assert shown["whole"] == json.loads(json.dumps(report_json(run.report())))["whole"]


def test_json_has_the_columns_of_the_report_file(run: Run) -> None:
    killed_and_resumed(run)
    report = run.report()
    write_reports(report, run.dir)
    data = json.loads(json.dumps(report_json(report), allow_nan=False))
    columns = set(pq.read_schema(run.dir.report).names) - {"restart_reasons"}
    assert columns <= set(data["whole"])
    assert [s["start"] for s in data["starts"]] == [1, 2, 3]
    assert data["whole"]["restarts"][0]["reason"] == "killed by signal 9"
    assert data["whole"]["finish_reasons"] == {"stop": 6}


class TestTables:
    def show(self, report: Report, width: int = 80, encoding: str = "utf-8") -> str:
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
        render_report(report, Console(file=stream, width=width))
        stream.flush()
        stream.seek(0)
        return stream.read()

    def test_most_wanted_first_in_80_columns(self, run: Run) -> None:
        one_start(run)
        text = self.show(run.report())
        lines = text.splitlines()
        assert lines[0].rstrip() == "Run finished: 7 of 10 rows done, 3 failed"
        assert max(len(line) for line in lines) <= 80
        shown = [re.sub(r"\s{2,}", " | ", line.strip()) for line in lines]
        for line in (
            "rows done | 7 | generated and committed",
            "rows failed | 3 | 1 refused by planning, 2 failed in the engine",
            "1 | failed in the engine: other",
            "wall time | 33.0s | all starts, time between them left out",
            "engine start | 20.0s | until the first replica was ready",
            "generation | 10.0s | first request offered to last completion",
            "output tokens/s | 3.1 | generation",
            "cost | $0.0300 | $3.60/h x 1 replica x (engine start + generation)",
            "per 1k rows | $4.29 | whole cost over done rows",
            "per 1M output | $967.74 | whole cost over output tokens alone",
            "cached | 28 | 2.8 | 33% of prompt, by prefix cache",
            "engines' count | 115 | equal to the committed rows",
            "e2e, queue included | 2.0s | 2.0s | 2.0s | 2.0s | 2.0s | 7",
        ):
            assert line in shown
        assert "Starts" not in text
        assert "lost time" not in text

    def test_starts_restarts_and_lost_work(self, run: Run) -> None:
        killed_and_resumed(run)
        text = self.show(run.report())
        assert max(len(line) for line in text.splitlines()) <= 80
        shown = [re.sub(r"\s{2,}", " | ", line.strip()) for line in text.splitlines()]
        assert "1 | killed | 2 | 0 | 2.5 | 10.0s | 4.0s | 3 | $0.0140" in shown
        assert "3 | 0 | +14.0s | killed by signal 9" in shown
        assert any(line.startswith("lost time | 3.0s | after the last commit") for line in shown)
        assert "+55 prompt, +8 output" in text

    def test_no_escape_sequences_off_a_terminal(self, run: Run) -> None:
        one_start(run)
        run.record(record="restart", start=1, replica=0, incarnation=1, time=1.0, reason="\x1b[2J[bold]x[/bold]\n")
        text = self.show(run.report())
        assert "\x1b" not in text
        assert "\\x1b[2J[bold]x[/bold]\\x0a" in text

    def test_plain_ascii_where_the_locale_has_no_more(self, run: Run) -> None:
        one_start(run)
        run.record(record="restart", start=1, replica=0, incarnation=1, time=1.0, reason="größe")
        assert "gr\\xf6\\xdfe" in self.show(run.report(), encoding="ascii")

    def test_stale_rows_are_told(self, run: Run) -> None:
        TestChangedInput().change(run)
        assert "3 rows of earlier input" in self.show(run.report(in_plan=TestChangedInput.in_plan), width=160)
        assert "rows of earlier input too" in self.show(run.report(), width=160)

    def test_unknown_cost(self, run: Run) -> None:
        run.start(1000.0, rows=1, usd_per_hour=None)
        run.part([row(1)], 1021.0, 1026.0)
        assert "price.usd_per_hour" in self.show(run.report())

    def test_nothing_yet(self, run: Run) -> None:
        assert self.show(run.report()).startswith("Run not started: 0 of 0 rows done")

    def test_many_starts_are_cut(self, run: Run) -> None:
        for i in range(25):
            run.start(1000.0 * i, rows=1)
        assert "Starts (the last 20, 5 earlier ones not shown)" in self.show(run.report())
