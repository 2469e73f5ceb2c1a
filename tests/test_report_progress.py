"""Meter (pure), progress on a terminal and off it, and figures as people read them."""

import dataclasses
import io
import subprocess
import sys
from typing import Any

import pytest

from bulkgen.report import Meter, Progress, ProgressState, Tally, figures, visible
from bulkgen.report.progress import bar_text, line_of


def engine(prompt: int, output: int, **finished: int) -> Tally:
    return Tally(engine_prompt_tokens=prompt, engine_output_tokens=output, **finished)


class TestMeter:
    def test_nothing_observed(self) -> None:
        meter = Meter(1000, 1000)
        assert meter.rates(5.0).total_tokens_per_s == 0
        assert (meter.tokens_done, meter.tokens_planned) == (0, 2000)
        assert meter.eta_s(5.0) is None

    def test_one_sample_is_no_speed(self) -> None:
        meter = Meter(1000, 1000)
        meter.observe(0.0, 0, engine(500, 500))
        assert meter.rates(0.1).output_tokens_per_s == 0

    def test_rates_slide_with_the_window(self) -> None:
        meter = Meter(10**6, 10**6, window_s=10)
        for t in range(31):
            # 100 output tokens/s in the first 20 s, 10/s afterwards.
            output = 100 * min(t, 20) + 10 * max(0, t - 20)
            meter.observe(float(t), 0, engine(5 * t, output))
        rates = meter.rates(30.0)
        assert rates.output_tokens_per_s == pytest.approx(10)
        assert rates.total_tokens_per_s == pytest.approx(15)

    def test_silence_lowers_the_rate(self) -> None:
        meter = Meter(1000, 1000, window_s=10)
        meter.observe(0.0, 0, engine(0, 0))
        meter.observe(10.0, 0, engine(0, 100))
        assert meter.rates(10.0).output_tokens_per_s == pytest.approx(10)
        assert meter.rates(100.0).output_tokens_per_s == pytest.approx(1)

    def test_replicas_add_up_and_a_restart_is_no_negative_rate(self) -> None:
        meter = Meter(1000, 1000, window_s=10)
        meter.observe(0.0, (0, 0), engine(0, 0))
        meter.observe(0.0, (1, 0), engine(0, 0))
        meter.observe(5.0, (0, 0), engine(0, 50))
        meter.observe(5.0, (1, 0), engine(0, 50))
        meter.lose((1, 0))
        meter.observe(10.0, (1, 1), engine(0, 20))
        assert meter.rates(10.0).output_tokens_per_s == pytest.approx(12)

    def test_work_of_a_dead_engine_counts_as_far_as_it_finished(self) -> None:
        meter = Meter(1000, 1000)
        finished = {"finished_prompt_tokens": 30, "finished_output_tokens": 10, "finished_budget_tokens": 20}
        meter.observe(0.0, (0, 0), engine(100, 50, **finished))
        assert meter.tokens_done == 150
        meter.lose((0, 0))
        assert meter.tokens_done == 40

    def test_the_plan_learns_how_much_of_the_budget_is_used(self) -> None:
        meter = Meter(prompt_tokens=1000, budget_tokens=1000)
        assert meter.tokens_planned == 2000
        finished = {
            "finished_prompt_tokens": 100,
            "finished_output_tokens": 25,
            "finished_budget_tokens": 100,
        }
        meter.observe(0.0, 0, engine(100, 25, **finished))
        assert meter.output_ratio == 0.25
        assert meter.tokens_planned == 1000 + 25 + 225

    def test_eta_from_tokens_left(self) -> None:
        meter = Meter(prompt_tokens=1000, budget_tokens=1000)
        meter.observe(0.0, 0, engine(0, 0))
        half = {"finished_prompt_tokens": 500, "finished_output_tokens": 500, "finished_budget_tokens": 500}
        meter.observe(10.0, 0, engine(500, 500, **half))
        assert meter.eta_s(10.0) == pytest.approx(10.0)
        full = {"finished_prompt_tokens": 1000, "finished_output_tokens": 900, "finished_budget_tokens": 1000}
        meter.observe(20.0, 0, engine(1000, 900, **full))
        assert meter.eta_s(20.0) == 0.0

    def test_a_clock_that_is_set_back_gives_no_negative_rate_and_no_growing_memory(self) -> None:
        meter = Meter(10**6, 10**6, window_s=10)
        for t in range(100):
            meter.observe(1000.0 + t, 0, engine(0, 10 * t))
        for t in range(1000):
            meter.observe(200.0 + t / 2, 0, engine(0, 1000 + 5 * t))
            rates = meter.rates(200.0 + t / 2)
            assert rates.output_tokens_per_s >= 0
            assert (eta := meter.eta_s(200.0 + t / 2)) is None or eta >= 0
        assert rates.output_tokens_per_s == pytest.approx(10)
        assert len(meter._samples) <= 30

    def test_two_engines_samples_need_not_come_in_order(self) -> None:
        meter = Meter(1000, 1000)
        for t in range(20):
            meter.observe(float(t), 0, engine(0, 10 * t))
            meter.observe(t - 0.3, 1, engine(0, 10 * t))
        assert meter.rates(19.0).output_tokens_per_s == pytest.approx(20, rel=0.1)

    def test_memory_is_bounded_by_the_window(self) -> None:
        meter = Meter(1, 1, window_s=10)
        for t in range(10_000):
            meter.observe(float(t), 0, engine(t, t))
        assert len(meter._samples) <= 12


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


STATE = ProgressState(
    rows=600,
    done=270,
    failed=2,
    refused=1,
    tokens_done=450_000,
    tokens_planned=1_000_000,
    output_tokens=40_000,
    output_tokens_per_s=312.4,
    total_tokens_per_s=1204.0,
    running=64,
    waiting=12,
    kv_usage=0.871,
    eta_s=151.0,
)


class TestPlainLines:
    def show(self, **options: Any) -> tuple[Progress, io.StringIO, Clock]:
        stream, clock = io.StringIO(), Clock()
        return Progress(stream=stream, clock=clock, ticks=clock, **options), stream, clock

    def test_a_line_every_so_often_without_control_characters(self) -> None:
        progress, stream, clock = self.show(every_s=30)
        progress.stage("generating")
        for _ in range(240):
            clock.now += 0.25
            progress.update(STATE)
        lines = stream.getvalue().splitlines()
        assert len(lines) == 3
        assert lines[0].endswith(" generating")
        assert "273 of 600 rows (3 failed), 450k of 1.0M tokens (45%)" in lines[1]
        assert "output 312 tokens/s, total 1,204 tokens/s, running 64, waiting 12, KV 87%, ETA 2m 31s" in lines[1]
        assert lines[1].endswith(", 0.00 rows/s")
        assert "\r" not in stream.getvalue()
        assert "\x1b" not in stream.getvalue()

    def test_lines_begin_with_date_and_time(self) -> None:
        progress, stream, _ = self.show()
        progress.say("hello")
        assert stream.getvalue()[4] == "-"
        assert stream.getvalue()[19:] == " hello\n"

    def test_the_same_stage_twice_is_one_line(self) -> None:
        progress, stream, _ = self.show()
        progress.stage("planning")
        progress.stage("planning")
        assert stream.getvalue().count("planning") == 1

    def test_planning_shows_rows_alone(self) -> None:
        progress, stream, clock = self.show(every_s=1)
        progress.stage("planning")
        clock.now += 2
        progress.update(ProgressState(rows=12_345))
        assert stream.getvalue().endswith("planning: 12,345 rows, 0.00 rows/s\n")
        clock.now += 2
        progress.update(ProgressState(rows=13_345, refused=12))
        assert stream.getvalue().endswith("planning: 13,345 rows (12 failed), 500 rows/s\n")

    def test_merging_shows_how_far_it_is(self) -> None:
        progress, stream, clock = self.show(every_s=1)
        progress.stage("merging")
        progress.update(ProgressState(rows=1000))
        clock.now += 2
        progress.update(ProgressState(rows=1000, done=400))
        assert "merging: 400 of 1,000 rows" in stream.getvalue()

    def test_whoever_asks_gets_a_line_at_once(self) -> None:
        progress, stream, clock = self.show(every_s=1000)
        progress.stage("generating")
        progress.update(STATE)
        clock.now += 2
        progress.now()
        assert "generating: 273 of 600 rows (3 failed)" in stream.getvalue().splitlines()[-1]

    def test_a_clock_that_is_set_back_stops_no_lines(self) -> None:
        stream, clock, ticks = io.StringIO(), Clock(), Clock()
        progress = Progress(stream=stream, clock=clock, ticks=ticks, every_s=30)
        progress.stage("generating")
        for _ in range(4):
            clock.now -= 3600
            ticks.now += 20
            progress.update(STATE)
        assert stream.getvalue().count("273 of 600") == 2

    def test_rows_that_are_taken_back_are_no_negative_speed(self) -> None:
        progress, stream, clock = self.show(every_s=1)
        progress.stage("generating")
        progress.update(STATE)
        clock.now += 2
        progress.update(dataclasses.replace(STATE, done=100))
        assert "rows/s" not in stream.getvalue()

    def test_a_signal_in_the_middle_of_a_write_is_no_error(self) -> None:
        class Busy(io.StringIO):
            def write(self, text: str) -> int:
                raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

        Progress(stream=Busy()).say("SIGTERM: stopping")

    def test_quiet_prints_nothing(self) -> None:
        progress, stream, clock = self.show(quiet=True)
        with progress:
            progress.stage("generating")
            clock.now += 100
            progress.update(STATE)
            progress.say("hello")
        assert stream.getvalue() == ""

    def test_what_is_said_cannot_drive_the_terminal(self) -> None:
        progress, stream, _ = self.show()
        progress.say("bad \x1b[2J\r\nrow")
        assert stream.getvalue().endswith(" bad \\x1b[2J\\x0d\\x0arow\n")

    def test_a_closed_stream_does_not_end_the_run(self) -> None:
        progress, stream, clock = self.show(every_s=0)
        stream.close()
        progress.stage("generating")
        clock.now += 1
        progress.update(STATE)
        progress.say("hello")


class TestBar:
    def test_bar_shows_the_figures_and_goes_away(self) -> None:
        stream = Terminal()
        with Progress(stream=stream) as progress:
            progress.stage("generating")
            progress.update(STATE)
            progress.say("a line that stays")
        shown = stream.getvalue()
        assert "generating" in shown
        assert " 45%|" in shown
        assert "273/600 3 failed 312 out/1.2k t/s 64+12 KV 87% ETA 2m 31s" in shown
        assert "a line that stays\n" in shown

    def test_bar_fits_80_columns_with_large_figures(self) -> None:
        large = ProgressState(
            rows=10**7,
            done=10**7 - 5,
            failed=5,
            tokens_done=1,
            tokens_planned=2,
            output_tokens_per_s=123_456,
            total_tokens_per_s=1_234_567,
            running=256,
            waiting=1024,
            kv_usage=1.0,
            eta_s=90_000,
        )
        assert len("generating  50%||" + bar_text(large)) <= 80

    def test_unknown_eta(self) -> None:
        state = ProgressState(rows=5, tokens_planned=10)
        assert bar_text(state).endswith("ETA ?")
        assert line_of(state).endswith("ETA unknown")

    def test_quiet_on_a_terminal(self) -> None:
        stream = Terminal()
        with Progress(stream=stream, quiet=True) as progress:
            progress.stage("x")
            progress.update(STATE)
        assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, Grüße", "plain text, Grüße"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\tb\nc\x7f\x9b31m", "a\\x09b\\x0ac\\x7f\\x9b31m"),
        ("right\u202eleft", "right\\u202eleft"),
        ("lone \ud800", "lone \\ud800"),
        ("non-breaking\u00a0space", "non-breaking\u00a0space"),
    ],
)
def test_visible_escapes_what_a_terminal_obeys(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_visible_in_ascii_and_cut() -> None:
    assert visible("Grüße", "ascii") == "Gr\\xfc\\xdfe"
    assert visible("x" * 30, limit=10) == "x" * 10 + "... (20 more characters)"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (figures.seconds(None), "-"),
        (figures.seconds(0.0), "0s"),
        (figures.seconds(-3600.0), "0s"),
        (figures.seconds(0.00012), "120us"),
        (figures.seconds(0.0123), "12ms"),
        (figures.seconds(0.9999), "1.0s"),
        (figures.seconds(59.96), "1m 00s"),
        (figures.seconds(247), "4m 07s"),
        (figures.seconds(3599.7), "1h 00m"),
        (figures.seconds(7500), "2h 05m"),
        (figures.seconds(273_600), "3d 04h"),
        (figures.usd(0.0), "$0.00"),
        (figures.usd(1234.5), "$1,234.50"),
        (figures.usd(0.0833), "$0.0833"),
        (figures.usd(0.00036), "$0.00036"),
        (figures.usd(0.0000012), "$1.2e-06"),
        (figures.rate(12_345.6), "12,346"),
        (figures.rate(4.25), "4.2"),
        (figures.rate(0.314), "0.31"),
        (figures.short(950), "950"),
        (figures.short(999.9), "1.0k"),
        (figures.short(12_345), "12k"),
        (figures.short(999_999), "1.0M"),
        (figures.short(2.5e9), "2.5G"),
        (figures.percent(0.034), "3.4%"),
        (figures.percent(0.87), "87%"),
        (figures.percent(0), "0%"),
        (figures.rows(1), "1 row"),
        (figures.rows(1200), "1,200 rows"),
    ],
)
def test_figures(shown: str, expected: str) -> None:
    assert shown == expected


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import sys, bulkgen.report; from bulkgen.report import Meter, Progress, load_status;"
        "heavy = {'polars', 'pyarrow', 'numpy', 'rich', 'tqdm', 'torch', 'vllm'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_such_name() -> None:
    import bulkgen.report

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bulkgen.report.nothing
