"""How processes of our own are started in Python: what lies in the user's working directory is no module of theirs."""

import gc
import os
import sys
from collections.abc import Mapping


def own_python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module, with the same Python as this one."""
    return [sys.executable, "-P", "-m", module, *arguments]


def own_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with `more`, for one whose own processes look no more into the working directory."""
    return {**os.environ, "PYTHONSAFEPATH": "1", **(more or {})}


def freeze_heap() -> None:
    """Spare the garbage collector what is in memory by now: modules, models, settings, none of which will be garbage.

    It looks through all that it knows again and again where many objects come and stay for a while, as rows do; vLLM
    does the same for its engine (freeze_gc_heap in vllm/utils/gc_utils.py).
    """
    gc.collect()
    gc.freeze()
