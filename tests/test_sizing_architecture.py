"""A model from its config.json: how its layers cache, how many parameters it has. Figures of public models, by hand."""

from typing import Any

import pytest

from bulkgen.errors import SpecError
from bulkgen.sizing import Architecture
from bulkgen.sizing.layer_caches import LayerCache, LayerGroup
from tests import sizing_models as models


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def caches(config: dict[str, Any]) -> list[tuple[int, str, int, int, int | None]]:
    groups = Architecture.of(config).groups
    return [(g.layers, g.cache.kind, g.cache.kv_heads, g.cache.head_size, g.cache.window) for g in groups]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (models.SMOLLM2_135M, [(30, "full", 3, 64, None)]),  # 576 / 9 heads
        (models.LLAMA_31_8B, [(32, "full", 8, 128, None)]),
        (models.LLAMA_2_7B, [(32, "full", 32, 128, None)]),  # as many KV heads as heads
        (models.FALCON_7B, [(32, "full", 1, 64, None)]),  # 4544 / 71 heads
        (models.STARCODERBASE, [(40, "full", 1, 128, None)]),  # 6144 / 48 heads
        (models.DEEPSEEK_V2_LITE, [(27, "mla", 1, 576, None)]),  # 512 + 64
        (models.DEEPSEEK_V3, [(61, "mla", 1, 576, None)]),
        (models.GEMMA_2_9B, [(21, "sliding", 8, 256, 4096), (21, "full", 8, 256, None)]),
        (models.GEMMA_3_27B, [(52, "sliding", 16, 128, 1024), (10, "full", 16, 128, None)]),  # each sixth is full
        (models.MISTRAL_7B, [(32, "sliding", 8, 128, 4096)]),
        (models.QWEN_25_7B, [(28, "full", 4, 128, None)]),  # its window is not used
        (models.MIXTRAL_8X7B, [(32, "full", 8, 128, None)]),  # its window is null
        (models.GPT_OSS_20B, [(12, "sliding", 8, 64, 128), (12, "full", 8, 64, None)]),
        (models.LLAMA_4_SCOUT, [(36, "chunked", 8, 128, 8192), (12, "full", 8, 128, None)]),  # each fourth is full
        (models.QWEN3_NEXT_80B, [(36, "state", 0, 0, None), (12, "full", 2, 256, None)]),
        (models.GRANITE_4_H_SMALL, [(36, "state", 0, 0, None), (4, "full", 8, 128, None)]),
        (models.JAMBA, [(28, "state", 0, 0, None), (4, "full", 8, 128, None)]),
    ],
)
def test_layers_are_grouped_by_how_they_cache(config: dict[str, Any], expected: list[tuple[Any, ...]]) -> None:
    assert caches(config) == expected


def test_a_layer_has_as_large_values_as_keys_save_where_one_vector_is_both() -> None:
    assert Architecture.of(models.LLAMA_31_8B).groups == (LayerGroup(32, LayerCache("full", 8, 128, 128)),)
    assert Architecture.of(models.DEEPSEEK_V3).groups == (LayerGroup(61, LayerCache("mla", 1, 576, 0)),)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        # 49152·576 embeddings, tied; 30 layers of 576·64·(9+3+3+9) attention, 3·576·1536 feed-forward, 2·576 norms; 576
        (models.SMOLLM2_135M, 28_311_552 + 30 * (884_736 + 2_654_208 + 1_152) + 576),
        # Twice 128256·4096; 32 layers of 4096·128·(32+8+8+32), 3·4096·14336 and 2·4096; 4096
        (models.LLAMA_31_8B, 2 * 525_336_576 + 32 * (41_943_040 + 176_160_768 + 8_192) + 4_096),
        (models.LLAMA_2_7B, 2 * 131_072_000 + 32 * (67_108_864 + 135_266_304 + 8_192) + 4_096),
    ],
)
def test_parameters_of_plain_models_come_out_exactly(config: dict[str, Any], published: int) -> None:
    assert Architecture.of(config).parameters == published


@pytest.mark.parametrize(
    ("config", "published"),
    [
        # What the models' pages on the hub say of their weights, in billions.
        (models.SMOLLM2_135M, 0.1345),
        (models.LLAMA_31_8B, 8.03),
        (models.LLAMA_2_7B, 6.74),
        (models.FALCON_7B, 6.92),
        (models.STARCODERBASE, 15.52),
        (models.DEEPSEEK_V2_LITE, 15.7),
        (models.DEEPSEEK_V3, 671.0),
        (models.GEMMA_2_9B, 9.24),
        (models.GEMMA_3_27B, 27.0),
        (models.MISTRAL_7B, 7.24),
        (models.QWEN_25_7B, 7.62),
        (models.MIXTRAL_8X7B, 46.7),
        (models.GPT_OSS_20B, 20.9),
        (models.QWEN3_30B_A3B, 30.5),
        (models.QWEN3_NEXT_80B, 79.7),
        (models.GRANITE_4_H_SMALL, 32.2),
        (models.JAMBA, 51.6),
        (models.LLAMA_4_SCOUT, 107.8),
    ],
)
def test_parameters_are_within_a_hundredth_of_what_is_published(config: dict[str, Any], published: float) -> None:
    assert Architecture.of(config).parameters == pytest.approx(published * 1e9, rel=0.01)


def test_a_token_meets_few_experts() -> None:
    mixtral = Architecture.of(models.MIXTRAL_8X7B)
    # 6 of 8 experts of 3·4096·14336 in each of 32 layers are idle: 46.7 - 33.8 = 12.9 billion, as its makers say.
    assert mixtral.parameters - mixtral.active_parameters == 6 * 32 * 176_160_768
    assert mixtral.active_parameters == pytest.approx(12.9e9, rel=0.01)
    # openai/gpt-oss-20b says 3.6 billion, deepseek-ai/DeepSeek-V2-Lite 2.4: without the embedding, which is looked up.
    assert Architecture.of(models.GPT_OSS_20B).matmul_parameters == pytest.approx(3.6e9, rel=0.01)
    assert Architecture.of(models.DEEPSEEK_V2_LITE).matmul_parameters == pytest.approx(2.4e9, rel=0.03)
    assert Architecture.of(models.DEEPSEEK_V3).matmul_parameters == pytest.approx(37e9, rel=0.015)
    assert Architecture.of(models.QWEN3_30B_A3B).active_parameters == pytest.approx(3.3e9, rel=0.02)
    assert Architecture.of(models.LLAMA_4_SCOUT).active_parameters == pytest.approx(17.2e9, rel=0.01)


def test_an_embedding_that_is_also_the_output_is_multiplied_and_one_that_is_not_is_looked_up() -> None:
    tied, untied = Architecture.of(models.SMOLLM2_135M), Architecture.of(models.LLAMA_31_8B)
    assert (tied.tied_embeddings, untied.tied_embeddings) == (True, False)
    assert tied.matmul_parameters == tied.parameters
    assert untied.parameters - untied.matmul_parameters == 128256 * 4096


def test_experts_are_told() -> None:
    found = Architecture.of(models.DEEPSEEK_V3).experts
    assert found is not None
    assert (found.routed, found.per_token, found.shared, found.layers) == (256, 8, 1, 61 - 3)
    assert Architecture.of(models.LLAMA_31_8B).experts is None
    jamba = Architecture.of(models.JAMBA).experts
    assert jamba is not None
    assert jamba.layers == 16  # each second one


def test_weights_in_bytes() -> None:
    llama = Architecture.of(models.LLAMA_31_8B)
    assert llama.weight_bytes() == 2 * 8_030_261_248
    assert llama.weight_bytes("float32") == 4 * 8_030_261_248
    assert llama.weight_bytes(tensor_parallel_size=4) == 8_030_261_248 // 2
    assert Architecture.of(models.GEMMA_2_9B).weight_bytes() == 2 * Architecture.of(models.GEMMA_2_9B).parameters


def test_quantized_weights_take_their_bits_and_their_scales() -> None:
    # Experts of 4 bits and an 8-bit scale for 32: 32·24·3·2880·2880 · 4.25/8 bytes; all else of 2 bytes: 13.8 GB, as
    # the repository's safetensors have.
    gpt_oss = Architecture.of(models.GPT_OSS_20B)
    experts = 32 * 24 * 24_883_200
    assert gpt_oss.weight_bytes() == 10_152_345_600 + 2 * (gpt_oss.parameters - experts)
    assert gpt_oss.weight_bytes() == pytest.approx(13.76e9, rel=0.01)
    # 8 bits but for embedding, output and norms, twice 129280·7168 of 2 bytes.
    assert Architecture.of(models.DEEPSEEK_V3).weight_bytes() == pytest.approx(671.0e9 + 2 * 927e6, rel=0.001)
    gptq = {**models.LLAMA_31_8B, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    # 6,979,321,856 weights of 4 bits and (16 + 4) for each 128, the rest of 16.
    assert Architecture.of(gptq).weight_bytes() == 6_979_321_856 * 4.15625 // 8 + 2 * (2 * 525_336_576 + 266_240)


@pytest.mark.parametrize(
    ("told", "method", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", 4),
        ({"quant_method": "fp8"}, "fp8", 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", 4),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
            "compressed-tensors",
            8,
        ),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "nvfp4", 4),
        ({"quant_method": "new"}, "new", None),
    ],
)
def test_quantization_is_told(told: dict[str, Any], method: str, bits: int | None) -> None:
    found = Architecture.of({**models.LLAMA_31_8B, "quantization_config": told})
    assert found.quantization is not None
    assert (found.quantization.method, found.quantization.bits) == (method, bits)
    if bits is None:
        with pytest.raises(SpecError, match="does not tell its bits"):
            found.weight_bytes()


def test_dtype_is_the_published_one_and_float32_is_served_as_bfloat16() -> None:
    gemma, llama_2 = Architecture.of(models.GEMMA_2_9B), Architecture.of(models.LLAMA_2_7B)
    assert (gemma.dtype, gemma.served_dtype) == ("float32", "bfloat16")
    assert (llama_2.dtype, llama_2.served_dtype) == ("float16", "float16")
    assert Architecture.of({**without(models.LLAMA_2_7B, "torch_dtype"), "dtype": "bfloat16"}).dtype == "bfloat16"
    assert Architecture.of(without(models.LLAMA_2_7B, "torch_dtype")).dtype == "float32"


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (models.LLAMA_31_8B, 131_072),  # the factor of llama3 and yarn is in it already
        (models.DEEPSEEK_V3, 163_840),
        (models.GEMMA_3_27B, 131_072),  # the class's default, and Gemma's factor is in it
        (models.STARCODERBASE, 8192),
        ({**models.LLAMA_2_7B, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16_384),
        (models.FALCON_7B, None),
    ],
)
def test_the_longest_context_is_vllms(config: dict[str, Any], longest: int | None) -> None:
    assert Architecture.of(config).max_positions == longest


def test_windows_are_read_where_each_kind_of_model_has_them() -> None:
    # Qwen's window is used from a layer on; Cohere's layers see one token more; a pattern may be letters.
    qwen = {**models.QWEN_25_7B, "use_sliding_window": True, "max_window_layers": 20}
    assert caches(qwen) == [(20, "full", 4, 128, None), (8, "sliding", 4, 128, 131072)]
    cohere = {**without(models.MISTRAL_7B, "model_type"), "model_type": "cohere2"}
    assert caches(cohere) == [(24, "sliding", 8, 128, 4097), (8, "full", 8, 128, None)]
    exaone = {**models.MISTRAL_7B, "model_type": "exaone4", "sliding_window_pattern": "LLLG"}
    assert caches(exaone) == [(24, "sliding", 8, 128, 4096), (8, "full", 8, 128, None)]
    assert caches({**models.MISTRAL_7B, "sliding_window": None}) == [(32, "full", 8, 128, None)]
    assert caches({**models.MISTRAL_7B, "sliding_window": 0}) == [(32, "full", 8, 128, None)]


def test_a_head_of_its_own_size_is_taken_over_hidden_size_by_heads() -> None:
    assert caches({**models.MISTRAL_7B, "head_dim": 160})[0][3] == 160
    assert caches({**models.MISTRAL_7B, "head_dim": None})[0][3] == 128


@pytest.mark.parametrize(
    "key",
    ["model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "num_experts_per_tok"],
)
def test_what_is_missing_is_named(key: str) -> None:
    config = {**models.QWEN3_30B_A3B}
    del config[key]
    with pytest.raises(SpecError, match=key):
        Architecture.of(config)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_hidden_layers": "32"}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1"),
        ({"num_attention_heads": True}, "num_attention_heads must be a whole number"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types must name the kind of each of the 32 layers"),
        ({"layer_types": ["moebius_attention"] * 32}, "moebius_attention"),
        ({"layer_types": ["linear_attention"] * 32}, "linear layers of a llama model"),
        ({"layer_types": ["sliding_attention"] * 32}, "there is no sliding_window"),
        ({"torch_dtype": "float8"}, "dtype float8"),
        ({"index_topk": 2048}, "index_topk is set"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is set"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is set"),
        ({"model_type": "falcon_h1"}, "falcon_h1"),
    ],
)
def test_what_cannot_be_told_from_it_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        Architecture.of({**models.LLAMA_31_8B, **change})


def test_a_model_without_any_attention_is_refused() -> None:
    with pytest.raises(SpecError, match="no layer has attention"):
        Architecture.of({**models.GRANITE_4_H_SMALL, "layer_types": ["mamba"] * 40})
