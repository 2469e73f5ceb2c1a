"""From a line of JSON to a row, or to what is wrong with it. Knows nothing of files."""

import json
import math
import re
from typing import Any

from bulkgen.records import BadRow

MAX_DEPTH = 500  # of lists and objects in each other; what Python takes depends on where it is called from

_MARKS = re.compile(rb"(?:\xef\xbb\xbf)+")
_MARKS_BEGIN = b"\xef"
_HALF_A_PAIR = re.compile(rb"\\u[dD][89aAbB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89aAbB]..)\\u[dD][c-fC-F]")


class _NotJson(ValueError):
    """A number that Python's parser would take and JSON does not have."""


class LineParser:
    """From a line to its row, None for a blank line. Of a key that an object has twice the last value counts.

    A byte-order mark before a row is no part of it: it stands at the start of a file, and where files that have one
    were put one after the other. The codes of bad rows: bad_utf8, bad_json, bad_unicode, not_an_object.
    """

    def __init__(self) -> None:
        self._decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)

    def __call__(self, line: bytes) -> dict[str, Any] | BadRow | None:
        raw = text = line.removesuffix(b"\r")
        if text[:1] == _MARKS_BEGIN and (marks := _MARKS.match(text)):
            text = text[marks.end() :]
        try:
            value = self._value(text.decode())
            if _may_hold_half_a_pair(text):
                json.dumps(value, ensure_ascii=False).encode()  # fails if so
            if _may_be_deep(text) and _is_deep(value):
                raise RecursionError
        except (ValueError, RecursionError) as error:
            if not text or text.isspace():
                return None
            return BadRow(*_explain(error), raw)
        if type(value) is dict:
            return value
        return BadRow("not_an_object", f"the line holds {_kind(value)}, a row must be an object", raw)

    def _value(self, text: str) -> Any:
        """What `decode` gives, which looks for blanks before and after the value; hardly a line has any."""
        if text[:1] == "{":
            value, end = self._decoder.raw_decode(text)
            if end == len(text):
                return value
        return self._decoder.decode(text)


def _may_hold_half_a_pair(line: bytes) -> bool:
    """Whether a string on the line may hold an escaped surrogate without its other half; quick when none can."""
    if b"\\u" not in line or (b"\\ud" not in line and b"\\uD" not in line):
        return False
    return b"\\\\" in line or _HALF_A_PAIR.search(line) is not None  # an escaped backslash would mislead the search


def _may_be_deep(line: bytes) -> bool:
    return len(line) > 2 * MAX_DEPTH and line.count(b"[") + line.count(b"{") > MAX_DEPTH


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (v for outer in level for v in (outer.values() if type(outer) is dict else outer))
        level = [v for v in inner if type(v) in (dict, list)]
        if not level:
            return False
    return True


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _refuse_constant(name: str) -> None:
    raise _NotJson(f"{name} is not JSON; write null or a number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _NotJson(f"the number {digits[:40]} is beyond the range of a double")
    return value


def _explain(error: Exception) -> tuple[str, str]:
    """Code and message for what was wrong with a line."""
    match error:
        case UnicodeDecodeError():
            return "bad_utf8", f"not valid UTF-8: {error.reason} at byte {error.start + 1} of the line"
        case UnicodeEncodeError():
            half = f"\\u{ord(error.object[error.start]):04x}"
            return "bad_unicode", f"a string holds {half}, half of a surrogate pair, which is no character"
        case json.JSONDecodeError():
            return "bad_json", _explain_syntax(error)
        case RecursionError():
            return "bad_json", f"lists and objects are nested more than {MAX_DEPTH} levels deep"
        case _:  # _NotJson, or more digits than Python turns into an integer
            return "bad_json", f"not readable JSON: {error}"


def _explain_syntax(error: json.JSONDecodeError) -> str:
    place = f"at character {error.pos + 1} of the line"
    if error.msg == "Extra data":
        return f"more than one JSON value on the line, or something else after it, {place}"
    cut = error.msg.startswith("Unterminated string") or error.pos >= len(error.doc.rstrip())
    return f"not valid JSON: {error.msg.removesuffix(' at')} {place}" + (
        "; the line seems to be cut off" if cut else ""
    )
