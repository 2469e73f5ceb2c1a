"""How long answers will be, learned while they come: from those that have ended and from those that go on.

An answer that still runs has at least the tokens it has; leaving it out would make answers look short, since short
ones end first. So what is learned is not a mean of ended ones but how likely an answer is to end at its next token,
by the tokens that it has: ends divided by tokens at risk, constant within a range of tokens (the piecewise
exponential model; M. Friedman, "Piecewise exponential models for survival data with covariates", The Annals of
Statistics 10(1), 1982). An answer cut off at its `max_tokens` says that it did not end before.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Kinds = npt.NDArray[np.int64]

# Of its budget, what an answer is taken to have on average before anything is known.
PRIOR_SHARE = 0.25
# Ranges of output tokens: two an octave, the last one without end.
_OCTAVES = 21
EDGES: Floats = np.unique([0, 1, 2, 3, *(k << i for i in range(1, _OCTAVES) for k in (2, 3))]).astype(np.float64)
_WIDTHS = np.append(np.diff(EDGES), np.inf)

# Kinds of rows: by max_tokens, a class an octave, and by prompt tokens, a class two octaves.
_BUDGETS = _OCTAVES + 1
_PROMPTS = 11

# What is taken for granted weighs as much as this many answers.
_PRIOR_ANSWERS = 1.0
_PARENT_ANSWERS = 4.0
# So many answers of a budget are remembered in full; then older ones count half.
_MEMORY = 4096


class OutputLengths:
    """Answers' lengths by kind of row. Where nothing is known of a kind, those with the same class of budget count.

    Before any answer has ended they are taken to end at random, after `prior_share` of their budget on average.
    """

    def __init__(self, prior_share: float = PRIOR_SHARE) -> None:
        shape = (_BUDGETS, _PROMPTS, len(EDGES))
        self.ends = 0  # answers that ended by themselves
        self._ends: Floats = np.zeros(shape)
        self._at_risk: Floats = np.zeros(shape)  # tokens of answers that have ended
        self._answers: Floats = np.zeros(_BUDGETS)  # ended and cut, by class of budget
        self._new: list[tuple[int, int, bool]] = []
        self._prior_tokens = np.maximum(1.0, prior_share * 0.75 * 2.0 ** np.arange(_BUDGETS))[:, None, None]
        self._chance: Floats
        self._sum: Floats
        self.learn()

    @staticmethod
    def kind(prompt_tokens: int, max_tokens: int) -> int:
        """The number of a row's kind."""
        budget = min(_BUDGETS - 1, max_tokens.bit_length())
        return budget * _PROMPTS + min(_PROMPTS - 1, prompt_tokens.bit_length() // 2)

    @staticmethod
    def _kinds(prompt_tokens: npt.NDArray[np.integer], max_tokens: npt.NDArray[np.integer]) -> Kinds:
        """As `kind`, of many rows: the exponent of a number is its length in bits."""
        budgets, prompts = np.frexp(max_tokens)[1], np.frexp(prompt_tokens)[1] // 2
        kinds: Kinds = np.minimum(_BUDGETS - 1, budgets).astype(np.int64) * _PROMPTS + np.minimum(_PROMPTS - 1, prompts)
        return kinds

    def ended(self, kind: int, output_tokens: int, max_tokens: int) -> None:
        """An answer is whole. What it teaches counts from the next `learn`."""
        self.ends += output_tokens < max_tokens
        self._new.append((kind, output_tokens, output_tokens < max_tokens))
        if len(self._new) >= _MEMORY:
            self._take_in()

    def _take_in(self) -> None:
        """Count the answers that became whole since the last time."""
        kinds, tokens, ended = (np.array(column) for column in zip(*self._new, strict=True))
        self._new.clear()
        np.add.at(self._at_risk.reshape(-1, len(EDGES)), kinds, np.clip(tokens[:, None] - EDGES, 0.0, _WIDTHS))
        places = np.maximum(0, np.searchsorted(EDGES, tokens[ended]) - 1)
        np.add.at(self._ends.reshape(-1, len(EDGES)), (kinds[ended], places), 1.0)
        self._answers += np.bincount(kinds // _PROMPTS, minlength=_BUDGETS)
        full = self._answers > _MEMORY
        for counts in (self._ends, self._at_risk, self._answers):
            counts[full] /= 2

    def learn(self, kinds: Kinds | None = None, tokens: Floats | None = None) -> None:
        """Estimate anew. `kinds` and `tokens` (of the answer so far) are those of rows that go on."""
        if self._new:
            self._take_in()
        at_risk = self._at_risk
        if kinds is not None and tokens is not None:
            at_risk = at_risk.copy()
            flat = at_risk.reshape(-1, len(EDGES))
            np.add.at(flat, kinds, np.clip(tokens[:, None] - EDGES, 0.0, _WIDTHS))
        # From coarse to fine: any length of a budget, lengths of a budget, lengths of a budget and a prompt length.
        ends, risk = self._ends.sum(axis=1, keepdims=True), at_risk.sum(axis=1, keepdims=True)
        any_ends, any_risk = ends.sum(axis=2, keepdims=True), risk.sum(axis=2, keepdims=True)
        chance = (any_ends + _PRIOR_ANSWERS) / (any_risk + _PRIOR_ANSWERS * self._prior_tokens)
        for ends_of, risk_of in ((ends, risk), (self._ends, at_risk)):
            chance = (ends_of + _PARENT_ANSWERS) / (risk_of + _PARENT_ANSWERS / chance)
        self._chance = np.minimum(chance, 20.0).reshape(-1, len(EDGES))
        sums = np.cumsum(self._chance[:, :-1] * _WIDTHS[:-1], axis=1)
        self._sum = np.concatenate((np.zeros((len(sums), 1)), sums), axis=1)

    def _risk(self, kinds: Kinds, tokens: Floats) -> Floats:
        """Minus the logarithm of the share of answers that have more than `tokens`."""
        places = np.searchsorted(EDGES, tokens, side="right") - 1
        risk: Floats = self._sum[kinds, places] + self._chance[kinds, places] * (tokens - EDGES[places])
        return risk

    def lasting(self, kinds: Kinds, so_far: Floats, more: Floats) -> Floats:
        """Chances that answers with `so_far` tokens (shape n) go on after each number of `more` ones (h): n x h.

        Budgets are left out: with its last token an answer ends in any case.
        """
        later = self._risk(kinds[:, None], so_far[:, None] + more)
        chances: Floats = np.exp(self._risk(kinds, so_far)[:, None] - later)
        return chances

    def expected(self, prompt_tokens: npt.ArrayLike, max_tokens: npt.ArrayLike) -> Floats:
        """Mean of the output tokens of such rows."""
        kinds, budgets = self._kinds(np.asarray(prompt_tokens), np.asarray(max_tokens)), np.asarray(max_tokens, float)
        # The mean is the sum of the chances to go on, over all tokens: of an exponential between every two edges.
        last = np.exp(-self._sum)
        between = (last[:, :-1] - last[:, 1:]) / self._chance[:, :-1]
        sums = np.concatenate((np.zeros((len(between), 1)), np.cumsum(between, axis=1)), axis=1)
        places = np.searchsorted(EDGES, budgets, side="right") - 1
        chance = self._chance[kinds, places]
        more = last[kinds, places] * -np.expm1(-chance * (budgets - EDGES[places])) / chance
        expected: Floats = sums[kinds, places] + more
        return expected
