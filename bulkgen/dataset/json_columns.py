"""Types for columns that come without any: what a column of JSON has held, and the Arrow type that holds it
all.

Knows nothing of files and lines. Memory is bounded by the shape of the rows, not by their number.
"""

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

JSON_TEXT = {b"bulkgen.json": b"true"}  # metadata of a column that holds each value as JSON text

MAX_DEPTH = 32  # levels of lists and objects in a typed column
MAX_SHAPES = 1000  # keys and lists in one typed column; a column of free-form objects becomes JSON text

_BOOL, _INT, _FLOAT, _TEXT, _LIST, _OBJECT = 1, 2, 4, 8, 16, 32
_EXACT_IN_DOUBLE = 2**53


class JsonColumns:
    """The columns of a JSON Lines data set, in the order in which their names first appear."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def observe(self, rows: Iterable[Any]) -> None:
        """Take note of the values of `rows`; what is no dict is passed over."""
        columns = self._columns
        for row in rows:
            if type(row) is not dict:
                continue
            for name, value in row.items():
                column = columns.get(name)
                if column is None:
                    column = columns[name] = _Column()
                if value is not None and column.typed:
                    column.values.see(value)

    def schema(self) -> pa.Schema:
        """One field a column.

        Values of different kinds, integers beyond 64 bits or mixed with floats that would cost them digits,
        objects without any key or with ever new ones: such a column holds each value's JSON text, marked with
        JSON_TEXT.
        """
        return pa.schema([column.field(name) for name, column in self._columns.items()])


class _Column:
    """A column, typed as long as its values have one shape of reasonable size."""

    __slots__ = ("shapes", "typed", "values")

    def __init__(self) -> None:
        self.shapes = 0
        self.typed = True
        self.values = _Values(self, 0)

    def add_shape(self, depth: int) -> "_Values":
        self.shapes += 1
        if self.shapes > MAX_SHAPES or depth > MAX_DEPTH:
            self.typed = False
            self.values = _Values(self, 0)  # lets go of what was collected
        return _Values(self, depth)

    def field(self, name: str) -> pa.Field:
        arrow = self.values.arrow_type() if self.typed else None
        return pa.field(name, pa.string(), metadata=JSON_TEXT) if arrow is None else pa.field(name, arrow)


class _Values:
    """What has been seen at one place: in a column, in the lists of a column, under a key of its objects."""

    __slots__ = ("column", "depth", "high", "items", "keys", "kinds", "low")

    def __init__(self, column: _Column, depth: int) -> None:
        self.column = column
        self.depth = depth
        self.kinds = 0
        self.low = self.high = 0
        self.items: _Values | None = None
        self.keys: dict[str, _Values] = {}

    def see(self, value: Any) -> None:
        kind = type(value)
        if kind is str:
            self.kinds |= _TEXT
        elif kind is int:
            self.kinds |= _INT
            if value > self.high:
                self.high = value
            elif value < self.low:
                self.low = value
        elif kind is float:
            self.kinds |= _FLOAT
        elif kind is bool:
            self.kinds |= _BOOL
        elif kind is list:
            self._see_list(value)
        else:
            self._see_object(value)

    def _see_list(self, values: list[Any]) -> None:
        self.kinds |= _LIST
        if self.items is None:
            self.items = self.column.add_shape(self.depth + 1)
        for value in values:
            if value is not None and self.column.typed:
                self.items.see(value)

    def _see_object(self, values: dict[str, Any]) -> None:
        self.kinds |= _OBJECT
        keys = self.keys
        for name, value in values.items():
            place = keys.get(name)
            if place is None:
                if not self.column.typed:
                    return
                place = keys[name] = self.column.add_shape(self.depth + 1)
            if value is not None:
                place.see(value)

    def arrow_type(self) -> pa.DataType | None:
        """The type that holds all values without loss, None if there is none that Parquet can hold."""
        simple = {0: pa.null, _BOOL: pa.bool_, _TEXT: pa.string, _FLOAT: pa.float64}
        if self.kinds in simple:
            return simple[self.kinds]()
        if self.kinds == _INT:
            return self._integer_type()
        if self.kinds == _INT | _FLOAT:
            return pa.float64() if max(self.high, -self.low) <= _EXACT_IN_DOUBLE else None
        if self.kinds == _LIST and self.items is not None:
            items = self.items.arrow_type()
            return None if items is None else pa.list_(items)
        return self._struct_type() if self.kinds == _OBJECT and self.keys else None

    def _integer_type(self) -> pa.DataType | None:
        if self.low >= -(2**63) and self.high < 2**63:
            return pa.int64()
        return pa.uint64() if self.low >= 0 and self.high < 2**64 else None

    def _struct_type(self) -> pa.DataType | None:
        fields = []
        for name, place in self.keys.items():
            arrow = place.arrow_type()
            if arrow is None:
                return None
            fields.append(pa.field(name, arrow))
        return pa.struct(fields)
