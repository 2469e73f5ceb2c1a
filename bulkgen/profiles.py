"""What was measured here before: how long engine steps take, learned from each run by model, device and engine, and
which engine settings `bulkgen tune` found best for a data set's shape. Kept for later plans and runs.

One small file a combination, and one for the processor's speed, in the state folder: `BULKGEN_HOME`, else
`$XDG_STATE_HOME/bulkgen`, else `~/.local/state/bulkgen`. Nothing depends on it: without a place to keep it, plans know
the device's rates only.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from bulkgen.errors import OutputError
from bulkgen.report import StepWindow
from bulkgen.rundir import whole_file
from bulkgen.sizing import (
    CpuSpeed,
    Measured,
    Rows,
    Step,
    StepModel,
    StepSample,
    calibrate,
    measure_cpu,
    processor_name,
    usable_cores,
)

# Fewer windows of about a second tell too little of four numbers.
_LEAST_WINDOWS = 20
_LARGEST_ERROR = 0.5
_FORMAT = 1
# Data sets are alike whose figures differ by no more than this factor: tomorrow's rows are like today's.
_ALIKE = 2.0

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Steps as measured: the model of them, from how many windows, and its mean relative error (0.1: 10%)."""

    steps: StepModel
    windows: int
    error: float
    measured_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkShape:
    """What the best settings of an engine depend on in a data set: tokens of a row, on average, and how many there are.

    `prefill_tokens` are those of the prompt that no prefix cache holds, `output_tokens` what an answer may have.
    """

    prompt_tokens: float
    prefill_tokens: float
    output_tokens: float
    sequences: int

    @classmethod
    def of(cls, rows: Rows) -> "WorkShape":
        """The shape of the rows of a plan, with the prefix cache of the smallest blocks."""
        number, tokens = max(1, len(rows.prompt)), int(rows.prompt.sum())
        return cls(
            prompt_tokens=tokens / number,
            prefill_tokens=(tokens - max(rows.shared.values(), default=0)) / number,
            output_tokens=int(rows.budget.sum()) / number,
            sequences=rows.answers,
        )

    def factors(self, other: "WorkShape") -> list[float]:
        """By which factor the figures of two shapes differ, each; 1: not at all. Less than one token counts as one."""
        pairs = [(max(1.0, a), max(1.0, b)) for a, b in zip(astuple(self), astuple(other), strict=True)]
        return [max(a, b) / min(a, b) for a, b in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What `bulkgen tune` found for a shape. `values`: what to set; none where the resolved settings were the best.

    `instead_of`: what these would be otherwise. `confirmed`: values that stay as they were, whatever runs teach later.
    `tried`: settings of which other values were measured, and were not faster. `gain`: how much faster it is than the
    resolved settings, as a share of these (0.1: 10 %); `margin`: what a gain has to be more than, so that it is not
    noise. `rows`: in the largest sample.
    """

    shape: WorkShape
    values: Mapping[str, Any]
    instead_of: Mapping[str, Any]
    confirmed: Mapping[str, Any]
    tried: Sequence[str]
    gain: float
    margin: float
    rows: int
    measured_at: float

    def measured(self) -> Measured:
        """As settings are resolved with it."""
        tune = f"bulkgen tune on {time.strftime('%Y-%m-%d', time.localtime(self.measured_at))}"
        before = ", ".join(f"{name} {value}" for name, value in self.instead_of.items())
        faster = f"{tune}: {self.gain:.0%} faster than {before}"
        none = f"{tune}: nothing else was faster by more than {self.margin:.0%}, the noise"
        return Measured(
            choices={name: (value, faster) for name, value in self.values.items()}
            | {name: (value, none) for name, value in self.confirmed.items()},
            notes=dict.fromkeys(self.tried, none),
        )


def load_tuned(key: Mapping[str, Any]) -> list[Tuned]:
    """What was found under just this key, for different shapes."""
    return _find(key, _tuned) or []


def _tuned(found: Mapping[str, Any]) -> list[Tuned]:
    if found["format"] != _FORMAT:
        return []
    return [Tuned(**{**entry, "shape": WorkShape(**entry["shape"])}) for entry in found["tuned"]]


def nearest(found: Sequence[Tuned], shape: WorkShape) -> Tuned | None:
    """Of what was found, what is for the shape that is most like this one; None where none is like it."""
    alike = [tuned for tuned in found if max(tuned.shape.factors(shape)) <= _ALIKE]
    return min(alike, key=lambda tuned: prod(tuned.shape.factors(shape)), default=None)


def keep_tuned(key: Mapping[str, Any], tuned: Tuned) -> bool:
    """Keep what was found, in place of what was for shapes like this one. False where there is no place to keep it."""
    others = [known for known in load_tuned(key) if max(known.shape.factors(tuned.shape)) > _ALIKE]
    return _keep(key, {"format": _FORMAT, "tuned": [asdict(found) for found in (*others, tuned)]})


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
