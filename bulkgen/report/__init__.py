"""What a run did and what it cost: figures, tables, progress while it runs, status afterwards.

Reads the manifest, the part files and the timeline; writes nothing but reports. It generates and
commits nothing.
The names below load their module when first asked for: importing the package imports no polars, rich or tqdm.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bulkgen.report.figures import visible
    from bulkgen.report.files import write_reports
    from bulkgen.report.meter import Meter, ProgressState, Rates, Tally
    from bulkgen.report.model import Computed, Report, ShardReport, StartReport, report_json
    from bulkgen.report.progress import Progress
    from bulkgen.report.render import render_report
    from bulkgen.report.sheet import Sheet, print_sheets
    from bulkgen.report.status import Status, load_status, render_status, status_json
    from bulkgen.report.steps import StepWindow, step_windows
    from bulkgen.report.summary import summarize

__all__ = [
    "Computed",
    "Meter",
    "Progress",
    "ProgressState",
    "Rates",
    "Report",
    "ShardReport",
    "Sheet",
    "StartReport",
    "Status",
    "StepWindow",
    "Tally",
    "load_status",
    "print_sheets",
    "render_report",
    "render_status",
    "report_json",
    "status_json",
    "step_windows",
    "summarize",
    "visible",
    "write_reports",
]

_HOMES = {
    "figures": ("visible",),
    "files": ("write_reports",),
    "meter": ("Meter", "ProgressState", "Rates", "Tally"),
    "model": ("Computed", "Report", "ShardReport", "StartReport", "report_json"),
    "progress": ("Progress",),
    "render": ("render_report",),
    "sheet": ("Sheet", "print_sheets"),
    "status": ("Status", "load_status", "render_status", "status_json"),
    "steps": ("StepWindow", "step_windows"),
    "summary": ("summarize",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"bulkgen.report.{module}"), name)
    raise AttributeError(f"module 'bulkgen.report' has no attribute {name!r}")
