"""Reading a plan: its shards, the rows of one shard, and which rows are still to do."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bulkgen.plan.keys import KEY_TYPE, Keys, Ordinals, find, whole
from bulkgen.records import Shard

PENDING, REFUSED, COMMITTED = 0, 1, 2

ROW_TYPE = np.dtype([("ordinal", "<i8"), ("prompt_tokens", "<i4"), ("max_tokens", "<i4")])

PLAN_SCHEMA = pa.schema(
    [
        ("ordinal", pa.int64()),
        ("tokens", pa.list_(pa.int32())),
        ("max_tokens", pa.int32()),
        ("overrides", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A pending row of a shard: what a request is made of."""

    ordinal: int
    key: bytes
    tokens: npt.NDArray[np.int32]
    max_tokens: int
    overrides: str


class Plan:
    """A plan on disk. `state` is shared by all processes of a run: the driver writes it, the others read it."""

    def __init__(self, folder: Path, facts: dict[str, Any], writable: bool) -> None:
        self.folder = folder
        self.facts = facts
        self.rows: int = facts["rows"]
        self.refused: int = facts["refused"]
        self.shards = tuple(Shard(**s) for s in facts["shards"])
        self._keys: Keys = _mapped(folder / "keys.bin", KEY_TYPE, self.rows)
        self._order: Ordinals = _mapped(folder / "sorted.bin", np.dtype(np.int64), self.rows)
        self.state: npt.NDArray[np.uint8] = _mapped(
            folder / "state.bin", np.dtype(np.uint8), self.rows, "r+" if writable else "r"
        )

    def lookup(self, keys: Keys) -> Ordinals:
        """Ordinals of row keys, -1 for a key that is not in this plan. `keys`: fixed-width byte strings."""
        return find(self._keys, self._order, keys)

    def keys_of(self, ordinals: Ordinals) -> list[bytes]:
        """The keys of rows."""
        return [whole(key) for key in self._keys[ordinals].tolist()]

    def forget_commits(self) -> None:
        """Everything that is not refused is pending again; the manifest says what is committed."""
        self.state[self.state == COMMITTED] = PENDING

    def commit(self, ordinals: Ordinals) -> bool:
        """Mark rows as committed. False, and nothing marked, if one of them was already, or stands twice in it."""
        if len(np.unique(ordinals)) != len(ordinals) or np.any(self.state[ordinals] != PENDING):
            return False
        self.state[ordinals] = COMMITTED
        return True

    def pending(self, shard: Shard) -> tuple[int, int, int]:
        """Rows, prompt tokens and output budget of a shard that are still to do."""
        rows = _mapped(self.folder / f"bucket-{shard.bucket:02d}.rows", ROW_TYPE)
        rows = rows[shard.first : shard.first + shard.rows]
        todo = rows[self.state[rows["ordinal"]] == PENDING]
        return len(todo), int(todo["prompt_tokens"].sum()), int(todo["max_tokens"].sum())

    def read(self, shard: Shard) -> Iterator[PlannedRow]:
        """The pending rows of a shard, in input order; one batch of the bucket in memory at a time."""
        sizes = self.facts["batch_rows"][str(shard.bucket)]
        ends = np.cumsum(sizes)
        end = shard.first + shard.rows
        with pa.memory_map(str(self.folder / f"bucket-{shard.bucket:02d}.arrow")) as source:
            file = pa.ipc.open_file(source)
            for number in range(int(np.searchsorted(ends, shard.first, side="right")), len(sizes)):
                start = int(ends[number]) - sizes[number]
                if start >= end:
                    return
                a = max(shard.first - start, 0)
                batch = file.get_batch(number).slice(a, min(end - start, sizes[number]) - a)
                yield from self._pending_rows(batch)

    def _pending_rows(self, batch: pa.RecordBatch) -> Iterator[PlannedRow]:
        tokens = batch.column(1)
        values = tokens.values.to_numpy()
        offsets = tokens.offsets.to_numpy()
        ordinals = batch.column(0).to_numpy()
        keys = self._keys[ordinals].tolist()
        pending = (self.state[ordinals] == PENDING).tolist()
        for i, (ordinal, max_tokens, overrides) in enumerate(
            zip(ordinals.tolist(), batch.column(2).to_pylist(), batch.column(3).to_pylist(), strict=True)
        ):
            if pending[i]:
                yield PlannedRow(ordinal, whole(keys[i]), values[offsets[i] : offsets[i + 1]], max_tokens, overrides)


def load_plan(folder: Path, writable: bool = False) -> Plan:
    """Open a plan; only who commits needs it writable. Raises FileNotFoundError or ValueError if it is not whole."""
    facts = json.loads((folder / "plan.json").read_text())
    for name, size in facts["files"].items():
        if (folder / name).stat().st_size != size:
            raise ValueError(f"{folder / name}: has not the size that it was written with")
    return Plan(folder, facts, writable)


def _mapped(path: Path, dtype: np.dtype[Any], rows: int | None = None, mode: Any = "r") -> npt.NDArray[Any]:
    """A file of fixed-size records as an array, without reading it. An empty file cannot be mapped."""
    if rows is None:
        rows = path.stat().st_size // dtype.itemsize
    if rows == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode, shape=(rows,))
