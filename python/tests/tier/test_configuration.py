"""Tests how vLLM creates the tier from its configuration, which configurations are rejected, and the tier's keys."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cluster import Cluster
from engine_model import model
from offloading import CHUNKS, LAYERS, LONG_S, TOKENS, Offloading, chain, offloading_config, tier_config
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, LoRAConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.request import Request

from reprise.layer_reports import Computation
from reprise.vllm import chunks
from reprise.vllm.offloading import COMPUTATION, RepriseOffloadingConnector, identify, layer_reports
from reprise.vllm.options import TierOptions
from reprise.vllm.tier import RepriseTier

NOWHERE = Path("/nonexistent/agent.sock")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("weights") / "one", seed=1)


def digest(tier: dict[str, Any] | None = None, is_single_copy: bool = False, **changes: Any) -> bytes:
    """Returns the digest at the start of an engine's keys."""
    options = TierOptions.read({"model_digest": "weights-1", "hash_algorithm": "sha256_cbor", **(tier or {})})
    return bytes(chunks.read(offloading_config([], **changes), is_single_copy, options).namespace.digest)


def vllm_config(weights: Path, socket: Path = NOWHERE, policy: str = "recompute", **changes: Any) -> VllmConfig:
    """Returns vLLM's complete configuration, with its own classes."""
    tier = {"type": "RepriseTier", "module_path": "reprise.vllm.tier", "socket": str(socket), **changes}
    return VllmConfig(
        model_config=ModelConfig(model=str(weights), skip_tokenizer_init=True),
        cache_config=CacheConfig(block_size=TOKENS, prefix_caching_hash_algo="sha256_cbor"),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="RepriseOffloadingConnector",
            kv_connector_module_path="reprise.vllm.offloading",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": CHUNKS * (64 << 10),
                "secondary_tiers": [tier],
            },
        ),
    )


def connector(config: VllmConfig, non_causal: bool = False) -> RepriseOffloadingConnector:
    """Creates the connector as vLLM's scheduler does."""
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=4, head_size=32, dtype=torch.bfloat16, non_causal=non_causal
    )
    groups = [KVCacheGroupSpec([f"layer.{layer}" for layer in range(LAYERS)], spec)]
    cache = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
    made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
    assert isinstance(made, RepriseOffloadingConnector)
    return made


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    """Collects connectors and shuts them down at the end."""
    made: list[Any] = []
    yield made
    for each in made:
        each.shutdown()


def test_vllm_s_factory_creates_the_tier_from_its_name_and_module() -> None:
    config = tier_config(NOWHERE)
    assert SecondaryTierFactory.get_tier_class(config) is RepriseTier
    offloading = Offloading(offloading_config([config]))
    assert (type(offloading.tier), offloading.tier.tier_type) == (RepriseTier, "RepriseTier")
    offloading.close()


def test_every_counted_metric_is_declared() -> None:
    extra = offloading_config([tier_config(NOWHERE)]).extra_config
    declared = TieringOffloadingSpec.build_metric_definitions(dict(extra))
    offloading = Offloading(offloading_config([tier_config(NOWHERE)]))
    offloading.store(chain(1, 2))
    offloading.finish_jobs()
    stats = offloading.manager.get_stats()
    assert stats is not None
    counts = [name for name in stats.data["data"] if "reprise" in name]
    assert "vllm:reprise_unsaved_blocks" in counts
    assert set(counts) <= set(declared)
    offloading.close()


def test_the_connector_sets_the_identity_of_the_model_in_its_tier(weights: Path, closing: list[Any]) -> None:
    config = vllm_config(weights)
    closing.append(connector(config))
    (tier,) = config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"]
    assert tier["hash_algorithm"] == "sha256_cbor"
    assert len(tier["model_digest"]) == 64
    other = vllm_config(model(weights.parent / "two", seed=2))
    closing.append(connector(other))
    (other_tier,) = other.kv_transfer_config.kv_connector_extra_config["secondary_tiers"]
    assert other_tier["model_digest"] != tier["model_digest"]


def test_vllm_s_scheduler_finds_a_prompt_that_another_engine_has_stored(
    weights: Path, cluster: Cluster, closing: list[Any]
) -> None:
    patient = {
        f"{name}_ms": LONG_S * 1e3
        for name in ("match_deadline", "load_deadline", "load_stall", "load_standstill", "save_stall")
    }
    hash_blocks = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(hash_blocks)
    request = Request(
        request_id="prompt",
        prompt_token_ids=list(range(8 * TOKENS + 5)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(TOKENS, hash_blocks),
    )
    keys = [make_offload_key(block_hash, 0) for block_hash in request.block_hashes]
    writer, reader = (connector(vllm_config(weights, cluster.agents[0].socket, **patient)) for _ in range(2))
    closing += [writer, reader]
    for each in (writer, reader):
        assert each.scheduler.manager.secondary_tiers[0]._session.wait_connected(LONG_S)
    writer.on_new_request(request)
    manager = writer.scheduler.manager
    context = writer.scheduler._req_status["prompt"].req_context
    prepared = manager.prepare_store(keys, context)
    assert prepared is not None
    manager.complete_store(prepared.keys_to_store, context)
    manager.secondary_tiers[0]._transfers.wait(list(manager.secondary_tiers[0]._jobs), LONG_S)
    reader.on_new_request(request)
    found = None
    while found is None:
        found, is_async = reader.get_num_new_matched_tokens(request, 0)
        reader.build_connector_meta(SchedulerOutput.make_empty())
    assert (found, is_async) == (8 * TOKENS, True)


def test_metadata_has_the_computation_of_its_step(weights: Path, closing: list[Any]) -> None:
    made = connector(vllm_config(weights))
    closing.append(made)
    metadata = made.build_connector_meta(SchedulerOutput.make_empty())
    assert pickle.loads(pickle.dumps(metadata)).__dict__[COMPUTATION] is None


def test_worker_reports_layers_with_the_computation_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wait_for_save", "shutdown"):
        monkeypatch.setattr(OffloadingConnector, name, lambda self: None)
    calls: list[Any] = []
    made: Any = object.__new__(RepriseOffloadingConnector)
    made._reports = SimpleNamespace(
        begin_layer=lambda name, computation: calls.append((name, computation)),
        end_step=lambda is_idle: calls.append(is_idle),
        session=SimpleNamespace(close=lambda: calls.append("closed")),
    )
    decode = Computation("decode", 1, 10)
    made._connector_metadata = SimpleNamespace(**{COMPUTATION: decode})
    made.wait_for_layer_load("layer.0")
    made.wait_for_save()
    made._connector_metadata = SimpleNamespace(**{COMPUTATION: None})
    made.wait_for_save()
    made.shutdown()
    assert calls == [("layer.0", decode), False, True, "closed"]


def test_reports_are_those_of_the_engines_model_and_layers() -> None:
    tier = tier_config(NOWHERE, model_id="test/model", tenant="team-a")
    transfer = SimpleNamespace(kv_connector_extra_config={"secondary_tiers": [{"type": "other"}, tier]})
    groups = [SimpleNamespace(layer_names=["layer.0", "layer.1"])]
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    cache: Any = SimpleNamespace(kv_cache_groups=groups)
    reports = layer_reports(config, cache)
    assert (reports.model, list(reports.layer_names)) == ("test/model", ["layer.0", "layer.1"])
    assert not reports.session.connected
    reports.session.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sokcet": "/x"}, "did you mean 'socket'"),
        ({"threads": 4}, "unknown option 'threads': expected one of"),
        ({"socket": "agent.sock"}, "expected an absolute path"),
        ({"socket": "/" + "a" * 120}, "use a shorter path"),
        ({"socket": "/tmp"}, "is not a socket"),
        ({"socket": 7}, "expected a string"),
        ({"match_budget_ms": 0}, "above 0"),
        ({"load_stall_ms": "fast"}, "a number of milliseconds"),
        ({"model_digest": ""}, "RepriseOffloadingConnector"),
        ({"hash_algorithm": ""}, "set hash_algorithm to the value of --prefix-caching-hash-algo"),
    ],
)
def test_an_invalid_configuration_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Offloading(offloading_config([{**tier_config(NOWHERE), **changes}]))


def test_a_configured_digest_needs_a_hash_algorithm() -> None:
    config = tier_config(NOWHERE)
    del config["hash_algorithm"]
    with pytest.raises(ValueError, match="does not know the hash algorithm of this engine"):
        Offloading(offloading_config([config]))


def test_another_hash_algorithm_than_the_engine_s_is_rejected(weights: Path) -> None:
    with pytest.raises(ValueError, match="'sha256' differs from the engine's 'sha256_cbor'"):
        connector(vllm_config(weights, hash_algorithm="sha256"))
    identify(vllm_config(weights, hash_algorithm="sha256_cbor"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 2}, "one group of full attention"),
        ({"window": 4}, "have an attention window"),
        ({"worker_bytes": 8191}, "expected a multiple of 16 tokens"),
        ({"worker_bytes": 1 << 30, "cpu_bytes": 4 << 30}, "Set another block_size"),
    ],
)
def test_unsupported_kv_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        digest(**changes)


def test_hashes_that_differ_between_processes_are_rejected_unless_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="sha256_cbor"):
        digest({"hash_algorithm": "xxhash"})
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    digest({"hash_algorithm": "xxhash"})


def test_a_policy_that_fails_requests_is_rejected(weights: Path) -> None:
    with pytest.raises(ValueError, match="recompute"):
        connector(vllm_config(weights, policy="fail"))


def test_an_engine_without_reusable_prefixes_is_rejected(weights: Path) -> None:
    config = vllm_config(weights)
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(ValueError, match="needs vLLM's prefix caching, which is off"):
        connector(config)
    with pytest.raises(ValueError, match="non_causal"):
        connector(vllm_config(weights), non_causal=True)


def test_a_model_of_the_hub_has_the_same_keys_at_any_snapshot_path(weights: Path, tmp_path: Path) -> None:
    tiers = []
    for home in ("here", "there"):
        folder = tmp_path / home / "models--org--name" / "snapshots" / ("0" * 40)
        folder.parent.mkdir(parents=True)
        folder.symlink_to(weights)
        config = vllm_config(folder)
        identify(config)
        tiers.append(config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"][0])
    assert tiers[0] == tiers[1]
    assert tiers[0]["model_id"] == "org/name"


def test_an_engine_for_lora_adapters_is_rejected_unless_they_never_change(weights: Path) -> None:
    config = vllm_config(weights)
    identify(config)
    config.lora_config = LoRAConfig()
    with pytest.raises(ValueError, match=r"retrained one with the same name and path: .* unchanging_adapters"):
        identify(config)
    unchanging = vllm_config(weights, unchanging_adapters=True)
    unchanging.lora_config = LoRAConfig()
    identify(unchanging)
    (tier,) = unchanging.kv_transfer_config.kv_connector_extra_config["secondary_tiers"]
    options = {name: value for name, value in tier.items() if name not in ("type", "module_path")}
    assert TierOptions.read(options).unchanging_adapters


def test_the_connector_without_a_reprise_tier_is_rejected(weights: Path) -> None:
    config = vllm_config(weights)
    config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"][0]["type"] = "fs"
    with pytest.raises(ValueError, match='needs "spec_name"'):
        connector(config)


def test_nothing_that_changes_kv_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {
        "default": digest(),
        "another model": digest({"model_id": "m"}),
        "other weights": digest({"model_digest": "weights-2"}),
        "another hash": digest({"hash_algorithm": "sha256"}),
        "another dtype": digest(dtype="fp8_e4m3"),
        "longer chunks": digest(blocks_per_chunk=2),
        "other sizes": digest(worker_bytes=4 * 4096),
        "one copy for all workers": digest(is_single_copy=True),
    }
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    digests["another seed"] = digest()
    assert len(set(digests.values())) == len(digests), digests


def test_a_chunk_is_split_into_one_piece_per_layer() -> None:
    options = TierOptions.read({"model_digest": "w", "hash_algorithm": "sha256"})
    even = chunks.read(offloading_config([]), False, options).layout
    assert (even.layers, even.parts, even.tokens_per_block) == (LAYERS, 1, TOKENS)
    assert even.block_bytes == 2 * LAYERS * 8192
    uneven = chunks.read(offloading_config([], worker_bytes=8 * 1029), False, options).layout
    assert (uneven.layers, uneven.block_bytes) == (1, 2 * 8 * 1029)
