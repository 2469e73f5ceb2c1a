"""Files of rows that were done with other settings and are kept: key and content of each."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from bulkgen.errors import OutputError
from bulkgen.results.columns import KEY_TYPE
from bulkgen.rundir import whole_file

# `content`: a hash of what the row itself brings to its request.
KEPT_TYPE = np.dtype([("key", KEY_TYPE), ("content", "<u8")])

Kept = npt.NDArray[np.void]


def write_kept(path: Path, keys: npt.NDArray[np.bytes_], contents: npt.NDArray[np.uint64]) -> None:
    """Write rows that are kept, whole or not at all. Raises OutputError."""
    rows = np.empty(len(keys), KEPT_TYPE)
    rows["key"], rows["content"] = keys, contents
    with whole_file(path) as temporary:
        rows.tofile(temporary)


def load_kept(path: Path, rows: int) -> Kept:
    """Rows that `write_kept` wrote. Raises OutputError if they are not all there."""
    try:
        kept = np.fromfile(path, KEPT_TYPE)
    except OSError as e:
        raise OutputError(f"{path}: cannot be read ({e.strerror or e}); restore it from a copy") from e
    if len(kept) != rows:
        raise OutputError(f"{path}: holds {len(kept)} rows instead of {rows}; restore it from a copy")
    return kept
