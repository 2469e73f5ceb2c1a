"""Which rows of a plan have known answers, parts of them for the manifest, and new answers for the cache."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bulkgen.errors import OutputError, SpecError
from bulkgen.known.cache import Answer, AnswerCache
from bulkgen.known.earlier import answers_in, earlier_files
from bulkgen.plan import Plan
from bulkgen.records import CACHE, DONE, ENGINE, REUSE
from bulkgen.results import ANSWER_SCHEMA, CommittedPart, answered, read_part
from bulkgen.rundir import RunDir
from bulkgen.spec import JobSpec

# Rows that are held until they are a part: so many, or bytes.
_PART_BYTES = 64 << 20

Ordinals = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AnsweredRows:
    """Rows that are done with known answers: their ordinals, and the part of them, in PART_SCHEMA."""

    ordinals: Ordinals
    part: pa.Table


class KnownAnswers:
    """What a job may use of other runs: earlier outputs first, since reading them waits for nobody, then the cache.

    Nothing depends on it but time: what cannot be read is told to the user, and the rows go to the engine.
    """

    def __init__(self, spec: JobSpec, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._say = say

    def __bool__(self) -> bool:
        return bool(self._spec.cache.path or self._spec.reuse)

    def has_cache(self) -> bool:
        """Whether the job's cache is there, and not only to be made."""
        with contextlib.suppress(OSError):
            return self._spec.cache_path is not None and self._spec.cache_path.exists()
        return False

    def check(self) -> None:
        """Raise SpecError where what the job calls its cache is something else, or is to lie in the output's place."""
        path, output = self._spec.cache_path, self._spec.output_path
        if path is None:
            return
        if {output, RunDir.of_output(output).path} & {path, *path.parents}:
            raise SpecError(f"{self._spec.source}: cache.path: {path} is a place of the output; choose another one")
        if self.has_cache():
            with contextlib.suppress(OutputError), closing(self._cache(path)):
                pass

    def answer(
        self, plan: Plan, but: Ordinals, settings_key: str, check_stop: Callable[[], None]
    ) -> Iterator[AnsweredRows]:
        """The pending rows of a plan that have a known answer, in parts of a good size.

        The answers to the rows of `but` are not wanted: neither they nor rows with their requests are among them.
        """
        rows = _Pending(plan, but)
        part = _Part(plan, settings_key, self._spec.output.commit_rows)
        for answer_from, answers in self._found(rows):
            check_stop()
            yield from part.add(rows, rows.take(answers["request_key"]), answers, answer_from)
        yield from part.rest()

    def _found(self, rows: "_Pending") -> Iterator[tuple[str, pa.Table]]:
        """Answers to some of the rows; now and then none, so that a search without success can be stopped."""
        for path in self._spec.reuse_paths if rows.left else ():
            for answers in self._reused(path, rows):
                yield REUSE, answers
        cache = self._spec.cache_path
        if cache is not None and rows.left and self.has_cache():
            for answers in self._cached(cache, rows):
                yield CACHE, answers

    def _reused(self, path: Path, rows: "_Pending") -> Iterator[pa.Table]:
        try:
            files = earlier_files(path)
        except OutputError as e:
            self._say(f"reuse: {e}")
            return
        if not files:
            self._say(f"reuse: {path}: no output there, so nothing of it is reused")
        for file in files:
            try:
                answers = answers_in(file, self._spec.output.column, rows.keys)
                if answers is None:
                    self._say(f"reuse: {file}: its rows have no request keys as bulkgen writes them; it is not reused")
                else:
                    yield from answers
            except OutputError as e:
                self._say(f"reuse: {e}; the rows in it that were not read are generated")

    def _cached(self, path: Path, rows: "_Pending") -> Iterator[pa.Table]:
        try:
            with closing(self._cache(path)) as cache:
                for found in cache.find(rows.keys_left()):
                    yield _as_table(found)
        except (OutputError, SpecError) as e:  # the latter where it became another's since `check`
            self._say(f"{e}; what is not found in it is generated")

    def remember(self, parts: Sequence[CommittedPart], check_stop: Callable[[], None]) -> bool:
        """Put what was generated, and what was reused, of these parts into the job's cache. Returns whether it worked.

        The parts are oldest first, so that of two answers to a request the last one stays.
        """
        path = self._spec.cache_path
        if path is None:
            return False
        try:
            with closing(self._cache(path)) as cache:
                cache.put(_answers_of(parts, check_stop))
        except (OutputError, SpecError) as e:
            self._say(f"{e}; the results are safe, but later runs may have to compute them again")
            return False
        return True

    def _cache(self, path: Path) -> AnswerCache:
        return AnswerCache(path, self._spec.cache.max_bytes, self._spec.output.private)


class _Pending:
    """The rows to do that have a request key, by that key."""

    def __init__(self, plan: Plan, but: Ordinals) -> None:
        ordinals, shards, keys = plan.pending_requests()
        order = np.argsort(keys, kind="stable")
        # With them all rows that ask the same: rows with one request are done together, or one follows nobody.
        order = order[~np.isin(keys[order], keys[np.isin(ordinals, but)])]
        self.ordinals, self.shards, self.keys = ordinals[order], shards[order], keys[order]
        self._open = np.ones(len(order), bool)

    @property
    def left(self) -> bool:
        """Whether any of them has no answer yet."""
        return bool(self._open.any())

    def keys_left(self) -> Iterator[bytes]:
        """The keys of those that have no answer yet, each once."""
        keys = np.unique(self.keys[self._open])
        return (bytes(key).ljust(keys.itemsize, b"\0") for key in keys)

    def take(self, found: pa.ChunkedArray) -> tuple[Ordinals, Ordinals]:
        """Places of the rows with these keys that had no answer so far, and which of the keys is each one's."""
        keys, number = np.unique(np.array(found.to_pylist(), self.keys.dtype), return_index=True)
        first, end = np.searchsorted(self.keys, keys, "left"), np.searchsorted(self.keys, keys, "right")
        counts = end - first
        places = np.arange(counts.sum()) + np.repeat(first - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
        which = np.repeat(number, counts)
        open_ = self._open[places]
        self._open[places] = False
        return places[open_], which[open_]


class _Part:
    """Gathers rows to parts."""

    def __init__(self, plan: Plan, settings_key: str, most_rows: int) -> None:
        self._plan = plan
        self._settings_key = settings_key
        self._most_rows = most_rows
        self._ordinals: list[Ordinals] = []
        self._tables: list[pa.Table] = []

    def add(
        self, rows: _Pending, taken: tuple[Ordinals, Ordinals], answers: pa.Table, answer_from: str
    ) -> Iterator[AnsweredRows]:
        """Take rows in, at some places, and which of the answers is each one's."""
        places, which = taken
        for begin in range(0, len(places), self._most_rows):
            some = places[begin : begin + self._most_rows]
            own = answers.take(pa.array(which[begin : begin + self._most_rows]))
            keys = self._plan.keys_of(rows.ordinals[some])
            self._ordinals.append(rows.ordinals[some])
            self._tables.append(answered(own, keys, rows.shards[some], answer_from, self._settings_key))
            held = sum(map(len, self._ordinals)), sum(table.nbytes for table in self._tables)
            if held[0] >= self._most_rows or held[1] >= _PART_BYTES:
                yield from self.rest()

    def rest(self) -> Iterator[AnsweredRows]:
        """What is left."""
        if self._tables:
            yield AnsweredRows(np.concatenate(self._ordinals), pa.concat_tables(self._tables))
        self._ordinals, self._tables = [], []


def _answers_of(parts: Sequence[CommittedPart], check_stop: Callable[[], None]) -> Iterator[tuple[bytes, Answer]]:
    for part in parts:
        for batch in read_part(part.path):
            check_stop()
            rows = pa.table(batch).select(["status", "answer_from", *ANSWER_SCHEMA.names]).to_pylist()
            for row in rows:
                status, answer_from, key = row.pop("status"), row.pop("answer_from"), row.pop("request_key")
                if status == DONE and answer_from in (ENGINE, REUSE) and key is not None:
                    yield key, row


def _as_table(found: dict[bytes, Answer]) -> pa.Table:
    rows: list[dict[str, Any]] = [{**answer, "request_key": key} for key, answer in found.items()]
    return pa.Table.from_pylist(rows, schema=ANSWER_SCHEMA)
