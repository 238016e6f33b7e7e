"""Reprise: a cluster-wide KV cache for LLM inference.

What one engine has computed, any engine gets back. This package is the engine's side: it talks to the agent of its
node over a unix socket and moves blocks between the engine's memory and the agent's, checked and without the GIL.

* :class:`Client` — one session, blocking calls; :mod:`reprise.aio` is the same for asyncio.
* :class:`Session`, :class:`Transfers` — for engines: a session that is opened anew by itself, and saves and loads on
  native threads.
* :class:`KvMemory` — the engine's memory, one tensor for each layer; :class:`Layout`, :class:`Namespace` and
  :func:`block_keys` say what its blocks are.
* :mod:`reprise.vllm` — vLLM's connector; :mod:`reprise.vllm.tier` — a tier behind its offloading, for GPUs.
* :mod:`reprise.sglang` — a storage for SGLang's HiCache.
"""

from enum import IntEnum

from reprise._native import (
    AgentAbsent,
    AgentLost,
    BadRequest,
    Busy,
    Client,
    Durable,
    Finished,
    Forbidden,
    Internal,
    KvMemory,
    Layout,
    Loaded,
    Memory,
    Namespace,
    PendingMatch,
    Protocol,
    RepriseError,
    Saved,
    Session,
    Stalled,
    Timeout,
    Transfers,
    Version,
    block_keys,
)


class Source(IntEnum):
    """Where a block was found."""

    OWN_DRAM = 1
    OWN_NVME = 2
    PEER_DRAM = 3
    PEER_NVME = 4


__all__ = [
    "AgentAbsent",
    "AgentLost",
    "BadRequest",
    "Busy",
    "Client",
    "Durable",
    "Finished",
    "Forbidden",
    "Internal",
    "KvMemory",
    "Layout",
    "Loaded",
    "Memory",
    "Namespace",
    "PendingMatch",
    "Protocol",
    "RepriseError",
    "Saved",
    "Session",
    "Source",
    "Stalled",
    "Timeout",
    "Transfers",
    "Version",
    "block_keys",
]
