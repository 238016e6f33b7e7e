"""vLLM's OffloadingConnector with the model's identity in the configuration of its Reprise tiers.

vLLM passes only the model's name to a tier. This connector reads the other inputs of the keys (weights, revision, dtypes,
quantization, overrides, hash algorithm) from vLLM's configuration and adds them to the tiers' configuration. Everything
else is vLLM's code.
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
    """vLLM's OffloadingConnector for Reprise tiers.

    Raises:
        ValueError: the configuration has no Reprise tier, or an unsupported one; the message has the remedy.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        geometry.check_prefixes(vllm_config, kv_cache_config)
        identify(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)


def identify(config: VllmConfig) -> None:
    """Adds the model's identity to the tiers' configuration.

    Raises:
        ValueError: the configuration has no Reprise tier or another hash algorithm than the engine, or weights or adapters
            cannot be identified.
    """
    extra: dict[str, Any] = config.kv_transfer_config.kv_connector_extra_config
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ValueError(
            'Reprise is a cache: blocks that it cannot load must be recomputed. Set "kv_load_failure_policy": "recompute" in '
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
                "secondary_tiers: RepriseTier cannot distinguish a LoRA adapter from a retrained one with the same name and path: "
                "remove --enable-lora, or use another name for each training and set unchanging_adapters to true"
            )
        if tier.setdefault("hash_algorithm", algorithm) != algorithm:
            raise ValueError(
                f"secondary_tiers: hash_algorithm {tier['hash_algorithm']!r} differs from the engine's {algorithm!r} "
                "(--prefix-caching-hash-algo): remove hash_algorithm, RepriseOffloadingConnector sets it"
            )
        tier.setdefault("model_id", identity.model_name(config))
        if "model_digest" not in tier:
            tier["model_digest"] = identity.model_digest(config, tier.get("weights_digest", ""))
