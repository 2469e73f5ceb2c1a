"""`python -m tests.faults --seed 123` or `--seeds 0:500 [--jobs 2]`: run schedules of faults outside of pytest."""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.drive import Result, run_schedule
from tests.faults.schedule import make_schedule


def main() -> int:
    """Returns 1 where a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="run one schedule and tell what happens")
    which.add_argument("--seeds", metavar="A:B", help="run the schedules from A up to, not including, B")
    parser.add_argument("--jobs", type=int, default=1, help="schedules at a time")
    parser.add_argument("--keep", action="store_true", help="keep the folders, also of those that went well")
    options = parser.parse_args()
    if options.seed is not None:
        result = _run(options.seed, True, options.keep)
        return 1 if result.broken else 0
    first, last = (int(number) for number in options.seeds.split(":"))
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda seed: _run(seed, False, options.keep), range(first, last)))
    _show(results, time.monotonic() - began)
    return 1 if any(result.broken for result in results) else 0


def _run(seed: int, aloud: bool, keep: bool) -> Result:
    folder = Path(tempfile.mkdtemp(prefix=f"faults-{seed}-"))
    result = run_schedule(make_schedule(seed), folder, print if aloud else _hush)
    if result.broken:
        print(f"seed {seed}: BROKEN: {result.broken}\n  folder: {folder}", flush=True)
    elif aloud:
        print(f"seed {seed}: all well after {result.wall_s:.1f} s")
    if keep and not result.broken:
        print(f"  folder: {folder}")
    elif not result.broken:
        shutil.rmtree(folder)
    return result


def _hush(_: str) -> None:
    """Say nothing."""


def _show(results: Sequence[Result], wall_s: float) -> None:
    starts = sum(len(result.codes) for result in results)
    quiet = [result.seed for result in results if not result.fired]
    broken = [result.seed for result in results if result.broken]
    print(f"{len(results)} schedules, {starts} starts, {wall_s:.0f} s; {len(broken)} broken: {broken}")
    print(f"without any fault that struck: {len(quiet)}")
    for title, counter in (
        ("fault", Counter(name for result in results for name in result.fired)),
        ("exit code", Counter(str(code) for result in results for code in result.codes)),
    ):
        print(f"\n{title:<34}{'times':>7}")
        for name, times in sorted(counter.items()):
            print(f"{name:<34}{times:>7}")


if __name__ == "__main__":
    sys.exit(main())
