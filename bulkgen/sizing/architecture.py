"""A model as its config.json describes it: how its layers cache, how many parameters it has, in which dtype.

From the configuration alone, without weights, torch or a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bulkgen.errors import SpecError
from bulkgen.sizing import parameters as counting
from bulkgen.sizing.config_keys import ConfigKeys
from bulkgen.sizing.layer_caches import LayerGroup, layer_groups
from bulkgen.sizing.parameters import Experts

_DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
# Bits that a quantized weight takes besides its own: those of a scale, and of a zero point, for each group of weights.
_SCALE_BITS: Mapping[str, int] = {"mxfp4": 8, "nvfp4": 8}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model's weights are quantized. `bits` is None where config.json does not tell.

    `group_size`: weights that share a scale, None for a scale a row or matrix, which takes next to nothing.
    `experts_only`: attention and all else is kept in the model's dtype. `kv_cache_dtype`: what the model asks for.
    """

    method: str
    bits: int | None
    group_size: int | None = None
    experts_only: bool = False
    kv_cache_dtype: str | None = None

    def bytes_of(self, weights: int) -> float:
        """Bytes that quantized weights take, with their scales. Raises SpecError."""
        if self.bits is None:
            raise SpecError(f"config.json: quantization_config of the method {self.method} does not tell its bits")
        scale = 0.0
        if self.group_size:
            zero_point = self.bits if self.method in ("gptq", "awq") else 0
            scale = (_SCALE_BITS.get(self.method, 16) + zero_point) / self.group_size
        return weights * (self.bits + scale) / 8


@dataclass(frozen=True, slots=True)
class Architecture:
    """What is needed to know of a model. `dtype` is the published one; `max_positions` is in tokens.

    `intermediate_size`: numbers between the two matmuls of a feed-forward part, of all experts that a token meets.
    `groups`: the layers by how they cache. `counts`: its parameters, by what they are.
    """

    model_type: str
    dtype: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_layers: int
    query_heads: int
    max_positions: int | None
    tied_embeddings: bool
    groups: tuple[LayerGroup, ...]
    experts: Experts | None
    quantization: Quantization | None
    counts: counting.Parameters

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Architecture":
        """Reads a config.json. Raises SpecError with a sentence that names the key that is missing or not known."""
        keys = ConfigKeys(config)
        groups = layer_groups(keys)
        return cls(
            model_type=keys.model_type,
            dtype=_dtype(keys),
            hidden_size=keys.number("hidden_size"),
            intermediate_size=counting.feed_forward_width(keys),
            vocab_size=keys.number("vocab_size"),
            num_layers=keys.number("num_hidden_layers"),
            query_heads=keys.number("num_attention_heads"),
            max_positions=keys.longest_context(),
            tied_embeddings=keys.flag("tie_word_embeddings"),
            groups=groups,
            experts=counting.experts(keys),
            quantization=_quantization(keys),
            counts=counting.count(keys),
        )

    @property
    def served_dtype(self) -> str:
        """What vLLM's `dtype="auto"` makes of the published one: float32 becomes bfloat16 (`_resolve_auto_dtype`)."""
        return "bfloat16" if self.dtype == "float32" else self.dtype

    @property
    def parameters(self) -> int:
        """All parameters of the language model."""
        return self.counts.total

    @property
    def active_parameters(self) -> int:
        """Those that are there for one token: of the experts only as many as it meets."""
        return self.counts.active

    @property
    def matmul_parameters(self) -> int:
        """Those that a token is multiplied with. Two floating-point operations each, besides attention's own."""
        return self.counts.multiplied

    def weight_bytes(self, dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
        """Bytes of weights on each device. Weights that vLLM keeps whole on each device are few and left out.

        Raises SpecError for an unknown dtype, or a quantization whose bits are not known.
        """
        name = self.served_dtype if dtype == "auto" else dtype
        if name not in _DTYPE_BYTES:
            raise SpecError(f"dtype {name}: must be one of {', '.join(_DTYPE_BYTES)}")
        counts, quantized = self.counts, 0
        if self.quantization is not None:
            quantized = counts.experts + (0 if self.quantization.experts_only else counts.matrices)
        total: float = (counts.total - quantized) * _DTYPE_BYTES[name]
        if self.quantization is not None:
            total += self.quantization.bytes_of(quantized)
        return int(total / tensor_parallel_size)


def _dtype(keys: ConfigKeys) -> str:
    """The published dtype; float32 where there is none, as in vLLM (`get_torch_dtype`)."""
    name = str(keys.outer("dtype") or keys.outer("torch_dtype") or "float32").removeprefix("torch.")
    name = {"half": "float16", "float": "float32"}.get(name, name)
    if name not in _DTYPE_BYTES:
        raise SpecError(f"config.json: dtype {name} is not known; known are {', '.join(_DTYPE_BYTES)}")
    return name


def _quantization(keys: ConfigKeys) -> Quantization | None:
    """Of `quantization_config`, or `compression_config` as older compressed tensors call it."""
    found = keys.outer("quantization_config") or keys.outer("compression_config")
    if not isinstance(found, Mapping):
        return None
    method = str(found.get("quant_method") or "").lower().replace("_", "-")
    inner = found.get("quantization")
    told: Mapping[str, Any] = inner if isinstance(inner, Mapping) else found
    if method == "compressed-tensors":
        return _compressed(method, found)
    if method.startswith("modelopt") or "quant_algo" in told:
        return _modelopt(told, found)
    if method == "mxfp4":
        return Quantization(method, 4, 32, experts_only=True)
    if method == "bitsandbytes":
        return Quantization(method, 4, 32) if found.get("load_in_4bit") else Quantization(method, 8)
    if "fp8" in method:
        return Quantization(method, 8)
    bits, group = found.get("bits", found.get("w_bit")), found.get("group_size", found.get("q_group_size"))
    return Quantization(
        method or "unnamed",
        bits if isinstance(bits, int) else None,
        group if isinstance(group, int) and group > 0 else None,
    )


def _compressed(method: str, found: Mapping[str, Any]) -> Quantization:
    groups = found.get("config_groups")
    weights = next((g.get("weights") for g in groups.values()), None) if isinstance(groups, Mapping) else None
    if not isinstance(weights, Mapping):
        return Quantization(method, None)
    return Quantization(method, weights.get("num_bits"), weights.get("group_size"))


def _modelopt(told: Mapping[str, Any], found: Mapping[str, Any]) -> Quantization:
    """ModelOpt's own names. The KV cache dtype it asks for is vLLM's "auto" (`get_kv_cache_quant_algo_string`)."""
    algorithm = str(told.get("quant_algo") or "").upper()
    asked = told.get("kv_cache_scheme") or told.get("kv_cache_quant_algo") or found.get("kv_cache_quant_algo")
    if isinstance(asked, Mapping):
        asked = "fp8" if (asked.get("num_bits"), asked.get("type")) == (8, "float") else None
    # Of other names vLLM takes the model's dtype.
    cache = str(asked).lower() if str(asked).lower() in ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4") else None
    if "FP4" in algorithm:
        return Quantization("nvfp4", 4, 16, kv_cache_dtype=cache)
    return Quantization("modelopt", 8 if "FP8" in algorithm else None, kv_cache_dtype=cache)
