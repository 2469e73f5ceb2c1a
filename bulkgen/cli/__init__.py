"""The command line: options in, the main path called, tables and exit codes out. No work is done here.

Each command imports what it needs when it runs, so that `bulkgen --help` costs nothing.
"""

import signal
import sys


def main() -> None:
    """Entry point of the `bulkgen` command."""
    # What schedulers send as a warning must not end a command that has just begun, or ends.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        from bulkgen.cli.app import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


__all__ = ["main"]
