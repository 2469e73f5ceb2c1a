"""Which row kills an engine: rows that were in it when it died go again in halves, until the guilty one stands alone.

Pure bookkeeping for one replica; who sends rows and starts engines is its caller. With n rows in the engine, one of
them guilty, it takes at most log2(n) + 1 deaths to find it. A row is never convicted on the word of an engine that
finishes nothing at all: between its death alone in an engine and the verdict another row must have come out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

# (shard, ordinal): where a row is found, and who it is.
Suspect = tuple[int, int]


@dataclass(slots=True)
class Inquest:
    """Suspects of one replica, and how often it died in a row without finishing anything.

    The smallest groups go first as long as engines live on between deaths. After the second death in a row the other
    half goes next, after the third a single row, both to see whether the engine works at all.
    """

    deaths: int = 0
    accused: list[Suspect] = field(default_factory=list)
    _groups: list[list[Suspect]] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether groups wait to be tried."""
        return bool(self._groups)

    def lived(self) -> list[Suspect]:
        """Its engine finished a row. Returns those that are convicted by this."""
        self.deaths = 0
        convicted, self.accused = self.accused, []
        return convicted

    def died(self, suspects: Sequence[Suspect], alone: bool = False) -> None:
        """Its engine died with these rows in it; `alone`: the only one was sent by itself for being suspected."""
        self.deaths += 1
        if alone:
            self.accused += suspects
            return
        middle = len(suspects) // 2
        halves = [list(half) for half in (suspects[middle:], suspects[:middle]) if half]
        place = len(self._groups) - (1 if self.deaths >= 2 and self._groups else 0)
        self._groups[place:place] = halves

    def next_group(self) -> list[Suspect]:
        """The rows to try next, with nothing else in the engine; there is one (`open`)."""
        if self.deaths >= 3 and len(self._groups[-1]) > 1:
            return [self._groups[-1].pop()]
        return self._groups.pop()

    def try_again(self) -> None:
        """With nothing else left to try, the accused go once more, each by itself."""
        self._groups += [[row] for row in self.accused]
        self.accused = []

    def give_up(self) -> list[Suspect]:
        """Let all suspects go, without a verdict; returns them."""
        rows = [row for group in self._groups for row in group] + self.accused
        self._groups, self.accused = [], []
        return rows
