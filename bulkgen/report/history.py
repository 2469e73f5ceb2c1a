"""The manifest's records sorted by start, and what follows from them alone. Opens no part file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bulkgen.report.model import Restart

Record = Mapping[str, Any]
COUNTERS = ("prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "steps", "step_s", "held_s")


@dataclass(frozen=True, slots=True)
class Start:
    """All records of one start."""

    number: int
    began: Record
    plans: list[Record] = field(default_factory=list)
    planned: list[Record] = field(default_factory=list)
    ready: list[Record] = field(default_factory=list)
    parts: list[Record] = field(default_factory=list)
    restarts: list[Record] = field(default_factory=list)
    closed: list[Record] = field(default_factory=list)
    merged: list[Record] = field(default_factory=list)
    ends: list[Record] = field(default_factory=list)

    @property
    def start_s(self) -> float:
        """Engine start until the first replica was ready; later incarnations' lie inside generate_s."""
        return min((r["start_s"] for r in self.ready if r["incarnation"] == 0), default=self._late_start_s)

    @property
    def _late_start_s(self) -> float:
        # No replica's first engine came up: generation waited for the first that did, as far as known.
        return float(min((r["start_s"] for r in self.ready), default=0.0))

    @property
    def last_completed_at(self) -> float | None:
        """When the last committed row was finished."""
        return max((p["last_completed_at"] for p in self.parts if p["last_completed_at"] is not None), default=None)

    @property
    def generate_s(self) -> float:
        """First request offered to last committed completion."""
        first = min((p["first_offered_at"] for p in self.parts if p["first_offered_at"] is not None), default=None)
        last = self.last_completed_at
        return 0.0 if first is None or last is None else max(0.0, last - first)

    def sum(self, kind: str, name: str) -> float:
        """One field, added up over the start's records of one kind."""
        return sum(record[name] or 0 for record in getattr(self, kind))

    def outcome(self, *, alive: bool) -> str:
        """How it ended. One that recorded no end is running if its process lives, else it was killed."""
        return str(self.ends[-1]["outcome"]) if self.ends else "running" if alive else "killed"

    def restart_list(self) -> tuple[Restart, ...]:
        """Its restarts, oldest first."""
        return tuple(
            Restart(
                start=self.number,
                replica=r["replica"],
                incarnation=r["incarnation"],
                time=r["time"],
                reason=str(r["reason"]),
            )
            for r in self.restarts
        )

    def engine_counters(self, last_seen: Mapping[tuple[int, int, int], Mapping[str, float]]) -> dict[str, float]:
        """What its engines counted, all together.

        An engine that was closed told its counters. One that was killed did at least what its last sample
        says, and at least what is committed of it.
        """
        closed = {(c["replica"], c["incarnation"]): c["counters"] for c in self.closed}
        engines = {(r["replica"], r["incarnation"]) for r in [*self.ready, *self.parts, *self.closed]}
        engines |= {(replica, incarnation) for start, replica, incarnation in last_seen if start == self.number}
        sums: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        for engine in engines:
            told = closed.get(engine) or self._at_least(engine, last_seen.get((self.number, *engine), {}))
            for name in COUNTERS:
                sums[name] += told.get(name) or 0
        return sums

    def _at_least(self, engine: tuple[int, int], seen: Mapping[str, float]) -> dict[str, float]:
        parts = [p for p in self.parts if (p["replica"], p["incarnation"]) == engine]
        return {name: max(seen.get(name, 0), sum(p.get(name) or 0 for p in parts)) for name in COUNTERS}


def sum_of(records: Sequence[Record], name: str) -> int:
    """One count, added up over records."""
    return sum(int(record[name]) for record in records)


@dataclass(frozen=True, slots=True)
class Plan:
    """The current plan: what the input is now, as far as the manifest tells.

    `before` are the parts that were committed before it was made; they hold `already_done` of its rows, and
    `stale_rows` that it no longer has. `after` are the parts made from it.
    """

    rows: int
    refused: int
    already_done: int
    pending: int
    before: list[Record]
    after: list[Record]

    @property
    def stale_rows(self) -> int:
        """Committed rows that are not in it; exact: a key is committed once, and looked up in each plan."""
        return max(0, sum_of(self.before, "rows") - self.already_done)

    @property
    def committed(self) -> int:
        """Its rows that are committed."""
        return self.already_done + sum_of(self.after, "rows")

    @property
    def left(self) -> int:
        """Its rows that are still to do."""
        return max(0, self.pending - sum_of(self.after, "rows"))


@dataclass(frozen=True, slots=True)
class History:
    """A manifest, sorted. `plan` is None when no start came as far as a plan."""

    starts: tuple[Start, ...]
    plan: Plan | None


_KINDS = {
    "plan": "plans",
    "planned": "planned",
    "ready": "ready",
    "part": "parts",
    "restart": "restarts",
    "closed": "closed",
    "merged": "merged",
    "end": "ends",
}


def sort_records(records: Sequence[Record]) -> History:
    """Sort a manifest's records. Kinds that a report has no use for are passed over."""
    starts: dict[int, Start] = {}
    before: list[Record] = []
    after: list[Record] = []
    plan: Record | None = None
    for record in records:
        kind = record["record"]
        if kind == "start":
            starts[record["start"]] = Start(record["start"], record)
        elif kind in _KINDS:
            getattr(starts[record["start"]], _KINDS[kind]).append(record)
        if kind == "plan":
            plan, before, after = record, [*before, *after], []
        elif kind == "part":
            after.append(record)
    current = plan and Plan(plan["rows"], plan["refused"], plan["already_done"], plan["pending"], before, after)
    return History(tuple(starts.values()), current or None)
