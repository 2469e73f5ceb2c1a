"""Part files: results in the order in which they finished, without the input's columns, whole or not at all."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from bulkgen.codes import EMPTY_OUTPUT
from bulkgen.errors import OutputError
from bulkgen.records import (
    DONE,
    ENGINE,
    FAILED,
    REPEAT,
    REQUEST_KEY_BYTES,
    ROW_KEY_BYTES,
    Completion,
    Failure,
    Logprobs,
    Sample,
)
from bulkgen.results.columns import LOGPROBS_TYPE, SAMPLES_TYPE, as_column, as_keys
from bulkgen.results.disk import ParquetSink, open_parquet, reading
from bulkgen.rundir import whole_file
from bulkgen.secrecy import hushed

PART_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary(ROW_KEY_BYTES), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("queued_s", pa.float64()),
        ("ttft_s", pa.float64()),
        ("tpot_s", pa.float64()),
        ("e2e_s", pa.float64()),
        ("error_code", pa.string()),
        ("error", pa.string()),
        ("warnings", pa.list_(pa.string())),
        ("attempts", pa.int32()),
        ("answer_from", pa.string()),
        ("settings_key", pa.string()),
        ("request_key", pa.binary(REQUEST_KEY_BYTES)),
        ("samples", SAMPLES_TYPE),
        ("logprobs", LOGPROBS_TYPE),
        ("valid", pa.bool_()),
        ("answers", pa.int32()),
    ]
)
# What of a done row is the same for each row with its request, whoever computed it.
ANSWER_SCHEMA = pa.schema(
    [
        PART_SCHEMA.field(name)
        for name in (
            *("request_key", "text", "finish_reason", "prompt_tokens", "output_tokens", "warnings"),
            *("samples", "logprobs", "valid", "answers"),
        )
    ]
)
# Columns with few distinct values. Texts are stored plainly, so that the file's own figures tell how large they are
# in memory, however often one is repeated.
_DICTIONARY = [
    "shard",
    "status",
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "error_code",
    "attempts",
    "answer_from",
    "settings_key",
    "answers",
]
# Rows that are turned into columns at once: bounded, and far from the 2 GiB that 32-bit offsets reach.
_CHUNK_CHARACTERS = 16 << 20
_READ_ROWS, _READ_BYTES = 65_536, 16 << 20
# What a row takes in memory beside its texts: numbers, offsets, and the short strings that the file keeps once.
_ROW_BYTES = 100
# What one log probability takes on its way: its number, the id and the text of its token.
_LOGPROB_BYTES = 24
_CURE = "it was committed, so restore it from a copy, or remove the run folder to generate everything again"


class PartRow(NamedTuple):
    """One finished row, in the order of PART_SCHEMA."""

    key: bytes
    shard: int
    status: str
    text: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    queued_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    error_code: str | None
    error: str | None
    warnings: Sequence[str] | None
    attempts: int
    answer_from: str
    settings_key: str
    request_key: bytes | None
    samples: Sequence[Sample] | None = None
    logprobs: Logprobs | None = None
    valid: bool | None = None
    answers: int | None = None


@dataclass(slots=True, kw_only=True)  # not frozen: one a row
class About:
    """What is known of a row beside its result.

    `attempts` counts how often an engine was given it, `settings_key` names the settings that made its request, and
    `request_key` the request itself, where its answer may stand for another one's.
    """

    key: bytes
    shard: int
    warnings: tuple[str, ...] = ()
    attempts: int = 1
    settings_key: str = ""
    request_key: bytes | None = None


def done_row(row: About, c: Completion) -> PartRow:
    """The record of a row that was generated."""
    return PartRow(
        key=row.key,
        shard=row.shard,
        status=DONE,
        text=c.text,
        finish_reason=c.finish_reason,
        prompt_tokens=c.prompt_tokens,
        cached_tokens=c.cached_tokens,
        output_tokens=c.output_tokens,
        queued_s=c.queued_s,
        ttft_s=c.ttft_s,
        tpot_s=c.tpot_s,
        e2e_s=c.e2e_s,
        error_code=None,
        error=None,
        warnings=[*row.warnings, *c.warnings, *([] if _says_something(c) else [EMPTY_OUTPUT])] or None,
        attempts=row.attempts,
        answer_from=ENGINE,
        settings_key=row.settings_key,
        request_key=row.request_key,
        samples=c.samples or None,
        logprobs=c.logprobs,
        valid=c.valid,
        answers=len(c.samples) or 1,
    )


def repeated_row(row: PartRow, key: bytes, shard: int) -> PartRow:
    """The record of a row that was not sent, with the result of one whose request is the same."""
    return row._replace(
        key=key,
        shard=shard,
        cached_tokens=None,
        queued_s=None,
        ttft_s=None,
        tpot_s=None,
        e2e_s=None,
        attempts=0,
        answer_from=REPEAT,
    )


def _says_something(c: Completion) -> bool:
    return bool(c.text) and all(sample.text for sample in c.samples)


def failed_row(row: About, f: Failure) -> PartRow:
    """The record of a row that the engine could not generate."""
    return PartRow(
        key=row.key,
        shard=row.shard,
        status=FAILED,
        text=None,
        finish_reason=None,
        prompt_tokens=None,
        cached_tokens=None,
        output_tokens=None,
        queued_s=None,
        ttft_s=None,
        tpot_s=None,
        e2e_s=None,
        error_code=f.code,
        error=hushed(f.message),  # an engine's own words may repeat what it was given
        warnings=list(row.warnings) or None,
        attempts=row.attempts,
        answer_from=ENGINE,
        settings_key=row.settings_key,
        request_key=row.request_key,
    )


def write_part(folder: Path, name: str, rows: Sequence[PartRow]) -> None:
    """Write a part under a temporary name, sync it, rename it. Raises OutputError."""
    write_tables(folder, name, map(_as_table, _chunks(rows)))


def write_tables(folder: Path, name: str, tables: Iterable[pa.Table]) -> None:
    """As `write_part`, of tables in PART_SCHEMA."""
    final = folder / name
    with whole_file(final) as path, ParquetSink(path, final, PART_SCHEMA, _DICTIONARY) as sink:
        for table in tables:
            sink.write(table)


def answered(
    answers: pa.Table,
    keys: Sequence[bytes],
    shards: npt.NDArray[np.int32],
    answer_from: str,
    settings_key: str,
) -> pa.Table:
    """Rows of a part that have answers of other runs, in ANSWER_SCHEMA, one for each row."""
    rows = len(keys)
    known = {
        "key": pa.array(keys, pa.binary(ROW_KEY_BYTES)),
        "shard": pa.array(shards, pa.int32()),
        "status": pa.repeat(pa.scalar(DONE), rows),
        "attempts": pa.repeat(pa.scalar(0, pa.int32()), rows),
        "answer_from": pa.repeat(pa.scalar(answer_from), rows),
        "settings_key": pa.repeat(pa.scalar(settings_key), rows),
    } | {name: answers[name] for name in ANSWER_SCHEMA.names}
    columns = [known[f.name] if f.name in known else pa.nulls(rows, f.type) for f in PART_SCHEMA]
    return pa.Table.from_arrays(columns, schema=PART_SCHEMA)


def _as_table(rows: Sequence[PartRow]) -> pa.Table:
    columns = [as_column(values, f.type) for values, f in zip(zip(*rows, strict=True), PART_SCHEMA, strict=True)]
    return pa.Table.from_arrays(columns, schema=PART_SCHEMA)


def _chunks(rows: Sequence[PartRow]) -> Iterator[Sequence[PartRow]]:
    """Nearly always one; more where texts are long."""
    start = size = 0
    for i, row in enumerate(rows):
        size += len(row.text or "") + len(row.error or "") + _extra_size(row)
        if size >= _CHUNK_CHARACTERS:
            yield rows[start : i + 1]
            start, size = i + 1, 0
    if start < len(rows):
        yield rows[start:]


def _extra_size(row: PartRow) -> int:
    if row.samples is None and row.logprobs is None:
        return 0
    samples = row.samples or ()
    logprobs = [row.logprobs, *(sample.logprobs for sample in samples)]
    numbers = sum(len(given.tokens) + len(given.top_tokens) for given in logprobs if given is not None)
    return sum(len(sample.text) for sample in samples) + numbers * _LOGPROB_BYTES


def read_keys(path: Path) -> npt.NDArray[np.bytes_]:
    """The row keys of a part, as fixed-width byte strings in the part's order.

    Raises OutputError for a part that is missing or damaged.
    """
    with reading(path, _CURE), open_parquet(path) as file:
        _check_schema(path, file)
        return as_keys(file.read(columns=["key"]).column(0))


def read_part(path: Path) -> Iterator[pa.RecordBatch]:
    """The rows of a part in its order, in batches of bounded size. Raises OutputError."""
    with reading(path, _CURE), open_parquet(path) as file:
        _check_schema(path, file)
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            rows = group.num_rows * _READ_BYTES // max(1, group.total_byte_size)
            yield from file.iter_batches(max(1, min(rows, _READ_ROWS)), row_groups=[number])


def part_bytes(path: Path) -> int:
    """About how much memory the rows of a part take. Raises OutputError."""
    with reading(path, _CURE), open_parquet(path) as file:
        size: int = sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))
        rows: int = file.metadata.num_rows
    return size + rows * _ROW_BYTES


def _check_schema(path: Path, file: pq.ParquetFile) -> None:
    if not file.schema_arrow.equals(PART_SCHEMA):
        raise OutputError(f"{path}: is not a part file of this version of bulkgen; {_CURE}")
