"""What the connector's and the secondary tier's configuration may say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reprise.options import SharedOptions


@dataclass(frozen=True)
class MatchOptions(SharedOptions):
    """How long vLLM's scheduler waits for answers about what is there."""

    match_budget_ms: float = 5.0
    """How long one step of the scheduler waits for answers, over all requests. Beyond it: asked again in the next step."""

    match_deadline_ms: float = 250.0
    """After which a request goes on without an answer."""


@dataclass(frozen=True)
class Options(MatchOptions):
    """Options of the connector: ``kv_connector_extra_config``."""

    where: ClassVar[str] = "kv_connector_extra_config"

    weights_digest: str = ""
    """Digest of the weights in keys; empty: the revision of the hub, or a sample of the files' bytes."""

    match_busy_ms: float = 0.25
    """How long a step waits for answers while other requests compute, which would wait as well; at the most ``match_budget_ms``. A
    question is sent when its request comes, so that its answer is mostly there; else the request is asked about again in the next
    step. An engine that has nothing to compute waits for ``match_budget_ms``."""

    idle_wait_ms: float = 2.0
    """How long a step that computes nothing waits for loads and saves. vLLM goes round until they have ended, and would take the cores
    that they need; a request that comes meanwhile waits as long at the most."""

    save_decode_blocks: bool = True
    """Whether blocks of generated tokens are saved, as conversations want it."""

    layerwise_loads: bool = False
    """Whether a request computes its first step while its blocks are loaded, a layer ahead of the computation. By default it waits for
    its blocks between steps, and others go on. Pays where few requests run at a time and the copy has cores of its own; on a busy
    CPU it takes them from the computation, and everything in the batch waits for the load. vLLM then runs without full CUDA graphs."""

    layerwise_saves: bool = False
    """Whether blocks are copied while the later layers of their step are computed. By default they are copied after the step, beside the
    next one. Pays where steps are long, requests end with their prefill and the copy has cores of its own. vLLM then runs without full
    CUDA graphs."""


@dataclass(frozen=True)
class TierOptions(MatchOptions):
    """Options of the secondary tier: its entry in ``secondary_tiers``."""

    where: ClassVar[str] = "secondary_tiers: RepriseTier"

    weights_digest: str = ""
    """As the connector's; read by :class:`reprise.vllm.offloading.RepriseOffloadingConnector`."""

    model_digest: str = ""
    """What names the weights and all else about the model that changes its KV. Filled in by
    :class:`reprise.vllm.offloading.RepriseOffloadingConnector`."""

    hash_algorithm: str = ""
    """vLLM's ``--prefix-caching-hash-algo``, which it does not tell a tier. Filled in like ``model_digest``; beside one that is set by
    hand it is set by hand as well."""

    unchanging_adapters: bool = False
    """Whether the files of each LoRA adapter stay the same under its name and path, on all nodes. A tier sees vLLM's hash of a chunk only,
    which has an adapter's name and path and not its weights."""

    save_stall_ms: float = 500.0
    """After which a save that makes no progress is given up; vLLM's chunk is free again then."""
