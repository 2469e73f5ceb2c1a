"""Chat templates: from messages to the text that a model was trained on.

A template is given what transformers gives it in `apply_chat_template`, so that the text is the same; a test compares
the two. It is compiled here so that it can run in the sandbox's process, without transformers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bulkgen.errors import RowError
from bulkgen.prompt.compiling import compile_template, parse_template
from bulkgen.prompt.messages import ASSISTANT, Message

# Stands for the stub's own format, which needs no template.
STUB_CHAT = "role: content, a line each"

_OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "


class Chat(Protocol):
    """A way to write messages as text. An answer that stands last is left open, to be continued."""

    def render(self, messages: Sequence[Message]) -> str:
        """Raises RowError (`chat_template_error`) for messages that cannot be written."""


def open_chat(template: str, names: Mapping[str, str], whose: str, now: datetime | None) -> Chat:
    """The chat format of a template. Raises SpecError for one that is none.

    `names` are its variables beside the messages, `whose` it is stands in messages, `now` is the date that it is told
    when it asks; None is the present moment.
    """
    return StubChat() if template == STUB_CHAT else ChatTemplate(template, names, whose, now)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, template: str, names: Mapping[str, str], whose: str, now: datetime | None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_no_null,
            optimized=False,
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
        self._names = dict(names)
        self._template = compile_template(environment, whose, parse_template(environment, whose, template))

    def render(self, messages: Sequence[Message]) -> str:
        last = messages[-1]
        to_continue = last["role"] == ASSISTANT
        if to_continue:
            messages = [*messages[:-1], {**last, "content": last["content"] + _OPEN_END}]
        try:
            text = self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=not to_continue, **self._names
            )
        except TemplateError as e:
            raise RowError("chat_template_error", f"the model's chat template refuses these messages: {e}") from e
        except MemoryError:
            raise
        except Exception as e:  # a template computes with what the row holds: anything can go wrong in it
            reason = f"the model's chat template fails on these messages: {type(e).__name__}: {e}"
            raise RowError("chat_template_error", reason) from e
        return _open_ended(text, last["content"]) if to_continue else text


def _open_ended(text: str, answer: str) -> str:
    """The text up to where the answer that is to be continued ends; found as transformers finds it."""
    end = text.rfind(_OPEN_END.strip())
    if end < 0 or answer.strip() not in text:
        raise RowError("chat_template_error", "the model's chat template changes the answer that is to be continued")
    return text[:end] if text.startswith(_OPEN_END, end) else text[:end].rstrip()


class StubChat:
    """What the stub model was trained on: a single message as it is, several as a line each."""

    def render(self, messages: Sequence[Message]) -> str:
        if len(messages) == 1:
            return str(messages[0]["content"])
        return "\n".join(f"{m['role']}: {m['content']}" for m in messages)


class _Generation(Extension):
    """The tag `generation`, which marks answers for training. Here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

    def _unchanged(self, caller: Callable[[], str]) -> str:
        return caller()


@pass_context
def _no_null(context: Context, value: Any) -> Any:
    if value is None:
        raise TemplateError("it would print a null")
    return value


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
