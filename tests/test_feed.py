"""The feed's policy on its own."""

from bulkgen.feed.topup import TopUp
from bulkgen.records import EngineLimits


def limits(seqs: int) -> EngineLimits:
    return EngineLimits(max_model_len=100, kv_tokens=1000, block_size=16, max_num_seqs=seqs)


def test_it_offers_a_batch_ahead_and_not_the_whole_data_set() -> None:
    feed = TopUp(limits(100))
    assert feed.room(0) == 200
    assert feed.room(200) == 0


def test_the_queue_is_refilled_before_it_can_run_dry() -> None:
    # Simulate: every step ends up to a whole batch; the engine must find its batch full again at each step.
    feed, seqs = TopUp(limits(8)), 8
    held, rows_left = 0, 1000
    for ended in [0, 1, 8, 8, 3, 8, 0, 8, 8] * 10:
        take = min(feed.room(held), rows_left)
        held, rows_left = held + take, rows_left - take
        assert held >= min(seqs, held + rows_left)
        held -= min(ended, held)


def test_an_engine_of_one_sequence_is_fed_too() -> None:
    feed = TopUp(limits(1))
    assert feed.room(0) == 2
    assert feed.room(1) == 1
