"""Where failures are on record: in failures.parquet after a merge, in plan and parts before it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bulkgen.committed import committed_parts
from bulkgen.failing.failed_row import CURE, FailedRow, Index, Ordinals
from bulkgen.failing.own_input import OwnInput, Places
from bulkgen.plan import Plan
from bulkgen.records import FAILED
from bulkgen.results import CommittedPart
from bulkgen.results.columns import as_keys
from bulkgen.results.disk import open_parquet, reading
from bulkgen.rundir import RunDir

_AT_ONCE = 1000


class Merged:
    """failures.parquet, as the last merge has left it."""

    def __init__(self, path: Path, own_input: OwnInput) -> None:
        self._path = path
        self._id = own_input.id

    def index(self) -> Index:
        return _index_of(_tables(self._path, ["ordinal", "error_code"]), "error_code")

    def details(self, wanted: Ordinals, places: bool = True) -> Iterator[FailedRow]:
        columns = ["file", "position", "ordinal", "error_code", "error"]
        with_id = places and self._id is not None
        for table in _tables(self._path, [*columns, "row"] if with_id else columns, wanted):
            for row in table.to_pylist():
                row_id = _id_in(row["row"], self._id) if with_id else None
                place = row["file"], row["position"], row_id
                yield FailedRow(row["ordinal"], row["error_code"], row["error"], *place)

    def contents(self, wanted: Ordinals) -> Iterator[str | bytes | None]:
        for table in _tables(self._path, ["file", "ordinal", "row", "raw"], wanted):
            yield from map(_content, table.to_pylist())


class SoFar:
    """What planning refused, and what of the parts failed in the engine."""

    def __init__(
        self, run: RunDir, plan: Plan | None, records: Sequence[Mapping[str, Any]], own_input: OwnInput
    ) -> None:
        self._refused = run.refused
        self._plan = plan
        failed_in = {record["name"] for record in records if record["record"] == "part" and record["failed"]}
        self._parts = [p for p in committed_parts(run, records) if p.path.name in failed_in]
        self._input = own_input
        self._engine = Index(np.empty(0, np.int64), np.empty(0, np.int32), [])
        self._part: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._row: npt.NDArray[np.int32] = np.empty(0, np.int32)

    def index(self) -> Index:
        if self._plan is None:
            return self._engine
        refused = _index_of(_tables(self._refused, ["ordinal", "code"]), "code")
        pieces = [self._failed_in(self._plan, part) for part in self._parts]
        codes = sorted({code for piece in pieces for code in piece[1].codes} | set(refused.codes))
        number = {code: i for i, code in enumerate(codes)}

        def renumbered(index: Index) -> npt.NDArray[np.int32]:
            return np.array([number[code] for code in index.codes], np.int32)[index.code]

        ordinals = np.concatenate([np.empty(0, np.int64), *(piece[1].ordinals for piece in pieces)])
        order = np.argsort(ordinals, kind="stable")
        code = np.concatenate([np.empty(0, np.int32), *(renumbered(piece[1]) for piece in pieces)])[order]
        self._engine = Index(ordinals[order], code, codes)
        self._row = np.concatenate([np.empty(0, np.int32), *(piece[0] for piece in pieces)])[order]
        counts = [len(piece[0]) for piece in pieces]
        self._part = np.repeat(np.arange(len(pieces), dtype=np.int32), counts)[order]
        both = np.concatenate([refused.ordinals, self._engine.ordinals])
        order = np.argsort(both, kind="stable")
        return Index(both[order], np.concatenate([renumbered(refused), code])[order], codes)

    def _failed_in(self, plan: Plan, part: CommittedPart) -> tuple[npt.NDArray[np.int32], Index]:
        """The failed rows of a part that count: their places in it, and their index."""
        table = pa.concat_tables(_tables(part.path, ["key", "status", "error_code"]))
        keys = as_keys(table["key"])
        counts = table["status"].to_numpy() == FAILED
        if part.retired is not None:
            counts &= ~np.isin(keys, part.retired)
        ordinals = plan.lookup(keys)
        rows = np.flatnonzero(counts & (ordinals >= 0)).astype(np.int32)
        codes, code = np.unique(table["error_code"].take(pa.array(rows)).to_numpy().astype(str), return_inverse=True)
        return rows, Index(ordinals[rows], code.astype(np.int32), codes.tolist())

    def details(self, wanted: Ordinals, places: bool = True) -> Iterator[FailedRow]:
        where = Places(self._input) if places and self._has_engines(wanted) else None
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            known = self._refusals(some) | self._of_engine(some, where)
            yield from (known[ordinal] for ordinal in some.tolist())

    def _has_engines(self, wanted: Ordinals) -> bool:
        return bool(np.isin(wanted, self._engine.ordinals).any())

    def _refusals(self, some: Ordinals) -> dict[int, FailedRow]:
        columns = ["ordinal", "file", "position", "code", "message", "row"]
        rows = (row for table in _tables(self._refused, columns, some) for row in table.to_pylist())
        return {
            row["ordinal"]: FailedRow(
                row["ordinal"],
                row["code"],
                row["message"],
                row["file"],
                row["position"],
                _id_in(row["row"], self._input.id),
            )
            for row in rows
        }

    def _of_engine(self, some: Ordinals, where: Places | None) -> dict[int, FailedRow]:
        at = np.flatnonzero(np.isin(self._engine.ordinals, some))
        found = where.of(self._engine.ordinals[at]) if where is not None else {}
        rows: dict[int, FailedRow] = {}
        for part in np.unique(self._part[at]).tolist():
            mine = at[self._part[at] == part]
            table = pa.concat_tables(_tables(self._parts[part].path, ["error_code", "error"]))
            taken = table.take(pa.array(self._row[mine])).to_pylist()
            for ordinal, row in zip(self._engine.ordinals[mine].tolist(), taken, strict=True):
                place = found.get(ordinal, (None, None, None))
                rows[ordinal] = FailedRow(ordinal, row["error_code"], row["error"], *place)
        return rows

    def contents(self, wanted: Ordinals) -> Iterator[str | bytes | None]:
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            tables = _tables(self._refused, ["ordinal", "file", "row", "raw"], some)
            known = {row["ordinal"]: _content(row) for table in tables for row in table.to_pylist()}
            yield from (known.get(ordinal) for ordinal in some.tolist())


def _tables(path: Path, columns: list[str], wanted: Ordinals | None = None) -> Iterator[pa.Table]:
    """Columns of a file that bulkgen wrote, a row group at a time; those with `wanted` ordinals, which only rise."""
    with reading(path, CURE), open_parquet(path) as file:
        for number in range(file.num_row_groups):
            if wanted is None:
                yield file.read_row_group(number, columns=columns)
                continue
            statistics = file.metadata.row_group(number).column(file.schema_arrow.names.index("ordinal")).statistics
            if statistics is not None and statistics.has_min_max:
                a, b = np.searchsorted(wanted, (statistics.min, statistics.max + 1))
                if a == b:
                    continue
            table = file.read_row_group(number, columns=columns)
            yield table.filter(pa.array(np.isin(table["ordinal"].to_numpy(), wanted)))
        if not file.num_row_groups:
            yield file.schema_arrow.empty_table().select(columns)


def _index_of(tables: Iterator[pa.Table], code_column: str) -> Index:
    """The index of rows that come in their order."""
    codes: dict[str, int] = {}
    ordinals, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
    for table in tables:
        column = table[code_column].combine_chunks().dictionary_encode()
        own = [codes.setdefault(code, len(codes)) for code in column.dictionary.to_pylist()]
        ordinals.append(table["ordinal"].to_numpy())
        numbers.append(np.array(own, np.int32)[column.indices.to_numpy()])
    return Index(np.concatenate(ordinals), np.concatenate(numbers), list(codes))


def _id_in(row: str | None, name: str | None) -> Any:
    if row is None or name is None:
        return None
    try:
        return json.loads(row).get(name)
    except (ValueError, AttributeError):
        return None


def _content(row: Mapping[str, Any]) -> str | bytes | None:
    """What a row held: for Parquet, `raw` is a value and no row."""
    is_row = row["raw"] is not None and not str(row["file"]).lower().endswith((".parquet", ".pq"))
    content: str | bytes | None = row["raw"] if is_row else row["row"]
    return content
