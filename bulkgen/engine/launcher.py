"""Where replicas run: the launcher's protocol, and the launcher of processes on this machine.

A launcher starts replicas, carries messages and notices deaths. What a replica does is not its business: it runs
`python -m MODULE FD` and speaks lines of JSON. Another launcher (Ray actors, say) keeps the same protocol.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bulkgen.engine.channel import Message
from bulkgen.errors import EngineError
from bulkgen.python import own_environment, own_python


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a replica said, or, with `death` set, the reason why it will say nothing more."""

    replica: int
    message: Message | None = None
    death: str | None = None


class Launcher(Protocol):
    """Starts replicas by number; a number may be started again after its death was reported."""

    def start(self, replica: int, work: Message, env: Mapping[str, str], log: Path) -> None:
        """Start a replica; `work` is its first message, `env` is added to the environment."""

    def send(self, replica: int, message: Message) -> None:
        """Say something to a replica; nothing happens if it is dead."""

    def kill(self, replica: int) -> None:
        """End a replica at once, whatever it does; its death is reported by `events`."""

    def events(self, timeout_s: float) -> list[Event]:
        """What has happened, in order; waits up to `timeout_s` for something to happen. A death comes last."""

    def close(self, grace_s: float) -> list[int]:
        """Wait for replicas that were told to end, then end the rest, and say which. Leaves no process behind."""


class _Process:
    """One replica process and the driver's end of its channel."""

    def __init__(self, process: subprocess.Popen[bytes], ours: socket.socket) -> None:
        self.process = process
        self.socket = ours
        self._torn = b""

    def read(self) -> list[Message] | None:
        """Whole messages that have arrived; None at the end of the line."""
        data = bytearray()
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while chunk := self.socket.recv(1 << 16, socket.MSG_DONTWAIT):
                data += chunk
            if not data:
                return None
        *lines, self._torn = (self._torn + bytes(data)).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> str:
        """End the process and all its children; say how the process itself ended."""
        try:
            # An engine that has already died leaves a return code within moments of closing its end.
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._kill_group()
            code = self.process.wait()
        self._kill_group()
        self.socket.close()
        return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class LocalLauncher:
    """Replicas as processes of this machine, each the leader of its own process group."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._processes: dict[int, _Process] = {}
        self._selector = selectors.DefaultSelector()

    def start(self, replica: int, work: Message, env: Mapping[str, str], log: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as out:
            try:
                process = subprocess.Popen(
                    own_python(self._module, str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=own_environment(env),
                    # Ctrl-C in the terminal is the driver's to handle; and a group of its own can be ended whole.
                    start_new_session=True,
                )
            except OSError as e:
                raise EngineError(f"replica {replica} could not be started: {e.strerror or e}") from e
        self._processes[replica] = _Process(process, ours)
        self._selector.register(ours, selectors.EVENT_READ, replica)
        self.send(replica, work)

    def send(self, replica: int, message: Message) -> None:
        process = self._processes.get(replica)
        if process is not None:
            # A broken line is no news here: its end is reported by `events`.
            with contextlib.suppress(OSError):
                process.socket.sendall(json.dumps(message).encode() + b"\n")

    def kill(self, replica: int) -> None:
        process = self._processes.get(replica)
        if process is not None:
            process.process.kill()

    def events(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        for key, _ in self._selector.select(timeout_s):
            replica: int = key.data
            messages = self._processes[replica].read()
            if messages is None:
                events.append(Event(replica, death=self._bury(replica)))
            else:
                events += [Event(replica, message) for message in messages]
        return events

    def _bury(self, replica: int) -> str:
        process = self._processes.pop(replica)
        self._selector.unregister(process.socket)
        return process.kill()

    def close(self, grace_s: float) -> list[int]:
        until = time.monotonic() + grace_s
        while self._processes and time.monotonic() < until:
            self.events(0.1)
        rest = list(self._processes)
        for replica in rest:
            self._processes[replica].process.kill()
            self._bury(replica)
        return rest
