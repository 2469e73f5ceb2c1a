"""Between Python, numpy and Arrow: columns out of values, row keys in bulk. No files here."""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bulkgen.records import ROW_KEY_BYTES, Logprobs, Sample

KEY_TYPE = np.dtype(f"S{ROW_KEY_BYTES}")

_TOKEN = [pa.field("token", pa.string()), pa.field("token_id", pa.int32()), pa.field("logprob", pa.float64())]
_TOP_TYPE = pa.struct(_TOKEN)
_PLACE_TYPE = pa.struct([*_TOKEN, pa.field("top", pa.list_(_TOP_TYPE))])
# A list of the tokens of an answer.
LOGPROBS_TYPE = pa.list_(_PLACE_TYPE)
_SAMPLE_TYPE = pa.struct(
    [
        pa.field("index", pa.int32()),
        pa.field("text", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("output_tokens", pa.int32()),
        pa.field("valid", pa.bool_()),
        pa.field("logprobs", LOGPROBS_TYPE),
    ]
)
# A list of the answers of a row.
SAMPLES_TYPE = pa.list_(_SAMPLE_TYPE)


def as_column(values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    """A column out of values. Half a surrogate pair has no UTF-8 form; its escape says which one it was."""
    if arrow_type in (LOGPROBS_TYPE, SAMPLES_TYPE):
        if not any(values):
            return pa.nulls(len(values), arrow_type)
        return _logprobs(values) if arrow_type == LOGPROBS_TYPE else _samples(values)
    try:
        return pa.array(values, arrow_type)
    except UnicodeEncodeError:
        return pa.array([_encodable(value) for value in values], arrow_type)


def _encodable(value: Any) -> Any:
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def _logprobs(values: Sequence[Logprobs | None]) -> pa.ListArray:
    given = [value for value in values if value is not None]
    counts = list(chain.from_iterable(g.top_counts for g in given))
    top = _struct(
        _TOP_TYPE,
        list(chain.from_iterable(g.top_tokens for g in given)),
        list(chain.from_iterable(g.top_token_ids for g in given)),
        list(chain.from_iterable(g.top_logprobs for g in given)),
    )
    places = _struct(
        _PLACE_TYPE,
        list(chain.from_iterable(g.tokens for g in given)),
        list(chain.from_iterable(g.token_ids for g in given)),
        list(chain.from_iterable(g.logprobs for g in given)),
        _lists(counts, top),
    )
    return _lists([None if value is None else len(value.tokens) for value in values], places)


def _samples(values: Sequence[Sequence[Sample] | None]) -> pa.ListArray:
    given = list(chain.from_iterable(value for value in values if value))
    columns = [[getattr(sample, field.name) for sample in given] for field in _SAMPLE_TYPE]
    return _lists([len(value) if value else None for value in values], _struct(_SAMPLE_TYPE, *columns))


def _struct(arrow_type: pa.StructType, *columns: Any) -> pa.StructArray:
    arrays = [
        column if isinstance(column, pa.Array) else as_column(column, field.type)
        for column, field in zip(columns, arrow_type, strict=True)
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(arrow_type))


def _lists(lengths: Sequence[int | None], values: pa.Array) -> pa.ListArray:
    """Consecutive values as lists of these lengths; None is no list at all."""
    ends = list(accumulate((length or 0 for length in lengths), initial=0))
    # A list begins where the one before it ends; a start that is null makes it null.
    starts = [None if length is None else start for length, start in zip(lengths, ends, strict=False)]
    return pa.ListArray.from_arrays(pa.array([*starts, ends[-1]], pa.int32()), values)


def as_keys(column: pa.ChunkedArray | pa.Array) -> npt.NDArray[np.bytes_]:
    """A column of row keys as numpy's fixed-width byte strings, which sort and compare as the keys do.

    A single key taken out of it lacks the zero bytes at its end, as numpy has it.
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    arrays = [
        np.frombuffer(chunk.buffers()[1], KEY_TYPE, len(chunk), chunk.offset * ROW_KEY_BYTES)
        for chunk in chunks
        if len(chunk)
    ]
    return np.concatenate(arrays) if arrays else np.empty(0, KEY_TYPE)


def hex_keys(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column of keys as people read them: hexadecimal digits. Null stays null."""
    digits = as_keys(column).tobytes().hex().encode()
    width = 2 * ROW_KEY_BYTES
    ends = np.arange(0, len(digits) + width, width, dtype=np.int32)
    shown = pa.StringArray.from_buffers(len(column), pa.py_buffer(ends), pa.py_buffer(digits))
    return pc.if_else(pc.is_valid(column), shown, pa.scalar(None, pa.string())) if column.null_count else shown
