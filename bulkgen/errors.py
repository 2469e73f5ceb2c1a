"""Everything bulkgen raises on purpose, as one tree, each branch with its exit code.

    BulkgenError             1   a bug, if it gets this far as itself
    ├── SpecError            2   the job spec or the command line is wrong
    ├── EngineError          4   the engine could not start or kept dying
    ├── HeldError            5   another run holds the output
    ├── DataError            6   input or output unusable
    │   ├── InputError
    │   ├── OutputError
    │   └── TooManyFailures
    └── Stopped             75   stopped before the end, can be resumed

    RowError                     one row cannot be sent; becomes a recorded Failure, never leaves its stage

A bad row is recorded and the job goes on; a dead engine or a failed write raises. Errors of third-party
libraries are translated in the module that calls the library, and nowhere else.
"""

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_ROWS_FAILED = 3


class BulkgenError(Exception):
    """Base of all errors meant for the user: one sentence that names the place and the cure."""

    exit_code = EXIT_BUG


class SpecError(BulkgenError):
    """The job spec, an option, the model name or a template is wrong."""

    exit_code = 2


class EngineError(BulkgenError):
    """The engine could not start, or died more often than a run allows."""

    exit_code = 4


class HeldError(BulkgenError):
    """Another process is working on the same output."""

    exit_code = 5


class DataError(BulkgenError):
    """Input or output is missing, unreadable, not writable or full."""

    exit_code = 6


class InputError(DataError):
    """An input file is missing, unreadable, or not what its name says."""


class OutputError(DataError):
    """The output or the run folder cannot be written."""


class TooManyFailures(DataError):
    """More rows fail than the user allows, or all that were tried: the job is plainly wrong."""


class Stopped(BulkgenError):
    """Stopped by a signal before the end; what is finished is committed and the next start goes on."""

    exit_code = 75


class RowError(Exception):
    """One row cannot be sent: `code` is stable and machine-readable, `message` is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
