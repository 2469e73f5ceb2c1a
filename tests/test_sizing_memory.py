"""Where a device's memory goes, held against what vLLM itself logged."""

from dataclasses import replace

import pytest

from bulkgen.sizing.device import GIB, CpuSpeed, Device, cpu_device, find_device
from bulkgen.sizing.memory import (
    EngineMemory,
    Estimate,
    MemoryBudget,
    ModelMemory,
    activation_bytes,
    capture_sizes,
    cpu_budget,
    gpu_budget,
)

LLAMA_8B = ModelMemory(weights_bytes=round(15.0 * GIB), hidden_size=4096, intermediate_size=14336, vocab_size=128256)
LLAMA_70B = ModelMemory(weights_bytes=141_100_000_000, hidden_size=8192, intermediate_size=28672, vocab_size=128256)
ENGINE = EngineMemory(max_num_batched_tokens=8192, max_num_seqs=256)


def test_what_vllm_logged_lies_in_the_range_and_near_what_is_expected() -> None:
    """vLLM 0.31, Llama 3.1 8B, A100 of 79.25 GiB, defaults of the server: "Available KV cache memory: 56.21 GiB"."""
    engine = EngineMemory(max_num_batched_tokens=2048, max_num_seqs=256)
    budget = gpu_budget(find_device("a100-80"), LLAMA_8B, engine)
    logged = 56.21 * GIB
    assert budget.requested_bytes == pytest.approx(72.91 * GIB, rel=1e-4)
    assert budget.kv_cache.low < logged < budget.kv_cache.high
    assert budget.kv_cache.expected == pytest.approx(logged, rel=0.02)
    assert budget.fault is None


def test_a_large_prefill_is_bound_by_the_feed_forward_block() -> None:
    """vLLM 0.10.2, Mistral 7B with an image encoder, 16,384 tokens a step: "1.97 GiB for peak activation"."""
    mistral = replace(LLAMA_8B, vocab_size=32064)
    peak = activation_bytes(mistral, EngineMemory(max_num_batched_tokens=16384, max_num_seqs=1024))
    assert peak.low <= peak.expected < 1.97 * GIB < peak.high
    assert peak.expected == 16384 * (3 * 14336 + 2 * 4096) * 2


def test_many_sequences_of_a_large_vocabulary_are_bound_by_the_logits() -> None:
    engine = EngineMemory(max_num_batched_tokens=2048, max_num_seqs=1024)
    assert activation_bytes(LLAMA_8B, engine).expected == 1024 * 128256 * (2 + 4 + 4 + 4)
    fewer = replace(engine, max_num_batched_tokens=512)
    assert activation_bytes(LLAMA_8B, fewer).expected == 512 * 128256 * (2 + 4 + 4 + 4)


def test_every_term_is_taken_from_the_share() -> None:
    budget = gpu_budget(find_device("h100"), LLAMA_8B, ENGINE)
    beside = budget.activations.expected + budget.graphs.expected + budget.other.expected
    assert budget.kv_cache.expected == budget.requested_bytes - budget.weights_bytes - beside
    assert budget.kv_cache.low < budget.kv_cache.expected < budget.kv_cache.high
    eager = gpu_budget(find_device("h100"), LLAMA_8B, replace(ENGINE, enforce_eager=True))
    assert eager.graphs == Estimate.exactly(0)
    assert eager.kv_cache.expected - budget.kv_cache.expected == budget.graphs.expected


def test_batch_sizes_with_a_graph() -> None:
    assert capture_sizes(256, 8192) == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert capture_sizes(8, 8192) == [1, 2, 4, 8, 16]
    assert capture_sizes(100, 50) == [1, 2, 4, *range(8, 50, 8), 50]
    assert 100 in capture_sizes(100, 8192)
    assert max(capture_sizes(1024, 8192, 1024)) == 1024


def test_tensor_parallelism_divides_the_weights() -> None:
    two = gpu_budget(find_device("h100"), LLAMA_70B, replace(ENGINE, tensor_parallel_size=2))
    assert two.weights_bytes == 141_100_000_000 // 2
    assert two.fault is None
    assert two.kv_cache.expected > 0


@pytest.mark.parametrize(
    ("device", "cure"),
    [
        ("h100", "divide the model over 2 GPUs (engine.tensor_parallel_size: 2)"),
        ("l40s", "divide the model over 4 GPUs (engine.tensor_parallel_size: 4)"),
        ("t4", "divide the model over 16 GPUs"),
    ],
)
def test_weights_that_do_not_fit_are_said_with_the_cure(device: str, cure: str) -> None:
    budget = gpu_budget(find_device(device), LLAMA_70B, ENGINE)
    assert budget.kv_cache == Estimate.exactly(0)
    assert budget.fault is not None
    assert budget.fault.startswith("the weights take 131.4 GiB of each " + device)
    assert cure in budget.fault
    assert "quantized weights" in budget.fault
    gpus = int(cure.split(" over ")[1].split()[0])
    enough = gpu_budget(find_device(device), LLAMA_70B, replace(ENGINE, tensor_parallel_size=gpus))
    assert enough.fault is None
    too_few = gpu_budget(find_device(device), LLAMA_70B, replace(ENGINE, tensor_parallel_size=gpus // 2))
    assert too_few.fault is not None


def test_what_no_number_of_gpus_holds_needs_another_device() -> None:
    huge = replace(LLAMA_70B, weights_bytes=10_000 * GIB)
    fault = gpu_budget(find_device("t4"), huge, ENGINE).fault
    assert fault is not None
    assert "tensor_parallel_size" not in fault
    assert fault.endswith("use a device with more memory, or quantized weights")


def test_a_cache_set_in_bytes_is_taken_as_it_is() -> None:
    fits = gpu_budget(find_device("h100"), LLAMA_8B, replace(ENGINE, kv_cache_memory_bytes=40 * GIB))
    assert (fits.kv_cache, fits.fault) == (Estimate.exactly(40 * GIB), None)
    more = gpu_budget(find_device("h100"), LLAMA_8B, replace(ENGINE, kv_cache_memory_bytes=70 * GIB))
    assert more.fault is not None
    assert "70.0 GiB of which engine.kv_cache_memory_bytes gives to the KV cache; lower that" in more.fault


CPU: Device = cpu_device(cores=2, memory_bytes=24 * GIB, speed=CpuSpeed(20e9, 50e9), cpuinfo="")
SMALL = ModelMemory(weights_bytes=GIB // 2, hidden_size=576, intermediate_size=1536, vocab_size=49152)


def on_cpu(model: ModelMemory = SMALL, space: int | None = None, cache: int | None = None) -> MemoryBudget:
    return cpu_budget(CPU, model, replace(ENGINE, kv_cache_memory_bytes=cache), space)


def test_on_a_cpu_the_space_that_is_set_is_taken_exactly() -> None:
    assert on_cpu(space=2).kv_cache == Estimate.exactly(2 * GIB)
    assert on_cpu(cache=3 * GIB).kv_cache == Estimate.exactly(3 * GIB)
    assert on_cpu(space=2, cache=3 * GIB).kv_cache == Estimate.exactly(2 * GIB)
    assert on_cpu(space=2).fault is None


def test_on_a_cpu_without_a_space_the_share_of_the_machine_less_the_worker_is_the_cache() -> None:
    budget = on_cpu()
    assert budget.requested_bytes == pytest.approx(0.92 * 24 * GIB)
    assert budget.kv_cache.expected == budget.requested_bytes - SMALL.weights_bytes - budget.other.expected
    assert budget.kv_cache.low < budget.kv_cache.expected < budget.kv_cache.high
    assert budget.fault is None


def test_what_vllm_logged_on_a_cpu_lies_in_the_range_and_near_what_is_expected() -> None:
    """vLLM 0.32, the demo model in float32 (134,515,008 numbers): "Auto set (0.65/11.34) GiB for KV cache"."""
    machine = replace(CPU, memory_bytes=11888376 * 1024)
    demo = replace(SMALL, weights_bytes=4 * 134_515_008, activation_bytes=4)
    budget = cpu_budget(machine, demo, replace(ENGINE, max_num_batched_tokens=4096, gpu_memory_utilization=0.2))
    assert budget.kv_cache.low < 0.65 * GIB < budget.kv_cache.high
    assert budget.kv_cache.expected == pytest.approx(0.65 * GIB, abs=0.05 * GIB)


def test_on_a_cpu_a_space_of_zero_is_no_default() -> None:
    fault = on_cpu(space=0).fault
    assert fault is not None
    assert "VLLM_CPU_KVCACHE_SPACE or engine.kv_cache_memory_bytes is 0" in fault


def test_on_a_cpu_what_does_not_fit_is_said_with_the_cure() -> None:
    too_large = on_cpu(replace(SMALL, weights_bytes=30 * GIB)).fault
    assert too_large is not None
    assert "a machine with more memory, a smaller model or quantized weights" in too_large
    assert on_cpu(replace(SMALL, weights_bytes=30 * GIB), space=1).fault is not None
    too_much = on_cpu(space=23).fault
    assert too_much is not None
    assert "less than the 23.0 GiB set for the KV cache; lower VLLM_CPU_KVCACHE_SPACE" in too_much
