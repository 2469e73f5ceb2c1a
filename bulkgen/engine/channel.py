"""The line between a run's driver and a replica: JSON objects, one a line, over a socket. Small messages only.

Rows never travel here: a replica reads its shards from the plan and writes its parts to the run folder itself.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import threading
from typing import Any

Message = dict[str, Any]


class Channel:
    """A replica's end. A thread listens, so that the death of the driver is noticed while the engine computes."""

    def __init__(self, fd: int) -> None:
        # An engine's own children must not keep the line open: its end tells the driver of this replica's death.
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="channel", daemon=True).start()

    def _listen(self) -> None:
        with self._socket.makefile("rb") as lines, contextlib.suppress(OSError):
            for line in lines:
                self._inbox.put(json.loads(line))
        # The driver is gone, however it went. Nobody would take what is computed here: end the whole group, engine
        # children included, and leave the device free for the next start.
        os.killpg(os.getpgrp(), signal.SIGKILL)

    def send(self, message: Message) -> None:
        """Send one message; waits only if the driver has stopped reading."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float = 0.0) -> Message | None:
        """The next message, or None when none came in time."""
        try:
            return self._inbox.get(block=timeout_s > 0, timeout=timeout_s or None)
        except queue.Empty:
            return None
