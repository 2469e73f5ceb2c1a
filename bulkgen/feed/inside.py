"""The rows that an engine holds, as far as one can know from outside: which run, and how many tokens each has.

vLLM tells how many sequences wait, not which. First come, first served, and who is preempted goes to the front: so
those waiting are the last ones offered (`Scheduler.schedule`, `_preempt_request` in `vllm/v1/core/sched/scheduler.py`),
but for requests whose structured output is still being compiled, which others pass.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bulkgen.feed.expected_output import Floats, Kinds


@dataclass(slots=True, eq=False)
class InsideRow:
    """A row in the engine. `own_tokens`: of its prompt, without whole blocks that it shares with others.

    `tokens` of its answer were there at `since`, a step; nothing comes to them while it waits. It can hold at most
    `most_blocks`.
    """

    index: int
    own_tokens: int
    max_tokens: int
    kind: int
    sequences: int
    slot: int
    most_blocks: int = 0
    tokens: float = 0.0
    since: float = 0.0
    running: bool = False
    inside: bool = True
    group: int = -1


@dataclass(frozen=True, slots=True)
class InsideTable:
    """All rows in the engine, in no order. `so_far`: tokens of each answer."""

    own_tokens: Floats
    max_tokens: Floats
    kind: Kinds
    sequences: Floats
    so_far: Floats
    running: npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Group:
    rows: int
    blocks: int


_COLUMNS = np.dtype(
    [
        ("own_tokens", np.float64),
        ("max_tokens", np.float64),
        ("kind", np.int64),
        ("sequences", np.float64),
        ("tokens", np.float64),
        ("since", np.float64),
        ("running", np.bool_),
    ]
)


@dataclass(slots=True)
class Inside:
    """Rows in the order in which they were offered; the first ones run, the others wait."""

    block_size: int
    sequences: int = 0
    shared_blocks: int = 0
    waiting_tokens: int = 0
    running_rows: int = 0
    _running_tokens: float = 0.0  # as if all had been running at step 0
    _waiting_sequences: int = 0
    _rows: dict[int, InsideRow] = field(default_factory=dict)
    _by_slot: list[InsideRow] = field(default_factory=list)
    # Rows that have ended stay in these two until they are met.
    _running: list[InsideRow] = field(default_factory=list)
    _waiting: deque[InsideRow] = field(default_factory=deque)
    _groups: dict[int, _Group] = field(default_factory=dict)
    _table: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(64, _COLUMNS))
    # Columns of it.
    _tokens: Floats = field(init=False)
    _since: Floats = field(init=False)
    _runs: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self._point_at_columns()

    def _point_at_columns(self) -> None:
        self._tokens, self._since, self._runs = (self._table[name] for name in ("tokens", "since", "running"))

    def add(
        self, index: int, own_tokens: int, max_tokens: int, kind: int, sequences: int, most_blocks: int = 0
    ) -> None:
        """A row was offered."""
        row = InsideRow(index, own_tokens, max_tokens, kind, sequences, len(self._by_slot), most_blocks)
        self._rows[index] = row
        self._by_slot.append(row)
        if row.slot == len(self._table):
            self._table = np.concatenate((self._table, np.zeros_like(self._table)))
            self._point_at_columns()
        self._table[row.slot] = (own_tokens, max_tokens, kind, sequences, 0.0, 0.0, False)
        self._wait(row, 1)
        self._waiting.append(row)
        self.sequences += sequences

    def _wait(self, row: InsideRow, sign: int) -> None:
        self._waiting_sequences += sign * row.sequences
        self.waiting_tokens += sign * row.sequences * (row.own_tokens + int(row.tokens))

    def _run(self, row: InsideRow, sign: int) -> None:
        self.running_rows += sign
        self._running_tokens += sign * (row.own_tokens + row.tokens - row.since)

    def share(self, index: int, group: int, blocks: int) -> None:
        """The row has so many whole blocks in common with its group: they are held once."""
        self._rows[index].group = group
        held = self._groups.setdefault(group, _Group(0, 0))
        held.rows += 1
        self.shared_blocks += max(0, blocks - held.blocks)
        held.blocks = max(held.blocks, blocks)

    def has_group(self, group: int) -> bool:
        """Whether a row of the group is in the engine."""
        return group in self._groups

    def remove(self, index: int) -> InsideRow:
        """A row has left the engine. Raises KeyError for one that is not in it."""
        row = self._rows.pop(index)
        row.inside = False
        self.sequences -= row.sequences
        if row.running:
            self._run(row, -1)
        else:
            self._wait(row, -1)
            while self._waiting and not self._waiting[0].inside:
                self._waiting.popleft()
        last = self._by_slot.pop()
        if last is not row:
            self._table[row.slot] = self._table[last.slot]
            self._by_slot[row.slot] = last
            last.slot = row.slot
        if row.group >= 0:
            held = self._groups[row.group]
            held.rows -= 1
            if not held.rows:
                self.shared_blocks -= held.blocks
                del self._groups[row.group]
        return row

    def follow(self, waiting: int, clock: float, preempted: int) -> Floats:
        """The engine says that so many sequences wait, and that it has thrown out so many since it was last asked.

        Returns the tokens of each row that went back to waiting: none but for that reason. A count may be late where
        rows were taken out, and a row whose sequences wait in part counts as running.
        """
        while self._waiting and self._waiting_sequences > waiting:
            row = self._waiting.popleft()
            if row.inside:
                self._wait(row, -1)
                row.since, row.running = clock, True
                self._run(row, 1)
                self._running.append(row)
                self._since[row.slot], self._runs[row.slot] = clock, True
        lost: list[float] = []
        while self._running and self._waiting_sequences < waiting and len(lost) < preempted:
            row = self._running.pop()
            if row.inside:
                self._run(row, -1)
                row.tokens += clock - row.since
                row.running = False
                self._waiting.appendleft(row)
                self._wait(row, 1)
                self._tokens[row.slot], self._runs[row.slot] = row.tokens, False
                lost.append((row.own_tokens + row.tokens) * row.sequences)
        if len(self._running) > 64 + 2 * len(self._rows):
            self._running = [row for row in self._running if row.inside]
        return np.array(lost, np.float64)

    def mean_tokens(self, clock: float) -> float:
        """Tokens that a row which runs has on average, but for whole blocks that it shares; 0 if there are none."""
        if not self.running_rows:
            return 0.0
        return max(1.0, (self._running_tokens + self.running_rows * clock) / self.running_rows)

    def table(self, clock: float) -> InsideTable:
        """All rows as of a step."""
        rows = self._table[: len(self._by_slot)]
        running = rows["running"]
        so_far = rows["tokens"] + np.where(running, clock - rows["since"], 0.0)
        # Some steps made no token of a row: it cannot be past its end.
        so_far = np.minimum(so_far, rows["max_tokens"] - 1.0)
        return InsideTable(rows["own_tokens"], rows["max_tokens"], rows["kind"], rows["sequences"], so_far, running)
