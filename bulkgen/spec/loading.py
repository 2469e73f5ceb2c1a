"""From a YAML file, the engine settings it names and --set to a JobSpec. Errors name place, key and cure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bulkgen.errors import SpecError
from bulkgen.spec.faults import sentences
from bulkgen.spec.jobspec import JobSpec
from bulkgen.spec.source import Key, Places, dotted, load_yaml, parse_yaml, place_of

_ENGINE_CONFIG = ("engine", "config")


def load_spec(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job spec; `overrides` are `key.of.spec=value` with the value in YAML, a later one wins.

    Raises SpecError with a line for each of the first few faults.
    """
    data, places = load_yaml(path)
    for override in overrides:
        _override(data, places, override)
    _merge_config(path, data, places)
    try:
        spec = JobSpec.model_validate(data, context={"source": path})
    except ValidationError as e:
        raise SpecError("\n".join(sentences(e, JobSpec, data, places))) from None
    if spec.input.chat_template is not None:
        _check_file(path.parent / spec.input.chat_template, ("input", "chat_template"), places)
    return spec


def _override(data: dict[str, Any], places: Places, override: str) -> None:
    name, equals, text = override.partition("=")
    path = tuple(name.strip().split("."))
    where = f"--set {name}={text if len(text) <= 60 else text[:57] + '...'}"
    if not equals or not all(path):
        raise SpecError(f"--set {override}: must look like sampling.temperature=0.2")
    value, inner_places = parse_yaml(text, lambda line, column: where)
    section: Any = data
    for end, part in enumerate(path[:-1], start=1):
        # An empty section in the file (all its keys commented out, say) is null to YAML.
        if section.get(part) is None:
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            raise SpecError(f"{where}: {dotted(path[:end])} is a value and has no key {path[end]!r}; set it as a whole")
        places.setdefault(path[:end], where)
    section[path[-1]] = value
    for known in [key for key in places if key[: len(path)] == path]:
        del places[known]
    places[path] = where
    places.update({(*path, *key): where for key in inner_places})


def _merge_config(path: Path, data: dict[str, Any], places: Places) -> None:
    """Put the settings of the file `engine.config` under the job's own engine section."""
    engine = data.get("engine")
    if not isinstance(engine, dict) or not isinstance(engine.get("config"), str):
        return
    file = path.parent / engine["config"]
    _check_file(file, _ENGINE_CONFIG, places)
    settings, settings_places = load_yaml(file)
    if "config" in settings:
        raise SpecError(
            f"{settings_places[('config',)]}: a config file cannot name another one; put all settings in it"
        )
    merged = {**settings, **engine}
    for section in ("args", "env", "stub"):
        both = [s[section] for s in (settings, engine) if isinstance(s.get(section), dict)]
        if len(both) == 2:
            merged[section] = {**both[0], **both[1]}
    data["engine"] = merged
    for key, place in settings_places.items():
        places.setdefault(("engine", *key), place)


def _check_file(file: Path, key: Key, places: Places) -> None:
    try:
        found, what = file.is_file(), "is a folder" if file.is_dir() else "does not exist"
    except OSError as e:
        found, what = False, f"cannot be opened ({e.strerror or e})"
    if not found:
        raise SpecError(f"{place_of(places, key)}: {dotted(key)}: {file} {what}; give a file, relative to the spec")
