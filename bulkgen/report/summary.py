"""From manifest, part files and timeline to a Report. What each figure means stands in model.py.

A report is always computed from what is committed, never read back from report.parquet: a start that was
killed left none, and there is one truth. It takes a fraction of a second for a hundred thousand rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from bulkgen.codes import EMPTY_OUTPUT, INVALID_OUTPUT, UNFINISHED_OUTPUT
from bulkgen.records import CACHE, REPEAT, REUSE
from bulkgen.report import parts as part_files
from bulkgen.report import timeline as samples
from bulkgen.report.history import History, Plan, Record, Start, sort_records
from bulkgen.report.model import (
    Computed,
    Cost,
    EngineWork,
    KvUsage,
    Latency,
    LeftOut,
    PhysicalLimit,
    Planned,
    Report,
    RowCounts,
    Seconds,
    Speed,
    StaleWork,
    StartReport,
    TokenCounts,
)
from bulkgen.report.parts import InPlan, Part
from bulkgen.rundir import RunDir

# From what was told of the device ("physics" in the record of what was planned), what was computed and the engines'
# steps: seconds that one replica's device needs at least for all of it.
LeastSeconds = Callable[[Mapping[str, Any], Computed, int], float]


def summarize(
    run: RunDir,
    records: Sequence[Record],
    *,
    in_plan: InPlan | None = None,
    least_s: LeastSeconds | None = None,
    alive: bool = False,
) -> Report:
    """All figures of a run, whose manifest holds `records`.

    `in_plan` tells which row keys (numpy array of S16) are in the current plan. It is asked only when the
    manifest shows that some are not; without it the whole's sums then include those rows (`stale_in_sums`).
    `least_s` tells what physics allows; without it there is no figure of it.
    `alive`: a process works on the run at this moment, so that a start without an end is running, not killed.
    Raises OutputError when a part of the manifest is missing or unreadable.
    """
    history = sort_records(records)
    parts = [_part(run.parts, p) for start in history.starts for p in start.parts]
    sums = part_files.sum_parts(parts)
    stale, stale_known = _stale_sums(run.parts, history.plan, in_plan)
    latency_of, latency = part_files.latencies(parts)
    timeline = samples.load_timeline(run.timeline_log, {s.number: s.began["time"] for s in history.starts})
    last_seen = samples.last_counters(timeline)
    last = history.starts[-1].number if history.starts else None
    starts = []
    for start in history.starts:
        own = pl.col("start") == start.number
        starts.append(
            _start_report(
                start,
                start.outcome(alive=alive and start.number == last),
                sums.filter(own),
                stale.filter(own),
                latency_of.get(start.number) or part_files.no_latency(),
                timeline.filter(own),
                last_seen,
                least_s,
            )
        )
    refused = part_files.refusals(run.refused, history.plan.refused) if history.plan else {}
    whole = _whole_report(history, starts, sums, stale, stale_known, latency, samples.kv_usage(timeline), refused)
    return Report(starts=tuple(starts), whole=whole, shards=part_files.shard_reports(sums), timeline=timeline)


def _part(folder: Path, record: Record) -> Part:
    return Part(folder / record["name"], record["start"], record["plan"], record["replica"])


def _stale_sums(folder: Path, plan: Plan | None, in_plan: InPlan | None) -> tuple[pl.DataFrame, bool]:
    """Sums of committed rows that are not in the current plan, and whether these are all of them."""
    if plan is None or not plan.stale_rows:
        return part_files.no_sums(), True
    if in_plan is None:
        return part_files.no_sums(), False
    return part_files.sum_stale([_part(folder, p) for p in plan.before], in_plan), True


def _start_report(
    start: Start,
    outcome: str,
    sums: pl.DataFrame,
    stale: pl.DataFrame,
    latency: Latency,
    timeline: pl.DataFrame,
    last_seen: Mapping[tuple[int, int, int], Mapping[str, float]],
    least_s: LeastSeconds | None,
) -> StartReport:
    seconds = _seconds(start, outcome, timeline)
    replicas = start.began["replicas"]
    price = start.began.get("usd_per_hour")
    rows = _row_counts(sums)
    tokens = _tokens(sums)
    engine = _engine_work(start.engine_counters(last_seen), tokens)
    return StartReport(
        scope="start",
        start=start.number,
        outcome=outcome,
        message=start.ends[-1].get("message") if start.ends else None,
        model=(start.began.get("settings") or {}).get("model"),
        began_at=start.began["time"],
        replicas=replicas,
        rows=replace(rows, refused=start.plans[-1]["refused"] if start.plans else 0),
        tokens=tokens,
        stale=_stale_work(stale),
        seconds=seconds,
        speed=_speed(rows.rows, tokens, seconds.generate_s),
        latency=latency,
        kv=samples.kv_usage(timeline),
        engine=engine,
        planned=_planned(start),
        limit=_limit(start, sums, tokens, engine.steps, seconds, least_s),
        cost=_start_cost(price, replicas, seconds, rows.done, tokens),
        restarts=start.restart_list(),
        finish_reasons=part_files.counts(part_files.done(sums), "finish_reason"),
        error_codes=part_files.counts(sums, "error_code"),
        refused_codes={},
        warnings=part_files.warnings(sums),
        left_out=_left_out(start),
    )


def _whole_report(
    history: History,
    starts: Sequence[StartReport],
    sums: pl.DataFrame,
    stale: pl.DataFrame,
    stale_known: bool,
    latency: Latency,
    kv: KvUsage,
    refused: Mapping[str, int],
) -> StartReport:
    committed = _tokens(sums)
    seconds = _add_seconds([s.seconds for s in starts])
    current = _less(sums, stale)
    return StartReport(
        scope="whole",
        start=None,
        outcome=starts[-1].outcome if starts else "not started",
        message=starts[-1].message if starts else None,
        model=starts[-1].model if starts else None,
        began_at=starts[0].began_at if starts else None,
        replicas=max((s.replicas for s in starts), default=0),
        rows=_input_rows(_row_counts(current), history.plan),
        tokens=_tokens(current),
        stale=_whole_stale(stale, history.plan, stale_known),
        seconds=seconds,
        speed=_speed(part_files.total(sums, "rows"), committed, seconds.generate_s),
        latency=latency,
        kv=kv,
        engine=_add_engine_work([s.engine for s in starts]),
        planned=_whole_planned(starts),
        limit=_whole_limit(starts),
        cost=_whole_cost(starts, _row_counts(sums).done, committed),
        restarts=tuple(r for s in starts for r in s.restarts),
        finish_reasons=part_files.counts(part_files.done(current), "finish_reason"),
        error_codes=part_files.counts(current, "error_code"),
        refused_codes=refused,
        warnings=part_files.warnings(current),
        left_out=starts[-1].left_out if starts else LeftOut(left_out_files=0, names=()),
    )


def _left_out(start: Start) -> LeftOut:
    told = start.began.get("left_out") or {}
    return LeftOut(left_out_files=told.get("files", 0), names=tuple(told.get("names", ())))


def _less(sums: pl.DataFrame, stale: pl.DataFrame) -> pl.DataFrame:
    if stale.is_empty():
        return sums
    return pl.concat([sums, stale.select(sums.columns).with_columns(-pl.col(name) for name in part_files.SUMMED)])


def _row_counts(sums: pl.DataFrame) -> RowCounts:
    done = part_files.done(sums)
    by_reason = part_files.counts(done, "finish_reason")
    rows, rows_done = part_files.total(sums, "rows"), part_files.total(done, "rows")
    stop, length = by_reason.get("stop", 0), by_reason.get("length", 0)
    empty = part_files.warned(sums, EMPTY_OUTPUT)
    return RowCounts(
        rows=rows,
        done=rows_done,
        failed=rows - rows_done,
        refused=0,
        pending=0,
        finish_stop=stop,
        finish_length=length,
        finish_other=rows_done - stop - length,
        empty=part_files.total(empty, "rows"),
        empty_at_length=part_files.total(empty.filter(pl.col("finish_reason") == "length"), "rows"),
        invalid=part_files.total(part_files.warned(sums, UNFINISHED_OUTPUT, INVALID_OUTPUT), "rows"),
        invalid_at_length=part_files.total(part_files.warned(sums, UNFINISHED_OUTPUT), "rows"),
        answers=part_files.total(done, "answers"),
        retried=part_files.total(sums.filter("again"), "rows"),
        repeated=part_files.total(sums.filter(pl.col("answer_from") == REPEAT), "rows"),
        reused=part_files.total(sums.filter(pl.col("answer_from").is_in([CACHE, REUSE])), "rows"),
    )


def _input_rows(committed: RowCounts, plan: Plan | None) -> RowCounts:
    if plan is None:
        return committed
    return replace(committed, rows=plan.rows, refused=plan.refused, pending=plan.left)


def _tokens(sums: pl.DataFrame) -> TokenCounts:
    spared, sums = part_files.spared(sums), part_files.computed(sums)
    return TokenCounts(
        prompt_tokens=part_files.total(sums, "prompt_tokens"),
        cached_tokens=part_files.total(sums, "cached_tokens"),
        output_tokens=part_files.total(sums, "output_tokens"),
        invalid_output_tokens=part_files.total(
            part_files.warned(sums, UNFINISHED_OUTPUT, INVALID_OUTPUT), "output_tokens"
        ),
        spared_prompt_tokens=part_files.total(spared, "prompt_tokens"),
        spared_output_tokens=part_files.total(spared, "output_tokens"),
    )


def _stale_work(stale: pl.DataFrame) -> StaleWork:
    tokens = _tokens(stale)
    return StaleWork(
        stale_rows=part_files.total(stale, "rows"),
        stale_prompt_tokens=tokens.prompt_tokens,
        stale_cached_tokens=tokens.cached_tokens,
        stale_output_tokens=tokens.output_tokens,
        stale_in_sums=False,
    )


def _whole_stale(stale: pl.DataFrame, plan: Plan | None, known: bool) -> StaleWork:
    work = _stale_work(stale)
    return work if known or plan is None else replace(work, stale_rows=plan.stale_rows, stale_in_sums=True)


def _seconds(start: Start, outcome: str, timeline: pl.DataFrame) -> Seconds:
    began = start.began["time"]
    traces = [began, start.last_completed_at, samples.last_seen_at(timeline, running=False)]
    traces += [record["time"] for record in start.restarts]
    ended = start.ends[-1]["time"] if start.ends else max(t for t in traces if t is not None)
    lost_s = 0.0
    if outcome not in ("finished", "running"):
        last = samples.last_seen_at(timeline, running=True)
        since = start.last_completed_at or samples.first_running_at(timeline)
        lost_s = max(0.0, last - since) if last is not None and since is not None else 0.0
    return Seconds(
        plan_s=start.sum("plans", "plan_s"),
        start_s=start.start_s,
        generate_s=start.generate_s,
        write_s=start.sum("parts", "write_s"),
        merge_s=start.sum("merged", "merge_s"),
        wall_s=max(0.0, ended - began),
        lost_s=lost_s,
    )


def _add_seconds(starts: Sequence[Seconds]) -> Seconds:
    return Seconds(
        plan_s=sum(s.plan_s for s in starts),
        start_s=sum(s.start_s for s in starts),
        generate_s=sum(s.generate_s for s in starts),
        write_s=sum(s.write_s for s in starts),
        merge_s=sum(s.merge_s for s in starts),
        wall_s=sum(s.wall_s for s in starts),
        lost_s=sum(s.lost_s for s in starts),
    )


def _speed(rows: int, tokens: TokenCounts, generate_s: float) -> Speed:
    return Speed(
        rows_per_s=_over(rows, generate_s),
        prompt_tokens_per_s=_over(tokens.prompt_tokens, generate_s),
        cached_tokens_per_s=_over(tokens.cached_tokens, generate_s),
        output_tokens_per_s=_over(tokens.output_tokens, generate_s),
        total_tokens_per_s=_over(tokens.total_tokens, generate_s),
    )


def _over(amount: float, divisor: float) -> float | None:
    return amount / divisor if divisor > 0 else None


def _engine_work(counters: Mapping[str, float], committed: TokenCounts) -> EngineWork:
    prompt_tokens, output_tokens = int(counters["prompt_tokens"]), int(counters["output_tokens"])
    return EngineWork(
        preemptions=int(counters["preemptions"]),
        engine_prompt_tokens=prompt_tokens,
        engine_cached_tokens=int(counters["cached_tokens"]),
        engine_output_tokens=output_tokens,
        lost_prompt_tokens=prompt_tokens - committed.prompt_tokens,
        lost_output_tokens=output_tokens - committed.output_tokens,
        steps=int(counters["steps"]),
        step_s=counters["step_s"],
        held_s=counters["held_s"],
    )


def _add_engine_work(starts: Sequence[EngineWork]) -> EngineWork:
    return EngineWork(
        preemptions=sum(s.preemptions for s in starts),
        engine_prompt_tokens=sum(s.engine_prompt_tokens for s in starts),
        engine_cached_tokens=sum(s.engine_cached_tokens for s in starts),
        engine_output_tokens=sum(s.engine_output_tokens for s in starts),
        lost_prompt_tokens=sum(s.lost_prompt_tokens for s in starts),
        lost_output_tokens=sum(s.lost_output_tokens for s in starts),
        steps=sum(s.steps for s in starts),
        step_s=sum(s.step_s for s in starts),
        held_s=sum(s.held_s for s in starts),
    )


def _planned(start: Start) -> Planned:
    told = start.planned[-1] if start.planned else {}
    seconds = told.get("generate_s") or {}
    return Planned(
        planned_generate_s=seconds.get("expected"),
        planned_generate_low_s=seconds.get("low"),
        planned_generate_high_s=seconds.get("high"),
        planned_measured=told.get("measured"),
        planned_cached_tokens=told.get("cached_tokens"),
        planned_kv_tokens=told.get("kv_tokens"),
        kv_tokens=next((r["kv_cache_size_tokens"] for r in start.ready if r.get("kv_cache_size_tokens")), None),
    )


def _whole_planned(starts: Sequence[StartReport]) -> Planned:
    """What the last start that planned expected of all rows."""
    planned = next((s.planned for s in reversed(starts) if s.planned.planned_generate_s is not None), None)
    return planned or (starts[-1].planned if starts else _planned(Start(0, {})))


def _limit(
    start: Start,
    sums: pl.DataFrame,
    tokens: TokenCounts,
    steps: int,
    seconds: Seconds,
    least_s: LeastSeconds | None,
) -> PhysicalLimit:
    """Over the rows that the start committed; its replicas, each with a device of its own, share them evenly."""
    told = (start.planned[-1] if start.planned else {}).get("physics")
    if least_s is None or told is None or not steps:
        return _share_of_limit(None, seconds)
    sums = part_files.computed(sums)
    computed = Computed(
        answers=part_files.total(sums, "answers"),
        prefill_tokens=tokens.prompt_tokens - tokens.cached_tokens,
        decode_tokens=part_files.total(sums, "decode_tokens"),
        prefill_pairs=part_files.total(sums, "prefill_pairs"),
        decode_pairs=part_files.total(sums, "decode_pairs"),
    )
    return _share_of_limit(least_s(told, computed, steps) / start.began["replicas"], seconds)


def _whole_limit(starts: Sequence[StartReport]) -> PhysicalLimit:
    """Of the starts that have one: those that generated and knew their device."""
    known = [s for s in starts if s.limit.limit_s is not None]
    return _share_of_limit(
        sum(s.limit.limit_s or 0.0 for s in known) if known else None, _add_seconds([s.seconds for s in known])
    )


def _share_of_limit(limit_s: float | None, seconds: Seconds) -> PhysicalLimit:
    return PhysicalLimit(
        limit_s=limit_s,
        engine_percent=None if limit_s is None else _over(100 * limit_s, seconds.generate_s),
        job_percent=None if limit_s is None else _over(100 * limit_s, seconds.wall_s),
    )


def _start_cost(price: float | None, replicas: int, seconds: Seconds, done: int, tokens: TokenCounts) -> Cost:
    def usd(lasted_s: float) -> float | None:
        return None if price is None else price / 3600 * replicas * lasted_s

    paid = usd(seconds.start_s + seconds.generate_s)
    return _cost(price, paid, usd(seconds.generate_s), usd(seconds.lost_s), done, tokens)


def _whole_cost(starts: Sequence[StartReport], done: int, tokens: TokenCounts) -> Cost:
    # A start that neither opened an engine nor generated costs nothing, with a price or without.
    spent = [s.cost for s in starts if s.seconds.start_s + s.seconds.generate_s + s.seconds.lost_s > 0]
    prices = {c.usd_per_hour for c in spent}
    known = bool(spent) and None not in prices

    def add(name: str) -> float | None:
        return sum(getattr(c, name) for c in spent) if known else None

    price = next(iter(prices)) if len(prices) == 1 else None
    return _cost(price, add("usd"), add("generate_usd"), add("lost_usd"), done, tokens)


def _cost(
    price: float | None,
    paid: float | None,
    generate: float | None,
    lost: float | None,
    done: int,
    tokens: TokenCounts,
) -> Cost:
    def per(amount: float) -> float | None:
        return None if paid is None else _over(paid, amount)

    return Cost(
        usd_per_hour=price,
        usd=paid,
        generate_usd=generate,
        lost_usd=lost,
        usd_per_1k_rows=per(done / 1e3),
        usd_per_million_prompt_tokens=per(tokens.prompt_tokens / 1e6),
        usd_per_million_output_tokens=per(tokens.output_tokens / 1e6),
    )
