"""Lines out of blocks of bytes, of bounded length, and what stands where there is none to be had.

A line ends at "\\n" and nowhere else. The last one need not have an end, but for that of a damaged file: what is left
of it may look like a whole one and is none.
"""

from collections.abc import Iterator

from bulkgen.dataset.damage import Damage, damaged_row
from bulkgen.dataset.files import InputFile
from bulkgen.dataset.streams import read_blocks
from bulkgen.records import BadRow

MAX_LINE_BYTES = 256 << 20  # no less than a block has


def read_lines(file: InputFile) -> Iterator[bytes | BadRow]:
    """The lines of a file without their ends, a BadRow for each that is none, so that counting them numbers them.

    The codes of those: line_too_long, damaged_file (the last one then). Holds one block and one line in memory.
    Raises InputError where the system cannot read the file.
    """
    open_line = _OpenLine()
    lines = 0
    try:
        for block in read_blocks(file):
            end = block.find(b"\n")
            if end < 0:
                open_line.add(block)
                continue
            open_line.add(block[:end])
            yield open_line.close()
            lines += 1
            last = block.rfind(b"\n")
            if last > end:
                whole = block[end + 1 : last].split(b"\n")
                yield from whole
                lines += len(whole)
            open_line.add(block[last + 1 :])
    except Damage as damage:
        yield damaged_row(file, f"cannot be read from line {lines + 1} on ({damage})")
        return
    if open_line.bytes:
        yield open_line.close()


class _OpenLine:
    """The line whose end no block so far has brought. One that grows too long is counted and not kept."""

    def __init__(self) -> None:
        self.bytes = 0
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        self.bytes += len(piece)
        if self.bytes > MAX_LINE_BYTES:
            self._pieces.clear()
        else:
            self._pieces.append(piece)

    def close(self) -> bytes | BadRow:
        pieces, size = self._pieces, self.bytes
        self._pieces, self.bytes = [], 0
        if size <= MAX_LINE_BYTES:
            return b"".join(pieces)
        return BadRow(
            "line_too_long",
            f"the line has {size:,} bytes, a row may have {MAX_LINE_BYTES >> 20} MiB; JSON Lines has one object a "
            "line, so convert the file if it holds one big JSON value",
        )
