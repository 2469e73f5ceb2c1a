"""How much of a device's memory is left for the KV cache, as vLLM 0.32 divides it.

On a GPU (Worker.determine_available_memory, vllm/v1/worker/gpu_worker.py):

    KV cache = total memory x gpu_memory_utilization     request_memory, v1/worker/utils.py
             - weights and what else stays after start   memory_profiling, utils/mem_utils.py: free before, less after
             - peak of the activations                   one forward pass of max_num_batched_tokens, one sampling step
             - CUDA graphs                               profile_cudagraph_memory: an estimate, not what they take

The CUDA context and NCCL's buffers are there before vLLM counts, so they lie outside of the share. Weights and share
are known; the other terms are estimates, with a range. Everything is bytes of one GPU.
"""

import math
from dataclasses import dataclass, replace

from bulkgen.sizing.device import GIB, Device, gib

MIB = 1 << 20
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes: what is expected, and the range it should lie in."""

    low: int
    expected: int
    high: int

    @classmethod
    def exactly(cls, size: int) -> "Estimate":
        return cls(size, size, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """What of a model takes memory. `weights_bytes` are all its weights, whatever number of GPUs they are divided over.

    `intermediate_size` is the width between a layer's two matmuls; of a mixture of experts, what one token passes
    through: experts a token times their width, and the shared ones'. `activation_bytes` are of one number.
    """

    weights_bytes: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    activation_bytes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """vLLM's settings that decide on memory, by its own names and defaults (CacheConfig, vllm/config/cache.py)."""

    max_num_batched_tokens: int
    max_num_seqs: int
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.92
    enforce_eager: bool = False
    kv_cache_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Where the memory of one GPU goes, or of one replica on a CPU.

    `requested_bytes` is what the engine may take in all. `fault` says why no engine starts, with the cure, or is None;
    it is said where even the expected figure leaves no cache. `kv_cache` is never below 0.
    """

    device: str
    requested_bytes: int
    weights_bytes: int
    activations: Estimate
    graphs: Estimate
    other: Estimate
    kv_cache: Estimate
    fault: str | None = None


def activation_bytes(model: ModelMemory, engine: EngineMemory) -> Estimate:
    """The peak of profile_run (vllm/v1/worker/gpu_model_runner.py and gpu/model_runner.py), on each GPU.

    The forward pass peaks in a layer's feed-forward block: for each of max_num_batched_tokens the gate and the up
    projection, their product (3 x intermediate_size / tensor_parallel_size), the hidden state and the residual. The
    sampling step holds logits of min(max_num_seqs, max_num_batched_tokens) rows over the whole vocabulary: in the
    model's format, in float32, and as float32 probabilities and noise (Sampler.forward, v1/sample/sampler.py; the
    newer runner holds the first two only). The two peaks do not coincide, so the larger is expected; at worst the
    allocator keeps both, and a sorted copy with its indices. Encoders of images and sound are not counted.
    """
    tokens, rows = engine.max_num_batched_tokens, min(engine.max_num_seqs, engine.max_num_batched_tokens)
    width = 3 * model.intermediate_size / engine.tensor_parallel_size + 2 * model.hidden_size
    forward = math.ceil(tokens * width) * model.activation_bytes
    logits = rows * model.vocab_size
    sampled = logits * (model.activation_bytes + _FLOAT32)
    return Estimate(
        low=max(forward, sampled),
        expected=max(forward, sampled + 2 * logits * _FLOAT32),
        high=math.ceil(1.25 * forward) + sampled + 5 * logits * _FLOAT32,
    )


# A graph of one batch size, in what vLLM estimates. Published logs of versions 0.21 to 0.31 ("Profiling CUDA graph
# memory: PIECEWISE=…, FULL=…", "Estimated CUDA graph memory: … GiB total"): 0.36 GiB for 16 graphs, 0.61 for 14, 1.58
# for 86; what they took in the end was as little as a third.
_GRAPH_LOW, _GRAPH_EXPECTED, _GRAPH_HIGH = 2 * MIB, 16 * MIB, 48 * MIB
_LARGEST_GRAPH, _LARGEST_ON_BLACKWELL = 512, 1024
_BLACKWELL = ("b200", "gb200")


def graph_bytes(device: Device, engine: EngineMemory) -> Estimate:
    """CUDA graphs, as vLLM estimates and subtracts them before it has captured one.

    One for each of the capture sizes, and one more for sizes up to max_num_seqs, since decode steps have graphs of
    their own (cudagraph_mode FULL_AND_PIECEWISE). None with enforce_eager.
    """
    if engine.enforce_eager:
        return Estimate.exactly(0)
    largest = _LARGEST_ON_BLACKWELL if device.name in _BLACKWELL else _LARGEST_GRAPH
    sizes = capture_sizes(engine.max_num_seqs, engine.max_num_batched_tokens, largest)
    graphs = len(sizes) + sum(size <= engine.max_num_seqs for size in sizes)
    return Estimate(graphs * _GRAPH_LOW, graphs * _GRAPH_EXPECTED, graphs * _GRAPH_HIGH)


def capture_sizes(max_num_seqs: int, max_num_batched_tokens: int, largest: int = _LARGEST_GRAPH) -> list[int]:
    """Batch sizes that get a CUDA graph, in tokens: 1, 2, 4, every 8th to 256, every 16th from there, and both limits.

    After VllmConfig._set_cudagraph_sizes (vllm/config/vllm.py), without speculative decoding.
    """
    most = min(2 * max_num_seqs, largest, max_num_batched_tokens)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16), max_num_seqs, max_num_batched_tokens}
    return sorted(size for size in sizes if size <= most)


# What stays allocated besides weights ("consumed memory" less "Model loading took …" in published logs): 0.05 to 0.3
# GiB on one GPU, up to 1 GiB where several communicate.
_OTHER = Estimate(low=50 * MIB, expected=300 * MIB, high=1 * GIB)


def gpu_budget(device: Device, model: ModelMemory, engine: EngineMemory) -> MemoryBudget:
    """Where each GPU's memory goes. With `kv_cache_memory_bytes` vLLM takes exactly that for the cache, unasked."""
    requested = math.ceil(device.memory_bytes * engine.gpu_memory_utilization)
    weights = -(-model.weights_bytes // engine.tensor_parallel_size)
    activations, graphs, other = activation_bytes(model, engine), graph_bytes(device, engine), _OTHER
    if engine.kv_cache_memory_bytes is not None:
        cache = Estimate.exactly(engine.kv_cache_memory_bytes)
        requested = device.memory_bytes
        left = requested - weights - activations.expected - other.expected - cache.expected
    else:
        cache = Estimate(
            low=max(0, requested - weights - activations.high - graphs.high - other.high),
            expected=max(0, requested - weights - activations.expected - graphs.expected - other.expected),
            high=max(0, requested - weights - activations.low - graphs.low - other.low),
        )
        left = cache.expected - 1
    budget = MemoryBudget(
        device=device.name,
        requested_bytes=requested,
        weights_bytes=weights,
        activations=activations,
        graphs=graphs,
        other=other,
        kv_cache=cache,
    )
    return budget if left >= 0 else replace(budget, fault=_gpu_fault(budget, device, model, engine))


def _gpu_fault(budget: MemoryBudget, device: Device, model: ModelMemory, engine: EngineMemory) -> str:
    beside = budget.activations.expected + budget.graphs.expected + budget.other.expected
    said = (
        f"the weights take {gib(budget.weights_bytes)} of each {device.name} and the engine about {gib(beside)} "
        f"beside them; of {gib(device.memory_bytes)} it may take {gib(budget.requested_bytes)}"
    )
    if engine.kv_cache_memory_bytes is not None:
        said += f", {gib(engine.kv_cache_memory_bytes)} of which engine.kv_cache_memory_bytes gives to the KV cache"
        return said + "; lower that, or leave it out"
    return f"{said}, so nothing is left for the KV cache; {_gpu_cure(device, model, engine)}"


_MOST_GPUS = 64


def _gpu_cure(device: Device, model: ModelMemory, engine: EngineMemory) -> str:
    gpus = 2 * engine.tensor_parallel_size
    while gpus <= _MOST_GPUS:
        if gpu_budget(device, model, replace(engine, tensor_parallel_size=gpus)).kv_cache.expected > 0:
            return (
                f"divide the model over {gpus} GPUs (engine.tensor_parallel_size: {gpus}), or use a device with more "
                "memory or quantized weights"
            )
        gpus *= 2
    return "use a device with more memory, or quantized weights"


# What a worker on the CPU holds besides the weights when vLLM looks: "1.62 GiB memory was consumed by non-kv usages"
# with 0.50 GiB of weights (vLLM 0.32, the demo model in float32, eager, 4,096 tokens a step).
_CPU_OTHER = Estimate(low=GIB // 2, expected=1100 * MIB, high=2 * GIB)


def cpu_budget(
    device: Device, model: ModelMemory, engine: EngineMemory, kvcache_space_gib: int | None = None
) -> MemoryBudget:
    """Where the memory of one replica on a CPU goes; `kvcache_space_gib` is VLLM_CPU_KVCACHE_SPACE, None where unset.

    Set, it wins over `kv_cache_memory_bytes` and is taken exactly; 0 is no cache at all and not a default
    (CpuPlatform.check_and_update_config, vllm/platforms/cpu.py). With neither the cache is the machine's memory times
    gpu_memory_utilization (whatever its name), less what the worker holds by then
    (CPUWorker.determine_available_memory, vllm/v1/worker/cpu_worker.py). Nothing is profiled: activations come on top,
    out of the rest of the machine.
    """
    weights = -(-model.weights_bytes // engine.tensor_parallel_size)
    space = engine.kv_cache_memory_bytes if kvcache_space_gib is None else kvcache_space_gib * GIB
    requested = math.ceil(device.memory_bytes * engine.gpu_memory_utilization)
    if space is not None:
        cache = Estimate.exactly(space)
        requested = device.memory_bytes
    else:
        rest = requested - weights
        low, expected, high = (max(0, rest - size) for size in (_CPU_OTHER.high, _CPU_OTHER.expected, _CPU_OTHER.low))
        cache = Estimate(low, expected, high)
    budget = MemoryBudget(
        device=device.name,
        requested_bytes=requested,
        weights_bytes=weights,
        activations=activation_bytes(model, engine),
        graphs=Estimate.exactly(0),
        other=_CPU_OTHER,
        kv_cache=cache,
    )
    return replace(budget, fault=_cpu_fault(budget, space))


def _cpu_fault(budget: MemoryBudget, space: int | None) -> str | None:
    held = budget.weights_bytes + budget.other.expected
    if space == 0:
        return "VLLM_CPU_KVCACHE_SPACE or engine.kv_cache_memory_bytes is 0, which is no KV cache: raise it"
    if held + budget.kv_cache.expected <= budget.requested_bytes and budget.kv_cache.expected > 0:
        return None
    said = (
        f"the weights take {gib(budget.weights_bytes)} and the engine about {gib(budget.other.expected)} beside "
        f"them; of this machine it may take {gib(budget.requested_bytes)}"
    )
    if held > budget.requested_bytes or space is None:
        return (
            f"{said}, so nothing is left for the KV cache; use a machine with more memory, a smaller model or "
            "quantized weights"
        )
    return (
        f"{said}, which leaves less than the {gib(space)} set for the KV cache; lower VLLM_CPU_KVCACHE_SPACE or "
        "engine.kv_cache_memory_bytes"
    )
