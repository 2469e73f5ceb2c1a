"""The report as tables for 80 columns: the most wanted first, each figure with what it covers.

Only looks: no figure is computed here that is not in the Report.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bulkgen.report import figures
from bulkgen.report.model import (
    EngineWork,
    LeftOut,
    Percentiles,
    PhysicalLimit,
    Report,
    RowCounts,
    StartReport,
    TokenCounts,
)
from bulkgen.report.sheet import new_table, shown

_STARTS_SHOWN = 20
_RESTARTS_SHOWN = 10
_CODES_SHOWN = 10
_NAMES_SHOWN = 3


def render_report(report: Report, console: Console) -> None:
    """Print the report: summary, tokens, latency, then starts and restarts where there were several."""
    _Page(report, console).print()


class _Page:
    """One report on one console."""

    def __init__(self, report: Report, console: Console) -> None:
        self._report = report
        self._whole = report.whole
        self._console = console

    def print(self) -> None:
        tables = [self._summary(), self._tokens(), self._latency()]
        if self._whole.planned.planned_generate_s is not None:
            tables.append(self._plan())
        if len(self._report.starts) > 1:
            tables.append(self._starts())
        if self._whole.restarts:
            tables.append(self._restarts())
        for i, table in enumerate(tables):
            if i:
                self._console.print()
            self._console.print(table)

    def _table(self, title: str, *headers: str, right: Sequence[int] = ()) -> Table:
        return new_table(title, headers, right, self._console)

    def _add(self, table: Table, *cells: str) -> None:
        table.add_row(*(shown(cell, self._console) for cell in cells))

    def _summary(self) -> Table:
        table = self._table(f"Run {self._whole.outcome}: {_rows_headline(self._whole)}", "", "", "covers", right=[1])
        for label, value, covers in _summary_lines(self._report):
            self._add(table, label, value, covers)
        return table

    def _tokens(self) -> Table:
        w = self._whole
        title = "Tokens (per second: over generation, engine start left out)"
        table = self._table(title, "", "tokens", "per second", "covers", right=[1, 2])
        own = "rows in the output" if not w.stale.stale_rows else "rows of the present input; speed: all"
        if w.stale.stale_in_sums:
            own = "rows of earlier input too"
        t, s = w.tokens, w.speed
        self._add(
            table,
            "prompt",
            figures.count(t.prompt_tokens),
            figures.rate(s.prompt_tokens_per_s),
            f"{own}; cached included",
        )
        share = t.cached_tokens / t.prompt_tokens if t.prompt_tokens else None
        cached = f"{figures.percent(share)} of prompt, by prefix cache"
        self._add(table, "cached", figures.count(t.cached_tokens), figures.rate(s.cached_tokens_per_s), cached)
        self._add(table, "output", figures.count(t.output_tokens), figures.rate(s.output_tokens_per_s), own)
        self._add(
            table,
            "total",
            figures.count(t.total_tokens),
            figures.rate(s.total_tokens_per_s),
            "prompt + output",
        )
        self._engine_lines(table)
        return table

    def _engine_lines(self, table: Table) -> None:
        e, stale = self._whole.engine, self._whole.stale
        engine = figures.count(e.engine_prompt_tokens + e.engine_output_tokens)
        beyond = f"{e.lost_prompt_tokens:+,} prompt, {e.lost_output_tokens:+,} output beyond the rows"
        equal = not e.lost_prompt_tokens and not e.lost_output_tokens
        self._add(table, "engines' count", engine, "", "equal to the committed rows" if equal else beyond)
        if stale.stale_rows and not stale.stale_in_sums:
            tokens = stale.stale_prompt_tokens + stale.stale_output_tokens
            self._add(
                table,
                "stale",
                figures.count(tokens),
                "",
                f"{figures.rows(stale.stale_rows)} of earlier input, in no sum above",
            )

    def _plan(self) -> Table:
        """What was expected, beside what came."""
        p, w = self._whole.planned, self._whole
        table = self._table("Plan and outcome", "", "planned", "came", "", right=[1, 2])
        by = "steps measured in earlier runs" if p.planned_measured else "the device's rates"
        low, high = figures.seconds(p.planned_generate_low_s), figures.seconds(p.planned_generate_high_s)
        came = figures.seconds(w.seconds.generate_s)
        span = f"{low} to {high}, by {by}"
        self._add(table, "generation", figures.seconds(p.planned_generate_s), came, span)
        kv, cached = figures.count(p.kv_tokens), figures.count(w.tokens.cached_tokens)
        self._add(table, "KV cache", figures.count(p.planned_kv_tokens), kv, "tokens, each replica")
        limit = "tokens; planned: with a cache that forgets nothing"
        self._add(table, "prefix hits", figures.count(p.planned_cached_tokens), cached, limit)
        return table

    def _latency(self) -> Table:
        title = "Latency of a row (beside throughput, which governs an offline run)"
        table = self._table(title, "", "p50", "p90", "p95", "p99", "max", "rows", right=range(1, 7))
        latency = self._whole.latency
        for label, figure in (
            ("queued in the engine", latency.queued_s),
            ("TTFT, queue included", latency.ttft_s),
            ("TPOT after the first", latency.tpot_s),
            ("e2e, queue included", latency.e2e_s),
        ):
            self._add(table, label, *_percentile_cells(figure))
        return table

    def _starts(self) -> Table:
        shown = self._report.starts[-_STARTS_SHOWN:]
        hidden = len(self._report.starts) - len(shown)
        title = "Starts" + (f" (the last {len(shown)}, {hidden} earlier ones not shown)" if hidden else "")
        headers = ("", "outcome", "rows", "failed", "output/s", "start", "generate", "lost out", "cost")
        table = self._table(title, *headers, right=range(2, len(headers)))
        for s in shown:
            self._add(
                table,
                str(s.start),
                s.outcome,
                figures.count(s.rows.rows),
                figures.count(s.rows.failed),
                figures.rate(s.speed.output_tokens_per_s),
                figures.seconds(s.seconds.start_s),
                figures.seconds(s.seconds.generate_s),
                figures.short(s.engine.lost_output_tokens),
                figures.usd(s.cost.usd),
            )
        return table

    def _restarts(self) -> Table:
        shown = self._whole.restarts[-_RESTARTS_SHOWN:]
        hidden = len(self._whole.restarts) - len(shown)
        title = "Restarts of replicas" + (
            f" (the last {len(shown)}, {hidden} earlier ones not shown)" if hidden else ""
        )
        table = self._table(title, "start", "replica", "time", "reason", right=[0, 1])
        for r in shown:
            since = next((r.time - s.began_at for s in self._report.starts if s.start == r.start and s.began_at), None)
            self._add(table, str(r.start), str(r.replica), f"+{figures.seconds(since)}", r.reason)
        return table


def _rows_headline(whole: StartReport) -> str:
    rows = whole.rows
    bad = rows.failed + rows.refused
    parts = [f"{rows.done:,} of {figures.rows(rows.rows)} done"]
    parts += [f"{bad:,} failed"] if bad else []
    parts += [f"{rows.pending:,} pending"] if rows.pending else []
    return ", ".join(parts)


def _special_rows(rows: RowCounts, tokens: TokenCounts) -> list[tuple[str, str, str]]:
    """Of the rows that are done or failed: those of which there is something to say."""
    invalid = figures.count(tokens.invalid_output_tokens)
    cut = f"{rows.invalid_at_length:,} of them cut; {invalid} output tokens"
    spared = tokens.spared_prompt_tokens + tokens.spared_output_tokens
    lines = [
        ("rows empty", rows.empty, f"done without text, {rows.empty_at_length:,} of them cut"),
        ("rows invalid", rows.invalid, f"done, not in the form asked for, {cut}"),
        (
            "answers",
            rows.answers if rows.answers > rows.done else 0,
            "of rows done, which may ask for several (n)",
        ),
        ("rows retried", rows.retried, "an engine was given them more than once"),
        ("rows repeated", rows.repeated, "have the result of a row with the same request"),
        ("rows reused", rows.reused, "have an answer from the cache or an earlier output"),
        ("tokens spared", spared, "of repeated and reused rows, which no engine computed"),
    ]
    return [(name, figures.count(number), what) for name, number, what in lines if number]


def _summary_lines(report: Report) -> list[tuple[str, str, str]]:
    whole = report.whole
    rows, seconds, kv = whole.rows, whole.seconds, whole.kv
    failed = f"{rows.refused:,} refused by planning, {rows.failed:,} failed in the engine"
    lines = [
        ("rows done", figures.count(rows.done), "generated and committed"),
        ("rows failed", figures.count(rows.failed + rows.refused), failed),
        (
            "rows cut",
            figures.count(rows.finish_length),
            "done, but cut at max_tokens (length)",
        ),
    ]
    for why, codes in (
        ("failed in the engine", whole.error_codes),
        ("refused by planning", whole.refused_codes),
        ("warning", whole.warnings),
    ):
        lines += [("", figures.count(n), f"{why}: {code}") for code, n in list(codes.items())[:_CODES_SHOWN]]
    lines += _special_rows(rows, whole.tokens)
    if whole.model is not None:
        lines.append(("model", "", f"generated the rows: {whole.model}"))
    if whole.left_out.left_out_files:
        lines.append(_left_out_line(whole.left_out))
    lines += [
        ("wall time", figures.seconds(seconds.wall_s), "all starts, time between them left out"),
        ("  planning", figures.seconds(seconds.plan_s), "reading, rendering, counting, sharding"),
        ("  engine start", figures.seconds(seconds.start_s), "until the first replica was ready"),
        (
            "  generation",
            figures.seconds(seconds.generate_s),
            "first request offered to last completion",
        ),
        ("  parts", figures.seconds(seconds.write_s), "writing them, all replicas; beside generation"),
        ("  merge", figures.seconds(seconds.merge_s), "putting the output together"),
        ("rows/s", figures.rate(whole.speed.rows_per_s), "generation"),
        ("output tokens/s", figures.rate(whole.speed.output_tokens_per_s), "generation"),
        (
            "total tokens/s",
            figures.rate(whole.speed.total_tokens_per_s),
            "generation; cached prompt tokens included",
        ),
        *_limit_lines(whole.limit),
        *_cost_lines(report),
        ("KV usage, mean", figures.percent(kv.kv_usage_mean), _kv_covers(kv.kv_usage_covers)),
        ("KV usage, peak", figures.percent(kv.kv_usage_peak), "all samples, about one a second"),
        (
            "preemptions",
            figures.count(whole.engine.preemptions),
            "engines' own count; each is computed again",
        ),
        ("engine steps", figures.count(whole.engine.steps), _steps_cover(whole.engine)),
    ]
    if seconds.lost_s > 0:
        cost = "" if whole.cost.lost_usd is None else f", {figures.usd(whole.cost.lost_usd)}"
        lost = (
            "lost time",
            figures.seconds(seconds.lost_s),
            f"after the last commit of broken starts{cost}; not in generation or cost",
        )
        lines.append(lost)
    return lines


def _limit_lines(limit: PhysicalLimit) -> list[tuple[str, str, str]]:
    if limit.limit_s is None:
        return []
    engine, job = (None if x is None else x / 100 for x in (limit.engine_percent, limit.job_percent))
    device = f"of what the device allows at its rates: {figures.seconds(limit.limit_s)} at least"
    return [("device, generation", figures.percent(engine), device), ("device, wall time", figures.percent(job), "")]


def _steps_cover(engine: EngineWork) -> str:
    if engine.idle is None:
        return "all engines"
    return f"between them the engines had requests and waited for {figures.percent(engine.idle)} of the time"


def _left_out_line(left_out: LeftOut) -> tuple[str, str, str]:
    names = left_out.names[:_NAMES_SHOWN]
    more = ", ..." if left_out.left_out_files > len(names) else ""
    files = figures.count(left_out.left_out_files)
    return "files left out", files, f"names begin with _ or a dot: {', '.join(names)}{more}"


def _cost_lines(report: Report) -> list[tuple[str, str, str]]:
    cost = report.whole.cost
    if cost.usd is None:
        return [("cost", figures.usd(None), "unknown: a start has no price.usd_per_hour in its job spec")]
    rate = "" if cost.usd_per_hour is None else f"{figures.usd(cost.usd_per_hour)}/h x "
    counts = {s.replicas for s in report.starts}
    many = counts.pop() if len(counts) == 1 else None
    replicas = "1 replica" if many == 1 else "replicas of each start" if many is None else f"{many} replicas"
    return [
        ("cost", figures.usd(cost.usd), f"{rate}{replicas} x (engine start + generation)"),
        ("  generation", figures.usd(cost.generate_usd), "engine start left out"),
        ("  per 1k rows", figures.usd(cost.usd_per_1k_rows), "whole cost over done rows"),
        (
            "  per 1M prompt",
            figures.usd(cost.usd_per_million_prompt_tokens),
            "whole cost over prompt tokens alone",
        ),
        (
            "  per 1M output",
            figures.usd(cost.usd_per_million_output_tokens),
            "whole cost over output tokens alone",
        ),
    ]


def _kv_covers(covers: str | None) -> str:
    if covers == "steady":
        return "steady part: from median fullness to the last new prompt"
    return "too short for a steady part: samples with a request running" if covers == "running" else "no samples"


def _percentile_cells(figure: Percentiles) -> list[str]:
    values = (figure.p50, figure.p90, figure.p95, figure.p99, figure.max)
    return [*(figures.seconds(value) for value in values), figures.count(figure.count)]
