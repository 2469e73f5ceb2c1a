"""Which names say that what they name is secret, and texts without such values.

Names tell: of environment variables, of the job's `engine.env`, of settings. Short values are not looked for in texts,
since half of a text would be taken for them. What stands in a URL between a user's name and the host is a password,
whatever its name.
"""

import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

HIDDEN = "(not written down)"
_SECRET = re.compile(
    r"token$|secret|passw|passphrase|credential|api_?key|access_?key|private_?key|bearer"
    # PWD is where a shell stands.
    r"|(^|[_-])(key|pat|dsn|cookie)$|[_-]pwd$",
    re.IGNORECASE,
)
# A password may hold an @ itself. A token may stand alone, in the place of the user's name.
_PASSWORD_IN_URL = re.compile(r"(?<=://)(?:([^\s/?#:@\"]*:)[^\s/?#\"]+|[^\s/?#:@\"]{20,})@")
_SHORTEST = 8
_values: list[str] = []


def is_secret(name: object) -> bool:
    """Whether a name says that its value is secret: HF_TOKEN, AWS_SECRET_ACCESS_KEY, api_key, DB_PASSWORD."""
    return isinstance(name, str) and _SECRET.search(name) is not None


def without_secrets(value: Any) -> Any:
    """Plain data as it may be written down: values under secret names are left out, at any depth."""
    if isinstance(value, list):
        return [without_secrets(inner) for inner in value]
    if isinstance(value, str):
        return hushed(value)
    if not isinstance(value, dict):
        return value
    return {name: HIDDEN if is_secret(name) else without_secrets(inner) for name, inner in value.items()}


def keep_secret(variables: Mapping[str, Any]) -> None:
    """From now on `hushed` leaves out the values of those of `variables` that have secret names."""
    found = set(_values)
    for name, value in variables.items():
        text = str(value)
        if is_secret(name) and len(text.strip()) >= _SHORTEST:
            # As it is, and as it stands in the texts of programs.
            found |= {text, text.strip(), repr(text)[1:-1], json.dumps(text)[1:-1], quote(text), quote(text, safe="")}
    # The longest first: one may be the beginning of another.
    _values[:] = sorted(found, key=len, reverse=True)


def hushed(text: str) -> str:
    """A text without the secrets that are known."""
    for value in _values:
        if value in text:
            text = text.replace(value, HIDDEN)
    return _PASSWORD_IN_URL.sub(rf"\1{HIDDEN}@", text) if "://" in text else text


keep_secret(os.environ)
