"""The simplest policy: keep the engine's own queue topped up, far enough ahead and no further.

What `Admission` is compared with in simulation; where the KV cache is never the limit the two do the same.

A continuously batching engine admits from its waiting queue at every step. As long as something waits there, a
sequence that ends is replaced in the next step; as soon as nothing waits, the batch shrinks. Offering the whole data
set instead would cost memory a row and take away the choice of what comes next.
"""

from bulkgen.records import EngineLimits


class TopUp:
    """Offers until the engine holds its full batch and as many rows again in its queue.

    One batch ahead is enough to replace a whole batch that ends in a single step, which is the most that can happen.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.most = 2 * limits.max_num_seqs
        # Refilling a few rows at a time costs a call each; a quarter of the batch at least is worth one.
        self._least = max(1, limits.max_num_seqs // 4)

    def room(self, in_engine: int) -> int:
        """How many sequences to submit now, when the engine holds `in_engine` of ours, running or waiting."""
        room = self.most - in_engine
        return room if room >= self._least else 0
