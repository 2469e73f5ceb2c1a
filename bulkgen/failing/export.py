"""The failed rows as they came in, as a new file."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from bulkgen.dataset import DataSet
from bulkgen.errors import InputError, OutputError, SpecError
from bulkgen.failing.failed_row import CURE, Ordinals, inside
from bulkgen.failing.failures import Failures
from bulkgen.records import BadRow
from bulkgen.results.disk import ParquetSink, reading, writing
from bulkgen.results.failures import rows_as_json
from bulkgen.rundir import RunDir, sync

# What stands for a place in the input where no row is to be had.
_NO_ROWS = frozenset(("damaged_file", "line_too_long"))


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
        for i in inside(wanted, batch.first, len(batch.rows)):
            row = batch.rows[i]
            yield row.raw if isinstance(row, BadRow) else json.dumps(row, ensure_ascii=False)


def _taken(data: DataSet, schema: pa.Schema, wanted: Ordinals) -> Iterator[pa.RecordBatch]:
    for batch in data.tables(schema):
        places = inside(wanted, batch.first, batch.table.num_rows)
        if places:
            yield batch.table.take(pa.array(places))


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: only its escape can be written
        return json.dumps(json.loads(text)).encode()


def _schema_of(run: RunDir) -> pa.Schema:
    with reading(run.schema, CURE):
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
