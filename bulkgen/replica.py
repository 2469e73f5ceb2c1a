"""A replica: the process that turns shards of the plan into part files, with an engine of its own.

    shards (from the driver) → plan.read → feed → engine → results.write_part → "part" (to the driver)

The loop never waits for a shard to end: rows of the next shard follow in the same breath, so the engine's queue does
not drain until the last row. Parts are written by a thread beside the loop. What is in a part counts only once the
driver has it in the manifest.

Messages in: the work (first), `shard` (all of it, or some of its rows), `stop` (commit what is finished and end),
`close` (nothing more will come).
Messages out: `ready`, `want` (more shards), `stats`, `part`, `closed`, `failed`.
"""

import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bulkgen.engine import Engine, EngineSettings, open_engine
from bulkgen.engine.channel import Channel, Message
from bulkgen.errors import BulkgenError, EngineError, OutputError
from bulkgen.feed import Admission, Candidate, row_order
from bulkgen.plan import Plan, PlannedRow, load_plan
from bulkgen.python import freeze_heap
from bulkgen.records import Completion, Failure, Request, Shard
from bulkgen.results import About, PartRow, done_row, failed_row, judged, repeated_row, write_part

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
    replicas: int
    incarnation: int
    settings: dict[str, Any]
    cores: Sequence[int] | None
    sampling: dict[str, Any]
    settings_key: str
    commit_rows: int
    commit_s: float
    max_attempts: int
    row_timeout_s: float

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
    repeated: int = 0

    def repeat(self, result: Completion | Failure, rows: int) -> None:
        """So many rows more have the result of one that was added; nothing was computed for them."""
        self.repeated += rows
        if isinstance(result, Failure):
            self.failed += rows
        else:
            self.done += rows

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


@dataclass(slots=True)
class _Offered:
    """A row for the engine: of which shard, in it since when (monotonic seconds), for which time, with which sampling.

    `candidate`: as the feed knows it; None for a row that is never sent, since it fits no engine like this one.
    """

    shard: int
    row: PlannedRow
    since: float = 0.0
    attempt: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    candidate: Candidate | None = None


class Replica:
    """One engine and the loop around it. Single-threaded but for the writing of parts."""

    def __init__(self, work: Work, channel: Channel, engine: Engine) -> None:
        self._work = work
        self._channel = channel
        self._engine = engine
        self._plan = _open_plan(Path(work.plan))
        limits = engine.limits
        self._feed = Admission(limits, max_num_batched_tokens=limits.max_num_batched_tokens, lag=limits.lag_steps)
        self._shards: list[tuple[Shard, frozenset[int] | None]] = []
        self._wanted = 0
        self._rows = self._planned_rows()
        self._again: deque[_Offered] = deque()  # failed for a reason that may pass, or not wanted yet
        self._in_engine: dict[int, _Offered] = {}  # in the order of their offering
        self._overrides: dict[str, dict[str, Any]] = {}
        self._uncommitted = _Uncommitted()
        self._writer = ThreadPoolExecutor(1, "parts")
        self._writing: list[Future[Message]] = []
        self._parts = 0
        self._totals = _Totals()
        self._first_offered_at: float | None = None
        self._last_completed_at: float | None = None
        self._held_s, self._held_since = 0.0, 0.0
        self._closing = self._stopped = False
        self._stats_due = 0.0

    def run(self) -> None:
        """Work until the driver says `close` or `stop`, or the engine breaks, then commit what is finished."""
        try:
            self._work_on()
        finally:
            # The engine may have broken; what it has finished before is finished.
            self._commit()
            self._writer.shutdown()
            self._announce_parts()
        self._tell(now=True)

    def _work_on(self) -> None:
        while True:
            self._listen(0.0 if self._in_engine else _IDLE_WAIT_S)
            if self._stopped:
                return
            self._top_up()
            self._clock_held()
            self._collect()
            self._clock_held()
            self._commit_if_due()
            self._tell()
            if self._closing and self._is_idle():
                return

    def _clock_held(self) -> None:
        """Add up for how long the engine has held rows; called when it has got some, and when it gave some back."""
        now = time.monotonic()
        self._held_s += now - self._held_since if self._held_since else 0.0
        self._held_since = now if self._in_engine else 0.0

    def _is_idle(self) -> bool:
        return not self._in_engine and not self._shards and not self._again

    def _listen(self, timeout_s: float) -> None:
        while len(self._shards) + self._wanted < _SHARDS_HELD and not self._closing:
            self._channel.send({"type": "want"})
            self._wanted += 1
        while (message := self._channel.receive(timeout_s)) is not None:
            timeout_s = 0.0
            if message["type"] == "shard":
                rows = message["rows"]
                self._shards.append((self._plan.shards[message["shard"]], None if rows is None else frozenset(rows)))
                self._wanted -= 0 if message["unasked"] else 1
            else:
                self._closing = True
                self._stopped = message["type"] == "stop"

    def _planned_rows(self) -> Iterator[_Offered | None]:
        """The pending rows of all shards, one shard after the other; None while there is no shard to read."""
        while True:
            if not self._shards:
                yield None
                continue
            shard, only = self._shards[0]
            for row in self._plan.read(shard, only, self._in_order):
                yield _Offered(shard.shard, row)
            self._shards.pop(0)

    def _in_order(self, rows: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
        """In which order some rows go into the engine, in the light of what answers were like until now."""
        prompts, lengths = rows["prompt_tokens"], self._feed.lengths
        behind = max(0, self._plan.pending_rows - len(rows)) / self._work.replicas
        expected = lengths.expected(prompts, rows["max_tokens"])
        return row_order(self._engine.limits, prompts, expected, rows["group"], rows_behind=behind)

    def _top_up(self) -> None:
        requests: list[Request] = []
        now = time.monotonic()
        while (offered := self._again.popleft() if self._again else next(self._rows)) is not None:
            row = offered.row
            if self._fits(row):
                offered.candidate = candidate = offered.candidate or self._candidate(offered)
                if not self._feed.admit(candidate):
                    self._again.appendleft(offered)
                    break
                self._feed.offered(row.ordinal, candidate)
                requests.append(Request(row.ordinal, row.tokens.data, offered.sampling))
            offered.since, offered.attempt = now, self._plan.offers.begin(row.ordinal)
            self._in_engine[row.ordinal] = offered
            if offered.candidate is None:
                self._finish(Failure(row.ordinal, "larger_than_kv_cache", self._why_too_large(row)))
        if requests:
            self._engine.submit(requests)
            if not self._first_offered_at:
                self._first_offered_at = time.time()
                # The first step, all prefill, can be long: until it ends nothing else would say that rows are inside.
                self._tell(now=True)

    def _candidate(self, offered: _Offered) -> Candidate:
        row = offered.row
        offered.sampling = self._sampling(row)
        answers = offered.sampling.get("n") or 1
        return Candidate(len(row.tokens), row.max_tokens, answers, row.group, row.shared_tokens)

    def _fits(self, row: PlannedRow) -> bool:
        """Whether the KV cache could hold the row if it were alone; else the engine would keep it waiting for ever."""
        limits = self._engine.limits
        blocks = -(-(len(row.tokens) + row.max_tokens) // limits.block_size)
        return blocks <= limits.kv_tokens // limits.block_size

    def _why_too_large(self, row: PlannedRow) -> str:
        return (
            f"{len(row.tokens)} prompt tokens and {row.max_tokens} of output cannot be in the KV cache together, which "
            f"holds {self._engine.limits.kv_tokens}; lower sampling.max_tokens or give the engine more memory"
        )

    def _sampling(self, row: PlannedRow) -> dict[str, Any]:
        own = self._overrides.get(row.overrides)
        if own is None:
            own = json.loads(row.overrides)
            # Rows mostly share a few sets of values; where each has its own (a seed, say) keeping them saves nothing.
            if len(self._overrides) < 1000:
                self._overrides[row.overrides] = own
        sampling = {**self._work.sampling, **own, "max_tokens": row.max_tokens}
        if sampling.get("seed") is not None and "seed" not in own:
            sampling["seed"] = row_seed(sampling["seed"], row.key)
        return sampling

    def _collect(self) -> None:
        if not self._in_engine:
            return
        results = self._engine.poll()
        self._check(results)
        for result in results:
            self._finish(result)
        if results:
            self._last_completed_at = time.time()
        self._end_overdue()
        self._feed.progress(self._engine.stats())

    def _check(self, results: Sequence[Completion | Failure]) -> None:
        """Raise EngineError where results are not those of the rows in the engine: which one errs nobody could say."""
        seen: set[int] = set()
        for result in results:
            offered = self._in_engine.get(result.index)
            if offered is None or result.index in seen:
                raise EngineError(f"the engine returned row {result.index}, which it had returned before or never had")
            seen.add(result.index)
            if isinstance(result, Completion) and result.prompt_tokens != len(offered.row.tokens):
                raise EngineError(
                    f"the engine returned row {result.index} with {result.prompt_tokens} prompt tokens; it was sent "
                    f"{len(offered.row.tokens)}: the answer to another row"
                )
        if not results:
            stats = self._engine.stats()
            if not stats.running and not stats.waiting:
                raise EngineError(f"the engine has lost {len(self._in_engine)} rows: it holds none and returns none")

    def _end_overdue(self) -> None:
        """Fail rows that are in the engine for too long; it holds them oldest first."""
        until = time.monotonic() - self._work.row_timeout_s
        for ordinal, offered in list(islice(self._in_engine.items(), self._feed.most)):
            if offered.since > until:
                return
            self._engine.cancel([ordinal])
            reason = f"not finished {self._work.row_timeout_s:g} s after it was given to the engine"
            self._finish(Failure(ordinal, "row_timeout", f"{reason} (engine.row_timeout_s)"))

    def _finish(self, result: Completion | Failure) -> None:
        """A row has come out of the engine: it is done, failed, or to be tried again."""
        offered = self._in_engine.pop(result.index)
        row = offered.row
        if offered.candidate is not None:
            self._feed.ended(row.ordinal, result.output_tokens if isinstance(result, Completion) else None)
        if isinstance(result, Completion):
            result = judged(result, offered.sampling)
        if isinstance(result, Failure) and result.transient:
            if self._plan.offers.fail(row.ordinal) < self._work.max_attempts:
                self._again.append(offered)
                return
        else:
            self._plan.offers.end(row.ordinal, done=isinstance(result, Completion))
        about = About(
            key=row.key,
            shard=offered.shard,
            warnings=row.warnings,
            attempts=offered.attempt,
            settings_key=self._work.settings_key,
            request_key=row.request_key,
        )
        unwritten = self._uncommitted
        if not unwritten.rows:
            unwritten.since = time.monotonic()
        finished = failed_row(about, result) if isinstance(result, Failure) else done_row(about, result)
        followers = self._repeated(row.ordinal, finished)
        # The row itself comes last: were it committed before them, nothing would be left to follow.
        unwritten.rows += followers
        unwritten.rows.append(finished)
        for totals in (unwritten.totals, self._totals):
            totals.add(result, row.max_tokens)
            totals.repeat(result, len(followers))

    def _repeated(self, ordinal: int, finished: PartRow) -> list[PartRow]:
        """The records of the rows that follow a finished one."""
        followers = self._plan.followers(ordinal)
        if not followers:
            return []
        keys = self._plan.keys_of(np.array([follower for follower, _ in followers], np.int64))
        return [repeated_row(finished, key, shard) for key, (_, shard) in zip(keys, followers, strict=True)]

    def _commit_if_due(self) -> None:
        rows = len(self._uncommitted.rows)
        age_s = time.monotonic() - self._uncommitted.since
        if rows and (rows >= self._work.commit_rows or age_s >= self._work.commit_s or self._is_idle()):
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
        began = time.monotonic()
        write_part(Path(self._work.parts), name, rows)
        return {**about, "write_s": time.monotonic() - began}

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
                "engine": asdict(replace(self._engine.stats(), held_s=self._held_s)),
                "rows": asdict(self._totals),
            }
        )


def _open_plan(folder: Path) -> Plan:
    try:
        return load_plan(folder, "replica")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise OutputError(f"{folder}: the plan cannot be read ({e}); remove that folder and run again") from e


def row_seed(seed: int, key: bytes) -> int:
    """A row's own seed out of the job's: the first 63 bits of BLAKE2b over the job's seed and the row's key.

    So it does not depend on the row's place in the file, on shards or on what was done before.
    """
    digest = blake2b(key, digest_size=8, key=seed.to_bytes(8, "big", signed=True)).digest()
    return int.from_bytes(digest, "big") >> 1


def main(fd: int) -> int:
    """Run one replica over the channel at `fd`; the exit code is for the log only, messages tell the driver."""
    # Some schedulers signal every process of a job. When to end is for the driver to say, whose end is noticed too.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
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
        freeze_heap()
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
