"""A replica: the process that turns shards of the plan into part files, with an engine of its own.

    shards (from the driver) → plan.read → feed → engine → results.write_part → "part" (to the driver)

The loop never waits for a shard to end: rows of the next shard follow in the same breath, so the engine's queue does
not drain until the last row. Parts are written by a thread beside the loop. What is in a part counts only once the
driver has it in the manifest.

Messages in: the work (first), `shard`, `stop` (commit what is finished and end), `close` (nothing more will come).
Messages out: `ready`, `want` (more shards), `stats`, `part`, `closed`, `failed`.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bulkgen.engine import Engine, EngineSettings, open_engine
from bulkgen.engine.channel import Channel, Message
from bulkgen.errors import BulkgenError, OutputError
from bulkgen.feed import TopUp
from bulkgen.plan import PlannedRow, load_plan
from bulkgen.records import Completion, Failure, Request, Shard
from bulkgen.results import PartRow, done_row, failed_row, write_part

_STATS_EVERY_S = 0.5
# Shards that a replica holds, the one it reads among them, so that it never waits for the driver.
_SHARDS_HELD = 3
_IDLE_WAIT_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a replica is told at its start. JSON-able: it travels in the first message."""

    plan: str
    parts: str
    start: int
    replica: int
    incarnation: int
    settings: dict[str, Any]
    cores: Sequence[int] | None
    sampling: dict[str, Any]
    commit_rows: int
    commit_s: float

    def part_name(self, number: int) -> str:
        """File name of this incarnation's nth part; unique in the run."""
        return f"part-s{self.start:04d}-r{self.replica}-i{self.incarnation}-{number:06d}.parquet"


@dataclass(slots=True)
class _Totals:
    """Sums over rows, for one part or for the whole life of a replica."""

    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    budget_tokens: int = 0

    def add(self, result: Completion | Failure, max_tokens: int) -> None:
        self.budget_tokens += max_tokens
        if isinstance(result, Failure):
            self.failed += 1
            return
        self.done += 1
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens
        self.output_tokens += result.output_tokens


@dataclass(slots=True)
class _Uncommitted:
    """Finished rows on their way to a part."""

    rows: list[PartRow] = field(default_factory=list)
    totals: _Totals = field(default_factory=_Totals)
    since: float = 0.0


class Replica:
    """One engine and the loop around it. Single-threaded but for the writing of parts."""

    def __init__(self, work: Work, channel: Channel, engine: Engine) -> None:
        self._work = work
        self._channel = channel
        self._engine = engine
        self._plan = load_plan(Path(work.plan))
        self._feed = TopUp(engine.limits)
        self._shards: list[Shard] = []
        self._wanted = 0
        self._rows = self._planned_rows()
        self._in_engine: dict[int, tuple[int, PlannedRow]] = {}
        self._overrides: dict[str, dict[str, Any]] = {}
        self._uncommitted = _Uncommitted()
        self._writer = ThreadPoolExecutor(1, "parts")
        self._writing: list[Future[Message]] = []
        self._parts = 0
        self._totals = _Totals()
        self._first_offered_at: float | None = None
        self._last_completed_at: float | None = None
        self._closing = self._stopped = False
        self._stats_due = 0.0

    def run(self) -> None:
        """Work until the driver says `close` or `stop`, then commit what is finished."""
        while True:
            self._listen(0.0 if self._in_engine else _IDLE_WAIT_S)
            if self._stopped:
                break
            self._top_up()
            self._collect()
            self._commit_if_due()
            self._tell()
            if self._closing and not self._in_engine and not self._shards:
                break
        self._commit()
        self._writer.shutdown()
        self._announce_parts()
        self._tell(now=True)

    def _listen(self, timeout_s: float) -> None:
        while len(self._shards) + self._wanted < _SHARDS_HELD and not self._closing:
            self._channel.send({"type": "want"})
            self._wanted += 1
        while (message := self._channel.receive(timeout_s)) is not None:
            timeout_s = 0.0
            if message["type"] == "shard":
                self._shards.append(self._plan.shards[message["shard"]])
                self._wanted -= 1
            else:
                self._closing = True
                self._stopped = message["type"] == "stop"

    def _planned_rows(self) -> Iterator[tuple[int, PlannedRow] | None]:
        """The pending rows of all shards, one shard after the other; None while there is no shard to read."""
        while True:
            if not self._shards:
                yield None
                continue
            shard = self._shards[0]
            for row in self._plan.read(shard):
                yield shard.shard, row
            self._shards.pop(0)

    def _top_up(self) -> None:
        room = self._feed.room(len(self._in_engine))
        requests: list[Request] = []
        while len(requests) < room and (next_row := next(self._rows)) is not None:
            row = next_row[1]
            self._in_engine[row.ordinal] = next_row
            sampling = self._sampling(row)
            requests.append(Request(row.ordinal, row.tokens.tolist(), sampling))
        if requests:
            self._engine.submit(requests)
            self._first_offered_at = self._first_offered_at or time.time()

    def _sampling(self, row: PlannedRow) -> dict[str, Any]:
        own = self._overrides.get(row.overrides)
        if own is None:
            own = json.loads(row.overrides)
            # Rows mostly share a few sets of values; where each has its own (a seed, say) keeping them saves nothing.
            if len(self._overrides) < 1000:
                self._overrides[row.overrides] = own
        return {**self._work.sampling, **own, "max_tokens": row.max_tokens}

    def _collect(self) -> None:
        if not self._in_engine:
            return
        results = self._engine.poll()
        if not results:
            return
        self._last_completed_at = time.time()
        unwritten = self._uncommitted
        if not unwritten.rows:
            unwritten.since = time.monotonic()
        for result in results:
            shard, row = self._in_engine.pop(result.index)
            if isinstance(result, Failure):
                unwritten.rows.append(failed_row(row.key, shard, result))
            else:
                unwritten.rows.append(done_row(row.key, shard, result))
            unwritten.totals.add(result, row.max_tokens)
            self._totals.add(result, row.max_tokens)

    def _commit_if_due(self) -> None:
        rows = len(self._uncommitted.rows)
        age_s = time.monotonic() - self._uncommitted.since
        idle = not self._in_engine and not self._shards
        if rows and (rows >= self._work.commit_rows or age_s >= self._work.commit_s or idle):
            self._commit()
        if self._writing:
            self._announce_parts(wait=False)

    def _commit(self) -> None:
        part, self._uncommitted = self._uncommitted, _Uncommitted()
        if not part.rows:
            return
        name = self._work.part_name(self._parts)
        self._parts += 1
        about = {
            "type": "part",
            "name": name,
            "rows": len(part.rows),
            **asdict(part.totals),
            "first_offered_at": self._first_offered_at,
            "last_completed_at": self._last_completed_at,
        }
        self._writing.append(self._writer.submit(self._write, name, part.rows, about))

    def _write(self, name: str, rows: list[PartRow], about: Message) -> Message:
        write_part(Path(self._work.parts), name, rows)
        return about

    def _announce_parts(self, wait: bool = True) -> None:
        while self._writing and (wait or self._writing[0].done()):
            self._channel.send(self._writing.pop(0).result())

    def _tell(self, now: bool = False) -> None:
        if not now and time.monotonic() < self._stats_due:
            return
        self._stats_due = time.monotonic() + _STATS_EVERY_S
        self._channel.send(
            {
                "type": "stats",
                "time": time.time(),
                "engine": asdict(self._engine.stats()),
                "rows": asdict(self._totals),
            }
        )


def main(fd: int) -> int:
    """Run one replica over the channel at `fd`; the exit code is for the log only, messages tell the driver."""
    channel = Channel(fd)
    opening = channel.receive(timeout_s=60.0)
    if opening is None:
        return 1
    work = Work(**opening)
    if work.cores is not None:
        # Before the engine is imported: the threads it starts stay where their parent is.
        os.sched_setaffinity(0, work.cores)
    started = time.monotonic()
    engine: Engine | None = None
    try:
        engine = open_engine(EngineSettings(**work.settings))
        start_s = time.monotonic() - started
        channel.send({"type": "ready", "start_s": start_s, **asdict(engine.limits)})
        Replica(work, channel, engine).run()
        channel.send({"type": "closed"})
        return 0
    except BulkgenError as e:
        kind = "output" if isinstance(e, OutputError) else "engine"
        channel.send({"type": "failed", "kind": kind, "message": str(e)})
        return e.exit_code
    finally:
        if engine is not None:
            engine.close()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
