"""Set-up of a checkout, without installing anything: what it would run, and what it says where it cannot."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness import load_tool

FILE = Path(__file__).parents[1] / "tools" / "setup.py"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class Commands(list[list[str]]):
    """Stands in for subprocess: notes commands, and fails those that contain a word of `failing`."""

    failing: tuple[str, ...] = ()

    def run(self, command: list[str] | tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        self.append(list(command))
        failed = any(word in part for word in self.failing for part in command)
        return subprocess.CompletedProcess(command, int(failed), "", "RuntimeError: no such operator" if failed else "")


@pytest.fixture
def setup() -> ModuleType:
    return load_tool("setup")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    noted = Commands()
    monkeypatch.setattr(subprocess, "run", noted.run)
    monkeypatch.delenv("BULKGEN_UV", raising=False)
    return noted


def test_the_plain_install_comes_first_and_is_enough(setup: ModuleType, commands: Commands) -> None:
    setup.install("cpu")
    assert len(commands) == 1
    assert CPU_INDEX not in commands[0]


def test_without_a_gpu_the_cpu_index_helps_out(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[str]] = []

    def run(command: list[str] | tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        tried.append(list(command))
        return subprocess.CompletedProcess(command, int(CPU_INDEX not in command), "", "")

    monkeypatch.setattr(subprocess, "run", run)
    setup.install("cpu")
    assert [CPU_INDEX in command for command in tried] == [False, True]


def test_with_a_gpu_a_cpu_build_is_never_taken(setup: ModuleType, commands: Commands) -> None:
    commands.failing = ("install",)
    with pytest.raises(SystemExit):
        setup.install("gpu")
    assert len(commands) == 1
    assert CPU_INDEX not in commands[0]


@pytest.mark.parametrize("clashes", [False, True])
def test_torchvision_goes_only_where_it_does_not_import(
    setup: ModuleType, commands: Commands, clashes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.failing = ("find_spec",) if clashes else ()
    setup.heal_torchvision()
    assert any("uninstall" in command for command in commands) is clashes
    assert ("no such operator" in capsys.readouterr().out) is clashes


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64")])
def test_machines_without_vllm_are_told_so(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(SystemExit, match=f"Linux on x86_64 and aarch64, this is {system} on {machine}"):
        setup.main()


def test_an_old_python_hands_over_to_one_that_runs(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("python3.11", "exit 127"), ("python3.12", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    taken: list[str] = []

    def execv(path: str, arguments: list[str]) -> None:
        taken.append(path)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit):
        setup.continue_with_other_python()
    assert taken == [str(tmp_path / "python3.12")]


def test_no_fitting_python_is_one_sentence(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"Python 3\.11 to 3\.14 is needed, this is .*PYTHON="):
        setup.continue_with_other_python()


def test_it_needs_the_standard_library_alone() -> None:
    script = f"import runpy; runpy.run_path({str(FILE)!r}, run_name='setup')"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True)
