"""A row that kills vLLM's process must be found, failed, and cost few restarts; all others are done."""

import json
import math
import tempfile
import time
from pathlib import Path

from tests.conftest import job_in
from tests.harness import Job
from tests.test_real import ROOT, real_job

_GUILTY = 77  # max_tokens of the guilty row, which no other has
_IN_ENGINE = 2 * 16  # rows that an engine with max_num_seqs 16 is given at once


def main(rows: int) -> None:
    """Run a job with one such row, in the middle."""
    with tempfile.TemporaryDirectory() as folder:
        job = real_job(lambda given=None, **sections: job_in(Path(folder), given, **sections), rows)
        guilty = rows // 2
        poison(job, guilty)
        began = time.monotonic()
        ended = job.run(env={"PYTHONPATH": str(ROOT / "tests/poison"), "BULKGEN_TEST_POISON": str(_GUILTY)})
        assert ended.code == 3, ended.err
        codes = {row["id"]: row["error_code"] for row in job.rows()}
        assert codes == {i: "poison" if i == guilty else None for i in range(rows)}
        keys = job.committed_keys()
        assert len(keys) == len(set(keys)) == rows
        restarts = len(job.manifest("restart"))
        most = math.log2(_IN_ENGINE) + 2
        assert restarts <= most
        print(f"{rows - 1} rows done, row {guilty} failed as poison, {restarts} restarts (at most {most:g} allowed)")
        print(f"{time.monotonic() - began:.0f} s")


def poison(job: Job, guilty: int) -> None:
    """Mark a row of a job's input as the one that kills."""
    lines = (job.folder / "in.jsonl").read_text().splitlines()
    job.write([json.loads(line) | ({"limit": _GUILTY} if i == guilty else {}) for i, line in enumerate(lines)])
