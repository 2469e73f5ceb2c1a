"""What engines did between two samples of the timeline: the steps of a second or so, and how long they took."""

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from bulkgen.report.timeline import ENGINE


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindow:
    """Some steps of one engine, one after the other: what they computed together, and the seconds in them.

    `context_tokens`: tokens of KV cache in use, over all these steps; those that several sequences share count once.
    """

    steps: int
    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    seconds: float


def step_windows(timeline: pl.DataFrame, start: int, kv_tokens: Mapping[tuple[int, int], int]) -> list[StepWindow]:
    """The windows of one start. `kv_tokens`: what the KV cache of a replica's incarnation holds."""
    counters = ("steps", "step_s", "prompt_tokens", "cached_tokens", "output_tokens")
    moved = [pl.col(name).diff().over(ENGINE).alias(f"{name}_moved") for name in counters]
    usage = ((pl.col("kv_usage") + pl.col("kv_usage").shift().over(ENGINE)) / 2).alias("usage")
    table = timeline.filter(pl.col("start") == start).with_columns(*moved, usage)
    table = table.filter((pl.col("steps_moved") > 0) & (pl.col("step_s_moved") > 0))
    windows = []
    for row in table.iter_rows(named=True):
        tokens = kv_tokens.get((row["replica"], row["incarnation"]), 0)
        windows.append(
            StepWindow(
                steps=row["steps_moved"],
                prefill_tokens=row["prompt_tokens_moved"] - row["cached_tokens_moved"],
                decode_tokens=row["output_tokens_moved"],
                context_tokens=round(row["usage"] * tokens * row["steps_moved"]),
                seconds=row["step_s_moved"],
            )
        )
    return windows
