"""What the stub engine says: the prompt, something of the form asked for, or what it was told to say."""

import json
import math
import zlib
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from bulkgen.engine.contract import EngineSettings
from bulkgen.records import Logprobs, Request

_TOKENS = np.dtype("<i4")


class StubAnswers:
    """Texts, lengths and log probabilities of answers; they follow from the settings and the request alone."""

    def __init__(self, settings: EngineSettings) -> None:
        s = settings.stub
        self._seed: int = s.get("seed", 0)
        self._fixed: int | None = s.get("output_tokens")
        self._answers: Mapping[str, str] = s.get("answers", {})
        self._cut = tuple(s.get("cut", ()))
        self._short = tuple(s.get("short", ()))
        self._neg_inf = tuple(s.get("neg_inf", ()))
        self._echo_params: bool = s.get("echo_params", False)
        self._reads_prompts = settings.model == "stub"

    def prompt(self, request: Request) -> str:
        """The text of a prompt of the stub model, whose tokens are three bytes of UTF-8 each, little end first."""
        text = bytearray(token_ids(request))
        del text[3::4]
        return text.rstrip(b"\0").decode(errors="replace")

    def text(self, request: Request, sample: int) -> str:
        """An answer; those to the same request differ."""
        if self._echo_params:
            return json.dumps(dict(request.sampling), sort_keys=True)
        told = self._told(request)
        if told is not None:
            return told
        form = request.sampling.get("structured_outputs")
        if form is not None and "json_schema" in form:
            return json.dumps(_instance(json.loads(form["json_schema"])))
        if form is not None and "json_object" in form:
            return json.dumps({"answer": sample})
        if form is not None and "choice" in form:
            return str(form["choice"][checksum(request, sample) % len(form["choice"])])
        number = f" {sample}" if sample else ""
        return f"echo{number}:{self.prompt(request) if self._reads_prompts else f'{checksum(request, 0):08x}'}"

    def _told(self, request: Request) -> str | None:
        if not self._answers:
            return None
        prompt = self.prompt(request)
        return next((text for marker, text in self._answers.items() if marker in prompt), None)

    def length(self, request: Request, sample: int) -> int:
        """Output tokens of an answer."""
        most: int = request.sampling["max_tokens"]
        if self._cut and self._holds(request, self._cut):
            return most
        if self._told(request) == "":
            return 1
        share = checksum(request, self._seed * 2 + 16 * sample) / 2**32
        wanted = self._fixed if self._fixed is not None else 1 + int(share * most)
        return max(1, min(wanted, most))

    def is_short(self, request: Request) -> bool:
        """Whether the last answer to a request is to be left out."""
        return bool(self._short) and self._holds(request, self._short)

    def logprobs(self, request: Request, tokens: int) -> Logprobs | None:
        """Made-up log probabilities, if the request asks for any; the last of the likeliest may be -inf."""
        top = request.sampling.get("logprobs")
        if top is None:
            return None
        ids, values = list(range(tokens)), [-0.125 * (i % 8) for i in range(tokens)]
        last = -math.inf if self._neg_inf and self._holds(request, self._neg_inf) else -1.0 - top
        tops = [[*(values[i] - j for j in range(top - 1)), last][:top] for i in ids]
        others = [[i + j for j in range(top)] for i in ids]
        return Logprobs(
            tokens=[f"t{i}" for i in ids],
            token_ids=ids,
            logprobs=values,
            top_counts=[top] * tokens,
            top_tokens=[f"t{i}" for i in chain.from_iterable(others)],
            top_token_ids=list(chain.from_iterable(others)),
            top_logprobs=list(chain.from_iterable(tops)),
        )

    def fault(self, request: Request) -> str | None:
        """Why the form that a request asks for cannot be had, where only an engine finds out."""
        grammar = (request.sampling.get("structured_outputs") or {}).get("grammar")
        return "the grammar has no rule" if grammar is not None and ":" not in grammar else None

    def _holds(self, request: Request, markers: tuple[str, ...]) -> bool:
        prompt = self.prompt(request)
        return any(marker in prompt for marker in markers)


def checksum(request: Request, seed: int) -> int:
    """32 bits out of a request's tokens."""
    return zlib.crc32(token_ids(request).data, seed)


def token_ids(request: Request) -> npt.NDArray[np.int32]:
    """A request's tokens as an array; no copy where they lie in memory as one already."""
    return np.asarray(request.tokens, _TOKENS)


def _instance(schema: Any) -> Any:
    """A value that a plain schema allows."""
    if not isinstance(schema, dict):
        return {}
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return _instance(schema[key][0])
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        inner: dict[str, Any] = schema.get("properties", {})
        return {name: _instance(inner.get(name, {})) for name in schema.get("required", inner)}
    plain: dict[str, Any] = {"array": [], "string": "", "integer": 0, "number": 0.5, "boolean": True, "null": None}
    return plain[kind]
