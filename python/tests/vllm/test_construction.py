"""Configurations that cannot work are refused with words when the connector is made; others make keys that mean what they say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import connector as transfer_config
from engine_model import model
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from reprise.vllm import RepriseConnector, geometry
from reprise.vllm.options import Options


def attention(**changes: Any) -> FullAttentionSpec:
    described = {"block_size": 32, "num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16, **changes}
    return FullAttentionSpec(**described)


def kv_cache(*specs: Any) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec([f"layer.{index}.{layer}" for layer in range(3)], spec) for index, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=groups)


def engine_config(weights: Path, **changes: Any) -> Any:
    """What the connector reads of vLLM's configuration."""
    flat = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "hash": "sha256",
        "dtype": torch.bfloat16,
        "cache_dtype": "auto",
        "revision": None,
        "load_format": "auto",
        "architecture": {"rope_theta": 10000.0},
        "transfer": transfer_config(Path("/nonexistent/agent.sock")),
        **changes,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=flat["tensor_parallel_size"], pipeline_parallel_size=flat["pipeline_parallel_size"]
        ),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=flat["hash"], cache_dtype=flat["cache_dtype"]),
        load_config=SimpleNamespace(load_format=flat["load_format"]),
        model_config=SimpleNamespace(
            model=str(weights),
            revision=flat["revision"],
            dtype=flat["dtype"],
            quantization=None,
            seed=0,
            hf_config=SimpleNamespace(),
            hf_text_config=SimpleNamespace(to_dict=lambda: flat["architecture"]),
        ),
        kv_transfer_config=KVTransferConfig(**flat["transfer"]),
        kv_events_config=None,
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("weights") / "one", seed=1)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("weights") / "one", seed=2)


def digest(config: Any, cache: KVCacheConfig | None = None, **options: Any) -> bytes:
    read = geometry.read(config, cache or kv_cache(attention()), Options.read({"model_id": "m", **options}), 0)
    return bytes(read.namespace.digest)


def test_equal_engines_share_their_blocks(weights: Path) -> None:
    assert digest(engine_config(weights)) == digest(engine_config(weights))


def test_nothing_that_changes_kv_is_shared(weights: Path, other_weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {
        "as it is": digest(engine_config(weights)),
        "other weights of the same size": digest(engine_config(other_weights)),
        "another revision": digest(engine_config(weights, revision="v2")),
        "another dtype": digest(engine_config(weights, dtype=torch.float16)),
        "another cache dtype": digest(engine_config(weights, cache_dtype="fp8")),
        "another rope": digest(engine_config(weights, architecture={"rope_theta": 5e5})),
        "another hash": digest(engine_config(weights, hash="sha256_cbor")),
        "another block size": digest(engine_config(weights), kv_cache(attention(block_size=64))),
        "another head size": digest(engine_config(weights), kv_cache(attention(head_size=64))),
        "another group size": digest(engine_config(weights, tensor_parallel_size=2)),
        "another model": digest(engine_config(weights), model_id="n"),
        "another tenant": digest(engine_config(weights), tenant="t"),
    }
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    digests["another seed"] = digest(engine_config(weights))
    assert len(set(digests.values())) == len(digests), digests


def test_weights_are_told_apart_by_their_bytes_not_by_where_they_lie(weights: Path, tmp_path: Path) -> None:
    moved = model(tmp_path / "elsewhere", seed=1)
    assert digest(engine_config(weights)) == digest(engine_config(moved))


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (kv_cache(attention(), attention(head_size=64)), "one group of full attention"),
        (
            kv_cache(
                SlidingWindowSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.bfloat16, sliding_window=128)
            ),
            "keeps full attention",
        ),
        (kv_cache(attention(sliding_window=128)), "see a window"),
        (kv_cache(attention(dtype=torch.int32)), "does not know the KV cache dtype"),
        (kv_cache(attention(page_size_padded=1 << 20)), "padded"),
    ],
)
def test_kv_that_cannot_be_kept_is_refused(weights: Path, cache: KVCacheConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        geometry.read(engine_config(weights), cache, Options(), 0)


def test_hashes_that_differ_between_processes_are_refused_unless_seeded(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="sha256_cbor"):
        digest(engine_config(weights, hash="xxhash"))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    digest(engine_config(weights, hash="xxhash"))


def test_an_engine_of_several_stages_is_refused(weights: Path) -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size"):
        digest(engine_config(weights, pipeline_parallel_size=2))


def test_weights_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weights_digest"):
        digest(engine_config(tmp_path / "nothing"))
    digest(engine_config(tmp_path / "nothing"), weights_digest="abc")


def test_a_policy_that_fails_requests_is_refused(weights: Path) -> None:
    config = engine_config(weights, transfer={**transfer_config(Path("/x")), "kv_load_failure_policy": "fail"})
    with pytest.raises(ValueError, match="recompute"):
        RepriseConnector(config, KVConnectorRole.SCHEDULER, kv_cache(attention()))


def test_an_unknown_option_is_refused(weights: Path) -> None:
    config = engine_config(weights, transfer=transfer_config(Path("/x"), sokcet="/y"))
    with pytest.raises(ValueError, match="did you mean 'socket'"):
        RepriseConnector(config, KVConnectorRole.SCHEDULER, kv_cache(attention()))


def test_without_an_agent_the_connector_comes_up_and_finds_nothing(weights: Path) -> None:
    made = RepriseConnector(engine_config(weights), KVConnectorRole.SCHEDULER, kv_cache(attention()))
    request = SimpleNamespace(request_id="r", block_hashes=[b"h" * 32] * 4, num_prompt_tokens=128)
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not made.requires_kv_delivery
    made.shutdown()
