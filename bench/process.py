"""A command measured as its user sees it: wall and processor time, and peak memory of the whole process tree."""

import resource
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_S = 0.05


@dataclass(frozen=True, slots=True)
class Measured:
    """`peak_mb` is the largest sum of resident memory over the tree, in MB; shared pages count once a process.

    `cpu_s`: user and system time of all its processes. `stage_mb`: the peak in each stage that was named.
    """

    seconds: float
    cpu_s: float
    peak_mb: float
    stage_mb: Mapping[str, float]


def run(command: list[str], stage: Callable[[], str] = lambda: "") -> Measured:
    """Run a command to its end; `stage` tells what it is at. Raises CalledProcessError if it fails."""
    began, cpu_before = time.monotonic(), _cpu_of_children()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peaks = {"": 0}
    while process.poll() is None:
        resident, name = sum(_resident_bytes(pid) for pid in _tree(process.pid)), stage()
        peaks[name] = max(peaks.get(name, 0), resident)
        time.sleep(_SAMPLE_S)
    seconds = time.monotonic() - began
    _, errors = process.communicate()
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=errors[-2000:])
    stage_mb = {name: peak / 1e6 for name, peak in peaks.items()}
    return Measured(seconds, _cpu_of_children() - cpu_before, max(stage_mb.values()), stage_mb)


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _tree(root: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
    tree = [root]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    return tree


def _resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * 4096
