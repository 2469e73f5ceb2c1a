"""Between Python, numpy and Arrow: columns out of values, row keys in bulk. No files here."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bulkgen.records import ROW_KEY_BYTES

KEY_TYPE = np.dtype(f"S{ROW_KEY_BYTES}")


def as_column(values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    """A column out of values. Half a surrogate pair has no UTF-8 form; its escape says which one it was."""
    try:
        return pa.array(values, arrow_type)
    except UnicodeEncodeError:
        return pa.array([_encodable(value) for value in values], arrow_type)


def _encodable(value: Any) -> Any:
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


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
    """A column of row keys as people read them: hexadecimal digits."""
    digits = as_keys(column).tobytes().hex().encode()
    width = 2 * ROW_KEY_BYTES
    ends = np.arange(0, len(digits) + width, width, dtype=np.int32)
    return pa.StringArray.from_buffers(len(column), pa.py_buffer(ends), pa.py_buffer(digits))
