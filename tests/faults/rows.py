"""Input rows, good and bad, and the files that hold them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# A dict is a row, bytes are a line of JSON Lines as it stands, which is no row.
Line = dict[str, Any] | bytes

POISON, STUCK = "POISON", "STUCK"
TOO_LONG = "too long " * 160
_WORDS = ("alpha", "béta", "gamma", "δ", "epsilon", "zeta", "日本", "iota", "{{ kappa }}", "lambda\n", "😀")
_BAD_LINES = (b'{"id": "torn", "prom', b"[1, 2]", b'{"id": "\xff", "prompt": "x"}', b"", b"  ", b'{"prompt": NaN}')
_SCHEMA = pa.schema(
    [("id", pa.string()), ("prompt", pa.string()), ("extra", pa.int64()), ("tags", pa.list_(pa.string()))]
)


def make_rows(rng: random.Random, number: int, *, jsonl: bool, ids: bool, budgets: bool, bad: float) -> list[Line]:
    """Rows of which a share is bad in one way or the other, and a few are the same as an earlier one."""
    lines: list[Line] = []
    for i in range(number):
        row = make_row(rng, i, ids=ids, budgets=budgets)
        if rng.random() < bad:
            spoilt = _spoil(rng, row, jsonl)
            lines.append(spoilt)
            continue
        good = [line for line in lines if isinstance(line, dict)]
        if good and rng.random() < 0.06:
            row = dict(rng.choice(good))
        lines.append(row)
    if not any(isinstance(line, dict) and line.get("prompt") for line in lines):
        lines.append(make_row(rng, number, ids=ids, budgets=budgets))
    return lines


def make_row(rng: random.Random, i: int, *, ids: bool, budgets: bool) -> dict[str, Any]:
    """A good row."""
    words = rng.choices(_WORDS, k=rng.choice((1, 3, 8, 20, 60)))
    row: dict[str, Any] = {"id": f"r{i:04d}"} if ids else {}
    row |= {"prompt": f"{i} {' '.join(words)}.", "extra": rng.randrange(-5, 10**12), "tags": rng.choices(_WORDS, k=2)}
    if budgets:
        row["budget"] = rng.choice((None, 1, 2, 5, 9))
    return row


def _spoil(rng: random.Random, row: dict[str, Any], jsonl: bool) -> Line:
    ways: list[Line] = [row | {"prompt": None}, row | {"prompt": ""}, row | {"prompt": " \n"}]
    ways.append(row | {"prompt": TOO_LONG})
    if "budget" in row:
        ways.append(row | {"budget": 0})
    if jsonl:
        ways += [rng.choice(_BAD_LINES), rng.choice(_BAD_LINES), row | {"prompt": 5}]
        ways.append({name: value for name, value in row.items() if name != "prompt"})
    return rng.choice(ways)


def change_rows(rng: random.Random, lines: Sequence[Line], *, ids: bool, budgets: bool) -> tuple[str, list[Line]]:
    """Other rows, as somebody might leave them between two starts; and in a word what was done."""
    new = list(lines)
    good = [i for i, line in enumerate(new) if isinstance(line, dict) and line.get("prompt")]
    what = rng.choice(("appended", "changed", "removed"))
    if what == "appended" or len(good) < 3:
        new += [make_row(rng, 5000 + i, ids=ids, budgets=budgets) for i in range(rng.randint(1, 9))]
        return "rows appended", new
    for i in sorted(rng.sample(good, rng.randint(1, 2)), reverse=True):
        line = new[i]
        assert isinstance(line, dict)
        if what == "changed":
            new[i] = line | {"prompt": f"other {line['prompt']}"}
        else:
            del new[i]
    return f"rows {what}", new


def write_rows(path: Path, lines: Sequence[Line], group_rows: int) -> None:
    """As JSON Lines or as Parquet, by the name."""
    if path.suffix == ".jsonl":
        data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"".join(line + b"\n" for line in data))
        return
    rows = [line for line in lines if isinstance(line, dict)]
    schema = _SCHEMA.append(pa.field("budget", pa.int64()))
    names = [name for name in schema.names if any(name in row for row in rows)]
    table = pa.Table.from_pylist(rows, schema=pa.schema([schema.field(name) for name in names]))
    pq.write_table(table, path, row_group_size=group_rows)
