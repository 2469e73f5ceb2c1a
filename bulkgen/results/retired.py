"""Which rows of parts are done, and which are to be done again."""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from bulkgen.codes import TRUNCATED
from bulkgen.records import DONE, FAILED
from bulkgen.results.columns import KEY_TYPE, as_keys
from bulkgen.results.parts import read_part
from bulkgen.results.spool import CommittedPart

Keys = npt.NDArray[np.bytes_]


def keys_of_done(part: CommittedPart) -> Keys:
    """Keys of the done rows of a part that count. Raises OutputError."""
    return _keys(part, frozenset([DONE]))


def keys_to_retry(part: CommittedPart, what: Collection[str]) -> Keys:
    """Keys of the rows of a part that count and are `failed`, `truncated` (cut at max_tokens), or have such a code.

    Codes are those of errors and of warnings. Raises OutputError.
    """
    return _keys(part, frozenset(what))


def _keys(part: CommittedPart, what: frozenset[str]) -> Keys:
    found = [np.empty(0, KEY_TYPE)]
    for batch in read_part(part.path):
        columns = ("status", "finish_reason", "error_code", "warnings")
        rows = zip(*(batch.column(name).to_pylist() for name in columns), strict=True)
        wanted = [not what.isdisjoint(_signs(*row)) for row in rows]
        keys = as_keys(batch.column("key"))[np.array(wanted, bool)]
        found.append(keys if part.retired is None else keys[~np.isin(keys, part.retired)])
    return np.concatenate(found)


def _signs(status: str, finish_reason: str | None, code: str | None, warnings: list[str] | None) -> list[str]:
    """All words by which a row can be asked for."""
    signs = [status, *(warnings or ())]
    if status == FAILED and code is not None:
        signs.append(code)
    if finish_reason == "length":
        signs.append(TRUNCATED)
    return signs
