"""Each replica's part of the machine."""

import os
from pathlib import Path

import pytest

from bulkgen.engine import devices
from bulkgen.engine.devices import divide, gpus_here
from bulkgen.errors import EngineError


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


def test_what_the_driver_says_of_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559'\necho 'NVIDIA L4, [N/A]'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpus_here() == [("NVIDIA H100 80GB HBM3", 81559 << 20)]
    smi.unlink()
    assert gpus_here() == []
