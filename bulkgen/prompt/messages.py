"""From what a column holds to chat messages, as templates expect them. Every fault names the message, from 1.

What data sets hold is put into the one form that chat templates are written for:

- A content of text parts becomes text, the parts joined by line breaks, as vLLM does for templates of plain text. A
  part is `{"type": "text", "text": …}` or a string. Parts of any other type fail: this is a run of a text-only model.
- The arguments of a tool call become a mapping, as the documentation of transformers asks and vLLM does: JSON text is
  parsed, missing ones are empty.
- An answer that is tool calls alone has an empty text as its content, as in vLLM.
- Keys whose value is null are dropped at every depth, since Arrow pads records with nulls for keys that other rows
  have. Only a null inside arguments given as JSON text is one that somebody wrote, and stays.
"""

import json
from collections.abc import Mapping
from typing import Any

from bulkgen.errors import RowError

Message = Mapping[str, Any]

# Roles whose messages are not what the user of a chat says or is told.
SYSTEM_ROLES = frozenset(("system", "developer"))
ASSISTANT = "assistant"

_BAD = "bad_messages"


def read_messages(value: Any, where: str, continue_final: bool = False) -> list[Message]:
    """The messages in `value`: a list, or the JSON text of one. `where` names the column.

    Raises RowError, also for messages that end with an answer unless this is to be continued (`continue_final`).
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as e:
            raise RowError(_BAD, f"{where} is text, but not JSON: {e}") from e
    if value is None:
        raise RowError("null_prompt", f"{where} is null")
    if not isinstance(value, list):
        raise RowError(_BAD, f"{where} holds {_kind(value)}, not a list of messages")
    if not value:
        raise RowError("empty_prompt", f"{where} is an empty list")
    try:
        messages: list[Message] = [_message(m, f"{where}: message {i}") for i, m in enumerate(value, 1)]
    except RecursionError as e:
        raise RowError(_BAD, f"{where}: values are nested too deep") from e
    asked = [message for message in messages if message["role"] not in SYSTEM_ROLES] or messages
    if not any(message["content"].strip() or message.get("tool_calls") for message in asked):
        raise RowError("empty_prompt", f"{where}: all messages are empty or blank")
    if messages[-1]["role"] == ASSISTANT:
        _refuse_answer(messages[-1], f"{where}: message {len(messages)}", continue_final)
    return messages


def _refuse_answer(last: Message, where: str, continue_final: bool) -> None:
    if not continue_final:
        reason = "the last one, is the assistant's, so there is nothing to answer; see input.continue_final"
        raise RowError("last_message_assistant", f"{where}, {reason}")
    if not last["content"].strip():
        raise RowError("last_message_assistant", f"{where}, the last one, has no text to continue")


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(_BAD, f"{where} is {_kind(message)}, not an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        fault = "has no role" if role is None or role == "" else f"has a role that is {_kind(role)}, not text"
        raise RowError(_BAD, f"{where} {fault}")
    where = f"{where} ({role})"
    known = {
        key: value if type(value) is str else _without_nulls(value)
        for key, value in message.items()
        if value is not None
    }
    if "tool_calls" in known:
        calls = _tool_calls(known.pop("tool_calls"), where)
        if calls:
            known["tool_calls"] = calls
    known["content"] = _content(known.get("content"), where, bool(known.get("tool_calls")))
    return known


def _content(content: Any, where: str, calls: bool) -> str:
    if isinstance(content, str):
        return content
    if calls and not content:
        return ""
    if content is None:
        raise RowError(_BAD, f"{where}: its content is null or missing")
    if not isinstance(content, list):
        raise RowError("not_text", f"{where}: its content is {_kind(content)}, not text")
    if not content:
        raise RowError("empty_prompt", f"{where}: its content is an empty list")
    return "\n".join(_part(part, f"{where}: part {i} of its content") for i, part in enumerate(content, 1))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RowError("unsupported_content", f"{where} is {_kind(part)}, not text")
    kind = part.get("type")
    if kind != "text":
        what = "has no type" if kind is None else f"is of type {kind!r}, and this is a text-only model run"
        raise RowError("unsupported_content", f"{where} {what}")
    text = part.get("text")
    if not isinstance(text, str):
        raise RowError("unsupported_content", f"{where} is of type 'text', but its text is {_kind(text)}")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RowError(_BAD, f"{where}: its tool_calls are {_kind(calls)}, not a list")
    return [_tool_call(call, f"{where}: tool call {i}") for i, call in enumerate(calls, 1)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A call with its arguments as a mapping; name and arguments may stand in `function` or in the call itself."""
    if not isinstance(call, dict):
        raise RowError(_BAD, f"{where} is {_kind(call)}, not an object")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(_BAD, f"{where} names no function")
    complete = {**function, "arguments": _arguments(function.get("arguments"), where)}
    return {**call, "function": complete} if "function" in call else complete


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as e:
            raise RowError(_BAD, f"{where}: its arguments are not valid JSON: {e}") from e
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise RowError(_BAD, f"{where}: its arguments are {_kind(arguments)}, not an object")
    return arguments


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _kind(value: Any) -> str:
    """What a value is, in the words of JSON."""
    if isinstance(value, bool):
        return "true or false"
    for kind, name in ((type(None), "null"), (str, "text"), (int | float, "a number"), (list, "a list")):
        if isinstance(value, kind):
            return name
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
