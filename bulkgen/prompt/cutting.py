"""Prompts that are too long for the context, cut where the job asks for that.

Tokens are taken from the row's own text, never from what a chat template puts around it: from the user message where
the prompt comes from `prompt` or `template`; with `messages`, from the longest message that is neither the system's nor
the assistant's. It is shortened, rendered and counted again until it fits. A very long text is first cut to a length
in characters that is still too long, so that it need not be counted as a whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bulkgen.codes import PROMPT_TRUNCATED
from bulkgen.errors import RowError
from bulkgen.prompt.composing import Draft
from bulkgen.prompt.encoding import Encoded, Encoder
from bulkgen.prompt.messages import ASSISTANT, SYSTEM_ROLES
from bulkgen.prompt.pieces import pieces
from bulkgen.prompt.sandbox import Composing
from bulkgen.prompt.tokenizer import Tokenizer

# Each takes what is still too much. More than one is needed where a cut makes other tokens of what is left.
_ROUNDS = 16
_PIECE_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class TooLong:
    """A row whose prompt has `tokens` tokens where `limit` are the most; `spells`: special tokens, in its own text.

    Where it is not `whole` there are more tokens.
    """

    row: Any
    tokens: int
    limit: int
    spells: bool
    whole: bool


@dataclass(slots=True)
class _Cut:
    """A draft on its way: which message is cut, its text, where each token of that stands, how many are kept."""

    draft: Draft
    message: int
    text: str
    spans: Sequence[tuple[int, int]]
    keep: int

    def shortened(self, from_left: bool) -> Draft | None:
        """The draft with as many tokens; None where nothing is left of its text."""
        if self.keep < 1:
            return None
        start, end = (self.spans[-self.keep][0], None) if from_left else (0, self.spans[self.keep - 1][1])
        text = self.text[start:end]
        return _with_text(self.draft, self.message, text) if text.strip() else None


class Cutter:
    """Cuts the prompts of one job, on the left or on the right, many at once."""

    def __init__(self, composing: Composing, encoder: Encoder, tokenizer: Tokenizer, from_left: bool) -> None:
        self._composing = composing
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._from_left = from_left

    def cut(self, rows: Sequence[TooLong], check_stop: Callable[[], None]) -> list[Encoded | RowError | None]:
        """Each row's prompt, no longer than its limit; None where cutting does not bring it there."""
        return [result for piece in _together(rows) for result in self._cut(piece, check_stop)]

    def _cut(self, rows: Sequence[TooLong], check_stop: Callable[[], None]) -> list[Encoded | RowError | None]:
        results: list[Encoded | RowError | None] = [None] * len(rows)
        made = self._composing.each("draft", [row.row for row in rows], check_stop)
        drafts: dict[int, Draft] = {i: draft for i, draft in enumerate(made) if not isinstance(draft, RowError)}
        tokens = {i: rows[i].tokens for i in drafts}
        shorter = {i: short for i, d in drafts.items() if not rows[i].whole and (short := self._window(d)) is not None}
        drafts |= shorter
        for i, result in self._rewritten(shorter, rows, check_stop):
            if isinstance(result, RowError) or len(result.tokens) <= rows[i].limit:
                results[i] = _flagged(result)
            elif result.whole:
                tokens[i] = len(result.tokens)
                continue
            del drafts[i]
        cuts = self._begun(drafts, {i: tokens[i] - rows[i].limit for i in drafts})
        for _ in range(_ROUNDS):
            shorter = {i: draft for i, cut in cuts.items() if (draft := cut.shortened(self._from_left)) is not None}
            cuts = {i: cuts[i] for i in shorter}
            for i, result in self._rewritten(shorter, rows, check_stop):
                surplus = len(result.tokens) - rows[i].limit if isinstance(result, Encoded) else 0
                if surplus > 0:
                    cuts[i].keep -= surplus
                else:
                    results[i] = _flagged(result)
                    del cuts[i]
            if not cuts:
                break
        return results

    def _rewritten(
        self, drafts: Mapping[int, Draft], rows: Sequence[TooLong], check_stop: Callable[[], None]
    ) -> Iterator[tuple[int, Encoded | RowError]]:
        changed = [(draft, rows[i].spells) for i, draft in drafts.items()]
        texts = list(self._composing.each("rewrite", changed, check_stop))
        return zip(drafts, self._encoder.encode(texts), strict=True)

    def _window(self, draft: Draft) -> Draft | None:
        """A very long draft with as much of its text as leaves room for the rest among what is encoded whole."""
        if (longest := _longest(draft)) is None:
            return None
        message, text = longest
        most = self._encoder.longest // 2
        return _with_text(draft, message, text[-most:] if self._from_left else text[:most])

    def _begun(self, drafts: Mapping[int, Draft], surplus: Mapping[int, int]) -> dict[int, _Cut]:
        texts = {i: text for i, draft in drafts.items() if (text := _longest(draft)) is not None}
        spans = self._tokenizer.spans([text for _, text in texts.values()])
        return {
            i: _Cut(drafts[i], message, text, where, len(where) - surplus[i])
            for (i, (message, text)), where in zip(texts.items(), spans, strict=True)
        }


def _together(rows: Sequence[TooLong]) -> Iterator[list[TooLong]]:
    """The rows, so many at once that what is known of each of their tokens does not fill the memory."""
    return pieces(rows, lambda row: row.tokens, _PIECE_TOKENS)


def _with_text(draft: Draft, message: int, text: str) -> Draft:
    """The draft with another text in the place of the one to cut."""
    if isinstance(draft, str):
        return text
    return [*draft[:message], {**draft[message], "content": text}, *draft[message + 1 :]]


def _longest(draft: Draft) -> tuple[int, str] | None:
    """The text to cut, and which message it is of."""
    if isinstance(draft, str):
        return 0, draft
    own = [(i, m["content"]) for i, m in enumerate(draft) if m["role"] not in (*SYSTEM_ROLES, ASSISTANT)]
    return max(own, key=lambda message: len(message[1]), default=None)


def _flagged(result: Encoded | RowError) -> Encoded | RowError:
    if isinstance(result, RowError):
        return result
    return Encoded(result.tokens, (*result.warnings, PROMPT_TRUNCATED))
