"""Where a job's prompts come from, as plain values."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

SpecialTokens = Literal["warn", "fail", "text"]
TooLong = Literal["fail", "truncate_left", "truncate_right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Exactly one of messages (column), prompt (column) and template says what a row asks; the rest says how.

    `chat_template` is the text of one, None for the model's own. `now` is what chat templates are told when they ask
    for the date; None is the present moment.
    """

    id: str | None = None
    messages: str | None = None
    prompt: str | None = None
    template: str | None = None
    system: str | None = None
    chat: bool = True
    chat_template: str | None = None
    continue_final: bool = False
    special_tokens: SpecialTokens = "warn"
    too_long: TooLong = "fail"
    now: datetime | None = None
