"""Put on the path of a run under test: stops its processes at a named place, or lets the stub engine end badly.

Python imports this at its start where its folder is on PYTHONPATH; bulkgen knows nothing of it. The environment says
what to do, and for which process a thing is meant: only where the named module is loaded does anything happen.

    BULKGEN_TEST_PAUSE=module:Class.method:nth:folder   before the nth call, make folder/reached, wait for folder/go
    BULKGEN_TEST_LINGER=thread | child | shutdown       what keeps the stub engine's process from ending
    BULKGEN_TEST_TELL=row | start                       the stub engine fails a row, or its start, and tells a secret
"""

import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_LONG_S = 600
_STUB = "bulkgen.engine.stub"


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path, self._change)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, change: Callable[[ModuleType], None]) -> None:
        super().__init__(name, path)
        self._change = change

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._change(module)


def _pause(place: str, nth: int, folder: Path) -> Callable[[ModuleType], None]:
    def change(module: ModuleType) -> None:
        *owners, name = place.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part)
        inner = getattr(owner, name)
        calls = 0

        def paused(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                (folder / "reached").touch()
                while not (folder / "go").exists():
                    time.sleep(0.02)
            return inner(*args, **more)

        setattr(owner, name, paused)

    return change


def _linger(how: str) -> Callable[[ModuleType], None]:
    def change(module: ModuleType) -> None:
        engine = module.StubEngine
        begin = engine.__init__

        def init(self: Any, settings: Any) -> None:
            begin(self, settings)
            if how == "thread":
                threading.Thread(target=time.sleep, args=(_LONG_S,)).start()
            elif how == "child":
                subprocess.Popen(["sleep", str(_LONG_S)])

        engine.__init__ = init
        if how == "shutdown":
            engine.close = lambda self: time.sleep(_LONG_S)

    return change


def _tell(when: str) -> Callable[[ModuleType], None]:
    def change(module: ModuleType) -> None:
        engine, error, failure = module.StubEngine, module.EngineError, module.Failure
        words = f"401 for {os.environ['HF_TOKEN']} at {os.environ['HTTPS_PROXY']}"
        begin, poll = engine.__init__, engine.poll

        def init(self: Any, settings: Any) -> None:
            if when == "start":
                raise error(words)
            begin(self, settings)

        engine.__init__ = init
        if when == "row":
            engine.poll = lambda self: [failure(done.index, "refused_by_engine", words) for done in poll(self)]

    return change


if "BULKGEN_TEST_PAUSE" in os.environ:
    _module, _place, _nth, _folder = os.environ["BULKGEN_TEST_PAUSE"].split(":")
    sys.meta_path.insert(0, _Finder(_module, _pause(_place, int(_nth), Path(_folder))))
if "BULKGEN_TEST_LINGER" in os.environ:
    sys.meta_path.insert(0, _Finder(_STUB, _linger(os.environ["BULKGEN_TEST_LINGER"])))
if "BULKGEN_TEST_TELL" in os.environ:
    sys.meta_path.insert(0, _Finder(_STUB, _tell(os.environ["BULKGEN_TEST_TELL"])))
