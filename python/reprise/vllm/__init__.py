"""vLLM's connector: keeps KV blocks in Reprise and finds them there.

Name it in vLLM's configuration, nothing else is needed::

    --kv-transfer-config '{
        "kv_connector": "RepriseConnector",
        "kv_connector_module_path": "reprise.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": "/run/reprise/agent.sock"}}'

Runs where the KV cache is host memory (vLLM's CPU backend); for GPUs there is :mod:`reprise.vllm.tier`. What can be set in
``kv_connector_extra_config`` is in :class:`reprise.vllm.options.Options`.
"""

from reprise.vllm.connector import RepriseConnector

__all__ = ["RepriseConnector"]
