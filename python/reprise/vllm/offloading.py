"""vLLM's own OffloadingConnector, whose Reprise tiers know which model they serve.

vLLM gives a tier the model's name and no more. What else belongs into the keys (weights, revision, dtypes, quantization,
overrides, hash algorithm) this connector reads from vLLM's configuration and puts into that of the tiers, before it
makes them; all else is vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from reprise.vllm import geometry, identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

TIER_TYPE = "RepriseTier"


class RepriseOffloadingConnector(OffloadingConnector):
    """See the module.

    Raises:
        ValueError: no Reprise tier in the configuration, or one that cannot work, and what to do.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        geometry.check_prefixes(vllm_config, kv_cache_config)
        identify(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)


def identify(config: VllmConfig) -> None:
    """Puts into the tiers' configuration what names the model.

    Raises:
        ValueError: no Reprise tier in the configuration, prefixes that cannot be reused, weights or adapters that cannot be told
            apart from others, or another hash algorithm than the engine's.
    """
    extra: dict[str, Any] = config.kv_transfer_config.kv_connector_extra_config
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ValueError(
            'Reprise is a cache: what it cannot bring is computed. Set "kv_load_failure_policy": "recompute" in '
            "--kv-transfer-config"
        )
    tiers = [tier for tier in extra.get("secondary_tiers", []) if tier.get("type") == TIER_TYPE]
    if not tiers or extra.get("spec_name") != "TieringOffloadingSpec":
        raise ValueError(
            'RepriseOffloadingConnector needs "spec_name": "TieringOffloadingSpec" and, in "secondary_tiers", {"type": '
            '"RepriseTier", "module_path": "reprise.vllm.tier", "socket": …} in kv_connector_extra_config'
        )
    algorithm = config.cache_config.prefix_caching_hash_algo
    for tier in tiers:
        if config.lora_config is not None and not tier.get("unchanging_adapters", False):
            raise ValueError(
                "secondary_tiers: RepriseTier cannot tell a LoRA adapter from one that was trained again under its name and path: "
                "leave --enable-lora out, or give each training another name and set unchanging_adapters to true"
            )
        if tier.setdefault("hash_algorithm", algorithm) != algorithm:
            raise ValueError(
                f"secondary_tiers: hash_algorithm is {tier['hash_algorithm']!r}, and this engine hashes with {algorithm!r} "
                "(--prefix-caching-hash-algo): leave hash_algorithm out, RepriseOffloadingConnector fills it in"
            )
        tier.setdefault("model_id", identity.model_name(config))
        if "model_digest" not in tier:
            tier["model_digest"] = identity.model_digest(config, tier.get("weights_digest", ""))
