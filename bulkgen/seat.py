"""A replica as the driver knows it, over all its incarnations: what it holds, what it said last, how it gets on."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bulkgen.backlog import Lot
from bulkgen.engine import EngineSettings
from bulkgen.feed import Inquest, Suspect
from bulkgen.limits import FailureLimit
from bulkgen.records import EngineStats

SUMS = ("done", "failed", "prompt_tokens", "cached_tokens", "output_tokens", "budget_tokens", "repeated")
# A replica that died again without having finished a row waits before it is started once more, longer each time.
_LONGEST_PAUSE_S = 30.0


def part_of_none(name: str, **rows: int) -> dict[str, Any]:
    """What belongs on record about a part that no replica wrote: how many rows are `done` or `failed` in it."""
    sums = dict.fromkeys(SUMS, 0) | rows
    when = {"first_offered_at": None, "last_completed_at": None, "write_s": 0.0}
    return {"name": name, "rows": sum(rows.values()), **sums, **when}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How often a replica is started again in a row, how long it may load and stand still (s), which rows may fail."""

    max_restarts: int
    start_timeout_s: float
    stall_s: float
    failures: FailureLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSetup:
    """One replica's engine and its share of the machine."""

    settings: EngineSettings
    env: Mapping[str, str]
    cores: tuple[int, ...] | None


@dataclass(slots=True)
class Seat:
    """One replica. `rows` and `stats` are of the present incarnation, `committed` is what of it is in the manifest.

    `holds` are the lots that it was given, `trial` the suspects that it has in their place.
    """

    setup: ReplicaSetup
    incarnation: int = -1
    state: Literal["starting", "working", "closed", "waiting", "dead"] = "dead"
    was_ready: bool = False
    finished_any: bool = False
    holds: list[Lot] = field(default_factory=list)
    trial: list[Suspect] = field(default_factory=list)
    inquest: Inquest = field(default_factory=Inquest)
    last_words: str = ""
    stats: EngineStats | None = None
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUMS, 0))
    committed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUMS, 0))
    _launch_at: float = 0.0
    _moved_at: float = 0.0
    _moved: tuple[int, ...] = ()

    def begin(self) -> None:
        """A new incarnation is about to be launched."""
        self.incarnation += 1
        self.state, self.stats, self.last_words = "starting", None, ""
        self.rows, self.committed = dict.fromkeys(SUMS, 0), dict.fromkeys(SUMS, 0)
        self._moved, self._moved_at = (), time.monotonic()

    def ready(self) -> None:
        """Its engine is open."""
        self.state, self.was_ready = "working", True
        self._moved_at = time.monotonic()

    def tell(self, message: Mapping[str, Any]) -> EngineStats:
        """Take in its statistics."""
        self.stats = stats = EngineStats(**message["engine"])
        self.rows = message["rows"]
        moved = (self.rows["done"] + self.rows["failed"], stats.prompt_tokens, stats.output_tokens)
        if moved != self._moved or not stats.running + stats.waiting:
            self._moved, self._moved_at = moved, time.monotonic()
        return stats

    def wait(self) -> None:
        """It is to be launched again, at once or, where it keeps dying, after a pause."""
        deaths = self.inquest.deaths
        pause_s = 0.0 if deaths < 2 else min(_LONGEST_PAUSE_S, 2.0 ** (deaths - 2))
        self.state, self._launch_at = "waiting", time.monotonic() + pause_s

    @property
    def is_due(self) -> bool:
        """Whether it is time to launch it again."""
        return self.state == "waiting" and time.monotonic() >= self._launch_at

    def overdue(self, limits: Limits) -> str | None:
        """Why it must be ended: it takes too long to load, or holds rows and does not get on. Says so once."""
        still_s = time.monotonic() - self._moved_at
        if self.state == "starting" and still_s > limits.start_timeout_s:
            why = f"not ready after {still_s:.0f} s (engine.start_timeout_s)"
        elif self.state == "working" and still_s > limits.stall_s:
            why = f"stood still for {still_s:.0f} s with rows in its engine (engine.stall_s)"
        else:
            return None
        self._moved_at = time.monotonic()
        return why
