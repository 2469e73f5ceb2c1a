"""One model on one device for the rows of one plan: memory, KV cache, what bounds the batch, settings, time.

Everything is of one replica save what says otherwise; replicas share the rows evenly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bulkgen.sizing.architecture import Architecture
from bulkgen.sizing.device import GIB, Device, has_amx
from bulkgen.sizing.engine_settings import Demand, Place, Setting, resolve
from bulkgen.sizing.kv_cache import KvCache, KvCapacity, KvSettings
from bulkgen.sizing.memory import EngineMemory, MemoryBudget, ModelMemory, cpu_budget, gpu_budget
from bulkgen.sizing.roofline import (
    JobTokens,
    ModelWork,
    Step,
    StepModel,
    attention_flops,
    job_tokens,
    job_work,
    least_steps,
    limit_s,
    step_work,
)

_SPACE = "VLLM_CPU_KVCACHE_SPACE"
Bound = Literal["rows", "max_num_seqs", "KV cache"]
# What engines reach of a device's rates, before anything was measured: the range that time and cost are given in.
_EFFICIENCY = {"gpu": (0.35, 0.55, 0.8), "cpu": (0.3, 0.5, 0.8)}
# Host work of a step, in seconds, where nothing was measured.
_STEP_HOST_S = 0.004


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a plan in numbers. `output` is what each answer is expected to have, its budget where unknown.

    `shared`: by block size, prompt tokens that a prefix cache can hold; `resident`: tokens that it keeps for them.
    """

    prompt: npt.NDArray[np.int64]
    output: npt.NDArray[np.int64]
    budget: npt.NDArray[np.int64]
    answers: int
    shared: Mapping[int, int] = field(default_factory=dict)
    resident: Mapping[int, int] = field(default_factory=dict)

    def demand(self, expected_s: float | None = None) -> Demand:
        """What the rows ask of an engine's settings."""
        whole = max(1, int(self.prompt.sum()))
        total = self.prompt + self.budget
        return Demand(
            longest=int(total.max(initial=1)),
            sequences=self.answers,
            shared={size: tokens / whole for size, tokens in self.shared.items()},
            expected_s=expected_s,
        )


@dataclass(frozen=True, slots=True)
class Range:
    """A figure, and between what it should lie."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How a model serves the rows of a plan on a device.

    `concurrency`: sequences that the KV cache holds at once, of this data set, in the middle of a run. `running`: those
    that will, and `bound` what keeps it from more. `compute_bound`: whether arithmetic and not memory traffic bounds a
    decode step of that many. `limit_s`: what physics allows for the generation. `seconds` are of all replicas together.
    """

    device: Device
    replicas: int
    memory: MemoryBudget
    cache: KvCache
    capacity: KvCapacity
    settings: tuple[Setting, ...]
    concurrency: float
    running: int
    bound: Bound
    compute_bound: bool
    steps: int
    cached_tokens: int
    seconds: Range
    limit_s: float
    measured: bool

    def expectations(self) -> dict[str, Any]:
        """In plain data, what a run can be held against afterwards."""
        return {
            "device": self.device.name,
            "kv_tokens": self.capacity.tokens,
            "concurrency": self.concurrency,
            "steps": self.steps,
            "cached_tokens": self.cached_tokens,
            "generate_s": {"low": self.seconds.low, "expected": self.seconds.expected, "high": self.seconds.high},
            "limit_s": self.limit_s,
            "measured": self.measured,
        }

    @property
    def fault(self) -> str | None:
        """Why no engine would start, in words with the cure; None if one would."""
        return self.memory.fault or self.capacity.refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the user set: vLLM's arguments and the engine's environment, and how many replicas there are."""

    args: Mapping[str, Any]
    env: Mapping[str, str]
    replicas: int = 1


def serve(
    architecture: Architecture,
    rows: Rows,
    device: Device,
    choices: Choices,
    *,
    bfloat16: bool = True,
    step_model: StepModel | None = None,
) -> Serving:
    """Work out how a model serves rows on a device; `step_model` as measured there, None where nothing was.

    Raises SpecError for what vLLM would refuse or is not known.
    """
    mine = _share(rows, choices.replicas)
    given = dict(choices.args)
    length = architecture.max_positions
    first = resolve(given, mine.demand(), Place(device=device, bfloat16=bfloat16), length)
    cache = _cache(architecture, device, {**given, **_values(first)})
    space = _cpu_space(architecture, mine, device, choices, cache, {**given, **_values(first)})
    memory = _memory(architecture, device, {**given, **_values(first)}, space)
    capacity = cache.capacity(memory.kv_cache.expected)
    work = _model_work(architecture, cache, {**given, **_values(first)})
    job = _job(mine, cache.block_size)
    concurrency = _concurrency(mine, cache, capacity)
    place = Place(device=device, bfloat16=bfloat16, kv_tokens=capacity.tokens, concurrency=concurrency)
    settings = resolve(given, mine.demand(), place, length)
    seqs = int(_values(settings)["max_num_seqs"])
    running = max(1, min(seqs, mine.answers, int(concurrency)))
    batched = int(_values(settings)["max_num_batched_tokens"])
    steps = least_steps(job, running, batched, 1 << 62)
    gpus = int(given.get("tensor_parallel_size") or 1)
    dtype = _computed_dtype(architecture, device, {**given, **_values(settings)})
    seconds = _seconds(step_model, work, job, steps, device, dtype, gpus)
    # What the device's rates alone tell of the time is not worth a decision.
    settings = resolve(given, mine.demand(None if step_model is None else seconds.expected), place, length)
    return Serving(
        device=device,
        replicas=choices.replicas,
        memory=memory,
        cache=cache,
        capacity=capacity,
        settings=(*settings, *([] if space is None else [space])),
        concurrency=concurrency,
        running=running,
        bound=_bound(running, mine.answers, seqs),
        compute_bound=_compute_bound(work, running, mine, device, dtype),
        steps=steps,
        cached_tokens=rows.shared.get(cache.block_size, 0),
        seconds=seconds,
        limit_s=limit_s(job_work(work, job, steps), device, dtype, gpus),
        measured=step_model is not None,
    )


def _share(rows: Rows, replicas: int) -> Rows:
    """What one of several replicas gets: every nth row. Prefixes that rows share are shared in each."""
    if replicas == 1:
        return rows
    return Rows(
        prompt=rows.prompt[::replicas],
        output=rows.output[::replicas],
        budget=rows.budget[::replicas],
        answers=-(-rows.answers // replicas),
        shared={size: tokens // replicas for size, tokens in rows.shared.items()},
        resident=rows.resident,
    )


def _computed_dtype(architecture: Architecture, device: Device, values: Mapping[str, Any]) -> str:
    """What matmuls compute in: as set, else the model's own; float16 where a GPU has no bfloat16.

    `_resolve_auto_dtype`, vllm/config/model.py.
    """
    dtype = str(values.get("dtype") or "auto")
    if dtype != "auto":
        return dtype
    own = architecture.served_dtype
    return "float16" if own == "bfloat16" and own not in device.flops else own


def _values(settings: tuple[Setting, ...]) -> dict[str, Any]:
    return {setting.name: setting.value for setting in settings}


def _cache(architecture: Architecture, device: Device, values: Mapping[str, Any]) -> KvCache:
    return KvCache.of(
        architecture,
        KvSettings(
            max_model_len=int(values["max_model_len"]),
            max_num_batched_tokens=int(values["max_num_batched_tokens"]),
            block_size=values["block_size"],
            kv_cache_dtype=str(values["kv_cache_dtype"]),
            dtype=str(values.get("dtype") or "auto"),
            tensor_parallel_size=int(values.get("tensor_parallel_size") or 1),
            device="cpu" if device.kind == "cpu" else "cuda",
            enable_prefix_caching=bool(values["enable_prefix_caching"]),
            amx=has_amx(),
        ),
    )


def _memory(
    architecture: Architecture, device: Device, values: Mapping[str, Any], space: Setting | None
) -> MemoryBudget:
    dtype = str(values.get("dtype") or "auto")
    model = ModelMemory(
        weights_bytes=architecture.weight_bytes(dtype),
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        vocab_size=architecture.vocab_size,
        activation_bytes=4 if dtype == "float32" else 2,
    )
    engine = EngineMemory(
        max_num_batched_tokens=int(values["max_num_batched_tokens"]),
        max_num_seqs=int(values["max_num_seqs"]),
        tensor_parallel_size=int(values.get("tensor_parallel_size") or 1),
        gpu_memory_utilization=float(values.get("gpu_memory_utilization") or 0.92),
        enforce_eager=bool(values["enforce_eager"]),
        kv_cache_memory_bytes=values.get("kv_cache_memory_bytes"),
    )
    if device.kind == "gpu":
        return gpu_budget(device, model, engine)
    return cpu_budget(device, model, engine, None if space is None else int(space.value))


def _cpu_space(
    architecture: Architecture,
    rows: Rows,
    device: Device,
    choices: Choices,
    cache: KvCache,
    values: Mapping[str, Any],
) -> Setting | None:
    """VLLM_CPU_KVCACHE_SPACE: what the batch can fill, and no more than half of what the replicas' weights leave.

    Left to itself vLLM takes nearly all of the machine's memory, each replica for itself. None on a GPU, and where
    kv_cache_memory_bytes says it.
    """
    if device.kind == "gpu":
        return None
    if own := choices.env.get(_SPACE):
        return Setting(name=_SPACE, value=int(own), source="user", reason="GiB of KV cache a replica", where="env")
    if choices.args.get("kv_cache_memory_bytes") is not None:
        return None
    lengths = np.sort(rows.prompt + rows.budget)[::-1][: int(values["max_num_seqs"])]
    blocks = int(cache.blocks_needed_each(lengths).sum()) if len(lengths) else 1
    wanted = max(blocks * cache.bytes_per_block, 2 * cache.request_bytes())
    dtype = str(values.get("dtype") or "auto")
    left = device.memory_bytes / choices.replicas - 1.2 * architecture.weight_bytes(dtype)
    most = max(1, int(left / 2 / GIB))
    gib = min(most, -(-wanted // GIB))
    held = f"the longest {len(lengths):,} rows need {wanted / GIB:.1f} GiB together"
    why = held if gib < most else f"{held}; no more than half of the memory left is taken"
    reason = f"GiB of KV cache a replica: {why}"
    return Setting(name=_SPACE, value=gib, source="computed", reason=reason, where="env")


def _model_work(architecture: Architecture, cache: KvCache, values: Mapping[str, Any]) -> ModelWork:
    dtype = str(values.get("dtype") or "auto")
    head = architecture.vocab_size * architecture.hidden_size
    # Of a mixture of experts, the routed experts' share of the weights by their share of the parameters.
    weights = architecture.weight_bytes(dtype)
    counts = architecture.counts
    routed = round(weights * counts.experts / max(1, counts.total))
    attention = sum(
        attention_flops(group.layers, architecture.query_heads, group.cache.head_size, group.cache.value_size)
        for group in architecture.groups
        if group.cache.kind != "state"
    )
    return ModelWork(
        weights_bytes=weights - routed,
        parameters=max(0, architecture.matmul_parameters - head),
        head_parameters=head,
        kv_bytes_per_token=cache.bytes_per_token,
        attention_flops=attention,
        routed_bytes=routed,
        routed_share=counts.active_experts / counts.experts if counts.experts else 1.0,
    )


def _job(rows: Rows, block_size: int) -> JobTokens:
    """The rows as the engine computes them: less what its prefix cache holds, spread evenly over them."""
    whole = max(1, int(rows.prompt.sum()))
    cached = (rows.prompt * (rows.shared.get(block_size, 0) / whole)).astype(np.int64)
    return job_tokens(rows.prompt, rows.output, cached)


def _concurrency(rows: Rows, cache: KvCache, capacity: KvCapacity) -> float:
    """Sequences that the cache holds at once while rows come and go.

    A row is in the cache for as many steps as it has output tokens, and holds its prompt and, on average over these,
    half of its output. What rows share is held once.
    """
    if not len(rows.prompt):
        return 0.0
    whole = max(1, int(rows.prompt.sum()))
    shared = rows.shared.get(cache.block_size, 0) / whole
    resident = rows.resident.get(cache.block_size, 0) / cache.block_size
    own = (rows.prompt * (1 - shared) + rows.output / 2).astype(np.int64)
    steps = rows.output.astype(np.float64)
    held = float((steps * cache.blocks_needed_each(np.maximum(own, 1))).sum() / max(1.0, float(steps.sum())))
    return float(max(1.0, (capacity.usable_blocks - min(resident, capacity.usable_blocks / 2)) / max(held, 1e-9)))


def _bound(running: int, answers: int, seqs: int) -> Bound:
    if running >= answers:
        return "rows"
    return "max_num_seqs" if running >= seqs else "KV cache"


def _compute_bound(work: ModelWork, running: int, rows: Rows, device: Device, dtype: str) -> bool:
    context = float((rows.prompt + rows.output / 2).mean()) if len(rows.prompt) else 0.0
    step = step_work(work, Step(decode_sequences=running, context_tokens=round(running * context)))
    return step.flops / device.flops_for(dtype) > step.bytes / device.bandwidth_bytes_s


def _seconds(
    measured: StepModel | None, work: ModelWork, job: JobTokens, steps: int, device: Device, dtype: str, gpus: int
) -> Range:
    if measured is not None:
        expected = measured.job_s(job, steps)
        return Range(0.8 * expected, expected, 1.25 * expected)
    low, middle, high = _EFFICIENCY[device.kind]
    slow, usual, fast = (
        StepModel.assumed(work, device, dtype, share, gpus, _STEP_HOST_S).job_s(job, steps)
        for share in (low, middle, high)
    )
    return Range(fast, usual, slow)
