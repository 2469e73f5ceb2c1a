"""From a row to the text of its prompt: columns, the job's templates and the chat template put together.

What is here runs templates, so it runs in the sandbox's process wherever there are any.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bulkgen.errors import RowError
from bulkgen.prompt.chat import open_chat
from bulkgen.prompt.messages import Message, read_messages
from bulkgen.prompt.source import PromptSource
from bulkgen.prompt.special import SpecialTexts
from bulkgen.prompt.templates import Template

# What a row asks before a chat template writes it: messages, or plain text where there is no chat.
Draft = list[Message] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All that makes texts of rows, in a form that can be sent to another process.

    `chat_template` is None for plain text; `names` are its variables beside the messages; `whose` it is stands in
    messages. `special` holds the ids of special tokens by their texts.
    """

    source: PromptSource
    chat_template: str | None
    names: Mapping[str, str]
    whose: str
    special: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """The columns that prompts are made of: all that are read (None: the whole row), and those that must exist."""

    columns: frozenset[str] | None
    required: frozenset[str]


@dataclass(slots=True)  # not frozen: there is one a row, and freezing makes it four times as slow to make
class Composed:
    """A prompt's text, and the same with special tokens masked where the row's own text spells any.

    `plain` text was not written by a chat template.
    """

    text: str
    masked: str | None
    plain: bool


class Composer:
    """Makes texts of the rows of one job. Raises SpecError for templates that cannot work for any row."""

    def __init__(self, setup: Setup) -> None:
        source = self._source = setup.source
        self._special = SpecialTexts(setup.special)
        self._template = Template("input.template", source.template) if source.template is not None else None
        self._system = Template("input.system", source.system) if source.system is not None else None
        self._chat = (
            open_chat(setup.chat_template, setup.names, setup.whose, source.now)
            if setup.chat_template is not None
            else None
        )
        templates = [t for t in (self._template, self._system) if t is not None]
        named = {column for column in (source.messages, source.prompt) if column is not None}
        reads_all = any(t.reads_row for t in templates)
        self.reads = Reads(
            columns=None if reads_all else frozenset(named.union(*(t.columns for t in templates))),
            required=frozenset(named.union(*(t.required for t in templates))),
        )

    def compose(self, row: Mapping[str, Any]) -> Composed:
        """The text of a row, which holds no columns but those that are read. Raises RowError."""
        draft = self.draft(row)
        if self._source.messages is not None:
            masked = self._special.masked(draft) if self._special.found_in(draft) else None
        else:
            masked = self._masked_draft(row) if self._special.found_in(row) else None
        return self._composed(draft, masked)

    def draft(self, row: Mapping[str, Any]) -> Draft:
        """A row's messages, or its plain text where there is no chat. Raises RowError."""
        source = self._source
        if source.messages is not None:
            value = _cell(row, source.messages)
            return read_messages(value, f"column {source.messages!r}", source.continue_final)
        text = self._template.render(row) if self._template is not None else _column_text(row, source.prompt or "")
        if not text or text.isspace():
            raise RowError("empty_prompt", "the prompt is empty or blank")
        if self._chat is None:
            return text
        user: Message = {"role": "user", "content": text}
        return [user] if self._system is None else [{"role": "system", "content": self._system.render(row)}, user]

    def rewrite(self, draft: tuple[Draft, bool]) -> Composed:
        """The text of a draft that was changed, and whether its row's own text spells special tokens."""
        return self._composed(draft[0], self._special.masked(draft[0]) if draft[1] else None)

    def _composed(self, draft: Draft, masked: Draft | None) -> Composed:
        return Composed(
            text=_sendable(self._write(draft)),
            masked=None if masked is None else self._frame(masked),
            plain=isinstance(draft, str),
        )

    def _frame(self, masked: Draft) -> str:
        try:
            return self._write(masked)
        except RowError:
            return ""  # the template minds what was masked; then every special token counts as the row's

    def _masked_draft(self, row: Mapping[str, Any]) -> Draft:
        try:
            return self.draft({name: self._special.masked(value) for name, value in row.items()})
        except RowError:
            return ""

    def _write(self, draft: Draft) -> str:
        if isinstance(draft, str):
            return draft
        if self._chat is None:
            raise TypeError("messages need a chat template")
        return self._chat.render(draft)


def _cell(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise RowError("missing_column", f"the row has no column {column!r}")
    return row[column]


def _column_text(row: Mapping[str, Any], column: str) -> str:
    value = _cell(row, column)
    if value is None:
        raise RowError("null_prompt", f"column {column!r} is null")
    if not isinstance(value, str):
        raise RowError("not_text", f"column {column!r} holds {type(value).__name__}, not text")
    return value


def _sendable(text: str) -> str:
    """The text, if it has a UTF-8 form: JSON text inside a column and templates can bring half a surrogate pair."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as e:
            half = ascii(text[e.start])[1:-1]
            reason = f"the prompt holds {half}, half of a surrogate pair, which is no character"
            raise RowError("bad_unicode", reason) from e
    return text
