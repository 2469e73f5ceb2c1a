"""Damaged files: what stands for the rows that cannot be read any more, and which errors mean damage.

A damaged file does not end a job. What can be read of it is read; at the place where reading breaks there stands one
bad row, so that rows still add up and the file is named among the failures. Once the file is mended, the rows before
that place are the same as ever and only the others are new.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from bulkgen.dataset.files import InputFile
from bulkgen.errors import InputError
from bulkgen.records import BadRow

DAMAGED_FILE = "damaged_file"
_CURE = "fetch or write the file again, then run again"


class Damage(Exception):
    """A file cannot be read further, for the reason given, which lies in its bytes. Never leaves this package."""


def damaged_row(file: InputFile, what: str) -> BadRow:
    """What stands where reading breaks; `what` is wrong there."""
    return BadRow(DAMAGED_FILE, f"{file.name}: {what}; {_CURE}")


def damage_in(rows: Sequence[Mapping[str, Any] | BadRow]) -> BadRow | None:
    """The row that stands for damage, which is the last one of a batch, if it is one."""
    last = rows[-1]
    return last if isinstance(last, BadRow) and last.code == DAMAGED_FILE else None


def nothing_readable(damaged: Sequence[BadRow]) -> InputError:
    """What to raise when nothing can be read of any file; `damaged` has one row a file."""
    others = f" (and nothing in {len(damaged) - 1} more)" if len(damaged) > 1 else ""
    return InputError(damaged[0].message + others)


@contextmanager
def reading(file: InputFile) -> Iterator[None]:
    """Tells apart what pyarrow raises about a file: Damage lies in the file.

    What the system says (a file that went away, rights, a disk that fails) and a lack of memory are no damage: they
    may be gone at the next start, whereas a row that failed stays failed until its file changes. They raise InputError.
    """
    try:
        yield
    except MemoryError as error:
        raise InputError(f"{file.name}: takes more memory than there is ({_words(error)})") from error
    except OSError as error:
        if error.errno is None:  # pyarrow's own
            raise Damage(_words(error)) from error
        problem = f"{file.name}: cannot be read ({os.strerror(error.errno)}); check the file and its rights"
        raise InputError(problem) from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise Damage(_words(error)) from error


def _words(error: BaseException) -> str:
    lines = str(error).strip().rstrip(".").splitlines()
    return lines[0] if lines else type(error).__name__
