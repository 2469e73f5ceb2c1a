"""What driving vLLM costs: the same requests through LLMEngine.step, AsyncLLM and a whole bulkgen run.

Runs of the three alternate; engine start is left out. Prompts are those of jobs/data, repeated with a number in front.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROWS = int(os.environ.get("BENCH_DRIVER_ROWS", "96"))
ROUNDS = int(os.environ.get("BENCH_DRIVER_ROUNDS", "3"))
ROOT = Path(__file__).parent.parent
ARGS = {"enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 256}
ARGS |= {"max_num_batched_tokens": 4096}


def measure() -> list[dict[str, Any]]:
    """Median generation time of each way, and its ratio to LLMEngine.step in the same round."""
    seconds: dict[str, list[float]] = {"LLMEngine.step": [], "AsyncLLM": [], "bulkgen run": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_rows(folder / "in.jsonl")
        for turn in range(ROUNDS):
            seconds["LLMEngine.step"].append(_direct("engine", folder))
            seconds["AsyncLLM"].append(_direct("async", folder))
            seconds["bulkgen run"].append(_bulkgen(folder, turn))
    base = seconds["LLMEngine.step"]
    return [
        {
            "way": way,
            "rows": ROWS,
            "median_s": statistics.median(times),
            "min_s": min(times),
            "max_s": max(times),
            "median_ratio": statistics.median(t / b for t, b in zip(times, base, strict=True)),
        }
        for way, times in seconds.items()
    ]


def _write_rows(path: Path) -> None:
    tickets = [json.loads(line) for line in (ROOT / "jobs/data/tickets.jsonl").read_text().splitlines()]
    with path.open("w") as f:
        for i in range(ROWS):
            row = {"prompt": f"{i}. {tickets[i % len(tickets)]['text']}", "max_tokens": 16 + i * 7 % 48}
            f.write(json.dumps(row) + "\n")


def _direct(way: str, folder: Path) -> float:
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": _cores(), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if way == "async" else "0"}
    command = [sys.executable, "-m", "bench.direct", way, str(folder / "in.jsonl")]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return float(next(x for x in done.stdout.splitlines() if x.startswith("seconds ")).split()[1])


def _bulkgen(folder: Path, turn: int) -> float:
    (folder / "job.yaml").write_text(
        "name: driver\nmodel: demo\ninput: {path: in.jsonl, prompt: prompt}\n"
        "sampling: {temperature: 0, max_tokens: {column: max_tokens}}\n"
        f"output: {{path: out-{turn}.parquet}}\n"
        f"engine: {json.dumps(ARGS | {'env': {'VLLM_CPU_KVCACHE_SPACE': 2}})}\n"
    )
    subprocess.run([sys.executable, "-m", "bulkgen", "run", "-q", str(folder / "job.yaml")], check=True)
    report = pq.read_table(folder / f"out-{turn}.parquet.bulkgen" / "report.parquet").to_pylist()[-1]
    return float(report["generate_s"])


def _cores() -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))
