"""What is handed out and what comes back: each row in one place only, whatever dies."""

import random
from pathlib import Path

import numpy as np
import pytest

from bulkgen.backlog import Backlog, Lot, lots_of
from bulkgen.feed import Suspect
from bulkgen.plan import Plan, PlanWriter, bucket_edges, load_plan
from bulkgen.records import Prompt

ROWS = 60


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    writer = PlanWriter(tmp_path / "plan", bucket_edges(None, 4096))
    writer.add([Prompt(i, i.to_bytes(16, "big"), [1] * (10 + i * 7), 5, "{}") for i in range(ROWS)], [(0, 0)] * ROWS)
    return writer.finish({"made_from": "test"}, 9, 2)


def rows_of(plan: Plan, lot: Lot) -> list[int]:
    shard, rows = lot
    only = None if rows is None else frozenset(rows)
    return [row.ordinal for row in plan.read(plan.shards[shard], only)]


def test_all_rows_are_handed_out_once(plan: Plan) -> None:
    backlog = Backlog(plan)
    assert backlog.rows == ROWS
    seen = []
    while backlog:
        seen += rows_of(plan, backlog.next())
    assert sorted(seen) == list(range(ROWS))


class Worker:
    """A replica, in miniature: lots, rows in its engine, suspects of earlier deaths."""

    def __init__(self) -> None:
        self.holds: list[Lot] = []
        self.trial: list[Suspect] = []
        self.suspects: list[Suspect] = []
        self.engine: list[int] = []
        self.unread: list[int] = []


@pytest.mark.parametrize("seed", range(40))
def test_no_row_is_ever_in_two_engines_or_lost(plan: Plan, seed: int) -> None:
    luck = random.Random(seed)
    backlog = Backlog(plan)
    offers = load_plan(plan.folder, "replica").offers
    workers = [Worker() for _ in range(3)]
    for _ in range(5000):
        if not (plan.state != 2).any():
            break
        worker = luck.choice(workers)
        act = luck.random()
        if act < 0.02:  # it dies
            in_engine, _ = backlog.take_back(worker.holds, worker.trial)
            assert sorted(ordinal for _, ordinal in in_engine) == sorted(worker.engine)
            worker.suspects += in_engine
            worker.holds, worker.trial, worker.engine, worker.unread = [], [], [], []
        elif act < 0.03 and not worker.trial:  # it is given up
            backlog.put_back(lots_of(worker.suspects))
            worker.suspects = []
        elif act < 0.3 and not worker.engine and not worker.unread and worker.suspects:
            worker.holds = []
            worker.trial = [worker.suspects.pop() for _ in range(luck.randint(1, len(worker.suspects)))]
            worker.unread = [ordinal for lot in lots_of(worker.trial) for ordinal in rows_of(plan, lot)]
        elif act < 0.5 and backlog and not worker.suspects and not worker.trial:
            worker.holds.append(backlog.next())
            worker.unread += rows_of(plan, worker.holds[-1])
        elif act < 0.8 and worker.unread:
            worker.engine.append(worker.unread.pop(0))
            offers.begin(worker.engine[-1])
            assert sum(worker.engine[-1] in other.engine for other in workers) == 1
        elif worker.engine:
            done = worker.engine.pop(luck.randrange(len(worker.engine)))
            offers.end(done, done=True)
            assert plan.commit(np.array([done]))
            if not worker.engine and not worker.unread:
                worker.trial = []
    assert (plan.state == 2).all()
