"""The audit of installed packages, with a stand-in for pip-audit: what fails a check, and what does not."""

import json
import subprocess
from types import ModuleType
from typing import Any

import pytest

from tests.harness import load_tool

SOUND = {"name": "sound", "version": "1", "vulns": []}
UNKNOWN = {"name": "unknown", "skip_reason": "Dependency not found on PyPI"}


@pytest.fixture
def audit() -> ModuleType:
    return load_tool("audit")


def answers(monkeypatch: pytest.MonkeyPatch, out: str, err: str = "", code: int = 0) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, out, err)

    monkeypatch.setattr(subprocess, "run", run)


def weak(*fix_versions: str) -> dict[str, Any]:
    return {"name": "weak", "version": "2", "vulns": [{"id": "PYSEC-0000-1", "fix_versions": fix_versions}]}


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        ([SOUND], 0, "1 of 1 packages looked at, 0 vulnerabilities, 0 to be mended"),
        ([SOUND, UNKNOWN, weak("2.1")], 1, "weak 2: PYSEC-0000-1: mended by 2.1"),
        ([SOUND, weak()], 0, "weak 2: PYSEC-0000-1: no version mends it yet"),
        ([UNKNOWN, UNKNOWN], 0, "skipped: the package index tells nothing about any of 2 packages"),
    ],
)
def test_what_fails_and_what_does_not(
    audit: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    packages: list[dict[str, Any]],
    code: int,
    said: str,
) -> None:
    answers(monkeypatch, json.dumps({"dependencies": packages, "fixes": []}))
    assert audit.main() == code
    assert said in capsys.readouterr().out


def test_one_that_is_accepted_for_a_reason(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, json.dumps({"dependencies": [weak("2.1")], "fixes": []}))
    monkeypatch.setattr(audit, "ACCEPTED", {"PYSEC-0000-1": "only in what bulkgen does not call"})
    assert audit.main() == 0
    assert "only in what bulkgen does not call" in capsys.readouterr().out


def test_a_service_that_cannot_be_reached_is_one_line(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, "", "Traceback\nConnectionError: no route to host", 1)
    assert audit.main() == 0
    assert capsys.readouterr().out == "audit: skipped: ConnectionError: no route to host\n"
