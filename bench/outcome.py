"""What `bulkgen plan` expects beside what comes: five data sets, after one calibration on this machine.

    backlog     mixed, its answers end where the model ends them
    long in     long documents, a short answer
    short in    short prompts, a long answer
    alike       all rows behind the same long prefix
    tail        a few prompts and answers far longer than the others

Answers of all but the first are as long as their budget (`ignore_eos`), as a plan takes them to be. `*_off` are what
came over what was planned, less one; `hits_off` is in points of the prompt tokens. BENCH_OUTCOME_SCALE makes the sets
larger or smaller (1: as they are), BENCH_BACKLOG names a file of rows for the first.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from bench.backlog import write_backlog

SCALE = float(os.environ.get("BENCH_OUTCOME_SCALE", "1"))
ROOT = Path(__file__).parent.parent
_TEXT = "the harbour mill keeps twelve crates of lanterns while letters cross under an old bridge at night"
_WORDS = _TEXT.split()

Row = dict[str, Any]


def measure() -> list[dict[str, Any]]:
    """One line a data set, each planned and run by itself with what one run over other rows has taught."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        learned = folder / "learned"
        write_backlog(folder / "calibration.jsonl", _rows(90))
        _run(folder, "calibration", learned, ends=True)
        write_backlog(folder / "backlog.jsonl", _rows(120))
        made = _made()
        for kind, rows in made.items():
            (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [_one(folder, kind, learned) for kind in ("backlog", *made)]


def _rows(rows: int) -> int:
    return max(8, round(rows * SCALE))


def _made() -> dict[str, Iterator[Row]]:
    luck = random.Random(1)
    prefix = _text(luck, 700)
    return {
        "long in": (_row(i, _text(luck, luck.randint(400, 1200)), 12) for i in range(_rows(60))),
        "short in": (_row(i, _text(luck, luck.randint(5, 25)), 220) for i in range(_rows(80))),
        "alike": (_row(i, f"{prefix} {_text(luck, 20)}", 48) for i in range(_rows(120))),
        "tail": (
            _row(i, _text(luck, min(1500, round(luck.lognormvariate(3.5, 1.2)))), min(600, 8 + _tailed(luck)))
            for i in range(_rows(100))
        ),
    }


def _tailed(luck: random.Random) -> int:
    return round(luck.lognormvariate(3.5, 1.0))


def _row(i: int, prompt: str, max_tokens: int) -> Row:
    return {"id": f"row-{i}", "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}


def _text(luck: random.Random, words: int) -> str:
    return " ".join(luck.choice(_WORDS) for _ in range(words))


def _one(folder: Path, kind: str, learned: Path) -> dict[str, Any]:
    home = folder / f"home {kind}"
    shutil.copytree(learned, home)
    r = _run(folder, kind, home, ends=kind == "backlog")
    prompts = r["prompt_tokens"]
    return {
        "data": kind,
        "rows": r["done"],
        "planned_kv_tokens": r["planned_kv_tokens"],
        "kv_tokens": r["kv_tokens"],
        "kv_off": r["kv_tokens"] / r["planned_kv_tokens"] - 1,
        "planned_s": r["planned_generate_s"],
        "generate_s": r["generate_s"],
        "time_off": r["generate_s"] / r["planned_generate_s"] - 1,
        "planned_hits": r["planned_cached_tokens"],
        "hits": r["cached_tokens"],
        "hits_off": 100 * (r["cached_tokens"] - r["planned_cached_tokens"]) / prompts,
    }


def _run(folder: Path, kind: str, home: Path, *, ends: bool) -> dict[str, Any]:
    job, output = folder / f"{kind}.yaml", folder / f"{kind}.parquet"
    job.write_text(
        f"name: outcome\nmodel: demo\ninput: {{path: {kind}.jsonl, id: id, messages: messages}}\n"
        f"sampling: {{temperature: 0, ignore_eos: {str(not ends).lower()}, max_tokens: {{column: max_tokens}}}}\n"
        f"output: {{path: {output.name}}}\n"
    )
    command = [sys.executable, "-m", "bulkgen", "run", "-q", str(job)]
    env = {**os.environ, "BULKGEN_HOME": str(home)}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    report: dict[str, Any] = pq.read_table(f"{output}.bulkgen/report.parquet").to_pylist()[-1]
    return report
