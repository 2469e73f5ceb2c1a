"""How many prompt tokens are a prefix that other rows have too, counted as vLLM's prefix cache counts its hits.

The cache knows whole blocks of tokens by the chain of blocks up to them, and always computes the last prompt token, so
a prompt of n tokens hits at most (n - 1) // block_size blocks, and only as far as the chain is known without a gap
(vllm/v1/core/kv_cache_manager.py, KVCacheManager.get_computed_blocks; vllm/v1/core/single_type_kv_cache_manager.py,
FullAttentionManager.find_longest_cache_hit).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bulkgen.plan.hashing import Counts, Hashes, PromptHashes, mixed

# Blocks that are kept of each block size, eight bytes each. Rows that groups are found in have a quarter of that.
MOST_BLOCKS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixShare:
    """Prompt tokens that a prefix cache of unlimited size would hold already, for one size of its blocks.

    The upper bound over all orders of the rows, for full attention; a row counts once, however many answers it asks
    for, and what the answers themselves leave in the cache is not known before. The bound is reached where shorter
    prompts come first; any order is short of it by at most one block a row.

    `share` is `hit_tokens` over all prompt tokens (0 to 1), `error` its standard error: 0 where every block was
    counted, else at most 1 / sqrt(MOST_BLOCKS), 0.0005. `shared_tokens` is what the cache must hold for it: the tokens
    of all blocks that more than one row has.
    """

    block_size: int
    hit_tokens: int
    share: float
    shared_tokens: int
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGroup:
    """Rows that begin alike: `rows` of them share exactly their first `tokens`, counted in whole blocks.

    A group may lie in a larger one that shares less. `saved_tokens` is what the cache saves over the last stretch, the
    one that no larger group shares: the stretch's tokens times all rows but one. So groups' savings add up.
    `example` is the ordinal of one of the rows. Rows and savings are estimates where the plan has more than a quarter
    of MOST_BLOCKS blocks; groups are found in a sample of its rows then.
    """

    rows: int
    tokens: int
    saved_tokens: int
    example: int


class PrefixCounter:
    """Takes the prompts of a plan, some at a time.

    Memory: MOST_BLOCKS blocks for each size; twice that where all prompts end just where a block does.
    """

    def __init__(self, block_sizes: Sequence[int], prompt_tokens: int, most_blocks: int = MOST_BLOCKS) -> None:
        """`block_sizes`: one at least. `prompt_tokens`: those of the whole plan, they say how many blocks to expect."""
        self._prompt_tokens = prompt_tokens
        sizes = sorted(set(block_sizes))

        def kept(size: int, most: float) -> float:
            return min(1.0, most * size / max(1, prompt_tokens))

        self._blocks = [_Blocks(size, kept(size, most_blocks)) for size in sizes]
        self._groups = _Groups(sizes[0], kept(sizes[0], most_blocks / 4))

    def add(self, prompts: PromptHashes, ordinals: Counts) -> None:
        """Count some more rows."""
        for blocks in self._blocks:
            chains = _Chains.of(prompts, blocks.size)
            blocks.add(prompts.lengths, chains)
            if blocks.size == self._groups.size:
                self._groups.add(chains, ordinals)

    def shares(self) -> tuple[PrefixShare, ...]:
        """One for each block size, ascending."""
        return tuple(blocks.share(self._prompt_tokens) for blocks in self._blocks)

    def groups(self, most: int) -> tuple[PrefixGroup, ...]:
        """Those that save most, at most `most`, in blocks of the smallest size."""
        return self._groups.largest(most)


@dataclass(frozen=True, slots=True)
class _Chains:
    """The full blocks of some prompts: of which prompt, their number in it from 1, the hash of all up to their end."""

    prompts: Counts
    numbers: Counts
    hashes: Hashes

    @classmethod
    def of(cls, prompts: PromptHashes, size: int) -> "_Chains":
        blocks = prompts.lengths // size
        of_prompt = np.repeat(np.arange(len(blocks)), blocks)
        numbers = np.arange(1, len(of_prompt) + 1) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        return cls(of_prompt, numbers, prompts.prefixes(of_prompt, numbers * size))


class _Blocks:
    """Distinct blocks of one size. Where there are too many, those with the lowest hashes stand for all."""

    def __init__(self, size: int, kept: float) -> None:
        self.size = size
        self.kept = kept
        self._may_hit = 0
        self._seen: list[Hashes] = []
        self._last: list[Hashes] = []  # with nothing behind them in their prompt, so that they do not hit

    def add(self, lengths: Counts, chains: _Chains) -> None:
        self._may_hit += int(((np.maximum(lengths, 1) - 1) // self.size).sum())
        is_last = chains.numbers * self.size == lengths[chains.prompts]
        low = _lowest(chains.hashes, self.kept)
        self._seen.append(chains.hashes[low])
        self._last.append(chains.hashes[low & is_last])

    def share(self, prompt_tokens: int) -> PrefixShare:
        seen, last = _counts(_joined(self._seen)), _counts(_joined(self._last))
        # Each distinct block is computed once, by a row for which it would count or by one for which it would not.
        sampled = len(seen) - len(last)
        hits = min(self._may_hit, max(0, self._may_hit - round(sampled / self.kept)))
        deviation = np.sqrt(sampled * (1 - self.kept)) / self.kept
        return PrefixShare(
            block_size=self.size,
            hit_tokens=hits * self.size,
            share=hits * self.size / max(1, prompt_tokens),
            shared_tokens=round(np.count_nonzero(seen > 1) / self.kept) * self.size,
            error=float(deviation) * self.size / max(1, prompt_tokens),
        )


class _Groups:
    """The radix tree over the blocks of rows, or of a sample of them."""

    def __init__(self, size: int, kept: float) -> None:
        self.size = size
        self._kept = kept
        self._rows: list[Counts] = []
        self._numbers: list[npt.NDArray[np.int32]] = []
        self._hashes: list[Hashes] = []

    def add(self, chains: _Chains, ordinals: Counts) -> None:
        # By a hash, since rows of a kind may stand at regular distances.
        chosen = _lowest(mixed(ordinals.astype(np.uint64)), self._kept)[chains.prompts]
        self._rows.append(ordinals[chains.prompts[chosen]])
        self._numbers.append(chains.numbers[chosen].astype(np.int32))
        self._hashes.append(chains.hashes[chosen])

    def largest(self, most: int) -> tuple[PrefixGroup, ...]:
        hashes = _joined(self._hashes)
        if not len(hashes):
            return ()
        rows, numbers = np.concatenate(self._rows), np.concatenate(self._numbers).astype(np.int64)
        order = np.argsort(hashes)
        counts = _counts(hashes[order])
        sharing = np.empty(len(hashes), np.int64)
        sharing[order] = np.repeat(counts, counts)
        # Along a row ever fewer share its blocks. A stretch ends where some of the rows go another way.
        goes_on = np.append((rows[1:] == rows[:-1]) & (sharing[1:] == sharing[:-1]), False)
        ends = np.flatnonzero(~goes_on & (sharing > 1))
        same_row = rows[ends[1:]] == rows[ends[:-1]]
        begins = np.append(0, np.where(same_row, numbers[ends[:-1]], 0))[: len(ends)]
        _, first = np.unique(hashes[ends], return_index=True)  # a stretch ends in all of its rows
        ends, begins = ends[first], begins[first]
        saved = (sharing[ends] - 1) * (numbers[ends] - begins)
        top = np.argsort(-saved, kind="stable")[:most]
        return tuple(
            PrefixGroup(
                rows=round(int(sharing[end]) / self._kept),
                tokens=int(numbers[end]) * self.size,
                saved_tokens=round(int(saving) / self._kept) * self.size,
                example=int(rows[end]),
            )
            for end, saving in zip(ends[top], saved[top], strict=True)
        )


def _lowest(hashes: Hashes, share: float) -> npt.NDArray[np.bool_]:
    return hashes < np.uint64(share * 2.0**64) if share < 1 else np.ones(len(hashes), np.bool_)


def _joined(hashes: list[Hashes]) -> Hashes:
    return np.concatenate(hashes) if hashes else np.empty(0, np.uint64)


def _counts(hashes: Hashes) -> Counts:
    """How often each distinct one occurs, in the order of their values."""
    ordered = np.sort(hashes)
    borders = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return np.diff(np.concatenate(([0], borders, [len(ordered)]))) if len(ordered) else np.empty(0, np.int64)
