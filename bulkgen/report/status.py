"""Where a run stands, seen from another terminal or after the fact: from the manifest and progress.json."""

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bulkgen.report import figures
from bulkgen.report.history import History, sort_records, sum_of
from bulkgen.report.meter import ProgressState
from bulkgen.report.progress import line_of
from bulkgen.rundir import RunDir, read_manifest

if TYPE_CHECKING:
    from rich.console import Console

# A run writes its progress about once a second; after this long without news something stands still.
_SILENT_S = 30.0
_MOVING_STAGES = ("starting", "generating")
# In the others rows are not done and failed, but read or merged.
_LIVE_STAGES = ("planning", *_MOVING_STAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A run at one moment.

    `state`: running, or how the last start ended: finished, stopped, failed, killed; "not started" before
    any. While it runs, `progress` holds the figures as last written, finished rows that are not committed yet
    included, and `age_s` is how long ago that was. Otherwise rows are those committed. `next` says how to go
    on.
    """

    run: str
    state: str
    stage: str | None
    start: int | None
    pid: int | None
    host: str | None
    replicas: int
    restarts: int
    rows: int
    done: int
    failed: int
    refused: int
    pending: int
    message: str | None
    progress: ProgressState | None
    age_s: float | None
    next: str


def load_status(folder: Path, alive: bool, *, now: float | None = None) -> Status:
    """Read where a run stands. `alive`: a process holds the run's lock at this moment."""
    run = RunDir(folder)
    history = sort_records(read_manifest(run.manifest))
    last = history.starts[-1] if history.starts else None
    written = _read_progress(run.progress)
    if last is None:
        state = "running" if alive else "not started"
    else:
        # The manifest of a held run can end with the end of an earlier start: the present one has just begun.
        state = "running" if alive else last.outcome(alive=False)
    fresh = alive and last is not None and not last.ends and written.get("start") == last.number
    progress = _progress_state(written) if fresh else None
    # Never negative, although a clock can have been set back in between.
    age_s = max(0.0, (time.time() if now is None else now) - written["time"]) if fresh else None
    live = progress is not None and progress.rows and written.get("stage") in _LIVE_STAGES
    counts = _live_counts(progress) if live and progress is not None else _committed_counts(history)
    return Status(
        run=str(run.path),
        state=state,
        stage=_stage(state, written if fresh else {}),
        start=last.number if last else None,
        pid=last.began.get("pid") if last else None,
        host=last.began.get("host") if last else None,
        replicas=last.began["replicas"] if last else 0,
        restarts=len(last.restarts) if last else 0,
        **counts,
        message=last.ends[-1].get("message") if last and last.ends and not alive else None,
        progress=progress,
        age_s=age_s,
        next=_next(state, counts, age_s),
    )


def status_json(status: Status) -> dict[str, Any]:
    """The status as JSON-able data."""
    return asdict(status)


def render_status(status: Status, console: "Console") -> None:
    """Print the status, the most important line first."""
    finished = status.done + status.failed + status.refused
    share = f" ({figures.percent(finished / status.rows)})" if status.rows else ""
    lines = [f"{status.run}: {status.state}{f', {status.stage}' if status.stage else ''}"]
    kind = "finished" if status.progress is not None else "committed"
    lines.append(
        f"rows      {finished:,} of {status.rows:,} {kind}{share}: {status.done:,} done, "
        f"{status.failed:,} failed, {status.refused:,} refused by planning, {status.pending:,} pending"
    )
    if status.progress is not None and status.stage in _MOVING_STAGES:
        lines.append(f"now       {line_of(status.progress)}")
    if status.start is not None:
        who = f", process {status.pid} on {status.host}" if status.state == "running" else ""
        lines.append(f"start     {status.start}{who}, {status.replicas} replica(s), {status.restarts} restart(s)")
    if status.message:
        lines.append(f"message   {status.message}")
    lines.append(f"next      {status.next}")
    for line in lines:
        console.print(figures.visible(line, console.encoding, limit=4000), markup=False, highlight=False, emoji=False)


def _read_progress(path: Path) -> Mapping[str, Any]:
    # It is replaced atomically, so what does not read was not written by a run: the manifest says enough.
    try:
        written = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return written if isinstance(written, dict) and "time" in written else {}


def _progress_state(written: Mapping[str, Any]) -> ProgressState:
    known = {f.name: written[f.name] for f in dataclasses.fields(ProgressState) if written.get(f.name) is not None}
    return ProgressState(**known)


def _live_counts(state: ProgressState) -> dict[str, int]:
    finished = state.done + state.failed + state.refused
    return {
        "rows": state.rows,
        "done": state.done,
        "failed": state.failed,
        "refused": state.refused,
        "pending": max(0, state.rows - finished),
    }


def _committed_counts(history: History) -> dict[str, int]:
    plan = history.plan
    if plan is None:
        return dict.fromkeys(("rows", "done", "failed", "refused", "pending"), 0)
    # Which of the earlier failures are still in the input, when some rows no longer are, stands in the parts.
    # Reading them is the report's business; here only failures since the current plan count as failures then.
    parts = plan.after if plan.stale_rows else [*plan.before, *plan.after]
    failed = sum_of(parts, "failed")
    return {
        "rows": plan.rows,
        "done": plan.committed - failed,
        "failed": failed,
        "refused": plan.refused,
        "pending": plan.left,
    }


def _stage(state: str, written: Mapping[str, Any]) -> str | None:
    if state != "running":
        return None
    return str(written.get("stage", "beginning"))


def _next(state: str, counts: Mapping[str, int], age_s: float | None) -> str:
    if state == "running":
        if age_s is not None and age_s > _SILENT_S:
            return f"no news for {figures.seconds(age_s)}; see run.log and the engine's log in the run folder"
        return "wait, or stop it with Ctrl-C or SIGTERM: what is finished is kept"
    again = "`bulkgen run` with the same job spec"
    if state == "finished":
        bad = counts["failed"] + counts["refused"]
        return (
            f"`bulkgen failures` says why {figures.rows(bad)} failed"
            if bad
            else f"nothing to do; {again} generates new rows alone"
        )
    kept = figures.rows(counts["done"] + counts["failed"])
    goes_on = f"{again} goes on; {kept} are committed and will not be generated again"
    return f"mend what the message says, then {goes_on}" if state == "failed" else goes_on
