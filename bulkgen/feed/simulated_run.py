"""What a simulated engine went through, step by step, and what follows from it: how full, how much twice, how long."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
# Seconds of each step, from its prefilled tokens, its sequences in decode and the tokens that these attend to.
StepTimes = Callable[[Counts, Counts, Counts], npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Run:
    """What a run was like. Arrays have an entry a step.

    `used` are the blocks held while the step computes, `context` the tokens that sequences in decode attend to.
    `finished` are row numbers in the order of their ends. `hit_tokens` were found in the prefix cache when a row was
    first admitted; `recomputed` are tokens that preemption let compute more than once.
    """

    blocks: int
    prefill: Counts
    decoding: Counts
    context: Counts
    used: Counts
    last_admitted: int
    preemptions: int
    recomputed: int
    hit_tokens: int
    output_tokens: int
    peak_running: int
    finished: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Steps from the first to the last."""
        return len(self.used)

    @property
    def computed_tokens(self) -> int:
        """All tokens that went through the model, those computed twice among them."""
        return int(self.prefill.sum() + self.decoding.sum())

    @property
    def recomputed_share(self) -> float:
        """Of all tokens that went through the model."""
        return self.recomputed / max(1, self.computed_tokens)

    def usage(self, full: float = 0.9) -> float:
        """Mean share of blocks held between ramp-up and tail: from the first step with a share of `full` until the
        last row is admitted. NaN if there is no such step."""
        share = self.used[: self.last_admitted + 1] / self.blocks
        reached = np.flatnonzero(share >= full)
        return float(share[reached[0] :].mean()) if len(reached) else float("nan")

    def seconds(self, step_s: StepTimes) -> float:
        """What all steps take."""
        return float(step_s(self.prefill, self.decoding, self.context).sum())
