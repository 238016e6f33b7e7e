"""Connector for vLLM: saves KV blocks to Reprise and loads them from it.

It only needs an entry in vLLM's configuration::

    --kv-transfer-config '{
        "kv_connector": "RepriseConnector",
        "kv_connector_module_path": "reprise.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": "/run/reprise/agent.sock"}}'

It supports KV caches in host memory (vLLM's CPU backend); for GPUs, use :mod:`reprise.vllm.tier`. The options of
``kv_connector_extra_config`` are in :class:`reprise.vllm.options.Options`.
"""

from reprise.vllm.connector import RepriseConnector

__all__ = ["RepriseConnector"]
