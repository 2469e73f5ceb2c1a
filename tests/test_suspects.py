"""The search for the row that kills engines, without an engine."""

import math
import random

import pytest

from bulkgen.feed import Inquest, Suspect


class Run:
    """A replica whose engine dies of the rows in `poison`, or of anything where it is broken."""

    def __init__(self, rows: int, poison: set[int], broken: bool = False, most: int = 3) -> None:
        self.inquest = Inquest()
        self.poison = poison
        self.broken = broken
        self.most = most
        self.finished: set[int] = set()
        self.convicted: set[int] = set()
        self.deaths = 0
        self.rows: list[Suspect] = [(0, i) for i in range(rows)]

    def go(self) -> bool:
        """False when given up."""
        group, alone = self.rows, False
        while True:
            if self.broken or any(row in self.poison for _, row in group):
                self.deaths += 1
                self.inquest.died(group, alone)
            else:
                self.finished |= {row for _, row in group}
                self.convicted |= {row for _, row in self.inquest.lived()}
            if self.inquest.deaths > self.most:
                return False
            if not self.inquest.open:
                return True
            group = self.inquest.next_group()
            alone = len(group) == 1


@pytest.mark.parametrize("rows", [2, 3, 7, 64, 256, 500, 512])
def test_one_guilty_row_is_found_with_few_deaths(rows: int) -> None:
    for guilty in {0, 1, rows // 2, rows - 1}:
        run = Run(rows, {guilty})
        assert run.go()
        run.convicted |= {row for _, row in run.inquest.accused}
        assert run.convicted == {guilty}
        assert run.finished == set(range(rows)) - {guilty}
        assert run.deaths <= math.ceil(math.log2(rows)) + 1


@pytest.mark.parametrize("seed", range(20))
def test_several_guilty_rows_are_all_found_and_nobody_else(seed: int) -> None:
    luck = random.Random(seed)
    poison = set(luck.sample(range(200), luck.randint(2, 6)))
    run = Run(200, poison, most=5)
    assert run.go()
    assert run.convicted | {row for _, row in run.inquest.accused} == poison
    assert run.finished == set(range(200)) - poison


def test_a_broken_engine_convicts_nobody() -> None:
    run = Run(256, set(), broken=True)
    assert not run.go()
    assert run.deaths == 4
    assert not run.convicted
    assert len(run.inquest.give_up()) == 256


def test_a_lone_row_is_not_convicted_without_a_sign_of_life() -> None:
    inquest = Inquest()
    inquest.died([(0, 7)])
    assert inquest.next_group() == [(0, 7)]
    inquest.died([(0, 7)], alone=True)
    assert inquest.accused == [(0, 7)]
    assert not inquest.open
    inquest.try_again()
    assert inquest.next_group() == [(0, 7)]
    inquest.died([(0, 7)], alone=True)
    assert inquest.lived() == [(0, 7)]
