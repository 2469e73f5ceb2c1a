"""From pydantic's errors to sentences that name the place, the key, the value and what is allowed.

Which rules there are stands in the models; nothing here knows a section or a key by name.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from bulkgen.spec.section import Misfit, Section
from bulkgen.spec.source import Key, Places, dotted, place_of

_MOST_SENTENCES = 6
_MOST_SHOWN = 60

# pydantic's error types in our words; what is not here keeps pydantic's.
_WANTED = {
    "bool_type": "true or false",
    "byte_size": "a size such as 500MB or 10GiB",
    "byte_size_unit": "a size such as 500MB or 10GiB",
    "dict_type": "a section of keys and values",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "more than {gt:.12g}",
    "greater_than_equal": "{ge:.12g} or more",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt:.12g}",
    "less_than_equal": "{le:.12g} or less",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "a section with keys of its own",
    "string_pattern_mismatch": "a path without NUL characters",
    "string_too_short": "text that is not empty",
    "string_type": "text",
    "too_short": "a list that is not empty",
}


@dataclass(frozen=True, slots=True)
class _Fault:
    """One of pydantic's errors. `key` is where it stands in the data, without the names of union alternatives."""

    key: Key
    kind: str
    wanted: str
    error: Any


def sentences(error: ValidationError, model: type[Section], data: Mapping[str, Any], places: Places) -> list[str]:
    """One sentence a wrong key, for the first few. `data` is what `model` refused."""
    faults = _relevant([_fault(e, data) for e in error.errors(include_url=False)])
    said: dict[Key, str] = {}
    suggested: set[Key] = set()
    for key, group in faults.items():
        if group[0].kind == "extra_forbidden":
            said[key], near = _unknown(key, model)
            suggested.add(near)
    for key, group in faults.items():
        # A misspelt key is one fault, not an unknown key and a missing one.
        if key not in said and not (group[0].kind == "missing" and key in suggested):
            said[key] = _sentence(key, group, data)
    ordered = [f"{place_of(places, key)}: {said[key]}" for key in faults if key in said]
    more = len(ordered) - _MOST_SENTENCES
    return ordered if more <= 0 else [*ordered[:_MOST_SENTENCES], f"and {more} more"]


def wanted_value(error: ValidationError) -> str:
    """What would have been allowed in place of one value, over all alternatives."""
    faults = _relevant([_fault(e, {}) for e in error.errors(include_url=False)])
    return _wanted([fault for group in faults.values() for fault in group])


def shown(value: Any) -> str:
    """A value for a message, as one line of YAML of bounded length."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _fault(error: Any, data: Mapping[str, Any]) -> _Fault:
    kind, context = error["type"], error.get("ctx") or {}
    key: list[str | int] = []
    inner: Any = data
    for part in error["loc"]:
        known = part in inner if isinstance(inner, dict) else isinstance(inner, list) and isinstance(part, int)
        if known:
            key.append(part)
            inner = inner[part]
    if kind == "missing":
        key.append(error["loc"][-1])
    if isinstance(context.get("error"), Misfit):
        key.extend(context["error"].key)
    wanted = _WANTED[kind].format(**context) if kind in _WANTED else error["msg"].removeprefix("Input should be ")
    return _Fault(tuple(key), kind, wanted, context.get("error"))


def _relevant(faults: Iterable[_Fault]) -> dict[Key, list[_Fault]]:
    """Faults by key, without those of a union's alternatives that the value was not meant for."""
    by_key: dict[Key, list[_Fault]] = {}
    for fault in faults:
        by_key.setdefault(fault.key, []).append(fault)
    relevant = {}
    for key, group in by_key.items():
        if any(len(other) > len(key) and other[: len(key)] == key for other in by_key) and group[0].error is None:
            continue  # another alternative took the value and found the fault further inside
        right_type = [fault for fault in group if not fault.kind.endswith("_type")]
        relevant[key] = right_type or group
    return relevant


def _unknown(key: Key, model: type[Section]) -> tuple[str, Key]:
    """The sentence for an unknown key, and the key that it suggests."""
    *section, name = key
    kind = _section(section, model)
    inside = f" in {dotted(section)}" if section else ""
    homes = [f"{dotted((*s, name))}" for s in _sections(model) if name in _section(s, model).model_fields]
    near = [] if homes else difflib.get_close_matches(str(name), kind.model_fields, 1)
    if homes or near:
        hint = f"did you mean {' or '.join(homes or map(repr, near))}?"
    else:
        hint = f"there are {', '.join(kind.model_fields)}"
    end = f" ({kind.elsewhere})" if kind.elsewhere else ""
    return f"unknown key {str(name)!r}{inside}; {hint}{end}", (*section, *near)


def _sections(model: type[Section]) -> list[Key]:
    """The sections of the spec, itself included."""
    return [(), *((name,) for name in model.model_fields if _section((name,), model) is not model)]


def _section(key: Sequence[str | int], model: type[Section]) -> type[Section]:
    """The section that a key leads to; the last one on the way, where the key leads to a plain value."""
    for part in key:
        field = model.model_fields.get(str(part))
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), model)
    return model


def _sentence(key: Key, group: Sequence[_Fault], data: Mapping[str, Any]) -> str:
    name = dotted(key)
    first = group[0]
    if first.kind == "missing":
        return f"{name} is missing; add it"
    if first.kind == "value_error":
        return f"{name}: {first.error}"
    value = _value(data, key)
    wanted = _wanted(group)
    quotes = "; put it in quotes if text is meant" if _is_unquoted(value) and "text" in wanted else ""
    return f"{name} must be {wanted}, not {shown(value)}{quotes}"


def _wanted(group: Iterable[_Fault]) -> str:
    return " or ".join(dict.fromkeys(fault.wanted for fault in group))


def _is_unquoted(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _value(data: Any, key: Key) -> Any:
    for part in key:
        data = data[part]
    return data
