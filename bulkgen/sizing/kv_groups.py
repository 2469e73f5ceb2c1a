"""Layers in groups that share a block table, and blocks of one size for all: how vLLM lays out its KV cache.

Follows vLLM 0.32: `vllm/v1/core/kv_cache_utils.py` (`get_kv_cache_groups` and what it calls),
`vllm/v1/kv_cache_interface.py` (sizes, and the most blocks of a sequence, for each kind of layer) and
`vllm/platforms/` (block sizes). Without speculative decoding, pipeline or context parallelism.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np
import numpy.typing as npt

from bulkgen.errors import SpecError
from bulkgen.sizing.architecture import Architecture
from bulkgen.sizing.layer_caches import LayerCache, LayerGroup

_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
}
# Of one token and layer: formats of latent caches that hold scales within (vllm/model_executor/layers/attention/
# mla_attention.py).
_LATENT_BYTES: Mapping[str, int] = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
# What the attention kernels' blocks are multiples of: CPU_ATTN, and FLASH_ATTN or TRITON_ATTN.
KERNEL_BLOCK: Mapping[str, int] = {"cpu": 32, "cuda": 16}
_BLOCK: Mapping[str, int] = {"cpu": 128, "cuda": 16}


@dataclass(frozen=True, slots=True)
class KvSettings:
    """What the cache depends on besides the model: vLLM's settings by their own names, and the device.

    `block_size`: tokens; None lets the platform choose. `dtype` and `kv_cache_dtype`: "auto" or a name.
    `async_scheduling`: None is vLLM's default, on where the device is a GPU.
    `cpu_flags`: Linux's names for the CPU's instructions, where the device is one.
    """

    max_model_len: int
    max_num_batched_tokens: int
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    device: Literal["cpu", "cuda"] = "cuda"
    async_scheduling: bool | None = None
    enable_prefix_caching: bool = True
    disable_hybrid_kv_cache_manager: bool = False
    cpu_flags: frozenset[str] = frozenset()

    @property
    def tokens_in_flight(self) -> int:
        """Most tokens that are scheduled and not yet settled (`VllmConfig.max_in_flight_tokens`)."""
        # vllm/platforms/cpu.py turns it off, whatever is asked for.
        asynchronous = self.device != "cpu" and self.async_scheduling is not False
        return self.max_num_batched_tokens * (2 if asynchronous else 1)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table. `state_blocks`: most that a sequence takes of layers with a state, else 0."""

    layers: int
    cache: LayerCache
    block_size: int
    state_blocks: int = 0

    def most_blocks(self, tokens: int, in_flight: int) -> int:
        """Most blocks that a sequence of `tokens` ever holds, while tokens in flight are not yet settled.

        `max_memory_usage_bytes` and `max_admission_blocks_per_request` of vLLM's specs, over the page size.
        """
        kind, window = self.cache.kind, self.cache.window or 0
        if kind == "state":
            return self.state_blocks
        if kind == "sliding":
            return whole(min(window - 1 + in_flight, tokens), self.block_size) + 1
        if kind == "chunked":
            return whole(min(window + in_flight, tokens), self.block_size)
        return whole(tokens, self.block_size)

    def held(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Blocks that sequences hold while the last of their `tokens` (each at least 1) is computed.

        Whole blocks before the window are given back, and states but the last: `get_num_skipped_tokens` and
        `remove_skipped_blocks` in vllm/v1/core/single_type_kv_cache_manager.py. For the one step in which a sequence
        comes to a new block, vLLM holds one block more of layers with a state.
        """
        blocks: npt.NDArray[np.int64] = -(-tokens // self.block_size)
        window = self.cache.window or 0
        if self.cache.kind == "state":
            return np.ones_like(tokens)
        if self.cache.kind == "sliding":
            blocks -= np.maximum(tokens - window, 0) // self.block_size
        elif self.cache.kind == "chunked":
            blocks -= (tokens - 1) // window * window // self.block_size
        return blocks


def cache_groups(architecture: Architecture, settings: KvSettings) -> tuple[tuple[CacheGroup, ...], int, int]:
    """The groups of a model's layers, tokens in a block of its attention layers, and bytes of a block on each device.

    Raises SpecError for what vLLM would refuse, and for what is not known.
    """
    _check_parallel(architecture, settings.tensor_parallel_size)
    sizes = {group.cache: token_bytes(architecture, group.cache, settings) for group in architecture.groups}
    block_size = _block_size(settings, sizes)
    layers = _promoted(architecture.groups, settings)
    blocks, page = _pages([group.cache for group in layers], sizes, block_size, settings)
    groups = tuple(CacheGroup(n, cache, blocks[cache], _state_blocks(cache, settings)) for cache, n in _split(layers))
    return groups, block_size, page * max(group.layers for group in groups)


def _state_blocks(cache: LayerCache, settings: KvSettings) -> int:
    """Most blocks a sequence takes of layers with a state (`MambaSpec.max_memory_usage_bytes`); 0 of all others.

    Beside prefix caching (`mamba_cache_mode` "align") its last state and a new one, and with Mamba 2 one more, from
    within a prefill (vllm/model_executor/layers/mamba/mamba_mixer2.py).
    """
    if cache.state is None:
        return 0
    if not settings.enable_prefix_caching:
        return 1
    return 3 if cache.state.kind == "mamba2" else 2


def token_bytes(architecture: Architecture, cache: LayerCache, settings: KvSettings) -> int:
    """Bytes that one token takes in one layer on each device; of a layer with a state, what a sequence takes.

    From `AttentionSpec.unpadded_page_size_bytes`, `MLAAttentionSpec` and `MambaSpec` (vllm/v1/kv_cache_interface.py).
    KV heads are divided among devices, each has one at least; a latent cache is on each device whole.
    Raises SpecError for a dtype whose size is not known.
    """
    dtype = architecture.served_dtype if settings.dtype == "auto" else settings.dtype
    if cache.state is not None:
        convolution, recurrent = cache.state.elements(settings.tensor_parallel_size)
        # CpuPlatform.check_and_update_config.
        widened = settings.device == "cpu" and "avx512_bf16" in settings.cpu_flags
        return convolution * _size(dtype) + recurrent * _size("float32" if widened else cache.state.dtype or dtype)
    name = settings.kv_cache_dtype
    if name == "auto":
        quantization = architecture.quantization
        name = (quantization.kv_cache_dtype if quantization else None) or dtype
    if cache.kind == "mla":
        return _LATENT_BYTES[name] if name in _LATENT_BYTES else cache.head_size * _size(name)
    heads = max(1, cache.kv_heads // settings.tensor_parallel_size)
    return heads * (cache.head_size + cache.value_size) * _size(name)


def _size(dtype: str) -> int:
    if dtype not in _BYTES:
        raise SpecError(f"KV cache dtype {dtype}: its size is not known; known are {', '.join(_BYTES)}")
    return _BYTES[dtype]


def _check_parallel(architecture: Architecture, devices: int) -> None:
    """vLLM wants query heads divided evenly, and KV heads either divided or repeated evenly."""
    if devices < 1 or architecture.query_heads % devices:
        raise SpecError(
            f"tensor_parallel_size {devices}: must divide the {architecture.query_heads} attention heads of the model"
        )
    for group in architecture.groups:
        heads = group.cache.kv_heads
        if group.cache.kind not in ("mla", "state") and heads % devices and devices % heads:
            raise SpecError(f"tensor_parallel_size {devices}: must divide the {heads} KV heads, or be divided by them")


def _block_size(settings: KvSettings, sizes: Mapping[LayerCache, int]) -> int:
    """Tokens in a block of the attention layers.

    On the CPU 128, and 16 for latent caches without AMX (`CpuPlatform.check_and_update_config`). On a GPU 16, and 64
    for latent caches of 8 bits (FLASHMLA on Hopper, the first to support them); a backend of another GPU may choose
    otherwise (FLASHINFER_MLA on Blackwell 32), for which `block_size` is to be set. Where there are layers with a
    state, as many as make a page of attention no smaller than the state (`Platform._align_hybrid_block_size`).
    """
    latent = any(cache.kind == "mla" for cache in sizes)
    chosen = settings.block_size or _BLOCK[settings.device]
    if latent and settings.device == "cpu" and "amx_tile" not in settings.cpu_flags:
        return 16
    if latent and settings.device == "cuda" and settings.block_size is None and settings.kv_cache_dtype[:3] == "fp8":
        chosen = 64
    state = max((size for cache, size in sizes.items() if cache.kind == "state"), default=0)
    if not state:
        return chosen
    token = next(size for cache, size in sizes.items() if cache.kind != "state")
    kernel = KERNEL_BLOCK[settings.device]
    step = max(kernel, chosen)
    return max(chosen, whole(step * whole(state, step * token), kernel) * kernel)


def _promoted(layers: tuple[LayerGroup, ...], settings: KvSettings) -> list[LayerGroup]:
    """With vLLM's hybrid manager off, layers with a window cache every token beside layers that do.

    Chunked layers turn it off by themselves (`VllmConfig`, unless VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE).
    """
    kinds = {group.cache.kind for group in layers}
    off = settings.disable_hybrid_kv_cache_manager or "chunked" in kinds
    if off and "state" in kinds:
        raise SpecError("disable_hybrid_kv_cache_manager: a model with linear layers cannot do without it")
    if not off or "full" not in kinds:
        return list(layers)
    full = next(group.cache for group in layers if group.cache.kind == "full")
    return [LayerGroup(sum(group.layers for group in layers), full)]


def _pages(
    caches: list[LayerCache], sizes: Mapping[LayerCache, int], block_size: int, settings: KvSettings
) -> tuple[dict[LayerCache, int], int]:
    """Tokens in a block for each kind of layer, and bytes in a page: the same for all of them.

    `unify_kv_cache_spec_page_size`; sliding layers choose their own block (`Attention.get_kv_cache_spec`).
    """
    kernel = KERNEL_BLOCK[settings.device]
    blocks = {
        cache: max(kernel, block_size // kernel * kernel) if cache.kind == "sliding" else block_size for cache in caches
    }
    pages = {cache: blocks[cache] * sizes[cache] for cache in caches if cache.kind != "state"}
    page = max(pages.values())
    for cache, own in pages.items():
        if page % own == 0:
            blocks[cache] *= page // own
    return blocks, page


def _split(layers: list[LayerGroup]) -> list[tuple[LayerCache, int]]:
    """Each kind of layer in groups of the same number of layers (`_get_kv_cache_groups_uniform_page_size`).

    As many as the rarest kind has, or as the most frequent has where it has less than half as many more. A group may
    lack some of its layers: it takes the same memory.
    """
    fewest, most = min(group.layers for group in layers), max(group.layers for group in layers)
    size = most if most < fewest * 1.5 else fewest
    split = []
    for group in layers:
        number = whole(group.layers, size)
        # Layers are dealt out in turn, so that the first groups have one more where they do not come out even.
        split += [(group.cache, ceil((group.layers - i) / number)) for i in range(number)]
    return split


def whole(a: int, b: int) -> int:
    """`a` over `b`, rounded up."""
    return -(-a // b)
