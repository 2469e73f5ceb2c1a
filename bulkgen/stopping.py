"""Signals as a flag that the main path looks at: the first asks it to stop, a second Ctrl-C ends it at once."""

import os
import signal
from collections.abc import Callable
from types import FrameType

from bulkgen.errors import Stopped

_ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopFlag:
    """While used as a context, SIGINT, SIGTERM and SIGHUP ask for a stop instead of killing the process."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopFlag":
        for number in _ASKED:
            # Ignored from the start means that somebody wants it so: nohup, or a shell's background job.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave is what it takes

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            # What is committed is on disk already, and replicas end when their channel closes.
            os._exit(Stopped.exit_code)
        if self.signal is None:
            self.signal = signal.Signals(number)
            again = "; once more to end at once" if number == signal.SIGINT else ""
            self._say(f"{self.signal.name}: stopping, finished rows are being committed{again}")

    def __bool__(self) -> bool:
        return self.signal is not None

    def check(self) -> None:
        """Raise Stopped if a stop was asked for."""
        if self.signal is not None:
            raise Stopped(f"stopped by {self.signal.name}")
