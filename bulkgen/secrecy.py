"""Which names say that what they name is secret, and texts without such values.

Names alone tell: of environment variables, of the job's `engine.env`, of settings. Short values are not looked for in
texts, since half of a text would be taken for them.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(not written down)"
_SECRET = re.compile(
    r"token$|secret|passw|passphrase|credential|api_?key|access_?key|private_?key|(^|[_-])(key|pat|pwd|dsn|cookie)$|bearer",
    re.IGNORECASE,
)
_SHORTEST = 8
_values: set[str] = set()


def is_secret(name: object) -> bool:
    """Whether a name says that its value is secret: HF_TOKEN, AWS_SECRET_ACCESS_KEY, api_key, DB_PASSWORD."""
    return isinstance(name, str) and _SECRET.search(name) is not None


def without_secrets(value: Any) -> Any:
    """Plain data as it may be written down: values under secret names are left out, at any depth."""
    if isinstance(value, list):
        return [without_secrets(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {name: HIDDEN if is_secret(name) else without_secrets(inner) for name, inner in value.items()}


def keep_secret(variables: Mapping[str, Any]) -> None:
    """From now on `hushed` leaves out the values of those of `variables` that have secret names."""
    _values.update(str(value) for name, value in variables.items() if is_secret(name) and len(str(value)) >= _SHORTEST)


def hushed(text: str) -> str:
    """A text without the secrets that are known."""
    for value in _values:
        if value in text:
            text = text.replace(value, HIDDEN)
    return text


keep_secret(os.environ)
