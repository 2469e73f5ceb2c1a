"""Progress on standard error while a run works: a bar on a terminal, else a plain line every so often.

Shows what it is told; what the figures mean and how they come about is in meter.py.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from bulkgen.report import figures
from bulkgen.report.meter import ProgressState
from bulkgen.secrecy import hushed

if TYPE_CHECKING:
    from tqdm import tqdm

# The widest text beside the bar leaves room for a bar of ten characters in 80 columns.
_BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar}|{postfix}"
_TICKS = 1000


class Progress:
    """Shows stages, figures and log lines on `stream`; with `quiet` nothing at all.

    A stream that is closed or full must not end a run, so what cannot be shown is not shown.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        every_s: float = 30.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is for people, `ticks` seconds by a clock that never goes back."""
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self._every_s = every_s
        self._clock = clock
        self._ticks = ticks
        self._stage = ""
        self._state = ProgressState()
        self._line_due = 0.0
        self._lined_at, self._lined_rows = 0.0, 0
        self._terminal = not quiet and self._stream.isatty()
        self._bar: tqdm[Any] | None = None

    def stage(self, name: str) -> None:
        """A new stage of the run begins."""
        if name == self._stage:
            return
        self._stage = name
        # A stage's first figures would all be zero; the line that names it stands for them.
        self._lined_at, self._lined_rows, self._state = self._ticks(), -1, ProgressState()
        self._line_due = self._lined_at + self._every_s
        if self._terminal:
            with _unharmed():
                self._open_bar().set_description_str(f"{name:<10}", refresh=True)
        else:
            self._line(name)

    def update(self, state: ProgressState) -> None:
        """Show where the run stands. Meant to be called a few times a second."""
        if self._quiet:
            return
        self._state = state
        if self._lined_rows < 0:
            self._lined_rows = _finished(state)
        if self._terminal:
            with _unharmed():
                self._show_bar(state)
        elif self._ticks() >= self._line_due:
            self._show_line()

    def now(self) -> None:
        """Where the run stands, as a line at once: somebody has asked for it."""
        if self._terminal:
            self.say(f"{self._stage}: {line_of(self._state)}")
        else:
            self._show_line()

    def _show_line(self) -> None:
        now, rows = self._ticks(), _finished(self._state)
        since_s, more = now - self._lined_at, rows - self._lined_rows
        # Rows that a dead engine had finished and not committed are taken back.
        speed = f", {figures.rate(more / since_s)} rows/s" if self._lined_rows >= 0 <= more and since_s > 0 else ""
        self._lined_at, self._lined_rows, self._line_due = now, rows, now + self._every_s
        self._line(f"{self._stage}: {line_of(self._state)}{speed}")

    def say(self, text: str) -> None:
        """One line for the user that stays, above the bar where there is one."""
        if self._terminal:
            with _unharmed():
                self._open_bar().write(self._safe(text), file=self._stream)
        else:
            self._line(text)

    def close(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            with _unharmed():
                self._bar.close()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _open_bar(self) -> "tqdm[Any]":
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=_TICKS,
                file=self._stream,
                bar_format=_BAR_FORMAT,
                dynamic_ncols=True,
                leave=False,
                desc=self._stage,
            )
        return self._bar

    def _show_bar(self, state: ProgressState) -> None:
        bar = self._open_bar()
        behind, all_of_it = (
            (state.tokens_done, state.tokens_planned) if state.tokens_planned else (state.done, state.rows)
        )
        bar.n = _TICKS * behind // all_of_it if all_of_it else 0
        bar.set_postfix_str(bar_text(state), refresh=False)
        bar.refresh()

    def _line(self, text: str) -> None:
        if self._quiet:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._clock()))
        with _unharmed():
            self._stream.write(f"{stamp} {self._safe(text)}\n")
            self._stream.flush()

    def _safe(self, text: str) -> str:
        return figures.visible(hushed(text), self._stream.encoding or "utf-8", limit=2000)


@contextlib.contextmanager
def _unharmed() -> Iterator[None]:
    # ValueError: the stream is closed. RuntimeError: a signal came while something was being shown.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        yield


def _finished(state: ProgressState) -> int:
    """Rows that are behind the stage: those read, those done or failed, those merged."""
    return state.done + state.failed + state.refused if state.tokens_planned else state.done or state.rows


def line_of(state: ProgressState) -> str:
    """A state as one line for a log: each figure with its name."""
    if not state.tokens_planned and state.done:
        return f"{state.done:,} of {figures.rows(state.rows)}"
    if not state.tokens_planned:
        refused = f" ({state.refused:,} failed)" if state.refused else ""
        return f"{figures.rows(state.rows)}{refused}"
    finished = _finished(state)
    share = state.tokens_done / state.tokens_planned
    return (
        f"{finished:,} of {figures.rows(state.rows)} ({state.failed + state.refused:,} failed), "
        f"{figures.short(state.tokens_done)} of {figures.short(state.tokens_planned)} tokens ({share:.0%}), "
        f"output {figures.rate(state.output_tokens_per_s)} tokens/s, "
        f"total {figures.rate(state.total_tokens_per_s)} tokens/s, "
        f"running {state.running:,}, waiting {state.waiting:,}, KV {state.kv_usage:.0%}, "
        f"{'ETA ' + figures.seconds(state.eta_s) if state.eta_s is not None else 'ETA unknown'}"
    )


def bar_text(state: ProgressState) -> str:
    """A state beside the bar: rows, output and total tokens/s, running+waiting, KV usage, ETA."""
    if not state.tokens_planned and state.done:
        return f"{figures.short(state.done)}/{figures.short(state.rows)}"
    if not state.tokens_planned:
        return f"{state.rows:,} rows" if state.rows else ""
    bad = state.failed + state.refused
    failed = f" {figures.short(bad)} failed" if bad else ""
    eta = figures.seconds(state.eta_s) if state.eta_s is not None else "?"
    return (
        f"{figures.short(state.done + bad)}/{figures.short(state.rows)}{failed} "
        f"{figures.short(state.output_tokens_per_s)} out/{figures.short(state.total_tokens_per_s)} t/s "
        f"{state.running}+{state.waiting} KV {state.kv_usage:.0%} ETA {eta}"
    )
