"""What each layer of a model keeps in the KV cache, read from config.json. Layers that keep the same stand together.

The rules are vLLM 0.32's: which layer caches how is decided by each model (`vllm/model_executor/models/`), the window
of models without `layer_types` by `EngineArgs.create_engine_config` (one window for all layers), sizes by
`vllm/transformers_utils/model_arch_config_convertor.py`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bulkgen.errors import SpecError
from bulkgen.sizing.config_keys import ConfigKeys

CacheKind = Literal["full", "sliding", "chunked", "mla", "state"]


@dataclass(frozen=True, slots=True)
class State:
    """What a linear layer keeps of a sequence, however long: a convolution's last inputs and a recurrent state.

    `kind`: "mamba1", "mamba2" or "delta" (gated delta net). Sizes are of the whole model, before tensor parallelism.
    """

    kind: Literal["mamba1", "mamba2", "delta"]
    channels: int
    groups: int
    heads: int
    head_size: int
    state_size: int
    kernel: int
    dtype: str | None = None

    def elements(self, tensor_parallel_size: int) -> tuple[int, int]:
        """Numbers kept on each device: in the convolution, in the state.

        From `MambaStateShapeCalculator` (vllm/model_executor/layers/mamba/mamba_utils.py), without speculation.
        Raises SpecError where vLLM could not divide them.
        """
        devices, groups = tensor_parallel_size, self.groups
        if self.kind == "mamba1":
            convolved, state = self.channels, self.channels * self.state_size
        elif self.kind == "mamba2":
            groups += 0 if groups % devices == 0 else devices - groups
            convolved = self.channels + 2 * groups * self.state_size
            state = self.heads * self.head_size * self.state_size
        else:
            convolved = 2 * groups * self.state_size + self.heads * self.head_size
            state = self.heads * self.head_size * self.state_size
        if convolved % devices or (self.heads or self.channels) % devices:
            raise SpecError(f"tensor_parallel_size {devices}: does not divide the state of the model's linear layers")
        return convolved // devices * (self.kernel - 1), state // devices


@dataclass(frozen=True, slots=True)
class LayerCache:
    """How one layer caches. Heads are of the whole model; sizes are numbers a head, for keys and for values.

    `kind`: "full" keeps every token, "sliding" the last `window`, "chunked" those of the current chunk of `window`,
    "mla" one vector a token for all heads (no values beside it), "state" a fixed state a sequence.
    """

    kind: CacheKind
    kv_heads: int = 0
    head_size: int = 0
    value_size: int = 0
    window: int | None = None
    state: State | None = None


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a model that cache alike."""

    layers: int
    cache: LayerCache


# Multi-head latent attention as vLLM runs it: `is_deepseek_mla`, of which those without sparse or linear layers.
_MLA = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "pangu_ultra_moe", "axk1")
# What is cached otherwise than by the keys read here.
_REFUSED_KEYS: Mapping[str, str] = {
    "index_topk": "sparse attention keeps an index beside the cache",
    "compress_ratios": "the cache is compressed by a ratio of each layer's own",
    "num_kv_shared_layers": "layers share the cache of others",
    "global_head_dim": "heads differ from layer to layer",
    "swa_num_key_value_heads": "heads differ from layer to layer",
    "attention_other_setting": "heads differ from layer to layer",
    "block_configs": "heads differ from layer to layer",
    "attn_config": "its attention is described in a way of its own",
    "cross_attention_layers": "layers cache what an encoder made",
    "is_encoder_decoder": "layers cache what an encoder made",
    "hybrid_override_pattern": "its layers are named in a way of its own",
    "linear_attn_config": "its linear layers are described in a way of its own",
    "attn_type_list": "its linear layers are described in a way of its own",
    "conv_L_cache": "its linear layers are described in a way of its own",
    "rswa_window": "its window leaves the prompt in the cache",
}
_REFUSED_TYPES = ("bamba", "bert", "falcon_h1", "falcon_mamba", "longcat_flash", "mamba", "mamba2", "zamba2")
_KINDS: Mapping[str, CacheKind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "state",
    "mamba": "state",
}


def layer_groups(keys: ConfigKeys) -> tuple[LayerGroup, ...]:
    """The layers of a model, grouped by how they cache, in the order in which each kind first comes.

    Raises SpecError that names the key where a figure is missing, or where the cache cannot be told from config.json.
    """
    refuse_unknown(keys)
    count = Counter(_cache(keys, kind) for kind in layer_kinds(keys))
    if all(cache.kind == "state" for cache in count):
        raise SpecError("config.json: no layer has attention, so there is no KV cache to compute")
    return tuple(LayerGroup(layers, cache) for cache, layers in count.items())


def refuse_unknown(keys: ConfigKeys) -> None:
    """Raises SpecError for a model whose cache does not follow from the keys that are read here."""
    if keys.model_type in _REFUSED_TYPES:
        raise SpecError(f"config.json: the KV cache of a model of the type {keys.model_type} cannot be computed")
    for key, reason in _REFUSED_KEYS.items():
        if keys.get(key):
            raise SpecError(f"config.json: {key} is set: {reason}, so the KV cache cannot be computed")
    if keys.get("kv_lora_rank") is not None and keys.model_type not in _MLA:
        raise SpecError(f"config.json: kv_lora_rank is set, but vLLM has no latent cache for {keys.model_type}")


def layer_kinds(keys: ConfigKeys) -> tuple[CacheKind, ...]:
    """How each layer caches, in the order of the layers. Raises SpecError."""
    layers = keys.number("num_hidden_layers")
    if keys.get("kv_lora_rank") is not None:
        return tuple("mla" for _ in range(layers))
    named = keys.names("layer_types") or keys.names("layers_block_type")
    if named is not None:
        return tuple(_named_kind(name) for name in named)
    default: CacheKind = "sliding" if _window(keys) else "full"
    if (period := keys.get("attn_layer_period")) is not None:
        offset = keys.number_or("attn_layer_offset", 0)
        return tuple("full" if i % period == offset else "state" for i in range(layers))
    if (interval := keys.get("full_attention_interval")) is not None:
        return tuple("full" if (i + 1) % interval == 0 else "state" for i in range(layers))
    if keys.get("attention_chunk_size"):
        return _chunked_kinds(keys, layers)
    if (pattern := keys.get("sliding_window_pattern")) is not None and default == "sliding":
        return _pattern_kinds(pattern, layers)
    if default == "sliding" and (first := keys.get("max_window_layers")) is not None:
        return tuple("sliding" if i >= first else "full" for i in range(layers))
    return (default,) * layers


def _named_kind(name: str) -> CacheKind:
    if name not in _KINDS:
        raise SpecError(f"config.json: layer_types names {name}, which is not known; known are {', '.join(_KINDS)}")
    return _KINDS[name]


def _chunked_kinds(keys: ConfigKeys, layers: int) -> tuple[CacheKind, ...]:
    """Llama 4: layers with rotary embeddings attend within a chunk, those without attend to everything."""
    rotary = keys.numbers("no_rope_layers")
    if not rotary:
        interval = keys.number("no_rope_layer_interval")
        rotary = tuple(int((i + 1) % interval != 0) for i in range(layers))
    if len(rotary) < layers:
        raise SpecError(f"config.json: no_rope_layers must hold a number for each of the {layers} layers")
    return tuple("chunked" if rotary[i] else "full" for i in range(layers))


def _pattern_kinds(pattern: object, layers: int) -> tuple[CacheKind, ...]:
    """Every n-th layer is full; or a string of L (local) and G (global), with which the layers are repeated."""
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return tuple("full" if pattern[i % len(pattern)] == "G" else "sliding" for i in range(layers))
    if isinstance(pattern, int) and pattern > 0:
        return tuple("full" if (i + 1) % pattern == 0 else "sliding" for i in range(layers))
    raise SpecError(f"config.json: sliding_window_pattern must be a whole number above 0, not {pattern!r}")


def _window(keys: ConfigKeys) -> int | None:
    """Tokens in the window of the model's sliding layers; None without one. Raises SpecError."""
    if keys.get("use_sliding_window") is False:
        return None
    window = keys.number_or("sliding_window", 0)
    # Cohere's layers see one token more than the key says (vllm/model_executor/models/commandr.py).
    return window + (keys.model_type == "cohere2") if window else None


def kv_heads(keys: ConfigKeys) -> int:
    """KV heads of the whole model. Raises SpecError."""
    if keys.get("multi_query") and not keys.get("new_decoder_architecture"):
        return 1
    return keys.number_or("num_key_value_heads", 0) or keys.number("num_attention_heads")


def head_size(keys: ConfigKeys) -> int:
    """Numbers in one head. Raises SpecError."""
    own = keys.number_or("head_dim", 0) or keys.number_or("hidden_size_per_head", 0)
    return own or keys.number("hidden_size") // keys.number("num_attention_heads")


def _cache(keys: ConfigKeys, kind: CacheKind) -> LayerCache:
    if kind == "mla":
        # vllm/model_executor/layers/attention/mla_attention.py: one latent vector and one rotary key for all heads.
        return LayerCache("mla", 1, keys.number("kv_lora_rank") + keys.number("qk_rope_head_dim"), 0)
    if kind == "state":
        return LayerCache("state", state=state(keys))
    window = None
    if kind == "sliding":
        window = _window(keys)
        if window is None:
            raise SpecError("config.json: layers are sliding_attention, but there is no sliding_window")
    elif kind == "chunked":
        window = keys.number("attention_chunk_size")
    size = head_size(keys)
    return LayerCache(kind, kv_heads(keys), size, size, window)


def state(keys: ConfigKeys) -> State:
    """What a linear layer keeps. Raises SpecError for a kind of linear layer that is not known."""
    if keys.model_type == "jamba":
        channels = keys.number("mamba_expand") * keys.number("hidden_size")
        return State("mamba1", channels, 0, 0, 0, keys.number("mamba_d_state"), keys.number("mamba_d_conv"))
    if keys.model_type == "granitemoehybrid":
        channels, heads = keys.number("mamba_expand") * keys.number("hidden_size"), keys.number("mamba_n_heads")
        return State(
            "mamba2",
            channels,
            keys.number("mamba_n_groups"),
            heads,
            channels // heads,
            keys.number("mamba_d_state"),
            keys.number("mamba_d_conv"),
        )
    if keys.get("linear_num_value_heads") is not None:
        return State(
            "delta",
            0,
            keys.number("linear_num_key_heads"),
            keys.number("linear_num_value_heads"),
            keys.number("linear_value_head_dim"),
            keys.number("linear_key_head_dim"),
            keys.number("linear_conv_kernel_dim"),
            keys.get("mamba_ssm_dtype"),
        )
    raise SpecError(f"config.json: the state of the linear layers of a {keys.model_type} model cannot be computed")
