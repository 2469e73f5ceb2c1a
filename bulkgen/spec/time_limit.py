"""A limit on the time that pure computing may take, for what rows bring along and nobody can foresee."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OverTime(BaseException):
    """Computing took too long. No Exception: what is interrupted must not take it for one of its own."""


_armed = False


def _heed(*_: Any) -> None:
    if _armed:
        raise OverTime


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OverTime in the block when it takes longer, by SIGALRM, so in the main thread alone; others have no limit.

    Python code is interrupted, its own regular expressions too; other extensions are when they return.
    """
    global _armed
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGALRM, _heed)
    _armed = True
    # Again and again, should what runs there catch it.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        yield
    finally:
        _armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
