"""Put on the path of a run under test: vLLM's process kills itself as soon as it computes a certain request.

The request is the one whose max_tokens is BULKGEN_TEST_POISON. What the package ships knows nothing of this.
"""

import importlib.abc
import importlib.machinery
import os
import signal
import sys
from types import ModuleType
from typing import Any

_TARGET = "bulkgen.engine.vllm_engine"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _poison(module.VllmEngine)


def _poison(engine: Any) -> None:
    submit, poll = engine.submit, engine.poll
    inside: set[int] = set()

    def poisoned_submit(self: Any, requests: Any) -> None:
        inside.update(r.index for r in requests if r.sampling["max_tokens"] == int(os.environ["BULKGEN_TEST_POISON"]))
        submit(self, requests)

    def poisoned_poll(self: Any) -> Any:
        results = poll(self)
        if inside:
            os.kill(os.getpid(), signal.SIGKILL)
        return results

    engine.submit, engine.poll = poisoned_submit, poisoned_poll


if "BULKGEN_TEST_POISON" in os.environ:
    sys.meta_path.insert(0, _Finder())
