"""Generation: the driver's part. Hands shards to replicas, commits what they write, starts them again when they die.

    plan → shards to whoever wants one → "part" → check → manifest → ... until no row is pending

The driver touches no row. It runs one loop in one thread; what it knows of a replica is what the replica said last.
"""

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bulkgen.engine import EngineSettings
from bulkgen.engine.launcher import Event, Launcher
from bulkgen.errors import BulkgenError, EngineError, OutputError
from bulkgen.plan import Plan
from bulkgen.records import EngineStats
from bulkgen.replica import Work
from bulkgen.report import Meter, ProgressState, Tally
from bulkgen.results import read_keys
from bulkgen.rundir import Manifest, RunDir

_TICK_S = 0.25
_RECORD_EVERY_S = 1.0
# A stop must end well within the 30 s that schedulers usually grant.
_STOP_GRACE_S = 6.0
_CLOSE_GRACE_S = 30.0
# An engine that has said its last word may still free its device in an orderly way.
_EXIT_GRACE_S = 2.0
_SUMS = ("done", "failed", "prompt_tokens", "cached_tokens", "output_tokens", "budget_tokens")
_COUNTERS = ("prompt_tokens", "cached_tokens", "output_tokens", "preemptions")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSetup:
    """One replica's engine and its share of the machine."""

    settings: EngineSettings
    env: Mapping[str, str]
    cores: tuple[int, ...] | None


@dataclass(slots=True)
class _Seat:
    """One replica as the driver knows it, over all its incarnations."""

    setup: ReplicaSetup
    incarnation: int = -1
    state: Literal["starting", "working", "closed", "dead"] = "dead"
    shards: list[int] = field(default_factory=list)
    restarts: int = 0
    was_ready: bool = False
    last_words: str = ""
    stats: EngineStats | None = None
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0))
    committed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0))


class Generation:
    """One start's generation, from the first replica to the last commit."""

    def __init__(
        self,
        *,
        run: RunDir,
        manifest: Manifest,
        plan: Plan,
        start: int,
        launcher: Launcher,
        setups: list[ReplicaSetup],
        work: Callable[[int, int, ReplicaSetup], Work],
        max_restarts: int,
        show: Callable[[str, ProgressState], None],
        say: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._run = run
        self._manifest = manifest
        self._plan = plan
        self._start = start
        self._launcher = launcher
        self._seats = [_Seat(setup) for setup in setups]
        self._work = work
        self._max_restarts = max_restarts
        self._show = show
        self._say = say
        self._stopped = stopped
        self._todo: deque[int] = deque()
        self._rows_left = 0
        prompt_tokens = budget_tokens = 0
        for shard in plan.shards:
            rows, prompts, budgets = plan.pending(shard)
            if rows:
                self._todo.append(shard.shard)
                self._rows_left += rows
                prompt_tokens += prompts
                budget_tokens += budgets
        self._rows_before = plan.rows - plan.refused - self._rows_left
        self._committed = dict.fromkeys(_SUMS, 0)
        self._wants: deque[int] = deque()
        self._meter = Meter(prompt_tokens, budget_tokens)
        self._record_due = 0.0

    def run(self) -> bool:
        """Generate all that is pending; True when nothing is left, False when stopped before that.

        Raises EngineError when no replica is left to work, OutputError when parts cannot be written.
        """
        if not self._rows_left:
            return True
        try:
            _end_torn_line(self._run.timeline_log)
            for number in range(len(self._seats)):
                self._launch(number)
            while self._rows_left and not self._stopped():
                self._step()
            self._end("close" if not self._rows_left else "stop")
            self._launcher.close(_EXIT_GRACE_S)
            return not self._rows_left
        finally:
            self._launcher.close(0.0)
            for number in range(len(self._seats)):
                self._record_closed(number)

    def _end(self, word: str) -> None:
        grace_s = _CLOSE_GRACE_S if word == "close" else _STOP_GRACE_S
        for number in range(len(self._seats)):
            self._launcher.send(number, {"type": word})
        until = time.monotonic() + grace_s
        while any(s.state == "working" for s in self._seats) and time.monotonic() < until:
            for event in self._launcher.events(_TICK_S):
                if event.death is None:
                    self._take(event.replica, event.message or {})
                else:
                    self._seats[event.replica].state = "dead"
        self._record(force=True)

    def _step(self) -> None:
        for event in self._launcher.events(_TICK_S):
            self._handle(event)
        while self._wants and self._todo:
            number, shard = self._wants.popleft(), self._todo.popleft()
            self._seats[number].shards.append(shard)
            self._launcher.send(number, {"type": "shard", "shard": shard})
        self._record()

    def _handle(self, event: Event) -> None:
        if event.death is not None:
            self._bury(event.replica, event.death)
        elif event.message is not None:
            self._take(event.replica, event.message)

    def _take(self, number: int, message: dict[str, Any]) -> None:
        seat = self._seats[number]
        match message["type"]:
            case "want":
                self._wants.append(number)
            case "stats":
                seat.stats = EngineStats(**message["engine"])
                seat.rows = message["rows"]
                self._observe(number, message["time"])
            case "part":
                self._commit(number, message)
            case "ready":
                seat.state, seat.was_ready = "working", True
                self._append("ready", number, {k: v for k, v in message.items() if k != "type"})
            case "closed":
                seat.state = "closed"
            case "failed":
                seat.last_words = message["message"]
                if message["kind"] == "output":
                    raise OutputError(message["message"])

    def _observe(self, number: int, at: float) -> None:
        seat = self._seats[number]
        if seat.stats is not None:
            tally = Tally(
                engine_prompt_tokens=seat.stats.prompt_tokens,
                engine_output_tokens=seat.stats.output_tokens,
                finished_prompt_tokens=seat.rows["prompt_tokens"],
                finished_output_tokens=seat.rows["output_tokens"],
                finished_budget_tokens=seat.rows["budget_tokens"],
            )
            self._meter.observe(at, (number, seat.incarnation), tally)

    def _commit(self, number: int, part: dict[str, Any]) -> None:
        """Take a part into the manifest, if each of its rows is of this plan and was not committed before."""
        ordinals = self._plan.lookup(read_keys(self._run.parts / part["name"]))
        if len(ordinals) != part["rows"] or (ordinals < 0).any() or not self._plan.commit(ordinals):
            raise BulkgenError(
                f"{self._run.parts / part['name']}: holds rows that are not of this plan or were committed before; "
                "the part was not taken"
            )
        self._append("part", number, {"plan": self._start} | {k: v for k, v in part.items() if k != "type"})
        self._rows_left -= part["rows"]
        for sums in (self._committed, self._seats[number].committed):
            for key in _SUMS:
                sums[key] += part[key]

    def _append(self, kind: str, number: int, about: Mapping[str, Any]) -> None:
        where = {"start": self._start, "replica": number, "incarnation": self._seats[number].incarnation}
        self._manifest.append({"record": kind, **where, **about})

    def _launch(self, number: int) -> None:
        seat = self._seats[number]
        seat.incarnation += 1
        seat.state, seat.stats = "starting", None
        seat.rows, seat.committed = dict.fromkeys(_SUMS, 0), dict.fromkeys(_SUMS, 0)
        work = self._work(number, seat.incarnation, seat.setup)
        self._launcher.start(number, asdict(work), seat.setup.env, self._run.engine_log(number))

    def _bury(self, number: int, reason: str) -> None:
        """A replica died: its uncommitted rows go back, and it is started again as long as that has sense."""
        seat = self._seats[number]
        self._record_closed(number)
        seat.state = "dead"
        self._meter.lose((number, seat.incarnation))
        self._wants = deque(n for n in self._wants if n != number)
        pending = (s for s in seat.shards if self._plan.pending(self._plan.shards[s])[0])
        self._todo.extendleft(reversed(list(pending)))
        seat.shards = []
        words = f"{reason}: {seat.last_words}" if seat.last_words else reason
        if not self._todo:
            self._say(f"replica {number} died ({words}); the others have all that is left")
        elif seat.was_ready and seat.restarts < self._max_restarts:
            seat.restarts += 1
            self._say(f"replica {number} died ({words}); starting it again")
            self._launch(number)
            self._append("restart", number, {"time": time.time(), "reason": words})
        elif all(s.state == "dead" for s in self._seats):
            raise EngineError(self._obituary(number, words))
        else:
            self._say(f"replica {number} died ({words}); going on without it")

    def _obituary(self, number: int, words: str) -> str:
        seat = self._seats[number]
        times = "once" if not seat.restarts else f"{seat.restarts + 1} times"
        what = f"died {times}" if seat.was_ready else "could not start"
        log = self._run.engine_log(number)
        if not seat.last_words:
            words += f"; its last line was: {_last_line(log)}"
        return f"the engine of replica {number} {what} ({words}); see {log}"

    def _record_closed(self, number: int) -> None:
        seat = self._seats[number]
        if seat.stats is not None:
            counters = asdict(seat.stats)
            self._append("closed", number, {"counters": {k: counters[k] for k in _COUNTERS}})
            seat.stats = None

    def _record(self, force: bool = False) -> None:
        """Once a second: a line a replica in the timeline, and the state of the whole for people."""
        now = time.time()
        if not force and now < self._record_due:
            return
        self._record_due = now + _RECORD_EVERY_S
        # Neither the timeline nor what is shown is worth ending a run for.
        with contextlib.suppress(OSError), self._run.timeline_log.open("a") as f:
            for number, seat in enumerate(self._seats):
                if seat.stats is not None:
                    where = {"replica": number, "incarnation": seat.incarnation}
                    rows = {"done": seat.rows["done"], "failed": seat.rows["failed"]}
                    f.write(json.dumps({"time": now, "start": self._start} | where | asdict(seat.stats) | rows) + "\n")
        self._show("generating" if any(s.was_ready for s in self._seats) else "starting", self._progress(now))

    def _progress(self, now: float) -> ProgressState:
        sums = dict(self._committed)
        for seat in self._seats:
            if seat.state != "dead":
                for key in _SUMS:
                    # The part's message can be ahead of the last statistics.
                    sums[key] += max(0, seat.rows[key] - seat.committed[key])
        stats = [s.stats for s in self._seats if s.stats is not None]
        rates = self._meter.rates(now)
        return ProgressState(
            rows=self._plan.rows,
            done=self._rows_before + sums["done"],
            failed=sums["failed"],
            refused=self._plan.refused,
            tokens_done=self._meter.tokens_done,
            tokens_planned=self._meter.tokens_planned,
            output_tokens=sums["output_tokens"],
            output_tokens_per_s=rates.output_tokens_per_s,
            total_tokens_per_s=rates.total_tokens_per_s,
            running=sum(s.running for s in stats),
            waiting=sum(s.waiting for s in stats),
            kv_usage=max((s.kv_usage for s in stats), default=0.0),
            eta_s=self._meter.eta_s(now),
        )


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as f:
            f.seek(max(0, log.stat().st_size - 4096))
            lines = [line for line in f.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:500] if lines else "(none)"
    except OSError:
        return "(none)"


def _end_torn_line(log: Path) -> None:
    """Let a line that a crash tore be alone with its damage."""
    with log.open("ab+") as f:
        if f.tell() and (f.seek(-1, 2), f.read(1))[1] != b"\n":
            f.write(b"\n")
