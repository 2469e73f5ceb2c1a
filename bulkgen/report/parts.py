"""Figures out of part files: sums, percentiles, and what of them is no longer in the input.

Memory: sums are grouped while the files stream through; percentiles are exact and hold one column of one
figure at a time (8 bytes a row), of all parts together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from bulkgen.errors import OutputError
from bulkgen.records import DONE, ENGINE, ROW_KEY_BYTES
from bulkgen.report.model import Latency, Percentiles, ShardReport

# Takes a part and its row keys as fixed-width byte strings (numpy S16), says which rows are in the current plan and
# were not done again since.
InPlan = Callable[[Path, npt.NDArray[np.bytes_]], npt.NDArray[np.bool_]]

_TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens")
_KINDS = ("shard", "status", "finish_reason", "error_code", "warnings", "answer_from", "again")
# What is read of a row: its kinds, with its warnings as one text and whether it took several attempts, and figures.
_READ = [
    *(pl.col(name) for name in ("shard", "status", "finish_reason", "error_code")),
    pl.col("warnings").list.join(" ").alias("warnings"),
    (pl.col("attempts") > 1).fill_null(False).alias("again"),
    pl.col("answer_from"),
    *(pl.col(name) for name in (*_TOKENS, "answers", "e2e_s")),
]
_COMPUTED = pl.col("answer_from") == ENGINE
_LATENCIES = ("queued_s", "ttft_s", "tpot_s", "e2e_s")
# Decode steps of a row, and of each of its answers; the first token of an answer comes with the prompt.
_DECODES = (pl.col("output_tokens").cast(pl.Int64) - pl.col("answers")).clip(lower_bound=0)
_DECODES_EACH = _DECODES / pl.col("answers")
_PROMPT, _CACHED = (pl.col(name).cast(pl.Float64) for name in ("prompt_tokens", "cached_tokens"))
# Pairs of a token and one that it looks at, as job_tokens in bulkgen/sizing/roofline.py counts them.
_PAIRS = {
    "decode_tokens": _DECODES,
    "prefill_pairs": ((_PROMPT * (_PROMPT + 1) - _CACHED * (_CACHED + 1)) / 2).round().cast(pl.Int64),
    "decode_pairs": (_DECODES * (_PROMPT + (_DECODES_EACH + 1) / 2)).round().cast(pl.Int64),
}
_SUMS = [
    pl.len().cast(pl.Int64).alias("rows"),
    *(pairs.sum().alias(name) for name, pairs in _PAIRS.items()),
    *(pl.col(name).cast(pl.Int64).sum() for name in (*_TOKENS, "answers")),
    pl.col("e2e_s").sum().alias("service_s"),
]

# Those columns of sums that are numbers to add up.
SUMMED = ("rows", *_PAIRS, *_TOKENS, "answers", "service_s")


@dataclass(frozen=True, slots=True)
class Part:
    """A committed part file, and who made it."""

    path: Path
    start: int
    plan: int
    replica: int


def sum_parts(parts: Sequence[Part]) -> pl.DataFrame:
    """Rows, tokens and service seconds by start, plan, replica, shard and the kinds of row."""
    frames = []
    for (start, plan, replica), group in groupby(sorted(parts, key=_maker), key=_maker):
        made_by = [
            pl.lit(n, pl.Int64).alias(name) for n, name in ((start, "start"), (plan, "plan"), (replica, "replica"))
        ]
        scan = pl.scan_parquet([p.path for p in group]).select(_READ)
        frames.append(scan.group_by(_KINDS).agg(_SUMS).with_columns(made_by))
    with _readable(parts):
        return pl.concat(pl.collect_all(frames, engine="streaming")) if frames else no_sums()


def sum_stale(parts: Sequence[Part], in_plan: InPlan) -> pl.DataFrame:
    """As `sum_parts`, of those rows alone that are not in the current plan; one part in memory at a time."""
    frames = [no_sums()]
    for part in parts:
        with _readable([part]):
            stale = ~in_plan(part.path, _keys(part.path))
            if stale.any():
                rows = pl.scan_parquet(part.path).select(_READ).collect().filter(pl.Series(stale))
                made_by = {"start": part.start, "plan": part.plan, "replica": part.replica}
                lits = [pl.lit(n, pl.Int64).alias(name) for name, n in made_by.items()]
                frames.append(rows.group_by(_KINDS).agg(_SUMS).with_columns(lits))
    return pl.concat(frames)


def latencies(parts: Sequence[Part]) -> tuple[dict[int, Latency], Latency]:
    """Percentiles by start, and over all parts."""
    starts = sorted({p.start for p in parts})
    of_start: dict[int, dict[str, Percentiles]] = {start: {} for start in starts}
    of_all: dict[str, Percentiles] = {}
    for name in _LATENCIES:
        columns = []
        for start in starts:
            paths = [p.path for p in parts if p.start == start]
            with _readable(parts):
                frame = pl.scan_parquet(paths).select(pl.col(name).drop_nulls()).collect(engine="streaming")
            columns.append(frame.to_series())
            of_start[start][name] = percentiles(columns[-1])
        # With one start there is nothing to put together.
        whole = pl.concat(columns) if columns else pl.Series(dtype=pl.Float64)
        of_all[name] = of_start[starts[0]][name] if len(starts) == 1 else percentiles(whole)
    return {start: Latency(**by_name) for start, by_name in of_start.items()}, Latency(**of_all)


def no_latency() -> Latency:
    """The latency of no rows."""
    nothing = percentiles(pl.Series(dtype=pl.Float64))
    return Latency(queued_s=nothing, ttft_s=nothing, tpot_s=nothing, e2e_s=nothing)


def percentiles(values: pl.Series) -> Percentiles:
    """Exact percentiles, linear between two values; None everywhere when there is none."""
    ordered = values.sort()
    if not len(ordered):
        return Percentiles(count=0, p50=None, p90=None, p95=None, p99=None, max=None)
    p50, p90, p95, p99, greatest = (float(ordered.quantile(q, "linear") or 0.0) for q in (0.5, 0.9, 0.95, 0.99, 1.0))
    return Percentiles(count=len(ordered), p50=p50, p90=p90, p95=p95, p99=p99, max=greatest)


def total(sums: pl.DataFrame, name: str) -> int:
    """One column of sums, added up."""
    return int(sums[name].sum())


def computed(sums: pl.DataFrame) -> pl.DataFrame:
    """The sums of rows that an engine was given."""
    return sums.filter(_COMPUTED)


def spared(sums: pl.DataFrame) -> pl.DataFrame:
    """The sums of rows whose results were there already: another row's, or an earlier run's."""
    return sums.filter(~_COMPUTED)


def done(sums: pl.DataFrame) -> pl.DataFrame:
    """The sums of rows that are done."""
    return sums.filter(pl.col("status") == DONE)


def counts(sums: pl.DataFrame, name: str) -> Mapping[str, int]:
    """Rows by `name`, most frequent first; rows without it are left out."""
    table = sums.drop_nulls(name).group_by(name).agg(pl.col("rows").sum())
    table = table.filter(pl.col("rows") > 0).sort("rows", name, descending=[True, False])
    return dict(table.select(name, "rows").iter_rows())


def warnings(sums: pl.DataFrame) -> Mapping[str, int]:
    """Rows by code of warning, most frequent first. A row can have several."""
    codes = sums.drop_nulls("warnings").with_columns(pl.col("warnings").str.split(" ")).explode("warnings")
    return counts(codes, "warnings")


def warned(sums: pl.DataFrame, *codes: str) -> pl.DataFrame:
    """The sums of done rows with one of these warnings at least."""
    own = pl.col("warnings").str.split(" ")
    return done(sums).filter(pl.any_horizontal(own.list.contains(code).fill_null(False) for code in codes))


def refusals(path: Path, rows: int) -> Mapping[str, int]:
    """Rows that planning refused by code, most frequent first; none where the file is not of the plan of `rows`."""
    try:
        codes = pl.scan_parquet(path).select(pl.col("code").alias("error_code"), pl.lit(1, pl.Int64).alias("rows"))
        table = codes.group_by("error_code").agg(pl.col("rows").sum()).collect(engine="streaming")
    except (OSError, pl.exceptions.PolarsError):
        return {}
    return counts(table, "error_code") if total(table, "rows") == rows else {}


def shard_reports(sums: pl.DataFrame) -> tuple[ShardReport, ...]:
    """One report a shard of each plan, in that order."""
    is_done = pl.col("status") == DONE
    table = (
        sums.group_by("plan", "shard")
        .agg(
            pl.col("start").unique().sort().alias("starts"),
            pl.col("replica").unique().sort().alias("replicas"),
            pl.col("rows").filter(is_done).sum().alias("done"),
            pl.col("rows").filter(~is_done).sum().alias("failed"),
            pl.col("rows").sum(),
            *(pl.col(name).filter(_COMPUTED).sum() for name in (*_TOKENS, "service_s")),
        )
        .sort("plan", "shard")
    )
    return tuple(ShardReport(**record) for record in table.iter_rows(named=True))


def _maker(part: Part) -> tuple[int, int, int]:
    return part.start, part.plan, part.replica


def _keys(path: Path) -> npt.NDArray[np.bytes_]:
    column = pq.read_table(path, columns=["key"]).column("key").combine_chunks()
    data: Any = column.buffers()[1]
    first = column.offset * ROW_KEY_BYTES
    return np.frombuffer(data, f"S{ROW_KEY_BYTES}", count=len(column), offset=first)


def no_sums() -> pl.DataFrame:
    """The sums of no parts."""
    strings = ("status", "finish_reason", "error_code", "warnings", "answer_from")
    return pl.DataFrame(
        schema={
            "shard": pl.Int32,
            **dict.fromkeys(strings, pl.String),
            "again": pl.Boolean,
            **dict.fromkeys(("rows", *_PAIRS, *_TOKENS, "answers"), pl.Int64),
            "service_s": pl.Float64,
            **dict.fromkeys(("start", "plan", "replica"), pl.Int64),
        }
    )


@contextmanager
def _readable(parts: Sequence[Part]) -> Iterator[None]:
    """Translate what readers raise into one sentence that names the part."""
    try:
        yield
    except (OSError, pl.exceptions.PolarsError, pa.ArrowException) as e:
        missing = next((p.path for p in parts if not p.path.is_file()), None)
        if missing is not None:
            raise OutputError(f"{missing}: in the manifest but not there; restore it or choose a new output") from e
        reason = str(e).splitlines()[0]
        raise OutputError(
            f"{parts[0].path.parent}: a part cannot be read ({reason}); restore it or choose a new output"
        ) from e
