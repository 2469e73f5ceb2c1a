"""--until and --for: what they mean on the clock, whatever the clock does, and a run that they end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime

import pytest

from bulkgen.errors import SpecError, Stopped
from bulkgen.stopping import Deadline, StopFlag
from tests.harness import Job, bulkgen, prompts

MakeJob = Callable[..., Job]

NOW = datetime(2031, 4, 30, 22, 0, 30)


def lasts_s(until: str | None = None, lasting: str | None = None, now: datetime = NOW) -> float:
    """Seconds from now to a deadline, to the nearest."""
    deadline = Deadline.parse(until, lasting, now)
    assert deadline is not None
    return round(deadline.at - time.monotonic())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("90m", 5400),
        ("2h", 7200),
        ("2d", 172_800),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("1d2h3m4s", 93_784),
        (" 1h 30m ", 5400),
        ("2H", 7200),
    ],
)
def test_durations(text: str, seconds: int) -> None:
    assert lasts_s(lasting=text) == seconds


@pytest.mark.parametrize(
    "text", ["", "90", "h", "-1h", "1w", "1h-30m", "1,5h", "h1", "0s", "0h0m", "1..5h", "9" * 30 + "d", "9" * 400 + "s"]
)
def test_wrong_durations(text: str) -> None:
    with pytest.raises(SpecError, match=r"--for .*must be"):
        Deadline.parse(None, text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("22:01", 30),
        ("22:00:31", 1),
        ("22:00:30", 86_400),  # now itself is tomorrow
        ("22:00", 86_370),
        ("06:30", 30_570),
        ("6:30", 30_570),
        (" 23:00 ", 3570),
        ("2031-05-01T06:30", 30_570),
        ("2031-05-01 06:30:30", 30_600),
        ("2031-04-30T22:00", -30),  # over: the run stops at once
        ("2030-04-30T22:00:30", -31_536_000),
    ],
)
def test_times(text: str, seconds: int) -> None:
    assert lasts_s(until=text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "24:00", "12:60", "12", "noon", "2031-04-30", "20310430", "2031-02-30T06:00", "06:30pm", "99999-01-01T00:00"],
)
def test_wrong_times(text: str) -> None:
    with pytest.raises(SpecError, match=r"--until .*must be a time such as 06:30"):
        Deadline.parse(text, None, NOW)


def test_only_one_of_them() -> None:
    assert Deadline.parse(None, None) is None
    with pytest.raises(SpecError, match="give one of them"):
        Deadline.parse("06:30", "2h")


@pytest.fixture
def in_berlin() -> Iterator[None]:
    """Summer time there in 2031: from 30 March, 2:00, to 26 October, 3:00."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "CET-1CEST,M3.5.0,M10.5.0/3"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


@pytest.mark.usefixtures("in_berlin")
@pytest.mark.parametrize(
    ("now", "text", "hours"),
    [
        (datetime(2031, 3, 29, 22), "06:00", 7),  # a night that is an hour shorter
        (datetime(2031, 10, 25, 22), "06:00", 9),  # and one that is longer
        (datetime(2031, 3, 29, 22), "2031-03-30T06:00", 7),
        (datetime(2031, 3, 30, 1), "02:30", 1.5),  # a time that this night does not have: an hour later by the clock
        (datetime(2031, 10, 26, 1), "02:30", 1.5),  # one that it has twice: the first
        (datetime(2031, 10, 26, 2, 45), "02:30", 0.75),  # and the second, where that comes next
        (datetime(2031, 10, 26, 2, 45, fold=1), "02:30", 23.75),
        (datetime(2031, 10, 26, 2, 15, fold=1), "02:30", 0.25),
        (datetime(2031, 4, 30, 12), "2031-04-30T12:00+00:00", 2),
    ],
)
def test_summer_time(now: datetime, text: str, hours: float) -> None:
    assert lasts_s(until=text, now=now) == hours * 3600


# ---- the flag ----


def test_a_deadline_asks_for_a_stop_as_a_signal_does() -> None:
    said: list[str] = []
    deadline = Deadline(time.monotonic() + 0.02, "--for 20ms")
    before = signal.getsignal(signal.SIGALRM)
    with StopFlag(said.append, deadline) as stop, pytest.raises(Stopped, match="the time of --for 20ms is over"):  # noqa: SIM117
        with stop.at_once():
            signal.pause()
    assert said == ["the time of --for 20ms is over: stopping, finished rows are being committed"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_deadline_that_is_over_lets_nothing_begin() -> None:
    begun = []
    with StopFlag(lambda text: None, Deadline(time.monotonic() - 5, "--until 06:30")) as stop:
        while not stop:  # the alarm comes in a moment
            time.sleep(0.001)
        with pytest.raises(Stopped, match="--until 06:30"), stop.at_once():
            begun.append(1)
    assert not begun


def test_a_flag_leaves_handlers_as_they_were() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    with StopFlag(lambda text: None, Deadline(time.monotonic() + 100, "--for 100s")):
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in numbers] == before


# ---- whole runs ----


def slow(make_job: MakeJob) -> Job:
    return make_job(
        prompts(300),
        output={"commit_rows": 10, "commit_s": 0.2},
        engine={"max_num_seqs": 4, "stub": {"step_s": 0.05}},
        sampling={"max_tokens": 20},
    )


def test_a_run_stops_at_its_deadline_and_goes_on(make_job: MakeJob) -> None:
    job = slow(make_job)
    ended = job.run("--for", "12s")
    assert ended.code == 75
    assert "the time of --for 12s is over" in ended.err
    assert "of 300 rows are done and committed; run the same command again to go on" in ended.err
    assert "Traceback" not in ended.err
    assert 0 < len(job.committed_keys()) < 300
    assert job.manifest("end")[-1]["outcome"] == "stopped"
    assert json.loads(bulkgen("status", str(job.output), "--json").out)["state"] == "stopped"
    # Time that is not used up changes nothing.
    ended = job.run("--until", "2999-01-01T06:30", "--set", "engine.stub.step_s=0")
    assert ended.code == 0, ended.err
    assert [row["id"] for row in job.rows()] == [row["id"] for row in prompts(300)]
    assert len(job.committed_keys()) == 300


@pytest.mark.parametrize("option", [("--until", "2020-01-01T00:00"), ("--for", "0.001s")])
def test_no_time_at_all(make_job: MakeJob, option: tuple[str, str]) -> None:
    job = slow(make_job)
    ended = job.run(*option)
    assert ended.code == 75
    assert f"the time of {' '.join(option)} is over" in ended.err
    assert "nothing was begun" in ended.err
    assert not job.run_folder.exists()


def test_a_wrong_time_is_a_wrong_option(make_job: MakeJob) -> None:
    job = slow(make_job)
    for options, words in (
        (("--for", "soon"), "--for soon: must be a duration"),
        (("--until", "25:00"), "--until 25:00: must be a time"),
        (("--until", "06:00", "--for", "1h"), "give one of them"),
    ):
        ended = job.run(*options)
        assert ended.code == 2
        assert words in ended.err
        assert not job.run_folder.exists()


def test_a_deadline_while_the_engine_loads(make_job: MakeJob) -> None:
    job = slow(make_job)
    ended = job.run("--for", "3s", "--set", "engine.stub.start_s=600")
    assert ended.code == 75
    assert job.run("--set", "engine.stub.step_s=0").code == 0


def test_the_time_zone_of_the_environment_counts(make_job: MakeJob) -> None:
    """A time of day in a crontab is the time of the place, not of Greenwich."""
    code = (
        "from datetime import datetime\nimport time\nfrom bulkgen.stopping import Deadline\n"
        "print(round(Deadline.parse('2031-07-01T12:00', None).at - time.monotonic() + time.time()))"
    )
    ends = [
        int(subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "TZ": zone}, text=True))
        for zone in ("UTC0", "CET-1CEST,M3.5.0,M10.5.0/3")
    ]
    assert ends[0] - ends[1] == 7200
