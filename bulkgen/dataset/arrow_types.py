"""One schema for files whose schemas differ: which types may meet in a column, and which type holds both.

Only steps that lose nothing are taken; where there is none, the files clash, and the user decides.
"""

from collections.abc import Iterable

import pyarrow as pa
from pyarrow import types

from bulkgen.errors import InputError

_UNITS = ("s", "ms", "us")  # a nanosecond column cannot hold all dates of these
_SIGNED = {8: pa.int8, 16: pa.int16, 32: pa.int32, 64: pa.int64}
_UNSIGNED = {8: pa.uint8, 16: pa.uint16, 32: pa.uint32, 64: pa.uint64}
_BITS_EXACT_IN_DOUBLE = 32
_DIGITS_128, _DIGITS_256 = 38, 76


def merge_schemas(schemas: Iterable[tuple[str, pa.Schema]]) -> pa.Schema:
    """The columns of all files, by name, in the order in which they first appear.

    A column that a file lacks is null there. Metadata of columns is kept, that of whole files is not, since
    it describes them and not the output. Takes pairs of file name and schema. Raises InputError when a column
    has types that no one type can hold.
    """
    fields: dict[str, pa.Field] = {}
    origin: dict[str, str] = {}  # the file that gave a column its type
    counts: dict[str, int] = {}
    files = 0
    for file, schema in schemas:
        files += 1
        for field in schema:
            counts[field.name] = counts.get(field.name, 0) + 1
            known = fields.setdefault(field.name, field)
            if known is field or known.equals(field):
                origin.setdefault(field.name, file)
                continue
            merged = merge_types(known.type, field.type)
            if merged is None:
                raise InputError(
                    f"{file}: column {field.name!r} is {field.type}, in {origin[field.name]} it is "
                    f"{known.type}; rewrite one of the files so that they agree"
                )
            if not merged.equals(known.type):
                origin[field.name] = file
            fields[field.name] = known.with_type(merged).with_nullable(known.nullable or field.nullable)
    return pa.schema([field if counts[name] == files else optional(field) for name, field in fields.items()])


def optional(field: pa.Field) -> pa.Field:
    """A field whose column may be filled with nulls: what is in records then is null as well."""
    arrow = field.type
    if types.is_struct(arrow):
        arrow = pa.struct([optional(inner) for inner in arrow])
    elif types.is_fixed_size_list(arrow):
        arrow = pa.list_(optional(arrow.value_field), arrow.list_size)
    return field.with_type(arrow).with_nullable(True)


def merge_types(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both without loss, None if there is none.

    A dictionary meeting anything but its like gives its values' type; text meeting bytes gives bytes.
    """
    if a.equals(b) or types.is_null(b):
        return a
    if types.is_null(a):
        return b
    if types.is_dictionary(a) or types.is_dictionary(b):
        merged = merge_types(*(t.value_type if types.is_dictionary(t) else t for t in (a, b)))
    else:
        rules = (_merge_numbers, _merge_decimals, _merge_text, _merge_times, _merge_lists, _merge_structs)
        merged = next((found for rule in rules if (found := rule(a, b)) is not None), None)
    return merged if merged is not None and _casts(a, merged) and _casts(b, merged) else None


def _casts(source: pa.DataType, target: pa.DataType) -> bool:
    try:
        pa.nulls(0, source).cast(target)
    except pa.ArrowException:
        return False
    return True


def _merge_numbers(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if types.is_integer(a) and types.is_integer(b):
        signs = types.is_signed_integer(a), types.is_signed_integer(b)
        if signs[0] == signs[1]:
            return (_SIGNED if signs[0] else _UNSIGNED)[max(a.bit_width, b.bit_width)]()
        signed, unsigned = (a, b) if signs[0] else (b, a)
        wide = _SIGNED.get(max(signed.bit_width, 2 * unsigned.bit_width))
        return None if wide is None else wide()
    if types.is_floating(a) and types.is_floating(b):
        return a if a.bit_width > b.bit_width else b
    if types.is_floating(a) or types.is_floating(b):
        number = b if types.is_floating(a) else a
        if types.is_integer(number) and number.bit_width <= _BITS_EXACT_IN_DOUBLE:
            return pa.float64()
    return None


def _merge_decimals(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if not (types.is_decimal(a) and types.is_decimal(b)):
        return None
    scale = max(a.scale, b.scale)
    digits = max(a.precision - a.scale, b.precision - b.scale) + scale
    if digits <= _DIGITS_128 and max(a.bit_width, b.bit_width) <= 128:
        return pa.decimal128(digits, scale)
    return pa.decimal256(digits, scale) if digits <= _DIGITS_256 else None


def _merge_text(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if not all(_is_text(t) or _is_bytes(t) for t in (a, b)):
        return None
    large = any(types.is_large_string(t) or types.is_large_binary(t) for t in (a, b))
    if _is_text(a) and _is_text(b):
        return pa.large_string() if large else pa.string()
    return pa.large_binary() if large else pa.binary()


def _is_text(t: pa.DataType) -> bool:
    return bool(types.is_string(t) or types.is_large_string(t) or types.is_string_view(t))


def _is_bytes(t: pa.DataType) -> bool:
    return bool(
        types.is_binary(t) or types.is_large_binary(t) or types.is_binary_view(t) or types.is_fixed_size_binary(t)
    )


def _merge_times(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    stamps = types.is_timestamp(a) and types.is_timestamp(b) and a.tz == b.tz
    spans = types.is_duration(a) and types.is_duration(b)
    if not (stamps or spans) or a.unit not in _UNITS or b.unit not in _UNITS:
        return None
    return max(a, b, key=lambda t: _UNITS.index(t.unit))


def _merge_lists(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if not (_is_list(a) and _is_list(b)):
        return None
    items = _merge_fields(a.value_field, b.value_field)
    if items is None:
        return None
    large = types.is_large_list(a) or types.is_large_list(b)
    return pa.large_list(items) if large else pa.list_(items)


def _is_list(t: pa.DataType) -> bool:
    return bool(types.is_list(t) or types.is_large_list(t) or types.is_fixed_size_list(t))


def _merge_structs(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if not (types.is_struct(a) and types.is_struct(b)):
        return None
    fields = {field.name: field for field in a}
    for field in b:
        known = fields.get(field.name)
        merged = optional(field) if known is None else _merge_fields(known, field)
        if merged is None:
            return None
        fields[field.name] = merged
    in_b = {field.name for field in b}
    return pa.struct([f if f.name in in_b else optional(f) for f in fields.values()])


def _merge_fields(a: pa.Field, b: pa.Field) -> pa.Field | None:
    merged = merge_types(a.type, b.type)
    return None if merged is None else a.with_type(merged).with_nullable(a.nullable or b.nullable)
