"""What a device can do at most: memory, memory bandwidth and arithmetic, from data sheets or measured.

`memory_bytes` is what the driver offers (torch.cuda.get_device_properties().total_memory, which is what vLLM takes its
share of), never the marketed size: a "80 GB" H100 offers 79.2 GiB, a "48 GB" L40S with error correction 44.4 GiB. It
moves by some tenths of a per cent between driver versions. Rates are the vendor's, in powers of ten; arithmetic is
dense, so half of what a data sheet prints "with sparsity", and with accumulation in float32 as engines do it.
"""

import difflib
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bulkgen.errors import SpecError

GIB = 1 << 30


def gib(size: int) -> str:
    """A size in bytes for people."""
    return f"{size / GIB:.1f} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or the processors of one machine.

    `flops` are operations a second by number format (float32 without TF32); a format that is missing has no unit of
    its own. `link_bytes_s` goes to the other devices of the machine, one direction: half of what NVLink's data sheets
    print, or what PCIe offers where there is no NVLink. `nominal` is the marketed size.
    """

    name: str
    kind: Literal["gpu", "cpu"] = "gpu"
    memory_bytes: int
    bandwidth_bytes_s: float
    flops: Mapping[str, float]
    link_bytes_s: float | None = None
    nominal: str = ""
    source: str
    url: str = ""
    aliases: tuple[str, ...] = ()

    def flops_for(self, dtype: str) -> float:
        """Operations a second in the number format that a matmul computes in.

        `auto` is bfloat16 where there is, else float16. fp8 and int8 without a unit of their own are computed in 16
        bits, as vLLM's Marlin kernels do. Raises SpecError for a format that the device cannot compute.
        """
        if dtype in self.flops:
            return self.flops[dtype]
        if dtype == "auto" or dtype in _EIGHT_BITS:
            return self.flops.get("bfloat16") or self.flops["float16"]
        known = ", ".join(self.flops)
        raise SpecError(f"{self.name} does not compute in {dtype}; it knows {known}")


_EIGHT_BITS = ("fp8", "int8")


def find_device(name: str) -> Device:
    """The known device of that name, in any case and punctuation, or as nvidia-smi prints it.

    A bare name that was sold in two sizes (a100, v100) is the smaller. Raises SpecError, with the nearest name.
    """
    wanted = _plain(name)
    if wanted in _BY_NAME:
        return _BY_NAME[wanted]
    near = difflib.get_close_matches(wanted, _BY_NAME, n=1, cutoff=0.5)
    hint = f"; the nearest is {_BY_NAME[near[0]].name}" if near else ""
    raise SpecError(f"{name}: no such device is known{hint}. Known: {', '.join(d.name for d in DEVICES)}")


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", re.sub(r"\([^)]*\)", "", name.lower()))
    return re.sub(r"^(nvidia|amd)?(tesla|geforce|instinct|quadro)?", "", plain)


# Data sheets and white papers: name and address.
_NVIDIA = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/"
_IMAGES = "https://images.nvidia.com/"
_H100 = ("NVIDIA H100 data sheet", "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet")
_H200 = ("NVIDIA H200 data sheet", "https://www.nvidia.com/en-us/data-center/h200/")
_GH200 = ("NVIDIA GH200 data sheet", "https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip")
_B200 = ("NVIDIA DGX B200 data sheet", "https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet")
_GB200 = ("NVIDIA GB200 NVL72 data sheet", "https://www.nvidia.com/en-us/data-center/gb200-nvl72/")
_A100 = ("NVIDIA A100 data sheet", _NVIDIA + "a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf")
_L40S = ("NVIDIA L40S data sheet", "https://www.nvidia.com/en-us/data-center/l40s/")
_ADA = (
    "NVIDIA Ada GPU architecture white paper 2.02",
    _IMAGES + "aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-V2.02.pdf",
)
_ADA_PRO = (
    "NVIDIA Ada professional GPU architecture white paper 1.1",
    _IMAGES + "aem-dam/en-zz/Solutions/technologies/NVIDIA-ADA-GPU-PROVIZ-Architecture-Whitepaper_1.1.pdf",
)
_A10 = ("NVIDIA A10 data sheet", _NVIDIA + "a10/pdf/a10-datasheet.pdf")
_A10G = (
    "NVIDIA A10G data sheet",
    "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
)
_A40 = ("NVIDIA A40 data sheet", _IMAGES + "content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf")
_GA102 = (
    "NVIDIA Ampere GA102 white paper 2.0",
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf",
)
_T4 = (
    "NVIDIA T4 data sheet, memory bandwidth of the product brief PB-09256",
    _NVIDIA + "tesla-t4/t4-tensor-core-datasheet-951643.pdf",
)
_V100 = (
    "NVIDIA V100 data sheet",
    _IMAGES + "content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
)
_RTX50 = (
    "NVIDIA RTX Blackwell architecture white paper",
    _IMAGES + "aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
)
_PRO6000 = (
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition data sheet (its 4000 FP4 TOPS with sparsity, halved for dense, "
    "for 8 and for 16 bits)",
    "https://www.nvidia.com/content/dam/en-zz/Solutions/data-center/rtx-pro-6000-blackwell-workstation-edition/"
    "workstation-blackwell-rtx-pro-6000-workstation-edition-nvidia-us-3519208-web.pdf",
)
_MI300X = ("AMD MI300X data sheet", "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html")
_MI325X = ("AMD MI325X data sheet", "https://www.amd.com/en/products/accelerators/instinct/mi300/mi325x.html")


def _gpu(
    name: str,
    gib: float,
    gb_s: float,
    tflops: tuple[float, float, float | None, float | None],
    link_gb_s: float,
    nominal_gb: int,
    source: tuple[str, str],
    *aliases: str,
    bfloat16: bool = True,
) -> Device:
    """A row of the table: memory in GiB, rates in 10^9 bytes/s and 10^12 operations/s (float32, 16 bits, fp8, int8)."""
    formats = ("float32", "float16", "fp8", "int8")
    flops = {form: rate * 1e12 for form, rate in zip(formats, tflops, strict=True) if rate is not None}
    if bfloat16:
        flops["bfloat16"] = flops["float16"]
    return Device(
        name=name,
        memory_bytes=round(gib * GIB),
        bandwidth_bytes_s=gb_s * 1e9,
        flops=flops,
        link_bytes_s=link_gb_s * 1e9,
        nominal=f"{nominal_gb} GB",
        source=source[0],
        url=source[1],
        aliases=aliases,
    )


# Memory is "GPU 0 has a total capacity of … GiB" from PyTorch's out-of-memory messages and "Free memory on device (…/…
# GiB)" from vLLM's logs, as users published them; the rest is the data sheet's.
# Tensor core rates of GeForce cards with float32 accumulation are half of those with float16 accumulation, which is
# what shops print.
DEVICES = (
    _gpu("gb200", 184.31, 8000, (80, 2500, 5000, 5000), 900, 186, _GB200),
    _gpu("b200", 178.35, 8000, (80, 2250, 4500, 4500), 900, 180, _B200),
    _gpu("h200", 139.80, 4800, (67, 989.5, 1979, 1979), 450, 141, _H200, "h200-sxm"),
    _gpu("h200-nvl", 139.80, 4800, (60, 835.5, 1670.5, 1670.5), 450, 141, _H200),
    _gpu("gh200", 94.50, 4000, (67, 989.5, 1979, 1979), 450, 96, _GH200, "gh200 480gb"),
    _gpu("h100", 79.18, 3350, (67, 989.5, 1979, 1979), 450, 80, _H100, "h100-sxm", "h100-sxm5", "h100 80gb hbm3"),
    _gpu("h100-pcie", 79.18, 2000, (51, 756.5, 1513, 1513), 300, 80, _H100),
    _gpu("h100-nvl", 93.00, 3900, (60, 835.5, 1670.5, 1670.5), 300, 94, _H100),
    _gpu("a100-80", 79.25, 2039, (19.5, 312, None, 624), 300, 80, _A100, "a100-80gb", "a100-sxm4-80gb"),
    _gpu("a100-80-pcie", 79.25, 1935, (19.5, 312, None, 624), 300, 80, _A100, "a100-pcie-80gb", "a100 80gb pcie"),
    _gpu("a100-40", 39.49, 1555, (19.5, 312, None, 624), 300, 40, _A100, "a100", "a100-40gb", "a100-sxm4-40gb"),
    _gpu("a100-40-pcie", 39.49, 1555, (19.5, 312, None, 624), 300, 40, _A100, "a100-pcie-40gb"),
    _gpu("l40s", 44.40, 864, (91.6, 362.05, 733, 733), 32, 48, _L40S),
    _gpu("l40", 44.40, 864, (90.5, 181.05, 362, 362), 32, 48, _ADA),
    _gpu("l4", 22.03, 300, (30.3, 121, 242.5, 242.5), 32, 24, _ADA),
    _gpu("a10", 22.06, 600, (31.2, 125, None, 250), 32, 24, _A10),
    _gpu("a10g", 22.06, 600, (35, 70, None, 140), 32, 24, _A10G),
    _gpu("a40", 44.35, 696, (37.4, 149.7, None, 299.3), 56.25, 48, _A40),
    _gpu("t4", 14.56, 320, (8.1, 65, None, 130), 16, 16, _T4, bfloat16=False),
    _gpu("v100-16", 15.77, 900, (15.7, 125, None, None), 150, 16, _V100, "v100", "v100-sxm2-16gb", bfloat16=False),
    _gpu("v100-32", 31.73, 900, (15.7, 125, None, None), 150, 32, _V100, "v100-sxm2-32gb", bfloat16=False),
    _gpu("v100-16-pcie", 15.77, 900, (14, 112, None, None), 16, 16, _V100, "v100-pcie-16gb", bfloat16=False),
    _gpu("v100-32-pcie", 31.73, 900, (14, 112, None, None), 16, 32, _V100, "v100-pcie-32gb", bfloat16=False),
    _gpu(
        "rtx-pro-6000",
        94.97,
        1792,
        (125, 500, 1000, 1000),
        64,
        96,
        _PRO6000,
        "rtx pro 6000 blackwell workstation edition",
        "rtx pro 6000 blackwell",
    ),
    _gpu("rtx-6000-ada", 47.40, 960, (91.1, 364.2, 728.5, 728.5), 32, 48, _ADA_PRO, "rtx 6000 ada generation"),
    _gpu("rtx-a6000", 47.40, 768, (38.7, 154.8, None, 309.7), 56.25, 48, _GA102, "a6000"),
    _gpu("rtx-5090", 31.36, 1792, (104.8, 209.5, 419, 838), 64, 32, _RTX50, "5090"),
    _gpu("rtx-4090", 23.52, 1008, (82.6, 165.2, 330.3, 660.6), 32, 24, _ADA, "4090"),
    _gpu("rtx-3090", 23.55, 936, (35.6, 71, None, 284), 56.25, 24, _GA102, "3090"),
    _gpu("mi300x", 191.98, 5300, (163.4, 1307.4, 2614.9, 2614.9), 448, 192, _MI300X, "mi300x oam"),
    _gpu("mi325x", 255.98, 6000, (163.4, 1307.4, 2614.9, 2614.9), 448, 256, _MI325X, "mi325x oam"),
)
_BY_NAME = {_plain(name): device for device in DEVICES for name in (device.name, *device.aliases)}


@dataclass(frozen=True, slots=True)
class CpuSpeed:
    """What the processors of a machine reached together: bytes copied (read plus written) and float32 operations."""

    bandwidth_bytes_s: float
    flops: float


# How many times float32's rate a processor reaches in bfloat16, by Linux's name for the instructions: operations a
# cycle and core, 1024 in AMX tiles, 128 with AVX512-BF16 and 64 in AVX-512 float32 (Intel, "Intel AMX" overview and
# optimization manual); BFMMLA does four times the operations of FMLA (Arm, Neoverse V1 optimization guide).
_BFLOAT16_GAIN = (("amx_bf16", 16.0), ("avx512_bf16", 2.0), ("bf16", 4.0))


def cpu_device(
    cores: int | None = None,
    memory_bytes: int | None = None,
    speed: CpuSpeed | None = None,
    cpuinfo: str | None = None,
) -> Device:
    """This machine's processors, or others, from what was measured there; what is None is asked of this machine.

    bfloat16 is float32's measured rate times what its instructions gain at most, so a limit, not an expectation.
    """
    cores = cores or usable_cores()
    cpuinfo = _text("/proc/cpuinfo") if cpuinfo is None else cpuinfo
    speed = speed or measure_cpu(cores)
    bfloat16 = speed.flops * bfloat16_gain(cpuinfo)
    return Device(
        name=f"CPU, {cores} cores",
        kind="cpu",
        memory_bytes=memory_bytes or host_memory(_meminfo(), _cgroup_limit()),
        bandwidth_bytes_s=speed.bandwidth_bytes_s,
        flops={"float32": speed.flops, "bfloat16": bfloat16, "float16": speed.flops},
        nominal=f"{cores} cores",
        source="measured with numpy: copying large arrays and multiplying float32 matrices",
        aliases=("cpu",),
    )


def bfloat16_gain(cpuinfo: str) -> float:
    """How many times float32's rate the processor that `cpuinfo` (/proc/cpuinfo) describes reaches in bfloat16."""
    flags = cpu_flags(cpuinfo)
    return next((gain for flag, gain in _BFLOAT16_GAIN if flag in flags), 1.0)


def cpu_flags(cpuinfo: str | None = None) -> frozenset[str]:
    """Linux's names for the instructions of the processor that `cpuinfo` describes; None is this machine's.

    On them depend the block size of some models and the dtype of others' states.
    """
    cpuinfo = _text("/proc/cpuinfo") if cpuinfo is None else cpuinfo
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def computes_bfloat16() -> bool:
    """Whether this machine's processor has instructions for bfloat16.

    Without them every product goes by way of float32: on a processor with AVX2 alone the demo job took eight times as
    long as in float32 (`generate_s` of `bulkgen run jobs/summaries.yaml --set engine.dtype=bfloat16`, and without).
    """
    return bfloat16_gain(_text("/proc/cpuinfo")) > 1.0


def processor_name() -> str:
    """What this machine's processor calls itself; empty where it does not."""
    found = re.search(r"^(?:model name|CPU part)\s*:\s*(.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else ""


def unknown_gpu(name: str, memory_bytes: int) -> Device:
    """A GPU that is not in the table: its memory is known, its rates are not (`source` none), and stand for nothing."""
    rates = dict.fromkeys(("bfloat16", "float16", "float32"), 1e14)
    return Device(name=name, memory_bytes=memory_bytes, bandwidth_bytes_s=1e12, flops=rates, source="none")


def host_memory(meminfo: str, cgroup_limit: int | None = None) -> int:
    """Bytes of memory, by the text of a memory node's meminfo or /proc/meminfo; a container's limit where it is less.

    Follows vLLM's get_memory_node_info (vllm/utils/cpu_resource_utils.py). Raises SpecError.
    """
    found = re.search(r"^(?:Node \d+ )?MemTotal:\s*(\d+) kB$", meminfo, re.MULTILINE)
    if found is None:
        raise SpecError("this machine does not tell its memory (no MemTotal in /proc/meminfo)")
    total = int(found[1]) * 1024
    return total if cgroup_limit is None else min(total, cgroup_limit)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores(cores: Collection[int]) -> int:
    """How many cores these are where several share one (SMT), by their numbers; as many as they are where unknown."""
    sysfs = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return len({_text(sysfs.format(core)).strip() or core for core in cores})


# Two arrays of at least this size, and of this size a core, are larger than most processors' caches; together with
# matrices that keep every core busy they are measured well within a second.
_COPIED_BYTES, _COPIED_BYTES_A_CORE = 64 << 20, 8 << 20
_MATRIX_ROWS_A_CORE = 384
_MEASURED_S, _LEAST_TRIES = 0.2, 3


def measure_cpu(cores: int | None = None) -> CpuSpeed:
    """Measures this machine, in less than a second. The best of several tries counts, but all cores have to be
    free: other load goes into the figures.

    Copies with one thread a core, as STREAM's Copy (McCalpin, 1995) counts it, and multiplies float32 matrices with
    the threads that numpy's BLAS takes.
    """
    cores = cores or usable_cores()
    copied = max(_COPIED_BYTES, cores * _COPIED_BYTES_A_CORE)
    source = np.ones(copied // 4, np.float32)
    target = np.empty_like(source)
    pairs = list(zip(np.array_split(target, cores), np.array_split(source, cores), strict=True))
    with ThreadPoolExecutor(cores) as pool:
        copy_s = _best_s(lambda: list(pool.map(lambda pair: np.copyto(*pair), pairs)))
    rows = round(_MATRIX_ROWS_A_CORE * cores**0.5)
    square = np.ones((rows, rows), np.float32)
    product = np.empty_like(square)
    matmul_s = _best_s(lambda: np.matmul(square, square, out=product))
    return CpuSpeed(2 * source.nbytes / copy_s, 2 * rows**3 / matmul_s)


def _best_s(work: Callable[[], object]) -> float:
    tries: list[float] = []
    end = time.perf_counter() + _MEASURED_S
    while len(tries) < _LEAST_TRIES or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        tries.append(time.perf_counter() - start)
    return min(tries)


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def _meminfo() -> str:
    """Of the memory node of the first usable core, which is what vLLM looks at; it can be less than the machine's."""
    core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    nodes = sorted(Path(f"/sys/devices/system/cpu/cpu{core}").glob("node[0-9]*"))
    return next(filter(None, (_text(f"{node}/meminfo") for node in nodes)), _text("/proc/meminfo"))


def _cgroup_limit() -> int | None:
    """What a container may use at most: version 2 of Linux's control groups, else version 1; huge means no limit."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _text(path).strip()
        if limit.isdigit():
            return int(limit) if int(limit) < 1 << 62 else None
    return None
