"""`python -m tests.kills`: a real vLLM job, killed with -9 again and again at random moments, must lose nothing.

Prints what each kill met, and ends with an assertion error where a promise was broken.
"""

import argparse
import random
import signal
import tempfile
import time
from pathlib import Path

from tests.conftest import job_in
from tests.harness import Job, bulkgen
from tests.test_real import assert_done, committed, processes_of, real_job, wait_until


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
    wait_until(lambda: not processes_of(job), 10)
    return not ended


def main() -> None:
    """Kill, and kill again, then finish and check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    luck = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        job = real_job(lambda rows=None, **sections: job_in(Path(folder), rows, **sections), arguments.rows)
        keys: set[bytes] = set()
        for number in range(arguments.kills):
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
        assert_done(job, arguments.rows)
        print(f"finished: {arguments.rows} rows, each once; the report's sums are those of the rows")


if __name__ == "__main__":
    main()
