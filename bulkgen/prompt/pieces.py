"""Many things in pieces, each of so much that it is worth while and does not fill the memory."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def pieces(
    items: Iterable[T], size_of: Callable[[T], int], enough: int, most_items: int | None = None
) -> Iterator[list[T]]:
    """The items in their order; a piece ends with the item that makes it `enough`, or with the last of `most_items`."""
    piece: list[T] = []
    size = 0
    for item in items:
        piece.append(item)
        size += size_of(item)
        if size >= enough or len(piece) == most_items:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
