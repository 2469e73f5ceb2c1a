"""One model on one device for the rows of one plan: memory, KV cache, what bounds the batch, settings, time.

Everything is of one replica save what says otherwise; replicas share the rows evenly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bulkgen.sizing.architecture import Architecture
from bulkgen.sizing.device import GIB, Device, cpu_flags
from bulkgen.sizing.engine_settings import Demand, Measured, Place, Setting, resolve
from bulkgen.sizing.kv_cache import KvCache, KvCapacity, KvSettings
from bulkgen.sizing.kv_groups import KERNEL_BLOCK
from bulkgen.sizing.memory import EngineMemory, MemoryBudget, ModelMemory, cpu_budget, gpu_budget
from bulkgen.sizing.roofline import (
    JobTokens,
    ModelWork,
    Physics,
    Step,
    StepModel,
    attention_flops,
    job_tokens,
    least_steps,
    step_work,
)

_SPACE = "VLLM_CPU_KVCACHE_SPACE"
Bound = Literal["rows", "max_num_seqs", "KV cache"]
# What engines reach of a device's rates, before anything was measured: the range that time and cost are given in.
_EFFICIENCY = {"gpu": (0.35, 0.55, 0.8), "cpu": (0.3, 0.5, 0.8)}
# Host work of a step, in seconds, where nothing was measured.
_STEP_HOST_S = 0.004
# How many times as long a CPU takes in a format that it has no instructions for (see `computes_bfloat16`).
_SLOW_FORMAT = 8.0
# Names that vLLM takes for others.
_DTYPES = {"half": "float16", "float": "float32"}


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

    @property
    def answers_each(self) -> float:
        """Answers that a row asks for, on average."""
        return self.answers / len(self.prompt) if len(self.prompt) else 1.0

    def demand(self) -> Demand:
        """What the rows ask of an engine's settings."""
        whole = max(1, int(self.prompt.sum()))
        total = self.prompt + self.budget
        return Demand(
            longest=int(total.max(initial=1)),
            sequences=self.answers,
            shared={size: tokens / whole for size, tokens in self.shared.items()},
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
    decode step of that many. `limit_s`: what physics allows for the generation, by the
    `physics` of a replica. `seconds` are of all replicas together. `refusal`: why vLLM would not take the settings.
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
    physics: Physics
    measured: bool
    refusal: str | None = None

    def expectations(self) -> dict[str, Any]:
        """In plain data, what a run can be held against afterwards."""
        return {
            "device": self.device.name,
            "kv_tokens": self.capacity.tokens,
            "concurrency": self.concurrency,
            "steps": self.steps,
            "cached_tokens": self.cached_tokens,
            "generate_s": {"low": self.seconds.low, "expected": self.seconds.expected, "high": self.seconds.high},
            "measured": self.measured,
            "physics": self.physics.to_json(),
        }

    @property
    def fault(self) -> str | None:
        """Why no engine would start, in words with the cure; None if one would."""
        return self.refusal or self.memory.fault or self.capacity.refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the user set: vLLM's arguments and the engine's environment, and how many replicas there are.

    `measured`: what is known to be best for the rest of the settings, by measuring.
    """

    args: Mapping[str, Any]
    env: Mapping[str, str]
    replicas: int = 1
    measured: Measured | None = None


def serve(
    architecture: Architecture,
    rows: Rows,
    device: Device,
    choices: Choices,
    *,
    bfloat16: bool = True,
    step_model: StepModel | None = None,
    model_length: int | None = None,
) -> Serving:
    """Work out how a model serves rows on a device; `step_model` as measured there, None where nothing was.

    `model_length`: the model's own context, if it is another than its config's longest. Raises SpecError for what vLLM
    would refuse or is not known.
    """
    mine, part = _share(rows, choices.replicas), _part(device, choices.replicas)
    given = dict(choices.args)
    given["dtype"] = _DTYPES.get(given.get("dtype") or "", given.get("dtype"))
    length = model_length or architecture.max_positions
    demand = replace(mine.demand(), longest=rows.demand().longest)
    plain = all(group.cache.kind == "full" for group in architecture.groups)
    place = Place(device=device, bfloat16=bfloat16, small_blocks=plain)
    values = {**given, **_values(resolve(given, demand, place, length, choices.measured))}
    if not values["enable_prefix_caching"]:
        mine = replace(mine, shared={}, resident={})
    cache = _cache(architecture, device, values)
    space = _cpu_space(architecture, mine, device, choices, cache, values)
    capacity = cache.capacity(_memory(architecture, device, values, space).kv_cache.expected)
    # Settings go by the budgets, whatever is expected of the answers: a run knows no better either.
    wholly = _concurrency(replace(mine, output=mine.budget), cache, capacity)
    place = replace(place, kv_tokens=capacity.tokens, concurrency=wholly)
    values = {**given, **_values(resolve(given, demand, place, length, choices.measured))}
    memory = _memory(architecture, device, values, space)
    capacity = cache.capacity(memory.kv_cache.expected)
    concurrency = _concurrency(mine, cache, capacity)
    seqs = int(values["max_num_seqs"])
    running = max(1, min(seqs, mine.answers, int(concurrency)))
    work, job = _model_work(architecture, cache, values), _job(mine, cache.block_size)
    steps = least_steps(job, running, int(values["max_num_batched_tokens"]), 1 << 62)
    gpus = int(given.get("tensor_parallel_size") or 1) if device.kind == "gpu" else 1
    dtype = _computed_dtype(architecture, device, values)
    physics = Physics.of(work, part, dtype, gpus)
    if step_model is not None:
        expected = step_model.job_s(_held_once(job, mine, cache.block_size, steps), steps)
        seconds = Range(0.8 * expected, expected, 1.25 * expected)
    else:
        slow = _SLOW_FORMAT if device.kind == "cpu" and not bfloat16 and dtype != "float32" else 1.0
        seconds = _by_rates(work, job, steps, part, dtype, gpus, slow)
    # What the device's rates alone tell of the time is not worth a decision.
    demand = replace(demand, expected_s=None if step_model is None else seconds.expected)
    settings = resolve(given, demand, place, length, choices.measured)
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
        compute_bound=_compute_bound(work, running, mine, part, dtype),
        steps=steps,
        cached_tokens=rows.shared.get(cache.block_size, 0) if values["enable_prefix_caching"] else 0,
        seconds=seconds,
        limit_s=physics.limit_s(job, steps),
        physics=physics,
        measured=step_model is not None,
        refusal=_refusal(values, cache, max(length or 0, architecture.max_positions or 0) or None, choices.env),
    )


def _part(device: Device, replicas: int) -> Device:
    """What one replica has of a device: a GPU for itself, or its cores of all."""
    if device.kind == "gpu" or replicas == 1:
        return device
    flops = {dtype: rate / replicas for dtype, rate in device.flops.items()}
    return replace(device, bandwidth_bytes_s=device.bandwidth_bytes_s / replicas, flops=flops)


def _refusal(values: Mapping[str, Any], cache: KvCache, length: int | None, env: Mapping[str, str]) -> str | None:
    """Why vLLM would not start with settings that do not go together; None where it would."""
    seqs, batched = int(values["max_num_seqs"]), int(values["max_num_batched_tokens"])
    if seqs > batched:
        # SchedulerConfig.verify_max_model_len, vllm/config/scheduler.py
        return f"max_num_seqs {seqs} is more than max_num_batched_tokens {batched}; lower it, or raise the other"
    wanted = int(values["max_model_len"])
    if length is not None and wanted > length and env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") != "1":
        return f"max_model_len {wanted} is more than the {length} tokens of the model; lower it"
    block = values["block_size"]
    kernel = KERNEL_BLOCK[cache.settings.device]
    if block is not None and int(block) % kernel:
        return f"block_size {block} is no multiple of {kernel}, which attention on such a device computes in"
    return None


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
            cpu_flags=cpu_flags(),
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
    most = max(1, int(int(values["max_num_seqs"]) / rows.answers_each))
    each = round(rows.answers_each)
    lengths = np.sort(rows.prompt + each * rows.budget)[::-1][:most]
    blocks = int(cache.blocks_needed_each(lengths).sum()) if len(lengths) else 1
    wanted = max(blocks * cache.bytes_per_block, 2 * cache.request_bytes())
    dtype = str(values.get("dtype") or "auto")
    left = device.memory_bytes / choices.replicas - 1.2 * architecture.weight_bytes(dtype)
    allowed = max(1, int(left / 2 / GIB))
    gib = min(allowed, -(-wanted // GIB))
    held = f"the longest {len(lengths):,} rows need {wanted / GIB:.1f} GiB together"
    why = held if wanted <= allowed * GIB else f"{held}; no more than half of the memory left is taken"
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
        # Of all devices together: each holds its heads, or all of a latent cache.
        kv_bytes_per_token=cache.bytes_per_token * int(values.get("tensor_parallel_size") or 1),
        attention_flops=attention,
        routed_bytes=routed,
        routed_share=counts.active_experts / counts.experts if counts.experts else 1.0,
    )


def _job(rows: Rows, block_size: int) -> JobTokens:
    """The rows as the engine computes them: less what its prefix cache holds, spread evenly over them."""
    whole = max(1, int(rows.prompt.sum()))
    cached = (rows.prompt * (rows.shared.get(block_size, 0) / whole)).astype(np.int64)
    job = job_tokens(rows.prompt, rows.output, cached)
    # The other answers to a prompt find it in the prefix cache.
    each = rows.answers_each
    return replace(
        job,
        requests=rows.answers,
        decode_tokens=round(each * job.decode_tokens),
        decode_pairs=round(each * job.decode_pairs),
    )


def _held_once(job: JobTokens, rows: Rows, block_size: int, steps: int) -> JobTokens:
    """The job with its context as steps are measured: what is in the KV cache, where shared prefixes are once."""
    whole = max(1, int(rows.prompt.sum()))
    own = 1 - rows.shared.get(block_size, 0) / whole
    decodes = np.maximum(rows.output - 1, 0)
    alone = float((decodes * (rows.prompt * own / rows.answers_each + decodes / 2)).sum()) * rows.answers_each
    return replace(job, decode_pairs=round(alone + steps * rows.resident.get(block_size, 0)))


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
    own = (rows.prompt * (1 - shared) / rows.answers_each + rows.output / 2).astype(np.int64)
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


def _by_rates(work: ModelWork, job: JobTokens, steps: int, device: Device, dtype: str, gpus: int, slow: float) -> Range:
    """Seconds by what engines usually reach of a device's rates; `slow`: how many times longer the format takes."""
    low, middle, high = (
        slow * StepModel.assumed(work, device, dtype, share, gpus, _STEP_HOST_S).job_s(job, steps)
        for share in _EFFICIENCY[device.kind]
    )
    return Range(high, middle, low)
