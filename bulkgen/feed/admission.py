"""Which rows an engine gets and when, so that its KV cache is full and little is computed twice. Pure: no clock.

vLLM admits whatever waits as soon as its prompt fits, never minding what its answer will need (`Scheduler.schedule` in
`vllm/v1/core/sched/scheduler.py`); when blocks run out, it throws out the sequence admitted last, which is computed
again later. So holding back happens here: the engine is given a row only when it is wanted in the batch right now.

A row is wanted if the blocks that everything inside is expected to hold, the row among them, stay below the KV cache
less a margin, now and at any time ahead. What is inside grows by a token a step and gets less by what ends; how likely
that is, `OutputLengths` learns. Adding up what each row holds at its end would leave a third of the cache empty, as
rows do not end together.

The margin is for the luck of ends: some number of standard deviations of what will be held, each row ending by itself
(so the variance is the sum of p (1 - p) blocks²), and of what few ends tell of the chances. That number, the caution,
grows with every preemption and shrinks with every token computed, in such a proportion that it rests where preemption
costs a wanted share of all tokens (a quantile tracked by stochastic approximation; H. Robbins and S. Monro, "A
stochastic approximation method", The Annals of Mathematical Statistics 22(3), 1951). Where the KV cache is never the
limit nothing is held back but for the number of sequences, and a batch ahead waits in the engine.
"""

from dataclasses import dataclass

import numpy as np

from bulkgen.feed.expected_output import Floats, Kinds, OutputLengths
from bulkgen.feed.inside import Inside
from bulkgen.records import EngineLimits, EngineStats

# Steps ahead at which blocks are added up. A row that reaches its budget between two of them counts until the later.
_AHEAD: Floats = np.array([0, 1, 2, 4, *(k << i for i in range(2, 18) for k in (2, 3))], np.float64)
_BEFORE: Floats = np.concatenate(([0.0], _AHEAD[:-1]))
# Standard deviation, as a share of the KV cache, of what is not known of rows of which all seems known.
_BLUR = 0.002
# A sum holds for so many steps, and until more than this share of the rows inside has ended.
_STEPS_HELD = 8.0
_ENDS_HELD = 1 / 128
# An engine that says to hold less than this share of its blocks' tokens has several groups of layers.
_SEVERAL_GROUPS = 0.9
# Lengths are estimated anew so often.
_STEPS_LEARNED = 32.0

# Standard deviations kept free: at first, at least, at most, and how many more after a preemption of usual size.
_FIRST_CAUTION = 2.5
_LEAST_CAUTION, _MOST_CAUTION = -1.0, 4.0
_GAIN = 0.05


@dataclass(slots=True)  # not frozen: one a row
class Candidate:
    """A row that could go into the engine next.

    `sequences`: answers asked for. Rows of the same `group` (-1: of none) begin with the same `shared_tokens`.
    """

    prompt_tokens: int
    max_tokens: int
    sequences: int = 1
    group: int = -1
    shared_tokens: int = 0


class Admission:
    """Decides row by row, in the order in which the caller asks.

    After every poll of the engine: `ended` for each row that came out, then `progress`, then as long as `admit` says
    yes to the next row: submit it and say `offered`. A row that is not admitted is asked for again after the next poll,
    as the same object.
    Time is counted in engine steps, told by the tokens that came out: each running sequence makes one a step.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        max_num_batched_tokens: int | None = None,
        recompute_share: float = 0.004,
        lag: int = 0,
        lengths: OutputLengths | None = None,
    ) -> None:
        """`recompute_share`: of all tokens, those that may be computed twice for a fuller cache.

        `lag`: steps until the engine sees what was submitted, none if it is in this process. `max_num_batched_tokens`:
        vLLM's; it tells when the prompts that wait will be computed, which else count as if they were at once.
        `lengths`: what is known of answers before; `OutputLengths(1.0)` where they are as long as their budget.
        """
        self.most = 2 * limits.max_num_seqs
        self.caution = _FIRST_CAUTION
        self.lengths = OutputLengths() if lengths is None else lengths
        self._size = limits.block_size
        # Where layers are of several kinds, a token takes a block in more than one group.
        told = limits.kv_cache_size_tokens or limits.kv_tokens
        tokens = told if told < _SEVERAL_GROUPS * limits.kv_tokens else limits.kv_tokens
        # vLLM keeps one block for itself: BlockPool.null_block in vllm/v1/core/block_pool.py.
        self._blocks = max(1, tokens // limits.block_size - 1)
        self._batched_tokens = max_num_batched_tokens
        self._share = recompute_share
        self._lag = float(lag)
        self._blur = (_BLUR * self._blocks) ** 2
        self._inside = Inside(limits.block_size)
        self._stats = EngineStats(0, 0, 0.0, 0, 0, 0, 0)
        self._clock = 0.0
        self._ended = self._ended_since = 0
        self._learned = 0.0
        self._summed = -np.inf
        self._sums: Floats = np.zeros((4, len(_AHEAD)))  # as `_moments`
        self._usual = 0.0  # tokens of a row that runs, as last seen
        self._whole_budgets = 0  # blocks, if each row inside used its budget and shared nothing
        self._refused: Candidate | None = None
        self._asked: tuple[Candidate, Floats] | None = None

    @property
    def in_engine(self) -> int:
        """Sequences that were offered and have not ended."""
        return self._inside.sequences

    def admit(self, candidate: Candidate) -> bool:
        """Whether this row is wanted in the engine right now."""
        if not self._inside.sequences:
            return True
        # The last one may have more answers than there is room: nobody else could fill what it leaves.
        if self._inside.sequences >= self.most or candidate is self._refused:
            return False
        if self._whole_budgets + self._most_blocks(candidate) <= self._blocks:
            return True  # whatever the answers will be
        if self._clock - self._summed >= _STEPS_HELD:
            self._add_up()
        needed = self._needed(candidate)
        self._asked = candidate, needed
        expected, variance, doubt, at_most = self._sums + needed
        deviation = np.sqrt(variance + doubt**2 / (self.lengths.ends + 1.0) + self._blur)
        if np.all(np.minimum(expected + self.caution * deviation, at_most) <= self._blocks):
            return True
        self._refused = candidate
        return False

    def offered(self, index: int, candidate: Candidate) -> None:
        """The row was given to the engine; `index` names it until it ends."""
        if self._asked is not None and self._asked[0] is candidate:
            self._sums += self._asked[1]
        else:
            self._summed = -np.inf
        self._asked = None
        self._whole_budgets += self._most_blocks(candidate)
        shared = self._shared_blocks(candidate) * self._size
        kind = self.lengths.kind(candidate.prompt_tokens, candidate.max_tokens)
        own_tokens, most_blocks = candidate.prompt_tokens - shared, self._most_blocks(candidate)
        self._inside.add(index, own_tokens, candidate.max_tokens, kind, candidate.sequences, most_blocks)
        if shared:
            self._inside.share(index, candidate.group, shared // self._size)

    def ended(self, index: int, output_tokens: int | None) -> None:
        """A row is out of the engine, with so many tokens in all its answers; None if it has no answer."""
        row = self._inside.remove(index)
        self._whole_budgets -= row.most_blocks
        self._ended += row.sequences
        self._ended_since += row.sequences
        if output_tokens is not None:
            each = max(1, round(output_tokens / row.sequences))
            self.lengths.ended(row.kind, each, row.max_tokens)
        if self._ended_since > _ENDS_HELD * self._inside.sequences:
            self._summed = -np.inf

    def progress(self, stats: EngineStats) -> None:
        """The engine was polled: its counters now."""
        last, self._stats = self._stats, stats
        output = stats.output_tokens - last.output_tokens
        # Whatever ended since was running before, save what was cancelled while it waited.
        self._clock += output / max(1, stats.running + self._ended)
        self._ended = 0
        self._refused = None
        preempted = stats.preemptions - last.preemptions
        lost = self._inside.follow(stats.waiting, self._clock, preempted)
        computed = output + stats.prompt_tokens - last.prompt_tokens - (stats.cached_tokens - last.cached_tokens)
        if preempted:
            self._summed = -np.inf
        self._adjust(max(0, computed), preempted, lost)

    def _adjust(self, computed: int, preempted: int, lost: Floats) -> None:
        """The caution after so many tokens computed and sequences preempted, whose tokens are `lost` where known."""
        usual = self._usual = self._inside.mean_tokens(self._clock) or self._usual
        if not usual:
            return  # no row was ever seen running
        lost_tokens = float(lost.sum()) + max(0, preempted - len(lost)) * usual
        change = _GAIN * (lost_tokens - self._share * computed) / usual
        self.caution = min(_MOST_CAUTION, max(_LEAST_CAUTION, self.caution + change))

    def _most_blocks(self, candidate: Candidate) -> int:
        """What it can hold at most."""
        return candidate.sequences * -(-(candidate.prompt_tokens + candidate.max_tokens) // self._size)

    def _shared_blocks(self, candidate: Candidate) -> int:
        """Whole blocks of its prompt that it has in common with its group, one token at least being its own."""
        if candidate.group < 0:
            return 0
        return min(candidate.shared_tokens, candidate.prompt_tokens - 1) // self._size

    def _add_up(self) -> None:
        """The blocks expected to be held at each time ahead by all that is inside."""
        rows = self._inside.table(self._clock)
        if self._clock - self._learned >= _STEPS_LEARNED:
            self._learned = self._clock
            self.lengths.learn(rows.kind[rows.running], rows.so_far[rows.running])
        chance = self._chance(rows.kind, rows.so_far, _AHEAD + self._lag, _BEFORE + self._lag, rows.max_tokens)
        so_far = np.minimum(rows.so_far[:, None] + _AHEAD + self._lag, rows.max_tokens[:, None])
        tokens = rows.own_tokens[:, None] + so_far
        blocks = np.ceil(tokens / self._size) * rows.sequences[:, None]
        shared = self._inside.shared_blocks
        # The engine says how many blocks are held: each row running holds so many more or fewer than was thought.
        running = rows.running
        sequences = float(rows.sequences[running].sum())
        if sequences:
            now = float((np.ceil((rows.own_tokens + rows.so_far) / self._size) * rows.sequences)[running].sum())
            error = self._stats.kv_usage * self._blocks - now - shared
            blocks[running] += rows.sequences[running, None] * (error / sequences)
        self._sums = _moments(chance, blocks, rows.sequences[:, None]).sum(axis=1)
        self._sums[[0, 3]] += shared
        self._summed, self._ended_since = self._clock, 0

    def _chance(self, kind: Kinds, so_far: Floats, ahead: Floats, before: Floats, max_tokens: Floats) -> Floats:
        """Chances that rows are there so many steps ahead, where those count that only their budget has ended since."""
        chance = self.lengths.lasting(kind, so_far, ahead)
        chance[so_far[:, None] + before >= max_tokens[:, None]] = 0.0
        return chance

    def _needed(self, candidate: Candidate) -> Floats:
        """The blocks that the row is expected to hold at each time ahead, as `_moments`."""
        shared = self._shared_blocks(candidate)
        own = candidate.prompt_tokens - shared * self._size
        wait = 0.0
        if self._batched_tokens:
            wait = self._inside.waiting_tokens // max(1, self._batched_tokens - self._stats.running)
        after, before = np.maximum(_AHEAD - wait, 0.0), np.maximum(_BEFORE - wait, 0.0)
        kind = np.array([self.lengths.kind(candidate.prompt_tokens, candidate.max_tokens)])
        most = np.array([float(candidate.max_tokens)])
        chance = self._chance(kind, np.zeros(1), after, before, most)[0]
        chance[wait > _AHEAD] = 0.0
        blocks = candidate.sequences * np.ceil((own + np.minimum(after, most)) / self._size)
        needed = _moments(chance, blocks, float(candidate.sequences))
        if shared and not self._inside.has_group(candidate.group):
            needed[[0, 3]] += shared
        return needed


def _moments(chance: Floats, blocks: Floats, sequences: Floats | float) -> Floats:
    """Blocks that rows hold with these chances: mean, variance, doubt, and what they are if nothing ends by itself.

    The sequences of a row have `blocks` together, and end each by itself.
    The doubt is how much higher the mean is, to first order, if ends are rarer by the whole of their number. Unlike
    luck it does not even out between rows; it gets less the more have ended.
    """
    held = chance * blocks
    doubt = -held * np.log(np.maximum(chance, 1e-9))
    variance = held * (blocks - held) / sequences
    return np.stack((held, variance, doubt, np.where(chance > 0.0, blocks, 0.0)))
