"""What to do when an engine found too little memory: from its words to the setting to change. Knows no engine."""

# The first that occurs in what the engine said counts; the words are those of vLLM, CUDA and the C++ library.
_CURES = (
    (
        ("larger than the available kv cache memory", "max seq len"),
        "lower engine.max_model_len, or raise engine.gpu_memory_utilization",
    ),
    (
        ("no available memory for the cache blocks",),
        "the weights leave no room for the KV cache: raise engine.gpu_memory_utilization, or divide the model with "
        "engine.tensor_parallel_size",
    ),
    (
        ("free memory on device", "less than desired gpu memory utilization"),
        "lower engine.gpu_memory_utilization, or end what else uses the device",
    ),
    (
        ("cuda out of memory", "outofmemoryerror", "cuda error: out of memory", "cublas_status_alloc_failed"),
        "lower engine.gpu_memory_utilization, engine.max_num_seqs or engine.max_num_batched_tokens",
    ),
    (
        ("bad_alloc", "cannot allocate memory", "can't allocate memory", "memoryerror", "out of memory"),
        "lower engine.kv_cache_memory_bytes (on a CPU also engine.env VLLM_CPU_KVCACHE_SPACE) or engine.replicas",
    ),
)
KILLED = "perhaps by the kernel, for lack of memory; if so, " + _CURES[-1][1]


def memory_cure(words: str) -> str | None:
    """The setting to change, or None if the words are not about memory."""
    said = words.lower()
    return next((cure for signs, cure in _CURES if any(sign in said for sign in signs)), None)
