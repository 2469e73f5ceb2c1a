"""Rows whose whole request occurs in another row too, and which of them would get the same answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bulkgen.plan.hashing import Counts, Hashes

# What sampling says of a row: a hash of all that can change the answer, whether that decides it, and how many answers.
ASKED_TYPE = np.dtype([("key", "<u8"), ("decided", "?"), ("answers", "<i4")])

_Asked = tuple[int, bool, int]

# Of no effect on greedy sampling, and neither is a seed: vllm/sampling_params.py, SamplingParams.__post_init__ and
# sampling_type.
_NOT_FOR_GREEDY = ("top_p", "top_k", "min_p")
# Stands for no seed: vllm/sampling_params.py, SamplingParams.__post_init__.
_NO_SEED = (None, -1)
# Texts of sampling parameters that are kept once read; where each row has its own, keeping them saves nothing.
_MOST_KEPT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Rows whose token ids, budget and sampling are those of an earlier row, and their tokens.

    `decided` are those of them whose answer that earlier row's answer may stand for: greedy ones (temperature 0), and
    those whose own seed is the same. Others are meant to differ: without a seed each answer is drawn anew, and of the
    job's seed each row gets one of its own (row_seed in bulkgen/replica.py). Answers are the same only as far as the
    engine's arithmetic is, which depends on what shares a batch.
    """

    rows: int
    prompt_tokens: int
    budget_tokens: int
    decided_rows: int
    decided_prompt_tokens: int
    decided_budget_tokens: int


class SamplingReader:
    """Reads what each row is asked for out of the job's sampling parameters and the row's own."""

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        """`sampling`: what is the same for all rows, as SamplingSpec.constants() gives it."""
        self._sampling = dict(sampling)
        self._known: dict[str, _Asked] = {}
        self._known_unseeded: dict[str, _Asked] = {}

    def read(self, overrides: pa.StringArray) -> npt.NDArray[np.void]:
        """In ASKED_TYPE, for rows with these own parameters (canonical JSON)."""
        texts = overrides.dictionary_encode()
        asked = np.array([self._asked(text) for text in texts.dictionary.to_pylist()], ASKED_TYPE)
        chosen: npt.NDArray[np.void] = asked[texts.indices.to_numpy()]
        return chosen

    def _asked(self, text: str) -> _Asked:
        if (asked := self._known.get(text)) is not None:
            return asked
        own = json.loads(text)
        seed = own.pop("seed", None)
        key, greedy, answers = asked = self._unseeded(own)
        if not greedy and seed not in _NO_SEED:
            asked = _hash(f"{key} {seed}"), True, answers
        return _keep(self._known, text, asked)

    def _unseeded(self, own: Mapping[str, Any]) -> _Asked:
        text = str(own)
        if (asked := self._known_unseeded.get(text)) is not None:
            return asked
        every = {**self._sampling, **own}
        greedy = every.get("temperature", 1) == 0
        # The row's budget is in the plan, and may be less than what was asked for.
        without = ("seed", "max_tokens", *(_NOT_FOR_GREEDY if greedy else ()))
        told = {name: value for name, value in every.items() if value is not None and name not in without}
        asked = _hash(json.dumps(told, sort_keys=True)), greedy, every.get("n") or 1
        return _keep(self._known_unseeded, text, asked)


def _keep(known: dict[str, _Asked], text: str, asked: _Asked) -> _Asked:
    if len(known) < _MOST_KEPT:
        known[text] = asked
    return asked


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def find_repeats(
    requests: Hashes, decided: npt.NDArray[np.bool_], prompt_tokens: Counts, budget_tokens: Counts
) -> Repeats:
    """Repeats among rows, given a hash of each one's whole request; `budget_tokens` those of all answers to a row.

    A job of n different rows has one by chance with a probability of n² / 2^65.
    """
    order = np.argsort(requests)
    again = order[1:][requests[order[1:]] == requests[order[:-1]]]
    same = again[decided[again]]
    return Repeats(
        rows=len(again),
        prompt_tokens=int(prompt_tokens[again].sum(dtype=np.int64)),
        budget_tokens=int(budget_tokens[again].sum(dtype=np.int64)),
        decided_rows=len(same),
        decided_prompt_tokens=int(prompt_tokens[same].sum(dtype=np.int64)),
        decided_budget_tokens=int(budget_tokens[same].sum(dtype=np.int64)),
    )
