"""bulkgen beside what people use: the same backlog, model and number format, rounds that alternate.

    ceiling     the engine alone: bulkgen's requests and settings, from memory
    chat        LLM.chat over all rows, vLLM's defaults
    chunks      LLM.chat, 64 rows at a time
    run_batch   vLLM's own batch command, the same rows as an OpenAI batch file
    static      Transformers in static batches of 16, over a few rows (BENCH_STATIC_ROWS)

`run_s` leaves loading the engine out, `wall_s` is the whole command. `vs_ceiling` and `vs_bulkgen` are medians over
rounds of ratios within a round: of seconds a row of `run_s`, or of `wall_s` where a way tells nothing else.
BENCH_PEER_ROWS, BENCH_PEER_ROUNDS and BENCH_PEERS (names, by commas) choose; BENCH_BACKLOG names a file of rows.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from bench.backlog import write_backlog

ROWS = int(os.environ.get("BENCH_PEER_ROWS", "120"))
ROUNDS = int(os.environ.get("BENCH_PEER_ROUNDS", "3"))
STATIC_ROWS = int(os.environ.get("BENCH_STATIC_ROWS", "32"))
WAYS = [way for way in os.environ.get("BENCH_PEERS", "ceiling,chat,chunks,run_batch,static").split(",") if way]
ROOT = Path(__file__).parent.parent
# What a user of the peers must say, and the KV cache of all of them.
_CONTEXT = 4096
_KV_GIB = "2"

Taken = dict[str, Any]


def measure() -> list[dict[str, Any]]:
    """One line a way: medians over the rounds, and the spread of `run_s`."""
    taken: dict[str, list[Taken]] = {way: [] for way in ["bulkgen", *WAYS]}
    for turn in range(ROUNDS):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_backlog(folder / "in.jsonl", ROWS)
            ours = run_bulkgen(folder, _KV_GIB)
            taken["bulkgen"].append(ours)
            # Every other round the other way round, so that no way is always the first after another.
            for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                if way != "static" or turn == 0:
                    taken[way].append(_peer(way, folder, ours))
    return [_line(way, results, taken) for way, results in taken.items()]


def _line(way: str, results: list[Taken], taken: dict[str, list[Taken]]) -> dict[str, Any]:
    times = [r["run_s"] for r in results if r["run_s"] is not None]
    return {
        "way": way,
        "rows": results[0]["rows"],
        "run_s": statistics.median(times) if times else None,
        "min_s": min(times, default=None),
        "max_s": max(times, default=None),
        "wall_s": statistics.median(r["wall_s"] for r in results),
        "output_tokens": results[-1]["output_tokens"],
        "steps": results[-1].get("steps"),
        "preemptions": results[-1].get("preemptions"),
        "hit_tokens": results[-1].get("hit_tokens"),
        "vs_ceiling": _ratio(results, taken.get("ceiling", [])),
        "vs_bulkgen": _ratio(results, taken["bulkgen"]),
    }


def _ratio(results: list[Taken], others: list[Taken]) -> float | None:
    ratios = []
    for one, other in zip(results, others, strict=False):
        key = "wall_s" if one["run_s"] is None else "run_s"
        ratios.append((one[key] / one["rows"]) / (other[key] / other["rows"]))
    return statistics.median(ratios) if ratios else None


def run_bulkgen(folder: Path, kv_gib: str) -> Taken:
    """bulkgen over in.jsonl of a folder, and what it chose for its engine."""
    (folder / "job.yaml").write_text(
        "name: peers\nmodel: demo\ninput: {path: in.jsonl, id: id, messages: messages}\n"
        "sampling: {temperature: 0, max_tokens: {column: max_tokens}}\noutput: {path: out.parquet}\n"
        f"engine: {{env: {{VLLM_CPU_KVCACHE_SPACE: {kv_gib}}}}}\n"
    )
    wall_s, _ = _timed([sys.executable, "-m", "bulkgen", "run", "-q", str(folder / "job.yaml")], {}, (0, 3))
    run = folder / "out.parquet.bulkgen"
    report = pq.read_table(run / "report.parquet").to_pylist()[-1]
    chosen = yaml.safe_load((run / "job.yaml").read_text())["chosen"]["replicas"][0]
    (folder / "plan").symlink_to(run / "plan")
    return {
        "rows": report["done"],
        "run_s": report["generate_s"],
        "wall_s": wall_s,
        "output_tokens": report["output_tokens"],
        "steps": report["steps"],
        "preemptions": report["preemptions"],
        "hit_tokens": report["cached_tokens"],
        "report": report,
        "chosen": chosen,
    }


def _peer(way: str, folder: Path, ours: Taken) -> Taken:
    from bulkgen.engine.demo_model import demo_model_folder

    args = ours["chosen"]["args"]
    # Number format and compilation are no matter of scheduling: all compute as bulkgen chose to.
    plain = {
        "max_model_len": _CONTEXT,
        "enforce_eager": args.get("enforce_eager", False),
        "dtype": args.get("dtype", "auto"),
    }
    settings: Taken = {"model": str(demo_model_folder()), "args": args if way == "ceiling" else plain}
    rows = ROWS
    if way == "static":
        rows = min(rows, STATIC_ROWS)
        lines = (folder / "in.jsonl").read_text().splitlines()
        folder = folder / "static"
        folder.mkdir()
        (folder / "in.jsonl").write_text("\n".join(lines[:rows]) + "\n")
    env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": _KV_GIB}
    if way == "ceiling":
        env |= ours["chosen"]["env"]
    if way == "run_batch":
        return _run_batch(folder, settings["model"], plain, env)
    return {"rows": rows, **run_peer(way, folder, settings, env)}


def run_peer(way: str, folder: Path, settings: Taken, env: dict[str, str]) -> Taken:
    """A way of bench.peer over in.jsonl of a folder."""
    (folder / "settings.json").write_text(json.dumps(settings))
    wall_s, said = _timed([sys.executable, "-m", "bench.peer", way, str(folder)], env)
    told = json.loads(next(x for x in said.splitlines() if x.startswith("peer ")).removeprefix("peer "))
    return {"wall_s": wall_s, **told}


def _run_batch(folder: Path, model: str, args: Taken, env: dict[str, str]) -> Taken:
    rows = [json.loads(line) for line in (folder / "in.jsonl").read_text().splitlines()]
    with (folder / "batch.jsonl").open("w") as file:
        for row in rows:
            body = {"model": model, **{key: row[key] for key in ("messages", "max_tokens", "temperature")}}
            line = {"custom_id": row["id"], "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "--model", model]
    command += ["-i", str(folder / "batch.jsonl"), "-o", str(folder / "batch-out.jsonl")]
    command += ["--max-model-len", str(args["max_model_len"]), "--dtype", str(args["dtype"])]
    command += ["--enforce-eager"] if args["enforce_eager"] else []
    wall_s, _ = _timed(command, env)
    answers = [json.loads(line) for line in (folder / "batch-out.jsonl").read_text().splitlines()]
    tokens = sum(answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers)
    return {"rows": len(rows), "run_s": None, "wall_s": wall_s, "output_tokens": tokens}


def _timed(command: list[str], env: dict[str, str], fine: tuple[int, ...] = (0,)) -> tuple[float, str]:
    began = time.monotonic()
    done = subprocess.run(command, env={**os.environ, **env}, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in fine:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return time.monotonic() - began, done.stdout
