"""The shape of a workload, out of its plan on disk: lengths, shared prefixes, repeats, and which phase dominates.

One pass over the token ids, a batch at a time. Memory: some thirty bytes a row, and what PrefixCounter keeps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bulkgen.plan.hashing import Hashes, PromptHashes, mixed
from bulkgen.plan.lengths import Lengths
from bulkgen.plan.planned import Plan
from bulkgen.plan.prefixes import MOST_BLOCKS, PrefixCounter, PrefixGroup, PrefixShare
from bulkgen.plan.repeats import Repeats, SamplingReader, find_repeats
from bulkgen.plan.shape import PhaseCosts, Phases

BLOCK_SIZES = (16, 32, 64, 128)

_ROW_TYPE = np.dtype(
    [
        ("prompt", "<i4"),
        ("budget", "<i4"),
        ("answers", "<i4"),
        ("decided", "?"),
        ("sent", "?"),
        ("request", "<u8"),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a plan asks of an engine. Rows that were refused are not in it; rows that are done already are.

    Neither are the `unsent` ones, which get the answer to another row, but for `repeats`, which are those of all rows.
    `prompt` and `budget` are tokens of a row and of one answer; the budget is max_tokens, the most that the answer can
    be. `total` is both together, with the budget or, where one was given, what is expected of it: its `variation`
    (coefficient of variation) and `tail` (p99 over p50) say how unlike rows are.
    `answers` are the rows times the answers that each asks for; `budget_tokens` and `expected_tokens` are those of all
    answers, the latter None where nothing is known of it.
    """

    rows: int
    unsent: int
    answers: int
    prompt_tokens: int
    budget_tokens: int
    expected_tokens: int | None
    prompt: Lengths
    budget: Lengths
    total: Lengths
    prefixes: tuple[PrefixShare, ...]
    groups: tuple[PrefixGroup, ...]
    repeats: Repeats

    def prefix(self, block_size: int) -> PrefixShare:
        """What the prefix cache can hold, with blocks of this size. Raises KeyError for one that was not measured."""
        for share in self.prefixes:
            if share.block_size == block_size:
                return share
        raise KeyError(block_size)

    def phases(self, block_size: int | None = None, costs: PhaseCosts | None = None) -> Phases:
        """Prefill against decode: less what a prefix cache with blocks of this size holds; None: without a cache."""
        output = self.budget_tokens if self.expected_tokens is None else self.expected_tokens
        return Phases(
            prefill_tokens=self.prompt_tokens - (self.prefix(block_size).hit_tokens if block_size else 0),
            decode_tokens=max(0, output - self.answers),
            output="budgeted" if self.expected_tokens is None else "expected",
            costs=costs,
        )


def measure(
    plan: Plan,
    sampling: Mapping[str, Any],
    *,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    expected_output: int | None = None,
    most_groups: int = 10,
    most_blocks: int = MOST_BLOCKS,
) -> Workload:
    """Measure a plan.

    `sampling`: the parameters that are the same for all rows, as SamplingSpec.constants() gives them.
    `block_sizes`: tokens a KV block; groups are found with the smallest. `expected_output`: tokens that an answer is
    expected to have, where its budget allows. Raises OutputError for a plan that was damaged.
    """
    prefixes = PrefixCounter(block_sizes, sum(shard.prompt_tokens for shard in plan.shards), most_blocks)
    reader = SamplingReader(sampling)
    parts = [np.empty(0, _ROW_TYPE)]
    for batch in plan.batches():
        lists = batch.column("tokens")
        hashes = PromptHashes.of(lists.values.to_numpy(), lists.offsets.to_numpy())
        ordinals, budgets = batch.column("ordinal").to_numpy(), batch.column("max_tokens").to_numpy()
        sent = plan.sent[ordinals]
        prefixes.add(hashes.only(sent), ordinals[sent])
        parts.append(_rows(hashes, budgets, reader.read(batch.column("overrides")), sent))
    every = np.concatenate(parts)
    rows = every[every["sent"]]
    prompt, budget = rows["prompt"].astype(np.int64), rows["budget"].astype(np.int64)
    output = budget if expected_output is None else np.minimum(budget, expected_output)
    answers = rows["answers"].astype(np.int64)
    return Workload(
        rows=len(rows),
        unsent=len(every) - len(rows),
        answers=int(answers.sum()),
        prompt_tokens=int(prompt.sum()),
        budget_tokens=int((budget * answers).sum()),
        expected_tokens=None if expected_output is None else int((output * answers).sum()),
        prompt=Lengths.of(prompt),
        budget=Lengths.of(budget),
        total=Lengths.of(prompt + output),
        prefixes=prefixes.shares(),
        groups=prefixes.groups(most_groups),
        repeats=_repeats(every),
    )


def _repeats(rows: npt.NDArray[np.void]) -> Repeats:
    budgets = rows["budget"].astype(np.int64) * rows["answers"]
    return find_repeats(rows["request"], rows["decided"], rows["prompt"].astype(np.int64), budgets)


def _rows(
    hashes: PromptHashes,
    budgets: npt.NDArray[np.int32],
    asked: npt.NDArray[np.void],
    sent: npt.NDArray[np.bool_],
) -> npt.NDArray[np.void]:
    rows = np.empty(len(budgets), _ROW_TYPE)
    rows["prompt"], rows["budget"], rows["sent"] = hashes.lengths, budgets, sent
    rows["answers"], rows["decided"] = asked["answers"], asked["decided"]
    request: Hashes = mixed(hashes.whole() + budgets.astype(np.uint64))
    rows["request"] = mixed(request + asked["key"])
    return rows
