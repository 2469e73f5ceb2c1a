"""The simulated engine: by hand where a few blocks tell all, and step by step against vLLM's own scheduler."""

import random
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pytest

from bulkgen.feed.admission import Admission
from bulkgen.feed.simulated_cache import BlockPool
from bulkgen.feed.simulation import Feed, SimulatedEngine, SimulatedLimits, SimulatedRow, ToppedUp, simulate
from bulkgen.records import EngineStats


class Steps(Protocol):
    @property
    def unfinished(self) -> int: ...
    def submit(self, index: int, row: SimulatedRow) -> None: ...
    def step(self) -> list[int]: ...
    def stats(self) -> EngineStats: ...


def drive(engine: Steps, rows: Sequence[SimulatedRow], feed: Feed) -> None:
    offered = 0
    while offered < len(rows) or engine.unfinished:
        while offered < len(rows) and feed.admit(candidate := rows[offered].candidate()):
            engine.submit(offered, rows[offered])
            feed.offered(offered, candidate)
            offered += 1
        for index in engine.step():
            feed.ended(index, rows[index].output_tokens)
        feed.progress(engine.stats())


def limits(blocks: int, size: int = 4, seqs: int = 8, tokens: int = 64) -> SimulatedLimits:
    """`blocks` that sequences can have, beside vLLM's own one."""
    return SimulatedLimits(blocks + 1, size, seqs, tokens)


def top_up(rows: Sequence[SimulatedRow], limit: SimulatedLimits) -> SimulatedEngine:
    engine = SimulatedEngine(limit)
    drive(engine, rows, ToppedUp(limit.engine_limits()))
    return engine


def test_the_last_token_of_an_answer_is_never_computed() -> None:
    run = top_up([SimulatedRow(5, 4, 9)], limits(10)).run()
    assert run.prefill.tolist() == [5, 0, 0, 0]
    assert run.decoding.tolist() == [0, 1, 1, 1]
    assert run.context.tolist() == [0, 6, 7, 8]
    assert run.used.tolist() == [2, 2, 2, 2]  # 8 tokens in blocks of 4


def test_a_long_prompt_is_prefilled_in_pieces_beside_those_in_decode() -> None:
    run = top_up([SimulatedRow(2, 9, 9), SimulatedRow(10, 2, 9)], limits(10, seqs=2, tokens=5)).run()
    assert run.prefill.tolist() == [5, 4, 3, 0, 0, 0, 0, 0, 0]
    assert run.decoding.tolist() == [0, 1, 1, 2, 1, 1, 1, 1, 1]
    assert run.finished == (1, 0)


def test_who_came_last_makes_room_and_finds_again_what_was_not_overwritten() -> None:
    run = top_up([SimulatedRow(4, 9, 9), SimulatedRow(4, 9, 9)], limits(4)).run()
    assert run.preemptions == 1
    # It had two full blocks; the first row took the second of them.
    assert run.recomputed == 4
    assert run.finished == (0, 1)
    assert run.used.max() == 4


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    rows = [SimulatedRow(4, 9, 9), SimulatedRow(4, 9, 9), SimulatedRow(1, 1, 9)]
    run = top_up(rows, limits(4, seqs=2)).run()
    preempting = next(i for i, n in enumerate(run.decoding) if n == 1)
    assert run.prefill[preempting] == 0


def test_prefixes_are_found_in_whole_blocks_even_within_a_step() -> None:
    rows = [SimulatedRow(11, 1, 9, group=0, shared_tokens=10), SimulatedRow(11, 1, 9, group=0, shared_tokens=10)]
    run = top_up(rows, limits(10)).run()
    assert run.hit_tokens == 8
    assert run.prefill.tolist() == [11 + 3]
    assert run.used.tolist() == [3 + 1]


def test_of_what_can_be_found_the_end_of_the_oldest_is_overwritten_first() -> None:
    pool = BlockPool(5)
    first, second = pool.take(2), pool.take(2)
    for key, block in enumerate([*first, *second]):
        pool.name(block, key)
    pool.give_back(first)
    pool.give_back(second)
    pool.take(2)  # the one that holds nothing, and the end of the first
    assert [bool(pool.hits([key])) for key in range(4)] == [True, False, True, True]
    pool.share(pool.hits([0]))
    assert pool.free == 2
    pool.take(1)
    assert [bool(pool.hits([key])) for key in range(4)] == [True, False, True, False]


def test_a_row_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="row 3"):
        SimulatedEngine(limits(2)).submit(3, SimulatedRow(4, 6, 9))


def random_rows(seed: int, rows: int, longest: int, groups: int) -> list[SimulatedRow]:
    rng = random.Random(seed)
    made = []
    for _ in range(rows):
        group = rng.randrange(-1, groups)
        prompt, output = rng.randrange(1, longest // 3), rng.randrange(1, longest // 3)
        made.append(SimulatedRow(prompt, output, longest, group, 40 + 13 * group))
    return made


@pytest.mark.parametrize("seed", range(6))
def test_every_row_ends_once_with_all_its_tokens(seed: int) -> None:
    rows = random_rows(seed, 200, 16 * 30, 3)
    limit = SimulatedLimits(41, 16, 16, 100)
    run = simulate(rows, limit, Admission(limit.engine_limits()))
    assert sorted(run.finished) == list(range(200))
    assert run.output_tokens == sum(row.output_tokens for row in rows)
    # Whatever is computed is a prompt, an answer but for its last token, or computed again.
    needed = sum(row.prompt_tokens + row.output_tokens - 1 for row in rows)
    assert run.computed_tokens == needed + run.recomputed - run.hit_tokens
    assert run.used.max() <= run.blocks


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_are_not_computed_one_by_one_are_the_same(seed: int) -> None:
    rows = random_rows(seed, 60, 16 * 30, 2)
    limit = SimulatedLimits(61, 16, 16, 100)
    whole, stepped = simulate(rows, limit, ToppedUp(limit.engine_limits())), top_up(rows, limit).run()
    for name in ("prefill", "decoding", "context", "used"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(stepped, name), name)
    assert whole.finished == stepped.finished
    assert whole.output_tokens == stepped.output_tokens


@pytest.mark.real
@pytest.mark.parametrize(
    ("limit", "longest", "groups"),
    [
        (SimulatedLimits(60, 16, 32, 100), 900, 0),
        (SimulatedLimits(60, 32, 32, 256), 1800, 5),
        (SimulatedLimits(40, 128, 64, 2048), 4900, 1),
        (SimulatedLimits(60, 16, 8, 64, enable_prefix_caching=False), 900, 2),
    ],
    ids=["chunked", "prefixes", "large_blocks", "no_prefix_cache"],
)
@pytest.mark.parametrize("fed_by", [ToppedUp, Admission])
def test_it_is_vllms_scheduler_step_by_step(
    limit: SimulatedLimits, longest: int, groups: int, fed_by: type[ToppedUp | Admission]
) -> None:
    from tests.real_scheduler import RealScheduler

    rows = random_rows(longest, 120, longest, groups)
    real, simulated = RealScheduler(limit), SimulatedEngine(limit)
    for engine in (real, simulated):
        drive(engine, rows, fed_by(limit.engine_limits()))
    run = simulated.run()
    assert real.prefill == run.prefill.tolist()
    assert real.decoding == run.decoding.tolist()
    assert real.used == run.used.tolist()
    assert tuple(real.finished) == run.finished
    assert (real.preemptions, real.recomputed) == (run.preemptions, run.recomputed)
    assert real.hit_tokens == run.hit_tokens
    if fed_by is ToppedUp:
        assert run.preemptions > 10
