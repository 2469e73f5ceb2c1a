"""Rendering: a batch of rows in, as many prompts or refusals out, in the same order."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bulkgen.codes import MAX_TOKENS_CAPPED
from bulkgen.errors import RowError, SpecError
from bulkgen.prompt.chat import STUB_CHAT
from bulkgen.prompt.composing import Composed, Draft, Setup
from bulkgen.prompt.cutting import Cutter, TooLong
from bulkgen.prompt.encoding import Encoded, Encoder
from bulkgen.prompt.identity import KeyMaker, canonical, identity
from bulkgen.prompt.model import Model
from bulkgen.prompt.pieces import pieces
from bulkgen.prompt.sandbox import LIMIT, Composing, InProcess, Limits, Sandbox
from bulkgen.prompt.source import PromptSource
from bulkgen.prompt.tokenizer import Tokenizer
from bulkgen.records import BadRow, Prompt, RefusedRow, RowBatch
from bulkgen.spec import check_sampling_together

MAX_TOKENS, MIN_TOKENS = "max_tokens", "min_tokens"

_PROBE = "probe"
_PIECE_CHARACTERS = 1 << 20


class _Sampling(NamedTuple):
    """What a row says of its sampling: bounds of its output in tokens, the rest of its own parameters as JSON."""

    max_tokens: int
    min_tokens: int
    overrides: str


class _Overlong(NamedTuple):
    """A prompt that leaves no room for output: its tokens, or, where it is not `whole`, how many it has at least."""

    tokens: int
    whole: bool


def _never() -> None:
    """Nobody asks for a stop."""


def _characters(text: Composed | RowError) -> int:
    return len(text.text) if isinstance(text, Composed) else 0


class Renderer:
    """Renders rows of one job. `columns` are those it reads (None: all), `required` must exist in some row.

    Loads the tokenizer and compiles the templates, which run in a process of their own, within `limits`. `constants`
    are the job's sampling parameters, `columns` names the column of each that rows bring along, `check` validates such
    a value or raises RowError. Raises SpecError for what cannot work for any row. `check_stop` may raise; it is asked
    while templates are tried.
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
        limits: Limits | None = None,
        check_stop: Callable[[], None] = _never,
    ) -> None:
        self._source = source
        self._sampling_columns = columns
        self._check = check
        self._max_model_len = max_model_len
        self._constants = constants
        self._max_tokens: int = constants[MAX_TOKENS]
        self._min_tokens: int = constants.get(MIN_TOKENS, 0)
        self._usual_sampling = _Sampling(self._max_tokens, self._min_tokens, "{}")
        self._keys = KeyMaker(model.fingerprint, constants)
        self._tokenizer = model.tokenizer()
        self._composing = _open_composing(model, source, self._tokenizer, limits or Limits(), check_stop)
        self._reads = self._composing.reads
        others = {c for c in (source.id, *columns.values()) if c is not None}
        self.required = self._reads.required | others
        self.columns = None if self._reads.columns is None else self._reads.columns | others
        self._encoder = Encoder(self._tokenizer, source.special_tokens, max_model_len)
        from_left = source.too_long == "truncate_left"
        self._cutter = Cutter(self._composing, self._encoder, self._tokenizer, from_left)

    def text(self, tokens: Sequence[int]) -> str:
        """Token ids as text, special tokens shown."""
        return self._tokenizer.decode(tokens)

    def render(self, batch: RowBatch, check_stop: Callable[[], None] = _never) -> list[Prompt | RefusedRow]:
        """What would be sent for each row, or why it cannot be sent. `check_stop` may raise; asked while waiting."""
        said = [self._said(row) for row in batch.rows]
        sampling = [s for s in said if isinstance(s, _Sampling)]
        rows = [self._read(row) for row, s in zip(batch.rows, said, strict=True) if isinstance(s, _Sampling)]
        results = iter(self._encoded(rows, sampling, check_stop))
        return [
            self._finished(batch, i, next(results), s) if isinstance(s, _Sampling) else self._refused(batch, i, s)
            for i, s in enumerate(said)
        ]

    def _encoded(
        self, rows: Sequence[Any], sampling: Sequence[_Sampling], check_stop: Callable[[], None]
    ) -> list[Encoded | RowError | _Overlong]:
        """The prompt of each row; one that leaves no room for output is cut, or only counted."""
        encoded: list[Encoded | RowError | _Overlong] = []
        to_cut: dict[int, TooLong] = {}
        composed = self._composing.each("compose", rows, check_stop)
        # Tokens take far more memory than the text that they are of.
        for texts in pieces(composed, _characters, _PIECE_CHARACTERS):
            for text, result in zip(texts, self._encoder.encode(texts), strict=True):
                if isinstance(result, RowError) or len(result.tokens) < self._max_model_len:
                    encoded.append(result)
                    continue
                i = len(encoded)
                spells = isinstance(text, Composed) and text.masked is not None
                room = max(1, min(sampling[i].max_tokens, self._max_model_len // 2))
                to_cut[i] = TooLong(rows[i], len(result.tokens), self._max_model_len - room, spells, result.whole)
                encoded.append(_Overlong(len(result.tokens), result.whole))
        if to_cut and self._source.too_long != "fail":
            for i, cut in zip(to_cut, self._cutter.cut([*to_cut.values()], check_stop), strict=True):
                encoded[i] = cut or encoded[i]
        return encoded

    def _too_long(self, prompt: _Overlong) -> RowError:
        number = f"{prompt.tokens} tokens" if prompt.whole else f"more than {prompt.tokens} tokens"
        reason = f"the prompt has {number}, the context {self._max_model_len} with the output's"
        if self._source.too_long != "fail":
            reason += ", and to cut the row's own text does not make it fit"
        return RowError("prompt_too_long", reason)

    def _finished(
        self, batch: RowBatch, i: int, result: Encoded | RowError | _Overlong, sampling: _Sampling
    ) -> Prompt | RefusedRow:
        if isinstance(result, RowError):
            return self._refused(batch, i, result)
        if isinstance(result, _Overlong):
            return self._refused(batch, i, self._too_long(result), result.tokens if result.whole else None)
        tokens, warnings, max_tokens = result.tokens, result.warnings, sampling.max_tokens
        if len(tokens) == 0:
            return self._refused(batch, i, RowError("empty_prompt", "the prompt has no tokens"))
        room = self._max_model_len - len(tokens)
        if room < max_tokens:
            max_tokens, warnings = room, (*warnings, MAX_TOKENS_CAPPED)
        if sampling.min_tokens > max_tokens:
            reason = f"min_tokens is {sampling.min_tokens}, but max_tokens {sampling.max_tokens}"
            if room < sampling.max_tokens:
                reason += f", and a prompt of {len(tokens)} tokens leaves room for {room}"
            return self._refused(batch, i, RowError("bad_sampling", reason), len(tokens))
        key = self._keys.key(self._identity(batch, i), sampling.overrides, sampling.max_tokens, tokens)
        return Prompt(batch.first + i, key, tokens, max_tokens, sampling.overrides, warnings)

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

    def _read(self, row: Any) -> Any:
        """The columns of a row that prompts are made of."""
        columns = self._reads.columns
        return row if columns is None else {name: row[name] for name in columns if name in row}

    def _said(self, row: Mapping[str, Any] | BadRow) -> _Sampling | RowError:
        if isinstance(row, BadRow):
            return RowError(row.code, row.message)
        try:
            return self._sampling(row)
        except RowError as e:
            return e

    def _sampling(self, row: Mapping[str, Any]) -> _Sampling:
        """A row's own sampling. Null means the job's default."""
        if not self._sampling_columns:
            return self._usual_sampling
        own = {
            param: self._check(param, row[column])
            for param, column in self._sampling_columns.items()
            if row.get(column) is not None
        }
        check_sampling_together({**self._constants, **own})
        max_tokens = own.pop(MAX_TOKENS, self._max_tokens)
        return _Sampling(max_tokens, own.get(MIN_TOKENS, self._min_tokens) or 0, canonical(own) if own else "{}")


def _open_composing(
    model: Model, source: PromptSource, tokenizer: Tokenizer, limits: Limits, check_stop: Callable[[], None]
) -> Composing:
    """What makes texts of rows. Raises SpecError for templates that cannot work for any."""
    if source.chat_template is not None and not source.chat_template.strip():
        raise SpecError("input.chat_template: the file is empty; a chat template writes the messages as text")
    chat_template = (source.chat_template or tokenizer.chat_template) if source.chat else None
    if source.chat and not chat_template:
        raise SpecError(
            f"model {model.path}: its tokenizer has no chat template; give one with input.chat_template: FILE, or "
            "send plain text with input.chat: false"
        )
    whose = "input.chat_template" if source.chat_template else f"model {model.path}: its chat template"
    setup = Setup(
        source=source, chat_template=chat_template, names=tokenizer.names, whose=whose, special=tokenizer.special
    )
    plain = source.template is None and source.system is None and chat_template in (None, STUB_CHAT)
    composing: Composing = InProcess(setup) if plain else Sandbox(setup, limits, check_stop)
    if source.chat:
        _try_chat(composing, whose, source.system is not None, check_stop)
    return composing


def _try_chat(composing: Composing, whose: str, with_system: bool, check_stop: Callable[[], None]) -> None:
    """Raise SpecError for a chat template that runs into limits whatever it is given, or takes no system message."""
    user = {"role": "user", "content": _PROBE}
    system = {"role": "system", "content": f"system {_PROBE}"}
    alone = _rewritten(composing, [user], check_stop)
    if isinstance(alone, RowError) and alone.code == LIMIT:
        raise SpecError(f"{whose}: {alone.message}, whatever the row")
    # What it says to a mere user message need not be the template's last word; then nothing is known of a system's.
    if with_system and isinstance(alone, Composed):
        both = _rewritten(composing, [system, user], check_stop)
        if isinstance(both, Composed) and system["content"].casefold() in both.text.casefold():
            return
        reason = both.message if isinstance(both, RowError) else "the model's chat template leaves it out"
        cure = "put its text into input.template, or give another input.chat_template"
        raise SpecError(f"input.system: {reason}; {cure}")


def _rewritten(composing: Composing, draft: Draft, check_stop: Callable[[], None]) -> Composed | RowError:
    result: Composed | RowError
    [result] = composing.each("rewrite", [(draft, False)], check_stop)
    return result
