"""Part files: results in the order in which they finished, without the input's columns. Whole or not there."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from bulkgen.errors import OutputError
from bulkgen.records import DONE, FAILED, ROW_KEY_BYTES, Completion, Failure
from bulkgen.rundir import whole_file

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
    ]
)
# A text column chunk must stay below the 2 GiB that 32-bit offsets reach, with room to spare.
_GROUP_BYTES = 256 << 20


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


def done_row(key: bytes, shard: int, c: Completion) -> PartRow:
    """The record of a row that was generated."""
    return PartRow(
        key,
        shard,
        DONE,
        c.text,
        c.finish_reason,
        c.prompt_tokens,
        c.cached_tokens,
        c.output_tokens,
        c.queued_s,
        c.ttft_s,
        c.tpot_s,
        c.e2e_s,
        None,
        None,
    )


def failed_row(key: bytes, shard: int, f: Failure) -> PartRow:
    """The record of a row that the engine could not generate."""
    nothing = (None, None, None, None, None, None, None, None, None)
    return PartRow(key, shard, FAILED, *nothing, f.code, f.message)


def write_part(folder: Path, name: str, rows: Sequence[PartRow]) -> None:
    """Write a part under a temporary name, sync it, rename it. Raises OutputError."""
    with whole_file(folder / name) as path, pq.ParquetWriter(path, PART_SCHEMA, compression="zstd") as writer:
        for group in _groups(rows):
            columns = [
                pa.array(values, field.type)
                for values, field in zip(zip(*group, strict=True), PART_SCHEMA, strict=True)
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=PART_SCHEMA))


def _groups(rows: Sequence[PartRow]) -> list[Sequence[PartRow]]:
    """Cut where the texts of a group would grow beyond what one column chunk holds; nearly always one group."""
    groups, start, size = [], 0, 0
    for i, row in enumerate(rows):
        size += len(row.text or "")
        if size > _GROUP_BYTES:
            groups.append(rows[start : i + 1])
            start, size = i + 1, 0
    return [group for group in (*groups, rows[start:]) if group]


def read_keys(path: Path) -> npt.NDArray[np.bytes_]:
    """The row keys of a part as fixed-width byte strings. Raises OutputError for a part that cannot be read."""
    try:
        table = pq.read_table(path, columns=["key"], partitioning=None)
    except (OSError, pa.ArrowException) as e:
        raise OutputError(f"{path}: a committed part cannot be read ({e}); restore the run folder") from e
    return as_keys(table.column(0))


def as_keys(column: pa.ChunkedArray | pa.Array) -> npt.NDArray[np.bytes_]:
    """A column of keys as numpy's fixed-width byte strings, without a copy a row."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [
        np.frombuffer(c.buffers()[1], f"S{ROW_KEY_BYTES}", len(c), c.offset * ROW_KEY_BYTES) for c in chunks if len(c)
    ]
    return np.concatenate(parts) if parts else np.empty(0, f"S{ROW_KEY_BYTES}")
