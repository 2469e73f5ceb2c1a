"""The KV cache by arithmetic: bytes, groups, blocks, and what vLLM would log. All figures multiplied out by hand."""

from typing import Any

import numpy as np
import pytest

from bulkgen.errors import SpecError
from bulkgen.sizing import Architecture, KvCache, KvSettings
from tests import sizing_models as models

GIB = 1 << 30


def cache(config: dict[str, Any], **settings: Any) -> KvCache:
    wanted = {"max_model_len": 4096, "max_num_batched_tokens": 2048, "device": "cuda", **settings}
    return KvCache.of(Architecture.of(config), KvSettings(**wanted))


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        (models.SMOLLM2_135M, 23_040),  # 2 · 3 heads · 64 · 2 bytes · 30 layers
        (models.LLAMA_31_8B, 131_072),  # 2 · 8 · 128 · 2 · 32
        (models.LLAMA_2_7B, 524_288),  # 2 · 32 · 128 · 2 · 32
        (models.FALCON_7B, 8_192),  # 2 · 1 · 64 · 2 · 32
        (models.STARCODERBASE, 20_480),  # 2 · 1 · 128 · 2 · 40, served as bfloat16
        (models.DEEPSEEK_V2_LITE, 31_104),  # 576 · 2 · 27
        (models.DEEPSEEK_V3, 70_272),  # 576 · 2 · 61
        (models.QWEN_25_7B, 57_344),  # 2 · 4 · 128 · 2 · 28
        (models.MIXTRAL_8X7B, 131_072),  # 2 · 8 · 128 · 2 · 32
        (models.GEMMA_2_9B, 172_032),  # 2 · 8 · 256 · 2 · 21 full layers
        (models.GEMMA_3_27B, 81_920),  # 2 · 16 · 128 · 2 · 10 full layers
        (models.GPT_OSS_20B, 24_576),  # 2 · 8 · 64 · 2 · 12 full layers
        (models.MISTRAL_7B, 0),  # all layers have a window
        (models.LLAMA_4_SCOUT, 196_608),  # 2 · 8 · 128 · 2 · 48: chunked layers cache everything, as is vLLM's default
    ],
)
def test_bytes_of_one_more_token(config: dict[str, Any], token_bytes: int) -> None:
    assert cache(config).bytes_per_token == token_bytes


@pytest.mark.parametrize(
    ("config", "settings", "token_bytes"),
    [
        (models.LLAMA_31_8B, {"kv_cache_dtype": "fp8"}, 65_536),
        (models.LLAMA_31_8B, {"kv_cache_dtype": "fp8_e5m2"}, 65_536),
        (models.LLAMA_31_8B, {"dtype": "float32"}, 262_144),
        (models.LLAMA_31_8B, {"dtype": "float32", "kv_cache_dtype": "bfloat16"}, 131_072),
        (models.DEEPSEEK_V3, {"kv_cache_dtype": "fp8"}, 35_136),  # 576 · 61
        (models.DEEPSEEK_V3, {"kv_cache_dtype": "fp8_ds_mla"}, 40_016),  # 656 · 61
        # 8 KV heads on 4 devices are 2 on each, on 8 one, on 16 still one; a latent cache is whole on each.
        (models.LLAMA_31_8B, {"tensor_parallel_size": 4}, 32_768),
        (models.LLAMA_31_8B, {"tensor_parallel_size": 8}, 16_384),
        (models.LLAMA_31_8B, {"tensor_parallel_size": 16}, 16_384),
        (models.DEEPSEEK_V3, {"tensor_parallel_size": 8}, 70_272),
    ],
)
def test_bytes_follow_dtype_and_devices(config: dict[str, Any], settings: dict[str, Any], token_bytes: int) -> None:
    assert cache(config, **settings).bytes_per_token == token_bytes


def test_a_model_that_asks_for_a_cache_dtype_gets_it() -> None:
    asked = {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    assert cache({**models.LLAMA_31_8B, "quantization_config": asked}).bytes_per_token == 65_536


@pytest.mark.parametrize(
    ("config", "settings", "tokens"),
    [
        (models.LLAMA_31_8B, {"device": "cpu"}, 128),
        (models.LLAMA_31_8B, {"device": "cuda"}, 16),
        (models.LLAMA_31_8B, {"device": "cpu", "block_size": 32}, 32),
        (models.DEEPSEEK_V3, {"device": "cpu", "block_size": 32}, 16),
        (models.DEEPSEEK_V3, {"device": "cpu", "cpu_flags": frozenset({"amx_tile"})}, 128),
        (models.DEEPSEEK_V3, {"device": "cuda"}, 16),
        (models.DEEPSEEK_V3, {"device": "cuda", "kv_cache_dtype": "fp8"}, 64),
        # A state of (16384 - 8192 convolved + 8192) · 3 + 32 · 128 · 128 numbers is 1,097,728 bytes; a token of
        # attention 2 · 2 · 256 · 2 = 2,048, so 16 tokens are 32,768: 33.5, which is 34 times 16.
        (models.QWEN3_NEXT_80B, {"device": "cuda"}, 544),
        # (8192 + 2 · 128) · 3 + 128 · 64 · 128 numbers are 2,147,840 bytes; 16 tokens of 4,096 bytes 65,536: 32.8.
        (models.GRANITE_4_H_SMALL, {"device": "cuda"}, 528),
        # 128 tokens are 524,288 bytes: 4.1. Where the processor has AVX512-BF16, states are kept in float32: 4,244,992
        # bytes, 8.1.
        (models.GRANITE_4_H_SMALL, {"device": "cpu"}, 640),
        (models.GRANITE_4_H_SMALL, {"device": "cpu", "cpu_flags": frozenset({"avx512_bf16"})}, 1152),
        (models.GRANITE_4_H_SMALL, {"device": "cuda", "cpu_flags": frozenset({"avx512_bf16"})}, 528),
        # 8192 · 3 + 8192 · 16 numbers are 311,296 bytes; 16 tokens of 4,096 bytes 65,536: 4.75.
        (models.JAMBA, {"device": "cuda"}, 80),
        # One step of 128 tokens is 524,288 bytes already.
        (models.JAMBA, {"device": "cpu"}, 128),
    ],
)
def test_block_size_is_the_platforms(config: dict[str, Any], settings: dict[str, Any], tokens: int) -> None:
    assert cache(config, **settings).block_size == tokens


def groups(kv: KvCache) -> list[tuple[int, str]]:
    return [(group.layers, group.cache.kind) for group in kv.groups]


def test_layers_of_one_kind_are_one_group() -> None:
    kv = cache(models.LLAMA_31_8B)
    assert (groups(kv), kv.bytes_per_block) == ([(32, "full")], 16 * 131_072)
    assert groups(cache(models.MISTRAL_7B)) == [(32, "sliding")]


def test_layers_of_two_kinds_are_groups_of_as_many_layers_as_the_rarer_kind_has() -> None:
    # 52 sliding layers in groups of 10 are six, of 9, 9, 9, 9, 8 and 8 layers; a block is 10 pages of 131,072 bytes.
    kv = cache(models.GEMMA_3_27B)
    assert groups(kv) == [(n, "sliding") for n in (9, 9, 9, 9, 8, 8)] + [(10, "full")]
    assert kv.bytes_per_block == 10 * (2 * 16 * 128 * 2 * 16)
    assert groups(cache(models.GPT_OSS_20B)) == [(12, "sliding"), (12, "full")]


def test_groups_take_the_larger_number_where_the_kinds_are_about_as_many() -> None:
    # 11 sliding and 8 full of 19 layers: 11 < 8 · 1.5, so two groups of up to 11; with 12 it is three of up to 8 or 6.
    kinds = ["sliding_attention"] * 11 + ["full_attention"] * 8
    kv = cache({**models.GPT_OSS_20B, "num_hidden_layers": 19, "layer_types": kinds})
    assert (groups(kv), kv.bytes_per_block) == ([(11, "sliding"), (8, "full")], 11 * 32_768)
    kinds.append("sliding_attention")
    kv = cache({**models.GPT_OSS_20B, "num_hidden_layers": 20, "layer_types": kinds})
    assert (groups(kv), kv.bytes_per_block) == ([(6, "sliding"), (6, "sliding"), (8, "full")], 8 * 32_768)


def test_without_the_hybrid_manager_all_layers_cache_everything() -> None:
    kv = cache(models.GEMMA_2_9B, disable_hybrid_kv_cache_manager=True)
    assert (groups(kv), kv.bytes_per_token) == ([(42, "full")], 2 * 8 * 256 * 2 * 42)
    # Where all have a window, they keep it.
    assert groups(cache(models.MISTRAL_7B, disable_hybrid_kv_cache_manager=True)) == [(32, "sliding")]
    with pytest.raises(SpecError, match="linear layers"):
        cache(models.JAMBA, disable_hybrid_kv_cache_manager=True)


def test_capacity_of_the_demo_model() -> None:
    # 2 GiB over 128 · 23,040 bytes is 728.2 blocks; vLLM 0.32 logged 93,184 tokens.
    got = cache(models.SMOLLM2_135M, device="cpu", max_model_len=8192).capacity(2 * GIB)
    assert (got.blocks, got.usable_blocks, got.tokens, got.concurrency) == (728, 727, 93_184, 728 / 64)
    assert got.needed_bytes == 8192 * 23_040
    assert got.starts


def test_capacity_of_a_hybrid_on_the_cpu() -> None:
    # 12 layers, 2 of them full: five sliding groups and a full one of 2 · 32,768 bytes a block, so 1 GiB is 16,384.
    # A sequence of 4096 tokens takes 32 blocks, and 32 + 1 in each sliding group: 197. vLLM 0.32 logged 340,654 tokens.
    config = {
        "model_type": "gemma3_text",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "sliding_window": 512,
        "torch_dtype": "bfloat16",
    }
    got = cache(config, device="cpu", max_num_batched_tokens=4096).capacity(GIB)
    assert (got.blocks, got.concurrency, got.tokens) == (16_384, 16_384 / 197, 340_654)


def test_capacity_of_a_latent_cache_on_the_cpu() -> None:
    # 1 GiB over 128 · 4 layers · 1,152 bytes is 1820.4 blocks; vLLM 0.32 logged 232,960 tokens on a CPU with AMX.
    config = {**models.DEEPSEEK_V2_LITE, "num_hidden_layers": 4}
    assert cache(config, device="cpu", cpu_flags=frozenset({"amx_tile"})).capacity(GIB).tokens == 232_960
    # Blocks of 16 are 14,563.6.
    assert cache(config, device="cpu").capacity(GIB).tokens == 14_563 * 16


def test_capacity_of_a_hybrid_on_a_gpu() -> None:
    # Two steps of 8192 tokens may be in flight: a sliding group needs (1023 + 16,384) / 16 = 1088 blocks and one more,
    # the full one 32,768 / 16 = 2048: 6 · 1089 + 2048 = 8582. 20 GiB are 16,384 blocks of 1,310,720 bytes.
    kv = cache(models.GEMMA_3_27B, max_model_len=32_768, max_num_batched_tokens=8192)
    got = kv.capacity(20 * GIB)
    assert (got.blocks, got.concurrency) == (16_384, 16_384 / 8582)
    assert got.tokens == 62_557  # 16,384 · 32,768 / 8582 = 62,557.7
    assert got.needed_bytes == 8582 * 1_310_720
    # With one step in flight (1023 + 8192) / 16 = 575.9: 6 · 577 + 2048 = 5510.
    one = cache(models.GEMMA_3_27B, max_model_len=32_768, max_num_batched_tokens=8192, async_scheduling=False)
    assert one.capacity(20 * GIB).concurrency == 16_384 / 5510


def test_capacity_beside_states() -> None:
    # 36 linear layers are nine groups of four, of which a sequence takes three blocks each; 1000 tokens of attention
    # take two of 528: 29. A block is 4 · 528 · 4,096 = 8,650,752 bytes, of which 8 GiB are 992.
    kv = cache(models.GRANITE_4_H_SMALL, max_model_len=1000)
    assert groups(kv) == [(4, "state")] * 9 + [(4, "full")]
    assert (kv.bytes_per_block, kv.capacity(8 * GIB).concurrency) == (8_650_752, 992 / 29)
    # Without prefix caching it is one block each: 11.
    assert cache(models.GRANITE_4_H_SMALL, max_model_len=1000, enable_prefix_caching=False).capacity(
        8 * GIB
    ).concurrency == pytest.approx(992 / 11)
    assert kv.blocks_needed(1000) == 2 + 9


def test_an_engine_starts_if_one_sequence_fits_beside_the_block_that_is_never_given_out() -> None:
    # 4 GiB are 2048 blocks of 16 · 131,072 bytes; 2047 of them hold 32,752 tokens.
    got = cache(models.LLAMA_31_8B, max_model_len=32_752).capacity(4 * GIB)
    assert (got.starts, got.longest_model_len, got.refusal) == (True, 32_752, None)
    got = cache(models.LLAMA_31_8B, max_model_len=32_753).capacity(4 * GIB)
    assert (got.starts, got.longest_model_len) == (False, 32_752)
    assert got.refusal is not None
    assert "max_model_len 32753 needs 4.00 GiB" in got.refusal
    assert "set max_model_len to 32752 or less" in got.refusal
    assert cache(models.LLAMA_31_8B, max_model_len=32_753).capacity(4 * GIB + 16 * 131_072).starts


@pytest.mark.parametrize("available", [-5, 0, 1, 2 * 16 * 131_072 - 1])
def test_too_little_memory_starts_nothing(available: int) -> None:
    got = cache(models.LLAMA_31_8B).capacity(available)
    assert (got.starts, got.longest_model_len, got.usable_blocks) == (False, 0, 0)
    assert got.refusal is not None
    assert "no max_model_len is short enough" in got.refusal


def test_blocks_of_a_sequence() -> None:
    llama = cache(models.LLAMA_31_8B)
    assert [llama.blocks_needed(n) for n in (1, 16, 17, 1000)] == [1, 1, 2, 63]
    # 5000 tokens are 313 blocks; of the 3976 before the window 248 whole ones are given back: 65 in six groups.
    gemma = cache(models.GEMMA_3_27B)
    assert gemma.blocks_needed(5000) == 313 + 6 * 65
    assert gemma.blocks_needed(100) == 7 * 7
    # A window of 128 not aligned to blocks lies in nine of them, aligned in eight.
    gpt_oss = cache(models.GPT_OSS_20B)
    assert (gpt_oss.blocks_needed(1024), gpt_oss.blocks_needed(1025)) == (64 + 8, 65 + 9)


def test_blocks_of_many_sequences_are_those_of_each() -> None:
    for config in (models.LLAMA_31_8B, models.GEMMA_3_27B, models.GRANITE_4_H_SMALL, models.MISTRAL_7B):
        kv = cache(config)
        lengths = np.arange(1, 9000, 7)
        assert kv.blocks_needed_each(lengths).tolist() == [kv.blocks_needed(int(n)) for n in lengths]


def test_a_window_bounds_what_a_sequence_holds() -> None:
    kv = cache(models.MISTRAL_7B, max_model_len=32_768)
    held = kv.blocks_needed_each(np.arange(1, 32_768))
    assert held.max() == 4096 // 16 + 1
    assert held[0] == 1


def test_a_prompt_is_admitted_by_its_length_and_never_by_more_than_its_layers_ever_hold() -> None:
    kv = cache(models.GEMMA_3_27B, max_model_len=32_768, max_num_batched_tokens=8192)
    assert kv.blocks_to_admit(1000) == 7 * 63
    assert kv.blocks_to_admit(32_000) == 2000 + 6 * 1089


def test_bytes_of_a_sequence() -> None:
    kv = cache(models.LLAMA_31_8B)
    assert kv.request_bytes(17) == 2 * 16 * 131_072
    assert kv.request_bytes() == 4096 * 131_072


@pytest.mark.parametrize(
    ("config", "settings", "told"),
    [
        (models.LLAMA_31_8B, {"tensor_parallel_size": 3}, "must divide the 32 attention heads"),
        ({**models.LLAMA_31_8B, "num_key_value_heads": 6}, {"tensor_parallel_size": 4}, "must divide the 6 KV heads"),
        (models.LLAMA_31_8B, {"kv_cache_dtype": "nvfp4"}, "dtype nvfp4"),
        (models.LLAMA_31_8B, {"kv_cache_dtype": "fp8_ds_mla"}, "dtype fp8_ds_mla"),
        (models.LLAMA_31_8B, {"max_model_len": 0}, "at least 1"),
        (models.QWEN3_NEXT_80B, {"tensor_parallel_size": 0}, "tensor_parallel_size 0"),
    ],
)
def test_what_vllm_would_refuse_is_refused(config: dict[str, Any], settings: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        cache(config, **settings)


def test_states_are_divided_among_devices() -> None:
    # On four devices a state is a quarter: 274,432 bytes; a token 2 · 1 · 256 · 2 = 1,024, 16 of them 16,384: 16.75.
    assert cache(models.QWEN3_NEXT_80B, tensor_parallel_size=4).block_size == 17 * 16
