"""Lines of an OpenAI batch: `{custom_id, method, url, body}`, each a request with its own endpoint and parameters.

What is not done is refused, line by line, and never passed over: an endpoint, a parameter, a second prompt. Only what
cannot change an answer is ignored.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bulkgen.codes import NOT_STREAMED
from bulkgen.errors import RowError
from bulkgen.prompt.identity import canonical
from bulkgen.spec import STRUCTURED, check_sampling_value

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

MAX_TOKENS = "max_tokens"
# Parameters that mean here what they mean in the job's `sampling` section, under the same name.
SAME = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "min_tokens", "ignore_eos"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    )
)
_LIMITS = (MAX_TOKENS, "max_completion_tokens")
_READ = {
    CHAT: frozenset(("messages", "logprobs", "top_logprobs")),
    COMPLETIONS: frozenset(("prompt", "logprobs")),
}
_READ_IN_ALL = frozenset((*_LIMITS, "model", "response_format", STRUCTURED, "stream"))
# What is for accounts, caches and connections, and cannot change an answer.
_WITHOUT_EFFECT = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "stream_options"),
        *("prompt_cache_key", "prompt_cache_retention"),
    )
)
# What servers know and this version does not do, with the values that ask for nothing.
_UNSUPPORTED: dict[str, Sequence[Any]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a line asks for: messages as they came, or a text, and its own sampling parameters under vLLM's names.

    A parameter that is None is one that the line switches off, whatever the job's default.
    """

    messages: Any
    text: str | None
    sampling: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def read_line(row: Mapping[str, Any], defaults: Mapping[str, Any]) -> BatchRequest:
    """The request of a line. `defaults` are the job's sampling parameters. Raises RowError; passes over the model."""
    endpoint = _endpoint(row)
    body = _body(row)
    given = {name: value for name, value in body.items() if value is not None}
    _check_names(given, endpoint)
    stream = given.get("stream", False)
    if not isinstance(stream, bool):
        raise RowError("bad_body", f"body.stream must be true or false, and is {_shown(stream)}")
    sampling = _sampling(given, endpoint, defaults)
    messages, text = (given.get("messages"), None) if endpoint == CHAT else (None, _text(given.get("prompt")))
    return BatchRequest(messages, text, sampling, (NOT_STREAMED,) if stream else ())


def model_of(row: Mapping[str, Any]) -> str | None:
    """The model that a line names, None for none. Raises RowError for a line without a body, or with an odd model."""
    model = _body(row).get("model")
    if model is not None and not isinstance(model, str):
        raise RowError("bad_body", f"body.model must be text, and is {_shown(model)}")
    return model


def _endpoint(row: Mapping[str, Any]) -> str:
    url = row.get("url")
    if not isinstance(url, str) or not url:
        reason = "it has no url" if url is None or url == "" else f"its url is {_shown(url)}, not text"
        raise RowError("missing_url", f"{reason}; write one such as {CHAT}")
    method = row.get("method")
    if not isinstance(method, str) or method.upper() != "POST":
        raise RowError("bad_method", f"its method must be POST, and {_shown_or_missing(method)}")
    try:
        parts = urlsplit(url)
        path = parts.path if parts.scheme and parts.netloc else url
    except ValueError:
        path = url
    if path not in _READ:
        raise RowError("unsupported_endpoint", f"the url {url[:200]!r} is none of {', '.join(_READ)}")
    return path


def _body(row: Mapping[str, Any]) -> Mapping[str, Any]:
    body = row.get("body")
    if not isinstance(body, dict):
        raise RowError("bad_body", f"its body must be an object, and {_shown_or_missing(body)}")
    return body


def _check_names(given: Mapping[str, Any], endpoint: str) -> None:
    read = _READ[endpoint] | _READ_IN_ALL | SAME
    for name, value in given.items():
        if name in read or name in _WITHOUT_EFFECT:
            continue
        if name not in _UNSUPPORTED:
            near = difflib.get_close_matches(name[:60], [*read, *_UNSUPPORTED], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RowError("unknown_parameter", f"{endpoint} has no parameter {name[:60]!r}{hint}")
        if not any(_equal(value, nothing) for nothing in _UNSUPPORTED[name]):
            raise RowError("unsupported_parameter", f"body.{name} is not supported, and was {_shown(value)}")


def _equal(value: Any, nothing: Any) -> bool:
    """Whether a value asks for nothing: 1.0 is 1, True is not, and an object of nulls is one that Arrow padded."""
    if isinstance(value, dict):
        value = {key: inner for key, inner in value.items() if inner is not None}
    return bool(value == nothing) and isinstance(value, bool) == isinstance(nothing, bool)


def _text(prompt: Any) -> str:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if prompt is None:
        raise RowError("null_prompt", "body.prompt is null or missing")
    if isinstance(prompt, list) and all(isinstance(text, str) for text in prompt):
        reason = f"holds {len(prompt)} texts; a line has one prompt, so write a line for each"
        raise RowError("unsupported_prompt", f"body.prompt {reason}")
    if not isinstance(prompt, str):
        what = "token ids" if isinstance(prompt, list) else _shown(prompt)
        raise RowError("unsupported_prompt", f"body.prompt must be text, and is {what}")
    return prompt


# ---- parameters ----


def _sampling(given: Mapping[str, Any], endpoint: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: _checked(name, given[name], name) for name in sorted(SAME & given.keys())}
    own |= _limit(given)
    own |= _chat_logprobs(given) if endpoint == CHAT else _logprobs(given, "logprobs")
    own |= _form(given)
    # What is switched off already need not be.
    return {name: value for name, value in own.items() if value is not None or defaults.get(name) is not None}


def _checked(param: str, value: Any, name: str) -> Any:
    return check_sampling_value(param, value, f"body.{name}", "the row")


def _limit(given: Mapping[str, Any]) -> dict[str, Any]:
    limits = {name: _checked(MAX_TOKENS, given[name], name) for name in _LIMITS if name in given}
    if len({*limits.values()}) > 1:
        both = " and ".join(f"body.{name} is {value}" for name, value in limits.items())
        raise RowError("bad_sampling", f"{both}, which contradict each other; give one of them")
    return {MAX_TOKENS: next(iter(limits.values()))} if limits else {}


def _logprobs(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"logprobs": _checked("logprobs", given[name], name)} if name in given else {}


def _chat_logprobs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Chat has a switch and a number for it."""
    wanted = given.get("logprobs")
    if wanted is not None and not isinstance(wanted, bool):
        raise RowError("bad_sampling", f"body.logprobs must be true or false; the row has {_shown(wanted)}")
    top = _logprobs(given, "top_logprobs")
    if wanted:
        return top or {"logprobs": 0}
    if top.get("logprobs"):
        raise RowError("bad_sampling", "body.top_logprobs needs body.logprobs: true")
    return {} if wanted is None else {"logprobs": None}


def _form(given: Mapping[str, Any]) -> dict[str, Any]:
    """The form that answers must have: OpenAI's `response_format`, or vLLM's `structured_outputs`."""
    if STRUCTURED in given and "response_format" in given:
        raise RowError("bad_schema", f"body.response_format and body.{STRUCTURED} say the same; give one of them")
    if STRUCTURED in given:
        wanted = given[STRUCTURED]
        if isinstance(wanted, dict):
            wanted = {"json_schema" if kind == "json" else kind: value for kind, value in wanted.items()}
        return {STRUCTURED: _checked(STRUCTURED, wanted, STRUCTURED)}
    if "response_format" not in given:
        return {}
    wanted = given["response_format"]
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return {STRUCTURED: None}
    if kind == "json_object":
        return {STRUCTURED: {"json_object": True}}
    if kind != "json_schema":
        raise RowError("bad_schema", "body.response_format.type must be text, json_object or json_schema")
    named = wanted.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if schema is None:
        raise RowError("bad_schema", "body.response_format.json_schema.schema is missing")
    return {STRUCTURED: _checked(STRUCTURED, {"json_schema": schema}, "response_format")}


def _shown(value: Any) -> str:
    text = canonical(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _shown_or_missing(value: Any) -> str:
    return "is null or missing" if value is None else f"is {_shown(value)}"
