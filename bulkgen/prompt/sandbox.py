"""Templates run in a process of their own, so that neither one nor the data can hang the run or fill its memory.

Jinja's sandbox keeps a template from what is none of its business. It does not keep it from computing without end, and
no list of what is forbidden could: a loop in a loop, `10**10**8`, `'%9999999999d' % 1`, lists of lists of lists. A
process is what a system can bound: its memory, and its processor time, with two timers that count only that. The first
raises an exception, which fails the row; the second, which no code can hold up, ends the process. The rows that were
in it go again one by one, in a new process, and one that ends this fails; if time was not the reason, it gets a second
try. See sandboxed.py for that side.

The limits are that process's own; the driver's signals, timers and memory are left alone.
"""

import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from bulkgen.errors import BulkgenError, RowError, SpecError, Stopped
from bulkgen.prompt.composing import Composer, Reads, Setup
from bulkgen.prompt.pieces import pieces
from bulkgen.python import own_environment, own_python

LIMIT = "template_limit"
SIZE = struct.Struct(">Q")

_CHUNK_ROWS, _CHUNK_BYTES = 256, 1 << 20
_LOOK_MS = 500
_DIED = "the templates ended their process on this row"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one row may take: seconds of processor time, memory, characters of its text.

    When `timeouts` rows one after another run out of time, the template is to blame.
    """

    seconds: float = 5.0
    memory_bytes: int = 2 << 30
    characters: int = 64 << 20
    timeouts: int = 10


@dataclass(frozen=True, slots=True)
class Unsendable:
    """Takes the place of an item that cannot be sent to another process, and says why."""

    reason: str


class Composing(Protocol):
    """A Composer, in this process or in another."""

    reads: Reads

    def each(self, method: str, items: Sequence[Any], check_stop: Callable[[], None]) -> Iterator[Any]:
        """What the Composer's method gives for each item, or the RowError that it raised; one after the other, since
        all together may be too much to have in memory. To be read to the end before the next. `check_stop` may raise.
        """


class InProcess:
    """For jobs without templates: nothing runs but code of ours."""

    def __init__(self, setup: Setup) -> None:
        self._composer = Composer(setup)
        self.reads = self._composer.reads

    def each(self, method: str, items: Sequence[Any], check_stop: Callable[[], None]) -> Iterator[Any]:
        function = getattr(self._composer, method)
        return (_caught(function, item) for item in items)


def _caught(function: Callable[[Any], Any], item: Any) -> Any:
    try:
        return function(item)
    except RowError as e:
        return e
    except RecursionError:
        return RowError("bad_messages", "the row's values are nested too deep")


class Sandbox:
    """A Composer in a process of its own, which ends with this object. Raises SpecError for templates that are none."""

    def __init__(self, setup: Setup, limits: Limits, check_stop: Callable[[], None]) -> None:
        self._setup = pickle.dumps((setup, limits))
        self._limits = limits
        self._timeouts = 0
        self._process = _Process(self._setup)
        self.reads = self._opened(check_stop)

    def each(self, method: str, items: Sequence[Any], check_stop: Callable[[], None]) -> Iterator[Any]:
        try:
            for chunk in _chunks(items):
                yield from self._chunk(method, chunk, check_stop)
        except BaseException:
            self._process.end()
            raise

    def _chunk(self, method: str, items: Sequence[bytes], check_stop: Callable[[], None]) -> Iterator[Any]:
        done, alone, deaths = 0, False, 0
        while done < len(items):
            sent = items[done:][: 1 if alone else None]
            try:
                for result in self._exchange(method, sent, check_stop):
                    done += 1
                    deaths = 0
                    yield result
            except _Ended as e:
                self._restart(check_stop)
                deaths += alone
                if alone and (e.out_of_time or deaths == 2):
                    done += 1
                    deaths = 0
                    took = f"the templates took more than {2 * self._limits.seconds:g} s of processor time on this row"
                    yield self._out_of_time(took if e.out_of_time else f"{_DIED} ({e})")
                alone = True

    def _exchange(self, method: str, items: Sequence[bytes], check_stop: Callable[[], None]) -> Iterator[Any]:
        """Results as they come; ends early, with the process, after one that took too much memory."""
        self._process.send([pickle.dumps((method, len(items))), *items])
        for _ in items:
            kind, value = self._process.receive(check_stop)
            if kind == "bug":
                raise RuntimeError(f"composing a prompt failed:\n{value}")
            if kind == "time":
                yield self._out_of_time(value)
                continue
            self._timeouts = 0
            yield value if kind == "done" else RowError(*value)
            if kind == "memory":
                self._restart(check_stop)
                return

    def _out_of_time(self, reason: str) -> RowError:
        self._timeouts += 1
        if self._timeouts >= self._limits.timeouts:
            raise SpecError(
                f"{reason}, as on the {self._timeouts - 1} rows before it; it may take {self._limits.seconds:g} s of "
                "processor time: simplify input.template or input.system, or give another input.chat_template"
            )
        return RowError(LIMIT, reason)

    def _opened(self, check_stop: Callable[[], None]) -> Reads:
        try:
            kind, value = self._process.receive(check_stop)
        except _Ended as e:
            if e.out_of_time:
                raise SpecError("the job's templates or the chat template take too long to compile") from e
            raise BulkgenError(f"the process that templates run in could not be started ({e})") from e
        if kind == "spec":
            raise SpecError(value)
        if kind == "bug":
            raise RuntimeError(f"compiling templates failed:\n{value}")
        reads: Reads = value
        return reads

    def _restart(self, check_stop: Callable[[], None]) -> None:
        for last in (False, False, True):
            self._process.end()
            self._process = _Process(self._setup)
            try:
                self._opened(check_stop)
                return
            except BulkgenError as e:  # a machine without memory to spare may end a process whatever it does
                if last or isinstance(e, SpecError | Stopped):
                    raise


class _Ended(Exception):
    """The other process is no more."""

    def __init__(self, code: int) -> None:
        super().__init__(f"signal {-code}" if code < 0 else f"exit code {code}")
        self.out_of_time = code == -signal.SIGVTALRM


class _Process:
    """The other process, and what was received from it so far."""

    def __init__(self, setup: bytes) -> None:
        self._popen = subprocess.Popen(
            own_python("bulkgen.prompt.sandboxed"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=own_environment({"OPENBLAS_NUM_THREADS": "1"}),
            start_new_session=True,  # Ctrl-C in the terminal is the driver's to handle
        )
        self.end = weakref.finalize(self, _end, self._popen)
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._out, self._in = self._popen.stdin, self._popen.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._in, select.POLLIN)
        self._received = bytearray()
        self.send([setup])

    def send(self, messages: Sequence[bytes]) -> None:
        try:
            for message in messages:
                self._out.write(SIZE.pack(len(message)))
                self._out.write(message)
            self._out.flush()
        except (OSError, ValueError):  # it has ended, or was ended here
            pass  # the end of the process is noticed, and explained, where an answer is waited for

    def receive(self, check_stop: Callable[[], None]) -> Any:
        """The next answer. Raises _Ended."""
        while True:
            if len(self._received) >= SIZE.size:
                end = SIZE.size + SIZE.unpack_from(self._received)[0]
                if len(self._received) >= end:
                    answer = pickle.loads(bytes(self._received[SIZE.size : end]))
                    del self._received[:end]
                    return answer
            check_stop()
            if not self.end.alive:
                raise _Ended(self._popen.wait())
            if not self._poll.poll(_LOOK_MS):
                continue
            if not (data := os.read(self._in, 1 << 20)):
                raise _Ended(self._popen.wait())
            self._received += data


def _end(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    for pipe in (popen.stdin, popen.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    popen.wait()


def _chunks(items: Sequence[Any]) -> Iterator[list[bytes]]:
    """The items as bytes, so many at once that the other process has work and neither has much of it in memory."""
    return pieces(map(_pickled, items), len, _CHUNK_BYTES, _CHUNK_ROWS)


def _pickled(item: Any) -> bytes:
    try:
        return pickle.dumps(item)
    except RecursionError:
        # A row may be nested as deep as JSON Lines allow; how deep the call stack is already is not its fault.
        usual = sys.getrecursionlimit()
        sys.setrecursionlimit(5 * usual)
        try:
            return pickle.dumps(item)
        except RecursionError:
            return pickle.dumps(Unsendable("the row's values are nested too deep"))
        finally:
            sys.setrecursionlimit(usual)
    except (pickle.PicklingError, TypeError, AttributeError) as e:
        return pickle.dumps(Unsendable(f"a value of the row cannot be given to a template: {e}"))
