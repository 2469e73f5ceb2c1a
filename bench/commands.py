"""Commands that must feel instant: --help, and a run on a finished job."""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.process import run

RUNS = 5
BULKGEN = [sys.executable, "-m", "bulkgen"]


def measure() -> list[dict[str, Any]]:
    """Median, least and greatest wall time of each command, after one that is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        data = Path(folder) / "in.jsonl"
        data.write_text("".join(f'{{"prompt": "row {i}"}}\n' for i in range(1000)))
        job.write_text(
            "name: done\nmodel: stub\ninput: {path: in.jsonl, prompt: prompt}\n"
            "output: {path: out.parquet}\nengine: {kind: stub}\n"
        )
        commands = {
            "bulkgen --help": [*BULKGEN, "--help"],
            "bulkgen run (finished job, 1,000 rows)": [*BULKGEN, "run", str(job)],
            "bulkgen status": [*BULKGEN, "status", str(Path(folder) / "out.parquet")],
            "bulkgen report": [*BULKGEN, "report", str(Path(folder) / "out.parquet")],
        }
        run(commands["bulkgen run (finished job, 1,000 rows)"])
        return [_measured(name, command) for name, command in commands.items()]


def _measured(name: str, command: list[str]) -> dict[str, Any]:
    run(command)
    seconds = [run(command).seconds for _ in range(RUNS)]
    return {"command": name, "median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
