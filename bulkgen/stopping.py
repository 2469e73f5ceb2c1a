"""When to stop before the end, as a flag that the main path looks at: signals, and the time that a user has set.

The first signal, or the end of that time, asks for a stop; a second Ctrl-C ends the process at once. SIGUSR1 and
SIGUSR2, which schedulers send as a warning, only ask for news.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import FrameType

from bulkgen.errors import SpecError, Stopped

_ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NEWS = (signal.SIGUSR1, signal.SIGUSR2)

# More than this a system may not take; then the timer is set again.
_LONGEST_TIMER_S = 30 * 86400.0

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
_TIME_OF_DAY = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?")


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the time is over, by the clock that never goes back, and the option that said so."""

    at: float
    option: str

    @classmethod
    def parse(cls, until: str | None, lasting: str | None, now: datetime | None = None) -> "Deadline | None":
        """The options --until and --for, None for neither. `now` is the local time. Raises SpecError."""
        if until is not None and lasting is not None:
            raise SpecError("--until and --for both say when to stop; give one of them")
        if lasting is not None:
            return cls(time.monotonic() + duration_s("--for", lasting), f"--for {lasting}")
        if until is not None:
            return cls(time.monotonic() + _seconds_until(until, now or datetime.now()), f"--until {until}")
        return None


def duration_s(option: str, text: str) -> float:
    """What an option says of a duration, such as 90m or 1h30m, in seconds. Raises SpecError."""
    plain = text.strip().lower().replace(" ", "")
    if not _DURATION.fullmatch(plain):
        raise SpecError(f"{option} {text}: must be a duration such as 90m, 1h30m or 2d, of s, m, h and d")
    seconds = sum(float(n) * _UNITS_S[unit] for n, unit in re.findall(r"([\d.]+)([smhd])", plain))
    if not 0 < seconds < 100 * 365 * 86400:
        raise SpecError(f"{option} {text}: must be more than nothing and less than a lifetime")
    return seconds


def _seconds_until(text: str, now: datetime) -> float:
    """The time until a time of day comes next, or until a date and time, which may be over."""
    wrong = f"--until {text}: must be a time such as 06:30, or a date and time such as 2031-04-30T06:30"
    try:
        if re.fullmatch(r"[\d-]+", text.strip()):
            raise SpecError(f"{wrong}; a date alone does not say when on that day")
        if (clock := _TIME_OF_DAY.fullmatch(text.strip())) is not None:
            return _seconds_until_clock(int(clock[1]), int(clock[2]), int(clock[3] or 0), now)
        # As moments, so that a change to or from summer time in between counts.
        return datetime.fromisoformat(text.strip()).timestamp() - now.timestamp()
    except (ValueError, OverflowError, OSError):
        raise SpecError(wrong) from None


def _seconds_until_clock(hour: int, minute: int, second: int, now: datetime) -> float:
    """The time until a clock shows this next; it may do so twice in the night in which summer time ends."""
    moments = []
    for days in (0, 1):
        then = (now + timedelta(days=days)).replace(hour=hour, minute=minute, second=second, microsecond=0, fold=0)
        once, twice = then.timestamp(), then.replace(fold=1).timestamp()
        moments += [once, max(once, twice)]  # a time that is left out lies, as the second, before the first
    return min(moment for moment in moments if moment > now.timestamp()) - now.timestamp()


class StopFlag:
    """While used as a context, SIGINT, SIGTERM, SIGHUP and a deadline ask for a stop instead of ending the process.

    `say` tells the user that it was asked for, and what it `keeps`; `news` how far things are.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        deadline: Deadline | None = None,
        news: Callable[[], None] = lambda: None,
        keeps: str = ", finished rows are being committed",
    ) -> None:
        self._say = say
        self._news = news
        self._keeps = keeps
        self._deadline = deadline
        self._why = ""
        self._at_once = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopFlag":
        for number in _ASKED:
            # Ignored from the start means that somebody wants it so: nohup, or a shell's background job.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._ask)
        for number in _NEWS:
            self._before[number] = signal.signal(number, self._tell)
        if self._deadline is not None:
            # Not to miss it while something lasts that does not look at the flag. The timer runs by the same clock.
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._time_is_over)
            self._set_timer(self._deadline)
        return self

    def __exit__(self, *_: object) -> None:
        if self._deadline is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave is what it takes

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._why and number == signal.SIGINT:
            # What is committed is on disk already, and replicas end when their channel closes.
            os._exit(Stopped.exit_code)
        name = signal.Signals(number).name
        again = "; once more to end at once" if number == signal.SIGINT else ""
        self._stop(f"stopped by {name}", f"{name}: stopping{self._keeps}{again}")

    @staticmethod
    def _set_timer(deadline: Deadline) -> None:
        signal.setitimer(signal.ITIMER_REAL, min(max(0.001, deadline.at - time.monotonic()), _LONGEST_TIMER_S))

    def _time_is_over(self, number: int, frame: FrameType | None) -> None:
        assert self._deadline is not None
        if time.monotonic() < self._deadline.at:
            self._set_timer(self._deadline)
            return
        over = f"the time of {self._deadline.option} is over"
        self._stop(f"stopped, since {over}", f"{over}: stopping{self._keeps}")

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._news()

    def _stop(self, why: str, said: str) -> None:
        if self._why:
            return
        self._why = why
        self._say(said)
        if self._at_once:
            self.check()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While this lasts nothing is lost by leaving it anywhere: a stop raises Stopped out of whatever is done."""
        self._at_once = True
        try:
            self.check()
            yield
        except Exception:
            self.check()  # others may have taken Stopped for an error of their own
            raise
        finally:
            self._at_once = False
        self.check()

    def __bool__(self) -> bool:
        return bool(self._why)

    def check(self) -> None:
        """Raise Stopped if a stop was asked for."""
        if self._why:
            raise Stopped(self._why)
