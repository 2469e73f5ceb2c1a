"""The form that an answer must have: a JSON schema, a regular expression, a choice, a grammar, or any JSON object.

The names are those of vLLM's `StructuredOutputsParams`, whose `json` is called `json_schema` here. What can be checked
without an engine is checked here: a constraint before it is sent, and an answer against its constraint.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, WithJsonSchema, model_validator

from bulkgen.errors import RowError
from bulkgen.spec.faults import wanted_value
from bulkgen.spec.section import Misfit, Section
from bulkgen.spec.time_limit import OverTime, time_limit

# A constraint as a request carries it: one kind with its value. A JSON schema is text, since the order of its
# properties is the order in which an engine writes them, and what sorts keys would lose it.
Constraint = Mapping[str, Any]

BAD_SCHEMA = "bad_schema"

# Seconds after which nobody can tell whether a text matches, or has a form; only hostile ones take that long.
_MATCH_S, _CHECK_S = 1.0, 2.0
_MOST_SHOWN = 200


def _schema_text(value: Any) -> Any:
    """A JSON schema, given as a mapping or as JSON text, as compact JSON text."""
    if not isinstance(value, str | dict):
        raise ValueError("a JSON schema is a mapping, or the JSON text of one")
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
        fault = _schema_fault(text)
    except UnicodeEncodeError as e:
        fault = f"holds {ascii(text[e.start])[1:-1]}, half of a surrogate pair, which is no character"
    except RecursionError:
        fault = "is nested too deep"
    except (ValueError, TypeError) as e:
        fault = f"is not JSON: {e}"
    if fault is not None:
        raise ValueError(f"the JSON schema {fault}")
    return text


def _regex(value: Any) -> Any:
    if isinstance(value, str) and (fault := _regex_fault(value)) is not None:
        raise ValueError(f"the regular expression cannot be compiled: {fault}")
    return value


Text = Annotated[str, Field(min_length=1)]
SchemaText = Annotated[
    str, BeforeValidator(_schema_text), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})
]


class StructuredSpec(Section):
    """The form of answers: exactly one kind of constraint, or the column that holds a row's own."""

    json_schema: SchemaText | None = Field(default=None, description="a JSON schema, or the JSON text of one")
    regex: Annotated[Text, BeforeValidator(_regex)] | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = Field(default=None, description="one of these texts")
    grammar: Text | None = Field(default=None, description="EBNF or Lark, as the engine understands it")
    json_object: Literal[True] | None = Field(default=None, description="any JSON object")
    column: Text | None = Field(
        default=None, description="column that holds such a section without `column`, or the JSON text of one"
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "StructuredSpec":
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            what = f"there are {' and '.join(given)}" if given else "there is none"
            raise Misfit(f"needs exactly one of {', '.join(type(self).model_fields)}; {what}")
        return self

    def constraint(self) -> dict[str, Any]:
        """The kind that is given, with its value."""
        return {name: value for name, value in self if value is not None}


def check_structured(value: Any, where: str) -> dict[str, Any]:
    """A row's own constraint in the form that requests have. `where` it stands is for the message.

    Raises RowError (`bad_schema`) for one that no engine could keep. Nulls beside it are of other rows.
    """
    try:
        if isinstance(value, str):
            value = json.loads(value)
        if not isinstance(value, dict):
            raise RowError(BAD_SCHEMA, f"{where} must be an object such as {{regex: …}}, or the JSON text of one")
        known = {kind: given for kind, given in value.items() if given is not None}
        if isinstance(schema := known.get("json_schema"), dict):
            known["json_schema"] = without_padding(schema)
        if "column" in known:
            raise RowError(BAD_SCHEMA, f"{where}: a row holds a constraint itself, and names no column")
        checked: StructuredSpec = _row_form().validate_python(known)
    except ValidationError as e:
        raise RowError(BAD_SCHEMA, f"{where}: {_reason(e)}") from None
    except RecursionError:
        raise RowError(BAD_SCHEMA, f"{where} is nested too deep") from None
    except ValueError as e:
        raise RowError(BAD_SCHEMA, f"{where} is text, but not JSON: {e}") from None
    return checked.constraint()


@cache
def _row_form() -> TypeAdapter[StructuredSpec]:
    return TypeAdapter(StructuredSpec)


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part)[:_MOST_SHOWN] for part in first["loc"])
    if first["type"] == "extra_forbidden":
        kinds = ", ".join(name for name in StructuredSpec.model_fields if name != "column")
        return f"there is no kind {place!r}; there are {kinds}"
    if first["type"] != "value_error":
        return f"{place} must be {wanted_value(error)}"
    text = first["msg"].removeprefix("Value error, ")
    text = text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"
    return f"{place}: {text}" if place else text


def without_padding(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema without the nulls that Arrow puts in the place of keys which other rows have.

    A schema that somebody wrote has nulls for values only (`const`, `default`); one with other nulls was padded, and
    loses all of them.
    """
    return _dropped(schema) if _is_padded(schema) else schema


_VALUES = frozenset(("const", "default", "enum", "examples"))


def _is_padded(value: Any) -> bool:
    if isinstance(value, dict):
        inner = [(key, v) for key, v in value.items() if key not in _VALUES]
        return any(v is None or _is_padded(v) for _, v in inner)
    return isinstance(value, list) and any(map(_is_padded, value))


def _dropped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _dropped(v) for key, v in value.items() if v is not None}
    return [_dropped(v) for v in value] if isinstance(value, list) else value


def fits(text: str, constraint: Constraint) -> bool | None:
    """Whether a text has the form asked for; None where nobody can tell, as for a grammar."""
    ((kind, wanted),) = constraint.items()
    check = _CHECKS.get(kind)
    if check is None:
        return None
    try:
        with time_limit(_CHECK_S):
            return check(text, wanted)
    # It took too long, or a schema computes with what the answer holds and goes wrong.
    except (OverTime, Exception):
        return None


def _fits_object(text: str, wanted: Any) -> bool:
    parsed, value = _parsed(text)
    return parsed and isinstance(value, dict)


def _fits_schema(text: str, schema: str) -> bool:
    parsed, value = _parsed(text)
    return parsed and bool(_validator(schema).is_valid(value))


def _parsed(text: str) -> tuple[bool, Any]:
    try:
        return True, json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False, None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _fits_regex(text: str, pattern: str) -> bool:
    return _compiled(pattern).fullmatch(text, timeout=_MATCH_S) is not None


def _fits_choice(text: str, choice: list[str]) -> bool:
    return text in choice


_CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "json_object": _fits_object,
    "json_schema": _fits_schema,
    "regex": _fits_regex,
    "choice": _fits_choice,
}


# ---- jsonschema and regex, which take a third of a second to import and are not needed by most jobs ----


@lru_cache(256)
def _schema_fault(text: str) -> str | None:
    """What makes JSON text no JSON schema, None if it is one."""
    from jsonschema import SchemaError, validators  # type: ignore[import-untyped]

    schema = json.loads(text)
    if not isinstance(schema, dict):
        return "must be an object"
    if not isinstance(schema.get("$schema", ""), str):
        return "is not valid: its $schema is not text"
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        # Expressions inside of it are in the dialect of the engine, not in Python's.
        kind.check_schema(schema, format_checker=None)
    except SchemaError as e:
        return f"is not valid: {e.json_path}: {e.message}"
    except RecursionError:
        raise
    except Exception as e:  # what the library makes of what a row holds is not known in full
        return f"cannot be checked: {type(e).__name__}: {e}"
    return None


@lru_cache(256)
def _validator(text: str) -> Any:
    """A validator that does not fetch what a schema refers to."""
    from jsonschema import validators
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    schema = json.loads(text)
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    return validators.extend(kind, {"pattern": _pattern})(schema, registry=REGISTRY)


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Any:
    from jsonschema import ValidationError as Mismatch

    if validator.is_type(value, "string") and not _compiled(pattern).search(value, timeout=_MATCH_S):
        yield Mismatch(f"{value!r} does not match {pattern!r}")


def _regex_fault(pattern: str) -> str | None:
    if "\0" in pattern:
        return "it holds a NUL character"
    try:
        _compiled(pattern)
    except Exception as e:  # the library has errors of its own kind, and Python's for what is too large
        return str(e) or type(e).__name__
    return None


@lru_cache(256)
def _compiled(pattern: str) -> Any:
    import warnings

    import regex  # type: ignore[import-untyped]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a later version will read in another way
        return regex.compile(pattern, regex.VERSION0)
