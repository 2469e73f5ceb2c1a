"""Answers in outputs of earlier runs, their own or other jobs': found by the request key that stands in each row."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bulkgen.records import DONE, REQUEST_KEY_BYTES
from bulkgen.results import ANSWER_SCHEMA, TEXT_COLUMN, open_parquet, output_files, reading

_KEY = "request_key"
_ROWS_AT_ONCE = 8192
_CURE = "restore it, or take it out of reuse"


def earlier_files(path: Path) -> list[Path]:
    """The files of an output, none where there is none."""
    return output_files(path) if path.is_dir() or path.suffix == ".parquet" else [p for p in [path] if p.is_file()]


def answers_in(file: Path, text_column: str, wanted: npt.NDArray[np.bytes_]) -> Iterator[pa.Table] | None:
    """The done rows of a file whose request key is among `wanted` (sorted), in ANSWER_SCHEMA; None if it has no keys.

    `text_column` is where the text is if the file does not say so itself. Raises OutputError for a damaged file.
    """
    with reading(file, _CURE):
        schema = pq.read_schema(file)
    text = (schema.metadata or {}).get(TEXT_COLUMN, text_column.encode()).decode(errors="replace")
    needed = {_KEY, "status", text, "finish_reason", "prompt_tokens", "output_tokens", "warnings"}
    return _answers(file, text, wanted, schema) if needed <= set(schema.names) else None


def _answers(file: Path, text: str, wanted: npt.NDArray[np.bytes_], schema: pa.Schema) -> Iterator[pa.Table]:
    known = {"text": text} | {name: name for name in ANSWER_SCHEMA.names if name in schema.names and name != "text"}
    with reading(file, _CURE), open_parquet(file) as source:
        for batch in source.iter_batches(_ROWS_AT_ONCE, columns=["status", *known.values()]):
            rows = pa.table(batch).filter(pc.and_(pc.equal(batch["status"], DONE), pc.is_valid(batch[_KEY])))
            keys = _bytes(rows[_KEY])
            place = np.minimum(np.searchsorted(wanted, keys), len(wanted) - 1)
            hits = rows.filter(pa.array(wanted[place] == keys))
            if hits.num_rows:
                yield _as_answers(hits, known)


def _as_answers(rows: pa.Table, known: dict[str, str]) -> pa.Table:
    columns = []
    for field in ANSWER_SCHEMA:
        if field.name == _KEY:
            columns.append(pa.array([bytes.fromhex(key) for key in rows[_KEY].to_pylist()], field.type))
        elif field.name in known:
            columns.append(rows[known[field.name]].cast(field.type))
        elif field.name == "answers":
            columns.append(_counted(rows))
        else:
            columns.append(pa.nulls(rows.num_rows, field.type))
    return pa.Table.from_arrays(columns, schema=ANSWER_SCHEMA)


def _counted(rows: pa.Table) -> pa.Array:
    """Answers of each row: one where it has no list of them."""
    if "samples" not in rows.column_names:
        return pa.repeat(pa.scalar(1, pa.int32()), rows.num_rows)
    return pc.fill_null(pc.list_value_length(rows["samples"]), 1).cast(pa.int32())


def _bytes(column: pa.ChunkedArray) -> npt.NDArray[np.bytes_]:
    """Request keys as they are compared; what is none is empty, which no key is."""
    texts = column.to_pylist()
    width = 2 * REQUEST_KEY_BYTES
    return np.array([_unhex(text) if len(text) == width else b"" for text in texts], f"S{REQUEST_KEY_BYTES}")


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
