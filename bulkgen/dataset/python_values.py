"""Arrow's values as Python's, the same on every machine, with text for those that Python has no type for."""

from typing import Any

import pyarrow as pa
from pyarrow import types

# What pyarrow raises for values that Python's own types cannot hold: dates beyond the year 9999, nanoseconds,
# bytes that are no UTF-8 in text, time zones that this machine does not know.
NO_PYTHON_VALUE = (ValueError, OverflowError, LookupError, pa.ArrowException)

_LISTS = (pa.ListScalar, pa.LargeListScalar, pa.FixedSizeListScalar, pa.ListViewScalar, pa.LargeListViewScalar)


def python_values(array: pa.Array) -> list[Any]:
    """The values of a column. Raises one of NO_PYTHON_VALUE if Python has no type for a single one of them."""
    if _is_in_nanoseconds(array.type):
        array = array.cast(_in_microseconds(array.type))
    elif _holds_nanoseconds(array.type):
        return [careful_value(value) for value in array]
    values: list[Any] = array.to_pylist()
    return values


def careful_value(value: pa.Scalar) -> Any:
    """One value; what Python has no type for is text, also inside of lists and records.

    Raises UnicodeDecodeError for text that is none, and another of NO_PYTHON_VALUE where even text cannot be had.
    """
    if not value.is_valid:
        return None
    if isinstance(value, pa.StructScalar):
        return {name: careful_value(value[name]) for name in value}
    if isinstance(value, pa.MapScalar):
        return [tuple(careful_value(part) for part in pair.values()) for pair in value.values]
    if isinstance(value, _LISTS):
        return [careful_value(inner) for inner in value.values]
    try:
        return (value.cast(_in_microseconds(value.type)) if _is_in_nanoseconds(value.type) else value).as_py()
    except UnicodeDecodeError:
        raise
    except NO_PYTHON_VALUE:
        return value.cast(pa.string()).as_py()


def _is_in_nanoseconds(arrow: pa.DataType) -> bool:
    """Whether pyarrow gives objects of pandas for such values, where that happens to be installed."""
    return bool(types.is_timestamp(arrow) or types.is_duration(arrow)) and arrow.unit == "ns"


def _holds_nanoseconds(arrow: pa.DataType) -> bool:
    inner = (arrow.field(i).type for i in range(arrow.num_fields))
    return any(_is_in_nanoseconds(t) or _holds_nanoseconds(t) for t in inner)


def _in_microseconds(arrow: pa.DataType) -> pa.DataType:
    return pa.timestamp("us", arrow.tz) if types.is_timestamp(arrow) else pa.duration("us")
