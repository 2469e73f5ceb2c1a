"""Answers in outputs of earlier runs, their own or other jobs': found by the request key that stands in each row."""

from binascii import unhexlify
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bulkgen.records import DONE, EXTRA_COLUMNS, REQUEST_KEY_BYTES
from bulkgen.results import ANSWER_SCHEMA, TEXT_COLUMN, open_parquet, output_files, reading

_KEY = "request_key"
# Columns of an answer that each output has, beside its text.
_ALWAYS = ("finish_reason", "prompt_tokens", "output_tokens", "warnings")
_ROWS_AT_ONCE = 8192
_CURE = "restore it, or take it out of reuse"


def earlier_files(path: Path) -> list[Path]:
    """The files of an output, none where there is none. Raises OutputError where the system does not let it be seen."""
    with reading(path, _CURE):
        return output_files(path) if path.is_dir() or path.suffix == ".parquet" else [p for p in [path] if p.is_file()]


def answers_in(file: Path, text_column: str, wanted: npt.NDArray[np.bytes_]) -> Iterator[pa.Table] | None:
    """The done rows of a file whose request key is among `wanted` (sorted), in ANSWER_SCHEMA; None if it has no keys.

    `text_column` is where the text is if the file does not say so itself. Raises OutputError for a damaged file.
    """
    with reading(file, _CURE):
        schema = pq.read_schema(file)
    text = (schema.metadata or {}).get(TEXT_COLUMN, text_column.encode()).decode(errors="replace")
    columns = {"text": text} | {name: name for name in _ALWAYS}
    if not {"status", _KEY, *columns.values()} <= set(schema.names):
        return None
    # What stands before the text is the input's own, whatever its name.
    results = schema.names[schema.names.index(text) :]
    return _answers(file, wanted, columns | {name: name for name in EXTRA_COLUMNS if name in results})


def _answers(file: Path, wanted: npt.NDArray[np.bytes_], columns: dict[str, str]) -> Iterator[pa.Table]:
    """A table for each piece of the file. `columns` are those of an answer, by their names in ANSWER_SCHEMA."""
    with reading(file, _CURE), open_parquet(file) as source:
        for batch in source.iter_batches(_ROWS_AT_ONCE, columns=["status", _KEY, *columns.values()]):
            rows = pa.table(batch).filter(pc.and_(pc.equal(batch["status"], DONE), pc.is_valid(batch[_KEY])))
            keys = _as_keys(rows[_KEY])
            place = np.minimum(np.searchsorted(wanted, keys), len(wanted) - 1)
            hits = np.flatnonzero(wanted[place] == keys)
            yield _as_answers(rows.take(pa.array(hits)), keys[hits], columns)


def _as_answers(rows: pa.Table, keys: npt.NDArray[np.bytes_], columns: dict[str, str]) -> pa.Table:
    known = {name: rows[column] for name, column in columns.items()}
    known[_KEY] = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(REQUEST_KEY_BYTES), len(keys), [None, pa.py_buffer(keys)]
    )
    known["answers"] = _counted(known.get("samples"), len(keys))
    return pa.Table.from_arrays(
        [
            known[field.name].cast(field.type) if field.name in known else pa.nulls(len(keys), field.type)
            for field in ANSWER_SCHEMA
        ],
        schema=ANSWER_SCHEMA,
    )


def _counted(samples: pa.ChunkedArray | None, rows: int) -> pa.Array | pa.ChunkedArray:
    """Answers of each row: one where it has no list of them."""
    return pa.repeat(1, rows) if samples is None else pc.fill_null(pc.list_value_length(samples), 1)


def _as_keys(column: pa.ChunkedArray) -> npt.NDArray[np.bytes_]:
    """Request keys as they are compared; what is none is empty, which no key is."""
    texts = column.cast(pa.string()).cast(pa.binary()).to_pylist()  # no text at all is for `reading` to tell
    return np.array([_unhex(text) for text in texts], f"S{REQUEST_KEY_BYTES}")


def _unhex(text: bytes) -> bytes:
    try:
        key = unhexlify(text)
    except ValueError:
        return b""
    return key if len(key) == REQUEST_KEY_BYTES else b""
