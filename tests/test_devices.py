"""Each replica's part of the machine."""

import os

import pytest

from bulkgen.engine import devices
from bulkgen.engine.devices import computes_bfloat16, divide
from bulkgen.errors import EngineError


@pytest.mark.parametrize(
    ("cpuinfo", "computes"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 f16c\nbugs\t\t: avx512_bf16\n", False),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 vaes\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512bw\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16 dgh\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_bfloat16_by_the_processors_own_words(cpuinfo: str, computes: bool) -> None:
    assert computes_bfloat16(cpuinfo) is computes


@pytest.mark.parametrize(("computes", "args"), [(False, {"dtype": "float32"}), (True, {})])
def test_a_processor_without_bfloat16_computes_float32(
    monkeypatch: pytest.MonkeyPatch, computes: bool, args: dict[str, str]
) -> None:
    monkeypatch.setattr(devices, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(devices, "computes_bfloat16", lambda cpuinfo: computes)
    assert divide(1, {})[0].args == {"distributed_executor_backend": "uni", **args}


def test_cores_are_divided_without_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2, 9)))
    shares = divide(3, {})
    assert [share.cores for share in shares] == [(2, 3), (4, 5), (6, 7, 8)]
    assert [share.env["OMP_NUM_THREADS"] for share in shares] == ["2", "2", "3"]
    with pytest.raises(EngineError, match="8 replicas need a core each, this machine offers 7"):
        divide(8, {})


def test_gpus_are_divided_by_the_size_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "runs_on_cpu", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    shares = divide(2, {"tensor_parallel_size": 2})
    assert [share.env["CUDA_VISIBLE_DEVICES"] for share in shares] == ["3,5", "6,7"]
    with pytest.raises(EngineError, match="3 of 2 GPUs each need 6, this machine offers 4"):
        divide(3, {"tensor_parallel_size": 2})
