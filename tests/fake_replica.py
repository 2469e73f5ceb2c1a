"""A replica for the launcher's tests: has a child, as an engine with workers has, and answers what it is told."""

import subprocess
import sys
import time

from bulkgen.engine.channel import Channel


def main() -> None:
    """Say who the child is, echo messages, end on `close`."""
    channel = Channel(int(sys.argv[1]))
    work = channel.receive(timeout_s=10)
    child = subprocess.Popen(["sleep", "600"])
    channel.send({"type": "born", "work": work, "child": child.pid})
    while True:
        message = channel.receive(timeout_s=0.05)
        if message is not None and message["type"] == "close":
            child.kill()
            channel.send({"type": "closed"})
            return
        if message is not None:
            channel.send({"type": "echo", "message": message})
        time.sleep(0.01)


if __name__ == "__main__":
    main()
