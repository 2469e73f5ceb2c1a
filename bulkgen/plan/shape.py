"""Which phase a job spends itself in, prefill or decode, and what to watch while it runs. Pure arithmetic."""

from dataclasses import dataclass
from typing import Literal

Shape = Literal["long in, short out", "short in, long out", "mixed"]

# A phase dominates from three quarters on, that is 3 : 1. SemiAnalysis's InferenceMAX benchmark measures three shapes:
# 8192 tokens in and 1024 out, 1024 in and 8192 out, 1024 each. The geometric mean of 8 : 1 and 1 : 1 is 2.8 : 1.
_DOMINANT = 0.75

_WATCHED: dict[Shape, str] = {
    "long in, short out": "prompt tokens/s (prefill)",
    "short in, long out": "output tokens/s (decode)",
    "mixed": "prompt and output tokens/s, both",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCosts:
    """Device seconds that a token costs: one more in a prefill, and one more in a decode step at the batch in use."""

    prefill_token_s: float
    decode_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """What is to be computed in each phase. A prompt token that the prefix cache holds is in none.

    `decode_tokens` are all output tokens but the first of each answer, which comes out of the prefill.
    `output` says how output was counted: as budgeted, the most it can be, or as expected.
    """

    prefill_tokens: int
    decode_tokens: int
    output: Literal["budgeted", "expected"]
    costs: PhaseCosts | None = None

    @property
    def prefill_share(self) -> float | None:
        """Of device time where costs are known, else of tokens; the rest is decode's. None: nothing to compute.

        By tokens is by arithmetic operations: each token takes about two for each weight, in either phase. What decode
        takes beyond that, by reading all weights for few tokens, only costs tell.
        """
        costs = self.costs or PhaseCosts(prefill_token_s=1.0, decode_token_s=1.0)
        prefill = self.prefill_tokens * costs.prefill_token_s
        whole = prefill + self.decode_tokens * costs.decode_token_s
        return prefill / whole if whole else None

    @property
    def shape(self) -> Shape | None:
        """The phase with at least three quarters of device time, or of tokens, dominates; None: nothing to compute."""
        share = self.prefill_share
        if share is None:
            return None
        if share >= _DOMINANT:
            return "long in, short out"
        return "short in, long out" if share <= 1 - _DOMINANT else "mixed"

    def sentence(self) -> str:
        """The shape and the governing metric of an offline job, for people."""
        share, shape = self.prefill_share, self.shape
        if share is None or shape is None:
            return "Nothing to compute."
        of = "device time" if self.costs else "tokens to compute"
        return (
            f"{shape.capitalize()}: prefill takes {share:.0%} of the {of}, with output as {self.output}. What counts "
            f"for an offline job is tokens/second and cost per token; watch {_WATCHED[shape]}."
        )
