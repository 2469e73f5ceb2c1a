"""Failures for people, and for programs."""

import shlex
from collections.abc import Iterator
from typing import Any

from bulkgen.failing.failed_row import FailedRow
from bulkgen.failing.failures import Failures


def failure_lines(found: Failures, number: int) -> Iterator[str]:
    """What a user wants to know first: how many failed for which reasons, then the first `number` rows."""
    so_far = "" if found.final else f" so far (the run is {found.state})"
    yield f"{found.failed:,} of {found.rows:,} rows failed{so_far}"
    if not found.of:
        if found.failed:
            yield f"none with such a code; there are: {', '.join(found.known_codes)}"
        return
    examples = found.examples()
    width = max(len(code) for code in ("code", *found.of))
    yield ""
    yield f"{'rows':>9}  {'code':<{width}}  for example"
    for code, ordinals in found.of.items():
        yield f"{len(ordinals):>9,}  {code:<{width}}  {_short(examples.get(code, ''))}"
    yield ""
    ordinals = found.ordinals
    for row in found.source.details(ordinals[:number]):
        named = "" if row.id is None else f"  id {_short(str(row.id), 60)}"
        yield f"{_place(row)}{named}  {row.code}: {_short(row.error)}"
    more = len(ordinals) - number
    where = shlex.quote(str(found.run.output))
    if number and more > 0:
        yield f"{more:,} more: -n shows as many as you like"
    yield f"`bulkgen failures {where} --export FILE.jsonl` writes their rows out, to be mended and run again"


def failure_json(found: Failures, number: int) -> dict[str, Any]:
    """The same as JSON-able data."""
    examples = found.examples()
    return {
        "run": str(found.run.path),
        "state": found.state,
        "final": found.final,
        "rows": found.rows,
        "failed": found.failed,
        "codes": [{"code": c, "rows": len(o), "example": examples.get(c)} for c, o in found.of.items()],
        "first": [
            {
                "file": row.file,
                "position": row.position,
                "row": row.ordinal + 1,
                "id": row.id,
                "code": row.code,
                "error": row.error,
            }
            for row in found.source.details(found.ordinals[:number])
        ],
    }


def _place(row: FailedRow) -> str:
    return f"row {row.ordinal + 1:,} of the input" if row.file is None else f"{row.file}:{row.position}"


def _short(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
