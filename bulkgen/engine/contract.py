"""What an engine is, for those who feed one. Nothing here knows vLLM, torch or processes.

To add an engine: one module with a class that keeps this contract, one line in `_KINDS`, an extra in pyproject.toml,
a file in configs/, and its name in the contract tests.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from bulkgen.errors import EngineError
from bulkgen.records import Completion, EngineLimits, EngineStats, Failure, Request

_KINDS = {"vllm": "bulkgen.engine.vllm_engine:VllmEngine", "stub": "bulkgen.engine.stub:StubEngine"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """All that one replica's engine needs to open. JSON-able, since it travels to the replica's process.

    `args` are the engine's own settings under the engine's own names (vLLM: EngineArgs). `incarnation` counts the
    engines that this replica had before.
    """

    kind: str
    model: str
    revision: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    stub: Mapping[str, Any] = field(default_factory=dict)
    incarnation: int = 0

    def to_json(self) -> dict[str, Any]:
        """As a plain dict, for the way to another process."""
        return asdict(self)


class Engine(Protocol):
    """An engine takes requests without blocking and finishes them in its own order.

    Each request that `submit` was given comes back from `poll` exactly once, as a Completion or a Failure, unless it
    was cancelled. An engine that breaks raises EngineError from any call and is of no use after that.
    """

    @property
    def limits(self) -> EngineLimits:
        """What it can hold."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Never waits, never raises for a fault that lies in one request."""

    def cancel(self, indices: Sequence[int]) -> None:
        """Take requests back, finished or not: `poll` will not return them. Unknown ones are passed over."""

    def poll(self) -> list[Completion | Failure]:
        """Compute one step and return what it finished; an empty list where nothing is queued."""

    def stats(self) -> EngineStats:
        """Counters since it was opened; cheap enough to ask after each step."""

    def close(self) -> None:
        """Free the device and leave no process behind. May be called twice."""


def open_engine(settings: EngineSettings) -> Engine:
    """Load the engine of `settings.kind`; takes from milliseconds (stub) to minutes (vLLM). Raises EngineError."""
    try:
        module, name = _KINDS[settings.kind].split(":")
    except KeyError:
        raise EngineError(f"engine.kind: no engine {settings.kind!r}; there are {', '.join(_KINDS)}") from None
    engine: Engine = getattr(importlib.import_module(module), name)(settings)
    return engine
