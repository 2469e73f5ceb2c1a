"""The process that templates run in: `python -m bulkgen.prompt.sandboxed`. What it is for stands in sandbox.py.

On standard input come the setup, and then again and again the name of a method with a number of items, and the items.
Each gets an answer on standard output as soon as it is known: how it ended, and with what.
"""

import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, BinaryIO

from bulkgen.errors import RowError, SpecError
from bulkgen.prompt.composing import Composed, Composer
from bulkgen.prompt.sandbox import LIMIT, SIZE, Limits, Unsendable

Answer = tuple[str, Any]


class _Overtime(BaseException):
    """The time for an item is over. No Exception, so that nothing that a template runs takes it for its own."""


def main() -> None:
    """Answer until the input ends, or until an item took too much memory."""
    with os.fdopen(os.dup(1), "wb") as sink:
        os.dup2(2, 1)  # whatever prints, it is no answer
        if (setup := _read(sys.stdin.buffer)) is not None:
            _serve(setup, sys.stdin.buffer, sink)


def _serve(setup: bytes, source: BinaryIO, sink: BinaryIO) -> None:
    parts, limits = pickle.loads(setup)
    driver = os.getppid()
    _bound(limits)
    kind, composer = _within(limits, Composer, parts)
    if kind in ("time", "memory", "row"):
        kind, composer = "spec", "the job's templates or the chat template take too long or too much to compile"
    _answer(sink, (kind, composer.reads) if kind == "done" else (kind, composer))
    sink.flush()
    while kind == "done" and (frame := _read(source)) is not None:
        method, number = pickle.loads(frame)
        work = partial(_worked, limits, getattr(composer, method))
        # All are read before the first is begun: who sends them does not listen yet.
        for item in [_read(source) for _ in range(number)]:
            answer = _within(limits, work, item)
            _answer(sink, answer)
            if answer[0] == "memory":
                return  # it may have left too little for the next
            if os.getppid() != driver:
                return  # killed; there may be minutes of work left that nobody waits for
        sink.flush()


def _bound(limits: Limits) -> None:
    """Limits that hold for this process alone."""
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: PTH123, SIM115
    resource.setrlimit(resource.RLIMIT_AS, (now + limits.memory_bytes, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A row may be nested as deep as JSON Lines allow, and that takes more than one call a level.
    sys.setrecursionlimit(3000)
    signal.signal(signal.SIGPROF, _overtime)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)


def _overtime(number: int, frame: FrameType | None) -> None:
    raise _Overtime


def _within(limits: Limits, work: Callable[[Any], Any], item: Any) -> Answer:
    """What comes of an item, within the limits."""
    try:
        # Processor time, so that a machine that is busy or asleep fails no row.
        signal.setitimer(signal.ITIMER_PROF, limits.seconds, 0.1)
        signal.setitimer(signal.ITIMER_VIRTUAL, 2 * limits.seconds)
        try:
            return "done", work(item)
        finally:
            _stop_timers()
    except _Overtime:
        _stop_timers()  # it may have come just before they were stopped
        return "time", f"the templates took more than {limits.seconds:g} s of processor time on this row"
    except MemoryError:
        return "memory", (LIMIT, f"the templates took more than {limits.memory_bytes >> 20} MiB of memory on this row")
    except RowError as e:
        return "row", (e.code, e.message)
    except RecursionError:
        return "row", ("template_error", "the row's values are nested too deep for a template")
    except SpecError as e:
        return "spec", str(e)
    except Exception:
        return "bug", traceback.format_exc()


def _stop_timers() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _worked(limits: Limits, method: Callable[[Any], Any], pickled: bytes) -> Any:
    item = pickle.loads(pickled)
    if isinstance(item, Unsendable):
        raise RowError("template_error", item.reason)
    done = method(item)
    if isinstance(done, Composed) and len(done.text) > limits.characters:
        reason = f"the prompt has {len(done.text):,} characters, more than the {limits.characters:,} that it may have"
        raise RowError(LIMIT, reason)
    return done


def _read(source: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    size = source.read(SIZE.size)
    return source.read(SIZE.unpack(size)[0]) if len(size) == SIZE.size else None


def _answer(sink: BinaryIO, answer: Answer) -> None:
    payload = pickle.dumps(answer)
    sink.write(SIZE.pack(len(payload)))
    sink.write(payload)


if __name__ == "__main__":
    main()
