"""The KV cache by arithmetic is vLLM's own, exactly: engines without weights on the CPU, one of each kind of cache."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from bulkgen.engine.demo_model import prepare_demo_model
from bulkgen.engine.devices import divide
from bulkgen.sizing import Architecture, KvCache, KvSettings
from bulkgen.sizing.device import cpu_flags
from bulkgen.sizing.kv_groups import CacheGroup
from bulkgen.sizing.layer_caches import LayerCache

pytestmark = pytest.mark.real

# No whole number of blocks of any of them.
AVAILABLE = 300_000_000

START = """
import json, sys, torch
from vllm import EngineArgs, LLMEngine
from vllm.usage.usage_lib import UsageContext
print("AMX", torch.cpu._is_amx_tile_supported(), "BF16", torch.cpu._is_avx512_bf16_supported())
engine = LLMEngine.from_engine_args(EngineArgs(**json.loads(sys.argv[1])), usage_context=UsageContext.LLM_CLASS)
cache = engine.vllm_config.cache_config
found = [cache.kv_cache_size_tokens, cache.kv_cache_max_concurrency, cache.num_gpu_blocks, cache.block_size]
print("FOUND", json.dumps(found))
"""

COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}
HYBRID: dict[str, Any] = {
    **COMMON,
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 14,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as many KV heads as heads": (
        {**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"block_size": 64},
    ),
    "grouped KV heads of a size of their own": (
        {
            **COMMON,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "num_key_value_heads": 2,
            "head_dim": 128,
        },
        {"dtype": "float16"},
    ),
    "one KV head": (
        {
            **COMMON,
            "model_type": "falcon",
            "architectures": ["FalconForCausalLM"],
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
        },
        {"dtype": "float32"},
    ),
    "a latent cache": (
        {
            **COMMON,
            "model_type": "deepseek_v2",
            "architectures": ["DeepseekV2ForCausalLM"],
            "moe_intermediate_size": 128,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
        {},
    ),
    "layers with a window beside full ones": (HYBRID, {}),
    "layers with a state beside full ones": (
        {
            **COMMON,
            "model_type": "granitemoehybrid",
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "shared_intermediate_size": 256,
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_d_conv": 4,
            "tie_word_embeddings": True,
            "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba"],
        },
        {},
    ),
}


@dataclass(frozen=True)
class Started:
    """What an engine said of its cache; `found` is None where it did not start."""

    found: list[Any] | None
    log: str
    cpu_flags: frozenset[str]


def start(folder: Path, config: dict[str, Any], **args: Any) -> Started:
    """Starts an engine without weights in a process of its own, beside the demo model's tokenizer."""
    for file in prepare_demo_model(print).iterdir():
        if file.name.startswith("tokenizer"):
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config))
    env = {**os.environ, **divide(1, {})[0].env, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    whole = {"model": str(folder), "load_format": "dummy", "enforce_eager": True, "max_num_seqs": 4, **args}
    command = [sys.executable, "-c", START, json.dumps(whole)]
    ended = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, timeout=300)
    log = ended.stdout + ended.stderr
    found = re.search(r"FOUND (.*)", ended.stdout)
    has = {"amx_tile": "AMX True", "avx512_bf16": "BF16 True"}
    flags = frozenset(flag for flag, said in has.items() if said in ended.stdout)
    assert flags == cpu_flags() & set(has), "what torch sees is what the plan sees"
    return Started(json.loads(found[1]) if found else None, log, flags)


def computed(config: dict[str, Any], flags: frozenset[str], **args: Any) -> KvCache:
    names = ("max_model_len", "max_num_batched_tokens", "block_size", "kv_cache_dtype", "dtype")
    settings = {name: args[name] for name in names if name in args}
    return KvCache.of(Architecture.of(config), KvSettings(device="cpu", cpu_flags=flags, **settings))


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_concurrency_are_those_that_vllm_logs(name: str, tmp_path: Path) -> None:
    config, more = MODELS[name]
    args = {"max_model_len": 3000, "max_num_batched_tokens": 700, "kv_cache_memory_bytes": AVAILABLE, **more}
    started = start(tmp_path, config, **args)
    assert started.found is not None, started.log[-3000:]
    kv = computed(config, started.cpu_flags, **args)
    got = kv.capacity(AVAILABLE)
    assert started.found == [got.tokens, got.concurrency, got.blocks, kv.block_size]
    said = f"KV cache size: {got.tokens:,} tokens, Maximum concurrency for 3,000 tokens per request: "
    assert f"{said}{got.concurrency:.2f}x" in started.log
    assert got.starts


def test_an_engine_that_would_not_start_does_not_and_has_the_same_estimate(tmp_path: Path) -> None:
    args = {"max_model_len": 8000, "max_num_batched_tokens": 1000, "kv_cache_memory_bytes": 5_000_000}
    got = computed(HYBRID, frozenset(), **args).capacity(5_000_000)
    started = start(tmp_path, HYBRID, **args)
    assert started.found is None
    assert not got.starts
    said = re.search(r"estimated maximum model length is (\d+)", started.log)
    assert said is not None, started.log[-3000:]
    assert int(said[1]) == got.longest_model_len


Kind = Literal["full", "sliding", "chunked", "state"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "window"), [("full", 0), ("sliding", 40), ("sliding", 64), ("sliding", 100), ("chunked", 64), ("state", 0)]
)
@pytest.mark.parametrize("prompt", [1, 200])
def test_blocks_of_a_sequence_are_those_that_vllms_manager_holds(kind: Kind, window: int, prompt: int) -> None:
    """A prompt in one step, then a token a step."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    manager = own_manager(kind, window)
    group = CacheGroup(1, LayerCache(kind, 1, 1, 1, window or None), 16, 2 if kind == "state" else 0)
    request = Request("one", list(range(prompt)), SamplingParams(max_tokens=1000), None)
    held, lengths = [], []
    while request.num_tokens < 700:
        new = request.num_tokens - request.num_computed_tokens
        assert manager.allocate_slots(request, new) is not None
        blocks = manager.coordinator.single_type_managers[-1].req_to_blocks["one"]
        comes_to_a_new_state = kind == "state" and request.num_tokens % 16 == 1
        if request.num_computed_tokens and not comes_to_a_new_state:
            held.append(sum(not block.is_null for block in blocks))
            lengths.append(request.num_tokens)
        request.num_computed_tokens += new
        request.append_output_token_ids(7)
    assert group.held(np.array(lengths)).tolist() == held


def own_manager(kind: Kind, window: int) -> Any:
    """vLLM's KV cache manager with a group of that kind, beside one of full attention; blocks of 16 tokens."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    register_all_kvcache_specs(None)
    size = {"block_size": 16, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    full = FullAttentionSpec(**size)
    made = {
        "full": lambda: full,
        "sliding": lambda: SlidingWindowSpec(**size, sliding_window=window),
        "chunked": lambda: ChunkedLocalAttentionSpec(**size, attention_chunk_size=window),
        "state": lambda: MambaSpec(16, shapes=((8, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"),
    }[kind]()
    groups = [KVCacheGroupSpec(["beside"], full), KVCacheGroupSpec(["own"], made)]
    blocks = KVCacheConfig(1000, [], groups[1:] if kind == "full" else groups)
    return KVCacheManager(blocks, 8192, 16, 16, max_in_flight_tokens=1024, enable_caching=False)
