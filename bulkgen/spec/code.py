"""Engine settings by which a job spec could have code run that is not vLLM's own. A spec has none of them.

A spec may come from somebody else, as data does. Who starts the command can set the same in the command's own
environment, or install what is to be run.
"""

import re
from collections.abc import Mapping
from typing import Any

# Of vLLM's EngineArgs, at any depth: what names a class, a function, a plug-in or a module to be imported, a file
# whose reading runs code, or code that comes with a model.
_SETTINGS = re.compile(
    r"trust_remote_code|.*_cls|.*_class|.*_class_overrides|.*_plugin|.*_module_path|logits_processors|inductor_passes"
    r"|.*_custom_pass|log_config_file|logging_config|inductor_compile_config"
)
_EXECUTORS = (None, "mp", "ray", "uni", "external_launcher")
_BACKENDS = ("", "eager", "inductor")

# Of the environment: what a loader, an interpreter, a compiler or vLLM itself takes code from.
_VARIABLES = re.compile(
    r"LD_.*|DYLD_.*|GCONV_PATH|GLIBC_.*|PYTHON.*|BASH.*|ENV|PATH|SHELL|CC|CXX|CPP|NVCC.*|CUDA_HOME|CUDA_PATH"
    r"|.*_PRELOAD|.*_PLUGINS?|.*_SO_PATH|.*_LIBRARY_PATH|.*_LOGGING_CONFIG_PATH|.*_RUST_FRONTEND_PATH"
    r"|.*_INSECURE_SERIALIZATION|.*_REMOTE_CODE.*"
    # Where compiled code and packages are kept, and where models come from, with the token sent there.
    r"|HOME|XDG_.*|TMPDIR|VLLM_CACHE_ROOT|VLLM_CONFIG_ROOT|TORCHINDUCTOR_.*|TRITON_.*|HF_ENDPOINT"
)


def code_setting(args: Mapping[str, Any]) -> list[str] | None:
    """Where in `args` (vLLM's EngineArgs) code is named, as keys from the outside in; None where it is not."""
    for name, value in args.items():
        if _names_code(name, value):
            return [name]
        if isinstance(value, Mapping) and (inner := code_setting(value)) is not None:
            return [name, *inner]
    return None


def _names_code(name: str, value: Any) -> bool:
    if value is None or value is False:
        return False
    if name == "distributed_executor_backend":
        return value not in _EXECUTORS
    if name == "backend":  # of compilation_config; elsewhere it is one of a few words
        return isinstance(value, str) and value not in _BACKENDS and "." in value
    return _SETTINGS.fullmatch(name) is not None


def code_variable(environment: Mapping[str, Any]) -> str | None:
    """The first variable by which code could be brought in; None for none."""
    return next((name for name in environment if _VARIABLES.fullmatch(name.upper())), None)
