"""Random input files, each wholly decided by its seed: JSON Lines of any bytes, Parquet of any Arrow types."""

import decimal
import gzip
import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# ---- JSON Lines ----

_TEXTS = (
    *("", "a", "plain text", " lead", "trail ", "\0", "\u2028 \u2029", "\ufeff", "é", "日本語", "😀", "e\u0301"),
    *("{{ x }}", "<|im_start|>", "\\", '"', "\n\r\t", "\x7f\x1b[31m", "\ud7ff\ue000", "\uffff", "x" * 300),
)
_NUMBERS = (
    *("0", "-0", "-0.0", "1", "-1", "1.0", "0.1", "1e5", "1E-7", "123456789.123456789", "1e308", "5e-324", "1e-400"),
    *("9007199254740993", "9223372036854775807", "9223372036854775808", "-9223372036854775808", "18446744073709551615"),
    *("18446744073709551616", "-9223372036854775809", "1" * 60, "9" * 4300),
)
_NOT_JSON = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e999", "01", "1.", ".5", "+1", "0x1", "'a'", "True", "undefined"),
    *("9" * 4301, '"\t"', '"\\x41"', '"\\u12"', "[1,]", '{"a" 1}', '{"a":1,}', "{a:1}", "/**/1", '"', "[", "{", '"a\\'),
)
_HALVES = ('"\\ud800"', '"\\uDC00"', '"\\udbff x"', '"\\ude00\\ud83d"', '{"\\ud912": 1}', '"\\\\\\ud800"')
_WHOLES = ('"\\ud83d\\ude00"', '"\\\\ud800"', '"\\\\\\\\uDC00"', '"\\ud83d\\ude00\\ud83d\\uDE00"')
_BAD_BYTES = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80", b"caf\xe9")
_BLANK = (b"", b" ", b"\t \r", b"\x0c", b"\x0b\x1c", b"\xef\xbb\xbf", b"\xef\xbb\xbf ")
_OUTER = (b" ", b"\t", b"\xef\xbb\xbf", b"\xef\xbb\xbf\xef\xbb\xbf", b"\x0c", b"\xc2\xa0", b"\0")


def jsonl_files(rng: random.Random) -> dict[str, tuple[bytes, bytes]]:
    """Some files by name: what was meant, and the bytes of the file, which may be compressed and damaged."""
    keys = rng.sample(["id", "prompt", "a", "b", "é", "", "a.b", "row", "x" * 70, "\n"], rng.randint(1, 6))
    wild = rng.choice((0.0, 0.1, 0.5))
    files = {}
    for number in range(rng.choice((1, 1, 1, 2, 3))):
        plain = _jsonl_bytes(rng, keys, wild)
        kind = rng.choice(("", "", ".gz", ".zst"))
        packed = plain if not kind else _packed(rng, plain, kind)
        if kind and rng.random() < 0.5:
            packed = _damaged(rng, packed)
        files[f"part-{number}.jsonl{kind}"] = plain, packed
    return files


def _jsonl_bytes(rng: random.Random, keys: list[str], wild: float) -> bytes:
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(3000))
    shapes = {key: rng.choice(_SHAPES) for key in keys}
    number = rng.choice((0, 1, 2, 5, 20, 40)) if rng.random() < 0.97 else rng.choice((1023, 1024, 1025, 2100))
    lines = [_line(rng, keys, shapes, wild) for _ in range(number)]
    end = rng.choice((b"\n", b"\n", b"\r\n"))
    content = end.join(lines) + (end if lines and rng.random() < 0.8 else b"")
    start = rng.choices((b"", b"\xef\xbb\xbf", b"\n\n", b"\xff\xfe", b"\xfe\xff"), (80, 10, 8, 1, 1))[0]
    if rng.random() < 0.01:
        content = content.decode(errors="replace").encode("utf-16")
    return start + content


def _line(rng: random.Random, keys: list[str], shapes: dict[str, Callable[..., str]], wild: float) -> bytes:
    pairs = [(key, shapes[key](rng, 0)) for key in keys if rng.random() < 0.85]
    if rng.random() < wild:
        pairs += [(rng.choice([*keys, "late"]), _any_value(rng, 0)) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.1:
        rng.shuffle(pairs)
    space = rng.choice(("", "", " "))
    text = "{" + ("," + space).join(json.dumps(key) + ":" + space + value for key, value in pairs) + "}"
    line = text.encode()
    return _spoilt(rng, line) if rng.random() < wild else line


def _spoilt(rng: random.Random, line: bytes) -> bytes:
    place = rng.randrange(len(line) + 1)
    ways: list[Callable[[], bytes]] = [
        lambda: line[:place],
        lambda: line[:place] + line[place + 1 :],
        lambda: line[:place] + rng.randbytes(1).replace(b"\n", b"x") + line[place:],
        lambda: line[:place] + rng.choice(_BAD_BYTES) + line[place:],
        lambda: line + line,
        lambda: line + rng.choice((b",", b"]", b" // more", b"\0", b"x")),
        lambda: rng.choice(_OUTER) + line,
        lambda: line + rng.choice(_OUTER),
        lambda: rng.choice(_BLANK),
        lambda: rng.choice((*_NOT_JSON, *_HALVES, *_WHOLES, *_NUMBERS, "null", "[]", '"text"', "true")).encode(),
        lambda: f'{{"a": {rng.choice((*_NOT_JSON, *_HALVES, *_WHOLES))}}}'.encode(),
        lambda: b'{"a": ' + _nested(rng) + b"}",
        lambda: line.decode().encode("utf-16-le").replace(b"\n", b""),
        lambda: line.decode().encode("latin-1", "ignore"),
    ]
    return rng.choice(ways)()


def _nested(rng: random.Random) -> bytes:
    depth = rng.choice((31, 32, 33, 100, 498, 499, 500, 501, 600, 5000, 100_000))
    if rng.random() < 0.5:
        return b"[" * depth + b"]" * depth
    return b'{"a":' * depth + b"1" + b"}" * depth


def _text(rng: random.Random, depth: int) -> str:
    if rng.random() < 0.05:
        return rng.choice(_WHOLES)
    text = rng.choice(_TEXTS) if rng.random() < 0.5 else "".join(rng.choices(string.printable, k=rng.randrange(20)))
    return json.dumps(text, ensure_ascii=rng.random() < 0.5)


def _number(rng: random.Random, depth: int) -> str:
    return rng.choice(_NUMBERS)


def _small(rng: random.Random, depth: int) -> str:
    return str(rng.randrange(-(10**6), 10**6))


def _float(rng: random.Random, depth: int) -> str:
    return repr(rng.uniform(-1e6, 1e6))


def _constant(rng: random.Random, depth: int) -> str:
    return rng.choice(("true", "false", "null"))


def _null(rng: random.Random, depth: int) -> str:
    return "null"


def _list(rng: random.Random, depth: int) -> str:
    shape = rng.choice(_SHAPES if depth < 3 else _PLAIN)
    return "[" + ",".join(shape(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 4)))) + "]"


def _object(rng: random.Random, depth: int) -> str:
    names = rng.choices(("role", "content", "k", "é", ""), k=rng.choice((0, 1, 2, 3)))
    return "{" + ",".join(f"{json.dumps(name)}:{_any_value(rng, depth + 1)}" for name in names) + "}"


def _messages(rng: random.Random, depth: int) -> str:
    return json.dumps([{"role": "user", "content": rng.choice(_TEXTS)} for _ in range(rng.randrange(3))])


def _any_value(rng: random.Random, depth: int) -> str:
    return rng.choice(_SHAPES if depth < 3 else _PLAIN)(rng, depth)


_PLAIN: tuple[Callable[[random.Random, int], str], ...] = (_text, _small, _float, _constant, _null, _number)
_SHAPES = (*_PLAIN, _text, _list, _object, _messages)


def _packed(rng: random.Random, plain: bytes, kind: str) -> bytes:
    """In one member or frame, or in several."""
    cuts = sorted(rng.sample(range(len(plain) + 1), min(len(plain), rng.choice((0, 0, 1, 3)))))
    pieces = [plain[a:b] for a, b in zip([0, *cuts], [*cuts, len(plain)], strict=True)]
    if kind == ".gz":
        return b"".join(gzip.compress(piece, rng.choice((0, 1, 9)), mtime=0) for piece in pieces)
    return b"".join(pa.compress(piece, "zstd", asbytes=True) for piece in pieces)


def _damaged(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    a, b = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
    ways: list[Callable[[], bytes]] = [
        lambda: data[:a],
        lambda: data[:-1],
        lambda: data[: -rng.randint(1, min(len(data), 30))],
        lambda: data[:a] + bytes([data[a] ^ (1 << rng.randrange(8))]) + data[a + 1 :],
        lambda: data[:a] + rng.randbytes(1) + data[a + 1 :],
        lambda: data[:a] + bytes(b - a) + data[b:],
        lambda: data[:a] + rng.randbytes(min(b - a, 64)) + data[b:],
        lambda: data + rng.randbytes(rng.randint(1, 40)),
        lambda: data[:a] + data[b:],
        lambda: b"",
    ]
    return rng.choice(ways)()


# ---- Parquet ----

_ZONES = ("UTC", "Europe/Berlin", "+05:30", "-11:00", "America/St_Johns")
_CODECS = ("none", "snappy", "gzip", "zstd", "lz4", "brotli")


def parquet_tables(rng: random.Random) -> list[pa.Table]:
    """One table, or some whose columns are alike, more or less."""
    fields = [_field(rng, name) for name in _names(rng)]
    tables: list[pa.Table] = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rows = rng.choice((0, 1, 3, 10, 40)) if rng.random() < 0.97 else rng.choice((1024, 1025, 9000))
        mine = [field for field in fields if rng.random() < 0.95]
        if tables and rng.random() < 0.3 and mine:
            i = rng.randrange(len(mine))
            mine[i] = _field(rng, mine[i].name)
        columns = [_column(rng, field, rows) for field in mine]
        tables.append(pa.table([array for _, array in columns], schema=pa.schema([field for field, _ in columns])))
    return tables


def _names(rng: random.Random) -> list[str]:
    names = ["id", "prompt", "a.b", "a", "é 日本", "x" * 200, " ", "list.element", "row", "\n", "__index_level_0__", ""]
    return rng.sample(names, rng.choice((1, 2, 4, 8)))


def _field(rng: random.Random, name: str) -> pa.Field:
    metadata = {b"k": b"v \xff"} if rng.random() < 0.1 else None
    arrow = _arrow_type(rng, 0)
    return pa.field(name, arrow, nullable=pa.types.is_null(arrow) or rng.random() < 0.9, metadata=metadata)


def _arrow_type(rng: random.Random, depth: int) -> pa.DataType:
    if depth < 3 and rng.random() < 0.35:
        return rng.choice(_NESTED)(rng, depth + 1)
    return rng.choice(_LEAVES)(rng)


_LEAVES: tuple[Callable[[random.Random], pa.DataType], ...] = (
    lambda rng: pa.null(),
    lambda rng: pa.bool_(),
    lambda rng: rng.choice((pa.int8, pa.int16, pa.int32, pa.int64))(),
    lambda rng: rng.choice((pa.uint8, pa.uint16, pa.uint32, pa.uint64))(),
    lambda rng: rng.choice((pa.float16, pa.float32, pa.float64))(),
    lambda rng: rng.choice((pa.string, pa.large_string, pa.string_view))(),
    lambda rng: rng.choice((pa.string, pa.large_string, pa.string_view))(),
    lambda rng: rng.choice((pa.binary, pa.large_binary, pa.binary_view))(),
    lambda rng: pa.binary(rng.choice((1, 2, 16))),
    lambda rng: pa.decimal128(38, rng.choice((0, 2, 38))),
    lambda rng: pa.decimal256(rng.choice((50, 76)), rng.choice((0, 5))),
    lambda rng: pa.decimal32(9, 2) if rng.random() < 0.5 else pa.decimal64(18, 4),
    lambda rng: rng.choice((pa.date32, pa.date64))(),
    lambda rng: pa.time32(rng.choice(("s", "ms"))) if rng.random() < 0.5 else pa.time64(rng.choice(("us", "ns"))),
    lambda rng: pa.timestamp(rng.choice(("s", "ms", "us", "ns"))),
    lambda rng: pa.timestamp(rng.choice(("s", "ms", "us", "ns")), rng.choice(_ZONES)),
    lambda rng: pa.duration(rng.choice(("s", "ms", "us", "ns"))),
    lambda rng: pa.dictionary(
        rng.choice((pa.int8, pa.int32, pa.uint16))(), rng.choice((pa.string, pa.large_string, pa.binary, pa.int64))()
    ),
    lambda rng: rng.choice((pa.uuid(), pa.json_())),
)

_NESTED: tuple[Callable[[random.Random, int], pa.DataType], ...] = (
    lambda rng, depth: pa.list_(pa.field(rng.choice(("item", "element", "x")), _arrow_type(rng, depth))),
    lambda rng, depth: pa.large_list(_arrow_type(rng, depth)),
    lambda rng, depth: pa.list_(_sliceable(_arrow_type(rng, depth)), rng.choice((1, 3))),
    lambda rng, depth: pa.list_view(_arrow_type(rng, depth)),
    lambda rng, depth: pa.struct(
        [_inner(rng, name, depth) for name in rng.sample(("a", "b", "content", "é", "a.b"), rng.choice((1, 2, 3)))]
    ),
    lambda rng, depth: pa.map_(pa.string(), _arrow_type(rng, depth)),
)


def _sliceable(arrow: pa.DataType) -> pa.DataType:
    """pyarrow's writer ends the process (26.0) where it slices views of lists inside of lists of one size."""
    return pa.int64() if "list_view" in str(arrow) else arrow


def _inner(rng: random.Random, name: str, depth: int) -> pa.Field:
    arrow = _arrow_type(rng, depth)
    return pa.field(name, arrow, nullable=pa.types.is_null(arrow) or rng.random() < 0.8)


def _column(rng: random.Random, field: pa.Field, rows: int) -> tuple[pa.Field, pa.Array]:
    """Values for a column, which has another type where pyarrow does not make such ones."""
    nulls = 0.0 if not field.nullable else rng.choice((0.0, 0.1, 0.5, 1.0))
    try:
        array = _array(rng, field.type, rows, nulls)
        array.validate()
    except (pa.ArrowException, ValueError):
        field = field.with_type(pa.int64())
        array = _array(rng, field.type, rows, nulls)
    return field, array


def _array(rng: random.Random, arrow: pa.DataType, rows: int, nulls: float) -> pa.Array:
    """Random values of a type. Numbers, dates and the like are any bits that the type has."""
    types = pa.types
    if types.is_null(arrow):
        return pa.nulls(rows)
    if isinstance(arrow, pa.BaseExtensionType):
        storage = [b'{"a": 1}'.decode() if arrow == pa.json_() else rng.randbytes(16) for _ in range(rows)]
        plain = pa.array([None if rng.random() < nulls else value for value in storage], arrow.storage_type)
        return pa.ExtensionArray.from_storage(arrow, plain)
    if types.is_struct(arrow):
        children = [_array(rng, f.type, rows, nulls if f.nullable else 0.0) for f in arrow]
        return pa.StructArray.from_arrays(children, fields=list(arrow), mask=_mask(rng, rows, nulls))
    if types.is_nested(arrow):
        return _list_array(rng, arrow, rows, nulls)
    if types.is_dictionary(arrow):
        words = _array(rng, arrow.value_type, rng.randint(1, 5), 0.0)
        picks = [None if rng.random() < nulls else rng.randrange(len(words)) for _ in range(rows)]
        return pa.DictionaryArray.from_arrays(pa.array(picks, arrow.index_type), words)
    values = [None if rng.random() < nulls else _value(rng, arrow) for _ in range(rows)]
    if types.is_string(arrow) and rng.random() < 0.05:
        raw = [None if v is None else rng.choice((v.encode(), b"caf\xe9")) for v in values]
        return pa.array(raw, pa.binary()).view(pa.string())
    return _of_bits(values, arrow)


def _mask(rng: random.Random, rows: int, nulls: float) -> pa.Array:
    return pa.array([rng.random() < nulls for _ in range(rows)], pa.bool_())


def _list_array(rng: random.Random, arrow: pa.DataType, rows: int, nulls: float) -> pa.Array:
    mask = _mask(rng, rows, nulls)
    if pa.types.is_fixed_size_list(arrow):
        return pa.FixedSizeListArray.from_arrays(
            _array(rng, arrow.value_type, rows * arrow.list_size, nulls), type=arrow, mask=mask
        )
    sizes = [0 if gone.as_py() else rng.choice((0, 1, 2, 5)) for gone in mask]
    offsets = [sum(sizes[:i]) for i in range(rows + 1)] if rows < 100 else _sums(sizes)
    if pa.types.is_map(arrow):
        keys = pa.array([f"k{i}" for i in range(offsets[-1])])
        items = _array(rng, arrow.item_type, offsets[-1], nulls)
        flat = pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, items)
        return (
            pa.array(
                [None if gone.as_py() else pairs for gone, pairs in zip(mask, flat.to_pylist(), strict=True)], arrow
            )
            if nulls and _plain(arrow.item_type)
            else flat.cast(arrow)
        )
    values = _array(rng, arrow.value_type, offsets[-1], nulls)
    if pa.types.is_list_view(arrow):
        return pa.ListViewArray.from_arrays(
            pa.array(offsets[:-1], pa.int32()), pa.array(sizes, pa.int32()), values, type=arrow, mask=mask
        )
    kind, index = (pa.LargeListArray, pa.int64()) if pa.types.is_large_list(arrow) else (pa.ListArray, pa.int32())
    return kind.from_arrays(pa.array(offsets, index), values, type=arrow, mask=mask)


def _plain(arrow: pa.DataType) -> bool:
    return bool(pa.types.is_string(arrow) or pa.types.is_integer(arrow) or pa.types.is_boolean(arrow))


def _sums(sizes: list[int]) -> list[int]:
    total, sums = 0, [0]
    for size in sizes:
        total += size
        sums.append(total)
    return sums


def _of_bits(values: list[Any], arrow: pa.DataType) -> pa.Array:
    """Numbers as the type's own bits, where Python's values of it do not reach as far."""
    types = pa.types
    if types.is_date32(arrow) or types.is_time32(arrow):
        return pa.array(values, pa.int32()).view(arrow)
    if types.is_date64(arrow) or types.is_time64(arrow) or types.is_timestamp(arrow) or types.is_duration(arrow):
        return pa.array(values, pa.int64()).view(arrow)
    return pa.array(values, arrow)


def _value(rng: random.Random, arrow: pa.DataType) -> Any:
    types = pa.types
    if types.is_boolean(arrow):
        return rng.random() < 0.5
    if types.is_integer(arrow):
        signed = types.is_signed_integer(arrow)
        low, high = (
            (-(2 ** (arrow.bit_width - 1)), 2 ** (arrow.bit_width - 1) - 1) if signed else (0, 2**arrow.bit_width - 1)
        )
        return rng.choice((low, high, 0, rng.randint(low, high)))
    if types.is_floating(arrow):
        return float(rng.choice((0.5, -0.0, 1024.0, float("inf"), rng.randrange(-1000, 1000) / 8)))
    if types.is_decimal(arrow):
        return _decimal(rng, arrow)
    if types.is_date(arrow):
        day = rng.choice((0, rng.randrange(-700_000, 2_900_000), rng.randrange(-(10**8), 10**8)))
        return day if types.is_date32(arrow) else 86_400_000 * day
    if types.is_time(arrow):
        return rng.randrange(86_400 * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[arrow.unit])
    if types.is_timestamp(arrow) or types.is_duration(arrow):
        return _moment(rng, {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[arrow.unit])
    if types.is_fixed_size_binary(arrow):
        return rng.randbytes(arrow.byte_width)
    text = rng.choice(_TEXTS)
    return text if "string" in str(arrow) else rng.choice((text.encode(), rng.randbytes(rng.randrange(20))))


def _moment(rng: random.Random, per_s: int) -> int:
    near = rng.randrange(-(10**9), 4 * 10**9) * per_s
    far = rng.randrange(-(2**63), 2**63) // (1000 if per_s == 1 else 1)
    return rng.choice((0, near, near + 1, far if rng.random() < 0.1 else near))


def _decimal(rng: random.Random, arrow: pa.DataType) -> Any:
    digits = rng.choice((1, arrow.precision // 2, arrow.precision))
    number = rng.randrange(10**digits) * rng.choice((1, -1))
    with decimal.localcontext() as context:
        context.prec = 100
        return decimal.Decimal(number).scaleb(-arrow.scale)


def write_parquet(rng: random.Random, table: pa.Table, path: Path) -> pa.Table:
    """Write a table in one of many ways, without the columns that Parquet cannot have; returns what was written."""
    settings = {
        "compression": rng.choice(_CODECS),
        "use_dictionary": rng.random() < 0.5,
        "data_page_version": rng.choice(("1.0", "2.0")),
        "version": rng.choice(("1.0", "2.4", "2.6")),
        "store_schema": rng.random() < 0.8,
        "write_page_checksum": rng.random() < 0.5,
        "write_statistics": rng.random() < 0.8,
        "use_compliant_nested_type": rng.random() < 0.5,
        "data_page_size": rng.choice((64, 1 << 20)),
        "row_group_size": rng.choice((1, 3, 7, 1000, 1 << 20)) if table.num_rows < 100 else 2000,
        "allow_truncated_timestamps": True,
    }
    for name in table.column_names:
        if not _is_writable(table.select([name]), settings):
            table = table.drop_columns([name])
    pq.write_table(table, path, **settings)
    return table


def _is_writable(table: pa.Table, settings: dict[str, Any]) -> bool:
    """Whether pyarrow writes and reads a table at all; there are types that it writes and cannot read."""
    stream = pa.BufferOutputStream()
    try:
        table.validate()
        pq.write_table(table, stream, **settings)
        back = pq.ParquetFile(pa.BufferReader(stream.getvalue())).read()
        back.validate()
        return bool(back.num_rows == table.num_rows and back.column(0).null_count == table.column(0).null_count)
    except (pa.ArrowException, OSError):
        return False


def damage(rng: random.Random, path: Path) -> None:
    """Change some bytes of a file, often in its footer."""
    data = path.read_bytes()
    if rng.random() < 0.5:
        path.write_bytes(_damaged(rng, data))
        return
    size = int.from_bytes(data[-8:-4], "little")
    for _ in range(rng.choice((1, 1, 3))):
        place = rng.randrange(max(0, len(data) - 8 - size), len(data))
        data = data[:place] + rng.randbytes(1) + data[place + 1 :]
    path.write_bytes(data)
