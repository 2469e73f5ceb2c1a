"""Reading a model's config.json: where the language model stands in it, what its figures are called, what is left out.

Transformers leaves out of a published config what equals the defaults of its configuration classes. The few of these
defaults that matter here are written down below (Transformers 5, `models/*/configuration_*.py`).
"""

from collections.abc import Mapping
from typing import Any

from bulkgen.errors import SpecError

# What each figure is called: vLLM's order in `transformers_utils/model_arch_config_convertor.py`, then the names that
# Transformers' `attribute_map` gives in older models.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": (
        "n_head_kv",
        "num_kv_heads",
        "num_key_value_heads",
        "multi_query_group_num",
        "num_attention_groups",
    ),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
    "num_experts": ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k"),
}
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_INNER = ("text_config", "llm_config", "language_config")

_TIED: Mapping[str, Any] = {"tie_word_embeddings": True}
_GEMMA: Mapping[str, Any] = {**_TIED, "head_dim": 256}
_QWEN_WINDOW: Mapping[str, Any] = {"use_sliding_window": False, "max_window_layers": 28}
_QWEN_LINEAR: Mapping[str, Any] = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131_072,
    },
    "cohere": _TIED,
    "cohere2": {**_TIED, "sliding_window": 4096, "sliding_window_pattern": 4},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "ministral3": {"num_key_value_heads": 8, "head_dim": 128},
    "mixtral": {"num_key_value_heads": 8, "num_experts": 8, "experts_per_token": 2},
    "qwen2": _QWEN_WINDOW,
    "qwen2_moe": {**_QWEN_WINDOW, "decoder_sparse_step": 1},
    "qwen3": {**_QWEN_WINDOW, "head_dim": 128},
    "qwen3_moe": {"use_sliding_window": False, "head_dim": 128, "decoder_sparse_step": 1},
    "qwen3_next": _QWEN_LINEAR,
    "qwen3_5_text": _QWEN_LINEAR,
    "qwen3_5_moe_text": _QWEN_LINEAR,
    "llama4_text": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 16_384,
    },
    "deepseek_v2": {"first_k_dense_replace": 0},
    "deepseek_v3": {"first_k_dense_replace": 3, "n_shared_experts": 1},
    "jamba": {
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": "auto",
    },
    "granitemoehybrid": {
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "falcon": {**_TIED, "multi_query": True, "new_decoder_architecture": False},
    "gpt_bigcode": {**_TIED, "multi_query": True},
    "gpt2": _TIED,
    "opt": _TIED,
    "bloom": _TIED,
    "starcoder2": {**_TIED, "num_key_value_heads": 2},
    "smollm3": _TIED,
}


class ConfigKeys:
    """The keys of a language model in a config.json; of the model around it where it is part of a multimodal one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise SpecError("config.json: must hold an object")
        inner = next((config[name] for name in _INNER if isinstance(config.get(name), Mapping)), config)
        self._outer, self._keys = config, inner
        self.model_type = str(inner.get("model_type") or config.get("model_type") or "")
        if not self.model_type:
            raise SpecError("config.json: has no model_type, so the model's architecture is unknown")
        # A multimodal model's text part may carry the name of the whole.
        if inner is not config and f"{self.model_type}_text" in _DEFAULTS:
            self.model_type += "_text"
        self._defaults = _DEFAULTS.get(self.model_type, {})

    def get(self, key: str) -> Any:
        """A key of the model, else the default of its kind, else None. A null is None, whatever the default."""
        names = [name for name in _NAMES.get(key, (key,)) if name in self._keys]
        for name in names:
            if (value := self._keys[name]) is not None:
                return value
        return None if names else self._defaults.get(key)

    def outer(self, key: str) -> Any:
        """A key that may also stand in the model around the language model."""
        value = self.get(key)
        return self._outer.get(key) if value is None else value

    def flag(self, key: str) -> bool:
        """Whether a key is there and true."""
        return bool(self.outer(key))

    def number(self, key: str) -> int:
        """A whole number above 0. Raises SpecError where it is missing or is none."""
        value = self.get(key)
        if value is None:
            names = " or ".join(_NAMES.get(key, (key,)))
            raise SpecError(f"config.json: has no {names}, which a model of the type {self.model_type} needs")
        return self._whole(key, value, 1)

    def number_or(self, key: str, otherwise: int) -> int:
        """A whole number, 0 allowed; `otherwise` where it is missing. Raises SpecError."""
        value = self.get(key)
        return otherwise if value is None else self._whole(key, value, 0)

    def numbers(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None where it is missing. Raises SpecError."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise SpecError(f"config.json: {key} must be a list of whole numbers, not {value!r}")
        return tuple(self._whole(key, one, 0) for one in value)

    def names(self, key: str) -> tuple[str, ...] | None:
        """A list of names, one a layer; None where it is missing or empty. Raises SpecError."""
        value = self.get(key)
        if not value:
            return None
        layers = self.number("num_hidden_layers")
        if not isinstance(value, list) or len(value) < layers:
            raise SpecError(f"config.json: {key} must name the kind of each of the {layers} layers")
        return tuple(str(one) for one in value[:layers])

    def longest_context(self) -> int | None:
        """Positions that the model claims, in tokens; None where it claims none.

        As vLLM derives it: the smallest of several keys, times the factor of RoPE scalings that are not already in it
        (`derive_max_model_len_and_key`, and `_get_and_verify_max_len` in vllm/config/model.py).
        """
        lengths = [self._whole(name, v, 1) for name in _LENGTHS if (v := self.get(name)) is not None]
        if not lengths:
            return None
        longest = self.get("model_max_length") or min(lengths)
        if "gemma3" in self.model_type:
            return int(longest)
        scaling = self.get("rope_scaling") or self.get("rope_parameters") or {}
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
        if kind in ("su", "longrope"):
            return int(self.get("original_max_position_embeddings") or longest)
        if kind in (None, "default", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope"):
            return int(longest)
        return int(longest * (scaling.get("factor") or 1))

    def _whole(self, key: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SpecError(f"config.json: {key} must be a whole number of at least {least}, not {value!r}")
        return value
