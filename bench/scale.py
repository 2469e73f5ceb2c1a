"""Everything but the engine, at 10 thousand, 100 thousand and a million rows: how cost grows with the data set.

`BENCH_ROWS=1000000,10000000 python -m bench scale` shows whether memory does.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from bench.process import run

SIZES = [int(n) for n in os.environ.get("BENCH_ROWS", "10000,100000,1000000").split(",")]
TEXT = "a backlog of support tickets that somebody has to read before the next morning comes around again"
WORDS = TEXT.split()


def measure() -> list[dict[str, Any]]:
    """One run of the stub a size and input format, from reading to the finished file."""
    return [_one(size, suffix) for suffix in ("jsonl", "parquet") for size in SIZES]


def _one(rows: int, suffix: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_input(folder / f"in.{suffix}", rows)
        (folder / "job.yaml").write_text(
            f"name: scale\nmodel: stub\ninput: {{path: in.{suffix}, id: id, prompt: prompt}}\n"
            "sampling: {max_tokens: 32}\noutput: {path: out.parquet}\nengine: {kind: stub}\n"
        )
        command = [sys.executable, "-m", "bulkgen", "run", "--quiet", str(folder / "job.yaml")]
        measured = run(command, lambda: _stage(folder / "out.parquet.bulkgen" / "progress.json"))
        output = pq.read_metadata(folder / "out.parquet").num_rows
        if output != rows:
            raise RuntimeError(f"{rows} rows in, {output} rows out")
        report = pq.read_table(folder / "out.parquet.bulkgen" / "report.parquet").to_pylist()[-1]
    return {
        "input": suffix,
        "rows": rows,
        "wall_s": measured.seconds,
        "rows_per_s": rows / measured.seconds,
        "cpu_us_a_row": measured.cpu_s / rows * 1e6,
        "peak_mb": measured.peak_mb,
        "plan_mb": measured.stage_mb.get("planning"),
        "generate_mb": measured.stage_mb.get("generating"),
        "merge_mb": measured.stage_mb.get("merging"),
        "plan_s": report["plan_s"],
        "generate_s": report["generate_s"],
        "merge_s": report["merge_s"],
    }


def _stage(progress: Path) -> str:
    """What the run says it is at; it says so once a second."""
    try:
        return str(json.loads(progress.read_text())["stage"])
    except (OSError, ValueError, KeyError):
        return ""


def _write_input(path: Path, rows: int) -> None:
    if path.suffix == ".jsonl":
        with path.open("w") as f:
            f.writelines(f'{{"id": {i}, "prompt": "{_prompt(i)}"}}\n' for i in range(rows))
        return
    import pyarrow as pa

    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, rows, 100_000):
            ids = range(first, min(first + 100_000, rows))
            writer.write_table(pa.table({"id": ids, "prompt": [_prompt(i) for i in ids]}, schema=schema))


def _prompt(i: int) -> str:
    """Between 10 and 60 words, never the same twice."""
    return f"{i}: " + " ".join(WORDS[(i * 7 + k) % len(WORDS)] for k in range(10 + i * 31 % 51))
