"""Reprise: a cluster-wide KV cache for LLM inference.

KV that one engine has computed is available to all engines. This package is the engine's side: it connects to the agent
of its node over a Unix socket and copies blocks between the engine's memory and the agent's, verified and without the
GIL.

* :class:`Client` — one session with blocking calls; :mod:`reprise.aio` is the same for asyncio.
* :class:`Session`, :class:`Transfers` — for engines: a session that reconnects automatically, and saves and loads on
  native threads.
* :class:`KvMemory` — the engine's memory, one tensor for each layer; :class:`Layout`, :class:`Namespace` and
  :func:`block_keys` define its blocks and their keys.
* :mod:`reprise.vllm` — vLLM's connector; :mod:`reprise.vllm.tier` — a tier behind its offloading, for GPUs.
* :mod:`reprise.sglang` — a storage for SGLang's HiCache.
"""

from enum import IntEnum

from reprise._native import (
    AgentAbsent,
    AgentLost,
    BadRequest,
    BlocksReport,
    Busy,
    Client,
    Durable,
    ExtentReport,
    Finished,
    Forbidden,
    Internal,
    KvMemory,
    LayerGuidance,
    Layout,
    LimitReached,
    LoadDecision,
    Loaded,
    LoadPolicy,
    LookaheadReport,
    Memory,
    Namespace,
    PendingBlocks,
    PendingLookahead,
    PendingMatch,
    PendingReport,
    Protocol,
    RepriseError,
    Saved,
    Session,
    Stalled,
    TenantKeys,
    Timeout,
    Transfers,
    Version,
    block_keys,
)


class Source(IntEnum):
    """Tier and node in which a block was found."""

    OWN_DRAM = 1
    OWN_NVME = 2
    PEER_DRAM = 3
    PEER_NVME = 4


__all__ = [
    "AgentAbsent",
    "AgentLost",
    "BadRequest",
    "BlocksReport",
    "Busy",
    "Client",
    "Durable",
    "ExtentReport",
    "Finished",
    "Forbidden",
    "Internal",
    "KvMemory",
    "LayerGuidance",
    "Layout",
    "LimitReached",
    "LoadDecision",
    "LoadPolicy",
    "Loaded",
    "LookaheadReport",
    "Memory",
    "Namespace",
    "PendingBlocks",
    "PendingLookahead",
    "PendingMatch",
    "PendingReport",
    "Protocol",
    "RepriseError",
    "Saved",
    "Session",
    "Source",
    "Stalled",
    "TenantKeys",
    "Timeout",
    "Transfers",
    "Version",
    "block_keys",
]
