"""Which rows have the same request and may have the same answer: request keys, and groups of rows."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bulkgen.plan.repeats import SamplingReader
from bulkgen.records import REQUEST_KEY_BYTES

# A request key; zeros: the row has none.
REQUEST_TYPE = np.dtype(f"S{REQUEST_KEY_BYTES}")
# A row whose request other rows have too, and which group of rows that is.
REPEAT_TYPE = np.dtype([("ordinal", "<i8"), ("group", "<i4"), ("shard", "<i4")])

Requests = npt.NDArray[np.bytes_]


class RequestHasher:
    """Hashes whole requests to request keys: what is the same for all, sampling, budget, warnings and token ids.

    Only those whose answer another row's may stand for (see Repeats); all others get zeros. Made with BLAKE2b, so that
    nobody can make up a row that gets the answer to another one.
    """

    def __init__(self, job: str, sampling: Mapping[str, Any]) -> None:
        """`job` names all that shapes answers and is the same for all rows; `sampling` as for SamplingReader."""
        self._begun = blake2b(job.encode(errors="surrogatepass"), digest_size=REQUEST_TYPE.itemsize)
        self._reader = SamplingReader(sampling)

    def of(self, rows: pa.RecordBatch, budgets: npt.NDArray[np.int32]) -> Requests:
        """The request keys of rows in PLAN_SCHEMA."""
        lists = rows.column("tokens")
        tokens, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
        warnings = rows.column("warnings").to_pylist()
        asked = self._reader.read(rows.column("overrides"))
        digests = bytearray(len(asked) * REQUEST_TYPE.itemsize)
        for i in np.flatnonzero(asked["decided"]).tolist():
            digest = self._begun.copy()
            digest.update(f"{asked['key'][i]} {budgets[i]} {warnings[i]}\n".encode())
            digest.update(tokens[offsets[i] : offsets[i + 1]].tobytes())
            digests[i * REQUEST_TYPE.itemsize : (i + 1) * REQUEST_TYPE.itemsize] = digest.digest()
        return np.frombuffer(digests, REQUEST_TYPE)


def find_groups(requests: Requests) -> npt.NDArray[np.void]:
    """The rows that share their request with another one, in REPEAT_TYPE by group and ordinal; shards are not set.

    `requests`: of all rows in input order. Groups are numbered from 0.
    """
    decided = np.flatnonzero(requests != b"")
    own = requests[decided]
    order = np.argsort(own, kind="stable")
    own, ordinals = own[order], decided[order]
    same = own[1:] == own[:-1]  # as the one before
    member = np.zeros(len(own), bool)
    member[1:] |= same
    member[:-1] |= same
    begins = np.ones(len(own), bool)
    begins[1:] = ~same
    groups = np.empty(int(member.sum()), REPEAT_TYPE)
    groups["ordinal"] = ordinals[member]
    groups["group"] = np.cumsum(begins[member]) - 1
    groups["shard"] = -1
    return groups


class Groups:
    """Groups of rows with one request each, of which one row is generated and the others follow it."""

    def __init__(self, repeats: npt.NDArray[np.void]) -> None:
        """`repeats` in REPEAT_TYPE by group and ordinal."""
        self._rows = repeats
        count = int(repeats["group"][-1]) + 1 if len(repeats) else 0
        self._starts = np.searchsorted(repeats["group"], np.arange(count + 1))
        self._by_ordinal = np.argsort(repeats["ordinal"], kind="stable")
        self._ordinals = np.asarray(repeats["ordinal"])[self._by_ordinal]

    def of(self, ordinal: int) -> npt.NDArray[np.void]:
        """The rows of a row's group in REPEAT_TYPE, itself among them; none for one with a request of its own."""
        place = int(np.searchsorted(self._ordinals, ordinal))
        if place == len(self._ordinals) or self._ordinals[place] != ordinal:
            return self._rows[:0]
        group = int(self._rows["group"][self._by_ordinal[place]])
        rows: npt.NDArray[np.void] = self._rows[self._starts[group] : self._starts[group + 1]]
        return rows

    def followers(self, leads: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Ordinals of all rows but the first of each group, among those rows for which `leads` (by ordinal) holds."""
        rows = self._rows[leads[self._rows["ordinal"]]]
        again = np.zeros(len(rows), bool)
        again[1:] = rows["group"][1:] == rows["group"][:-1]
        followers: npt.NDArray[np.int64] = rows["ordinal"][again]
        return followers
