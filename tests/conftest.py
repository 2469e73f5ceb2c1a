"""Fixtures shared by the tests."""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import Job

# What runs teach is kept for later ones; tests start with nothing.
_STATE = tempfile.TemporaryDirectory(prefix="bulkgen-state-")
os.environ["BULKGEN_HOME"] = _STATE.name
# Users do not have it, and it hides what happens to output that nobody reads.
os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Job]:
    """Write a job on the stub engine over `rows`; further keys of the spec by section."""

    def make(rows: Sequence[Any] | None = None, **sections: Any) -> Job:
        folder = tmp_path / f"job-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return job_in(folder, rows, **sections)

    return make


def job_in(folder: Path, rows: Sequence[Any] | None = None, **sections: Any) -> Job:
    """A job in a folder that is there."""
    spec: dict[str, Any] = {
        "name": "test",
        "model": "stub",
        "input": {"path": "in.jsonl", "id": "id", "prompt": "prompt"},
        "sampling": {"max_tokens": 8},
        "output": {"path": "out.parquet"},
        "engine": {"kind": "stub"},
    }
    for name, section in sections.items():
        spec[name] = {**spec.get(name, {}), **section} if isinstance(section, dict) else section
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    job = Job(folder, spec)
    if rows is not None:
        job.write(rows)
    return job
