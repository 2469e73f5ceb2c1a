"""Rendering: a batch of rows in, as many prompts or refusals out, in the same order."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bulkgen.errors import RowError, SpecError
from bulkgen.prompt.identity import KeyMaker, canonical, identity
from bulkgen.prompt.model import Model
from bulkgen.prompt.templates import Template
from bulkgen.prompt.tokenizer import Message
from bulkgen.records import BadRow, Prompt, RefusedRow, RowBatch

MAX_TOKENS = "max_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Where a prompt comes from: exactly one of messages (column), prompt (column) and template."""

    id: str | None = None
    messages: str | None = None
    prompt: str | None = None
    template: str | None = None
    system: str | None = None
    chat: bool = True
    chat_template: str | None = None


class Renderer:
    """Renders rows of one job. `columns` are those it reads (None: all), `required` must exist in some row.

    Loads the tokenizer and compiles the templates. `constants` are the job's sampling parameters, `columns` names the
    column of each that rows bring along, `check` validates such a value or raises RowError. Raises SpecError for what
    cannot work for any row.
    """

    def __init__(
        self,
        model: Model,
        source: PromptSource,
        *,
        constants: Mapping[str, Any],
        columns: Mapping[str, str],
        check: Callable[[str, Any], Any],
        max_model_len: int,
    ) -> None:
        self._source = source
        self._sampling_columns = columns
        self._check = check
        self._max_model_len = max_model_len
        self._max_tokens: int = constants[MAX_TOKENS]
        self._keys = KeyMaker(model.fingerprint, constants)
        self._template = Template("input.template", source.template) if source.template is not None else None
        self._system = Template("input.system", source.system) if source.system is not None else None
        templates = [t for t in (self._template, self._system) if t is not None]
        named = {c for c in (source.id, source.messages, source.prompt, *columns.values()) if c is not None}
        self.required = frozenset(named.union(*(t.required for t in templates)))
        reads_all = any(t.reads_row for t in templates)
        self.columns = None if reads_all else frozenset(named.union(*(t.columns for t in templates)))
        self._tokenizer = model.tokenizer()
        if source.chat and not (source.chat_template or self._tokenizer.chat_template):
            raise SpecError(
                f"model {model.path}: its tokenizer has no chat template; give one with input.chat_template: FILE, or "
                "send plain text with input.chat: false"
            )
        if source.chat:
            # A chat template is compiled when first used. What it says to these messages is not the question here.
            with suppress(RowError):
                self._tokenizer.chat_text([{"role": "user", "content": "x"}], source.chat_template)

    def text(self, tokens: Sequence[int]) -> str:
        """Token ids as text, special tokens shown."""
        return self._tokenizer.decode(tokens)

    def render(self, batch: RowBatch) -> list[Prompt | RefusedRow]:
        """What would be sent for each row, or why it cannot be sent."""
        texts: list[str] = []
        refusals: dict[int, RowError] = {}
        sampling: list[tuple[int, str]] = []
        for i, row in enumerate(batch.rows):
            try:
                if isinstance(row, BadRow):
                    raise RowError(row.code, row.message)
                sampling.append(self._sampling(row))
                texts.append(_sendable(self._text(row)))
            except RowError as e:
                del sampling[len(texts) :]
                refusals[i] = e
        encoded = iter(zip(self._encode(texts), sampling, strict=True))
        return [
            self._refused(batch, i, refusals[i]) if i in refusals else self._prompt(batch, i, *next(encoded))
            for i in range(len(batch.rows))
        ]

    def _encode(self, texts: list[str]) -> list[Sequence[int]]:
        """Tokens with exactly one BOS at most: a chat template writes its own, plain text gets the tokenizer's."""
        if not texts:
            return []
        bos = self._tokenizer.bos
        encoded = self._tokenizer.encode(texts, special=not self._source.chat)
        if bos is None:
            return encoded
        return [ids[1:] if len(ids) > 1 and ids[0] == ids[1] == bos else ids for ids in encoded]

    def _prompt(self, batch: RowBatch, i: int, tokens: Sequence[int], sampling: tuple[int, str]) -> Prompt | RefusedRow:
        max_tokens, overrides = sampling
        room = self._max_model_len - len(tokens)
        if len(tokens) == 0:
            return self._refused(batch, i, RowError("empty_prompt", "the prompt has no tokens"))
        if room < 1:
            reason = f"the prompt has {len(tokens)} tokens, the context {self._max_model_len} with the output's"
            return self._refused(batch, i, RowError("prompt_too_long", reason), len(tokens))
        key = self._keys.key(self._identity(batch, i), overrides, max_tokens, tokens)
        return Prompt(batch.first + i, key, tokens, min(max_tokens, room), overrides)

    def _refused(self, batch: RowBatch, i: int, error: RowError, prompt_tokens: int | None = None) -> RefusedRow:
        row = batch.rows[i]
        raw = row.raw if isinstance(row, BadRow) else None
        text = None if isinstance(row, BadRow) else canonical(row)
        content = raw or (text or "").encode(errors="surrogatepass")
        return RefusedRow(
            ordinal=batch.first + i,
            key=self._keys.refused(self._identity(batch, i), error.code, content),
            file=batch.file,
            position=batch.positions[i],
            code=error.code,
            message=error.message,
            row=text,
            raw=raw,
            prompt_tokens=prompt_tokens,
        )

    def _identity(self, batch: RowBatch, i: int) -> bytes:
        row = batch.rows[i]
        row_id = None if isinstance(row, BadRow) or self._source.id is None else row.get(self._source.id)
        return identity(row_id, batch.file, batch.positions[i])

    def _sampling(self, row: Mapping[str, Any]) -> tuple[int, str]:
        """A row's max_tokens, and its other own parameters as JSON. Null means the job's default."""
        if not self._sampling_columns:
            return self._max_tokens, "{}"
        own = {
            param: self._check(param, row[column])
            for param, column in self._sampling_columns.items()
            if row.get(column) is not None
        }
        max_tokens = own.pop(MAX_TOKENS, self._max_tokens)
        return max_tokens, canonical(own) if own else "{}"

    def _text(self, row: Mapping[str, Any]) -> str:
        source = self._source
        if source.messages is not None:
            return self._tokenizer.chat_text(_messages(row, source.messages), source.chat_template)
        text = self._template.render(row) if self._template is not None else _column_text(row, source.prompt or "")
        if not text.strip():
            raise RowError("empty_prompt", "the prompt is empty or blank")
        if not source.chat:
            return text
        messages = [{"role": "user", "content": text}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system.render(row)})
        return self._tokenizer.chat_text(messages, source.chat_template)


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


def _column_text(row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        raise RowError("missing_column", f"the row has no column {column!r}")
    value = row[column]
    if value is None:
        raise RowError("null_prompt", f"column {column!r} is null")
    if not isinstance(value, str):
        raise RowError("not_text", f"column {column!r} holds {type(value).__name__}, not text")
    return value


def _messages(row: Mapping[str, Any], column: str) -> list[Message]:
    """A row's chat messages, as a list or as the JSON text of one."""
    if column not in row:
        raise RowError("missing_column", f"the row has no column {column!r}")
    value = row[column]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as e:
            raise RowError("bad_messages", f"column {column!r} is text, but not JSON: {e}") from e
    if value is None:
        raise RowError("null_prompt", f"column {column!r} is null")
    if not isinstance(value, list):
        raise RowError("bad_messages", f"column {column!r} holds {type(value).__name__}, not a list of messages")
    if not value:
        raise RowError("empty_prompt", f"column {column!r} is an empty list")
    return [_message(column, message) for message in value]


def _message(column: str, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowError("bad_messages", f"column {column!r}: each message needs a role and a content")
    # Arrow pads structs with nulls for keys that other rows have; a template must not see them.
    known = {key: value for key, value in message.items() if value is not None}
    content = known.get("content")
    if isinstance(content, list):
        known["content"] = _flat_content(column, content)
    elif content is not None and not isinstance(content, str):
        raise RowError("not_text", f"column {column!r}: a message's content is {type(content).__name__}, not text")
    return known


def _flat_content(column: str, parts: list[Any]) -> str:
    """Text parts joined by line breaks, as vLLM does for templates that take plain text."""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RowError("unsupported_content", f"column {column!r}: only text parts can be sent in a message's content")
    return "\n".join(text for text in texts if text is not None)
