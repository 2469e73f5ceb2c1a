"""The bytes of a JSON Lines file, plain or uncompressed, block by block, up to its end or to where it is damaged."""

import io
import os
from collections.abc import Iterator
from contextlib import suppress

import pyarrow as pa

from bulkgen.dataset.damage import Damage, reading
from bulkgen.dataset.files import InputFile

BLOCK_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16  # what pyarrow hands to a decompressor at once


def read_blocks(file: InputFile) -> Iterator[bytes]:
    """The file's bytes, uncompressed; blocks are never empty.

    Raises Damage behind the last byte that can be read, InputError where the system cannot read the file.
    """
    if file.compression:
        yield from _uncompressed(file)
        return
    with reading(file), pa.OSFile(os.fsencode(file.path)) as plain:
        while block := plain.read(BLOCK_BYTES):
            yield block


def _uncompressed(file: InputFile) -> Iterator[bytes]:
    given = 0
    with reading(file), pa.OSFile(os.fsencode(file.path)) as plain:
        if not plain.size():
            raise Damage("it has no bytes at all")
        stream = pa.CompressedInputStream(plain, file.compression)
        try:
            with reading(file):
                while block := stream.read(BLOCK_BYTES):
                    given += len(block)
                    yield block
        except Damage:
            yield from _last_bytes(file, given, plain.tell())
            raise


def _last_bytes(file: InputFile, given: int, end: int) -> Iterator[bytes]:
    """The bytes after the first `given`, up to the damage that was met by byte `end` of the compressed file.

    A read that meets damage loses what it already had, and so does a decompressor. So the file is read anew, again
    and again, in smaller reads and out of smaller pieces of compressed bytes before the damage, down to single ones.
    """
    piece = _CHUNK_BYTES
    for size in (4096, 64, 1):
        with _Sipped(file.path, end - 2 * piece, size) as source, suppress(Damage), reading(file):
            stream = pa.CompressedInputStream(pa.PythonFile(source, "r"), file.compression)
            for start in range(0, given, BLOCK_BYTES):
                stream.read(min(BLOCK_BYTES, given - start))
            try:
                while block := stream.read(size):
                    given += len(block)
                    yield block
            finally:
                end, piece = source.tell(), size


class _Sipped(io.FileIO):
    """A file that from `start` on gives no more than `most` bytes at once, however many are asked for."""

    def __init__(self, path: os.PathLike[str], start: int, most: int) -> None:
        super().__init__(path)
        self._start = start
        self._most = most

    def read(self, size: int | None = -1, /) -> bytes:
        most = max(self._most, self._start - self.tell())
        return super().read(most if size is None or size < 0 else min(size, most))
