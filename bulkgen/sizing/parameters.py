"""How many parameters a model has and how many of them one token meets, counted from config.json.

Counted are the matrices and norms of the language model, as its Transformers implementation makes them
(`models/*/modeling_*.py`); left out are biases (below 0.2% of a model), vision parts, and the layers for predicting
several tokens, which vLLM does not load unless asked to.
"""

from dataclasses import dataclass
from math import ceil

from bulkgen.sizing.config_keys import ConfigKeys
from bulkgen.sizing.layer_caches import head_size, kv_heads, layer_kinds, state

# Feed-forward parts of two matrices; all others have three, one of which gates.
_TWO_MATRICES = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "nemotron", "opt", "phi")
_FOUR_NORMS = ("gemma2", "gemma3_text", "glm4")
_NORMED_HEADS = ("gemma3_text", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@dataclass(frozen=True, slots=True)
class Experts:
    """`routed` experts in each of `layers`, of which a token meets `per_token`; and `shared` ones that all meet."""

    routed: int
    per_token: int
    shared: int
    layers: int


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts of parameters. `output` is 0 where it is the embedding; `active_experts` are those of one token."""

    embedding: int
    positions: int
    output: int
    matrices: int
    experts: int
    active_experts: int
    others: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.active - self.active_experts + self.experts

    @property
    def active(self) -> int:
        """Those that are there for one token."""
        rest = self.positions + self.output + self.matrices + self.others
        return self.embedding + rest + self.active_experts

    @property
    def multiplied(self) -> int:
        """Those that one token is multiplied with: an embedding that is not also the output is looked up."""
        return self.matrices + self.active_experts + self.others + (self.output or self.embedding)


def experts(keys: ConfigKeys) -> Experts | None:
    """The experts of a model; None where it has none. Raises SpecError."""
    routed = keys.number_or("num_experts", 0)
    if routed < 2:
        return None
    shared = keys.number_or("n_shared_experts", 0) or keys.number_or("moe_num_shared_experts", 0)
    if keys.model_type == "llama4_text" or keys.get("shared_expert_intermediate_size"):
        shared = 1
    chosen = _expert_layers(keys)
    return Experts(routed, keys.number("experts_per_token"), shared, sum(chosen))


def count(keys: ConfigKeys) -> Parameters:
    """Counts the parameters of a model. Raises SpecError where a figure is missing."""
    hidden, vocabulary = keys.number("hidden_size"), keys.number("vocab_size")
    kinds, sparse = layer_kinds(keys), _expert_layers(keys)
    matrices = others = 0
    for kind in kinds:
        layer, norms = _linear(keys) if kind == "state" else _latent(keys) if kind == "mla" else _attention(keys)
        matrices += layer
        others += norms
    own, found = _expert(keys), experts(keys)
    dense_layers = len(kinds) - sum(sparse)
    matrices += dense_layers * _dense(keys) + len(kinds) * _beside(keys)
    routed = active = 0
    if found is not None:
        routed, active = (found.layers * n * own for n in (found.routed, found.per_token))
        matrices += found.layers * (_shared(keys, found.shared) + found.routed * hidden)
    norms_a_layer = 4 if keys.model_type in _FOUR_NORMS else 2
    others += hidden * (norms_a_layer * len(kinds) + 1)
    embedding = vocabulary * hidden
    output = 0 if keys.flag("tie_word_embeddings") else embedding
    return Parameters(embedding, _positions(keys), output, matrices, routed, active, others)


def _attention(keys: ConfigKeys) -> tuple[int, int]:
    """Matrices and norms of an attention layer."""
    hidden, heads, size = keys.number("hidden_size"), keys.number("num_attention_heads"), head_size(keys)
    # Qwen's layers beside linear ones have queries and gates in one matrix.
    queries = heads * (2 if keys.get("linear_num_value_heads") else 1)
    norms = 2 * size if keys.model_type in _NORMED_HEADS else 0
    return hidden * size * (queries + 2 * kv_heads(keys) + heads), norms


def _latent(keys: ConfigKeys) -> tuple[int, int]:
    """Matrices and norms of multi-head latent attention."""
    hidden, heads, rank = (keys.number(k) for k in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    rotary, plain, values = (keys.number(k) for k in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    inner = keys.number_or("q_lora_rank", 0)
    queries = (hidden + heads * (plain + rotary)) * inner if inner else hidden * heads * (plain + rotary)
    pairs = hidden * (rank + rotary) + rank * heads * (plain + values)
    return queries + pairs + heads * values * hidden, inner + rank


def _linear(keys: ConfigKeys) -> tuple[int, int]:
    """Matrices, and what else there is, of a layer with a state."""
    hidden, s = keys.number("hidden_size"), state(keys)
    if s.kind == "mamba1":
        rank = keys.get("mamba_dt_rank")
        rank = ceil(hidden / 16) if rank in (None, "auto") else keys.number("mamba_dt_rank")
        projections = s.channels * (rank + 2 * s.state_size) + rank * s.channels
        return 3 * hidden * s.channels + projections, s.channels * (s.kernel + 3 + s.state_size)
    if s.kind == "mamba2":
        convolved = s.channels + 2 * s.groups * s.state_size
        projections = hidden * (s.channels + convolved + s.heads) + s.channels * hidden
        return projections, convolved * (s.kernel + 1) + s.channels + 3 * s.heads
    keys_size, values_size = s.groups * s.state_size, s.heads * s.head_size
    projections = hidden * (2 * keys_size + 2 * values_size + 2 * s.heads) + values_size * hidden
    return projections, (2 * keys_size + values_size) * s.kernel + s.head_size + 2 * s.heads


def _expert_layers(keys: ConfigKeys) -> tuple[bool, ...]:
    """For each layer whether it has experts."""
    layers = keys.number("num_hidden_layers")
    if keys.number_or("num_experts", 0) < 2:
        return (False,) * layers
    if (named := keys.numbers("moe_layers")) is not None:
        return tuple(i in named for i in range(layers))
    dense = keys.numbers("mlp_only_layers") or ()
    first = keys.number_or("first_k_dense_replace", keys.number_or("moe_layer_start_index", 0))
    step = keys.number_or("decoder_sparse_step", 0) or keys.number_or("interleave_moe_layer_step", 0) or 1
    period, offset = keys.number_or("expert_layer_period", 1), keys.number_or("expert_layer_offset", 0)
    every = keys.number_or("moe_layer_freq", 1) or 1
    return tuple(
        i >= first and i not in dense and (i + 1) % step == 0 and i % period == offset and i % every == 0
        for i in range(layers)
    )


def _mlp(keys: ConfigKeys, inner: int) -> int:
    matrices = 2 if keys.model_type in (*_TWO_MATRICES, "starcoder2") else 3
    return matrices * keys.number("hidden_size") * inner


def _dense(keys: ConfigKeys) -> int:
    """The feed-forward part of a layer without experts; what stands beside experts in every layer is apart."""
    if keys.get("shared_intermediate_size") is not None:
        return 0
    inner = keys.number_or("intermediate_size_mlp", 0) or keys.number_or("intermediate_size", 0)
    return _mlp(keys, inner or 4 * keys.number("hidden_size"))


def _beside(keys: ConfigKeys) -> int:
    """Granite's feed-forward part that each layer has, with experts or without."""
    return _mlp(keys, keys.number_or("shared_intermediate_size", 0))


def _expert(keys: ConfigKeys) -> int:
    """One routed expert."""
    inner = keys.number_or("moe_intermediate_size", 0) or keys.number_or("intermediate_size", 0)
    return _mlp(keys, inner)


def _shared(keys: ConfigKeys, shared: int) -> int:
    """The shared experts of a layer, and Qwen's gate before them."""
    if inner := keys.number_or("shared_expert_intermediate_size", 0):
        return _mlp(keys, inner) + keys.number("hidden_size")
    return shared * _expert(keys)


def _positions(keys: ConfigKeys) -> int:
    """Embeddings of positions that were learnt."""
    if keys.model_type not in ("gpt2", "gpt_bigcode", "opt"):
        return 0
    positions = keys.longest_context() or 0
    return (positions + (2 if keys.model_type == "opt" else 0)) * keys.number("hidden_size")


def feed_forward_width(keys: ConfigKeys) -> int:
    """Numbers between the two matmuls of the widest feed-forward part, as one token passes through it."""
    hidden = keys.number("hidden_size")
    per_width = _mlp(keys, 1)
    dense = _dense(keys) + _beside(keys)
    found = experts(keys)
    sparse = 0 if found is None else found.per_token * _expert(keys) + _shared(keys, found.shared) + _beside(keys)
    return max(dense, sparse) // per_width or 4 * hidden
