"""Chunks of vLLM's shared primary tier: their geometry, keys and memory.

```text
row of a chunk   [ worker 0: layer 0 │ layer 1 │ … ][ worker 1: … ] … [ padding to a page ]
our block        [ piece 0 │ piece 1 │ …  as many as the model has layers          ]
```

A chunk has ``blocks_per_chunk`` blocks of all workers. Their byte order depends only on the namespace
(:func:`_inner_order`). The bytes are stored unchanged in equal pieces, each with its own checksum, without the padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, get_offload_group_idx

from reprise import KvMemory, Layout, Namespace, TenantKeys, block_keys, opaque_layout
from reprise.vllm.geometry import hash_seed, vllm_release

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig

    from reprise.vllm.options import TierOptions


@dataclass(frozen=True)
class Chunks:
    """Chunks of one engine."""

    namespace: Namespace
    group: int

    @property
    def layout(self) -> Layout:
        """Layout of the blocks in Reprise."""
        return self.namespace.layout

    def keys(self, offload_keys: Iterable[OffloadKey], generation: bytes) -> bytes:
        """Returns packed keys.

        Args:
            offload_keys: keys of vLLM's offloading.
            generation: suffix of every hash, which changes with the weights.
        """
        hashes = [get_offload_block_hash(key) + generation for key in offload_keys]
        return block_keys(self.namespace, hashes, group=self.group)

    def is_ours(self, key: OffloadKey) -> bool:
        """Returns whether a key belongs to the cached group."""
        return get_offload_group_idx(key) == self.group

    def memory(self, view: memoryview) -> KvMemory:
        """Wraps vLLM's memory without copying it.

        Raises:
            ValueError: the view is too small for the chunks.
        """
        rows = np.asarray(view)
        expected = self.layout.block_bytes
        if rows.ndim != 2 or rows.itemsize != 1 or rows.shape[1] < expected:
            raise ValueError(
                f"vLLM's primary tier has shape {rows.shape} with {rows.itemsize}-byte elements, too small for chunks of "
                f"{expected} bytes: RepriseTier does not support this version of vLLM"
            )
        rows = rows.view(np.int8)
        piece = self.layout.layer_bytes
        return KvMemory([rows[:, at : at + piece] for at in range(0, expected, piece)], self.layout)


def read(config: OffloadingConfig, is_single_copy: bool, options: TierOptions) -> Chunks:
    """Returns the chunks of an engine.

    Args:
        config: configuration of vLLM's offloading.
        is_single_copy: whether all workers share one copy of a block (``replicated_layout`` of the spec).
        options: options of the tier.

    Raises:
        ValueError: Reprise does not support the engine's chunks; the message has the remedy.
    """
    if not options.model_digest:
        raise ValueError(
            "secondary_tiers: RepriseTier cannot identify the weights of this engine, because vLLM does not pass them to a tier: set "
            '"kv_connector": "RepriseOffloadingConnector" with "kv_connector_module_path": "reprise.vllm.offloading" instead of '
            "OffloadingConnector, or set model_digest to a text that changes with weights, revision, dtype, quantization and "
            "--hf-overrides"
        )
    if not options.hash_algorithm:
        raise ValueError(
            "secondary_tiers: RepriseTier does not know the hash algorithm of this engine, because vLLM does not pass it to a tier: "
            "in addition to model_digest, set hash_algorithm to the value of --prefix-caching-hash-algo (vLLM's default is sha256)"
        )
    group = _full_attention_group(config)
    copies = 1 if is_single_copy else config.parallel.world_size
    tokens = group.tokens_per_block * config.cache.blocks_per_chunk
    payload = config.worker_kv_bytes_per_block * copies * config.cache.blocks_per_chunk
    layout = _layout(payload, tokens, len(group.layer_names))
    parallel = config.parallel
    shape = f"tp{parallel.tp_size}pp{parallel.pp_size}pcp{parallel.pcp_size}dcp{parallel.dcp_size}x{copies}"
    kind = "canonical" if config.canonical_layout else "direct"
    blocks = f"{config.cache.blocks_per_chunk}x{group.tokens_per_block}/{config.cache.tokens_per_hash}"
    namespace = Namespace(
        model=options.model_id or config.model.name,
        revision=options.model_digest,
        layout=layout,
        hash_algorithm=options.hash_algorithm,
        hash_seed=hash_seed(options.hash_algorithm),
        engine_format=f"vllm-chunk:{config.kv_cache_layout}:{kind}:{config.model.dtype}:{blocks}:{shape}:{_inner_order()}",
        tenant=TenantKeys(options.tenant),
    )
    return Chunks(namespace=namespace, group=group.group_id)


def _inner_order() -> str:
    """Returns a description of the value order within a block and of the fp8 format, beyond vLLM's layout."""
    platform = current_platform
    shuffled = "shuffled" if envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT else "plain"
    return f"{platform.device_name}:{platform.fp8_dtype()}:{shuffled}:{vllm_release()}"


def _full_attention_group(config: OffloadingConfig) -> OffloadingGroupConfig:
    if len(config.groups) != 1:
        raise ValueError(
            f"RepriseTier supports models with one group of full attention; this model has {len(config.groups)} KV cache groups: "
            "remove the tier for this model"
        )
    (group,) = config.groups
    if group.sliding_window_size_in_chunks is not None:
        raise ValueError(
            "RepriseTier supports full attention; this model's layers have an attention window: remove the tier for this model"
        )
    return group


def _layout(payload: int, tokens: int, layers: int) -> Layout:
    """Returns the layout of a chunk's bytes: one piece per layer if the size is divisible, else a single piece."""
    pieces = layers if payload % (layers * tokens) == 0 else 1
    try:
        return opaque_layout.layout(pieces=pieces, piece_bytes=payload // pieces, tokens=tokens)
    except ValueError as error:
        raise ValueError(
            f"RepriseTier does not support chunks of {tokens} tokens and {payload} bytes: {error}. Set another block_size (tokens "
            "per chunk, a multiple of vLLM's block size) in kv_connector_extra_config"
        ) from error
