"""Geometry and namespaces of an engine's blocks.

Everything that changes the bytes or the meaning of a block is part of the namespace: equal keys must mean equal KV. Inputs
that vLLM's block hash covers (tokens, LoRA, multimodal inputs, cache salt) are not repeated here.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

from reprise import Layout, Namespace, TenantKeys
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
"""Hash algorithms whose chains are equal in all processes without an external seed."""


@dataclass(frozen=True)
class Geometry:
    """Blocks of one rank, with the namespaces of all ranks for matches."""

    layer_names: tuple[str, ...]
    """Names of the layers in the order of a block's objects."""
    block_tokens: int
    rank: int
    namespaces: tuple[Namespace, ...]
    """Namespace of each tensor-parallel rank."""

    @property
    def layout(self) -> Layout:
        """Layout of this rank's blocks."""
        return self.namespaces[self.rank].layout

    @property
    def namespace(self) -> Namespace:
        """Namespace of this rank's blocks."""
        return self.namespaces[self.rank]


def read(config: VllmConfig, kv_cache: KVCacheConfig, options: Options, rank: int) -> Geometry:
    """Returns the geometry of an engine's blocks.

    Args:
        config: vLLM's configuration.
        kv_cache: KV cache configuration as resolved by vLLM.
        options: options of the connector.
        rank: rank of this process in its tensor-parallel group.

    Raises:
        ValueError: Reprise does not support the engine's KV; the message has the remedy.
    """
    check_prefixes(config, kv_cache)
    spec, layers = _single_full_attention_group(kv_cache)
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"Reprise does not support {name} > 1 yet: set it to 1")
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise ValueError(
            f"Reprise does not support the KV cache dtype {spec.dtype}: use bfloat16, float16, float32 or fp8"
        )
    if spec.page_size_bytes != spec.unpadded_page_size_bytes:
        raise ValueError(
            "Reprise does not support padded KV cache pages: this model's layers have pages of different sizes"
        )
    if kv_cache.hash_block_size not in (None, spec.block_size):
        raise ValueError(
            f"Reprise needs one hash per block, but hashes cover {kv_cache.hash_block_size} tokens and blocks have "
            f"{spec.block_size}: unset prefix_match_unit"
        )
    element_bytes = torch.empty((), dtype=spec.dtype).element_size()
    heads = spec.num_heads
    row_bytes = spec.page_size_bytes // (heads * spec.block_size)
    algorithm = config.cache_config.prefix_caching_hash_algo
    kv_layout = kv_cache.kv_cache_layout or "LBHNC"
    tp = parallel.tensor_parallel_size
    revision = model_digest(config, options.weights_digest)
    # The namespaces of all ranks have one salt, which the session of one of them learns.
    tenant = TenantKeys(options.tenant)
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
                tenant=tenant,
            )
        )
    return Geometry(layer_names=tuple(layers), block_tokens=spec.block_size, rank=rank, namespaces=tuple(namespaces))


def inner_order(config: VllmConfig, spec: AttentionSpec) -> str:
    """Returns a description of the value order within a block of a layer, beyond its shape.

    vLLM's CPU kernels choose the order by the processor: with AMX, bfloat16 is stored in tiles. It may change between
    releases.
    """
    from vllm.v1.attention.backends import cpu_attn

    head_size, cache_dtype = spec.head_size, config.cache_config.cache_dtype
    try:
        order = cpu_attn._get_attn_isa(config.model_config.dtype, spec.block_size, head_size, cache_dtype)
    except NotImplementedError:
        # No kernel supports this cache; vLLM itself rejects the engine.
        order = "none"
    return f"{platform.machine()}:{order}:{vllm_release()}"


def vllm_release() -> str:
    """Returns vLLM's major and minor version: the byte order inside a block may change with each release."""
    return ".".join(vllm.__version__.split("+")[0].split(".")[:2])


def _layout(**dimensions: Any) -> Layout:
    """Returns the layout; raises ValueError with all dimensions if they are out of range."""
    try:
        return Layout(**dimensions)
    except (OverflowError, ValueError) as error:
        sizes = ", ".join(f"{name} {value}" for name, value in dimensions.items())
        raise ValueError(
            f"Reprise does not support the blocks of this engine ({sizes}): {error}. Set another --block-size"
        ) from error


def check_prefixes(config: VllmConfig, kv_cache: KVCacheConfig) -> None:
    """Checks that the KV of a prefix does not depend on the tokens after it.

    If it does, vLLM disables its prefix caching, for the whole engine or in the layers' specification.

    Raises:
        ValueError: the KV depends on later tokens, or prefix caching is off; the message has the remedy.
    """
    if any(getattr(group.kv_cache_spec, "non_causal", False) for group in kv_cache.kv_cache_groups):
        raise ValueError(
            "Reprise does not support layers that attend to later tokens (non_causal): the KV of a prefix differs between "
            "prompts. Run this model without the connector"
        )
    if not config.cache_config.enable_prefix_caching:
        raise ValueError(
            "Reprise needs vLLM's prefix caching, which is off in this engine: remove --no-enable-prefix-caching. If that option "
            "is not set, vLLM has disabled prefix caching because the KV of this model cannot be reused (see its log): run the "
            "model without the connector"
        )


def _single_full_attention_group(kv_cache: KVCacheConfig) -> tuple[AttentionSpec, list[str]]:
    groups = kv_cache.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        raise ValueError(
            f"Reprise supports models with one group of full attention; this model has {len(groups)} KV cache groups ({kinds})"
        )
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec | MLAAttentionSpec):
        raise ValueError(f"Reprise supports full attention; this model's KV cache is a {type(spec).__name__}")
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        raise ValueError(
            "Reprise supports full attention; this model's layers have an attention window, and vLLM drops blocks behind it"
        )
    return spec, list(groups[0].layer_names)


def hash_seed(algorithm: str) -> str:
    """Returns the seed of vLLM's prefix chain, which must be equal in all processes that share blocks.

    This is the text of ``PYTHONHASHSEED``, if set; vLLM also uses "random" literally as a seed.

    Raises:
        ValueError: the algorithm uses a random seed; the message has the remedy.
    """
    import os

    from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if algorithm in SHARED_SEED_ALGORITHMS:
        return DEFAULT_NONE_HASH_SEED
    raise ValueError(
        f"block hashes of {algorithm!r} differ between processes, so no block would ever be found: "
        "set --prefix-caching-hash-algo sha256_cbor, or the same PYTHONHASHSEED for every engine"
    )
