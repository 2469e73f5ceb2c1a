"""The report as data: what each figure is, in one place for tables, Parquet files and JSON.

Every leaf field is one column of report.parquet and carries there the text that stands beside it here. How
the figures are computed is in summary.py.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_type_hints

if TYPE_CHECKING:
    import polars as pl


def column(doc: str) -> Any:
    """A dataclass field that is a column, with the text that explains it.

    A field with `prefix` in its metadata holds several columns, which are named `<field>_<column>`.
    """
    return field(metadata={"doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Rows, each counted once."""

    rows: int = column(
        "start: rows committed, done + failed; whole: rows of the input, done + failed + refused + pending"
    )
    done: int = column("rows with a generated text")
    failed: int = column("rows that failed in the engine")
    refused: int = column("rows that planning refused before the engine: unreadable, not renderable, too long")
    pending: int = column("rows of the current plan that are not committed yet")
    finish_stop: int = column("done rows that ended by themselves (finish_reason stop)")
    finish_length: int = column("done rows cut at max_tokens or the context's end (finish_reason length)")
    finish_other: int = column("done rows with any other finish_reason")
    empty: int = column("done rows without any text (warning empty_output)")
    empty_at_length: int = column("those of them with finish_reason length: max_tokens was spent on what is no text")
    invalid: int = column("done rows with an answer that has not the form asked for (structured_outputs)")
    invalid_at_length: int = column("those of them with such an answer that was cut (warning unfinished_output)")
    answers: int = column("answers of done rows: one each, or as many as a row asks for (n)")
    retried: int = column("rows that an engine was given more than once (attempts > 1)")
    repeated: int = column("rows done or failed with another row's result, since their request is the same")
    reused: int = column("rows done with an answer from the cache or an earlier output")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens of rows that an engine was given. Whole: of those in the current data. Start: of all it committed."""

    prompt_tokens: int = column("prompt tokens of done and failed rows, cached ones included")
    cached_tokens: int = column("prompt tokens that the prefix cache held, a part of prompt_tokens")
    output_tokens: int = column("generated tokens")
    invalid_output_tokens: int = column("generated tokens of the rows in invalid, a part of output_tokens")
    spared_prompt_tokens: int = column("prompt tokens of repeated and reused rows, not computed; in no other sum")
    spared_output_tokens: int = column("output tokens of repeated and reused rows, not computed; in no other sum")

    @property
    def total_tokens(self) -> int:
        """Prompt (cached ones included) and output."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleWork:
    """Committed rows that the input no longer has. A start counts them, the whole leaves them out."""

    stale_rows: int = column("committed rows whose key is not in the current plan (input or settings have changed)")
    stale_prompt_tokens: int = column("prompt tokens of stale rows")
    stale_cached_tokens: int = column("cached tokens of stale rows")
    stale_output_tokens: int = column("output tokens of stale rows")
    stale_in_sums: bool = column(
        "whole: stale rows are counted in its sums, since the plan was not at hand to tell them"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Where the time went. The whole is the sum over the starts, without the time between them."""

    plan_s: float = column("reading, rendering, counting and cutting shards")
    start_s: float = column("engine start, until the first replica was ready; a slower one ends inside generate_s")
    generate_s: float = column("first request offered to last committed completion, restarts in between included")
    write_s: float = column("writing part files, added up over the replicas; the engines go on meanwhile")
    merge_s: float = column("putting the output together")
    wall_s: float = column("from a start's beginning to its end, or to its last trace where it was killed")
    lost_s: float = column(
        "generation after the last commit of a start that did not finish; in no other figure but wall_s"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """All committed work, stale rows included, over generate_s: engine start and merge are left out."""

    rows_per_s: float | None = column("committed rows / generate_s")
    prompt_tokens_per_s: float | None = column("prompt tokens / generate_s, cached ones included")
    cached_tokens_per_s: float | None = column("cached prompt tokens / generate_s")
    output_tokens_per_s: float | None = column("output tokens / generate_s")
    total_tokens_per_s: float | None = column("(prompt + output tokens) / generate_s, cached ones included")


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Exact percentiles over committed rows that have the figure, linear between two rows."""

    count: int = column("rows that have the figure")
    p50: float | None = column("median")
    p90: float | None = column("90th percentile")
    p95: float | None = column("95th percentile")
    p99: float | None = column("99th percentile")
    max: float | None = column("greatest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """How long single rows took; beside throughput, which governs an offline run."""

    queued_s: Percentiles = field(metadata={"doc": "arrival in the engine to being scheduled", "prefix": True})
    ttft_s: Percentiles = field(metadata={"doc": "arrival in the engine to the first token", "prefix": True})
    tpot_s: Percentiles = field(
        metadata={"doc": "(e2e - ttft) / (output_tokens - 1); rows of one token have none", "prefix": True}
    )
    e2e_s: Percentiles = field(metadata={"doc": "arrival in the engine to the last token", "prefix": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUsage:
    """How full the KV cache was, from the samples of the timeline (about one a second and replica).

    The steady part of an engine's life begins when the cache is as full as it is half of the time, and ends with the
    last new prompt: before it the cache fills, after it only empties. An engine that was given all of its rows before
    it had done as many as it still held has none.
    """

    kv_usage_mean: float | None = column("mean share of KV cache in use (0..1) over the samples of kv_usage_covers")
    kv_usage_peak: float | None = column("greatest share of KV cache in use, any sample")
    kv_usage_covers: str | None = column(
        "steady: samples from the first of median fullness to the last new prompt; "
        "running: no engine had done as many rows as it held by then, so all samples with a request running"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """What the engines themselves counted, and what of it never reached a committed row.

    Counters at closing; of an engine that was killed its last sample, or its committed rows where these are
    more.
    """

    preemptions: int = column("requests that the engine pushed out of the KV cache and computed again")
    engine_prompt_tokens: int = column("the engines' own count of prompt tokens")
    engine_cached_tokens: int = column("the engines' own count of cached prompt tokens")
    engine_output_tokens: int = column("the engines' own count of output tokens")
    lost_prompt_tokens: int = column("engine_prompt_tokens less those of committed rows: lost by kills and restarts")
    lost_output_tokens: int = column("engine_output_tokens less those of committed rows: lost by kills and restarts")
    steps: int = column("steps that the engines computed")
    step_s: float = column("seconds in these steps, added up over the engines")
    held_s: float = column("seconds for which engines held requests, added up; what is more than step_s, they waited")

    @property
    def idle(self) -> float | None:
        """Of the seconds for which engines held requests, the share (0..1) in which no step was under way."""
        return max(0.0, 1 - self.step_s / self.held_s) if self.held_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What was expected of the run before its engines were loaded, for all rows of the plan; null where nothing was.

    Holds for the whole run: a later start has the rows of earlier ones in its plan too.
    """

    planned_generate_s: float | None = column("expected generate_s")
    planned_generate_low_s: float | None = column("the least that generate_s should be")
    planned_generate_high_s: float | None = column("the most that generate_s should be")
    planned_measured: bool | None = column("true: by steps measured in earlier runs; false: by the device's rates")
    planned_cached_tokens: int | None = column("prompt tokens that a prefix cache without limit would hold")
    planned_kv_tokens: int | None = column("tokens of KV cache of a replica, by arithmetic")
    kv_tokens: int | None = column("tokens of KV cache of a replica, as its engine tells them")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhysicalLimit:
    """What the device allows at its rates (roofline): every token computed once and the weights read in every step.

    Null where the model or the device is not known. What was computed twice, or never committed, is not in it.
    """

    limit_s: float | None = column("seconds that the committed rows need at least, in the steps that the engines took")
    engine_percent: float | None = column("limit_s as per cent of generate_s")
    job_percent: float | None = column("limit_s as per cent of wall_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What rows made engines compute. Pairs are of a token and one that it looks at, itself included.

    `prefill_tokens`: prompt tokens that no cache held. `decode_tokens`: generated ones save the first of each answer.
    """

    answers: int
    prefill_tokens: int
    decode_tokens: int
    prefill_pairs: int
    decode_pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """usd_per_hour / 3600 x replicas x seconds. Null without a price in every start that counts."""

    usd_per_hour: float | None = column("price of one replica for an hour; whole: null where starts differ")
    usd: float | None = column("cost of engine start and generation (start_s + generate_s)")
    generate_usd: float | None = column("cost of generation alone (generate_s), a part of usd")
    lost_usd: float | None = column("cost of lost_s, not in usd")
    usd_per_1k_rows: float | None = column("usd per 1,000 done rows, stale ones included")
    usd_per_million_prompt_tokens: float | None = column(
        "the whole of usd over prompt tokens alone, cached ones included"
    )
    usd_per_million_output_tokens: float | None = column("the whole of usd over output tokens alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A replica that died and was started again."""

    start: int
    replica: int
    incarnation: int
    time: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Data files that were not read since their names begin with _ or a dot; whole: those of the last start."""

    left_out_files: int = column(
        "data files left out since their names begin with _ or a dot; whole: by the last start"
    )
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """One start of the run, or (`scope` whole, `start` None) all of them."""

    scope: str = column("start or whole")
    start: int | None = column("number of the start, null in the whole")
    outcome: str = column("finished, stopped, failed, killed (no end was recorded) or running; whole: the last start's")
    message: str | None = column("what the start said at its end")
    model: str | None = column("the model that generated, whatever a row calls it; whole: the last start's")
    began_at: float | None = column("unix time of the (first) start's beginning")
    replicas: int = column("engine processes side by side; whole: the most of any start")
    rows: RowCounts
    tokens: TokenCounts
    stale: StaleWork
    seconds: Seconds
    speed: Speed
    latency: Latency
    kv: KvUsage
    engine: EngineWork
    planned: Planned
    limit: PhysicalLimit
    cost: Cost
    restarts: tuple[Restart, ...]
    finish_reasons: Mapping[str, int]
    error_codes: Mapping[str, int]
    refused_codes: Mapping[str, int]
    warnings: Mapping[str, int]
    left_out: LeftOut


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """One shard of one plan, as far as it is committed."""

    plan: int = column("number of the plan; each plan cuts its own shards")
    shard: int = column("number of the shard in its plan")
    starts: list[int] = field(metadata={"doc": "starts that committed rows of it"})
    replicas: list[int] = field(metadata={"doc": "replicas that generated rows of it"})
    rows: int = column("committed rows")
    done: int = column("rows with a generated text")
    failed: int = column("rows that failed in the engine")
    prompt_tokens: int = column("prompt tokens, cached ones included")
    cached_tokens: int = column("prompt tokens that the prefix cache held")
    output_tokens: int = column("generated tokens")
    service_s: float = column("sum of e2e_s over its done rows; rows run side by side, so this is no wall time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All figures of one run."""

    starts: tuple[StartReport, ...]
    whole: StartReport
    shards: tuple[ShardReport, ...]
    timeline: "pl.DataFrame"


def columns_of(cls: type, prefix: str = "", about: str = "") -> Iterator[tuple[str, Any, str]]:
    """(name, type, doc) of each column of a class of this module, in order, nested ones unfolded."""
    hints = get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[f.name]):
            nested = f.metadata.get("prefix", False)
            doc = f"{f.metadata['doc']}: " if nested else ""
            yield from columns_of(hints[f.name], f"{prefix}{f.name}_" if nested else prefix, doc)
        elif "doc" in f.metadata:
            yield prefix + f.name, hints[f.name], about + f.metadata["doc"]


def values_of(record: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of each column of `record`, in the order and with the names of `columns_of`."""
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        if dataclasses.is_dataclass(value):
            yield from values_of(value, f"{prefix}{f.name}_" if f.metadata.get("prefix") else prefix)
        elif "doc" in f.metadata:
            yield prefix + f.name, value


def report_json(report: Report) -> dict[str, Any]:
    """JSON-able: the columns of report.parquet by name, and what has no place in a flat table."""
    return {"whole": _section_json(report.whole), "starts": [_section_json(s) for s in report.starts]}


def _section_json(section: StartReport) -> dict[str, Any]:
    return {
        **dict(values_of(section)),
        "finish_reasons": dict(section.finish_reasons),
        "error_codes": dict(section.error_codes),
        "refused_codes": dict(section.refused_codes),
        "warnings": dict(section.warnings),
        "left_out": list(section.left_out.names),
        "restarts": [dataclasses.asdict(r) for r in section.restarts],
    }
