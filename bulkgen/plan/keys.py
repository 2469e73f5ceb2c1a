"""Row keys in bulk: 16 bytes each, unique in a plan, found by bisection."""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from bulkgen.records import IDENTITY_BYTES, ROW_KEY_BYTES

# Fixed-width byte strings compare as their bytes do; all have full width, so numpy's padding never matters.
KEY_TYPE = np.dtype(f"S{ROW_KEY_BYTES}")

Keys = npt.NDArray[np.bytes_]
Ordinals = npt.NDArray[np.int64]


def make_unique(keys: Keys) -> Ordinals:
    """Give rows that are the same in everything (id and content) keys of their own, in place; return the sort order.

    The second such row in input order gets a key derived from the first one's and its count, and so on, so that
    equal rows keep their keys over resumes as long as their order among themselves stays. The half of a key that is
    its row's identity stays as it is.
    """
    order = np.argsort(keys, kind="stable")
    while True:
        ordered = keys[order]
        same = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
        if not len(same):
            return order
        # The count of a row in its group of equals: its distance from the group's first.
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        counts = same - starts[np.searchsorted(starts, same, side="right") - 1]
        for place, count in zip(same, counts, strict=True):
            key = whole(ordered[place])
            digest = blake2b(key, digest_size=ROW_KEY_BYTES - IDENTITY_BYTES, salt=int(count).to_bytes(8, "big"))
            keys[order[place]] = key[:IDENTITY_BYTES] + digest.digest()
        order = np.argsort(keys, kind="stable")


def whole(key: bytes) -> bytes:
    """A key as numpy gives it, with the zero bytes at its end that numpy strips."""
    return bytes(key).ljust(ROW_KEY_BYTES, b"\0")


def identities(keys: Keys) -> Keys:
    """The half of each key that tells whose it is."""
    whole_keys = np.ascontiguousarray(keys)
    halves = whole_keys.view(f"S{IDENTITY_BYTES}").reshape(len(keys), ROW_KEY_BYTES // IDENTITY_BYTES)
    return np.ascontiguousarray(halves[:, 0])


def find(keys: Keys, order: Ordinals, wanted: Keys) -> Ordinals:
    """The ordinals of `wanted`, -1 where a key is not there."""
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    # Bisecting in sorted order walks the index once from left to right, which a memory map serves best.
    by_key = np.argsort(wanted, kind="stable")
    place = np.searchsorted(keys, wanted[by_key], sorter=order)
    found = order[np.minimum(place, len(keys) - 1)]
    found = np.where(keys[found] == wanted[by_key], found, -1)
    result = np.empty(len(wanted), np.int64)
    result[by_key] = found
    return result
