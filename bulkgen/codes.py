"""Codes of why a row failed, and of what a user may want to know of one that is done. Scripts compare them: they stay.

docs/faults.md says what each of them means.
"""

import difflib
from collections.abc import Iterable

from bulkgen.errors import SpecError

ERRORS = frozenset(
    {
        # in the input
        *("bad_json", "bad_unicode", "bad_utf8", "bad_value", "damaged_file", "line_too_long", "not_an_object"),
        # in what a prompt or its sampling is made of
        *("bad_messages", "bad_sampling", "bad_schema", "chat_template_error", "empty_prompt"),
        *("last_message_assistant", "missing_column", "not_text", "null_prompt", "prompt_too_long"),
        *("special_tokens", "template_error", "template_limit", "unsupported_content"),
        # in lines of an OpenAI batch
        *("bad_body", "bad_method", "missing_url", "unknown_parameter", "unsupported_endpoint"),
        *("unsupported_parameter", "unsupported_prompt", "wrong_model"),
        # in the engine
        *("ended_by_engine", "larger_than_kv_cache", "missing_samples", "poison", "refused_by_engine", "row_timeout"),
    }
)

# Of prompts that were sent all the same. SPECIAL_TOKENS is also why a row failed, where a job wants that.
BOS_IN_TEXT = "bos_in_text"
MAX_TOKENS_CAPPED = "max_tokens_capped"
NOT_STREAMED = "not_streamed"
PROMPT_TRUNCATED = "prompt_truncated"
SPECIAL_TOKENS = "special_tokens"
# Of answers: one without any text; one that has not the form asked for, cut off or not.
EMPTY_OUTPUT = "empty_output"
UNFINISHED_OUTPUT = "unfinished_output"
INVALID_OUTPUT = "invalid_output"
WARNINGS = frozenset(
    {
        *(BOS_IN_TEXT, MAX_TOKENS_CAPPED, NOT_STREAMED, PROMPT_TRUNCATED, SPECIAL_TOKENS),
        *(EMPTY_OUTPUT, UNFINISHED_OUTPUT, INVALID_OUTPUT),
    }
)
# What `run --retry` takes beside codes: all rows that failed, all that were cut at max_tokens.
TRUNCATED = "truncated"
RETRIABLE = ERRORS | WARNINGS | {"failed", TRUNCATED}


def check_codes(option: str, given: Iterable[str], known: frozenset[str]) -> tuple[str, ...]:
    """What was given to an option, if all of it is known. Raises SpecError, naming what is nearest."""
    names = tuple(name.strip() for name in given)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            meant = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(known))}"
            raise SpecError(f"{option} {name}: no such code; {meant}")
    return names
