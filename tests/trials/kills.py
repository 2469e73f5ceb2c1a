"""A job killed with -9 again and again at random moments must lose nothing. Prints what each kill met."""

import random
import signal
import tempfile
import time
from pathlib import Path

from tests.conftest import job_in
from tests.harness import Job, bulkgen
from tests.test_real import assert_done, committed, real_job, wait_until


def kill_once(job: Job, moment_s: float, after_commit: bool) -> bool:
    """Start the job and kill it `moment_s` later (after its first new commit, if so). False if it had ended."""
    before = committed(job)
    process = job.start()
    if after_commit:
        while process.poll() is None and committed(job) == before:
            time.sleep(0.05)
    until = time.monotonic() + moment_s
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    ended = process.poll() is not None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not job.processes(), 10)
    return not ended


def main(rows: int, kills: int, seed: int) -> None:
    """Kill, and kill again, then finish and check."""
    luck = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        job = real_job(lambda given=None, **sections: job_in(Path(folder), given, **sections), rows)
        keys: set[bytes] = set()
        for number in range(kills):
            after_commit = luck.random() < 0.5
            moment_s = luck.uniform(0.0, 12.0) if after_commit else luck.uniform(0.5, 25.0)
            killed = kill_once(job, moment_s, after_commit)
            now = job.committed_keys() if committed(job) else []
            assert len(now) == len(set(now)), "a row was committed twice"
            assert keys <= set(now), "a committed row is gone"
            keys = set(now)
            when = f"{moment_s:.1f} s after {'its first commit' if after_commit else 'its start'}"
            print(
                f"kill {number + 1}: {when}: {len(keys)} rows committed{'' if killed else ' (had ended)'}", flush=True
            )
        ended = bulkgen("run", str(job.path))
        assert ended.code == 0, ended.err
        assert_done(job, rows)
        print(f"finished: {rows} rows, each once; the report's sums are those of the rows")
