"""Prompts that are too long for the context, cut where the job asks for that.

Tokens are taken from the row's own text, never from what a chat template puts around it: from the user message where
the prompt comes from `prompt` or `template`; with `messages`, from the longest message that is neither the system's nor
the assistant's. It is shortened, rendered and counted again until it fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bulkgen.errors import RowError
from bulkgen.prompt.composing import Draft
from bulkgen.prompt.encoding import Encoded, Encoder
from bulkgen.prompt.messages import ASSISTANT, SYSTEM_ROLES
from bulkgen.prompt.sandbox import Composing
from bulkgen.prompt.tokenizer import Tokenizer

PROMPT_TRUNCATED = "prompt_truncated"

# Each takes what is still too much. More than one is needed where a cut makes other tokens of what is left.
_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class TooLong:
    """A row whose prompt has `tokens` tokens where `limit` are the most; `spells`: special tokens, in its own text."""

    row: Any
    tokens: int
    limit: int
    spells: bool


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
        if not text.strip():
            return None
        if isinstance(self.draft, str):
            return text
        before, after = self.draft[: self.message], self.draft[self.message + 1 :]
        return [*before, {**self.draft[self.message], "content": text}, *after]


class Cutter:
    """Cuts the prompts of one job, on the left or on the right, many at once."""

    def __init__(self, composing: Composing, encoder: Encoder, tokenizer: Tokenizer, from_left: bool) -> None:
        self._composing = composing
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._from_left = from_left

    def cut(self, rows: Sequence[TooLong], check_stop: Callable[[], None]) -> list[Encoded | RowError | None]:
        """Each row's prompt, no longer than its limit; None where cutting does not bring it there."""
        results: list[Encoded | RowError | None] = [None] * len(rows)
        cuts = self._begun(rows, check_stop)
        for _ in range(_ROUNDS):
            drafts = {i: draft for i, cut in cuts.items() if (draft := cut.shortened(self._from_left)) is not None}
            rewritten = [(draft, rows[i].spells) for i, draft in drafts.items()]
            encoded = self._encoder.encode(self._composing.each("rewrite", rewritten, check_stop))
            cuts = {i: cuts[i] for i in drafts}
            for i, result in zip(drafts, encoded, strict=True):
                surplus = len(result.tokens) - rows[i].limit if isinstance(result, Encoded) else 0
                if surplus > 0:
                    cuts[i].keep -= surplus
                else:
                    results[i] = _flagged(result)
                    del cuts[i]
            if not cuts:
                break
        return results

    def _begun(self, rows: Sequence[TooLong], check_stop: Callable[[], None]) -> dict[int, _Cut]:
        drafts = self._composing.each("draft", [row.row for row in rows], check_stop)
        texts = {i: text for i, draft in enumerate(drafts) if (text := _longest(draft)) is not None}
        spans = self._tokenizer.spans([text for _, text in texts.values()])
        return {
            i: _Cut(drafts[i], message, text, where, len(where) - (rows[i].tokens - rows[i].limit))
            for (i, (message, text)), where in zip(texts.items(), spans, strict=True)
        }


def _longest(draft: Draft | RowError) -> tuple[int, str] | None:
    """The text to cut, and which message it is of."""
    if isinstance(draft, str):
        return 0, draft
    if isinstance(draft, RowError):
        return None
    own = [(i, m["content"]) for i, m in enumerate(draft) if m["role"] not in (*SYSTEM_ROLES, ASSISTANT)]
    return max(own, key=lambda message: len(message[1]), default=None)


def _flagged(result: Encoded | RowError) -> Encoded | RowError:
    if isinstance(result, RowError):
        return result
    return Encoded(result.tokens, (*result.warnings, PROMPT_TRUNCATED))
