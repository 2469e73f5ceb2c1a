"""Generation: the driver's part. Hands shards to replicas, commits what they write, starts them again when they die.

    plan → shards to whoever wants one → "part" → check → manifest → ... until no row is pending

The driver touches no row. It runs one loop in one thread; what it knows of a replica is what the replica said last.
"""

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bulkgen.backlog import Backlog, Lot, lots_of
from bulkgen.engine.launcher import Event, Launcher
from bulkgen.engine.memory import KILLED
from bulkgen.errors import BulkgenError, EngineError, OutputError, TooManyFailures
from bulkgen.feed import Suspect
from bulkgen.plan import Plan
from bulkgen.records import EngineStats, Failure
from bulkgen.replica import Work
from bulkgen.report import Meter, ProgressState, Tally
from bulkgen.results import About, PartRow, failed_row, read_keys, repeated_row, write_part
from bulkgen.rundir import Manifest, RunDir
from bulkgen.seat import SUMS, Limits, ReplicaSetup, Seat, part_of_none

_TICK_S = 0.25
_RECORD_EVERY_S = 1.0
# A stop must end well within the 30 s that schedulers usually grant.
_STOP_GRACE_S = 6.0
_CLOSE_GRACE_S = 30.0
# An engine that has said its last word may still free its device in an orderly way.
_EXIT_GRACE_S = 2.0
_COUNTERS = ("prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "steps", "step_s", "held_s")


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
        settings_key: str,
        limits: Limits,
        show: Callable[[str, ProgressState], None],
        say: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._run = run
        self._manifest = manifest
        self._plan = plan
        self._start = start
        self._launcher = launcher
        self._seats = [Seat(setup) for setup in setups]
        self._work = work
        self._limits = limits
        self._show = show
        self._say = say
        self._stopped = stopped
        self._backlog = Backlog(plan)
        self._rows_left = self._backlog.rows
        self._rows_before = plan.rows - plan.refused - self._rows_left
        self._committed = dict.fromkeys(SUMS, 0)
        self._wants: deque[int] = deque()
        self._verdicts = 0
        self._settings_key = settings_key
        self._meter = Meter(self._backlog.prompt_tokens, self._backlog.budget_tokens)
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
            too_many = None
            while self._rows_left and not self._stopped() and not too_many:
                self._step()
                too_many = self._too_many_failures()
            self._end("close" if not self._rows_left else "stop")
            for number in self._launcher.close(_EXIT_GRACE_S):
                self._say(f"replica {number} did not end by itself and was ended; what it had finished is committed")
            if too_many and self._rows_left:
                raise TooManyFailures(
                    f"{too_many}; `bulkgen failures` tells why. What is finished is committed; mend the job, or go on "
                    "all the same with --max-failures 100%"
                )
            return not self._rows_left
        finally:
            self._launcher.close(0.0)
            for number in range(len(self._seats)):
                self._record_closed(number)

    def _too_many_failures(self) -> str | None:
        failed, done = self._committed["failed"], self._committed["done"]
        return self._limits.failures.exceeded(failed, failed + done, self._plan.refused)

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
        for number, seat in enumerate(self._seats):
            if seat.is_due:
                self._launch(number)
            elif (why := seat.overdue(self._limits)) is not None:
                seat.last_words = why
                self._launcher.kill(number)
        self._hand_out()
        self._record()

    def _hand_out(self) -> None:
        """Give shards to whom asked for one. A replica that tries suspects has nothing beside them in its engine."""
        asked, self._wants = self._wants, deque()
        for number in asked:
            seat = self._seats[number]
            if seat.trial:
                seat.trial = [row for row in seat.trial if not self._plan.is_committed(row[1])]
            if not seat.trial and seat.inquest.open:
                self._try_suspects(number)
            if seat.trial or seat.inquest.open or not self._backlog:
                self._wants.append(number)
                continue
            lot = self._backlog.next()
            seat.holds.append(lot)
            self._send(number, lot)
        accused = [row for seat in self._seats for row in seat.inquest.accused]
        if self._rows_left and self._rows_left == self._count(accused):
            self._judge_without_others()

    def _try_suspects(self, number: int) -> None:
        seat = self._seats[number]
        seat.trial = seat.inquest.next_group()
        for lot in lots_of(seat.trial):
            self._send(number, lot, unasked=True)

    def _send(self, number: int, lot: Lot, unasked: bool = False) -> None:
        self._launcher.send(number, {"type": "shard", "shard": lot[0], "rows": lot[1], "unasked": unasked})

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
                self._observe(number, seat.tell(message), message["time"])
            case "part":
                self._commit(number, message)
                # Statistics come now and then only: a short trial can be over before the next ones.
                if message["done"]:
                    self._lived(seat)
            case "ready":
                seat.ready()
                self._append("ready", number, {k: v for k, v in message.items() if k != "type"})
            case "closed":
                seat.state = "closed"
            case "failed":
                seat.last_words = message["message"]
                if message["kind"] == "output":
                    raise OutputError(message["message"])

    def _lived(self, seat: Seat) -> None:
        """A replica finished a row: what died alone in its engine before did not die of the engine."""
        seat.finished_any = True
        self._convict(seat.inquest.lived())

    def _count(self, rows: Sequence[Suspect]) -> int:
        """How many rows these are with those that follow them, whose fate is theirs."""
        return sum(1 + len(self._plan.followers(ordinal)) for _, ordinal in rows)

    def _convict(self, rows: list[Suspect]) -> None:
        """Record rows as failed that killed the engine while they were alone in it, and those that follow them."""
        if not rows:
            return
        self._verdicts += 1
        name = f"part-s{self._start:04d}-poison-{self._verdicts:06d}.parquet"
        reason = "the engine died each time that it had this row, at last with no other row in it"
        records: list[PartRow] = []
        for shard, ordinal in rows:
            followers = self._plan.followers(ordinal)
            own, *others = self._plan.keys_of(np.array([ordinal, *(follower for follower, _ in followers)]))
            attempts = self._plan.offers.attempts(ordinal)
            about = About(key=own, shard=shard, attempts=attempts, settings_key=self._settings_key)
            failed = failed_row(about, Failure(ordinal, "poison", reason))
            records += [
                failed,
                *(repeated_row(failed, key, at) for key, (_, at) in zip(others, followers, strict=True)),
            ]
        write_part(self._run.parts, name, records)
        self._commit(None, part_of_none(name, failed=len(records)))
        self._say(f"{len(records)} row{'s' if len(records) > 1 else ''} failed as poison: {reason}")

    def _observe(self, number: int, stats: EngineStats, at: float) -> None:
        seat = self._seats[number]
        if seat.rows["done"]:
            self._lived(seat)
        tally = Tally(
            engine_prompt_tokens=stats.prompt_tokens,
            engine_output_tokens=stats.output_tokens,
            finished_prompt_tokens=seat.rows["prompt_tokens"],
            finished_output_tokens=seat.rows["output_tokens"],
            finished_budget_tokens=seat.rows["budget_tokens"],
        )
        self._meter.observe(at, (number, seat.incarnation), tally)

    def _commit(self, number: int | None, part: dict[str, Any]) -> None:
        """Take a part into the manifest, if each of its rows is of this plan and was not committed before."""
        ordinals = self._plan.lookup(read_keys(self._run.parts / part["name"]))
        if len(ordinals) != part["rows"] or (ordinals < 0).any() or not self._plan.commit(ordinals):
            raise BulkgenError(
                f"{self._run.parts / part['name']}: holds rows that are not of this plan or were committed before; "
                "the part was not taken"
            )
        self._append("part", number, {"plan": self._start} | {k: v for k, v in part.items() if k != "type"})
        self._rows_left -= part["rows"]
        for sums in (self._committed, *([] if number is None else [self._seats[number].committed])):
            for key in SUMS:
                sums[key] += part[key]

    def _append(self, kind: str, number: int | None, about: Mapping[str, Any]) -> None:
        """`number` is None for what the driver did itself, which the manifest has as replica -1."""
        replica, incarnation = (-1, -1) if number is None else (number, self._seats[number].incarnation)
        where = {"start": self._start, "replica": replica, "incarnation": incarnation}
        self._manifest.append({"record": kind, **where, **about})

    def _launch(self, number: int) -> None:
        seat = self._seats[number]
        seat.begin()
        work = self._work(number, seat.incarnation, seat.setup)
        self._launcher.start(number, asdict(work), seat.setup.env, self._run.engine_log(number))

    def _bury(self, number: int, reason: str) -> None:
        """A replica died: its rows go back, those in its engine as suspects, and it is started again if that helps."""
        seat = self._seats[number]
        self._record_closed(number)
        seat.state = "dead"
        self._meter.lose((number, seat.incarnation))
        self._wants = deque(n for n in self._wants if n != number)
        words = f"{reason}: {seat.last_words}" if seat.last_words else reason
        in_engine, lived = self._backlog.take_back(seat.holds, seat.trial)
        if lived or seat.rows["done"]:
            self._lived(seat)
        seat.inquest.died(in_engine, alone=len(seat.trial) == 1)
        seat.holds, seat.trial = [], []
        if not seat.was_ready or seat.inquest.deaths > self._limits.max_restarts:
            self._lose(number, words)
            return
        if not self._backlog and not seat.inquest.open and not seat.inquest.accused:
            self._say(f"replica {number} died ({words}); the others have all that is left")
            return
        seat.wait()
        suspects = f", {len(in_engine)} rows of it are tried by themselves" if in_engine else ""
        self._say(f"replica {number} died ({words}); starting it again{suspects}")
        self._append("restart", number, {"time": time.time(), "reason": words, "in_engine": len(in_engine)})

    def _judge_without_others(self) -> None:
        """Nothing is left to prove engines by but the accused themselves: what they did before counts."""
        for seat in self._seats:
            if any(other.finished_any for other in self._seats):
                self._convict(seat.inquest.lived())
            else:
                seat.inquest.try_again()

    def _lose(self, number: int, words: str) -> None:
        """Go on without a replica, if there is another; its suspects are rows like any other to the rest."""
        seat = self._seats[number]
        accused = list(seat.inquest.accused)
        self._backlog.put_back(lots_of(seat.inquest.give_up()))
        if any(s.state != "dead" for s in self._seats):
            self._say(f"replica {number} died ({words}); going on without it")
        elif self._worked_before() and self._count(accused) == self._rows_left:
            # Earlier starts did all the others with this model and these settings.
            self._convict(accused)
        else:
            raise EngineError(self._obituary(number, words))

    def _worked_before(self) -> bool:
        """Whether an engine of an earlier start did rows; answers that other runs gave say nothing of it."""
        parts = self._manifest.of("part")
        return any(part["done"] and part["replica"] >= 0 and part["start"] < self._start for part in parts)

    def _obituary(self, number: int, words: str) -> str:
        seat = self._seats[number]
        deaths = seat.inquest.deaths
        times = "" if deaths < 2 else f" {deaths} times in a row without having finished a row"
        what = f"died{times}" if seat.was_ready else "could not start"
        log = self._run.engine_log(number)
        if ":" not in words:
            words += f"; its last line was: {_last_line(log)}"
        if "signal 9" in words and not seat.was_ready:
            words += f"; {KILLED}"
        return f"the engine of replica {number} {what} ({words}); see {log}"

    def _record_closed(self, number: int) -> None:
        seat = self._seats[number]
        if seat.stats is not None:
            counters = asdict(seat.stats)
            self._append("closed", number, {"counters": {k: counters[k] for k in _COUNTERS}})
            seat.stats = None

    def _record(self, force: bool = False) -> None:
        """Once a second: a line a replica in the timeline, and the state of the whole for people."""
        # By the clock that never goes backwards.
        if not force and time.monotonic() < self._record_due:
            return
        self._record_due = time.monotonic() + _RECORD_EVERY_S
        now = time.time()
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
                for key in SUMS:
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
