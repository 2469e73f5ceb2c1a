"""What was measured of candidates, round by round, and what it says: who is how much faster, and what is noise."""

import math
from dataclasses import dataclass, field

from bulkgen.tune.candidates import RESOLVED, Candidate

# Of Student's t, the one-sided 90 % quantiles for 1, 2, ... degrees of freedom, from any table of it.
_STUDENT = (3.08, 1.89, 1.64, 1.53, 1.48, 1.44, 1.41, 1.40)
# Less is not worth a word, however well it repeats.
LEAST_MARGIN = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One engine with some settings on a sample. `tokens`: prompt and output, of all rows; times in seconds.

    `took_s`: all of it, from the process's start to its end. `fault`: why there is no figure.
    """

    candidate: Candidate
    rows: int
    took_s: float = 0.0
    start_s: float = 0.0
    generate_s: float = 0.0
    tokens: int = 0
    failed: int = 0
    fault: str = ""

    @property
    def rate(self) -> float:
        """Tokens a second of generation, engine start left out."""
        return self.tokens / self.generate_s if self.generate_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """A candidate against the resolved settings, in one round: how much faster as a share of these (0.1: 10 %)."""

    candidate: Candidate
    gain: float


@dataclass(slots=True)
class Rounds:
    """What was measured so far, round by round."""

    job_rows: int
    trials: list[list[Trial]] = field(default_factory=list)

    def standings(self, number: int) -> list[Standing]:
        """The candidates of a round that have a figure, the fastest first; none without the resolved settings'."""
        trials = self.trials[number]
        base = [trial for trial in trials if trial.candidate == RESOLVED]
        if not base:
            return []
        base_s = sum(trial.generate_s for trial in base) / len(base)
        rate = sum(trial.tokens for trial in base) / sum(trial.generate_s for trial in base)
        # Seconds of the whole job, so that what starts longer has to gain it.
        job_s = base_s * self.job_rows / base[0].rows
        failed = max(trial.failed for trial in base)
        found = []
        for trial in trials:
            if trial.candidate == RESOLVED or trial.fault or trial.failed > failed or not trial.rate:
                continue
            needed_s = job_s * rate / trial.rate + self._later_s(trial.candidate)
            found.append(Standing(trial.candidate, job_s / needed_s - 1 if needed_s > 0 else math.inf))
        return sorted(found, key=lambda standing: -standing.gain)

    def _later_s(self, candidate: Candidate) -> float:
        """How much longer an engine takes to start that compiles, or does not, other than the resolved settings do.

        By the quickest start of each kind: what was compiled once is kept by vLLM.
        """
        mode = candidate.values.get("enforce_eager")
        if mode is None:
            return 0.0
        trials = [trial for trials in self.trials for trial in trials if not trial.fault]
        own = [trial.start_s for trial in trials if trial.candidate.values.get("enforce_eager") == mode]
        base = [trial.start_s for trial in trials if trial.candidate.values.get("enforce_eager") is None]
        return min(own) - min(base)

    @property
    def repeats(self) -> int:
        """How often the resolved settings were measured once more on the same sample."""
        return sum(len(rates) - 1 for rates in self._resolved_rates())

    def _resolved_rates(self) -> list[list[float]]:
        """Of each round in which they were measured, what the resolved settings reached."""
        rates = [[trial.rate for trial in trials if trial.candidate == RESOLVED] for trials in self.trials]
        return [found for found in rates if found]

    def margin(self) -> float | None:
        """What a gain has to be more than, so that it is not noise; None where nothing was repeated.

        Of a candidate measured once against two of the resolved settings, whose own spread, pooled over the rounds,
        is the noise.
        """
        squares, degrees = 0.0, self.repeats
        if not degrees:
            return None
        for rates in self._resolved_rates():
            mean = sum(rates) / len(rates)
            squares += sum((rate / mean - 1) ** 2 for rate in rates) if mean else 0.0
        quantile = _STUDENT[min(degrees, len(_STUDENT)) - 1]
        return max(LEAST_MARGIN, quantile * math.sqrt(squares / degrees) * math.sqrt(1 + 1 / 2))
