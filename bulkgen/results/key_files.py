"""Files of row keys that records of the manifest name: of rows to be done again, and of rows whose results are kept."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bulkgen.errors import OutputError
from bulkgen.results.columns import KEY_TYPE
from bulkgen.rundir import whole_file

# `content`: a hash of what the row itself brings to its request.
KEPT_TYPE = np.dtype([("key", KEY_TYPE), ("content", "<u8")])

Keys = npt.NDArray[np.bytes_]
Kept = npt.NDArray[np.void]


def write_keys(path: Path, keys: Keys) -> None:
    """Write row keys, sorted, whole or not at all. Raises OutputError."""
    _write(path, np.sort(keys))


def load_keys(path: Path, rows: int) -> Keys:
    """Row keys that `write_keys` wrote. Raises OutputError if they are not all there."""
    return _load(path, KEY_TYPE, rows)


def write_kept(path: Path, keys: Keys, contents: npt.NDArray[np.uint64]) -> None:
    """Write rows that are kept, whole or not at all. Raises OutputError."""
    kept = np.empty(len(keys), KEPT_TYPE)
    kept["key"], kept["content"] = keys, contents
    _write(path, kept)


def load_kept(path: Path, rows: int) -> Kept:
    """Rows that `write_kept` wrote, in KEPT_TYPE. Raises OutputError if they are not all there."""
    return _load(path, KEPT_TYPE, rows)


def _write(path: Path, rows: npt.NDArray[Any]) -> None:
    with whole_file(path) as temporary:
        rows.tofile(temporary)


def _load(path: Path, dtype: np.dtype[Any], rows: int) -> npt.NDArray[Any]:
    try:
        found = np.fromfile(path, dtype)
    except OSError as e:
        raise OutputError(f"{path}: cannot be read ({e.strerror or e}); restore it from a copy") from e
    if len(found) != rows:
        raise OutputError(f"{path}: holds {len(found)} row keys instead of {rows}; restore it from a copy")
    return found
