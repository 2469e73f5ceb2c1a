"""How long engine steps took here before: learned from each run, by model, device and engine, kept for later plans.

One small file a combination, and one for the processor's speed, in the state folder: `BULKGEN_HOME`, else
`$XDG_STATE_HOME/bulkgen`, else `~/.local/state/bulkgen`. Nothing depends on it: without a place to keep it, plans know
the device's rates only.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from bulkgen.errors import OutputError
from bulkgen.report import StepWindow
from bulkgen.rundir import whole_file
from bulkgen.sizing import CpuSpeed, Step, StepModel, StepSample, calibrate, measure_cpu, processor_name, usable_cores

# Fewer windows of about a second tell too little of four numbers.
_LEAST_WINDOWS = 20
_LARGEST_ERROR = 0.5
_FORMAT = 1

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Steps as measured: the model of them, from how many windows, and its mean relative error (0.1: 10%)."""

    steps: StepModel
    windows: int
    error: float
    measured_at: float


def state_folder() -> Path | None:
    """Where bulkgen keeps what outlives runs; None where there is no such place."""
    if own := os.environ.get("BULKGEN_HOME"):
        return Path(own)
    if base := os.environ.get("XDG_STATE_HOME"):
        return Path(base) / "bulkgen"
    try:
        return Path.home() / ".local" / "state" / "bulkgen"
    except RuntimeError:
        return None


def load_profile(key: Mapping[str, Any]) -> Profile | None:
    """What was learned under just this key; None where nothing was, or it cannot be read."""
    return _find(key, _profile)


def _profile(found: Mapping[str, Any]) -> Profile | None:
    if found["format"] != _FORMAT:
        return None
    return Profile(
        steps=StepModel(**found["steps"]),
        windows=found["windows"],
        error=found["error"],
        measured_at=found["measured_at"],
    )


def learn_profile(key: Mapping[str, Any], windows: Sequence[StepWindow]) -> Profile | None:
    """Keep what these windows tell, if they tell enough; what was learned before is replaced. Never fails."""
    if len(windows) < _LEAST_WINDOWS:
        return None
    found = calibrate([_sample(window) for window in windows])
    if found.error > _LARGEST_ERROR:
        return None
    profile = Profile(steps=found.model, windows=found.samples, error=found.error, measured_at=time.time())
    return profile if _keep(key, {"format": _FORMAT, **asdict(profile)}) else None


def cpu_speed() -> CpuSpeed:
    """What this machine's usable cores reach at best: now (measured in half a second), or when they had less to do."""
    key = {"processor": processor_name(), "cores": usable_cores(), "what": "speed"}
    now, before = measure_cpu(), _find(key, lambda found: CpuSpeed(**found["speed"]))
    best = before or now
    best = CpuSpeed(max(best.bandwidth_bytes_s, now.bandwidth_bytes_s), max(best.flops, now.flops))
    if best != before:
        _keep(key, {"speed": asdict(best)})
    return best


def _find(key: Mapping[str, Any], read: Callable[[Mapping[str, Any]], _Found | None]) -> _Found | None:
    """What is kept under just this key, as `read` makes it of what its file holds; None where it cannot."""
    path = _path(key)
    if path is None:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return read(found) if found["key"] == _plain(key) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(key: Mapping[str, Any], what: Mapping[str, Any]) -> bool:
    """Replace what is kept under a key; where it cannot be written, nothing is lost but what it would have said."""
    path = _path(key)
    if path is None:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps({"key": _plain(key), **what}, indent=1))
    except (OSError, OutputError):
        return False
    return True


def _sample(window: StepWindow) -> StepSample:
    step = Step(
        prefill_tokens=max(0, window.prefill_tokens),
        decode_sequences=max(0, window.decode_tokens),
        context_tokens=max(0, window.context_tokens),
    )
    return StepSample(step, window.seconds, window.steps)


def _path(key: Mapping[str, Any]) -> Path | None:
    folder = state_folder()
    if folder is None:
        return None
    digest = blake2b(json.dumps(_plain(key), sort_keys=True).encode(), digest_size=8).hexdigest()
    return folder / "profiles" / f"{digest}.json"


def _plain(key: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in key.items()}
