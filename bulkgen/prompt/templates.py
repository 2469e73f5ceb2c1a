"""The job's own templates: Jinja2, sandboxed and strict. A row's columns are the variables."""

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bulkgen.errors import RowError, SpecError

# The whole row as a mapping, for columns whose names are no Jinja names: {{ row['label-coarse'] }}.
ROW = "row"
# Jinja keeps the name `self` for the template itself; here it is a column like any other.
_SELF, _OWN_SELF = "self", "column_self"


class _Environment(ImmutableSandboxedEnvironment):
    """Sandboxed; `row.items` is the column `items`, not a method; what is null or missing is never printed."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _no_null(value: Any) -> Any:
    if value is None:
        raise UndefinedError("a value is null")
    return value


def _environment() -> _Environment:
    # A template's last line break is part of the prompt as much as any other character.
    return _Environment(undefined=StrictUndefined, finalize=_no_null, keep_trailing_newline=True, autoescape=False)


class Template:
    """One compiled template; `key` is its place in the spec, for messages."""

    def __init__(self, key: str, source: str) -> None:
        self._key = key
        env = _environment()
        try:
            tree = env.parse(source)
            for name in _globals_as_values(tree) & env.globals.keys():
                del env.globals[name]
            self._functions = frozenset(env.globals)
            # Compiles, and so finds filters and tests that do not exist.
            self.columns = frozenset(meta.find_undeclared_variables(tree))
            self.reads_row = ROW in self.columns
            self.required = self.columns - {ROW} - _guarded(tree)
            for name_node in tree.find_all(nodes.Name):
                if name_node.name == _SELF:
                    name_node.name = _OWN_SELF
            self._template = env.from_string(tree)
        except TemplateSyntaxError as e:
            raise SpecError(f"{key}: line {e.lineno} is not valid Jinja2: {e.message}") from e

    def render(self, row: Mapping[str, Any]) -> str:
        """The text of one row. A null counts as missing. Raises RowError."""
        variables = {name: value for name, value in row.items() if value is not None and name not in self._functions}
        if _SELF in variables:
            variables[_OWN_SELF] = variables[_SELF]
        try:
            return self._template.render({**variables, ROW: row})
        except UndefinedError as e:
            missing = sorted(self.required - variables.keys())
            if missing:
                names = ", ".join(missing)
                raise RowError(
                    "missing_column", f"{self._key} needs {names}, which this row lacks or has as null"
                ) from e
            raise RowError("template_error", f"{self._key}: {e.message}") from e
        except TemplateError as e:
            raise RowError("template_error", f"{self._key}: {e.message}") from e
        except Exception as e:  # a template computes with the row's values: anything can go wrong in it
            raise RowError("template_error", f"{self._key}: {type(e).__name__}: {e}") from e


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
