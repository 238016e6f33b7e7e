"""What a chunk of vLLM's shared primary tier is: geometry, keys, and its memory as ours.

```text
row of a chunk   [ worker 0: layer 0 │ layer 1 │ … ][ worker 1: … ] … [ padding to a page ]
our block        [ piece 0 │ piece 1 │ …  as many as the model has layers          ]
```

A chunk is ``blocks_per_chunk`` blocks of all workers, in an order that depends on nothing but what is in the namespace (:func:`_inner_order`): its
bytes are kept as they are, cut into equal pieces, so that each has a checksum of its own. Padding is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, get_offload_group_idx

from reprise import KvMemory, Layout, Namespace, block_keys, opaque
from reprise.vllm.geometry import hash_seed, tenant_salt, vllm_release

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
        """Geometry of our blocks."""
        return self.namespace.layout

    def keys(self, offload_keys: Iterable[OffloadKey], generation: bytes) -> bytes:
        """Packed keys.

        Args:
            offload_keys: vLLM's.
            generation: of the weights; behind every hash.
        """
        hashes = [get_offload_block_hash(key) + generation for key in offload_keys]
        return block_keys(self.namespace, hashes, group=self.group)

    def is_ours(self, key: OffloadKey) -> bool:
        """Whether a key is of the group that is kept."""
        return get_offload_group_idx(key) == self.group

    def memory(self, view: memoryview) -> KvMemory:
        """vLLM's memory as ours: nothing is copied.

        Raises:
            ValueError: a view that does not have room for the chunks.
        """
        rows = np.asarray(view)
        wanted = self.layout.block_bytes
        if rows.ndim != 2 or rows.itemsize != 1 or rows.shape[1] < wanted:
            raise ValueError(
                f"vLLM's primary tier has the shape {rows.shape} of {rows.itemsize} bytes each; chunks of {wanted} bytes do "
                "not fit: this vLLM is not one of those that RepriseTier is made for"
            )
        rows = rows.view(np.int8)
        piece = self.layout.layer_bytes
        return KvMemory([rows[:, at : at + piece] for at in range(0, wanted, piece)], self.layout)


def read(config: OffloadingConfig, is_single_copy: bool, options: TierOptions) -> Chunks:
    """The chunks of an engine.

    Args:
        config: vLLM's.
        is_single_copy: whether all workers share one copy of a block (``replicated_layout`` of the spec).
        options: of the tier.

    Raises:
        ValueError: an engine whose chunks cannot be kept, and what to do.
    """
    if not options.model_digest:
        raise ValueError(
            "secondary_tiers: RepriseTier does not know which weights this engine has, which vLLM does not tell a tier: name "
            '"kv_connector": "RepriseOffloadingConnector" with "kv_connector_module_path": "reprise.vllm.offloading" instead of '
            "OffloadingConnector, or set model_digest to something that differs wherever weights, revision, dtype, quantization "
            "or --hf-overrides do"
        )
    if not options.hash_algorithm:
        raise ValueError(
            "secondary_tiers: RepriseTier does not know how this engine hashes blocks, which vLLM does not tell a tier: beside "
            "model_digest, set hash_algorithm to what --prefix-caching-hash-algo is (vLLM's default is sha256)"
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
        tenant_salt=tenant_salt(options.tenant),
    )
    return Chunks(namespace=namespace, group=group.group_id)


def _inner_order() -> str:
    """What decides where values lie within a block, and what fp8 means, beside what vLLM says of the layout."""
    platform = current_platform
    shuffled = "shuffled" if envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT else "plain"
    return f"{platform.device_name}:{platform.fp8_dtype()}:{shuffled}:{vllm_release()}"


def _full_attention_group(config: OffloadingConfig) -> OffloadingGroupConfig:
    if len(config.groups) != 1:
        raise ValueError(
            f"RepriseTier keeps models with one group of full attention; this one has {len(config.groups)} KV cache groups: "
            "leave the tier out for it"
        )
    (group,) = config.groups
    if group.sliding_window_size_in_chunks is not None:
        raise ValueError(
            "RepriseTier keeps full attention; this model's layers see a window: leave the tier out for it"
        )
    return group


def _layout(payload: int, tokens: int, layers: int) -> Layout:
    """The geometry of a chunk's bytes, a piece for each layer where they can be cut so."""
    pieces = layers if payload % (layers * tokens) == 0 else 1
    try:
        return opaque.layout(pieces=pieces, piece_bytes=payload // pieces, tokens=tokens)
    except ValueError as error:
        raise ValueError(
            f"RepriseTier cannot keep chunks of {tokens} tokens and {payload} bytes: {error}. Set another block_size (tokens of "
            "a chunk, a multiple of vLLM's block size) in kv_connector_extra_config"
        ) from error
