"""The feed's policy: what it learns of answers, in which order rows go, and how full it keeps a simulated engine."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bulkgen.feed.admission import Admission, Candidate
from bulkgen.feed.expected_output import OutputLengths
from bulkgen.feed.inside import Inside
from bulkgen.feed.order import feed_order, row_order, shard_order, strewn
from bulkgen.feed.simulated_run import Counts, Run
from bulkgen.feed.simulation import SimulatedLimits, SimulatedRow, ToppedUp, simulate
from bulkgen.records import EngineLimits, EngineStats

# 80 GB with a model of 7 billion parameters in 16 bits leave about 55 GB to the KV cache. A token takes 2 x layers x
# KV heads x head size x 2 bytes: 2 x 32 x 32 x 128 x 2 = 512 KiB in Llama-2-7B, a quarter of it in Llama-3.1-8B.
LLAMA_2 = SimulatedLimits(105_000 // 16, 16, 1024, 16_384)
LLAMA_3 = SimulatedLimits(420_000 // 16, 16, 1024, 16_384)
# The demo model with 1 GiB on the CPU.
CPU = SimulatedLimits(364, 128, 256, 4096)


def admission(limit: SimulatedLimits, lag: int = 0) -> Admission:
    return Admission(limit.engine_limits(), max_num_batched_tokens=limit.max_num_batched_tokens, lag=lag)


def topped_up(limit: SimulatedLimits) -> ToppedUp:
    return ToppedUp(limit.engine_limits())


def h100_s(prefill: Counts, decoding: Counts, context: Counts, kv_bytes: int = 1 << 19) -> np.ndarray:
    """Steps of 7 billion parameters: 3.35 TB/s of memory and half of 989 TFLOPS (NVIDIA, H100 SXM data sheet)."""
    memory = (14e9 + context * kv_bytes) / 3.35e12
    seconds: np.ndarray = 0.001 + np.maximum(memory, 14e9 * (prefill + decoding) / 495e12)
    return seconds


def heavy_tailed(rows: int, kinds: Sequence[tuple[int, int, int]], seed: int = 3) -> list[SimulatedRow]:
    """Rows of kinds (prompt tokens, output tokens, budget; the first two as medians of lognormals), in no order."""
    rng = np.random.default_rng(seed)
    prompts, outputs, budgets = np.array(kinds)[rng.integers(0, len(kinds), rows)].T
    prompt = np.clip(rng.lognormal(np.log(prompts), 0.7), 16, 3000).astype(int)
    output = np.clip(rng.lognormal(np.log(outputs), 0.9), 1, budgets).astype(int)
    columns = zip(prompt.tolist(), output.tolist(), budgets.tolist(), strict=True)
    return [SimulatedRow(*column) for column in columns]


LONG = [(600, 100, 1024), (200, 300, 4096), (120, 500, 8192)]
SHORT = [(200, 20, 128), (300, 60, 384)]


def ordered(rows: Sequence[SimulatedRow], sequences: int) -> list[SimulatedRow]:
    prompts, budgets = (np.array([getattr(row, name) for row in rows]) for name in ("prompt_tokens", "max_tokens"))
    order = feed_order(prompts, OutputLengths().expected(prompts, budgets), sequences=sequences)
    return [rows[i] for i in order]


@pytest.mark.parametrize(
    ("limit", "rows", "kinds", "sequences", "usage", "recomputed", "steps"),
    [
        (LLAMA_2, 10_000, LONG, 160, 0.95, 0.005, 1.03),
        (LLAMA_3, 5000, LONG, 640, 0.95, 0.005, 0.95),
        (CPU, 2000, SHORT, 100, 0.90, 0.01, 0.97),
    ],
    ids=["llama_2", "llama_3", "cpu"],
)
def test_the_cache_is_full_and_little_is_computed_twice(
    limit: SimulatedLimits,
    rows: int,
    kinds: Sequence[tuple[int, int, int]],
    sequences: int,
    usage: float,
    recomputed: float,
    steps: float,
) -> None:
    in_file_order = heavy_tailed(rows, kinds)
    run = simulate(ordered(in_file_order, sequences), limit, admission(limit))
    assert run.usage() >= usage
    assert run.recomputed_share <= recomputed
    before = simulate(in_file_order, limit, topped_up(limit))
    # Where hardly more than a hundred sequences fit, a fuller batch by preemption saves steps that it costs in time.
    assert run.steps < steps * before.steps
    if limit is not CPU:
        assert before.recomputed_share > 20 * run.recomputed_share
        assert run.seconds(h100_s) < before.seconds(h100_s)


def full(limit: SimulatedLimits, rows: Sequence[SimulatedRow]) -> tuple[Run, Run]:
    return simulate(rows, limit, admission(limit)), simulate(rows, limit, topped_up(limit))


def test_a_cache_that_is_never_full_holds_nothing_back() -> None:
    rng = np.random.default_rng(0)
    rows = [SimulatedRow(int(p), int(o), 64) for p, o in rng.integers(1, 64, (3000, 2))]
    held, filled = full(LLAMA_3, rows)
    assert held.steps == filled.steps
    assert held.peak_running == 1024


def test_answers_of_one_token_do_not_empty_the_queue() -> None:
    held, filled = full(LLAMA_2, [SimulatedRow(100 + i % 700, 1, 1) for i in range(1500)])
    assert held.steps == filled.steps


def test_long_prompts_with_short_answers_fill_steps_too() -> None:
    held, filled = full(LLAMA_2, [SimulatedRow(2000 + i * 97 % 4000, 1 + i % 20, 64) for i in range(800)])
    assert held.steps <= 1.1 * filled.steps
    assert held.preemptions == 0


def test_answers_as_long_as_their_budget_cost_less_than_without_holding_back() -> None:
    held, filled = full(LLAMA_2, [SimulatedRow(100 + i * 31 % 700, 256, 256) for i in range(2000)])
    assert held.recomputed_share < 0.25 * filled.recomputed_share
    assert held.seconds(h100_s) < filled.seconds(h100_s)


def test_an_engine_in_another_process_is_kept_full_as_well() -> None:
    limit = replace(LLAMA_2, delay=2)
    run = simulate(heavy_tailed(2500, LONG), limit, admission(limit, lag=2))
    assert run.usage() > 0.94
    assert run.recomputed_share < 0.01


@pytest.mark.parametrize("known", [True, False])
def test_prefixes_in_common_are_held_once_whether_known_or_not(known: bool) -> None:
    rng = np.random.default_rng(1)
    rows = [
        SimulatedRow(900 + int(p), int(o), 1024, group, 800)
        for group in range(30)
        for p, o in zip(rng.integers(10, 200, 60), np.clip(rng.lognormal(4.6, 0.8, 60), 1, 1024), strict=True)
    ]
    feed = admission(LLAMA_2)

    class Unknowing:
        admit, progress, ended = feed.admit, feed.progress, feed.ended

        def offered(self, index: int, candidate: Candidate) -> None:
            feed.offered(index, replace(candidate, group=-1))

    run = simulate(rows, LLAMA_2, feed if known else Unknowing())
    assert run.usage() > 0.93
    assert run.recomputed_share < 0.01


LIMITS = EngineLimits(max_model_len=4096, kv_tokens=16 * 101, block_size=16, max_num_seqs=8)


def stats(running: int = 0, waiting: int = 0, **more: float) -> EngineStats:
    blank = EngineStats(running, waiting, 0.0, 0, 0, 0, 0)
    return replace(blank, **more)  # type: ignore[arg-type]


def test_an_empty_engine_gets_any_row() -> None:
    assert Admission(LIMITS).admit(Candidate(1500, 4000, sequences=30))


def test_a_row_that_does_not_fit_now_waits_until_another_has_ended() -> None:
    feed, row = Admission(LIMITS), Candidate(800, 16)
    feed.offered(0, row)
    feed.progress(stats(running=1, kv_usage=0.5))
    assert not feed.admit(row)
    assert feed.admit(Candidate(300, 16))
    feed.ended(0, 16)
    feed.progress(stats(output_tokens=16))
    assert feed.admit(row)


def test_no_more_than_a_batch_and_one_ahead_even_of_the_smallest_rows() -> None:
    feed = Admission(LIMITS)
    for index in range(16):
        assert feed.admit(Candidate(1, 1))
        feed.offered(index, Candidate(1, 1))
    assert not feed.admit(Candidate(1, 1))
    assert feed.in_engine == feed.most == 16


def test_preemption_makes_it_more_careful_and_work_without_any_less() -> None:
    feed = Admission(LIMITS)
    for index in range(3):
        feed.offered(index, Candidate(100, 100))
    feed.progress(stats(running=3, kv_usage=0.2))
    careful = feed.caution
    feed.progress(stats(running=2, waiting=1, kv_usage=0.2, preemptions=1))
    assert feed.caution > careful
    careful = feed.caution
    feed.progress(stats(running=3, kv_usage=0.2, preemptions=1, output_tokens=300))
    assert feed.caution < careful


def test_a_row_with_several_answers_counts_as_many_sequences() -> None:
    feed = Admission(LIMITS)
    feed.offered(0, Candidate(10, 10, sequences=12))
    assert feed.in_engine == 12
    # The last one may have more answers than there are places: else some would stay empty.
    assert feed.admit(Candidate(10, 10, sequences=5))
    feed.offered(1, Candidate(10, 10, sequences=5))
    assert not feed.admit(Candidate(10, 10))
    feed.ended(0, None)
    feed.ended(1, None)
    assert feed.in_engine == 0


def test_a_row_admitted_in_part_is_no_preemption() -> None:
    feed = Admission(LIMITS)
    feed.offered(0, Candidate(10, 10, sequences=8))
    before = feed.caution
    for output in range(40):
        feed.progress(EngineStats(4, 4, 0.1, 0, 80, 0, 4 * output))
    assert feed.caution <= before


def test_rows_that_end_in_their_first_step_teach_nothing_about_caution() -> None:
    feed = Admission(LIMITS)
    before = feed.caution
    for index in range(5):
        feed.offered(index, Candidate(3000, 1))
    for index in range(5):
        feed.ended(index, 1)
    feed.progress(EngineStats(0, 0, 0.0, 0, 15_000, 0, 5))
    assert feed.caution == before


def test_cut_answers_are_forgotten_as_others_are() -> None:
    lengths = OutputLengths()
    kind = lengths.kind(50, 512)
    for _ in range(100_000):
        lengths.ended(kind, 512, 512)
    for _ in range(20_000):
        lengths.ended(kind, 40, 512)
    lengths.learn()
    assert lengths.expected(50, 512) < 150


def test_rows_that_go_before_they_ran_leave_nothing_behind() -> None:
    inside = Inside(16)
    inside.add(0, own_tokens=10, max_tokens=99, kind=0, sequences=1)
    for index in range(1, 1000):
        inside.add(index, own_tokens=10, max_tokens=99, kind=0, sequences=1)
        inside.follow(waiting=1, clock=1.0, preempted=0)
        inside.remove(index)
    assert len(inside._waiting) == 0


def test_a_cache_that_several_groups_of_layers_share_is_as_large_as_the_engine_says() -> None:
    told = EngineLimits(1 << 20, 16 * 1000, 16, 8, kv_cache_size_tokens=16 * 250)
    feed = Admission(told, lengths=OutputLengths(1.0))
    feed.offered(0, Candidate(16 * 100, 16 * 100))
    assert not feed.admit(Candidate(16 * 100, 16 * 100))


def test_those_that_wait_are_the_last_ones_offered() -> None:
    inside = Inside(16)
    for index in range(4):
        inside.add(index, own_tokens=10 * (index + 1), max_tokens=99, kind=0, sequences=1)
    inside.follow(waiting=1, clock=5.0, preempted=0)
    inside.remove(0)
    # Of those that run, 1 and 2, the later one was preempted after three steps.
    assert inside.follow(waiting=2, clock=8.0, preempted=1).tolist() == [33.0]
    table = inside.table(8.0)
    assert dict(zip(table.own_tokens.tolist(), table.so_far.tolist(), strict=True)) == {20.0: 3.0, 30.0: 3.0, 40.0: 0.0}
    assert table.own_tokens[table.running].tolist() == [20.0]
    assert inside.waiting_tokens == 33 + 40
    assert inside.mean_tokens(8.0) == 23.0


def learned(
    outputs: Sequence[int], running: Sequence[float] = (), prompt: int = 50, budget: int = 4096
) -> OutputLengths:
    lengths = OutputLengths()
    kind = lengths.kind(prompt, budget)
    for tokens in outputs:
        lengths.ended(kind, tokens, budget)
    lengths.learn(np.full(len(running), kind), np.array(running, np.float64))
    return lengths


def test_before_anything_ended_the_budget_says_how_long_answers_are() -> None:
    lengths = OutputLengths(prior_share=0.25)
    for budget in (64, 1000, 4000):
        assert 0.1 * budget < lengths.expected(50, budget) < 0.35 * budget


@pytest.mark.parametrize("so_far", [0, 100, 1000])
def test_lengths_that_were_seen_are_expected_again(so_far: int) -> None:
    outputs = np.random.default_rng(0).lognormal(5.5, 0.8, 3000).astype(int)
    lengths, longer = learned(outputs.tolist()), outputs[outputs > so_far]
    assert lengths.expected(50, 4096) == pytest.approx(outputs.mean(), rel=0.1)
    more = np.quantile(longer, [0.1, 0.5, 0.9]) - so_far
    chances = lengths.lasting(np.array([lengths.kind(50, 4096)]), np.array([so_far]), more)
    np.testing.assert_allclose(chances, [[0.9, 0.5, 0.1]], atol=0.05)


def test_a_mean_is_the_sum_of_the_chances_to_go_on() -> None:
    lengths, rng = learned([10, 20, 40, 80, 300] * 100), np.random.default_rng(4)
    prompts, budgets = rng.integers(1, 4000, 50), rng.integers(1, 5000, 50)
    ahead = np.arange(5000) + 0.5
    for prompt, budget, expected in zip(prompts, budgets, lengths.expected(prompts, budgets), strict=True):
        kind = np.array([lengths.kind(int(prompt), int(budget))])
        chances = lengths.lasting(kind, np.zeros(1), ahead[ahead < budget])
        assert expected == pytest.approx(chances.sum(), rel=0.01)


def test_answers_that_go_on_keep_the_short_ones_from_making_all_look_short() -> None:
    outputs = np.random.default_rng(1).exponential(400, 2000).astype(int) + 1
    ended, running = outputs[outputs <= 100], np.full((outputs > 100).sum(), 100.0)
    assert learned(ended.tolist()).expected(50, 4096) < 200
    assert learned(ended.tolist(), running.tolist()).expected(50, 4096) == pytest.approx(400, rel=0.25)


def test_an_answer_that_was_cut_off_says_that_it_was_longer() -> None:
    assert learned([256] * 500, budget=256).expected(50, 256) > 240


def test_what_is_learned_of_a_budget_holds_for_prompts_not_seen_before() -> None:
    lengths = learned([40] * 500)
    assert lengths.expected(2000, 4096) < 100
    assert lengths.expected(2000, 300) > 40  # another budget


def test_chances_fall_from_one_with_every_token() -> None:
    lengths = learned([10, 20, 40, 80] * 100)
    chances = lengths.lasting(np.array([lengths.kind(50, 4096)] * 2), np.array([0.0, 30.0]), np.linspace(0, 500, 72))
    assert chances.shape == (2, 72)
    np.testing.assert_array_equal(chances[:, 0], 1.0)
    assert np.all(np.diff(chances, axis=1) < 0)


def test_orders_are_permutations_with_groups_in_one_piece() -> None:
    rng = np.random.default_rng(2)
    prompts, expected, group = rng.integers(1, 900, 500), rng.integers(1, 900, 500), rng.integers(-1, 20, 500)
    for order in (
        feed_order(prompts, expected, group, sequences=8),
        feed_order(prompts, expected, group, sequences=8, behind_tokens=1e9),
    ):
        assert sorted(order) == list(range(500))
        for number in range(20):
            places = np.flatnonzero(group[order] == number)
            assert np.ptp(places) == len(places) - 1
            assert np.all(np.diff(expected[order][places]) <= 0)


def test_only_groups_that_come_up_seldom_are_kept_in_one_piece() -> None:
    prompts, group = np.full(400, 100), np.where(np.arange(400) % 2, 99, np.arange(400) // 8)
    left = strewn(prompts, group, reach_tokens=8_000)
    assert set(left[1::2].tolist()) == {-1}
    assert left[::2].tolist() == group[::2].tolist()
    assert strewn(prompts, group, reach_tokens=1e9).tolist() == [-1] * 400
    assert strewn([], [], 1.0).tolist() == []


def test_what_all_rows_begin_with_keeps_none_of_them_from_being_blended() -> None:
    limits = EngineLimits(1 << 20, 100_000, 16, 64)
    prompts = np.sort(np.random.default_rng(3).integers(100, 4000, 1000))
    order = row_order(limits, prompts, np.full(1000, 100.0), np.zeros(1000, np.int64), rows_behind=1e6)
    assert np.ptp(prompts[order].reshape(10, 100).mean(axis=1)) < 0.1 * prompts.mean()
    assert row_order(limits, [], [], []).tolist() == []


def test_rows_on_one_document_find_it_in_the_cache_in_the_order_that_they_are_fed() -> None:
    # 300 documents of 2,000 tokens with eight questions each, in no order, where the KV cache holds twenty.
    rng = np.random.default_rng(7)
    group = rng.permutation(np.repeat(np.arange(300), 8))
    rows = [
        SimulatedRow(2000 + int(question), int(output), 256, group=int(document), shared_tokens=2000)
        for document, question, output in zip(
            group, rng.integers(20, 60, 2400), np.clip(rng.lognormal(3.5, 0.7, 2400), 1, 256), strict=True
        )
    ]
    limits = SimulatedLimits(45_000 // 16, 16, 256, 8192)
    prompts = [row.prompt_tokens for row in rows]
    expected = OutputLengths().expected(prompts, np.full(2400, 256))
    fed = [rows[i] for i in row_order(limits.engine_limits(), prompts, expected, group)]
    as_they_stand, in_order = (simulate(some, limits, admission(limits)) for some in (rows, fed))
    whole = sum(prompts)
    assert as_they_stand.hit_tokens < 0.2 * whole
    assert in_order.hit_tokens > 0.83 * whole  # seven eighths are the most
    assert in_order.computed_tokens < 0.4 * as_they_stand.computed_tokens


def test_long_answers_start_early_only_where_the_end_is_near() -> None:
    expected = np.where(np.arange(1000) % 50 == 0, 2000, 50)
    prompts = np.full(1000, 300)
    last = [feed_order(prompts, expected, sequences=8, behind_tokens=behind) for behind in (0.0, 1e9)]
    places = [np.flatnonzero(expected[order] == 2000).max() for order in last]
    assert places[0] < 500 < 900 < places[1]
    assert feed_order([], [], sequences=8).tolist() == []


def test_prompts_of_all_lengths_stand_in_every_part() -> None:
    prompts = np.sort(np.random.default_rng(3).integers(1, 4000, 1000))
    order = feed_order(prompts, np.full(1000, 100), sequences=64, behind_tokens=1e9)
    means = prompts[order].reshape(10, 100).mean(axis=1)
    assert np.ptp(means) < 0.1 * prompts.mean()


def test_shards_are_blended_and_those_with_long_answers_do_not_end_last() -> None:
    prompts = np.repeat([90_000, 1_000], 20)
    outputs = np.repeat([1_000, 60_000], 20)
    longest = np.repeat([20, 200], 20)
    order = shard_order(prompts, outputs, longest, sequences=256)
    assert sorted(order.tolist()) == list(range(40))
    # In every quarter some of each kind.
    for quarter in np.split(order, 4):
        assert 3 <= int((quarter < 20).sum()) <= 7
    # A single shard of very long answers goes first where it could not end with the others.
    late = shard_order(prompts, outputs, np.where(np.arange(40) == 25, 5_000, 20), sequences=256)
    assert late[0] == 25
    assert shard_order([], [], [], sequences=256).tolist() == []
