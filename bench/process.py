"""A command measured as its user sees it: wall time, and peak memory of the whole process tree."""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_S = 0.05


@dataclass(frozen=True, slots=True)
class Measured:
    """`peak_mb` is the largest sum of resident memory over the tree, in MB; shared pages count once a process."""

    seconds: float
    peak_mb: float


def run(command: list[str]) -> Measured:
    """Run a command to its end. Raises CalledProcessError if it fails."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(_resident_bytes(pid) for pid in _tree(process.pid)))
        time.sleep(_SAMPLE_S)
    seconds = time.monotonic() - began
    _, errors = process.communicate()
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=errors[-2000:])
    return Measured(seconds, peak / 1e6)


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
