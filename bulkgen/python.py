"""How processes of our own are started in Python: what lies in the user's working directory is no module of theirs."""

import os
import sys
from collections.abc import Mapping


def own_python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module, with the same Python as this one."""
    return [sys.executable, "-P", "-m", module, *arguments]


def own_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with `more`, for one whose own processes look no more into the working directory."""
    return {**os.environ, "PYTHONSAFEPATH": "1", **(more or {})}
