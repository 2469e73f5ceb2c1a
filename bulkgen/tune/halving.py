"""Successive halving: all candidates on a small sample, the better half on one twice as large, and so on.

K. Jamieson and A. Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016.
Beside it: the resolved settings are measured twice in each round, which tells the noise, and what is faster by itself
is tried together. No engine and no clock is known here: measuring is a call, and so is the time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bulkgen.errors import EngineError
from bulkgen.tune.candidates import RESOLVED, Candidate, together
from bulkgen.tune.rounds import LEAST_MARGIN, Rounds, Standing, Trial

# What a trial takes may be so much more than what the last one did.
_CARE = 1.1
# Candidates that a first round should have, else it had better be of fewer rows.
_ENOUGH = 3
# Samples of fewer rows tell of nothing but the start of an engine.
_LEAST_ROWS = 16

# Why no more was tried: one was left, nothing beat the resolved settings, differences were noise, the time was over.
Ended = Literal["decided", "none faster", "noise", "time", "nothing to try"]


class TimeOver(Exception):
    """The budget ended while something was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What came of it. `best`: what is faster than the resolved settings beyond noise, None where nothing is.

    `margin`: see Rounds; None: too little was measured to say anything. `aside`: the gain of what changes answers,
    which is never chosen. `not_tried`: candidates without any trial, and why.
    """

    rounds: tuple[tuple[Trial, ...], ...]
    standings: tuple[tuple[Standing, ...], ...]
    best: Standing | None
    margin: float | None
    aside: tuple[Standing, ...]
    not_tried: tuple[tuple[Candidate, str], ...]
    ended: Ended

    @property
    def conclusive(self) -> bool:
        """Whether anything was compared, with the noise known."""
        return self.margin is not None and bool(self.tried)

    @property
    def tried(self) -> list[Candidate]:
        """All candidates that were measured, or failed to be, in the order of their first trial."""
        candidates = (trial.candidate for trials in self.rounds for trial in trials)
        return [candidate for candidate in dict.fromkeys(candidates) if candidate != RESOLVED]


class Halving:
    """One search. `measure` raises TimeOver where the time, by `clock`, reaches `until`."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        measure: Callable[[Candidate, int], Trial],
        *,
        clock: Callable[[], float],
        until: float,
        job_rows: int,
        most_rows: int,
        first_rows: int,
    ) -> None:
        """`job_rows` are all of the data set, `most_rows` those that a sample can have, `first_rows` the first's."""
        self._candidates = list(candidates)
        self._measure = measure
        self._clock = clock
        self._until = until
        self._most_rows = most_rows
        self._rows = first_rows
        self._rounds = Rounds(job_rows)
        self._open: list[Candidate] = []  # those that no comparison has ruled out
        self._why_not: dict[Candidate, str] = {}
        self._ended: Ended = "nothing to try"

    def run(self) -> Findings:
        """Search until it is decided, or the time is over. Raises EngineError where the resolved settings fail."""
        if self._candidates:
            try:
                self._search()
            except TimeOver:
                self._ended = "time"
        return self._findings()

    # ---- which rounds ----

    def _search(self) -> None:
        self._rounds.trials.append([])
        first = self._try(RESOLVED)
        if all(self._is_hopeless(candidate, first) for candidate in self._candidates):
            self._why_not = {candidate: _hopeless(self._job_s(first)) for candidate in self._candidates}
            return
        alive = self._open = self._entrants(first)
        number = 0
        while True:
            if not alive or not self._round(alive):
                self._ended = "time"
                return
            standings = [s for s in self._rounds.standings(-1) if not s.candidate.answers_change]
            if (ended := self._is_over(number, alive, standings)) is not None:
                self._ended = ended
                return
            tried = {trial.candidate for trial in self._rounds.trials[-1]}
            alive = self._next(number, standings)
            self._open = [*alive, *(candidate for candidate in self._open if candidate not in tried)]
            number += 1
            self._rounds.trials.append([])
            self._rows = min(2 * self._rows, self._most_rows)

    def _is_over(self, number: int, alive: Sequence[Candidate], standings: Sequence[Standing]) -> Ended | None:
        gains = [standing.gain for standing in standings]
        if not gains or max(gains) <= 0:
            return "none faster"
        margin = self._rounds.margin()
        spread = max(0.0, *gains) - min(0.0, *gains)
        # One repeat tells little of the noise: what it would call equal gets another, and a larger sample.
        if margin is not None and spread <= (margin if self._rounds.repeats > 1 else LEAST_MARGIN):
            return "noise"
        # The last one is measured once more: of many, the first is so by luck in part.
        return "decided" if number and len(alive) == 1 else None

    def _next(self, number: int, standings: Sequence[Standing]) -> list[Candidate]:
        """The better half, less what is slower beyond noise, and after the first round what was faster, together."""
        margin = self._rounds.margin()
        half = [s.candidate for s in standings[: -(-len(standings) // 2)] if margin is None or s.gain > -margin]
        both = together([s.candidate for s in standings if s.gain > 0]) if number == 0 else None
        return half if both is None else [both, *half]

    def _round(self, alive: Sequence[Candidate]) -> bool:
        """Measure candidates, with the resolved settings before and among them. False: no time for any of them."""
        middle = -(-len(alive) // 2)
        queue = [*alive[:middle], RESOLVED, *alive[middle:]]
        if not self._rounds.trials[-1]:
            queue.insert(0, RESOLVED)
        tried = 0
        for place, candidate in enumerate(queue):
            # Without a second one of the resolved settings nobody knows what is noise.
            again = RESOLVED in queue[place + 1 :] and candidate != RESOLVED
            needed_s = self._cost(candidate, self._rows) + (self._cost(RESOLVED, self._rows) if again else 0.0)
            if needed_s > self._until - self._clock():
                continue
            self._try(candidate)
            tried += candidate != RESOLVED
        return tried > 0

    def _try(self, candidate: Candidate) -> Trial:
        try:
            trial = self._measure(candidate, self._rows)
        except TimeOver:
            self._why_not[candidate] = "was stopped when the time was over"
            raise
        if trial.fault and candidate == RESOLVED:
            raise EngineError(f"the resolved settings cannot be measured: {trial.fault}")
        self._rounds.trials[-1].append(trial)
        return trial

    # ---- what fits into the time ----

    def _entrants(self, first: Trial) -> list[Candidate]:
        """Who takes part, and on how many rows: the largest sample that leaves time for enough of them."""
        sizes = [round(first.rows * 2.0**power) for power in range(2, -6, -1)]
        sizes = sorted({size for size in sizes if _LEAST_ROWS <= size <= self._most_rows} | {first.rows}, reverse=True)
        enough = min(_ENOUGH, len(self._candidates))
        chosen = {size: self._that_fit(first, size) for size in sizes}
        rows = next((size for size in sizes if len(chosen[size]) >= enough), None)
        if rows is None:
            rows = max(sizes, key=lambda size: (len(chosen[size]), size))
        if rows != first.rows:
            self._rounds.trials.append([])
        self._rows = rows
        self._why_not |= dict(self._that_cannot(first, rows))
        return chosen[rows]

    def _job_s(self, first: Trial) -> float:
        return first.generate_s * self._rounds.job_rows / first.rows

    def _is_hopeless(self, candidate: Candidate, first: Trial) -> bool:
        """Whether it starts longer than it could gain: nothing makes an engine twice as fast and more."""
        return 2 * candidate.extra_start_s > self._job_s(first)

    def _that_cannot(self, first: Trial, rows: int) -> list[tuple[Candidate, str]]:
        found = []
        for candidate in self._candidates:
            if self._is_hopeless(candidate, first):
                found.append((candidate, _hopeless(self._job_s(first))))
            elif candidate.least_rows > rows:
                found.append((candidate, f"needs a sample of {candidate.least_rows:,} rows, not of {rows:,}"))
        return found

    def _that_fit(self, first: Trial, rows: int) -> list[Candidate]:
        """Candidates, the most promising first, as long as the time is enough for all rounds; else for one."""
        cannot = dict(self._that_cannot(first, rows))
        able = [candidate for candidate in self._candidates if candidate not in cannot]
        bases = 1 if rows == first.rows else 2
        best: list[Candidate] = []
        for all_rounds in (True, False):
            fit: list[Candidate] = []
            for candidate in able:
                if self._rounds_s([*fit, candidate], rows, bases, all_rounds) <= self._until - self._clock():
                    fit.append(candidate)
            if len(fit) >= min(2, len(able)):
                return fit
            best = max(best, fit, key=len)
        return best

    def _rounds_s(self, alive: Sequence[Candidate], rows: int, bases: int, all_rounds: bool) -> float:
        """Seconds of all rounds with these candidates, or of the first."""
        seconds, first = 0.0, True
        left = sorted(alive, key=lambda candidate: -candidate.extra_start_s)
        while True:
            seconds += bases * self._cost(RESOLVED, rows) + sum(self._cost(candidate, rows) for candidate in left)
            if not all_rounds or (len(left) == 1 and not first):
                return seconds
            more = 1 if first and len(left) > 1 else 0
            left = left[: max(1, -(-len(left) // 2) + more)]
            rows, bases, first = min(2 * rows, self._most_rows), 2, False

    def _cost(self, candidate: Candidate, rows: int) -> float:
        """Seconds that a trial should take, by the last one of the same settings, or of the resolved ones."""
        trials = [trial for trials in self._rounds.trials for trial in trials if not trial.fault]
        own = [trial for trial in trials if trial.candidate == candidate]
        base = [trial for trial in trials if trial.candidate == RESOLVED][-1]
        last = own[-1] if own else base
        extra_s = 0.0 if own else candidate.extra_start_s
        around_s = max(0.0, last.took_s - last.generate_s)
        return _CARE * (around_s + extra_s + last.generate_s * rows / last.rows)

    # ---- what came of it ----

    def _best(self, margin: float) -> Standing | None:
        """Who is faster beyond noise, of those that nothing has ruled out, each by its last trial: who failed is out.

        Where the time was over before one was measured again, it has to be that much faster than who was.
        """
        found: list[tuple[float, Standing]] = []
        for candidate in self._open:
            numbers = [
                number
                for number, trials in enumerate(self._rounds.trials)
                if any(trial.candidate == candidate for trial in trials)
            ]
            for standing in self._rounds.standings(numbers[-1]) if numbers else ():
                if standing.candidate == candidate and not candidate.answers_change and standing.gain > margin:
                    again = self._rounds.trials[numbers[-1]] is self._rounds.trials[-1]
                    found.append((standing.gain - (0.0 if again else margin), standing))
        return max(found, key=lambda entry: entry[0], default=(0.0, None))[1]

    def _findings(self) -> Findings:
        rounds = self._rounds
        standings = [rounds.standings(number) for number in range(len(rounds.trials))]
        margin = rounds.margin()
        best = None if margin is None else self._best(margin)
        aside = [s for found in standings for s in found if s.candidate.answers_change]
        tried = {trial.candidate for trials in rounds.trials for trial in trials}
        left = [c for c in self._candidates if c not in tried]
        return Findings(
            rounds=tuple(tuple(trials) for trials in rounds.trials),
            standings=tuple(tuple(found) for found in standings),
            best=best,
            margin=margin,
            aside=tuple(aside),
            not_tried=tuple((c, self._why_not.get(c, "no time was left")) for c in left),
            ended=self._ended,
        )


def _hopeless(job_s: float) -> str:
    return f"starts longer than it could gain in about {job_s:,.0f} s of generation"
