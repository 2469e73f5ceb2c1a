"""What must come out, computed from the rows and the job alone: the plain reference.

It knows the job's rules and the stub's arithmetic by their documentation, and shares no code with bulkgen.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.faults.rows import POISON, STUCK, Line


@dataclass(frozen=True)
class Rules:
    """What of a job decides about its rows."""

    jsonl: bool
    max_tokens: int
    budgets: bool
    max_model_len: int
    kv_tokens: int
    seed: int
    fail_rate: float


@dataclass(frozen=True)
class Expected:
    """One output row: the input's columns, where it stands, and what becomes of it."""

    columns: dict[str, Any]
    position: int
    code: str | None
    text: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None

    @property
    def status(self) -> str:
        return "done" if self.code is None else "failed"


def expected_rows(lines: Sequence[Line], rules: Rules) -> list[Expected]:
    """The output, row for row, in input order."""
    names = list(dict.fromkeys(name for line in lines if isinstance(line, dict) for name in line))
    mixed = any(type(line.get("prompt")) is int for line in lines if isinstance(line, dict))
    rows = []
    for position, line in enumerate(lines, 1):
        if isinstance(line, bytes):
            if line.strip():
                rows.append(Expected(dict.fromkeys(names), position, _code_of(line)))
            continue
        columns = {name: line.get(name) for name in names}
        if mixed and columns["prompt"] is not None:
            columns["prompt"] = json.dumps(columns["prompt"], ensure_ascii=False)
        rows.append(Expected(columns, position, **_answer(line, rules)))
    return rows


def _code_of(line: bytes) -> str:
    if b"\xff" in line:
        return "bad_utf8"
    return "not_an_object" if line.startswith(b"[") else "bad_json"


def _answer(row: dict[str, Any], rules: Rules) -> dict[str, Any]:
    prompt = row.get("prompt")
    budget = row.get("budget") if rules.budgets else None
    if budget is not None and budget < 1:
        return {"code": "bad_sampling"}
    if prompt is None:
        return {"code": "null_prompt" if "prompt" in row else "missing_column"}
    if not isinstance(prompt, str):
        return {"code": "not_text"}
    if not prompt.strip():
        return {"code": "empty_prompt"}
    # A token is three bytes; the stub's dice are the checksum of the tokens as 32-bit integers.
    raw = prompt.encode()
    tokens = [raw[i : i + 3].ljust(3, b"\0") + b"\0" for i in range(0, len(raw), 3)]
    room = rules.max_model_len - len(tokens)
    if room < 1:
        return {"code": "prompt_too_long", "prompt_tokens": len(tokens)}
    most = min(budget or rules.max_tokens, room)
    if -(-(len(tokens) + most) // 16) > rules.kv_tokens // 16:
        return {"code": "larger_than_kv_cache"}
    dice = [zlib.crc32(b"".join(tokens), rules.seed * 2 + salt) / 2**32 for salt in (0, 1)]
    if dice[1] < rules.fail_rate:
        return {"code": "refused_by_engine"}
    if POISON in prompt:
        return {"code": "poison"}
    if STUCK in prompt:
        return {"code": "row_timeout"}
    length = 1 + int(dice[0] * most)
    return {
        "code": None,
        "text": f"echo:{prompt}",
        "prompt_tokens": len(tokens),
        "output_tokens": length,
        "finish_reason": "stop" if length < most else "length",
    }
