"""The KV cache of an engine by arithmetic: a pool of blocks, what a sequence takes of it, how many sequences fit.

A block holds tokens for the layers of one group. All groups draw from one pool, and a block has the same bytes in all,
so a sequence costs the sum of its groups' blocks. Figures are those that vLLM 0.32 computes and logs when it starts
(`vllm/v1/core/kv_cache_utils.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bulkgen.errors import SpecError
from bulkgen.sizing.architecture import Architecture
from bulkgen.sizing.kv_groups import CacheGroup, KvSettings, cache_groups, whole

__all__ = ["CacheGroup", "KvCache", "KvCapacity", "KvSettings"]


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """What a number of bytes holds. `tokens` and `concurrency` are what vLLM logs when it starts.

    `usable_blocks` is one less than `blocks`: vLLM never gives out the first (`BlockPool.null_block`). `needed_bytes`
    is what one sequence of `max_model_len` may need; `refusal` says why the engine would not start, None if it would.
    `longest_model_len`: the largest `max_model_len` with which it would, no larger than the one that is set.
    """

    available_bytes: int
    blocks: int
    usable_blocks: int
    tokens: int
    concurrency: float
    needed_bytes: int
    longest_model_len: int
    refusal: str | None

    @property
    def starts(self) -> bool:
        """Whether the engine would start."""
        return self.refusal is None


@dataclass(frozen=True, slots=True)
class KvCache:
    """The groups of an engine's cache. `block_size` is the one of its attention layers; bytes are of one device."""

    settings: KvSettings
    groups: tuple[CacheGroup, ...]
    block_size: int
    bytes_per_block: int

    @classmethod
    def of(cls, architecture: Architecture, settings: KvSettings) -> "KvCache":
        """The cache of a model under these settings. Raises SpecError for what vLLM would refuse or is not known."""
        if settings.max_model_len < 1 or settings.max_num_batched_tokens < 1:
            raise SpecError("max_model_len and max_num_batched_tokens must be at least 1")
        groups, block_size, bytes_per_block = cache_groups(architecture, settings)
        return cls(settings, groups, block_size, bytes_per_block)

    @property
    def bytes_per_token(self) -> float:
        """What one more token costs a long sequence: layers with a window or a state need nothing more for it."""
        growing = [group for group in self.groups if group.cache.kind in ("full", "mla")]
        return sum(self.bytes_per_block / group.block_size for group in growing)

    def blocks_needed(self, tokens: int) -> int:
        """Blocks that one sequence of a length, in tokens, holds while it decodes."""
        return int(self.blocks_needed_each(np.array([tokens], np.int64))[0])

    def blocks_needed_each(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """As `blocks_needed`, for each of many sequences."""
        lengths = np.maximum(tokens, 1)
        total: npt.NDArray[np.int64] = np.sum([group.held(lengths) for group in self.groups], axis=0)
        return total

    def blocks_to_admit(self, tokens: int) -> int:
        """Free blocks that vLLM asks for before it admits a prompt of that length, nothing of it being cached.

        `SingleTypeKVCacheManager.get_num_blocks_to_allocate` with its admission cap.
        """
        length, flight = self.settings.max_model_len, self.settings.tokens_in_flight
        return sum(
            group.state_blocks or min(whole(tokens, group.block_size), group.most_blocks(length, flight))
            for group in self.groups
        )

    def request_bytes(self, tokens: int | None = None) -> int:
        """Bytes that vLLM counts for one sequence of a length, by default `max_model_len`."""
        return self.bytes_per_block * self._request_blocks(tokens or self.settings.max_model_len)

    def capacity(self, available_bytes: int) -> KvCapacity:
        """What that many bytes hold on each device, and whether the engine would start with them.

        `_check_enough_kv_cache_memory`, `get_kv_cache_config_from_groups` and `get_kv_cache_capacity`.
        """
        length = self.settings.max_model_len
        blocks = max(available_bytes, 0) // self.bytes_per_block
        concurrency = blocks / self._request_blocks(length)
        longest = _largest(length, lambda n: self._request_blocks(n) <= blocks - 1)
        return KvCapacity(
            available_bytes=available_bytes,
            blocks=blocks,
            usable_blocks=max(blocks - 1, 0),
            tokens=int(concurrency * length),
            concurrency=concurrency,
            needed_bytes=self.request_bytes(),
            longest_model_len=longest,
            refusal=None if longest == length else self._refusal(available_bytes, longest),
        )

    def _request_blocks(self, tokens: int) -> int:
        return sum(group.most_blocks(tokens, self.settings.tokens_in_flight) for group in self.groups)

    def _refusal(self, available_bytes: int, longest: int) -> str:
        # One block beyond what the sequence needs is never given out.
        needed = self.request_bytes() + self.bytes_per_block
        cure = f"set max_model_len to {longest} or less" if longest else "no max_model_len is short enough"
        return (
            f"a sequence of max_model_len {self.settings.max_model_len} needs {needed / 2**30:.2f} GiB of KV cache, "
            f"{max(available_bytes, 0) / 2**30:.2f} GiB are available: {cure}"
        )


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number of 1 to `most` that fits, where all smaller ones do; 0 if none does."""
    if fits(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
