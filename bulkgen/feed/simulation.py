"""One engine in blocks and steps, without a model: what a feed makes of vLLM's scheduler, in seconds instead of hours.

It follows vLLM 0.32, `vllm/v1/core/sched/scheduler.py` (Scheduler.schedule, update_from_output) and
`kv_cache_manager.py` (allocate_slots), for one kind of layers, first come first served, without speculation and with
steps that follow each other (`async_scheduling=False`): running sequences first, each with its next token or the next
piece of its prompt; where a block is missing, the sequence that was admitted last gives up all of its blocks and
waits at the front, and nobody is admitted in that step; else whoever waits longest is admitted as long as the blocks
for its tokens so far are free. `tests/test_simulation.py` compares it with that scheduler step by step.

Steps in which no sequence needs a block, ends or is admitted are not computed one by one.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from bulkgen.feed.admission import Candidate
from bulkgen.feed.simulated_cache import BlockPool
from bulkgen.feed.simulated_run import Run
from bulkgen.feed.topup import TopUp
from bulkgen.records import EngineLimits, EngineStats

# More blocks than one sequence has: keys of blocks are row x this + place.
_PLACES = 1 << 24


class Feed(Protocol):
    """Who decides what goes into an engine: as the replica uses it, see `Admission`."""

    def admit(self, candidate: Candidate) -> bool: ...
    def offered(self, index: int, candidate: Candidate) -> None: ...
    def progress(self, stats: EngineStats) -> None: ...
    def ended(self, index: int, output_tokens: int | None) -> None: ...


class ToppedUp:
    """`TopUp` as a feed: any row is welcome as long as there is room for a batch ahead."""

    def __init__(self, limits: EngineLimits) -> None:
        self._policy = TopUp(limits)
        self._in_engine = self._room = 0

    def admit(self, candidate: Candidate) -> bool:
        if not self._room:
            self._room = self._policy.room(self._in_engine)
        return self._room > 0

    def offered(self, index: int, candidate: Candidate) -> None:
        self._room -= 1
        self._in_engine += 1

    def progress(self, stats: EngineStats) -> None:
        self._room = 0

    def ended(self, index: int, output_tokens: int | None) -> None:
        self._in_engine -= 1


@dataclass(frozen=True, slots=True)
class SimulatedRow:
    """A row and what nobody knows beforehand: how many tokens its answer has. Tokens are counts.

    Rows of the same `group` (-1: of none) begin with the same `shared_tokens`.
    """

    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    group: int = -1
    shared_tokens: int = 0

    def candidate(self) -> Candidate:
        """The row as a feed sees it."""
        return Candidate(self.prompt_tokens, self.max_tokens, group=self.group, shared_tokens=self.shared_tokens)


@dataclass(frozen=True, slots=True)
class SimulatedLimits:
    """vLLM's settings of the same names. `num_gpu_blocks` counts the block that vLLM keeps for itself.

    `delay`: steps from a row's being handed over until the scheduler sees it; 0 where feed and scheduler share a
    process.
    """

    num_gpu_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 1 << 20
    enable_prefix_caching: bool = True
    delay: int = 0

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be max_num_seqs at least, as in vLLM")

    def engine_limits(self) -> EngineLimits:
        """As an engine would tell them."""
        return EngineLimits(
            self.max_model_len, self.num_gpu_blocks * self.block_size, self.block_size, self.max_num_seqs
        )


@dataclass(slots=True, eq=False)
class _Sequence:
    """A row inside the engine. `computed` tokens are in its blocks as of step `since`, one more every step of decode.

    `place` says where it stands among those running, and never comes twice; -1 while it waits.
    """

    index: int
    row: SimulatedRow
    shared_blocks: int
    produced: int = 0
    computed: int = 0
    since: int = 0
    place: int = -1
    lost: int = 0
    started: bool = False
    named: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.row.prompt_tokens + self.produced

    def key(self, place: int) -> int:
        """Of a full block: the same for rows that are alike up to its end."""
        if place < self.shared_blocks:
            return -(self.row.group * _PLACES + place) - 1
        return self.index * _PLACES + place


class SimulatedEngine:
    """One engine. `submit`, then `step`, as with a real one; each step returns the rows that ended in it."""

    def __init__(self, limits: SimulatedLimits) -> None:
        self.limits = limits
        self._pool = BlockPool(limits.num_gpu_blocks - 1)
        self._waiting: deque[_Sequence] = deque()
        self._arriving: deque[tuple[int, _Sequence]] = deque()
        self._running: dict[int, _Sequence] = {}  # by place: in the order of their admission
        self._prefilling: _Sequence | None = None  # the last of those running, if its prompt is not computed yet
        # By step: who needs a block in it, or ends with it. Void where the sequence has another place by then.
        self._due: dict[int, list[tuple[int, _Sequence]]] = {}
        self._places = 0
        self._step = 0
        self._context = 0
        self._prefill: list[int] = []
        self._decoding: list[int] = []
        self._contexts: list[int] = []
        self._used: list[int] = []
        self._finished: list[int] = []
        self._last_admitted = 0
        self._preemptions = self._recomputed = self._hit_tokens = self._peak = 0
        self._prompt_tokens = self._output_tokens = 0

    @property
    def unfinished(self) -> int:
        """Rows that are in the engine, running or waiting."""
        return len(self._running) + len(self._waiting) + len(self._arriving)

    def submit(self, index: int, row: SimulatedRow) -> None:
        """Hand over a row. Raises ValueError for one that the KV cache could never hold."""
        size = self.limits.block_size
        if -(-(row.prompt_tokens + row.output_tokens - 1) // size) > self._pool.blocks:
            raise ValueError(f"row {index} is larger than the KV cache")
        shared = min(row.shared_tokens, row.prompt_tokens) // size if row.group >= 0 else 0
        self._arriving.append((self._step + self.limits.delay, _Sequence(index, row, shared)))

    def stats(self) -> EngineStats:
        """As vLLM tells them after a step."""
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._arriving),
            kv_usage=self._pool.used / self._pool.blocks,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._hit_tokens,
            output_tokens=self._output_tokens,
        )

    def step(self) -> list[int]:
        """Compute one step. Returns the rows that ended in it."""
        while self._arriving and self._arriving[0][0] <= self._step:
            self._waiting.append(self._arriving.popleft()[1])
        before = self._preemptions
        due = [s for _, s in sorted((p, s) for p, s in self._due.pop(self._step, ()) if p == s.place)]
        self._grow(due)
        decoding = len(self._running) - (self._prefilling is not None)
        context = self._context + decoding
        prefill, sampled = self._continue_prefill(self.limits.max_num_batched_tokens - decoding)
        if self._preemptions == before and (self._prefilling is None or self._prefilling in sampled):
            prefill += self._admit(self.limits.max_num_batched_tokens - decoding - prefill, sampled)
        self._record(prefill, decoding, context)
        self._context = context
        self._output_tokens += decoding
        ended = [s for s in due if s.place >= 0 and s.since + self._left(s) == self._step + 1]
        self._step += 1
        return self._end(ended) + self._sample(sampled)

    def skip_quiet_steps(self) -> None:
        """Go on to the next step in which anything happens, if nothing can be admitted before; needs no answer."""
        if self._prefilling is not None or self._waiting or self._arriving or not self._due:
            return
        steps = min(self._due) - self._step
        if steps <= 0:
            return
        decoding = len(self._running)
        self._prefill += [0] * steps
        self._decoding += [decoding] * steps
        self._contexts += [self._context + decoding * i for i in range(1, steps + 1)]
        self._used += [self._pool.used] * steps
        self._context += decoding * steps
        self._output_tokens += decoding * steps
        self._step += steps

    def run(self) -> Run:
        """What was so far."""
        return Run(
            blocks=self._pool.blocks,
            prefill=np.array(self._prefill, np.int64),
            decoding=np.array(self._decoding, np.int64),
            context=np.array(self._contexts, np.int64),
            used=np.array(self._used, np.int64),
            last_admitted=self._last_admitted,
            preemptions=self._preemptions,
            recomputed=self._recomputed,
            hit_tokens=self._hit_tokens,
            output_tokens=self._output_tokens,
            peak_running=self._peak,
            finished=tuple(self._finished),
        )

    def _left(self, sequence: _Sequence) -> int:
        """Steps of decode from its `since` to its end."""
        return sequence.row.prompt_tokens + sequence.row.output_tokens - 1 - sequence.computed

    def _now(self, sequence: _Sequence) -> None:
        """Bring a sequence in decode up to the beginning of this step."""
        steps = self._step - sequence.since
        sequence.computed += steps
        sequence.produced += steps
        sequence.since = self._step

    def _plan(self, sequence: _Sequence) -> None:
        """Note the step in which a sequence in decode needs its next block, or ends."""
        room = len(sequence.blocks) * self.limits.block_size - sequence.computed
        step = sequence.since + min(room, self._left(sequence) - 1)
        self._due.setdefault(step, []).append((sequence.place, sequence))

    def _name(self, sequence: _Sequence, computed: int) -> None:
        full = computed // self.limits.block_size
        if self.limits.enable_prefix_caching:
            for place in range(sequence.named, full):
                self._pool.name(sequence.blocks[place], sequence.key(place))
        sequence.named = max(full, sequence.named)

    def _grow(self, due: Sequence[_Sequence]) -> None:
        """Blocks for the next token of sequences in decode, whoever is preempted for it."""
        for sequence in due:
            if sequence.place < 0:
                break
            self._now(sequence)
            if sequence.computed == len(sequence.blocks) * self.limits.block_size:
                if not self._make_room(1, sequence):
                    break
                self._name(sequence, sequence.computed)
                sequence.blocks += self._pool.take(1)
            if self._left(sequence) > 1:
                self._plan(sequence)

    def _make_room(self, blocks: int, sequence: _Sequence) -> bool:
        """Preempt until so many blocks are free; False if that took the sequence itself."""
        while self._pool.free < blocks:
            last = self._running.popitem()[1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: _Sequence) -> None:
        if sequence is self._prefilling:
            self._prefilling = None
        else:
            self._now(sequence)
            self._context -= sequence.computed
        self._name(sequence, sequence.computed)
        self._pool.give_back(sequence.blocks)
        sequence.lost = sequence.computed
        sequence.blocks, sequence.named, sequence.computed, sequence.place = [], 0, 0, -1
        self._preemptions += 1
        self._waiting.appendleft(sequence)

    def _continue_prefill(self, budget: int) -> tuple[int, list[_Sequence]]:
        """The next piece of a prompt that was begun in an earlier step: its tokens, and the sequence if it is whole."""
        sequence = self._prefilling
        if sequence is None:
            return 0, []
        count = min(sequence.tokens - sequence.computed, budget)
        if not self._make_room(self._missing(sequence, count), sequence):
            return 0, []
        self._compute(sequence, count)
        return count, [sequence] if sequence.computed == sequence.tokens else []

    def _missing(self, sequence: _Sequence, count: int) -> int:
        return -(-(sequence.computed + count) // self.limits.block_size) - len(sequence.blocks)

    def _compute(self, sequence: _Sequence, count: int) -> None:
        sequence.blocks += self._pool.take(self._missing(sequence, count))
        sequence.computed += count
        self._name(sequence, sequence.computed)

    def _admit(self, budget: int, sampled: list[_Sequence]) -> int:
        """Let in who waits, as far as tokens, places and blocks reach. Returns the tokens of their prompts computed."""
        left = budget
        while left > 0 and self._waiting and len(self._running) < self.limits.max_num_seqs:
            sequence = self._waiting[0]
            hits = self._hits(sequence)
            if hits is None:
                break
            self._waiting.popleft()
            self._pool.share(hits)
            self._places += 1
            sequence.place = self._places
            self._running[sequence.place] = sequence
            sequence.blocks, sequence.named = hits, len(hits)
            sequence.computed = len(hits) * self.limits.block_size
            self._count_admitted(sequence)
            count = min(sequence.tokens - sequence.computed, left)
            self._compute(sequence, count)
            left -= count
            if sequence.computed == sequence.tokens:
                sampled.append(sequence)
            else:
                self._prefilling = sequence
        return budget - left

    def _hits(self, sequence: _Sequence) -> list[int] | None:
        """Its blocks in the prefix cache; None if the blocks that it needs beside them are not free.

        All of its tokens must have room, though only some be computed now (`scheduler_reserve_full_isl`).
        """
        size = self.limits.block_size
        needed = -(-sequence.tokens // size)
        # Blocks that are its own are free if they are found at all, so they help nothing here.
        if needed - sequence.shared_blocks > self._pool.free:
            return None
        hits: list[int] = []
        if self.limits.enable_prefix_caching:
            places = range((sequence.tokens - 1) // size)
            # What was never computed by itself cannot be found beyond what it shares.
            known = len(places) if sequence.started else min(sequence.shared_blocks, len(places))
            hits = self._pool.hits([sequence.key(place) for place in places[:known]])
        return hits if needed - len(hits) + self._pool.idle(hits) <= self._pool.free else None

    def _count_admitted(self, sequence: _Sequence) -> None:
        self._last_admitted = self._step
        if sequence.started:
            self._recomputed += max(0, sequence.lost - sequence.computed)
        else:
            self._hit_tokens += sequence.computed
            self._prompt_tokens += sequence.row.prompt_tokens
            sequence.started = True

    def _record(self, prefill: int, decoding: int, context: int) -> None:
        self._prefill.append(prefill)
        self._decoding.append(decoding)
        self._contexts.append(context)
        self._used.append(self._pool.used)
        self._peak = max(self._peak, len(self._running))

    def _sample(self, sampled: Iterable[_Sequence]) -> list[int]:
        """The first token after a prompt, or after what was computed again: after this step."""
        ended = []
        for sequence in sampled:
            if sequence is self._prefilling:
                self._prefilling = None
            sequence.produced += 1
            sequence.since = self._step
            self._context += sequence.computed
            self._output_tokens += 1
            if sequence.produced == sequence.row.output_tokens:
                ended.append(sequence)
            else:
                self._plan(sequence)
        return self._end(ended)

    def _end(self, ended: Sequence[_Sequence]) -> list[int]:
        for sequence in ended:
            total = sequence.row.prompt_tokens + sequence.row.output_tokens - 1
            self._context -= total
            self._name(sequence, total)
            self._pool.give_back(sequence.blocks)
            del self._running[sequence.place]
            sequence.place = -1
            self._finished.append(sequence.index)
        return [sequence.index for sequence in ended]


def simulate(rows: Sequence[SimulatedRow], limits: SimulatedLimits, feed: Feed) -> Run:
    """Run all rows, in their order, as a replica would: offer what the feed admits, step, tell the feed what ended."""
    engine = SimulatedEngine(limits)
    offered = 0
    while offered < len(rows) or engine.unfinished:
        while offered < len(rows) and feed.admit(candidate := rows[offered].candidate()):
            engine.submit(offered, rows[offered])
            feed.offered(offered, candidate)
            offered += 1
        if offered == len(rows):
            engine.skip_quiet_steps()
        elif not engine.unfinished:
            raise RuntimeError(f"the feed holds row {offered} back from an empty engine")
        for index in engine.step():
            feed.ended(index, rows[index].output_tokens)
        feed.progress(engine.stats())
    return engine.run()
