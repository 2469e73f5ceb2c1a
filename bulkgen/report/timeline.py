"""The timeline: what each replica's engine looked like about once a second. Reads the log, derives rates."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from bulkgen.errors import OutputError
from bulkgen.report.history import COUNTERS
from bulkgen.report.model import KvUsage

_INTEGERS = (
    "start",
    "replica",
    "incarnation",
    "running",
    "waiting",
    "preemptions",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "done",
    "failed",
)
# Not in what earlier versions wrote.
_LATER = {"steps": 0, "step_s": 0.0, "held_s": 0.0}
ENGINE = ("start", "replica", "incarnation")

_SINCE = "since this engine's sample before; null in its first, and where the clock was set back"

COLUMN_DOCS = {
    "time": "unix time of the sample",
    "t_s": "seconds since the beginning of its start; null where the clock was set back before it",
    "start": "number of the start",
    "replica": "number of the replica",
    "incarnation": "engines that this replica had before in this start",
    "running": "requests in the engine's running batch",
    "waiting": "requests waiting in the engine",
    "kv_usage": "share of the KV cache in use (0..1)",
    "preemptions": "preemptions since the engine was opened",
    "prompt_tokens": "prompt tokens since the engine was opened, cached ones included",
    "cached_tokens": "cached prompt tokens since the engine was opened",
    "output_tokens": "output tokens since the engine was opened",
    "steps": "engine steps since the engine was opened",
    "step_s": "seconds in these steps",
    "held_s": "seconds for which the engine held requests",
    "done": "rows done since the engine was opened",
    "failed": "rows failed since the engine was opened",
    "prompt_tokens_per_s": f"prompt tokens per second {_SINCE}",
    "output_tokens_per_s": f"output tokens per second {_SINCE}",
}


def load_timeline(log: Path, began_at: Mapping[int, float]) -> pl.DataFrame:
    """The samples of timeline.jsonl, by start and replica, in their order, with the columns of COLUMN_DOCS.

    Lines that are no whole sample are left out: a kill can tear the last line of its start. `began_at` gives
    the beginning of each start.
    """
    columns: dict[str, list[Any]] = {name: [] for name in ("time", "kv_usage", *_INTEGERS, *_LATER)}
    try:
        with log.open("rb") as lines:
            for line in lines:
                _take(line, columns)
    except FileNotFoundError:
        pass
    except OSError as e:
        raise OutputError(f"{log}: cannot read the timeline ({e.strerror or e})") from e
    schema = {"time": pl.Float64, "kv_usage": pl.Float64, **dict.fromkeys(_INTEGERS, pl.Int64)}
    schema |= {"steps": pl.Int64, "step_s": pl.Float64, "held_s": pl.Float64}
    frame = pl.DataFrame(columns, schema=schema).sort(*ENGINE, maintain_order=True)
    span = pl.col("time").diff().over(ENGINE)
    rates = [
        pl.when(span > 0).then(pl.col(name).diff().over(ENGINE) / span).alias(f"{name}_per_s")
        for name in ("prompt_tokens", "output_tokens")
    ]
    began = pl.col("start").replace_strict(dict(began_at), default=None, return_dtype=pl.Float64)
    since = pl.when(pl.col("time") >= began).then(pl.col("time") - began).alias("t_s")
    return frame.with_columns(since, *rates).select(*COLUMN_DOCS)


def _take(line: bytes, columns: dict[str, list[Any]]) -> None:
    try:
        sample = json.loads(line)
        values = [
            float(sample["time"]),
            float(sample["kv_usage"]),
            *(int(sample[name]) for name in _INTEGERS),
            *(type(nothing)(sample.get(name, nothing)) for name, nothing in _LATER.items()),
        ]
    except (ValueError, KeyError, TypeError):
        return
    for column, value in zip(columns.values(), values, strict=True):
        column.append(value)


def kv_usage(timeline: pl.DataFrame) -> KvUsage:
    """Mean over the steady part of each engine's life (see KvUsage) and peak; samples weigh the same."""
    feeding = timeline.filter(
        pl.col("time") <= _where_first("prompt_tokens", pl.col("prompt_tokens").max()).over(ENGINE)
    )
    out, inside = pl.col("done") + pl.col("failed"), pl.col("running") + pl.col("waiting")
    turned_over = (out.last() > 0) & (out.last() >= inside.last())
    filled = pl.col("time") >= _where_first("kv_usage", pl.col("kv_usage").median()).over(ENGINE)
    usage, covers = feeding.filter(turned_over.over(ENGINE) & filled)["kv_usage"], "steady"
    if not len(usage):
        usage, covers = timeline.filter(pl.col("running") > 0)["kv_usage"], "running"
    return KvUsage(
        kv_usage_mean=_number(usage.mean()),
        kv_usage_peak=_number(timeline["kv_usage"].max()),
        kv_usage_covers=covers if len(usage) else None,
    )


def _where_first(name: str, value: pl.Expr) -> pl.Expr:
    """The time of the first sample in which a column is no less than `value`."""
    return pl.col("time").filter(pl.col(name) >= value).first()


def last_counters(timeline: pl.DataFrame) -> dict[tuple[int, int, int], dict[str, float]]:
    """The last counters that each engine (start, replica, incarnation) was seen with."""
    table = timeline.group_by(ENGINE).agg(pl.col(name).max() for name in COUNTERS)
    return {
        (r["start"], r["replica"], r["incarnation"]): {c: r[c] for c in COUNTERS} for r in table.iter_rows(named=True)
    }


def last_seen_at(timeline: pl.DataFrame, *, running: bool) -> float | None:
    """Time of the last sample; with `running`, of the last one with a request running."""
    samples = timeline.filter(pl.col("running") > 0) if running else timeline
    return _number(samples["time"].max())


def first_running_at(timeline: pl.DataFrame) -> float | None:
    """Time of the first sample with a request running."""
    return _number(timeline.filter(pl.col("running") > 0)["time"].min())


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
