"""A whole run that must end in a certain way, and what became of its rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.harness import Job

Rows = list[dict[str, Any]]


def run(job: Job, code: int, *options: str) -> Rows:
    """Run a job, which must end with `code`; its rows, after a check that rows and failures add up."""
    ended = job.run(*options)
    assert ended.code == code, ended.out + ended.err
    assert "Traceback" not in ended.err
    rows = job.rows()
    assert {row["status"] for row in rows} <= {"done", "failed"}
    assert [row["row_key"] for row in rows if row["status"] == "failed"] == [row["row_key"] for row in job.failures()]
    assert len({row["row_key"] for row in rows}) == len(rows)
    keys = job.committed_keys()
    assert len(set(keys)) == len(keys) or "--retry" in options
    return rows


def outcomes(rows: Sequence[Mapping[str, Any]], key: str = "id") -> dict[Any, str]:
    """Error code of each row by its id, or its status where it has none."""
    return {row[key]: row["error_code"] or row["status"] for row in rows}
