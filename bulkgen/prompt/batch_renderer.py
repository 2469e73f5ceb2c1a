"""Batches as rows: each line's request is rendered as any other row, and comes out as its own line.

Messages of /v1/chat/completions go through the chat template, the prompt of /v1/completions is sent as plain text.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bulkgen.errors import RowError
from bulkgen.prompt.batch import CHAT, MAX_TOKENS, SAME, BatchRequest, model_of, read_line
from bulkgen.prompt.identity import canonical
from bulkgen.prompt.model import Model
from bulkgen.prompt.renderer import Renderer
from bulkgen.prompt.source import PromptSource
from bulkgen.records import BadRow, Prompt, RefusedRow, RowBatch
from bulkgen.spec import STRUCTURED

CUSTOM_ID = "custom_id"
COLUMNS = frozenset((CUSTOM_ID, "method", "url", "body"))

WRONG_MODEL = "wrong_model"

# A line as a row that the renderer knows: columns of messages, of text, and of each parameter.
_MESSAGES, _TEXT, _ERROR = "body.messages", "body.prompt", "error"
_PARAMS = {param: f"body.{param}" for param in (*SAME, MAX_TOKENS, "logprobs", STRUCTURED)}


@dataclass(slots=True)
class Foreign:
    """Lines that name another model: how many, and where the first of them is."""

    rows: int
    file: str
    position: int


class BatchRenderer(Renderer):
    """Renders the lines of a batch. `defaults` are the job's sampling parameters, for what a body does not say.

    A line whose body names another model than `job_model` fails, unless `any_model`; `foreign` counts them by model.
    """

    def __init__(
        self,
        model: Model,
        source: PromptSource,
        *,
        defaults: Mapping[str, Any],
        max_model_len: int,
        job_model: str,
        any_model: bool,
    ) -> None:
        tokenizer = model.tokenizer()
        model = replace(model, tokenizer=lambda: tokenizer)
        columns = {**_PARAMS, _ERROR: _ERROR}
        own = replace(source, id=CUSTOM_ID, messages=_MESSAGES if source.chat else None)
        plain = replace(own, messages=None, prompt=_TEXT, chat=False, chat_template=None)
        super().__init__(
            model,
            own if source.chat else plain,
            constants=defaults,
            columns=columns,
            check=_checked_before,
            max_model_len=max_model_len,
        )
        self._plain = Renderer(
            model, plain, constants=defaults, columns=columns, check=_checked_before, max_model_len=max_model_len
        )
        self.columns = COLUMNS
        self.required = frozenset(("body",))
        self._chat = source.chat
        self._defaults = defaults
        self._job_model = job_model
        self._any_model = any_model
        self.foreign: dict[str, Foreign] = {}

    def render(self, batch: RowBatch, check_stop: Callable[[], None] = lambda: None) -> list[Prompt | RefusedRow]:
        requests = [self._request(batch, i) for i in range(len(batch.rows))]
        rows = [
            row if isinstance(row, BadRow) else _as_row(row, request)
            for row, request in zip(batch.rows, requests, strict=True)
        ]
        plain = [isinstance(request, BatchRequest) and request.text is not None for request in requests]
        rendered: list[Prompt | RefusedRow | None] = [None] * len(rows)
        for render, kind in ((super().render, False), (self._plain.render, True)):
            if kind in plain:
                own = [row if p == kind else _NOT_HERE for row, p in zip(rows, plain, strict=True)]
                results = render(replace(batch, rows=own), check_stop)
                rendered = [new if p == kind else old for new, old, p in zip(results, rendered, plain, strict=True)]
        return [
            _completed(result, row, request)
            for result, row, request in zip(rendered, batch.rows, requests, strict=True)
            if result is not None
        ]

    def _request(self, batch: RowBatch, i: int) -> BatchRequest | RowError | None:
        row = batch.rows[i]
        if isinstance(row, BadRow):
            return None
        try:
            model = model_of(row)
            if model not in (None, self._job_model) and not self._any_model:
                name = str(model)[:200]
                foreign = self.foreign.setdefault(name, Foreign(0, batch.file, batch.positions[i]))
                foreign.rows += 1
                what = f"its body names the model {name!r}, and this job runs {self._job_model!r}"
                raise RowError(WRONG_MODEL, f"{what}; see input.batch_model")
            request = read_line(row, self._defaults)
            if request.text is None and not self._chat:
                raise RowError("unsupported_endpoint", f"the url {CHAT!r} needs input.chat: true")
        except RowError as e:
            return e
        return request


_NOT_HERE = BadRow("", "")


def _checked_before(param: str, value: Any) -> Any:
    """The value of a column of `_as_row`, which is a pair of brackets around it, so that null is a value too."""
    if param == _ERROR:
        raise value
    return value[0]


def _as_row(row: Mapping[str, Any], request: BatchRequest | RowError | None) -> dict[str, Any]:
    known: dict[str, Any] = {CUSTOM_ID: row.get(CUSTOM_ID)}
    if not isinstance(request, BatchRequest):
        return {**known, _ERROR: request}
    known |= {_MESSAGES: request.messages} if request.text is None else {_TEXT: request.text}
    return known | {_PARAMS[param]: (value,) for param, value in request.sampling.items()}


def _completed(
    result: Prompt | RefusedRow, row: Mapping[str, Any] | BadRow, request: BatchRequest | RowError | None
) -> Prompt | RefusedRow:
    if isinstance(result, RefusedRow):
        return result if isinstance(row, BadRow) else replace(result, row=canonical(row))
    warnings = request.warnings if isinstance(request, BatchRequest) else ()
    return replace(result, warnings=(*warnings, *result.warnings)) if warnings else result
