"""Which rows begin alike, and an order in which those stand together: a radix tree over prefixes of a few lengths.

Rows that share a prefix, a document under several questions say, may be strewn over the whole input. A prefix cache
holds it until other prompts need its blocks, so each of them would be computed from its start again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bulkgen.plan.hashing import Hashes, PromptHashes

# Prompt tokens after which a prefix that no other row had meanwhile is taken to be out of the cache: about what one of
# 8 GiB holds for a model of 7 billion parameters with grouped-query attention.
REACH_TOKENS = 1 << 16
# The least block that engines use.
_LEAST = 16
# Prefixes that are looked at, an octave. So at least four fifths of what rows share is found.
_AN_OCTAVE = 4


def prefix_lengths(longest: int) -> list[int]:
    """At how many tokens prefixes are compared, ascending, for prompts of at most `longest` tokens."""
    lengths = [_LEAST * n for n in range(1, _AN_OCTAVE)]
    octave = _LEAST * _AN_OCTAVE
    while octave < longest:
        lengths += [octave * (_AN_OCTAVE + n) // _AN_OCTAVE for n in range(_AN_OCTAVE)]
        octave *= 2
    return [length for length in lengths if length < longest]


def prefix_hashes(prompts: PromptHashes, lengths: Sequence[int]) -> Hashes:
    """Hash of each prefix of each prompt: prompts x lengths; 0 where a prompt has no token beyond it.

    The last token of a prompt is always computed, so a prefix is shorter than its prompt.
    """
    hashes = np.zeros((len(prompts.lengths), len(lengths)), np.uint64)
    for column, length in enumerate(lengths):
        longer = np.flatnonzero(prompts.lengths > length)
        hashes[longer, column] = prompts.prefixes(longer, np.full(len(longer), length))
    return hashes


@dataclass(frozen=True, slots=True)
class Grouping:
    """Rows by what they begin with.

    `order`: the rows with like ones together, by the first of each, so that what shares nothing stays where it is.
    `group` (-1: none) and `shared_tokens`: the longest prefix of each row that others have too.
    `saved_tokens`: of all prompts, those that this order finds in a cache that reaches back REACH_TOKENS, and the rows
    as they stand do not.
    """

    order: npt.NDArray[np.int64]
    group: npt.NDArray[np.int32]
    shared_tokens: npt.NDArray[np.int32]
    saved_tokens: int

    @classmethod
    def of(
        cls,
        hashes: Hashes,
        lengths: Sequence[int],
        prompt_tokens: npt.NDArray[np.int32],
        sent: npt.NDArray[np.bool_],
    ) -> "Grouping":
        """`hashes` as by `prefix_hashes`; rows that are not `sent` are in no group, and stay where they are."""
        rows = len(hashes)
        stands_at = np.cumsum(np.where(sent, prompt_tokens, 0), dtype=np.int64)
        start = np.zeros(rows, np.int64)  # where in the order a row's like ones begin
        group, shared, known, near = (np.zeros(rows, np.int32) for _ in range(4))
        group -= 1
        groups = 0
        like = np.arange(rows)  # rows that may still have others like them, ascending
        for column, length in enumerate(lengths):
            own = np.where(sent[like], hashes[like, column], 0)
            by_prefix = np.lexsort((own, start[like]))
            ordered, prefix = like[by_prefix], own[by_prefix]
            before = start[ordered]
            same = (prefix[1:] == prefix[:-1]) & (before[1:] == before[:-1]) & (prefix[1:] != 0)
            begins = np.flatnonzero(np.append(True, ~same)) if len(ordered) else np.empty(0, np.int64)
            sizes = np.diff(np.append(begins, len(ordered)))
            # A set of like rows goes where the first of them stands, among those that were like them until here.
            first, within = ordered[begins], before[begins]
            in_order = np.lexsort((first, within))
            ahead = np.cumsum(sizes[in_order]) - sizes[in_order]
            opens = np.append(True, within[in_order][1:] != within[in_order][:-1])[: len(in_order)]
            ahead -= np.maximum.accumulate(np.where(opens, ahead, 0))
            moved = np.empty(len(begins), np.int64)
            moved[in_order] = within[in_order] + ahead
            start[ordered] = np.repeat(moved, sizes)
            several = np.repeat(sizes > 1, sizes)
            like = ordered[several]
            group[like] = groups + np.repeat(np.arange((sizes > 1).sum()), sizes[sizes > 1])
            groups += int((sizes > 1).sum())
            shared[like] = length
            again = np.flatnonzero(same) + 1
            known[ordered[again]] = length
            gap = stands_at[ordered[again]] - stands_at[ordered[again - 1]]
            near[ordered[again[gap <= REACH_TOKENS]]] = length
            like.sort()
            if not len(like):
                break
        saved = int((known - near).sum(dtype=np.int64))
        return cls(np.argsort(start, kind="stable"), group, shared, saved)
