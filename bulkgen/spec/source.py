"""YAML as plain data, and where each key of it stands. What the keys mean is for others.

Stricter than YAML where a spec is better off: a key stands once, is text, and nothing is an alias of another thing.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from bulkgen.errors import SpecError

_MOST_BYTES = 1 << 20
_TAG = "tag:yaml.org,2002:"
_SCALARS = frozenset(_TAG + name for name in ("null", "bool", "int", "float", "str", "timestamp"))

Key = tuple[str | int, ...]
# Where each key stands, as "file:line" or "--set text"; the empty key is the whole.
Places = dict[Key, str]
# What to call a line and a column, both from 1; a column of 0 is none in particular.
Naming = Callable[[int, int], str]


def load_yaml(path: Path) -> tuple[dict[str, Any], Places]:
    """A YAML file that holds a mapping. Raises SpecError naming file and line."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as e:
        raise SpecError(f"{path}: cannot be read ({e.strerror or e}); give the path of a YAML file") from e
    if len(raw) > _MOST_BYTES:
        raise SpecError(f"{path}: is larger than {_MOST_BYTES >> 20} MiB, too large for a spec; is it a data file?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise SpecError(f"{path}: is not UTF-8 (byte {e.start}); save it as UTF-8") from e
    data, places = parse_yaml(text, lambda line, column: f"{path}:{line}:{column}" if column else f"{path}:{line}")
    if data is None:
        raise SpecError(f"{path}: is empty; write the keys into it, one a line")
    if not isinstance(data, dict):
        raise SpecError(f"{path}: must hold keys and values, such as `name: summaries`, not {type(data).__name__}")
    return data, places


def parse_yaml(text: str, place: Naming) -> tuple[Any, Places]:
    """A YAML text as plain data. Raises SpecError where it is not YAML, or not what a spec may hold."""
    tree = _Tree(place)
    try:
        root = yaml.compose(text, _Loader)
        data = None if root is None else tree.build(root, ())
    except RecursionError:
        raise SpecError(f"{place(1, 0)}: is nested too deeply for a spec") from None
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise SpecError(f"{place(line, 0)}: holds a control character ({e.character:#x}); remove it") from None
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = place(mark.line + 1, mark.column + 1) if mark else place(1, 0)
        raise SpecError(
            f"{where}: is not valid YAML ({e.problem}); text with special characters needs quotes"
        ) from None
    return data, tree.places


def place_of(places: Places, key: Key) -> str:
    """Where a key stands, or else the nearest section around it."""
    while key and key not in places:
        key = key[:-1]
    return places[key]


def dotted(key: Sequence[str | int]) -> str:
    """A key as users write it."""
    return ".".join(str(part) for part in key)


class _Loader(yaml.SafeLoader):
    """PyYAML's, but 1e-3 is a number, as YAML 1.2 and everybody else have it."""


_Loader.add_implicit_resolver(
    _TAG + "float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class _Tree:
    """Builds plain data from YAML nodes and notes the place of each."""

    def __init__(self, place: Naming) -> None:
        self.places: Places = {}
        self._place = place
        self._constructor = _Loader("")
        self._built: set[int] = set()

    def build(self, node: yaml.Node, key: Key) -> Any:
        """The data of a node that stands at `key`."""
        place = self._place(node.start_mark.line + 1, 0)
        if id(node) in self._built:
            raise SpecError(f"{place}: {dotted(key)}: aliases (*name) are not supported; write the value out")
        self._built.add(id(node))
        self.places.setdefault(key, place)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.build(item, (*key, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
            return self._scalar(node, place, key)
        raise SpecError(f"{place}: {dotted(key)}: the tag {node.tag.replace(_TAG, '!!')} is not supported; remove it")

    def _mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name, value in node.value:
            place = self._place(name.start_mark.line + 1, 0)
            if name.tag != _TAG + "str":
                what = repr(name.value) if isinstance(name, yaml.ScalarNode) else "a list or mapping"
                raise SpecError(
                    f"{place}: {what} cannot be a key; a key is text, in quotes where YAML takes it for more"
                )
            child = (*key, name.value)
            if name.value in data:
                raise SpecError(f"{place}: {dotted(child)} stands twice, first at {self.places[child]}; remove one")
            self.places[child] = place
            data[name.value] = self.build(value, child)
        return data

    def _scalar(self, node: yaml.ScalarNode, place: str, key: Key) -> Any:
        if node.tag == _TAG + "timestamp":
            return node.value  # no key is a date, many a name looks like one
        try:
            value = self._constructor.construct_object(node)
        except (ValueError, LookupError):
            raise SpecError(f"{place}: {dotted(key)}: {node.value[:40]!r} is not a value that YAML can read") from None
        if isinstance(value, int) and value.bit_length() > 63:
            raise SpecError(f"{place}: {dotted(key)}: the number is too large (more than 63 bits)")
        return value
