"""Writing a plan, one pass, bounded memory: some tens of bytes a row, and one unwritten batch a bucket."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bulkgen.errors import OutputError
from bulkgen.plan.buckets import cut_shards, shard_rows
from bulkgen.plan.grouping import Grouping, prefix_hashes, prefix_lengths
from bulkgen.plan.hashing import PromptHashes
from bulkgen.plan.keys import KEY_TYPE, make_unique
from bulkgen.plan.planned import (
    LAYOUT,
    OFFER_TYPE,
    PENDING,
    PLAN_SCHEMA,
    REFUSED,
    ROW_TYPE,
    Plan,
    facts_text,
    file_facts,
    load_plan,
)
from bulkgen.plan.regroup import reordered
from bulkgen.plan.requests import REQUEST_TYPE, Groups, RequestHasher, Requests, find_groups
from bulkgen.records import Prompt, RefusedRow, Shard
from bulkgen.rundir import sync

Tokens = npt.NDArray[np.int64]
ShardOrder = Callable[[Tokens, Tokens, Tokens], npt.NDArray[np.int64]]

# A batch is the least that a shard can read; shards begin and end inside of batches.
_BATCH_ROWS = 1024
_BATCH_TOKENS = 1 << 18
# A bucket's rows change their order if that saves such a share of its prompt tokens.
_WORTH = 0.01


_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


class _Bucket:
    """The rows of one length range on their way to disk."""

    def __init__(self, stem: Path, longest: int, hasher: RequestHasher | None) -> None:
        self.longest = longest
        self.requests: list[Requests] = []
        self._hasher = hasher
        self.batch_rows: list[int] = []
        self._pending: list[Prompt] = []
        self._tokens = 0
        self.prefix_lengths = prefix_lengths(longest)
        self._prefixes = stem.with_suffix(".prefixes").open("wb")
        self._rows = stem.with_suffix(".rows").open("wb")
        self._sink = pa.OSFile(str(stem.with_suffix(".arrow")), "wb")
        self._writer = pa.ipc.new_file(self._sink, PLAN_SCHEMA, options=_OPTIONS)

    def add(self, prompt: Prompt) -> None:
        self._pending.append(prompt)
        self._tokens += len(prompt.tokens)
        if len(self._pending) >= _BATCH_ROWS or self._tokens >= _BATCH_TOKENS:
            self.flush()

    def flush(self) -> None:
        rows = self._pending
        if not rows:
            return
        index = np.zeros(len(rows), ROW_TYPE)
        index["group"] = -1
        index["ordinal"] = [p.ordinal for p in rows]
        index["prompt_tokens"] = lengths = [len(p.tokens) for p in rows]
        index["max_tokens"] = [p.max_tokens for p in rows]
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        tokens = _flat(rows, self._tokens)
        batch = pa.record_batch(
            [
                pa.array(index["ordinal"]),
                pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens)),
                pa.array(index["max_tokens"]),
                pa.array([p.overrides for p in rows], pa.string()),
                pa.array([" ".join(p.warnings) for p in rows], pa.string()),
            ],
            schema=PLAN_SCHEMA,
        )
        self._writer.write_batch(batch)
        if self._hasher is not None:
            self.requests.append(self._hasher.of(batch, index["max_tokens"]))
        self._prefixes.write(prefix_hashes(PromptHashes.of(tokens, offsets), self.prefix_lengths).tobytes())
        self._rows.write(index.tobytes())
        self.batch_rows.append(len(rows))
        self._pending, self._tokens = [], 0

    def close(self) -> None:
        self.flush()
        self._writer.close()
        self._sink.close()
        self._prefixes.close()
        self._rows.close()


def _batches(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Rows in batches of the usual size."""
    ends = np.cumsum(np.diff(rows.column("tokens").offsets.to_numpy()), dtype=np.int64)
    first = 0
    while first < len(rows):
        before = int(ends[first - 1]) if first else 0
        full = int(np.searchsorted(ends, before + _BATCH_TOKENS)) + 1
        count = min(_BATCH_ROWS, full - first, len(rows) - first)
        yield rows.slice(first, count)
        first += count


def _flat(rows: Sequence[Prompt], total: int) -> npt.NDArray[np.int32]:
    if isinstance(rows[0].tokens, list):
        return np.fromiter(chain.from_iterable(p.tokens for p in rows), np.int32, total)
    return np.concatenate([np.asarray(p.tokens, np.int32) for p in rows])


class PlanWriter:
    """Takes rendered rows in input order; `finish` cuts the shards and puts the plan in its place."""

    def __init__(
        self, folder: Path, edges: Sequence[int], hasher: RequestHasher | None = None, *, once: bool = True
    ) -> None:
        """`hasher` makes the request keys; None: no row has one. `once`: of rows with the same one just one is sent."""
        self._final = folder
        self._hasher = hasher
        self._once = once
        self.folder = folder.with_name(f".tmp-{folder.name}")
        self._edges = np.asarray(edges)
        self._buckets: dict[int, _Bucket] = {}
        self._rows = 0
        self._refused: list[int] = []
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            self._keys = (self.folder / "keys.bin").open("wb")
            self._contents = (self.folder / "contents.bin").open("wb")
        except OSError as e:
            raise OutputError(f"{folder}: cannot write the plan ({e.strerror or e})") from e

    def add(self, rows: Sequence[Prompt | RefusedRow], contents: Sequence[tuple[int, int]]) -> None:
        """Add consecutive rows of the input, with the hashes of their contents as in CONTENT_TYPE.

        Raises OutputError when the disk does not take them.
        """
        try:
            self._keys.write(b"".join(row.key for row in rows))
            # As a table of numbers, which CONTENT_TYPE is too: records are slow to make one by one.
            self._contents.write(np.array(contents, np.uint64).tobytes())
            prompts = [row for row in rows if isinstance(row, Prompt)]
            buckets = np.searchsorted(self._edges, [len(prompt.tokens) for prompt in prompts])
            for number, prompt in zip(buckets.tolist(), prompts, strict=True):
                self._bucket(number).add(prompt)
            self._refused += [row.ordinal for row in rows if isinstance(row, RefusedRow)]
        except OSError as e:
            raise OutputError(f"{self._final}: cannot write the plan ({e.strerror or e})") from e
        self._rows += len(rows)

    def _bucket(self, number: int) -> _Bucket:
        bucket = self._buckets.get(number)
        if bucket is None:
            stem = self.folder / _stem(number)
            bucket = self._buckets[number] = _Bucket(stem, int(self._edges[number]), self._hasher)
        return bucket

    def finish(
        self, facts: dict[str, Any], target_rows: int | None, replicas: int, in_order: ShardOrder | None = None
    ) -> Plan:
        """Cut shards, put them in order, write the index, and rename the plan into place.

        `facts` is stored as it is: what the plan was made from. `in_order` tells the order in which shards go, from
        their prompt tokens, output budgets and the largest budget of a row in each; without it, longest prompts first.
        """
        try:
            self._keys.close()
            self._contents.close()
            for bucket in self._buckets.values():
                bucket.close()
            keys = np.fromfile(self.folder / "keys.bin", KEY_TYPE)
            order = make_unique(keys)
            keys.tofile(self.folder / "keys.bin")
            order.tofile(self.folder / "sorted.bin")
            state = np.full(self._rows, PENDING, np.uint8)
            state[self._refused] = REFUSED
            state.tofile(self.folder / "state.bin")
            np.zeros(self._rows, OFFER_TYPE).tofile(self.folder / "offers.bin")
            requests = self._requests()
            requests.tofile(self.folder / "requests.bin")
            repeats = find_groups(requests if self._once else requests[:0])
            self._group(repeats)
            shards = self._cut(shard_rows(target_rows, self._rows - len(self._refused), replicas), in_order)
            self._name_shards(repeats, shards)
            repeats.tofile(self.folder / "repeats.bin")
            facts = facts | {
                "layout": LAYOUT,
                "rows": self._rows,
                "refused": len(self._refused),
                "batch_rows": {number: bucket.batch_rows for number, bucket in self._buckets.items()},
                "shards": [asdict(s) for s in shards],
            }
            facts["files"] = {file.name: file_facts(file) for file in self.folder.iterdir()}
            (self.folder / "plan.json").write_text(facts_text(facts))
            for file in self.folder.iterdir():
                sync(file)
            shutil.rmtree(self._final, ignore_errors=True)
            self.folder.rename(self._final)
            sync(self._final.parent)
        except OSError as e:
            raise OutputError(f"{self._final}: cannot write the plan ({e.strerror or e})") from e
        return load_plan(self._final, "driver")

    def _requests(self) -> Requests:
        """The request keys of all rows by ordinal."""
        requests = np.zeros(self._rows, REQUEST_TYPE)
        for number, bucket in self._buckets.items():
            if bucket.requests:
                requests[self._index(number)["ordinal"]] = np.concatenate(bucket.requests)
                bucket.requests.clear()
        return requests

    def _group(self, repeats: npt.NDArray[np.void]) -> None:
        """Find rows that begin alike, and put them together in their files where a prefix cache would lose much."""
        sent = np.ones(self._rows, bool)
        sent[Groups(repeats).followers(sent)] = False
        groups = 0
        for number, bucket in self._buckets.items():
            stem, index = self.folder / _stem(number), self._index(number)
            prefixes, lengths = stem.with_suffix(".prefixes"), bucket.prefix_lengths
            if lengths:
                hashes = np.memmap(prefixes, np.uint64, "r", shape=(len(index), len(lengths)))
                grouping = Grouping.of(hashes, lengths, index["prompt_tokens"], sent[index["ordinal"]])
                index["group"] = np.where(grouping.group >= 0, grouping.group + groups, -1)
                index["shared_tokens"] = grouping.shared_tokens
                groups += int(grouping.group.max()) + 1
                if grouping.saved_tokens >= _WORTH * index["prompt_tokens"].sum(dtype=np.int64):
                    bucket.batch_rows = self._reorder(stem.with_suffix(".arrow"), index, grouping.order)
                    index = index[grouping.order]
                index.tofile(stem.with_suffix(".rows"))
            prefixes.unlink()

    def _reorder(self, path: Path, index: npt.NDArray[np.void], order: npt.NDArray[np.int64]) -> list[int]:
        """Put the rows of a bucket in another order. Returns how many rows each batch has then."""
        batch_rows = []
        new = path.with_suffix(".reordered")
        with pa.OSFile(str(new), "wb") as sink, pa.ipc.new_file(sink, PLAN_SCHEMA, options=_OPTIONS) as writer:
            for rows in reordered(path, order, index["prompt_tokens"], self.folder):
                for batch in _batches(rows):
                    writer.write_batch(batch)
                    batch_rows.append(len(batch))
        new.replace(path)
        return batch_rows

    def _name_shards(self, repeats: npt.NDArray[np.void], shards: Sequence[Shard]) -> None:
        """Note the shard of each row that has the same request as others."""
        if len(repeats):
            shard_of = np.full(self._rows, -1, np.int32)
            for shard in shards:
                ordinals = self._index(shard.bucket)["ordinal"]
                shard_of[ordinals[shard.first : shard.first + shard.rows]] = shard.shard
            repeats["shard"] = shard_of[repeats["ordinal"]]

    def _index(self, number: int) -> npt.NDArray[np.void]:
        """The rows of a bucket, in ROW_TYPE."""
        index: npt.NDArray[np.void] = np.fromfile(self.folder / f"{_stem(number)}.rows", ROW_TYPE)
        return index

    def discard(self) -> None:
        """Remove what was written; nothing of an unfinished plan can be used."""
        for close in (self._keys.close, self._contents.close, *(bucket.close for bucket in self._buckets.values())):
            with suppress(OSError, pa.ArrowException):
                close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _cut(self, target_rows: int, in_order: ShardOrder | None) -> list[Shard]:
        shards: list[Shard] = []
        largest: list[int] = []
        for number in sorted(self._buckets, reverse=True):
            rows = np.fromfile(self.folder / f"{_stem(number)}.rows", ROW_TYPE)
            longest = self._buckets[number].longest
            cut = cut_shards(number, longest, rows["prompt_tokens"], rows["max_tokens"], target_rows, len(shards))
            largest += [int(rows["max_tokens"][s.first : s.first + s.rows].max()) for s in cut]
            shards += cut
        if in_order is None:
            return shards
        sums = np.array([(s.prompt_tokens, s.budget_tokens) for s in shards], np.int64).reshape(-1, 2)
        places = in_order(sums[:, 0], sums[:, 1], np.array(largest, np.int64))
        return [replace(shards[old], shard=new) for new, old in enumerate(places)]


def _stem(bucket: int) -> str:
    return f"bucket-{bucket:02d}"
