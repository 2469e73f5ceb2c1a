"""Row keys: what makes a row the same row in a later start."""

import base64
import json
import struct
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from bulkgen.records import IDENTITY_BYTES, ROW_KEY_BYTES


def _tagged(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return {type(value).__name__: str(value)}


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_tagged)
_TOKENS = np.dtype("<i4")
_length = struct.Struct(">Q").pack


def canonical(value: Any) -> str:
    """One JSON text for one value; what JSON does not know (dates, decimals, bytes) is written as tagged text."""
    # Most ids are integers; the encoder would first make a serializer for each.
    return int.__repr__(value) if type(value) is int else _ENCODER.encode(value)


class KeyMaker:
    """Makes keys of ROW_KEY_BYTES bytes: half of it a hash of the identity, half of it one of identity and content.

    The identity is the row's id, as typed JSON, so that 1, 1.0 and "1" are three rows; without an id it is file and
    position. The content is what would be sent: model, sampling, token ids. Every part is preceded by its length.
    So the first half tells the same row with other content, and equality of the whole is that of 128 bits.
    """

    def __init__(self, model: str, constants: Mapping[str, Any]) -> None:
        self._begun = blake2b(digest_size=ROW_KEY_BYTES - IDENTITY_BYTES)
        self._begun.update(_framed(_bytes(model), _bytes(canonical(dict(constants)))))

    def key(self, identity: bytes, overrides: str, max_tokens: int, tokens: Sequence[int]) -> bytes:
        """The key of a row that would be sent."""
        digest = self._begun.copy()
        digest.update(_framed(identity, _bytes(f"{overrides}{max_tokens}"), np.asarray(tokens, _TOKENS).tobytes()))
        return _hash(identity) + digest.digest()

    def refused(self, identity: bytes, code: str, content: bytes) -> bytes:
        """The key of a row that cannot be sent."""
        digest = self._begun.copy()
        digest.update(_framed(identity, b"refused", code.encode(), content))
        return _hash(identity) + digest.digest()


class ContentHash:
    """Hashes what rows themselves bring to their requests, in certain columns (None: all), whatever the settings.

    So the same row can be told from a changed one where settings have changed, and its key with them.
    """

    def __init__(self, columns: Collection[str] | None) -> None:
        self.columns = None if columns is None else tuple(sorted(columns))
        self._named = [(name, f"{canonical(name)}:") for name in self.columns or ()]

    def of(self, row: Mapping[str, Any]) -> int:
        """64 bits of a row's values: of the canonical JSON of its columns."""
        if self.columns is None:
            text = canonical(row)
        else:
            text = f"{{{','.join([key + canonical(row[name]) for name, key in self._named if name in row])}}}"
        return int.from_bytes(blake2b(_bytes(text), digest_size=8).digest(), "little")


def _hash(identity: bytes) -> bytes:
    return blake2b(identity, digest_size=IDENTITY_BYTES).digest()


def identity(row_id: Any, file: str, position: int) -> bytes:
    """A row's identity: its id if it has one, else its place."""
    if row_id is not None:
        return b"id:" + _bytes(canonical(row_id))
    return b"at:" + _bytes(f"{position}:{file}")


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _framed(*parts: bytes) -> bytes:
    """The parts, each preceded by its length, so that no others give the same bytes."""
    framed: list[bytes] = []
    for part in parts:
        framed += (_length(len(part)), part)
    return b"".join(framed)
