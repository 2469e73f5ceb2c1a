"""The nouns that the stages hand to each other. No behaviour beyond what a noun needs, no third-party types.

Nobody changes one. Those of which every row makes one are not frozen all the same: that makes making them four times
as slow.

The way of one row:  Row (dict) → Prompt → Request → Completion | Failure → part file → output row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROW_KEY_BYTES = 16
# The first half of a key is a hash of the row's identity alone; see prompt/identity.py.
IDENTITY_BYTES = ROW_KEY_BYTES // 2

# As far as a plan counts how often an engine failed a row.
MOST_ATTEMPTS = 63

# Where a row's result comes from: an engine, another row of the run with the same request, the job's answer cache, or
# an earlier output.
ENGINE, REPEAT, CACHE, REUSE = "engine", "repeat", "cache", "reuse"

# Of a whole request with all that shapes its answer: a hash, the same in all runs.
REQUEST_KEY_BYTES = 16

DONE = "done"
FAILED = "failed"

# Columns that bulkgen appends to the input's own, in this order; the generated text, whose name comes from the
# spec, stands between `status` and the rest. All times are seconds, all tokens are counts.
RESULT_COLUMNS = (
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "queued_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "error_code",
    "error",
    "warnings",
    "attempts",
    "answer_from",
    "settings_key",
    "request_key",
    "row_key",
)
# Columns that stand between the text and the rest where a job can fill them.
EXTRA_COLUMNS = ("samples", "logprobs", "valid")


@dataclass(frozen=True, slots=True)
class BadRow:
    """A place in the input that holds a row that cannot be read. `raw` is what stands there, byte for byte."""

    code: str
    message: str
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows of one input file.

    `first` is the ordinal of the first row in the whole data set (0-based, bad rows count).
    `file` names the input file as the user knows it, and is part of a row's identity where there is no id.
    `positions[i]` is the 1-based line (JSONL; blank lines count) or row number (Parquet) of `rows[i]`.
    """

    first: int
    file: str
    positions: Sequence[int]
    rows: Sequence[dict[str, Any] | BadRow]


@dataclass(slots=True)
class Prompt:
    """A row as it would be sent: `tokens` are the ids that the engine will prefill, nothing is added later.

    `overrides` holds, as canonical JSON, the sampling parameters that this row takes from columns (`{}` where
    all come from the spec); `max_tokens` is already capped to the room that the context leaves.
    `key` identifies the row over resumes: ROW_KEY_BYTES bytes. `warnings` are the codes of what the user may
    want to know of a row that is sent all the same.
    """

    ordinal: int
    key: bytes
    tokens: Sequence[int]
    max_tokens: int
    overrides: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that failed before the engine: unreadable, not renderable, too long. Found again by every plan."""

    ordinal: int
    key: bytes
    file: str
    position: int
    code: str
    message: str
    row: str | None
    raw: bytes | None
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous stretch of one bucket of the plan: a unit of distribution and accounting, never a barrier.

    `bucket` is the bucket's number, `longest` its upper edge in prompt tokens; `first` and `rows` say which
    rows of the bucket's file; `budget_tokens` is the sum of max_tokens.
    """

    shard: int
    bucket: int
    longest: int
    first: int
    rows: int
    prompt_tokens: int
    budget_tokens: int


@dataclass(slots=True)
class Request:
    """What an engine takes. `index` is the caller's handle, unique among the requests in the engine."""

    index: int
    tokens: Sequence[int]
    sampling: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of the tokens of one answer, in columns, since there are many; -inf and NaN as they come.

    `tokens`, `token_ids` and `logprobs` have an entry a token. The likeliest tokens at each place, likeliest first,
    stand in the `top_…`, those of one place after those of the other; `top_counts` says how many each place has.
    """

    tokens: Sequence[str]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top_counts: Sequence[int]
    top_tokens: Sequence[str]
    top_token_ids: Sequence[int]
    top_logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Sample:
    """One of several answers to the same request. `valid` as in Completion, of this answer alone."""

    index: int
    text: str
    finish_reason: str
    output_tokens: int
    logprobs: Logprobs | None = None
    valid: bool | None = None


@dataclass(slots=True)
class Completion:
    """A finished request. Times in seconds from the arrival in the engine; `tpot_s` is None for one token.

    `warnings` are codes of what the user may want to know of an answer that counts all the same. Where the request
    says how many answers it wants (`n`), all of them are in `samples`, in the order of their index; `text`,
    `finish_reason` and `logprobs` are the first one's, `output_tokens` is the sum. `valid` says whether every answer
    has the form that the request asks for; None where it asks for none, or nobody can tell.
    """

    index: int
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queued_s: float
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    warnings: tuple[str, ...] = ()
    samples: tuple[Sample, ...] = ()
    logprobs: Logprobs | None = None
    valid: bool | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that the engine refused or could not finish.

    `transient`: the reason need not lie in the row, so that another attempt has sense.
    """

    index: int
    code: str
    message: str
    transient: bool = False


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an open engine can hold: context and KV cache in tokens, KV block size, running sequences.

    `kv_cache_size_tokens` is what the engine itself says it holds, in sequences of the whole context; None: nothing.
    `max_num_batched_tokens` are those of a step, None where there is no limit. `lag_steps`: steps until it can admit
    what is submitted, none where it computes in the caller's process and one step at a time.
    """

    max_model_len: int
    kv_tokens: int
    block_size: int
    max_num_seqs: int
    kv_cache_size_tokens: int | None = None
    max_num_batched_tokens: int | None = None
    lag_steps: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's own counters since it was opened; `kv_usage` (0…1), `running`, `waiting` are of this moment.

    `prompt_tokens` counts prefilled prompts whole, `cached_tokens` the part of them that the prefix cache held; a
    request for n answers counts as n in both, as it does in `running` and `waiting`. `steps` are those computed and
    `step_s` the seconds in them (where the engine computes beside its caller: from one result to the next);
    `held_s` the seconds for which the engine held requests, as who feeds it saw it.
    """

    running: int
    waiting: int
    kv_usage: float
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    steps: int = 0
    step_s: float = 0.0
    held_s: float = 0.0
