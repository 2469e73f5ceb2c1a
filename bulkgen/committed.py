"""What of a run counts: the manifest's parts in their order, less what was retried since, and what is to be retried.

A retry is a record in the manifest and a file of row keys: rows of earlier parts with these keys no longer count, so
that they are generated again; their results stay in the parts, as work that was done.

Where settings changed and what is done is to be kept, a record names a file of the rows that were done: key and hash of
the row's own content. A row of a later plan with the same identity and content takes such a key, and so the result.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bulkgen.errors import BulkgenError
from bulkgen.plan import Plan
from bulkgen.prompt import ContentHash
from bulkgen.results import (
    CommittedPart,
    keys_of_done,
    keys_to_retry,
    load_kept,
    load_keys,
    read_keys,
    write_kept,
    write_keys,
)
from bulkgen.rundir import Manifest, RunDir
from bulkgen.seat import part_of_none

Keys = npt.NDArray[np.bytes_]


def committed_parts(run: RunDir, records: Sequence[Mapping[str, Any]]) -> list[CommittedPart]:
    """The parts in a manifest's records, oldest first, with the keys in each that no longer count.

    Raises OutputError.
    """
    parts: list[CommittedPart] = []
    retired: Keys | None = None
    for record in reversed(records):
        if record["record"] == "retry":
            keys = load_keys(run.parts / record["name"], record["rows"])
            retired = keys if retired is None else np.concatenate([retired, keys])
        elif record["record"] == "part":
            parts.append(CommittedPart(run.parts / record["name"], retired))
    return parts[::-1]


# The records by which a run's results become others.
_TURNS = ("plan", "retry", "changed", "merging", "merged")


def last_merge(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """What is on record about the last merge, if nothing came after it.

    A plan or a merge that has begun and not ended may be of another spec, and have replaced files already.
    """
    turn = next((record for record in reversed(records) if record["record"] in _TURNS), None)
    return turn if turn is not None and turn["record"] == "merged" else None


class Committed:
    """The results of a run that count, by its manifest at the time of each call.

    `reopened`: ordinals of the rows, in the plan that was marked last, whose results the user does not want.
    """

    def __init__(self, run: RunDir, manifest: Manifest) -> None:
        self._run = run
        self._manifest = manifest
        self.reopened: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def parts(self) -> list[CommittedPart]:
        """All parts, oldest first, with the keys in each that no longer count."""
        return committed_parts(self._run, self._manifest.records)

    def mark(self, plan: Plan) -> None:
        """Bring a plan to what the manifest says is committed.

        Of those pending rows whose request is the same, one goes from then on and the others follow it.
        """
        self._replay(plan)
        record = self._kept_record()
        if record is not None:
            kept = load_kept(self._run.parts / record["name"], record["rows"])
            if plan.adopt(kept["key"], kept["content"]):
                self._replay(plan)
        plan.lead()

    @property
    def kept_content(self) -> ContentHash | None:
        """What to hash of the rows of a plan, to find those again whose results are kept; None where none are."""
        record = self._kept_record()
        return None if record is None else ContentHash(record["columns"])

    def _kept_record(self) -> Mapping[str, Any] | None:
        # The last choice counts: one to keep has on record all that was kept before, one to do all again ends that.
        choices = self._manifest.of("changed")
        return choices[-1] if choices and choices[-1]["choice"] == "keep" else None

    def keep(self, plan: Plan) -> dict[str, Any]:
        """Put aside which rows are done, by the plan that they are of. Returns what belongs on record about it.

        What was done before the user last chose to do all rows again is not among them. Raises OutputError.
        """
        self.mark(plan)
        records = self._manifest.records
        anew = [i for i, r in enumerate(records) if r["record"] == "changed" and r["choice"] == "again"]
        parts = committed_parts(self._run, records[max(anew, default=0) :])
        done = np.concatenate([np.empty(0, "S16"), *map(keys_of_done, parts)])
        ordinals = plan.lookup(done)
        done, ordinals = done[ordinals >= 0], ordinals[ordinals >= 0]
        name = f"kept-{len(self._manifest.of('changed')) + 1:04d}.rows"
        write_kept(self._run.parts / name, done, plan.contents_of(ordinals))
        return {"name": name, "rows": len(done), "columns": plan.facts["content_columns"]}

    def _replay(self, plan: Plan) -> None:
        plan.forget_commits()
        reopened = [self.reopened[:0]]
        for entry in self._manifest.records:
            if entry["record"] == "part":
                ordinals = plan.lookup(read_keys(self._run.parts / entry["name"]))
                plan.commit(ordinals[ordinals >= 0])
            elif entry["record"] == "retry":
                ordinals = plan.lookup(load_keys(self._run.parts / entry["name"], entry["rows"]))
                reopened.append(ordinals[ordinals >= 0])
                plan.reopen(reopened[-1])
        self.reopened = np.concatenate(reopened)

    def add(self, plan: Plan, start: int, name: str, ordinals: npt.NDArray[np.int64]) -> None:
        """A part of done rows that no replica wrote, all of the plan and to do, is in the manifest from now on."""
        if not plan.commit(ordinals):
            raise BulkgenError(f"{self._run.parts / name}: holds rows that were committed before; it was not taken")
        where = {"start": start, "replica": -1, "incarnation": -1, "plan": start}
        self._manifest.append({"record": "part", **where, **part_of_none(name, done=len(ordinals))})

    def not_in_cache(self, cache: str) -> list[CommittedPart]:
        """The parts that a cache was not given yet."""
        given = [record["parts"] for record in self._manifest.of("cached") if record["cache"] == cache]
        return self.parts()[max(given, default=0) :]

    def in_cache(self, cache: str, start: int) -> None:
        """A cache was given all parts so far."""
        parts = len(self._manifest.of("part"))
        self._manifest.append({"record": "cached", "start": start, "cache": cache, "parts": parts})

    def retry(self, what: Sequence[str], start: int) -> int:
        """Let rows go again: `failed`, `truncated` (cut at max_tokens), or an error or warning code.

        Returns how many. They are on record before this returns.
        """
        keys = [keys_to_retry(part, what) for part in self.parts()]
        again = np.concatenate(keys) if keys else np.empty(0, "S16")
        if len(again):
            name = f"retry-{len(self._manifest.of('retry')) + 1:04d}.keys"
            write_keys(self._run.parts / name, again)
            self._manifest.append(
                {"record": "retry", "start": start, "name": name, "what": list(what), "rows": len(again)}
            )
        return len(again)
