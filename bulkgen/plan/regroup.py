"""Putting the rows of a plan's file in another order, however large it is: into pieces of that order, then each piece.

A piece is in memory at a time, and some rows of each while they are dealt out.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Order = npt.NDArray[np.int64]

# Tokens of a piece: 64 MiB. No more pieces than files may be open; they are larger then.
_PIECE_TOKENS = 1 << 24
_MOST_PIECES = 128
# Rows that wait in memory until they are worth a write, a piece.
_DEALT_ROWS = 256


def reordered(path: Path, order: Order, prompt_tokens: npt.NDArray[np.int32], folder: Path) -> Iterator[pa.RecordBatch]:
    """The rows of an Arrow file in `order` (as indices of rows), some at a time; pieces are made in `folder`.

    `prompt_tokens`: of each row as it stands.
    """
    piece_of = _pieces(order, prompt_tokens)
    pieces = int(piece_of.max(initial=0)) + 1
    if pieces == 1:
        with pa.OSFile(str(path)) as source:
            yield from _taken(pa.ipc.open_file(source).read_all(), order)
        return
    files = [folder / f"piece-{number:03d}.arrow" for number in range(pieces)]
    _deal(path, piece_of, files)
    by_piece = np.split(order, np.searchsorted(piece_of[order], np.arange(1, pieces)))
    for file, rows in zip(files, by_piece, strict=True):
        with pa.OSFile(str(file)) as source:
            table = pa.ipc.open_stream(source).read_all()
        # In a piece rows stand as they did in the file.
        yield from _taken(table, np.argsort(np.argsort(rows)))
        file.unlink()


def _pieces(order: Order, prompt_tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The piece that each row belongs to."""
    ends = np.cumsum(prompt_tokens[order], dtype=np.int64)
    tokens = max(_PIECE_TOKENS, int(ends[-1]) // _MOST_PIECES + 1) if len(ends) else 1
    piece_of = np.empty(len(order), np.int32)
    piece_of[order] = (ends - 1) // tokens
    return piece_of


def _deal(path: Path, piece_of: npt.NDArray[np.int32], files: list[Path]) -> None:
    with ExitStack() as stack:
        source = pa.ipc.open_file(stack.enter_context(pa.OSFile(str(path))))
        writers = [stack.enter_context(_stream(file, source.schema, stack)) for file in files]
        waiting: list[list[pa.RecordBatch]] = [[] for _ in files]
        rows = np.zeros(len(files), np.int64)
        first = 0
        for number in range(source.num_record_batches):
            batch = source.get_batch(number)
            pieces = piece_of[first : first + len(batch)]
            first += len(batch)
            by_piece = np.argsort(pieces, kind="stable")
            numbers, starts = np.unique(pieces[by_piece], return_index=True)
            for piece, chosen in zip(numbers.tolist(), np.split(by_piece, starts[1:]), strict=True):
                waiting[piece].append(batch.take(pa.array(chosen)))
                rows[piece] += len(chosen)
                if rows[piece] >= _DEALT_ROWS:
                    _write(writers[piece], waiting[piece])
                    rows[piece] = 0
        for writer, left in zip(writers, waiting, strict=True):
            _write(writer, left)


def _stream(file: Path, schema: pa.Schema, stack: ExitStack) -> pa.RecordBatchStreamWriter:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    return pa.ipc.new_stream(stack.enter_context(pa.OSFile(str(file), "wb")), schema, options=options)


def _write(writer: pa.RecordBatchStreamWriter, batches: list[pa.RecordBatch]) -> None:
    if batches:
        for batch in pa.Table.from_batches(batches).combine_chunks().to_batches():
            writer.write_batch(batch)
        batches.clear()


def _taken(table: pa.Table, order: Order) -> Iterator[pa.RecordBatch]:
    yield from table.combine_chunks().take(pa.array(order)).combine_chunks().to_batches()
