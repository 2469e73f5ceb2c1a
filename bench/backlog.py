"""A mixed backlog as JSON Lines, made up on the spot: what the peers and bulkgen are compared on.

Four tasks in one file, shuffled: short questions, questions behind one long common prefix, long documents with a short
answer, and short prompts with a long answer. Some rows occur twice. `BENCH_BACKLOG` names a file to use instead, with
`id`, `messages`, `max_tokens` and `temperature` in each row.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

_THINGS = ["crates", "barrels", "parcels", "letters", "ledgers", "lanterns", "saddles", "anchors", "bridges", "kettles"]
_PLACES = ["harbour", "mill", "station", "market", "quarry", "orchard", "library", "depot", "island", "workshop"]
_DEEDS = ["counted", "moved", "mended", "painted", "sold", "weighed", "sorted", "lost", "found", "borrowed"]


def write_backlog(path: Path, rows: int) -> None:
    """Write a backlog of `rows` rows, always the same for the same number."""
    if source := os.environ.get("BENCH_BACKLOG"):
        lines = Path(source).read_text().splitlines()[:rows]
        path.write_text("\n".join(lines) + "\n")
        return
    luck = random.Random(rows)
    examples = "\n\n".join(f"Question: {_sum(luck)}\nAnswer: {luck.randint(2, 99)}" for _ in range(24))
    made = [_row(luck, examples) for _ in range(rows)]
    for i in range(rows // 15):
        made[-1 - i] = made[i]
    luck.shuffle(made)
    with path.open("w") as file:
        for i, row in enumerate(made):
            file.write(json.dumps({"id": f"row-{i:05d}", **row, "temperature": 0.0}) + "\n")


def _row(luck: random.Random, examples: str) -> dict[str, Any]:
    kind = luck.random()
    if kind < 0.40:
        return {"messages": [_user(_sum(luck))], "max_tokens": 160}
    if kind < 0.65:
        system = {"role": "system", "content": f"Answer like these examples.\n\n{examples}"}
        return {"messages": [system, _user(f"Question: {_sum(luck)}\nAnswer:")], "max_tokens": 96}
    if kind < 0.87:
        told = " ".join(_tale(luck) for _ in range(luck.randint(20, 90)))
        return {"messages": [_user(f"{told}\n\nIn one sentence:")], "max_tokens": 40}
    return {"messages": [_user(f"Write a story about the {luck.choice(_PLACES)}.")], "max_tokens": 384}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _sum(luck: random.Random) -> str:
    return f"{_tale(luck)} {_tale(luck)} How many {luck.choice(_THINGS)} are there now?"


def _tale(luck: random.Random) -> str:
    number, thing, place = luck.randint(2, 99), luck.choice(_THINGS), luck.choice(_PLACES)
    return (
        f"At the {place} they {luck.choice(_DEEDS)} {number} {thing} and {luck.randint(2, 9)} {luck.choice(_THINGS)}."
    )
