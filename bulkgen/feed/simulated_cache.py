"""KV blocks of a simulated engine: a pool of them, the prefix cache over it, and what is evicted first.

It follows vLLM 0.32 for models whose layers all attend to everything: `vllm/v1/core/block_pool.py` (BlockPool),
`kv_cache_utils.py` (FreeKVCacheBlockQueue) and `single_type_kv_cache_manager.py` (FullAttentionManager).
"""

from collections.abc import Sequence


class BlockPool:
    """Blocks are numbers. Free ones stand in a queue: the front is taken first, and what it held is forgotten then.

    A full block has a key (in vLLM the hash of all tokens up to its end) and is found by it as long as nobody has
    taken it. Two blocks may have the same key; the one that got it first is found.
    """

    def __init__(self, blocks: int) -> None:
        """`blocks`: how many can hold tokens, without the one that vLLM keeps for itself (its null block)."""
        self.blocks = self.free = blocks
        self._users = [0] * blocks
        self._key: list[int | None] = [None] * blocks
        self._found: dict[int, list[int]] = {}
        end = blocks  # stands before the first and after the last of the queue
        self._next = [*range(1, blocks + 1), 0]
        self._previous = [end, *range(blocks)]
        self._end = end

    @property
    def used(self) -> int:
        """Blocks that sequences hold now."""
        return self.blocks - self.free

    def hits(self, keys: Sequence[int]) -> list[int]:
        """The blocks found for `keys`, up to the first that is not there."""
        found = []
        for key in keys:
            blocks = self._found.get(key)
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` no sequence holds: to use them takes them from the free ones."""
        return sum(not self._users[block] for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """One more sequence holds `blocks`."""
        for block in blocks:
            if not self._users[block]:
                before, after = self._previous[block], self._next[block]
                self._next[before], self._previous[after] = after, before
                self.free -= 1
            self._users[block] += 1

    def take(self, count: int) -> list[int]:
        """`count` blocks for new tokens; so many are free."""
        taken = []
        block = self._next[self._end]
        for _ in range(count):
            taken.append(block)
            self._forget(block)
            self._users[block] = 1
            block = self._next[block]
        self._next[self._end], self._previous[block] = block, self._end
        self.free -= count
        return taken

    def name(self, block: int, key: int) -> None:
        """A block is full: it can be found by `key` from now on."""
        self._key[block] = key
        self._found.setdefault(key, []).append(block)

    def give_back(self, blocks: Sequence[int]) -> None:
        """A sequence holds `blocks`, in the order of its tokens, no more: of what can be found, its end goes first."""
        nameless: list[int] = []
        named: list[int] = []
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                (nameless if self._key[block] is None else named).append(block)
        self._insert(self._end, nameless)
        self._insert(self._previous[self._end], named)
        self.free += len(nameless) + len(named)

    def _insert(self, before: int, blocks: Sequence[int]) -> None:
        after = self._next[before]
        for block in blocks:
            self._next[before], self._previous[block] = block, before
            before = block
        self._next[before], self._previous[after] = after, before

    def _forget(self, block: int) -> None:
        key = self._key[block]
        if key is None:
            return
        self._key[block] = None
        same = self._found[key]
        same.remove(block)
        if not same:
            del self._found[key]
