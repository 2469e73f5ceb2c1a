"""The settings that make a row's request, over the starts of a run: what differs, and what is to be done then."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from bulkgen.errors import SpecError
from bulkgen.spec import JobSpec, default_of

# What to do when settings differ from those that made the results so far: generate all rows anew, or leave done rows
# as they are and use the new settings for the rest.
Choice = Literal["again", "keep"]

Record = Mapping[str, Any]
_MOST_SHOWN = 80


def settings_of(spec: JobSpec, model_fingerprint: str) -> dict[str, Any]:
    """The settings of a job, flat, by their keys in the spec."""
    flat = dict(_flat(spec.identity_settings(), ""))
    return {**flat, "input.id": spec.input.id, "model files": model_fingerprint}


def settings_key(settings: Mapping[str, Any]) -> str:
    """A short name for settings: twelve hexadecimal digits."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def check_settings(spec: JobSpec, now: Mapping[str, Any], records: Sequence[Record], choice: Choice | None) -> bool:
    """Whether the settings differ from those of the last start, and results are there that these made.

    Raises SpecError that names what differs, unless the user has chosen what to do then.
    """
    starts = [record for record in records if record["record"] == "start"]
    if not starts or not any(record["record"] == "part" and record["done"] for record in records):
        return False
    changes = _changes(starts[-1]["settings"], now)
    if changes and choice is None:
        raise SpecError(
            f"{spec.source}: the rows that are done were made with other settings: {'; '.join(changes)}. Choose: "
            "--changed again generates all rows with these, --changed keep leaves done rows as they are and uses the "
            "new settings for the rest, and another output.path starts a run of its own"
        )
    return bool(changes)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, what differs. A key that one side does not know has its default there: it came with a later version."""
    names = sorted({*before, *now})
    values = ((name, before.get(name, default_of(name)), now.get(name, default_of(name))) for name in names)
    return [f"{name} was {_shown(old)} and is {_shown(new)}" for name, old, new in values if old != new]


def _flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict) and "column" not in value:
            flat += _flat(value, f"{prefix}{name}.")
        else:
            flat.append((prefix + name, value))
    return flat


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= _MOST_SHOWN:
        return text
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=3).hexdigest()
    return f"{text[: _MOST_SHOWN - 20]}… ({len(text)} characters, {digest})"
