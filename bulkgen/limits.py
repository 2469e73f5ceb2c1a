"""When a job is plainly wrong: how many failed rows it takes to stop one. Pure arithmetic."""

import re
from dataclasses import dataclass

from bulkgen.errors import SpecError

# Of fewer rows nothing is concluded: neither that all fail, nor which share does.
_ENOUGH_ROWS = 100


@dataclass(frozen=True, slots=True)
class FailureLimit:
    """How many rows may fail, as a number or as a share (0..1): of the rows read, and of those that an engine had.

    Without either a job is stopped when its first hundred rows all fail, be it while they are read or in the engine.
    """

    most: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str | None) -> "FailureLimit":
        """`50` or `5%`; None for the default. Raises SpecError."""
        if text is None:
            return cls()
        number = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)%", text.strip())
        if number is None or (number[2] and float(number[2]) > 100):
            raise SpecError(f"--max-failures {text}: must be a number of rows or a share of them, such as 50 or 5%")
        return cls(most=int(number[1])) if number[1] else cls(share=float(number[2]) / 100)

    def exceeded(self, failed: int, tried: int, refused: int = 0) -> str | None:
        """Why to stop after `failed` of `tried` rows, in words; None to go on.

        `refused` rows were not among the tried: they count where a number is allowed, not where a share is.
        """
        if self.most is not None:
            failed += refused
            return f"{failed} rows failed, --max-failures allows {self.most}" if failed > self.most else None
        if tried < _ENOUGH_ROWS:
            return None
        if self.share is not None:
            share = failed / tried
            allowed = f"--max-failures allows {self.share:.6g} of them"
            return f"{failed} of {tried} rows failed, {allowed}" if share > self.share else None
        return f"the first {tried} rows all failed" if failed == tried else None
