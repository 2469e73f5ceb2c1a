"""`bulkgen failures`: which rows failed and why, whatever state a run is in, and those rows as they came in.

After a merge all stands in failures.parquet. Before it, what planning refused stands in the plan, and what failed in
the engine in the parts: these know rows by their key, so that where such a row stands, and what it holds, is read from
the input, if that is still the same. Of all failures only some bytes a row are in memory.
"""

import errno
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import yaml

from bulkgen.committed import committed_parts
from bulkgen.dataset import DataSet, open_dataset
from bulkgen.errors import BulkgenError, InputError, OutputError, SpecError
from bulkgen.plan import Plan, load_plan
from bulkgen.records import FAILED, BadRow, RowBatch
from bulkgen.report import load_status
from bulkgen.results import CommittedPart
from bulkgen.results.columns import as_keys
from bulkgen.results.disk import ParquetSink, open_parquet, reading, writing
from bulkgen.results.failures import rows_as_json
from bulkgen.rundir import RunDir, read_manifest, sync

Ordinals = npt.NDArray[np.int64]

# What stands for a place in the input where no row is to be had.
_NO_ROWS = frozenset(("damaged_file", "line_too_long"))
# The records by which a run's results become others.
_TURNS = ("plan", "retry", "changed", "merging", "merged")
_AT_ONCE = 1000
_CURE = "run the job again, which makes it anew"


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that failed. `file`, `position` and `id` are None where they are not known."""

    ordinal: int
    code: str
    error: str
    file: str | None = None
    position: int | None = None
    id: Any = None


@dataclass(frozen=True, slots=True)
class Index:
    """All failed rows: ordinals, rising, and for each the place of its code in `codes`."""

    ordinals: Ordinals
    code: npt.NDArray[np.int32]
    codes: list[str]


class _Source(Protocol):
    """Where failures are on record."""

    def index(self) -> Index: ...

    def details(self, wanted: Ordinals, places: bool = True) -> Iterator[FailedRow]:
        """What is known of rows, in their order; without `places`, no more than why they failed."""

    def contents(self, wanted: Ordinals) -> Iterator[str | bytes | None]:
        """What rows held, without a look at the input: JSON, or bytes that are none, or None for what is not known."""


@dataclass(frozen=True, slots=True)
class Failures:
    """The failed rows of a run, those with certain codes (`of`) by code, the most frequent first.

    `rows` and `failed` count all rows of the run. `final`: no more rows can fail in it as it is.
    """

    run: RunDir
    state: str
    final: bool
    rows: int
    failed: int
    of: Mapping[str, Ordinals]
    known_codes: Sequence[str]
    source: _Source
    input: "_Input"

    @property
    def ordinals(self) -> Ordinals:
        """All of them, rising."""
        return np.sort(np.concatenate([*self.of.values(), np.empty(0, np.int64)]))

    def examples(self) -> dict[str, str]:
        """A sentence for each code: that of its first row."""
        firsts = np.sort(np.array([ordinals[0] for ordinals in self.of.values()], np.int64))
        return {row.code: row.error for row in self.source.details(firsts, places=False)}


def load_failures(run: RunDir, codes: Sequence[str] = ()) -> Failures:
    """The failures of a run as it is at this moment, all or those with certain codes. Raises OutputError."""
    records = read_manifest(run.manifest)
    alive = run.is_held()
    turns = [record for record in records if record["record"] in _TURNS]
    merged = turns[-1] if turns and turns[-1]["record"] == "merged" else None
    own_input = _Input(run, records)
    if merged is not None and run.failures.is_file():
        source: _Source = _Merged(run.failures, own_input)
        rows = merged["rows"]
    else:
        plan = _plan_of(run)
        source = _SoFar(run, plan, records, own_input)
        rows = plan.rows if plan else 0
    index = source.index()
    order = np.argsort(-np.bincount(index.code, minlength=len(index.codes)), kind="stable").tolist()
    known = [index.codes[i] for i in order]
    of = {index.codes[i]: index.ordinals[index.code == i] for i in order if not codes or index.codes[i] in codes}
    state = load_status(run.path, alive).state
    return Failures(
        run, state, merged is not None and not alive, rows, len(index.ordinals), of, known, source, own_input
    )


def failure_lines(found: Failures, number: int) -> Iterator[str]:
    """What a user wants to know first: how many failed for which reasons, then the first `number` rows."""
    so_far = "" if found.final else f" so far (the run is {found.state})"
    yield f"{found.failed:,} of {found.rows:,} rows failed{so_far}"
    if not found.of:
        if found.failed:
            yield f"none with such a code; there are: {', '.join(found.known_codes)}"
        return
    examples = found.examples()
    width = max(len(code) for code in ("code", *found.of))
    yield ""
    yield f"{'rows':>9}  {'code':<{width}}  for example"
    for code, ordinals in found.of.items():
        yield f"{len(ordinals):>9,}  {code:<{width}}  {_short(examples.get(code, ''))}"
    yield ""
    ordinals = found.ordinals
    for row in found.source.details(ordinals[:number]):
        named = "" if row.id is None else f"  id {_short(str(row.id), 60)}"
        yield f"{_place(row)}{named}  {row.code}: {_short(row.error)}"
    more = len(ordinals) - number
    where = shlex.quote(str(found.run.output))
    if number and more > 0:
        yield f"{more:,} more: -n shows as many as you like"
    yield f"`bulkgen failures {where} --export FILE.jsonl` writes their rows out, to be mended and run again"


def failure_json(found: Failures, number: int) -> dict[str, Any]:
    """The same as JSON-able data."""
    examples = found.examples()
    return {
        "run": str(found.run.path),
        "state": found.state,
        "final": found.final,
        "rows": found.rows,
        "failed": found.failed,
        "codes": [{"code": c, "rows": len(o), "example": examples.get(c)} for c, o in found.of.items()],
        "first": [
            {
                "file": row.file,
                "position": row.position,
                "row": row.ordinal + 1,
                "id": row.id,
                "code": row.code,
                "error": row.error,
            }
            for row in found.source.details(found.ordinals[:number])
        ],
    }


def _place(row: FailedRow) -> str:
    return f"row {row.ordinal + 1:,} of the input" if row.file is None else f"{row.file}:{row.position}"


def _short(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


# ---- the rows themselves ----


def export_failures(found: Failures, path: Path) -> Iterator[str]:
    """Write the failed rows to a new file, `.jsonl` or `.parquet`, as they came in; says what was done.

    Raises SpecError for another kind of file, OutputError where something is there already or nothing should be, and
    InputError where rows cannot be had any more.
    """
    _check_target(found, path)
    wanted = np.sort(np.concatenate([np.empty(0, np.int64), *(o for c, o in found.of.items() if c not in _NO_ROWS)]))
    no_rows = sum(len(ordinals) for ordinals in found.of.values()) - len(wanted)
    missing = 0
    if len(wanted):
        data = found.input.unchanged()
        if path.suffix == ".parquet":
            _export_parquet(found, path, wanted, data)
        else:
            missing = _export_jsonl(found, path, wanted, data)
        if data is None:
            yield f"{found.input.why_not}: rows are given as they were noted down when they failed"
        yield f"{len(wanted) - missing:,} rows written to {path}"
    else:
        yield "no rows to write"
    if missing:
        yield f"{missing:,} rows cannot be had without the input as it was"
    if no_rows:
        yield f"{no_rows:,} failures are places in a file where there is no row to be had; mend the file there"


def _check_target(found: Failures, path: Path) -> None:
    if path.suffix not in (".jsonl", ".parquet"):
        raise SpecError(f"--export {path}: must end in .jsonl, or in .parquet where the input is Parquet")
    if os.path.lexists(path):
        raise OutputError(f"{path}: is there already; give the name of a new file")
    real = Path(os.path.realpath(path))
    output = Path(os.path.realpath(found.run.output))
    if real == output or output in real.parents:
        raise OutputError(f"{path}: is the job's own output, or lies in it; give another place")
    if found.input.would_read(real):
        raise OutputError(f"{path}: lies where the job looks for its input, and would be read with it; choose another")


def _export_parquet(found: Failures, path: Path, wanted: Ordinals, data: DataSet | None) -> None:
    if data is None:
        raise InputError(f"{found.input.why_not}; give a name ending in .jsonl for the rows as they were noted down")
    if data.format != "parquet":
        raise SpecError(f"--export {path}: the input is JSON Lines, which has no types; give a name ending in .jsonl")
    schema = _schema_of(found.run)
    with _new_file(path) as temporary, ParquetSink(temporary, path, schema) as sink:
        for table in _taken(data, schema, wanted):
            sink.write(pa.Table.from_batches([table]))


def _export_jsonl(found: Failures, path: Path, wanted: Ordinals, data: DataSet | None) -> int:
    """Returns how many rows could not be had."""
    missing = 0
    with _new_file(path) as temporary, writing(path), temporary.open("wb") as file:
        for content in found.source.contents(wanted) if data is None else _as_they_came(found.run, data, wanted):
            if content is None:
                missing += 1
            else:
                file.write((content if isinstance(content, bytes) else _encoded(content)) + b"\n")
        if missing == len(wanted):
            raise InputError(f"{found.input.why_not}, and what the rows held is not noted down before the run's end")
    return missing


def _as_they_came(run: RunDir, data: DataSet, wanted: Ordinals) -> Iterator[str | bytes | None]:
    if data.format == "parquet":
        for table in _taken(data, _schema_of(run), wanted):
            yield from rows_as_json(table, range(table.num_rows))
        return
    for batch in data.rows(None):
        for i in _inside(wanted, batch.first, len(batch.rows)):
            row = batch.rows[i]
            yield row.raw if isinstance(row, BadRow) else json.dumps(row, ensure_ascii=False)


def _taken(data: DataSet, schema: pa.Schema, wanted: Ordinals) -> Iterator[pa.RecordBatch]:
    for batch in data.tables(schema):
        places = _inside(wanted, batch.first, batch.table.num_rows)
        if places:
            yield batch.table.take(pa.array(places))


def _inside(wanted: Ordinals, first: int, rows: int) -> list[int]:
    """Which of consecutive rows are wanted, as places among them."""
    a, b = np.searchsorted(wanted, (first, first + rows))
    places: list[int] = (wanted[a:b] - first).tolist()
    return places


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: only its escape can be written
        return json.dumps(json.loads(text)).encode()


def _schema_of(run: RunDir) -> pa.Schema:
    with reading(run.schema, _CURE):
        return pa.ipc.read_schema(pa.py_buffer(run.schema.read_bytes()))


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """A temporary file that becomes `path` when the block ends well, and never takes another's place."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        yield temporary
        sync(temporary)
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
            temporary.rename(path)
        sync(path.absolute().parent)
    except OSError as e:
        raise OutputError(f"{path}: cannot be written ({e.strerror or e}); give another place") from e
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


class _Input:
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


class _Places:
    """Where rows stand, and their ids, out of the input, which is read once and no further than needed."""

    def __init__(self, own_input: _Input) -> None:
        data = own_input.unchanged()
        self._id = own_input.id
        self._batches = iter(()) if data is None else data.rows(set() if self._id is None else {self._id})
        self._batch: RowBatch | None = None

    def of(self, ordinals: Ordinals) -> dict[int, tuple[str, int, Any]]:
        """File, position and id by ordinal, of those that can be found; ordinals only rise from call to call."""
        found: dict[int, tuple[str, int, Any]] = {}
        while len(ordinals):
            if (batch := self._batch) is not None:
                for i in _inside(ordinals, batch.first, len(batch.rows)):
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


# ---- where failures are on record ----


class _Merged:
    """failures.parquet, as the last merge has left it."""

    def __init__(self, path: Path, own_input: _Input) -> None:
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


class _SoFar:
    """What planning refused, and what of the parts failed in the engine."""

    def __init__(self, run: RunDir, plan: Plan | None, records: Sequence[Mapping[str, Any]], own_input: _Input) -> None:
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
        where = _Places(self._input) if places and self._has_engines(wanted) else None
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

    def _of_engine(self, some: Ordinals, where: _Places | None) -> dict[int, FailedRow]:
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


def _plan_of(run: RunDir) -> Plan | None:
    try:
        return load_plan(run.plan)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _tables(path: Path, columns: list[str], wanted: Ordinals | None = None) -> Iterator[pa.Table]:
    """Columns of a file that bulkgen wrote, a row group at a time; those with `wanted` ordinals, which only rise."""
    with reading(path, _CURE), open_parquet(path) as file:
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
