"""The command line: options in, the main path called, tables and exit codes out. No work is done here.

Each command imports what it needs when it runs, so that `bulkgen --help` costs nothing.
"""

from bulkgen.cli.app import main

__all__ = ["main"]
