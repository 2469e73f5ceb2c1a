"""Texts that the tokenizer reads as special tokens, where a row's own text spells them.

To tell what a row's text adds from what the templates need, such texts are masked in the row: each becomes one
character of a private plane of Unicode, the row is rendered once more, and the special tokens of both are counted.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

# No characters are assigned in these planes, so no text that people wrote holds any.
_MASKS, _SPELLINGS = 0xF0000, 0x100000


class SpecialTexts:
    """The special tokens of a tokenizer; `ids` by their texts.

    `spellings` are other texts for them, under which `HubTokenizer.respelled` knows them.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {text: ids[text] for text in sorted(ids) if text}
        self._pattern = re.compile(_any_of(self._ids)) if self._ids else None
        self._masks = {text: chr(_MASKS + i) for i, text in enumerate(self._ids)}
        self.spellings = {text: chr(_SPELLINGS + i) for i, text in enumerate(self._ids)}
        self._unmasking = str.maketrans({mask: text for text, mask in self._masks.items()})
        self._ours = frozenset((*self._masks.values(), *self.spellings.values()))

    def found_in(self, value: Any) -> bool:
        """Whether a text in `value` spells a special token; looks into lists and mappings."""
        if self._pattern is None:
            return False
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, Mapping):
            return any(self.found_in(key) or self.found_in(inner) for key, inner in value.items())
        return isinstance(value, list | tuple) and any(map(self.found_in, value))

    def masked(self, value: Any) -> Any:
        """The same value, what spells a special token masked."""
        if isinstance(value, str):
            return value if self._pattern is None else self._pattern.sub(lambda found: self._masks[found[0]], value)
        if isinstance(value, Mapping):
            return {self.masked(key): self.masked(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.masked, value))
        return value

    def added(self, masked: str, tokens: Sequence[int], masked_tokens: Sequence[int]) -> list[str]:
        """The special tokens that the row's own text brings, by their texts.

        `tokens` are those of the text as it is, `masked_tokens` those of the text `masked`; with nothing masked to
        compare with, all are the row's.
        """
        return [
            text
            for text, token in self._ids.items()
            if (not masked or self._masks[text] in masked) and _count(tokens, token) > _count(masked_tokens, token)
        ]

    def respelled(self, text: str, masked: str) -> str | None:
        """The text with special tokens spelled as in `spellings`, save those of the row itself, which stay text.

        None for a text with characters that would then stand for a special token.
        """
        if self._pattern is None or not self._ours.isdisjoint(text):
            return None
        return self._pattern.sub(lambda found: self.spellings[found[0]], masked).translate(self._unmasking)


def _count(tokens: Sequence[int], token: int) -> int:
    return sum(t == token for t in tokens)


def _any_of(texts: Collection[str]) -> str:
    """A regular expression for any of the texts, the longest first, that looks at each character once."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[:1], []).append(text[1:])
    optional = "?" if rests.pop("", None) else ""
    branches = [re.escape(first) + _any_of(rest) for first, rest in sorted(rests.items())]
    if len(branches) <= 1 and not optional:
        return "".join(branches)
    return f"(?:{'|'.join(branches)}){optional}" if branches else ""
