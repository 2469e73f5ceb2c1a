"""The outlook as tables and as JSON. Only looks: no figure is computed here but sums and shares of what is there."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from bulkgen.outlook.outlook import Outlook
from bulkgen.plan import Lengths
from bulkgen.report import Sheet, figures
from bulkgen.sizing import Range, Serving, Setting, gib

_GROUPS_SHOWN = 3
_BAR = 20


def outlook_tables(outlook: Outlook) -> list[Sheet]:
    """What people see, the most wanted last, where the eye is when the command has ended."""
    sheets = [_lengths(outlook), _histogram(outlook), _shape(outlook)]
    for serving in outlook.servings:
        title = "Engine settings" + (f" on {serving.device.name}" if len(outlook.servings) > 1 else "")
        rows = [(s.name, str(s.value), s.source, _why(s)) for s in serving.settings]
        sheets.append(Sheet(title, ("", "value", "source", "why"), rows))
    if outlook.servings:
        sheets.append(_devices(outlook))
    return sheets


def _lengths(outlook: Outlook) -> Sheet:
    w = outlook.workload
    refused = f", {outlook.refused:,} refused" if outlook.refused else ""
    rows = [_length_row("prompt", w.prompt), _length_row("output budget", w.budget)]
    total = "prompt + budget" if outlook.expected_output is None else f"prompt + {outlook.expected_output:,} at most"
    rows.append(_length_row(total, w.total))
    headers = ("tokens", "all", "mean", "p50", "p90", "p99", "max")
    sent = f", {w.rows:,} of them sent to the engine" if w.unsent else ""
    return Sheet(f"{outlook.name}: {figures.rows(w.rows + w.unsent)}{sent}{refused}", headers, rows, right=range(1, 7))


def _length_row(name: str, lengths: Lengths) -> tuple[str, ...]:
    places = (lengths.tokens, lengths.mean, lengths.p50, lengths.p90, lengths.p99, lengths.max)
    return (name, *(figures.count(place) for place in places))


def _histogram(outlook: Outlook) -> Sheet:
    """Rows by length, prompts and budgets over the same edges."""
    w = outlook.workload
    edges = sorted({*w.prompt.edges[1:], *w.budget.edges[1:]})
    prompts, budgets = (_by_edge(lengths, edges) for lengths in (w.prompt, w.budget))
    used = [i for i, edge in enumerate(edges) if prompts[i] or budgets[i]]
    most = max([*prompts, *budgets, 1])
    rows = [
        (f"{edges[i]:,}", f"{prompts[i]:,}", _bar(prompts[i], most), f"{budgets[i]:,}", _bar(budgets[i], most))
        for i in used
    ]
    headers = ("tokens below", "prompts", "", "budgets", "")
    return Sheet("Rows by length", headers, rows, right=(0, 1, 3))


def _by_edge(lengths: Lengths, edges: list[int]) -> list[int]:
    counts = dict(zip(lengths.edges[1:], lengths.counts, strict=True))
    return [counts.get(edge, 0) for edge in edges]


def _bar(number: int, most: int) -> str:
    return "#" * (max(1, round(_BAR * number / most)) if number else 0)


def _shape(outlook: Outlook) -> Sheet:
    return Sheet("Shape of the workload", ("", ""), list(_shape_lines(outlook)))


def _shape_lines(outlook: Outlook) -> Iterator[tuple[str, str]]:
    w = outlook.workload
    first = outlook.servings[0] if outlook.servings else None
    yield "shape", outlook.phases(first).sentence()
    shares = ", ".join(f"{figures.percent(p.share)} in blocks of {p.block_size}" for p in w.prefixes)
    yield "common prefixes", f"{shares} of all prompt tokens, at most"
    for group in w.groups[:_GROUPS_SHOWN]:
        yield "", f"{figures.rows(group.rows)} begin with the same {group.tokens:,} tokens"
    r = w.repeats
    if r.rows:
        same = f", {r.decided_rows:,} of them with the answer decided (greedy, or one seed)" if r.decided_rows else ""
        yield "repeats", f"{figures.rows(r.rows)} ask what an earlier row asks{same}"
    else:
        yield "repeats", "none"
    if outlook.reused:
        yield "reused", f"{figures.rows(outlook.reused)} have an answer in the cache or an earlier output"
    if w.total.variation is not None and w.total.tail is not None:
        spread = f"coefficient of variation {w.total.variation:.2f}, p99 / p50 {w.total.tail:.1f}"
        yield "how unlike", f"prompt + output: {spread}"
    if outlook.unknown:
        yield "engine", outlook.unknown


def _why(setting: Setting) -> str:
    return f"{setting.reason}; costs: {setting.costs}" if setting.costs else setting.reason


def _devices(outlook: Outlook) -> Sheet:
    servings = outlook.servings
    lines = [list(_device_lines(outlook, serving)) for serving in servings]
    rows = [(names[0][0], *(cell for _, cell in names)) for names in zip(*lines, strict=True)]
    whose = "of one replica" if servings[0].replicas > 1 else ""
    title = f"KV cache, time and cost{f' ({whose}, time and cost of all)' if whose else ''}"
    return Sheet(title, ("", *(serving.device.name for serving in servings)), rows)


def _device_lines(outlook: Outlook, s: Serving) -> Iterator[tuple[str, str]]:
    yield "starts", "no: " + s.fault if s.fault else "yes"
    yield "weights", gib(s.memory.weights_bytes)
    kv = s.memory.kv_cache
    spread = "" if kv.low == kv.high else f" ({gib(kv.low)} to {gib(kv.high)})"
    yield "KV cache", f"{gib(kv.expected)}{spread}"
    yield "bytes a token", f"{s.cache.bytes_per_token:,.0f} in blocks of {s.cache.block_size}"
    yield "tokens it holds", f"{s.capacity.tokens:,}"
    longest = s.cache.settings.max_model_len
    yield (
        "sequences it holds",
        f"{s.capacity.concurrency:.1f} of {longest:,} tokens; {s.concurrency:,.0f} like these rows",
    )
    yield "running at once", f"{s.running:,}, bound by {s.bound}"
    yield "a decode step", f"bound by {'arithmetic' if s.compute_bound else 'memory traffic'}"
    yield "engine steps", f"{s.steps:,} at least"
    if s.fault or s.device.source == "none":
        reason = "does not start" if s.fault else "the rates of this device are not known"
        yield "generation", f"- ({reason})"
        yield "limit of physics", "-"
    else:
        source = "by steps measured here" if s.measured else "by the device's rates, nothing was measured"
        output = "output as budgeted" if outlook.expected_output is None else "output as expected"
        yield "generation", f"{_time(s.seconds)} ({source}; {output})"
        yield "limit of physics", figures.seconds(s.limit_s)
    if (cost := outlook.cost_usd(s)) is not None:
        known = not s.fault and s.device.source != "none"
        span = f"{figures.usd(cost.expected)} ({figures.usd(cost.low)} to {figures.usd(cost.high)})"
        yield "cost", span if known else "-"


def _time(r: Range) -> str:
    return f"{figures.seconds(r.expected)}, {figures.seconds(r.low)} to {figures.seconds(r.high)}"


def outlook_json(outlook: Outlook) -> dict[str, Any]:
    """All of it, for programs: sizes in bytes, times in seconds, shares of one."""
    w = outlook.workload
    phases = outlook.phases(outlook.servings[0] if outlook.servings else None)
    return {
        "name": outlook.name,
        "model": outlook.model,
        "rows": w.rows + w.unsent,
        "refused": outlook.refused,
        "sent": w.rows,
        "reused": outlook.reused,
        "prompt_tokens": w.prompt_tokens,
        "budget_tokens": w.budget_tokens,
        "expected_tokens": w.expected_tokens,
        "lengths": {name: asdict(getattr(w, name)) for name in ("prompt", "budget", "total")},
        "prefixes": [asdict(p) for p in w.prefixes],
        "groups": [asdict(g) for g in w.groups],
        "repeats": asdict(w.repeats),
        "shape": phases.shape,
        "prefill_share": phases.prefill_share,
        "sentence": phases.sentence(),
        "devices": [_serving_json(outlook, s) for s in outlook.servings],
        "unknown": outlook.unknown or None,
    }


def _serving_json(outlook: Outlook, s: Serving) -> dict[str, Any]:
    cost = outlook.cost_usd(s)
    return {
        "device": s.device.name,
        "replicas": s.replicas,
        "fault": s.fault,
        "weights_bytes": s.memory.weights_bytes,
        "kv_cache_bytes": asdict(s.memory.kv_cache),
        "kv_bytes_per_token": s.cache.bytes_per_token,
        "block_size": s.cache.block_size,
        "kv_tokens": s.capacity.tokens,
        "kv_blocks": s.capacity.blocks,
        "max_model_len_concurrency": s.capacity.concurrency,
        "concurrency": s.concurrency,
        "running": s.running,
        "bound": s.bound,
        "compute_bound": s.compute_bound,
        "steps": s.steps,
        "generate_s": asdict(s.seconds),
        "limit_s": s.limit_s,
        "measured": s.measured,
        "cost_usd": None if cost is None else asdict(cost),
        "settings": [asdict(setting) for setting in s.settings],
    }
