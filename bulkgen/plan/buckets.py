"""Sharding by prompt length: which bucket a row belongs to, and how a bucket is cut into shards. Pure arithmetic."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bulkgen.records import Shard

_SMALLEST_EDGE = 128


def bucket_edges(wanted: Sequence[int] | None, max_model_len: int) -> list[int]:
    """Upper edges of the buckets in prompt tokens, ascending; the last one holds the longest possible prompt.

    Without a wish: powers of two, so that prompts in one bucket differ by a factor of two at most.
    """
    longest = max(1, max_model_len - 1)
    if wanted is not None:
        edges = sorted({e for e in wanted if e < longest})
    else:
        edges = []
        edge = _SMALLEST_EDGE
        while edge < longest:
            edges.append(edge)
            edge *= 2
    return [*edges, longest]


def shard_rows(wanted: int | None, rows: int, replicas: int) -> int:
    """Rows a shard should have: small enough that replicas end together, large enough to cost nothing.

    Without a wish: sixteen shards a replica, of 16 to 4096 rows.
    """
    if wanted is not None:
        return wanted
    return min(4096, max(16, -(-rows // (16 * replicas))))


def cut_shards(
    bucket: int,
    longest: int,
    prompt_tokens: npt.NDArray[np.int32],
    max_tokens: npt.NDArray[np.int32],
    target_rows: int,
    first_shard: int,
) -> list[Shard]:
    """Cut one bucket into contiguous shards that cost about the same: balanced by tokens, not by rows.

    A row's cost is its prompt plus its output budget. The number of shards follows from `target_rows`; each
    border lies where the running sum of costs passes an equal share, so a shard is off by one row at most.
    """
    rows = len(prompt_tokens)
    if rows == 0:
        return []
    shards = min(rows, max(1, round(rows / target_rows)))
    running = np.cumsum(prompt_tokens.astype(np.int64) + max_tokens)
    shares = running[-1] * np.arange(1, shards) / shards
    borders = np.searchsorted(running, shares) + 1
    cut = np.unique(np.concatenate(([0], borders, [rows])))
    prompt_sums = np.concatenate(([0], np.cumsum(prompt_tokens, dtype=np.int64)))
    budget_sums = np.concatenate(([0], np.cumsum(max_tokens, dtype=np.int64)))
    return [
        Shard(
            shard=first_shard + i,
            bucket=bucket,
            longest=longest,
            first=int(a),
            rows=int(b - a),
            prompt_tokens=int(prompt_sums[b] - prompt_sums[a]),
            budget_tokens=int(budget_sums[b] - budget_sums[a]),
        )
        for i, (a, b) in enumerate(pairwise(cut))
    ]
