"""From a YAML file (and --set) to a JobSpec, with errors that name file, line, key and cure."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from bulkgen.errors import SpecError
from bulkgen.spec.jobspec import JobSpec

_MOST_BYTES = 1 << 20
_MOST_ERRORS = 10

Key = tuple[str | int, ...]
# Where each key stands, as "file:line" or "--set text", for messages.
Places = dict[Key, str]


def load_spec(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job spec; `overrides` are `key.of.spec=value` with the value in YAML.

    Raises SpecError with a sentence for each of the first few faults.
    """
    data, places = _read(path)
    for override in overrides:
        _override(data, places, override)
    _merge_config(path, data, places)
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as e:
        raise SpecError("\n".join(_sentences(e, data, places, str(path)))) from None
    spec._source = path
    return spec


def _read(path: Path) -> tuple[dict[str, Any], Places]:
    """A YAML file as a mapping, and where each of its keys stands."""
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise SpecError(f"{path}: cannot be read ({e.strerror or e}); give the path of a YAML file") from e
    if len(raw) > _MOST_BYTES:
        raise SpecError(f"{path}: {len(raw)} bytes are too many for a job spec; is it a data file?")
    try:
        text = raw.decode("utf-8-sig")
        root = yaml.compose(text, yaml.SafeLoader)
        places: Places = {}
        _note_places(root, (), str(path), places, set())
        data = yaml.safe_load(text)
    except UnicodeDecodeError as e:
        raise SpecError(f"{path}: is not UTF-8 (byte {e.start}); save it as UTF-8") from e
    except yaml.YAMLError as e:
        raise SpecError(f"{path}{_mark(e)}: not valid YAML: {getattr(e, 'problem', None) or e}") from e
    if not isinstance(data, dict):
        raise SpecError(f"{path}: must be a mapping of keys such as name, model, input and output")
    return data, places


def _mark(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}:{mark.column + 1}" if mark else ""


def _note_places(node: yaml.Node | None, key: Key, file: str, places: Places, met: set[int]) -> None:
    """Walk the YAML tree; also refuse what safe_load would silently accept: doubled keys and aliases."""
    if node is None:
        return
    place = f"{file}:{node.start_mark.line + 1}"
    if id(node) in met:
        raise SpecError(f"{place}: YAML aliases are not supported; write the value out in each place")
    met.add(id(node))
    places.setdefault(key, place)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for name, value in node.value:
            here = f"{file}:{name.start_mark.line + 1}"
            if not isinstance(name, yaml.ScalarNode) or name.tag not in (
                "tag:yaml.org,2002:str",
                "tag:yaml.org,2002:int",
            ):
                raise SpecError(f"{here}: a key must be plain text")
            if name.value in seen:
                raise SpecError(f"{here}: key {_dotted((*key, name.value))!r} stands twice; remove one")
            seen.add(name.value)
            child = (*key, name.value)
            places[child] = here
            _note_places(value, child, file, places, met)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            _note_places(value, (*key, i), file, places, met)


def _override(data: dict[str, Any], places: Places, override: str) -> None:
    where = f"--set {override}"
    name, equals, text = override.partition("=")
    path = tuple(name.strip().split("."))
    if not equals or not all(path):
        raise SpecError(f"{where}: must look like key.of.spec=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise SpecError(f"{where}: the value is not valid YAML: {getattr(e, 'problem', None) or e}") from e
    inner: Any = data
    for part in path[:-1]:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            raise SpecError(f"{where}: {part} is not a section that has keys")
    inner[path[-1]] = value
    for known in [k for k in places if k[: len(path)] == path]:
        del places[known]
    for end in range(1, len(path)):
        places.setdefault(path[:end], where)
    places[path] = where


def _merge_config(path: Path, data: dict[str, Any], places: Places) -> None:
    """Put the settings of `engine.config` under the job's own engine section."""
    engine = data.get("engine")
    if not isinstance(engine, dict) or not isinstance(engine.get("config"), str):
        return
    file = path.absolute().parent / engine["config"]
    if not file.is_file():
        raise SpecError(
            f"{_place(places, ('engine', 'config'), str(path))}: engine.config: no file {file}; check the path"
        )
    settings, where = _read(file)
    if "config" in settings:
        raise SpecError(f"{where[('config',)]}: a config file cannot name another one; put all settings in it")
    for key, place in where.items():
        places.setdefault(("engine", *key), place)
    merged = {**settings, **engine}
    for section in ("args", "env", "stub"):
        both = [s[section] for s in (settings, engine) if isinstance(s.get(section), dict)]
        if len(both) == 2:
            merged[section] = {**both[0], **both[1]}
    data["engine"] = merged


def _sentences(error: ValidationError, data: Any, places: Places, file: str) -> Iterator[str]:
    """One sentence a fault, the first few; a union's alternatives count as one fault."""
    seen: set[Key] = set()
    faults = [f for f in error.errors(include_url=False) if not _is_other_alternative(f, data)]
    for fault in faults:
        key = _real_key(fault, data)
        if key in seen or len(seen) == _MOST_ERRORS:
            continue
        seen.add(key)
        yield f"{_place(places, key, file)}: {_sentence(key, fault, faults, data)}"


def _real_key(fault: Any, data: Any) -> Key:
    """pydantic's location without the names of union alternatives that it mixes in."""
    loc, kind = fault["loc"], fault["type"]
    key: list[str | int] = []
    inner = data
    for i, part in enumerate(loc):
        if isinstance(inner, dict):
            if part not in inner and (i < len(loc) - 1 or kind != "missing"):
                continue
            key.append(part)
            inner = inner.get(part)
        elif isinstance(inner, list) and isinstance(part, int) and part < len(inner):
            key.append(part)
            inner = inner[part]
        elif inner is None and not key:
            key.append(part)
    return tuple(key)


def _sentence(key: Key, fault: Any, faults: Sequence[Any], data: Any) -> str:
    name = _dotted(key)
    kind = fault["type"]
    if kind == "extra_forbidden":
        known = _known_keys(key[:-1])
        near = difflib.get_close_matches(str(key[-1]), known, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        section = _dotted(key[:-1])
        return f"unknown key {str(key[-1])!r}{f' in {section}' if section else ''}; {hint}"
    if kind == "missing":
        return f"key {name!r} is missing; add it"
    if kind == "value_error":
        return f"{name or 'the spec'}: {fault['ctx']['error']}" if name else str(fault["ctx"]["error"])
    same = [f for f in faults if _real_key(f, data) == key]
    section = "a section with keys of its own"
    messages = (section if f["type"] == "model_type" else f["msg"] for f in same)
    wanted = dict.fromkeys(m.removeprefix("Input should be ") for m in messages)
    return f"{name}: {_shown(_value(data, key))} is not valid; it must be {' or '.join(wanted)}"


def _is_other_alternative(fault: Any, data: Any) -> bool:
    """A value may be plain or a `{column: …}`; what is wrong with the form that was not meant interests nobody."""
    key = _real_key(fault, data)
    if isinstance(_value(data, key), dict):
        return fault["type"] not in ("missing", "extra_forbidden", "value_error")
    return fault["type"] == "model_type" and "Column" in fault["loc"]


def _value(data: Any, key: Key) -> Any:
    for part in key:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _known_keys(section: Key) -> list[str]:
    """The keys that a section of the spec may have."""
    model: type[BaseModel] = JobSpec
    for part in section:
        field = model.model_fields.get(str(part))
        if field is None:
            return []
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)


def _place(places: Places, key: Key, file: str) -> str:
    """Where a key stands, or the nearest section around it."""
    while key and key not in places:
        key = key[:-1]
    return places.get(key, file)


def _dotted(key: Key) -> str:
    return ".".join(str(part) for part in key)
