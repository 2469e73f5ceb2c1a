"""Speed of the last seconds and time left, from cumulative counters. Pure: no clock, no terminal."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

_SPAN_AT_LEAST_S = 0.5  # a rate over less than this is noise
_BACK_S = 1.0  # samples of two engines can come in the wrong order by less than this; more is a clock set back


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressState:
    """What a user sees of a run at one moment.

    `tokens_done` and `tokens_planned` are prompt and output tokens of this start, cached prompt tokens
    included; `output_tokens` those of its finished rows. Speeds are over the last seconds. `eta_s` is None
    while there is no speed to go by.
    """

    rows: int = 0
    done: int = 0
    failed: int = 0
    refused: int = 0
    tokens_done: int = 0
    tokens_planned: int = 0
    output_tokens: int = 0
    output_tokens_per_s: float = 0.0
    total_tokens_per_s: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    eta_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Cumulative counters of one engine since it was opened.

    `engine_*` are the engine's own and include unfinished rows; `finished_*` are of rows that are done or
    failed, with `finished_budget_tokens` the sum of their max_tokens.
    """

    engine_prompt_tokens: int = 0
    engine_output_tokens: int = 0
    finished_prompt_tokens: int = 0
    finished_output_tokens: int = 0
    finished_budget_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens per second over the window, cached prompt tokens included in the total."""

    output_tokens_per_s: float
    total_tokens_per_s: float


class Meter:
    """Adds up the engines of one start.

    The start's rows have `prompt_tokens` and at most `budget_tokens` of output. How much of a budget is used
    is learned from the rows that have finished, so that the tokens planned go from the worst case (all of it)
    towards what comes true.
    """

    def __init__(self, prompt_tokens: int, budget_tokens: int, window_s: float = 10.0) -> None:
        self._prompt_tokens = prompt_tokens
        self._budget_tokens = budget_tokens
        self._window_s = window_s
        self._tallies: dict[Hashable, Tally] = {}
        self._lost: set[Hashable] = set()
        self._samples: deque[tuple[float, int, int]] = deque()

    def observe(self, at: float, source: Hashable, tally: Tally) -> None:
        """Take an engine's counters at time `at`. After a clock was set back, rates begin anew.

        An engine that is opened again is a new source; the rows of the one before stay counted.
        """
        self._tallies[source] = tally
        if self._samples and at < self._samples[-1][0] - _BACK_S:
            self._samples.clear()
        elif self._samples:
            at = max(at, self._samples[-1][0])
        self._samples.append((at, self._sum("engine_prompt_tokens"), self._sum("engine_output_tokens")))
        # The newest sample that is older than the window stays: it is the other end of the difference.
        while len(self._samples) > 2 and self._samples[1][0] <= at - self._window_s:
            self._samples.popleft()

    def lose(self, source: Hashable) -> None:
        """The engine is dead: what it had begun and not finished must be done again."""
        self._lost.add(source)

    def rates(self, now: float) -> Rates:
        """Speed over the last window; falls towards zero when nothing is observed any more."""
        if not self._samples or now - self._samples[0][0] < _SPAN_AT_LEAST_S:
            return Rates(output_tokens_per_s=0.0, total_tokens_per_s=0.0)
        (began, prompt0, output0), (_, prompt1, output1) = self._samples[0], self._samples[-1]
        span = now - began
        output = (output1 - output0) / span
        return Rates(output_tokens_per_s=output, total_tokens_per_s=output + (prompt1 - prompt0) / span)

    @property
    def output_ratio(self) -> float:
        """Output tokens per token of budget over finished rows; 1 before any has finished."""
        budget = self._sum("finished_budget_tokens")
        return self._sum("finished_output_tokens") / budget if budget else 1.0

    @property
    def tokens_done(self) -> int:
        """Tokens of finished rows, and of unfinished rows in engines that live."""
        done = 0
        for source, tally in self._tallies.items():
            finished = tally.finished_prompt_tokens + tally.finished_output_tokens
            begun = tally.engine_prompt_tokens + tally.engine_output_tokens
            done += finished if source in self._lost else max(finished, begun)
        return done

    @property
    def tokens_planned(self) -> int:
        """All prompts, output of finished rows, expected output of the others; never less than done."""
        budget_left = max(0, self._budget_tokens - self._sum("finished_budget_tokens"))
        output = self._sum("finished_output_tokens") + round(budget_left * self.output_ratio)
        return max(self._prompt_tokens + output, self.tokens_done)

    def eta_s(self, now: float) -> float | None:
        """Seconds until the tokens left are done at the present speed; None without a speed."""
        left = self.tokens_planned - self.tokens_done
        speed = self.rates(now).total_tokens_per_s
        if left == 0:
            return 0.0
        return left / speed if speed > 0 else None

    def _sum(self, name: str) -> int:
        return sum(getattr(tally, name) for tally in self._tallies.values())
