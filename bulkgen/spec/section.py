"""What all sections of the job spec have in common. What a section holds is for jobspec.py and sampling.py."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, strict, without unknown keys, and without numbers that JSON cannot carry.

    `elsewhere` says where keys go that are not among a section's own; it ends the message for an unknown key.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    elsewhere: ClassVar[str] = ""


class Misfit(ValueError):
    """Values that are right one by one and do not go together. `key` leads from the section to the one to change."""

    def __init__(self, message: str, *key: str) -> None:
        super().__init__(message)
        self.key = key
