"""The job's own templates: Jinja2, sandboxed and strict. A row's columns are the variables."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, Undefined, UndefinedError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bulkgen.errors import RowError, SpecError
from bulkgen.prompt.compiling import compile_template, parse_template, undeclared

# The whole row as a mapping, for columns whose names are no Jinja names: {{ row['label-coarse'] }}.
ROW = "row"
# Jinja keeps the name `self` for the template itself; here it is a column like any other.
_SELF, _OWN_SELF = "self", "column_self"


class _Null(Undefined):
    """A null inside a column: false, `none`, missing to `default` and `is defined`. Used as text it fails its row."""

    __str__ = __repr__ = __iter__ = __len__ = Undefined._fail_with_undefined_error

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _Null)

    def __hash__(self) -> int:
        return hash(None)


class _Environment(ImmutableSandboxedEnvironment):
    """Sandboxed; `row.items` is the column `items`, not a method; what is null or missing is never printed."""

    def __init__(self) -> None:
        # A template's last line break is part of the prompt as much as any other character.
        super().__init__(undefined=StrictUndefined, finalize=_printable, keep_trailing_newline=True, optimized=False)
        self.filters["tojson"] = _to_json
        self.tests["none"] = lambda value: value is None or isinstance(value, Undefined)
        # A row whose prompt is another one each time would be generated again by each start.
        del self.filters["random"], self.globals["lipsum"]

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, Mapping) and argument not in obj:
            return self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)


@pass_context
def _printable(context: Context, value: Any) -> Any:
    if value is None:
        raise UndefinedError("a value is null")
    if callable(value) and not isinstance(value, Undefined):
        raise UndefinedError("a function is no value; call it, or write row['its name'] for a column")
    return value


class Template:
    """One compiled template; `key` is its place in the spec, for messages."""

    def __init__(self, key: str, source: str) -> None:
        self._key = key
        environment = _Environment()
        try:
            tree = parse_template(environment, key, source)
        except SpecError as e:
            raise SpecError(f"{e}; a column whose name is no plain word is row['the name']") from e
        for name in _globals_as_values(tree) & environment.globals.keys():
            del environment.globals[name]
        self._functions = frozenset(environment.globals)
        guarded = _guarded(tree)
        for name_node in tree.find_all(nodes.Name):
            if name_node.name == _SELF:
                name_node.name = _OWN_SELF
        self._template = compile_template(environment, key, tree)
        self.columns = frozenset(_SELF if n == _OWN_SELF else n for n in undeclared(environment, tree))
        self.reads_row = ROW in self.columns
        self.required = self.columns - {ROW} - guarded

    def render(self, row: Mapping[str, Any]) -> str:
        """The text of one row. A null counts as missing. Raises RowError."""
        variables = {
            name: value if type(value) is str else _nulls_marked(value)
            for name, value in row.items()
            if value is not None and name not in self._functions
        }
        if _SELF in variables:
            variables[_OWN_SELF] = variables[_SELF]
        if self.reads_row:
            variables[ROW] = _nulls_marked(row)
        try:
            return self._template.render(variables)
        except UndefinedError as e:
            missing = sorted(self.required - variables.keys())
            if missing:
                names = ", ".join(missing)
                reason = f"{self._key} needs {names}, which this row lacks or has as null{way_round(missing, row)}"
                raise RowError("missing_column", reason) from e
            raise RowError("template_error", f"{self._key}: {e.message}") from e
        except TemplateError as e:
            raise RowError("template_error", f"{self._key}: {e.message}") from e
        except MemoryError:
            raise
        except Exception as e:  # a template computes with the row's values: anything can go wrong in it
            raise RowError("template_error", f"{self._key}: {type(e).__name__}: {e}") from e


def way_round(missing: Collection[str], columns: Collection[str]) -> str:
    """A hint for names that a template wants in vain, where they are a part of a column's name; else nothing."""
    for column in columns:
        if not column.isidentifier() and not {*missing}.isdisjoint(re.findall(r"\w+", column)):
            return f"; the column {column!r} is {ROW}[{column!r}]"
    return ""


def _nulls_marked(value: Any) -> Any:
    """The value with `_Null` in the place of each null inside of it."""
    if isinstance(value, dict):
        return {key: _NULL if inner is None else _nulls_marked(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_NULL if inner is None else _nulls_marked(inner) for inner in value)
    return value


_NULL = _Null("a value is null")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As in chat templates, without the escapes for HTML that Jinja's own puts in; a null is null."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_null_or_none,
    )


def _null_or_none(value: Any) -> None:
    if isinstance(value, Undefined) and not isinstance(value, _Null):
        str(value)  # says which name is missing
    if not isinstance(value, _Null):
        raise TypeError(f"{type(value).__name__} is no JSON")


def _globals_as_values(tree: nodes.Template) -> set[str]:
    """Names that are read as values, never called or set: of Jinja's own functions (`range`, `dict`), these must be
    columns. The function itself, printed, would be a prompt with a memory address in it.
    """
    called = {id(call.node) for call in tree.find_all(nodes.Call)}
    names = [name for name in tree.find_all(nodes.Name) if id(name) not in called]
    set_here = {name.name for name in names if name.ctx != "load"}
    return {name.name for name in names} - set_here


def _guarded(tree: nodes.Template) -> frozenset[str]:
    """Variables that the template itself provides for the absence of, by `default` or `is defined`."""
    filters = (node.node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d"))
    tests = (node.node for node in tree.find_all(nodes.Test) if node.name in ("defined", "undefined", "none"))
    return frozenset(node.name for node in (*filters, *tests) if isinstance(node, nodes.Name))
