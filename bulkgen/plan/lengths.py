"""How long rows are: a histogram on a scale for people, and percentiles."""

from dataclasses import dataclass
from math import floor, log10

import numpy as np
import numpy.typing as npt

_MOST_STEPS = 10
# From here on a linear scale shows nothing of the short ones.
_WIDE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of each row, summed up. `counts[i]` rows have edges[i] <= tokens < edges[i + 1].

    Percentiles are exact, linear between two rows, as in the report. None where there are no rows.
    """

    rows: int
    tokens: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: int | None
    variation: float | None
    edges: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def tail(self) -> float | None:
        """The 99th percentile over the median. 1: all alike."""
        return self.p99 / self.p50 if self.p50 and self.p99 is not None else None

    @classmethod
    def of(cls, tokens: npt.NDArray[np.integer]) -> "Lengths":
        """`variation` is the coefficient of variation: standard deviation over mean; 0: all alike, 1: as an exponential
        distribution has it.
        """
        if not len(tokens):
            empty = dict.fromkeys(("mean", "p50", "p90", "p99", "max", "variation"))
            return cls(rows=0, tokens=0, edges=(), counts=(), **empty)
        p50, p90, p99 = np.percentile(tokens, (50, 90, 99)).tolist()
        mean, longest = float(tokens.mean(dtype=np.float64)), int(tokens.max())
        edges = _edges(int(tokens.min()), longest)
        return cls(
            rows=len(tokens),
            tokens=int(tokens.sum(dtype=np.int64)),
            mean=mean,
            p50=p50,
            p90=p90,
            p99=p99,
            max=longest,
            variation=float(tokens.std(dtype=np.float64)) / mean if mean else None,
            edges=edges,
            counts=tuple(np.histogram(tokens, edges)[0].tolist()),
        )


def _edges(shortest: int, longest: int) -> tuple[int, ...]:
    """Powers of two where lengths differ by much; else steps of 1, 2 or 5 times a power of ten, ten at most."""
    if longest >= _WIDE * max(1, shortest):
        powers = range(max(0, shortest.bit_length() - 1), longest.bit_length() + 1)
        return (*([0] if shortest == 0 else []), *(1 << power for power in powers))
    step = _step(longest - shortest + 1)
    return tuple(range(shortest // step * step, longest + step + 1, step))


def _step(span: int) -> int:
    power: int = 10 ** max(0, floor(log10(span / _MOST_STEPS)))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if step * _MOST_STEPS >= span)
