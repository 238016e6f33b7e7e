"""Options of the connector and the secondary tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reprise.options import SharedOptions


@dataclass(frozen=True)
class MatchOptions(SharedOptions):
    """Limits on the time that vLLM's scheduler waits for matches."""

    match_budget_ms: float = 5.0
    """Maximum time per scheduler step to wait for matches, over all requests. Pending matches are polled in the next step."""

    match_deadline_ms: float = 250.0
    """Time after which a request continues without the result of its match."""

    lookahead: bool = True
    """Whether requests that wait in the queue are reported to the agent, so that it reads their blocks from this node's
    devices into DRAM before they run."""

    extents: bool = True
    """Whether blocks move through extents of this node's devices where the agent lends them to this engine. The log names
    the backend. Other blocks, and layer-wise loads and saves, take the agent's arena."""


@dataclass(frozen=True)
class Options(MatchOptions):
    """Options of the connector: ``kv_connector_extra_config``."""

    where: ClassVar[str] = "kv_connector_extra_config"

    weights_digest: str = ""
    """Digest of the weights in keys; empty: the commit of the hub, or a sample of the files' bytes."""

    match_busy_ms: float = 0.25
    """Maximum time per step to wait for matches while other requests compute, because they wait too; at most
    ``match_budget_ms``. A match starts when its request arrives, so its result is usually available; otherwise it is polled
    in the next step. An idle engine waits up to ``match_budget_ms``."""

    idle_wait_ms: float = 2.0
    """Time that a step without computation waits for loads and saves. vLLM repeats such steps until they end; without the
    wait, it would use the cores that the copies need. A request that arrives during the wait is delayed by at most this."""

    save_decode_blocks: bool = True
    """Whether to save blocks of generated tokens, which later turns of a conversation reuse."""

    layerwise_loads: bool = False
    """Whether a request computes its first step while its blocks are loaded, one layer ahead of the computation. By
    default, the request waits for its blocks between steps while others compute. This helps if few requests run at a time
    and free cores can do the copies; on a busy CPU, the whole batch waits for the load. vLLM runs without full CUDA graphs."""

    layerwise_saves: bool = False
    """Whether blocks are copied while later layers of their step are computed. By default, they are copied during the next
    step. This helps if steps are long, requests end with their prefill and free cores can do the copies. vLLM runs without
    full CUDA graphs."""


@dataclass(frozen=True)
class TierOptions(MatchOptions):
    """Options of the secondary tier: its entry in ``secondary_tiers``."""

    where: ClassVar[str] = "secondary_tiers: RepriseTier"

    weights_digest: str = ""
    """Digest of the weights, as in the connector's options; read by
    :class:`reprise.vllm.offloading.RepriseOffloadingConnector`."""

    model_digest: str = ""
    """Digest of the weights and of everything else about the model that changes its KV. Set by
    :class:`reprise.vllm.offloading.RepriseOffloadingConnector`."""

    hash_algorithm: str = ""
    """vLLM's ``--prefix-caching-hash-algo``, which vLLM does not pass to a tier. Set like ``model_digest``; if you set
    ``model_digest`` yourself, set this too."""

    unchanging_adapters: bool = False
    """Whether the files of each LoRA adapter never change under its name and path, on all nodes. A tier only gets vLLM's
    hash of a chunk, which covers an adapter's name and path but not its weights."""

    save_stall_ms: float = 500.0
    """Time without progress after which a save fails and vLLM's chunk is free again."""
