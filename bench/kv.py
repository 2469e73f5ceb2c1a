"""A backlog that the KV cache limits: how full it is, what is computed twice, and how many steps all takes.

BENCH_KV_ROWS stories of up to BENCH_KV_TOKENS tokens, in 1 GiB of KV cache: bulkgen, and the same engine settings with
all rows handed over at once in the order of the file. `kv_usage` is the mean between ramp-up and tail, as bulkgen's
report has it. `recomputed_share` is of all tokens, and the most that it can be: as if every sequence that was preempted
had been whole and of mean length.
"""

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from bench.peers import Taken, run_bulkgen, run_peer

ROWS = int(os.environ.get("BENCH_KV_ROWS", "300"))
TOKENS = int(os.environ.get("BENCH_KV_TOKENS", "1000"))
_KV_GIB = "1"
_WHO = ["a miller", "two sisters", "an old ferryman", "a clockmaker", "the night watch", "a stray dog", "a young judge"]
_WHERE = ["in a flooded town", "on an island", "behind the station", "under the bridge", "in the last library"]
_WHAT = ["finds a letter", "loses a bet", "hides a lantern", "mends a bell", "waits for rain", "sells a map"]


def measure() -> list[dict[str, Any]]:
    """One line for bulkgen and one for the order of the file."""
    from bulkgen.engine.demo_model import demo_model_folder

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_stories(folder / "in.jsonl")
        ours = run_bulkgen(folder, _KV_GIB)
        settings = {"model": str(demo_model_folder()), "args": ours["chosen"]["args"]}
        env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": _KV_GIB, **ours["chosen"]["env"]}
        theirs = run_peer("chat", folder, settings, env)
    return [
        _line("bulkgen", ours, ours["report"]["kv_usage_mean"]),
        _line("file order", theirs, None),
    ]


def _line(way: str, taken: Taken, kv_usage: float | None) -> dict[str, Any]:
    return {
        "way": way,
        "rows": ROWS,
        "run_s": taken["run_s"],
        "output_tokens": taken["output_tokens"],
        "steps": taken["steps"],
        "preemptions": taken["preemptions"],
        "recomputed_share": taken["preemptions"] / ROWS,
        "kv_usage": kv_usage,
    }


def _write_stories(path: Path) -> None:
    """Rows in the order of a file that grew over time: the shorter kind comes first."""
    luck = random.Random(5)
    with path.open("w") as file:
        for i in range(ROWS):
            story = f"{luck.choice(_WHO)} {luck.choice(_WHERE)} {luck.choice(_WHAT)}"
            kind, max_tokens = ("Tell me", TOKENS) if i > ROWS // 2 else ("Sum up in a few words", TOKENS // 4)
            messages = [{"role": "user", "content": f"{kind} the story in which {story}."}]
            row = {"id": f"row-{i}", "messages": messages, "max_tokens": max_tokens, "temperature": 0.0}
            file.write(json.dumps(row) + "\n")
