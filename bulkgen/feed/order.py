"""In which order rows should go into an engine. Pure functions of arrays; each returns a permutation of the rows.

Three things are wanted. Rows that begin alike go one after the other, so that their common beginning is in the prefix
cache while they need it. Long answers do not start last: an engine with nothing left but a few of them is empty (the
longest-first rule; R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17(2), 1969). And
rows with much to prefill stand among rows with much to decode all along, since a step that decodes for many sequences
has arithmetic to spare for a prompt, and a step of nothing but prompts leaves the KV cache empty.

Only rows that would come too far apart otherwise must go one after the other: a beginning that comes up all the time
stays in the cache by itself, and rows of it are blended like others.

Only the end of a job needs the second. So `feed_order` blends, and brings forward only what would end too late. For
shards that come one after the other, rows of later ones are `behind_tokens`: with enough of them nothing is too late.
"""

import numpy as np
import numpy.typing as npt

from bulkgen.records import EngineLimits

Permutation = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Its multiples, without their whole part, fill an interval evenly however many there are (the golden ratio).
_GOLDEN = (5**0.5 - 1) / 2
# An answer may take so many times what is expected of it before it is late: they are far from equal.
_CARE = 6.0
# A prefix that comes up once in such a share of the KV cache, in tokens of prompts, is still there: the rows that have
# it hold it, and what nobody holds goes only when the cache has turned over.
_REACH = 0.25


def row_order(
    limits: EngineLimits,
    prompt_tokens: npt.ArrayLike,
    expected_tokens: npt.ArrayLike,
    group: npt.ArrayLike,
    *,
    rows_behind: float = 0.0,
) -> Permutation:
    """`feed_order` for the rows that one engine gets next, `rows_behind` of which the lengths are not known follow."""
    prompts = np.asarray(prompt_tokens, np.float64)
    expected = np.asarray(expected_tokens, np.float64)
    if not len(prompts):
        return np.zeros(0, np.int64)
    held = float((prompts + expected).mean())
    return feed_order(
        prompts,
        expected,
        strewn(prompts, group, _REACH * limits.kv_tokens),
        sequences=max(1, min(limits.max_num_seqs, int(limits.kv_tokens / held))),
        behind_tokens=rows_behind * float(expected.mean()),
    )


def strewn(prompt_tokens: npt.ArrayLike, group: npt.ArrayLike, reach_tokens: float) -> Permutation:
    """The `group` of each row, -1 too where rows of it would come up every `reach_tokens` of prompts in any order."""
    prompts, groups = np.asarray(prompt_tokens, np.float64), np.array(group, np.int64)
    named = groups >= 0
    numbers, place, rows = np.unique(groups[named], return_inverse=True, return_counts=True)
    often = rows * reach_tokens >= prompts.sum()
    groups[named] = np.where(often, -1, numbers)[place]
    return groups


def feed_order(
    prompt_tokens: npt.ArrayLike,
    expected_tokens: npt.ArrayLike,
    group: npt.ArrayLike | None = None,
    *,
    sequences: int,
    behind_tokens: float = 0.0,
) -> Permutation:
    """Rows blended by how much of each is prompt, with long answers early enough to end with the others.

    `expected_tokens` are of the output; `sequences` run side by side, so that all rows take their sum divided by it,
    in steps, and `behind_tokens` of output come after them. Rows of a group (-1: of none) stay together.
    """
    prompts = np.asarray(prompt_tokens, np.float64)
    expected = np.asarray(expected_tokens, np.float64)
    if not len(prompts):
        return np.zeros(0, np.int64)
    unit = _units(group, len(prompts))
    longest = _most(unit, expected)
    prompt_sums, sums = (np.bincount(unit, tokens).astype(np.float64) for tokens in (prompts, expected))
    key = _places(prompt_sums, sums, longest, sequences, behind_tokens)
    order: Permutation = np.lexsort((-expected, unit, -longest[unit], key[unit])).astype(np.int64)
    return order


def shard_order(
    prompt_tokens: npt.ArrayLike, expected_tokens: npt.ArrayLike, longest_expected: npt.ArrayLike, *, sequences: int
) -> Permutation:
    """As `feed_order`, for whole shards: their sums of tokens, and what is expected of the longest answer in each."""
    longest = np.asarray(longest_expected, np.float64)
    if not len(longest):
        return np.zeros(0, np.int64)
    prompts, expected = np.asarray(prompt_tokens, np.float64), np.asarray(expected_tokens, np.float64)
    order: Permutation = np.lexsort((-longest, _places(prompts, expected, longest, sequences, 0.0))).astype(np.int64)
    return order


def _places(prompts: Floats, outputs: Floats, longest: Floats, sequences: int, behind_tokens: float) -> Floats:
    """Where each unit should begin, as a share of the whole: blended, or earlier where it would end too late."""
    share = prompts / np.maximum(1.0, prompts + outputs)
    rank = np.empty(len(share))
    rank[np.argsort(share, kind="stable")] = np.arange(len(share))
    blended = (rank + 0.5) * _GOLDEN % 1.0
    steps = max(1.0, float(outputs.sum())) / sequences
    latest: Floats = (steps + behind_tokens / sequences - _CARE * longest) / steps
    return np.minimum(blended, latest)


def _units(group: npt.ArrayLike | None, rows: int) -> Permutation:
    """What is ordered, a group or a row of none, by row: numbers from 0 in the order of the first row of each."""
    own = np.arange(rows, dtype=np.int64)
    if group is None:
        return own
    groups = np.asarray(group, np.int64)
    members = groups >= 0
    # Groups and single rows must not meet in one number.
    named = np.where(members, groups, groups.max(initial=-1) + 1 + own)
    _, first, unit = np.unique(named, return_index=True, return_inverse=True)
    place = np.empty(len(first), np.int64)
    place[np.argsort(first, kind="stable")] = np.arange(len(first))
    return place[unit]


def _most(unit: Permutation, expected: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    most = np.zeros(int(unit.max(initial=-1)) + 1)
    np.maximum.at(most, unit, expected)
    return most
