"""What a block of this engine is, and what its bytes may be shared with.

Everything that changes bytes or meaning of a block is in the namespace: equal keys must mean equal KV. What vLLM's
block hash covers (tokens, LoRA, multimodal inputs, cache salt) is not repeated here.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

from reprise import Layout, Namespace
from reprise.vllm.identity import model_digest, model_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from reprise.vllm.options import Options

DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.uint8: "int8",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}

SHARED_SEED_ALGORITHMS = ("sha256", "sha256_cbor")
"""Algorithms whose chains agree between processes without a seed from outside."""


@dataclass(frozen=True)
class Geometry:
    """Blocks of one rank, and of all ranks for whoever matches."""

    layer_names: tuple[str, ...]
    """Layers in the order of a block's objects."""
    block_tokens: int
    rank: int
    namespaces: tuple[Namespace, ...]
    """One for each tensor-parallel rank."""

    @property
    def layout(self) -> Layout:
        """Of this rank's blocks."""
        return self.namespaces[self.rank].layout

    @property
    def namespace(self) -> Namespace:
        """Of this rank's blocks."""
        return self.namespaces[self.rank]


def read(config: VllmConfig, kv_cache: KVCacheConfig, options: Options, rank: int) -> Geometry:
    """The geometry of an engine's blocks.

    Args:
        config: vLLM's configuration.
        kv_cache: as vLLM has resolved it.
        options: of the connector.
        rank: of this process in its tensor-parallel group.

    Raises:
        ValueError: the engine has KV that Reprise cannot keep, and what to do.
    """
    check_prefixes(config, kv_cache)
    spec, layers = _single_full_attention_group(kv_cache)
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"Reprise does not keep KV of engines with {name} > 1 yet: set it to 1")
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise ValueError(
            f"Reprise does not know the KV cache dtype {spec.dtype}: use bfloat16, float16, float32 or fp8"
        )
    if spec.page_size_bytes != spec.unpadded_page_size_bytes:
        raise ValueError(
            "Reprise does not keep padded KV cache pages: this model's layers have pages of different sizes"
        )
    if kv_cache.hash_block_size not in (None, spec.block_size):
        raise ValueError(
            f"Reprise keeps blocks as vLLM hashes them; here hashes are of {kv_cache.hash_block_size} tokens and blocks of "
            f"{spec.block_size}: unset prefix_match_unit"
        )
    element_bytes = torch.empty((), dtype=spec.dtype).element_size()
    heads = spec.num_heads
    row_bytes = spec.page_size_bytes // (heads * spec.block_size)
    algorithm = config.cache_config.prefix_caching_hash_algo
    kv_layout = kv_cache.kv_cache_layout or "LBHNC"
    tp = parallel.tensor_parallel_size
    revision = model_digest(config, options.weights_digest)
    namespaces = []
    for tp_rank in range(tp):
        layout = _layout(
            layers=len(layers),
            parts=1,
            kv_heads=heads,
            head_dim=row_bytes // element_bytes,
            dtype=dtype,
            tokens_per_block=spec.block_size,
            tp_rank=tp_rank,
            tp_size=tp,
        )
        namespaces.append(
            Namespace(
                model=options.model_id or model_name(config),
                revision=revision,
                layout=layout,
                hash_algorithm=algorithm,
                hash_seed=hash_seed(algorithm),
                engine_format=f"vllm:{kv_layout}:{spec.kv_quant_mode.name}:{inner_order(config, spec)}",
                tenant_salt=tenant_salt(options.tenant),
            )
        )
    return Geometry(layer_names=tuple(layers), block_tokens=spec.block_size, rank=rank, namespaces=tuple(namespaces))


def inner_order(config: VllmConfig, spec: AttentionSpec) -> str:
    """What decides where values lie within a block of a layer, beside its shape.

    vLLM's kernels for CPUs choose that by the processor: with AMX, bfloat16 is kept in tiles. They may choose otherwise in another release.
    """
    from vllm.v1.attention.backends import cpu_attn

    head_size, cache_dtype = spec.head_size, config.cache_config.cache_dtype
    try:
        order = cpu_attn._get_attn_isa(config.model_config.dtype, spec.block_size, head_size, cache_dtype)
    except NotImplementedError:
        # No kernel here takes this cache: vLLM says so itself.
        order = "none"
    return f"{platform.machine()}:{order}:{vllm_release()}"


def vllm_release() -> str:
    """Major and minor version: what a block holds inside is vLLM's own business, and no promise of it lasts longer."""
    return ".".join(vllm.__version__.split("+")[0].split(".")[:2])


def _layout(**dimensions: Any) -> Layout:
    """The layout, or in words why there is none."""
    try:
        return Layout(**dimensions)
    except (OverflowError, ValueError) as error:
        sizes = ", ".join(f"{name} {value}" for name, value in dimensions.items())
        raise ValueError(
            f"Reprise cannot keep blocks of this engine ({sizes}): {error}. Set another --block-size"
        ) from error


def check_prefixes(config: VllmConfig, kv_cache: KVCacheConfig) -> None:
    """Checks that this engine's KV of a prefix is the same whatever follows it.

    vLLM switches its prefix caching off where it is not, for the whole engine or by the layers' specification.

    Raises:
        ValueError: it is not, or nobody says that it is, and what to do.
    """
    if any(getattr(group.kv_cache_spec, "non_causal", False) for group in kv_cache.kv_cache_groups):
        raise ValueError(
            "Reprise does not keep KV of layers that attend to what follows (non_causal): a prefix's KV is another in every "
            "prompt. Leave the connector out for this model"
        )
    if not config.cache_config.enable_prefix_caching:
        raise ValueError(
            "vLLM's prefix caching is off in this engine, and Reprise keeps prefixes: remove --no-enable-prefix-caching. If it is "
            "not set, vLLM has switched it off because this model's KV cannot be reused here (its log says so): leave the "
            "connector out"
        )


def _single_full_attention_group(kv_cache: KVCacheConfig) -> tuple[AttentionSpec, list[str]]:
    groups = kv_cache.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        raise ValueError(
            f"Reprise keeps models with one group of full attention; this one has {len(groups)} KV cache groups ({kinds})"
        )
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec | MLAAttentionSpec):
        raise ValueError(f"Reprise keeps full attention; this model's KV cache is a {type(spec).__name__}")
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        raise ValueError(
            "Reprise keeps full attention; this model's layers see a window: blocks behind it are missing in vLLM's memory"
        )
    return spec, list(groups[0].layer_names)


def tenant_salt(tenant: str) -> str:
    """What keeps a tenant's keys apart from those of others."""
    return "" if tenant == "default" else tenant


def hash_seed(algorithm: str) -> str:
    """The seed of vLLM's prefix chain, which every process that shares blocks must have.

    ``PYTHONHASHSEED``, whatever it says: "random" is a seed like any other to vLLM.

    Raises:
        ValueError: an algorithm whose seed is random, and what to do.
    """
    import os

    from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if algorithm in SHARED_SEED_ALGORITHMS:
        return DEFAULT_NONE_HASH_SEED
    raise ValueError(
        f"block hashes of {algorithm!r} differ between processes, so nothing would ever be found: "
        "set --prefix-caching-hash-algo sha256_cbor, or the same PYTHONHASHSEED for every engine"
    )
