"""The launcher of processes: messages arrive, deaths are told, nothing is left behind, not even grandchildren."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bulkgen.engine.launcher import Event, LocalLauncher

# Replicas do not look for modules in the working directory; these lie in the checkout.
ROOT = {"PYTHONPATH": str(Path(__file__).parent.parent)}


@pytest.fixture
def launcher() -> Iterator[LocalLauncher]:
    launcher = LocalLauncher("tests.fake_replica")
    yield launcher
    launcher.close(0.0)


def wait_for(launcher: LocalLauncher, wanted: str) -> Event:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for event in launcher.events(0.1):
            kind = "death" if event.death is not None else (event.message or {})["type"]
            if kind == wanted:
                return event
    pytest.fail(f"no {wanted} in 20 s")


def born(launcher: LocalLauncher, log: Path, replica: int = 0) -> dict[str, Any]:
    launcher.start(replica, {"hello": "world"}, ROOT, log)
    message = wait_for(launcher, "born").message
    assert message is not None
    assert message["work"] == {"hello": "world"}
    return message


def is_gone(pid: int, within_s: float = 5.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_messages_go_both_ways(launcher: LocalLauncher, tmp_path: Path) -> None:
    born(launcher, tmp_path / "log")
    launcher.send(0, {"type": "say", "text": "ä" * 100_000})
    message = wait_for(launcher, "echo").message
    assert message is not None
    assert message["message"]["text"] == "ä" * 100_000


def test_a_death_is_told_and_takes_the_children_along(launcher: LocalLauncher, tmp_path: Path) -> None:
    child = born(launcher, tmp_path / "log")["child"]
    os.kill(launcher._processes[0].process.pid, signal.SIGKILL)
    assert wait_for(launcher, "death").death == "killed by signal 9"
    assert is_gone(child)
    launcher.send(0, {"type": "say"})
    born(launcher, tmp_path / "log")


def test_closing_leaves_nothing_behind(launcher: LocalLauncher, tmp_path: Path) -> None:
    children = [born(launcher, tmp_path / f"log{i}", i)["child"] for i in range(2)]
    launcher.send(0, {"type": "close"})
    launcher.close(2.0)
    assert all(is_gone(child) for child in children)


def test_a_killed_driver_takes_replicas_and_their_children_along(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from bulkgen.engine.launcher import LocalLauncher
launcher = LocalLauncher("tests.fake_replica")
launcher.start(0, {{}}, {ROOT!r}, Path({str(tmp_path / "log")!r}))
while True:
    for event in launcher.events(1.0):
        print(launcher._processes[0].process.pid, event.message["child"], flush=True)
"""
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.kill()
    driver.communicate()
    assert all(is_gone(pid) for pid in pids)
