"""Row keys: what makes a row the same row in a later start."""

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from bulkgen.records import IDENTITY_BYTES, ROW_KEY_BYTES


def canonical(value: Any) -> str:
    """One JSON text for one value; what JSON does not know (dates, decimals, bytes) is written as tagged text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_tagged)


def _tagged(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return {type(value).__name__: str(value)}


class KeyMaker:
    """Makes keys of ROW_KEY_BYTES bytes: half of it a hash of the identity, half of it one of identity and content.

    The identity is the row's id, as typed JSON, so that 1, 1.0 and "1" are three rows; without an id it is file and
    position. The content is what would be sent: model, sampling, token ids. Every part is preceded by its length.
    So the first half tells the same row with other content, and equality of the whole is that of 128 bits.
    """

    def __init__(self, model: str, constants: Mapping[str, Any]) -> None:
        self._begun = blake2b(digest_size=ROW_KEY_BYTES - IDENTITY_BYTES)
        for part in (model, canonical(dict(constants))):
            _add(self._begun, part.encode(errors="surrogatepass"))

    def key(self, identity: bytes, overrides: str, max_tokens: int, tokens: Sequence[int]) -> bytes:
        """The key of a row that would be sent."""
        digest = self._begun.copy()
        _add(digest, identity)
        _add(digest, f"{overrides}{max_tokens}".encode(errors="surrogatepass"))
        _add(digest, np.asarray(tokens, "<i4").tobytes())
        return _hash(identity) + bytes(digest.digest())

    def refused(self, identity: bytes, code: str, content: bytes) -> bytes:
        """The key of a row that cannot be sent."""
        digest = self._begun.copy()
        for part in (identity, b"refused", code.encode(), content):
            _add(digest, part)
        return _hash(identity) + bytes(digest.digest())


class ContentHash:
    """Hashes what rows themselves bring to their requests, in certain columns (None: all), whatever the settings.

    So the same row can be told from a changed one where settings have changed, and its key with them.
    """

    def __init__(self, columns: Collection[str] | None) -> None:
        self.columns = None if columns is None else tuple(sorted(columns))

    def of(self, row: Mapping[str, Any]) -> int:
        """64 bits of a row's values."""
        own = row if self.columns is None else {name: row[name] for name in self.columns if name in row}
        text = canonical(own).encode(errors="surrogatepass")
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def _hash(identity: bytes) -> bytes:
    return blake2b(identity, digest_size=IDENTITY_BYTES).digest()


def identity(row_id: Any, file: str, position: int) -> bytes:
    """A row's identity: its id if it has one, else its place."""
    if row_id is not None:
        return b"id:" + canonical(row_id).encode(errors="surrogatepass")
    return b"at:" + f"{position}:{file}".encode(errors="surrogatepass")


def _add(digest: Any, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "big"))
    digest.update(part)
