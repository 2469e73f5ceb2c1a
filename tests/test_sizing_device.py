"""Known devices by every name they go by, and a machine's own processors from what was measured."""

import pytest

from bulkgen.errors import SpecError
from bulkgen.sizing import device
from bulkgen.sizing.device import DEVICES, GIB, CpuSpeed, bfloat16_gain, cpu_device, find_device, host_memory


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-40-pcie"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("H100 SXM", "h100"),
        ("rtx_4090", "rtx-4090"),
        ("A100-80GB", "a100-80"),
        ("NVIDIA GeForce RTX(TM) 4090", "rtx-4090"),
    ],
)
def test_a_device_is_found_as_people_and_drivers_write_it(printed: str, name: str) -> None:
    assert find_device(printed).name == name


def test_no_two_devices_share_a_name() -> None:
    names = [device._plain(name) for known in DEVICES for name in {known.name, *known.aliases}]
    assert len(names) == len(set(names)) == len(device._BY_NAME)


def test_an_unknown_device_is_refused_with_the_nearest_and_all() -> None:
    with pytest.raises(SpecError, match=r"h10: no such device is known; the nearest is h100\. Known: .*l40s.*mi300x"):
        find_device("h10")
    with pytest.raises(SpecError, match=r"^NVIDIA A100-SXM4-40GB MIG 1g\.5gb: no such device"):
        find_device("NVIDIA A100-SXM4-40GB MIG 1g.5gb")


def test_a_bare_name_of_two_sizes_is_the_smaller() -> None:
    assert find_device("a100").name == "a100-40"
    assert find_device("v100").name == "v100-16"


@pytest.mark.parametrize("known", DEVICES, ids=lambda known: known.name)
def test_figures_are_consistent(known: device.Device) -> None:
    marketed = float(known.nominal.split()[0])
    # Marketed in GB or GiB, less what error correction (a sixteenth, without memory of its own) and the driver take.
    assert 0.85 * marketed * 1e9 < known.memory_bytes <= marketed * GIB
    assert known.flops["float32"] < known.flops["float16"]
    assert known.flops.get("bfloat16", known.flops["float16"]) == known.flops["float16"]
    # Dense: a figure with sparsity would be four times the 16 bit rate. Data sheets round.
    assert known.flops.get("fp8", known.flops["float16"]) <= 2.05 * known.flops["float16"]
    assert known.link_bytes_s is not None
    assert known.link_bytes_s < known.bandwidth_bytes_s
    assert known.url.startswith("https://")


def test_figures_of_the_data_sheets() -> None:
    h100 = find_device("h100")
    assert h100.bandwidth_bytes_s == 3.35e12
    assert h100.flops_for("bfloat16") == pytest.approx(989.5e12)
    assert h100.flops_for("fp8") == pytest.approx(1979e12)
    assert 79 * GIB < h100.memory_bytes < 80 * GIB


def test_formats_that_a_device_lacks() -> None:
    a100, t4 = find_device("a100-80"), find_device("t4")
    assert a100.flops_for("fp8") == a100.flops_for("bfloat16") == a100.flops_for("auto")
    assert a100.flops_for("int8") == 2 * a100.flops_for("auto")
    assert t4.flops_for("auto") == t4.flops_for("float16")
    with pytest.raises(SpecError, match=r"t4 does not compute in bfloat16; it knows float32, float16, int8"):
        t4.flops_for("bfloat16")


MEMINFO = "MemTotal:       24683584 kB\nMemFree:          812340 kB\n"


def test_memory_of_a_machine_and_of_its_container() -> None:
    assert host_memory(MEMINFO) == 24683584 * 1024
    assert host_memory(MEMINFO, 4 * GIB) == 4 * GIB
    assert host_memory(MEMINFO, 400 * GIB) == 24683584 * 1024
    assert host_memory("Node 0 MemTotal:       11888376 kB\nNode 0 MemFree:  9000 kB\n") == 11888376 * 1024
    with pytest.raises(SpecError, match="MemTotal"):
        host_memory("")


@pytest.mark.parametrize(
    ("cpuinfo", "gain"),
    [
        ("flags\t\t: fpu avx2\n", 1),
        ("flags\t\t: fpu avx512f avx512_bf16\n", 2),
        ("flags\t\t: avx512_bf16 amx_bf16 amx_tile\n", 16),
        ("Features\t: fp asimd bf16\n", 4),
        ("", 1),
    ],
)
def test_a_processors_gain_in_bfloat16(cpuinfo: str, gain: float) -> None:
    assert bfloat16_gain(cpuinfo) == gain
    cpu = cpu_device(cores=4, memory_bytes=8 * GIB, speed=CpuSpeed(20e9, 100e9), cpuinfo=cpuinfo)
    assert (cpu.kind, cpu.memory_bytes, cpu.bandwidth_bytes_s) == ("cpu", 8 * GIB, 20e9)
    assert cpu.flops_for("float32") == 100e9
    assert cpu.flops_for("bfloat16") == gain * 100e9


def test_this_machine_is_measured() -> None:
    cpu = cpu_device(cores=1)
    assert 1e8 < cpu.bandwidth_bytes_s < 1e13
    assert 1e8 < cpu.flops_for("float32") < 1e14
    assert cpu.memory_bytes > 1 << 28
