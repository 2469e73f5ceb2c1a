"""What a job costs at least on a device, and how long its steps take as measured.

Two different questions. The limit is physics: a step cannot be faster than its arithmetic or its memory traffic allows
(the roofline model: Williams, Waterman and Patterson, CACM 52(4), 2009), however good the engine is. The step model is
experience: four numbers fitted to steps that were measured, which predict the next ones. Engines reach a part of the
limit only, and `share_of_limit` says which.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bulkgen.sizing.device import Device

Counts = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """What a model asks for. All over all GPUs of a replica.

    weights_bytes: read in every step, whatever is in it; of a mixture of experts, all but the routed experts.
    parameters: that every token is multiplied with, without the output layer, whose `head_parameters` (vocabulary x
        hidden size) only the last token of a prompt and generated tokens meet.
    kv_bytes_per_token: of the KV cache, over all layers.
    attention_flops: of one query token with one context token, see `attention_flops`.
    routed_bytes, routed_share: the routed experts' weights, and the share of them that one token meets.
    """

    weights_bytes: int
    parameters: int
    head_parameters: int = 0
    kv_bytes_per_token: float
    attention_flops: float
    routed_bytes: int = 0
    routed_share: float = 1.0

    def read_bytes(self, tokens: float) -> float:
        """Weights that a step of so many tokens reads; routed experts as if each token chose its own evenly."""
        return self.weights_bytes + self.routed_bytes * (1 - math.pow(1 - self.routed_share, tokens))


def attention_flops(layers: int, query_heads: int, head_size: int, value_size: int | None = None) -> float:
    """Of one query token with one context token: 2 operations a number, for the scores and for the values."""
    return 2.0 * layers * query_heads * (head_size + (head_size if value_size is None else value_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step of the engine computes.

    prefill_tokens: prompt tokens computed (cached ones are not).
    decode_sequences: sequences that get one more token.
    context_tokens: tokens in the cache that those sequences look at, in all; with windows, what the windows show.
    prefill_pairs: pairs of a prompt token and a token it looks at, itself included.
    finished_prompts: prompts that end in this step, and get their first token.
    """

    prefill_tokens: int = 0
    decode_sequences: int = 0
    context_tokens: int = 0
    prefill_pairs: int = 0
    finished_prompts: int = 0

    @classmethod
    def of(cls, prompts: Sequence[int] = (), contexts: Sequence[int] = ()) -> "Step":
        """A step of whole prompts of these lengths, and of decoding sequences with contexts of these lengths."""
        return cls(
            prefill_tokens=sum(prompts),
            decode_sequences=len(contexts),
            context_tokens=sum(contexts),
            prefill_pairs=sum(_triangle(n) for n in prompts),
            finished_prompts=len(prompts),
        )


@dataclass(frozen=True, slots=True)
class Work:
    """Operations, and bytes between memory and processor."""

    flops: float
    bytes: float

    def least_s(self, flops_s: float, bytes_s: float) -> float:
        """Seconds at these rates a second: the arithmetic or the traffic, whichever is slower."""
        return max(self.flops / flops_s, self.bytes / bytes_s)


def step_work(model: ModelWork, step: Step) -> Work:
    """The least work of one step: 2 operations for each parameter a token meets (Kaplan et al. 2020, arXiv 2001.08361,
    section 2.1) and the attention; weights read once, the context's cache read once, new tokens' cache written once.
    """
    tokens = step.prefill_tokens + step.decode_sequences
    sampled = step.finished_prompts + step.decode_sequences
    pairs = step.prefill_pairs + step.context_tokens
    return Work(
        flops=2.0 * (model.parameters * tokens + model.head_parameters * sampled) + model.attention_flops * pairs,
        bytes=(model.read_bytes(tokens) if tokens else 0.0) + model.kv_bytes_per_token * (step.context_tokens + tokens),
    )


def limit_s(work: Work, device: Device, dtype: str, gpus: int = 1) -> float:
    """Seconds that the work takes at least: its arithmetic in `dtype` or its traffic, whichever is slower.

    `gpus` share it perfectly; what they say to each other is not counted.
    """
    return work.least_s(device.flops_for(dtype), device.bandwidth_bytes_s) / gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTokens:
    """A job in numbers, summed over its requests.

    decode_tokens: generated tokens but each request's first, which its prefill yields. prefill_pairs, decode_pairs:
    pairs of a token and a token it looks at. most_output_tokens: the longest answer, which only `least_steps` asks for.
    """

    requests: int
    prefill_tokens: int
    decode_tokens: int
    prefill_pairs: int
    decode_pairs: int
    most_output_tokens: int = 0

    @property
    def all(self) -> Step:
        """The whole job as if it were one step."""
        return Step(
            prefill_tokens=self.prefill_tokens,
            decode_sequences=self.decode_tokens,
            context_tokens=self.decode_pairs,
            prefill_pairs=self.prefill_pairs,
            finished_prompts=self.requests,
        )


def job_tokens(prompt_tokens: Counts, output_tokens: Counts, cached_tokens: Counts | None = None) -> JobTokens:
    """A job from the lengths of its requests, arrays of one length. Cached prompt tokens are looked at, not computed.

    A prompt of p tokens, c of them cached, has (p(p + 1) - c(c + 1)) / 2 pairs; o generated tokens make o - 1 decode
    steps with contexts of p + 1, p + 2, ….
    """
    prompts = prompt_tokens.astype(np.int64)
    cached = np.zeros_like(prompts) if cached_tokens is None else cached_tokens.astype(np.int64)
    decodes = np.maximum(output_tokens.astype(np.int64) - 1, 0)
    return JobTokens(
        requests=len(prompts),
        prefill_tokens=int((prompts - cached).sum()),
        decode_tokens=int(decodes.sum()),
        prefill_pairs=int((_triangle(prompts) - _triangle(cached)).sum()),
        decode_pairs=int((decodes * prompts + _triangle(decodes)).sum()),
        most_output_tokens=int(decodes.max(initial=-1)) + 1,
    )


_Number = TypeVar("_Number", int, npt.NDArray[np.int64])


def _triangle(n: _Number) -> _Number:
    return n * (n + 1) // 2


def least_steps(job: JobTokens, max_num_seqs: int, max_num_batched_tokens: int, kv_tokens: int) -> int:
    """Steps that the best schedule needs at least.

    A step gives a sequence one token, holds max_num_seqs sequences, computes max_num_batched_tokens tokens, and its
    decoding sequences look at no more than the `kv_tokens` that the cache holds. Shared prefixes are held once but
    looked at often: where there are some, `kv_tokens` has to be what all sequences together see.
    """
    if job.requests == 0:
        return 0
    tokens = job.prefill_tokens + job.decode_tokens
    bounds = (
        job.most_output_tokens,
        -(-tokens // max_num_batched_tokens),
        -(-job.decode_tokens // max_num_seqs),
        -(-job.decode_pairs // kv_tokens),
    )
    return max(1, *bounds)


def job_work(model: ModelWork, job: JobTokens, steps: int) -> Work:
    """The least work of a whole job in so many steps, each of which reads the weights (routed experts as in evenly
    filled steps). Goes with `limit_s`, which is then a limit for every schedule of so many steps: as if one step's
    arithmetic could overlap with another's traffic.
    """
    whole = step_work(model, job.all)
    tokens = job.prefill_tokens + job.decode_tokens
    if steps == 0 or tokens == 0:
        return whole
    more_reading = steps * model.read_bytes(tokens / steps) - model.read_bytes(tokens)
    return Work(whole.flops, whole.bytes + more_reading)


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """What bounds the jobs of a model on a replica's device: its work, and the rates of its device.

    flops_s: operations a second in the format that is computed in; bytes_s: memory traffic.
    """

    model: ModelWork
    flops_s: float
    bytes_s: float

    @classmethod
    def of(cls, model: ModelWork, device: Device, dtype: str, gpus: int) -> "Physics":
        """`gpus` of a device share the work perfectly; what they say to each other is not counted."""
        return cls(model=model, flops_s=device.flops_for(dtype) * gpus, bytes_s=device.bandwidth_bytes_s * gpus)

    def limit_s(self, job: JobTokens, steps: int) -> float:
        """Seconds that a job takes at least in so many steps: `limit_s` of its `job_work`."""
        return job_work(self.model, job, steps).least_s(self.flops_s, self.bytes_s)

    def to_json(self) -> dict[str, Any]:
        """As plain data, from which `from_json` makes it again."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "Physics":
        return cls(**{**told, "model": ModelWork(**told["model"])})


def steps_limit_s(model: ModelWork, steps: Iterable[Step], device: Device, dtype: str, gpus: int = 1) -> float:
    """Seconds that known steps take at least, one after the other: no less than `limit_s` of the whole job."""
    return sum(limit_s(step_work(model, step), device, dtype, gpus) for step in steps)


def share_of_limit(least_s: float, measured_s: float) -> float:
    """Per cent of what is physically possible: "engine %" with `generate_s`, "job %" with the wall clock's seconds."""
    return 100.0 * least_s / measured_s if measured_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """How long a step takes, as measured: seconds for each step, prompt token, decoding sequence and context token.

    Linear, because steps are: launching and scheduling cost the same each time, matmuls grow with the tokens once they
    are bound by arithmetic and are flat below (then the first number holds the weights' reading), attention grows with
    the context. One efficiency to divide the limit by cannot tell these apart: on a CPU with AMX the demo model's
    decode steps took 117 ms with 67 sequences and 220 ms with 133, so 12 ms whatever was in them. And only a linear
    model gives a job's time from its totals, without its schedule. Attention within prompts goes into the prompt
    tokens.
    """

    start_s: float
    prefill_token_s: float
    decode_sequence_s: float
    context_token_s: float

    @classmethod
    def assumed(
        cls, model: ModelWork, device: Device, dtype: str, efficiency: float, gpus: int = 1, start_s: float = 0.0
    ) -> "StepModel":
        """Before anything is measured: `efficiency` of the device's rates, and `start_s` whatever is in a step.

        Traffic and arithmetic one after the other, so up to twice the limit even at efficiency 1. For comparison: vLLM
        0.31 with Llama 3.1 8B on an A100 took 1.4 times the limit, for a prompt of 2,000 tokens and for a lone
        decoding sequence alike (a user's published log).
        """
        flops_s = device.flops_for(dtype) * gpus * efficiency
        bytes_s = device.bandwidth_bytes_s * gpus * efficiency
        token_s = 2.0 * model.parameters / flops_s + model.kv_bytes_per_token / bytes_s
        return cls(
            start_s=start_s + (model.weights_bytes + model.routed_bytes) / bytes_s,
            prefill_token_s=token_s,
            decode_sequence_s=token_s + 2.0 * model.head_parameters / flops_s,
            context_token_s=model.attention_flops / flops_s + model.kv_bytes_per_token / bytes_s,
        )

    def step_s(self, step: Step) -> float:
        return float(np.dot(_terms(step), self._coefficients()))

    def job_s(self, job: JobTokens, steps: int) -> float:
        """Seconds of generation of a whole job in so many steps."""
        return steps * self.start_s + float(np.dot(_terms(job.all)[1:], self._coefficients()[1:]))

    def _coefficients(self) -> tuple[float, float, float, float]:
        return (self.start_s, self.prefill_token_s, self.decode_sequence_s, self.context_token_s)


def _terms(step: Step) -> tuple[float, float, float, float]:
    return (1.0, float(step.prefill_tokens), float(step.decode_sequences), float(step.context_tokens))


@dataclass(frozen=True, slots=True)
class StepSample:
    """A step as measured, or several one after the other: what is in all of them together, and their seconds."""

    step: Step
    seconds: float
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted model. `error` is the mean deviation from the samples, as a share of their seconds (0.1: 10%)."""

    model: StepModel
    samples: int
    error: float


def calibrate(samples: Sequence[StepSample]) -> Calibration:
    """Fits a step model to measured steps: least squares of relative deviations, no coefficient below zero.

    Relative, since long steps vary more than short ones and would drown them otherwise. With four coefficients the
    problem of Lawson and Hanson ("Solving Least Squares Problems", 1974, chapter 23) is solved by trying all sets of
    terms: the best one whose plain solution has no negative coefficient is the solution. Of two that are equally good,
    as with samples too alike to tell terms apart, the smaller set is taken. Raises ValueError without samples, or with
    seconds that are not above zero.
    """
    if not samples or min(sample.seconds for sample in samples) <= 0:
        raise ValueError("a step model needs measured steps, each longer than zero seconds")
    seconds = np.array([sample.seconds for sample in samples])
    terms = np.array([(sample.steps, *_terms(sample.step)[1:]) for sample in samples]) / seconds[:, None]
    # All columns of one size, so that a context of 10^5 tokens does not make the arithmetic inexact.
    sizes = np.linalg.norm(terms, axis=0)
    used = np.flatnonzero(sizes)
    best, least = np.zeros(terms.shape[1]), float(len(samples))
    for count in range(1, len(used) + 1):
        for chosen in map(list, combinations(used, count)):
            scaled = terms[:, chosen] / sizes[chosen]
            found = np.linalg.lstsq(scaled, np.ones(len(samples)), rcond=None)[0]
            rest = float(np.sum((scaled @ found - 1) ** 2))
            if found.min() >= 0 and rest < least - _EQUALLY_GOOD * len(samples):
                best, least = np.zeros(terms.shape[1]), rest
                best[chosen] = found / sizes[chosen]
    model = StepModel(
        start_s=float(best[0]),
        prefill_token_s=float(best[1]),
        decode_sequence_s=float(best[2]),
        context_token_s=float(best[3]),
    )
    return Calibration(model, len(samples), float(np.mean(np.abs(terms @ best - 1))))


# Squared relative deviation a sample, below which two fits are the same: a thousandth of a per cent.
_EQUALLY_GOOD = 1e-10
