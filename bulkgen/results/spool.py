"""Results on their way from finish order to input order, with bounded memory: one spool file, sorted by ranges.

The rows of the data set are divided into ranges of consecutive ordinals, such that the results of one range fit the
memory bound. A first pass over the parts writes each row into one Arrow file, in record batches that belong to a
single range; a second one reads range after range and sorts each in memory.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from bulkgen.errors import BulkgenError, OutputError
from bulkgen.results.parts import PART_SCHEMA, as_keys

# Results of one range in memory; the merge needs about four times as much at its peak.
RANGE_BYTES = 64 << 20
_READ_ROWS = 16_384

SPOOL_SCHEMA = pa.schema([("ordinal", pa.int64()), *PART_SCHEMA])


class Keys(Protocol):
    """What a plan knows of its rows."""

    rows: int

    def lookup(self, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.int64]:
        """Ordinals of keys, -1 where a key is not in the plan."""


class Spool:
    """The results of `parts` that belong to `keys`, to be read back in ordinal order."""

    def __init__(self, path: Path, parts: Sequence[Path], keys: Keys) -> None:
        self._path = path
        size = sum(_uncompressed_bytes(part) for part in parts)
        self._range_rows = max(1, -(-keys.rows // max(1, -(-size // RANGE_BYTES))))
        self._batches: dict[int, list[int]] = {}
        self._fill(parts, keys)

    def _fill(self, parts: Sequence[Path], keys: Keys) -> None:
        written = 0
        with pa.ipc.new_file(str(self._path), SPOOL_SCHEMA, options=pa.ipc.IpcWriteOptions(compression="lz4")) as file:
            for part in parts:
                for batch in _read(part):
                    for number, piece in self._divide(batch, keys):
                        file.write_batch(piece)
                        self._batches.setdefault(number, []).append(written)
                        written += 1

    def _divide(self, batch: pa.RecordBatch, keys: Keys) -> Iterator[tuple[int, pa.RecordBatch]]:
        ordinals = keys.lookup(as_keys(batch.column(0)))
        order = np.argsort(ordinals, kind="stable")
        order = order[np.searchsorted(ordinals[order], 0) :]  # rows of earlier data or settings have no ordinal
        sorted_ordinals = ordinals[order]
        rows = pa.RecordBatch.from_arrays([pa.array(ordinals), *batch.columns], schema=SPOOL_SCHEMA).take(
            pa.array(order)
        )
        ranges = sorted_ordinals // self._range_rows
        borders = np.flatnonzero(np.diff(ranges, prepend=-1, append=-1))
        for a, b in pairwise(borders):
            yield int(ranges[a]), rows.slice(a, b - a)

    def ranges(self) -> Iterator[pa.Table]:
        """The rows in ordinal order, a range at a time. Raises BulkgenError if a row has two results."""
        with pa.memory_map(str(self._path)) as source:
            file = pa.ipc.open_file(source)
            for number in sorted(self._batches):
                table = pa.Table.from_batches([file.get_batch(i) for i in self._batches[number]]).combine_chunks()
                ordinals = table.column(0).to_numpy()
                order = np.argsort(ordinals, kind="stable")
                twice = np.flatnonzero(np.diff(ordinals[order]) == 0)
                if len(twice):
                    raise BulkgenError(
                        f"row {ordinals[order][twice[0]]} of the input has two results; nothing was merged"
                    )
                yield table.take(pa.array(order))


def _read(part: Path) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(part) as file:
            yield from file.iter_batches(_READ_ROWS)
    except (OSError, pa.ArrowException) as e:
        raise OutputError(f"{part}: a committed part cannot be read ({e}); restore the run folder") from e


def _uncompressed_bytes(part: Path) -> int:
    try:
        metadata = pq.read_metadata(part)
    except (OSError, pa.ArrowException) as e:
        raise OutputError(f"{part}: a committed part cannot be read ({e}); restore the run folder") from e
    return sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
