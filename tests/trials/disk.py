"""A job whose disk gets full in the middle must end with a sentence and go on once there is room. As root."""

import subprocess
import tempfile
import time
from pathlib import Path

from tests.conftest import job_in
from tests.harness import Job
from tests.test_real import assert_done, committed, real_job

_FREE_BYTES = 48 << 10  # what is left when the disk is filled, in the middle of generation


def main(rows: int) -> None:
    """Fill a small tmpfs while the job generates, then make room."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True)
        try:
            _trial(rows, Path(folder))
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def _trial(rows: int, folder: Path) -> None:
    job = real_job(lambda given=None, **sections: job_in(folder, given, **sections), rows)
    process = job.start()
    while process.poll() is None and not committed(job):
        time.sleep(0.05)
    ballast = _fill(folder)
    said, _ = process.communicate()
    assert process.returncode == 6, said
    sentence = next(line for line in said.splitlines() if line.startswith("bulkgen: "))
    kept = _keys(job)
    print(f"exit 6 with {len(kept)} of {rows} rows committed: {sentence.replace(str(folder), '...')}")
    ballast.unlink()
    ended = job.run()
    assert ended.code == 0, ended.err
    assert_done(job, rows)
    assert kept <= _keys(job)
    print(f"went on: {rows} rows done, each once, those {len(kept)} not again")


def _fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass
        file.truncate(max(0, file.tell() - _FREE_BYTES))
    return ballast


def _keys(job: Job) -> set[bytes]:
    keys = job.committed_keys()
    assert len(keys) == len(set(keys)), "a row was committed twice"
    return set(keys)
