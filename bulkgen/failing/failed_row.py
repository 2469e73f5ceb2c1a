"""A failed row, all of them as an index, and what is asked of where they are on record."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ordinals = npt.NDArray[np.int64]

# What to do about a file of bulkgen's own that cannot be read.
CURE = "run the job again, which makes it anew"


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that failed. `file`, `position` and `id` are None where they are not known."""

    ordinal: int
    code: str
    error: str
    file: str | None = None
    position: int | None = None
    id: Any = None


@dataclass(frozen=True, slots=True)
class Index:
    """All failed rows: ordinals, rising, and for each the place of its code in `codes`."""

    ordinals: Ordinals
    code: npt.NDArray[np.int32]
    codes: list[str]


class Source(Protocol):
    """Where failures are on record."""

    def index(self) -> Index: ...

    def details(self, wanted: Ordinals, places: bool = True) -> Iterator[FailedRow]:
        """What is known of rows, in their order; without `places`, no more than why they failed."""

    def contents(self, wanted: Ordinals) -> Iterator[str | bytes | None]:
        """What rows held, without a look at the input: JSON, or bytes that are none, or None for what is not known."""


def inside(wanted: Ordinals, first: int, rows: int) -> list[int]:
    """Which of consecutive rows are wanted, as places among them."""
    a, b = np.searchsorted(wanted, (first, first + rows))
    places: list[int] = (wanted[a:b] - first).tolist()
    return places
