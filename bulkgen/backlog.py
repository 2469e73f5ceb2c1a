"""What is left to hand out, in lots, and what comes back of a replica that died.

Each row is in one place only: in a lot that waits here, in one that a replica holds, among the suspects of a replica,
or committed. A lot is a shard's pending rows; rows that were in an engine when it died are apart from their shard from
then on and go in lots of their own, so that a shard that is handed out again never holds what another replica has.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from bulkgen.feed import Suspect
from bulkgen.plan import Plan

# A shard, and which of its rows: the pending ones (None), or these, which are apart from it.
Lot = tuple[int, tuple[int, ...] | None]


class Backlog:
    """Lots that wait, in the order in which they go.

    `rows`: to do at the beginning, those that follow others among them; the tokens are of those that do not.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lots: deque[Lot] = deque()
        self.rows = self.prompt_tokens = self.budget_tokens = 0
        for shard in plan.shards:
            rows, prompt_tokens, budget_tokens = plan.pending(shard)
            if rows:
                self._lots.append((shard.shard, None))
                self.rows += rows
                self.prompt_tokens += prompt_tokens
                self.budget_tokens += budget_tokens
        self.rows += plan.following

    def __bool__(self) -> bool:
        return bool(self._lots)

    def next(self) -> Lot:
        """The next lot; there is one."""
        return self._lots.popleft()

    def take_back(self, holds: Iterable[Lot], trial: list[Suspect]) -> tuple[list[Suspect], bool]:
        """What a dead replica held goes to the front, save the rows that were in its engine, which are returned.

        Also returns whether its engine had finished any row.
        """
        lots = [*holds, *lots_of(trial)]
        in_engine: list[Suspect] = []
        lived = False
        for shard, rows in lots:
            held = self._plan.ordinals(self._plan.shards[shard]) if rows is None else np.array(rows)
            inside, returned = self._plan.offers.take_back(held)
            in_engine += [(shard, int(ordinal)) for ordinal in inside if not self._plan.is_committed(ordinal)]
            lived = lived or len(returned) > 0
        suspects = {ordinal for _, ordinal in in_engine}
        self._plan.set_apart(np.array(sorted(suspects), np.int64))
        self.put_back((shard, rows and tuple(o for o in rows if o not in suspects)) for shard, rows in lots)
        return in_engine, lived

    def put_back(self, lots: Iterable[Lot]) -> None:
        """What is left to do of lots goes to the front."""
        left: list[Lot] = []
        for shard, rows in lots:
            if rows is None:
                if self._plan.pending(self._plan.shards[shard])[0]:
                    left.append((shard, None))
            elif some := tuple(o for o in rows if not self._plan.is_committed(o)):
                left.append((shard, some))
        self._lots.extendleft(reversed(left))


def lots_of(rows: Iterable[Suspect]) -> list[Lot]:
    """Rows that are apart from their shards, as lots."""
    by_shard: dict[int, list[int]] = {}
    for shard, ordinal in rows:
        by_shard.setdefault(shard, []).append(ordinal)
    return [(shard, tuple(ordinals)) for shard, ordinals in by_shard.items()]
