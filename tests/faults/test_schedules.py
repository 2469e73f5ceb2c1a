"""Fifty schedules of faults, two at a time; `python -m tests.faults --seeds 0:500` runs more of them."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.faults.drive import Result, run_schedule
from tests.faults.schedule import make_schedule

SEEDS = range(50)
_AT_A_TIME = 2


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Future[Result]]]:
    """The results of those schedules that this session asks for, as they come."""
    wanted = [
        item.callspec.params["seed"]
        for item in request.session.items
        if hasattr(item, "callspec") and item.path == request.path
    ]
    folder = tmp_path_factory.mktemp("faults")
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        yield {
            seed: pool.submit(run_schedule, make_schedule(seed), folder / str(seed), lambda _: None) for seed in wanted
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_no_row_is_lost_doubled_or_swapped(results: dict[int, Future[Result]], seed: int) -> None:
    result = results[seed].result()
    assert result.broken is None, f"python -m tests.faults --seed {seed} shows it: {result.broken}"


def test_a_seed_makes_the_same_schedule_each_time() -> None:
    assert [make_schedule(seed) for seed in SEEDS] == [make_schedule(seed) for seed in SEEDS]
