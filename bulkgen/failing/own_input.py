"""The input that a run has read: whether it is still the same, and where in it a row stands."""

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from bulkgen.dataset import DataSet, open_dataset
from bulkgen.errors import BulkgenError
from bulkgen.failing.failed_row import Ordinals, inside
from bulkgen.records import BadRow, RowBatch
from bulkgen.rundir import RunDir


class OwnInput:
    """The input that a run has read, as far as it is still at hand."""

    def __init__(self, run: RunDir, records: Sequence[Mapping[str, Any]]) -> None:
        self._run = run
        self._fingerprint = next((r["fingerprint"] for r in reversed(records) if r["record"] == "plan"), None)
        self._base = next((r["base"] for r in reversed(records) if r["record"] == "start" and "base" in r), None)
        self.why_not = ""
        try:
            job = yaml.safe_load(run.job.read_bytes())["input"]
            self.id: str | None = "custom_id" if job.get("batch") else job["id"]
            self._paths = [job["path"]] if isinstance(job["path"], str) else list(job["path"])
        except (OSError, yaml.YAMLError, KeyError, TypeError):
            self.id, self._paths = None, []

    def unchanged(self) -> DataSet | None:
        """The input, if it is what the run has read; None, and `why_not`, otherwise."""
        if not self._paths or self._base is None or self._fingerprint is None:
            self.why_not = f"{self._run.job}: does not tell what the input was"
            return None
        try:
            data = open_dataset(self._paths, Path(self._base), exclude=(self._run.output, self._run.path))
        except BulkgenError as e:
            self.why_not = f"the input is not at hand ({e})"
            return None
        if data.fingerprint != self._fingerprint:
            self.why_not = "the input has changed since the run has read it"
            return None
        return data

    def would_read(self, path: Path) -> bool:
        """Whether a new file would be part of the input."""
        places = [Path(os.path.realpath(Path(self._base or ".") / text)) for text in self._paths]
        return any(place in path.parents if place.is_dir() else _is_meant(path.parts, place.parts) for place in places)


def _is_meant(names: Sequence[str], glob: Sequence[str]) -> bool:
    """Whether a glob takes a path in; both as the names on the way."""
    if not glob:
        return not names
    if glob[0] == "**":
        return any(_is_meant(names[i:], glob[1:]) for i in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], glob[0]) and _is_meant(names[1:], glob[1:])


class Places:
    """Where rows stand, and their ids, out of the input, which is read once and no further than needed."""

    def __init__(self, own_input: OwnInput) -> None:
        data = own_input.unchanged()
        self._id = own_input.id
        self._batches = iter(()) if data is None else data.rows(set() if self._id is None else {self._id})
        self._batch: RowBatch | None = None

    def of(self, ordinals: Ordinals) -> dict[int, tuple[str, int, Any]]:
        """File, position and id by ordinal, of those that can be found; ordinals only rise from call to call."""
        found: dict[int, tuple[str, int, Any]] = {}
        while len(ordinals):
            if (batch := self._batch) is not None:
                for i in inside(ordinals, batch.first, len(batch.rows)):
                    row = batch.rows[i]
                    row_id = None if self._id is None or isinstance(row, BadRow) else row.get(self._id)
                    found[batch.first + i] = (batch.file, batch.positions[i], row_id)
                if ordinals[-1] < batch.first + len(batch.rows):
                    break
            try:
                self._batch = next(self._batches)
            except (StopIteration, BulkgenError):
                self._batch, self._batches = None, iter(())
                break
        return found
