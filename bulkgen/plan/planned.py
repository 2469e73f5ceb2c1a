"""Reading a plan: its shards, the rows of one shard, and which rows are still to do."""

import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bulkgen.errors import OutputError
from bulkgen.plan.keys import KEY_TYPE, Keys, Ordinals, find, identities, whole
from bulkgen.plan.requests import REPEAT_TYPE, REQUEST_TYPE, Groups, Requests
from bulkgen.records import IDENTITY_BYTES, MOST_ATTEMPTS, Shard
from bulkgen.rundir import whole_file

# A row that is apart is still to do, but is handed out by itself and no longer with its shard.
# One that follows has the request of a row that is to do, and gets its result.
PENDING, REFUSED, COMMITTED, APART, FOLLOWING = 0, 1, 2, 3, 4

# Rows of the same `group` (-1: of none) begin with the same `shared_tokens`.
ROW_TYPE = np.dtype(
    [
        ("ordinal", "<i8"),
        ("prompt_tokens", "<i4"),
        ("max_tokens", "<i4"),
        ("group", "<i4"),
        ("shared_tokens", "<i4"),
    ]
)
# Of the files of a plan. One that another version of bulkgen made is made anew.
LAYOUT = 2
# Rows of a shard that are put in order together, in prompt tokens: 16 MiB.
_WINDOW_TOKENS = 1 << 22

# Hashes of what a row itself brings to its request: in the columns that the job reads now, and in those that a job read
# whose results are kept.
CONTENT_TYPE = np.dtype([("own", "<u8"), ("kept", "<u8")])

PLAN_SCHEMA = pa.schema(
    [
        ("ordinal", pa.int64()),
        ("tokens", pa.list_(pa.int32())),
        ("max_tokens", pa.int32()),
        ("overrides", pa.string()),
        ("warnings", pa.string()),
    ]
)


@dataclass(slots=True)  # not frozen, as Prompt
class PlannedRow:
    """A pending row of a shard: what a request is made of."""

    ordinal: int
    key: bytes
    tokens: npt.NDArray[np.int32]
    max_tokens: int
    overrides: str
    warnings: tuple[str, ...]
    request_key: bytes | None
    group: int
    shared_tokens: int


# In which order to take some rows, in ROW_TYPE.
RowOrder = Callable[[npt.NDArray[np.void]], npt.NDArray[np.int64]]

OFFER_TYPE = np.dtype("<u2")
# Files that change while a run works. What they hold is made anew from the others at each start, save counts.
_CHANGING = ("state.bin", "offers.bin")


class Offers:
    """How often each row was given to an engine, how often an engine failed it, and whether it is in one now.

    Two bytes a row, in shared memory: written by the replica that holds the row, and by the driver once that replica
    is dead. What was written outlives the process that wrote it, however it died.
    """

    _IN_ENGINE, _DONE = 0x8000, 0x4000
    _ATTEMPTS, _FAILURE, _FAILURES = 0x00FF, 0x0100, MOST_ATTEMPTS << 8
    _COUNTS = _ATTEMPTS | _FAILURES

    def __init__(self, offers: npt.NDArray[np.uint16]) -> None:
        self._offers = offers
        self._one = offers.data  # the same, for single rows: several times as fast as an array

    def begin(self, ordinal: int) -> int:
        """A row goes into an engine. Returns which attempt this is, from 1; stops counting at 255."""
        offer = self._one[ordinal]
        attempt = min(offer & self._ATTEMPTS, self._ATTEMPTS - 1) + 1
        self._one[ordinal] = self._IN_ENGINE | offer & self._FAILURES | attempt
        return attempt

    def end(self, ordinal: int, done: bool) -> None:
        """A row came out of it, or was taken out."""
        self._one[ordinal] = self._one[ordinal] & self._COUNTS | (self._DONE if done else 0)

    def fail(self, ordinal: int) -> int:
        """A row came out of it failed, for a reason that may pass. Returns how often; stops counting at MOST_ATTEMPTS.

        Attempts that something else ended (the death of the engine by another row, a stop) are not among these.
        """
        counts = self._one[ordinal] & self._COUNTS
        counts += self._FAILURE if counts & self._FAILURES != self._FAILURES else 0
        self._one[ordinal] = counts
        return (counts & self._FAILURES) // self._FAILURE

    def forgive(self, ordinals: Ordinals) -> None:
        """What an engine failed before no longer counts against rows: they are to be done once more."""
        self._offers[ordinals] &= ~self._FAILURES & 0xFFFF

    def attempts(self, ordinal: int) -> int:
        """How often a row was given to an engine, under this plan."""
        return self._one[ordinal] & self._ATTEMPTS

    def take_back(self, ordinals: Ordinals) -> tuple[Ordinals, Ordinals]:
        """Of the rows of a dead replica: those that were in its engine, and those that it had done. Forgets both."""
        offers = self._offers[ordinals]
        self._offers[ordinals] = offers & self._COUNTS
        return ordinals[offers & self._IN_ENGINE != 0], ordinals[offers & self._DONE != 0]

    def forget(self) -> None:
        """No row is in an engine, nor has come out of one."""
        self._offers &= self._COUNTS


Access = Literal["read", "replica", "driver"]


class Plan:
    """A plan on disk. `state` and `offers` are shared by all processes of a run: the driver writes `state`."""

    def __init__(self, folder: Path, facts: dict[str, Any], access: Access) -> None:
        self.folder = folder
        self.facts = facts
        self.rows: int = facts["rows"]
        self.refused: int = facts["refused"]
        self.shards = tuple(Shard(**s) for s in facts["shards"])
        self._keys: Keys = _mapped(folder / "keys.bin", KEY_TYPE, self.rows)
        self._order: Ordinals = _mapped(folder / "sorted.bin", np.dtype(np.int64), self.rows)
        self._contents = _mapped(folder / "contents.bin", CONTENT_TYPE, self.rows)
        self.state: npt.NDArray[np.uint8] = _mapped(
            folder / "state.bin", np.dtype(np.uint8), self.rows, "r+" if access == "driver" else "r"
        )
        self.offers = Offers(_mapped(folder / "offers.bin", OFFER_TYPE, self.rows, "r" if access == "read" else "r+"))
        self._requests: Requests = _mapped(folder / "requests.bin", REQUEST_TYPE, self.rows)
        self._repeats = _mapped(folder / "repeats.bin", REPEAT_TYPE)

    @cached_property
    def _groups(self) -> Groups:
        return Groups(np.asarray(self._repeats))

    @cached_property
    def sent(self) -> npt.NDArray[np.bool_]:
        """By ordinal, whether an engine is given the row, at any time; of a group of rows just one is. Refused rows
        count as given.
        """
        sent = np.ones(self.rows, bool)
        sent[self._groups.followers(sent)] = False
        return sent

    def spare(self, ordinals: Ordinals) -> None:
        """These rows have known answers, so that no engine is given them."""
        self.sent[ordinals] = False

    def lead(self) -> None:
        """Of pending rows with the same request the first one leads, and the others follow it."""
        self.state[self._groups.followers(self.state == PENDING)] = FOLLOWING

    def pending_requests(self) -> tuple[Ordinals, npt.NDArray[np.int32], Requests]:
        """Ordinals, shards and request keys of the rows to do that have such a key."""
        found = [(np.empty(0, np.int64), np.empty(0, np.int32))]
        for shard in self.shards:
            ordinals = self.ordinals(shard)
            wanted = ordinals[np.isin(self.state[ordinals], (PENDING, FOLLOWING)) & (self._requests[ordinals] != b"")]
            found.append((wanted, np.full(len(wanted), shard.shard, np.int32)))
        ordinals, shards = map(np.concatenate, zip(*found, strict=True))
        return ordinals, shards, self._requests[ordinals]

    def followers(self, ordinal: int) -> list[tuple[int, int]]:
        """Ordinals and shards of the rows that follow a row and are not committed."""
        if not len(self._repeats):
            return []
        rows = self._groups.of(ordinal)
        left = rows[self.state[rows["ordinal"]] == FOLLOWING]
        return list(zip(left["ordinal"].tolist(), left["shard"].tolist(), strict=True))

    @property
    def following(self) -> int:
        """How many rows follow others and are not committed."""
        return int(np.count_nonzero(self.state == FOLLOWING)) if len(self._repeats) else 0

    def lookup(self, keys: Keys) -> Ordinals:
        """Ordinals of row keys, -1 for a key that is not in this plan. `keys`: fixed-width byte strings."""
        return find(self._keys, self._order, keys)

    def keys_of(self, ordinals: Ordinals) -> list[bytes]:
        """The keys of rows."""
        return [whole(key) for key in self._keys[ordinals].tolist()]

    def forget_commits(self) -> None:
        """Everything that is not refused is pending again; the manifest says what is committed."""
        # Not by what state.bin holds, which has no checksum: refused rows are those in no bucket.
        self.state[:] = REFUSED
        for bucket in self.facts["batch_rows"]:
            self.state[self._index(int(bucket))["ordinal"]] = PENDING
        self.offers.forget()

    def reopen(self, ordinals: Ordinals) -> None:
        """Committed rows are to be done once more, as if for the first time."""
        self.state[ordinals] = PENDING
        self.offers.forgive(ordinals)

    def is_committed(self, ordinal: int) -> bool:
        """Whether a row's result is in the manifest."""
        return bool(self.state[ordinal] == COMMITTED)

    def set_apart(self, ordinals: Ordinals) -> None:
        """Rows are handed out by themselves from now on."""
        self.state[ordinals] = APART

    def commit(self, ordinals: Ordinals) -> bool:
        """Mark rows as committed. False, and nothing marked, if one of them was already, or stands twice in it."""
        states = self.state[ordinals]
        if len(np.unique(ordinals)) != len(ordinals) or not np.isin(states, (PENDING, APART, FOLLOWING)).all():
            return False
        self.state[ordinals] = COMMITTED
        return True

    def contents_of(self, ordinals: Ordinals) -> npt.NDArray[np.uint64]:
        """Hashes of what rows themselves bring to their requests, in the columns that the job reads."""
        return np.array(self._contents["own"][ordinals])

    def adopt(self, keys: Keys, contents: npt.NDArray[np.uint64]) -> int:
        """Pending rows with identity and content of one of `keys` take that key, so that its result is theirs.

        Where several rows have the same of both, each takes another one. Returns how many rows did. The plan on disk
        is replaced; a crash meanwhile leaves none. Raises OutputError.
        """
        unknown = self.lookup(keys) < 0
        keys, contents = keys[unknown], contents[unknown]
        pending = np.flatnonzero(self.state == PENDING)
        own, wanted = _pairs(self._keys[pending], self._contents["kept"][pending]), _pairs(keys, contents)
        by_pair, by_wanted = np.argsort(own, kind="stable"), np.argsort(wanted, kind="stable")
        own, wanted = own[by_pair], wanted[by_wanted]
        count = np.arange(len(wanted)) - np.searchsorted(wanted, wanted, "left")
        place = np.searchsorted(own, wanted, "left") + count
        found = place < np.searchsorted(own, wanted, "right")
        if found.any():
            new = np.array(self._keys)
            new[pending[by_pair[place[found]]]] = keys[by_wanted[found]]
            self._replace_keys(new)
        return int(found.sum())

    def _replace_keys(self, keys: Keys) -> None:
        facts = _read_facts(self.folder)
        # Without it a plan is none, so keys and their order are never of two kinds.
        (self.folder / "plan.json").unlink()
        order = np.argsort(keys, kind="stable")
        for name, array in (("keys.bin", keys), ("sorted.bin", order)):
            with whole_file(self.folder / name) as path:
                array.tofile(path)
            facts["files"][name] = file_facts(self.folder / name)
        with whole_file(self.folder / "plan.json") as path:
            path.write_text(facts_text(facts))
        self._keys = _mapped(self.folder / "keys.bin", KEY_TYPE, self.rows)
        self._order = _mapped(self.folder / "sorted.bin", np.dtype(np.int64), self.rows)

    def _index(self, bucket: int) -> npt.NDArray[np.void]:
        """The rows of a bucket, in ROW_TYPE."""
        index: npt.NDArray[np.void] = _mapped(self.folder / f"bucket-{bucket:02d}.rows", ROW_TYPE)
        return index

    @property
    def pending_rows(self) -> int:
        """How many rows are still to do with their shards."""
        return int(np.count_nonzero(self.state == PENDING))

    def has_pending(self) -> bool:
        """Whether any row is still to do."""
        return bool(np.any((self.state == PENDING) | (self.state == APART)))

    def pending(self, shard: Shard) -> tuple[int, int, int]:
        """Rows, prompt tokens and output budget of a shard that are still to do."""
        rows = self._index(shard.bucket)[shard.first : shard.first + shard.rows]
        todo = rows[self.state[rows["ordinal"]] == PENDING]
        return len(todo), int(todo["prompt_tokens"].sum()), int(todo["max_tokens"].sum())

    def ordinals(self, shard: Shard) -> Ordinals:
        """All rows of a shard, save those that are apart from it."""
        ordinals = self._index(shard.bucket)[shard.first : shard.first + shard.rows]["ordinal"].astype(np.int64)
        together: Ordinals = ordinals[self.state[ordinals] != APART]
        return together

    def read(
        self, shard: Shard, only: Collection[int] | None = None, in_order: RowOrder | None = None
    ) -> Iterator[PlannedRow]:
        """The pending rows of a shard, or those with the ordinals of `only` in it, as they stand or `in_order`.

        So many batches of the bucket as are put in order together are in memory at a time, else one. Raises
        OutputError for a plan that was damaged.
        """
        try:
            yield from self._read(shard, only, in_order)
        except (OSError, pa.ArrowException) as e:
            raise OutputError(f"{self.folder}: cannot be read ({e}); remove that folder and run again") from e

    def lengths(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Prompt tokens and output budgets of all rows that are `sent`, in the order of the shards."""
        rows = self.index()
        rows = rows[self.sent[rows["ordinal"]]]
        return rows["prompt_tokens"].astype(np.int64), rows["max_tokens"].astype(np.int64)

    def index(self) -> npt.NDArray[np.void]:
        """All rows that were not refused, in ROW_TYPE, in the order of the shards."""
        rows = [self._index(shard.bucket)[shard.first : shard.first + shard.rows] for shard in self.shards]
        return np.concatenate(rows) if rows else np.empty(0, ROW_TYPE)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows that were not refused, in PLAN_SCHEMA, one batch of a bucket at a time.

        Raises OutputError for a plan that was damaged.
        """
        try:
            for bucket in self.facts["batch_rows"]:
                with pa.OSFile(str(self.folder / f"bucket-{int(bucket):02d}.arrow")) as source:
                    file = pa.ipc.open_file(source)
                    yield from (file.get_batch(number) for number in range(file.num_record_batches))
        except (OSError, pa.ArrowException) as e:
            raise OutputError(f"{self.folder}: cannot be read ({e}); remove that folder and run again") from e

    def _read(self, shard: Shard, only: Collection[int] | None, in_order: RowOrder | None) -> Iterator[PlannedRow]:
        index = self._index(shard.bucket)
        sizes = self.facts["batch_rows"][str(shard.bucket)]
        ends = np.cumsum(sizes)
        first, end = shard.first, shard.first + shard.rows
        window: list[pa.RecordBatch] = []
        with pa.memory_map(str(self.folder / f"bucket-{shard.bucket:02d}.arrow")) as source:
            file = pa.ipc.open_file(source)
            for number in range(int(np.searchsorted(ends, shard.first, side="right")), len(sizes)):
                start = int(ends[number]) - sizes[number]
                if start >= end:
                    break
                a = max(shard.first - start, 0)
                window.append(file.get_batch(number).slice(a, min(end - start, sizes[number]) - a))
                rows = index[first : start + a + len(window[-1])]
                if in_order is None or rows["prompt_tokens"].sum() >= _WINDOW_TOKENS:
                    yield from self._rows(window, rows, only, in_order)
                    first += len(rows)
                    window.clear()
            if window:
                yield from self._rows(window, index[first:end], only, in_order)

    def _rows(
        self,
        window: Sequence[pa.RecordBatch],
        index: npt.NDArray[np.void],
        only: Collection[int] | None,
        in_order: RowOrder | None,
    ) -> Iterator[PlannedRow]:
        batch = pa.Table.from_batches(window).combine_chunks().to_batches()[0]
        lists = batch.column(1)
        values = lists.values.to_numpy()
        offsets = lists.offsets.to_numpy()
        ordinals = batch.column(0).to_numpy()
        keys, requests = self._keys[ordinals].tolist(), self._requests[ordinals].tolist()
        wanted = (self.state[ordinals] == PENDING) if only is None else np.isin(ordinals, list(only))
        chosen = np.flatnonzero(wanted)
        if in_order is not None:
            chosen = chosen[in_order(index[chosen])]
        overrides, warnings = (batch.column(name).to_pylist() for name in ("overrides", "warnings"))
        rows = index.tolist()
        for i in chosen.tolist():
            ordinal, _, max_tokens, group, shared_tokens = rows[i]
            yield PlannedRow(
                ordinal,
                whole(keys[i]),
                values[offsets[i] : offsets[i + 1]],
                max_tokens,
                overrides[i],
                tuple(warnings[i].split()),
                whole(requests[i]) if requests[i] else None,
                group,
                shared_tokens,
            )


def load_plan(folder: Path, access: Access = "read", *, check: bool = False) -> Plan:
    """Open a plan. Raises FileNotFoundError or ValueError if it is not whole.

    `check` reads all of it, to see whether it still is what was written: at some gigabyte a second.
    """
    facts = _read_facts(folder)
    for name, (size, _) in facts["files"].items():
        if (folder / name).stat().st_size != size:
            raise ValueError(f"{folder / name}: has not the size that it was written with")
    if check and (damaged := [name for name, told in facts["files"].items() if file_facts(folder / name) != told]):
        raise ValueError(f"{folder / damaged[0]}: is not what was written")
    return Plan(folder, facts, access)


def find_plan(folder: Path, access: Access = "read", *, check: bool = False) -> Plan | None:
    """As `load_plan`, for a plan that may be missing or damaged: None then."""
    try:
        return load_plan(folder, access, check=check)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def facts_text(facts: Mapping[str, Any]) -> str:
    """What plan.json holds: a line of JSON, and its checksum."""
    text = json.dumps(facts)
    return f"{text}\n{zlib.crc32(text.encode())}"


def _read_facts(folder: Path) -> dict[str, Any]:
    text, _, checksum = (folder / "plan.json").read_text().partition("\n")
    if str(zlib.crc32(text.encode())) != checksum:
        raise ValueError(f"{folder / 'plan.json'}: is not what was written")
    facts: dict[str, Any] = json.loads(text)
    if facts["layout"] != LAYOUT:
        raise ValueError(f"{folder / 'plan.json'}: is of another version of bulkgen")
    return facts


def file_facts(path: Path) -> list[int | None]:
    """Size and checksum of a file of a plan; no checksum for those that change while a run works."""
    if path.name in _CHANGING:
        return [path.stat().st_size, None]
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            checksum = zlib.crc32(piece, checksum)
    return [path.stat().st_size, checksum]


def _pairs(keys: Keys, contents: npt.NDArray[np.uint64]) -> Keys:
    """Identity and content of rows as one thing to compare: fixed-width byte strings, as keys are."""
    pairs = np.empty(len(keys), [("identity", f"S{IDENTITY_BYTES}"), ("content", "<u8")])
    pairs["identity"], pairs["content"] = identities(keys), contents
    return pairs.view(KEY_TYPE)


def _mapped(path: Path, dtype: np.dtype[Any], rows: int | None = None, mode: Any = "r") -> npt.NDArray[Any]:
    """A file of fixed-size records as an array, without reading it. An empty file cannot be mapped.

    A plain array, as numpy's own kind for this takes several times as long to give a single record.
    """
    if rows is None:
        rows = path.stat().st_size // dtype.itemsize
    if rows == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode, shape=(rows,)))
