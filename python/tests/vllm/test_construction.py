"""Construction of the connector: rejection of unsupported configurations, and keys that change with everything that changes KV."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from cluster import Cluster
from engine import connector as transfer_config
from engine_model import model
from huggingface_hub import ResolvedRevision
from vllm.config import KVTransferConfig, LoRAConfig, ModelConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.quantization import resolve_quantization_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from reprise import BadRequest
from reprise.digest import plain
from reprise.vllm import RepriseConnector, geometry, identity
from reprise.vllm.identity import Handshake
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
    """Returns the parts of vLLM's configuration that the connector reads."""
    flat = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "hash": "sha256",
        "dtype": torch.bfloat16,
        "cache_dtype": "auto",
        "revision": None,
        "prefix_caching": True,
        "load_format": "auto",
        "architecture": {"rope_theta": 10000.0},
        "max_model_len": 4096,
        "auto_length": False,
        "inputs": None,
        "speculation": None,
        "quantization": None,
        "quantization_config": None,
        "skip_layers": [],
        "adapters": None,
        "transfer": transfer_config(Path("/nonexistent/agent.sock")),
        **changes,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=flat["tensor_parallel_size"], pipeline_parallel_size=flat["pipeline_parallel_size"]
        ),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=flat["hash"],
            cache_dtype=flat["cache_dtype"],
            kv_cache_dtype_skip_layers=flat["skip_layers"],
            enable_prefix_caching=flat["prefix_caching"],
        ),
        load_config=SimpleNamespace(load_format=flat["load_format"]),
        model_config=SimpleNamespace(
            model=str(weights),
            revision=flat["revision"],
            dtype=flat["dtype"],
            quantization=flat["quantization"],
            quantization_config=flat["quantization_config"],
            seed=0,
            hf_config=SimpleNamespace(to_dict=lambda: flat["architecture"]),
            max_model_len=flat["max_model_len"],
            original_max_model_len=-1 if flat["auto_length"] else flat["max_model_len"],
            multimodal_config=flat["inputs"],
        ),
        speculative_config=flat["speculation"],
        lora_config=flat["adapters"],
        kv_transfer_config=KVTransferConfig(**flat["transfer"]),
        kv_events_config=None,
        scheduler_config=SimpleNamespace(policy="fcfs", async_scheduling=False),
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("weights") / "one", seed=1)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("weights") / "one", seed=2)


@pytest.fixture(autouse=True)
def configuration_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the configurations of these tests directly, because they have no files."""
    read_again = identity._read_again
    monkeypatch.setattr(
        identity, "_read_again", lambda model: read_again(model) if isinstance(model, ModelConfig) else model.hf_config
    )


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
    }
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    digests["another seed"] = digest(engine_config(weights))
    monkeypatch.delenv("PYTHONHASHSEED")
    with monkeypatch.context() as changed:
        changed.setattr(cpu_attn, "_get_attn_isa", lambda *_: "tiles of a processor that is not this one")
        digests["another order of values within a block"] = digest(engine_config(weights))
    with monkeypatch.context() as changed:
        changed.setattr(platform, "machine", lambda: "another")
        digests["another processor"] = digest(engine_config(weights))
    with monkeypatch.context() as changed:
        changed.setattr(vllm, "__version__", "99.1.0")
        digests["another release of vLLM"] = digest(engine_config(weights))
    assert len(set(digests.values())) == len(digests), digests


LONGROPE = {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}
DYNAMIC = {"text_config": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}}
YARN = {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 4096}}
BY_LAYER = {"rope_parameters": {"full_attention": LONGROPE["rope_parameters"], "rope_type": "default"}}


@pytest.mark.parametrize(
    ("architecture", "one", "other", "is_shared"),
    [
        ({"rope_theta": 1e4}, 4096, 8192, True),
        (YARN, 4096, 8192, True),
        (LONGROPE, 2048, 4096, True),
        (LONGROPE, 8192, 16384, True),
        (LONGROPE, 4096, 4097, False),
        (BY_LAYER, 4096, 4097, False),
        (DYNAMIC, 4096, 8192, False),
        ({"rope_parameters": {"rope_type": "one that is yet to come"}}, 4096, 8192, False),
    ],
)
def test_engines_of_different_lengths_share_if_positions_do_not_depend_on_the_length(
    weights: Path, architecture: dict[str, Any], one: int, other: int, is_shared: bool
) -> None:
    first, second = (
        digest(engine_config(weights, architecture=architecture, max_model_len=length)) for length in (one, other)
    )
    assert (first == second) is is_shared


def test_automatic_length_is_not_equal_to_a_configured_length(
    weights: Path,
) -> None:
    def of(**changes: Any) -> bytes:
        return digest(engine_config(weights, architecture=LONGROPE, **changes))

    automatic = {of(auto_length=True, max_model_len=length) for length in (2048, 8192)}
    assert len(automatic) == 1
    assert automatic.isdisjoint({of(max_model_len=2048), of(max_model_len=8192)})


def test_multimodal_preprocessing_settings_change_keys(tmp_path: Path) -> None:
    weights = model(tmp_path / "sees")

    def of(**settings: Any) -> bytes:
        return digest(engine_config(weights, inputs=MultiModalConfig(**settings)))

    alike = {of(), of(limit_per_prompt={"image": 2}), of(mm_processor_cache_gb=0), of(mm_processor_kwargs={})}
    assert len(alike) == 1
    others = {
        "text only": digest(engine_config(weights)),
        "other crops": of(mm_processor_kwargs={"num_crops": 4}),
        "more crops": of(mm_processor_kwargs={"num_crops": 16}),
        "other frames": of(media_io_kwargs={"video": {"num_frames": 40}}),
        "fewer tokens of a video": of(video_pruning_rate=0.5),
    }
    (weights / "preprocessor_config.json").write_text('{"size": 448}')
    others["another preparation of images"] = of()
    assert len(alike | set(others.values())) == 1 + len(others), others


def test_quantization_at_load_time_changes_keys(weights: Path) -> None:
    def of(quantization: str | None, described: dict[str, Any] | None = None) -> bytes:
        resolved = resolve_quantization_config(quantization, described)
        return digest(engine_config(weights, quantization=quantization, quantization_config=resolved))

    assert of(None) == digest(engine_config(weights))
    assert of("fp8_per_tensor") == of("fp8_per_tensor")
    digests = {
        "not at all": of(None),
        "by shorthand": of("fp8_per_tensor"),
        "by another": of("fp8_per_block"),
        "but for one layer": of("fp8_per_tensor", {"ignore": ["model.layers.0.mlp.down_proj"]}),
        "but for another": of("fp8_per_tensor", {"ignore": ["model.layers.1.mlp.down_proj"]}),
        "other linear layers": of("online", {"linear": "fp8_per_block"}),
        "other experts": of("online", {"linear": "fp8_per_block", "moe": "fp8_per_tensor"}),
    }
    assert len(set(digests.values())) == len(digests), digests


def test_layers_without_a_quantized_cache_change_keys(weights: Path) -> None:
    def of(*layers: str) -> bytes:
        return digest(engine_config(weights, cache_dtype="fp8", skip_layers=list(layers)))

    assert of("0", "2") == of("2", "0")
    assert len({of(), of("0"), of("2"), of("0", "2"), of("sliding_window")}) == 5


def test_adapter_settings_of_the_engine_change_keys(weights: Path) -> None:
    def of(**settings: Any) -> bytes:
        config = engine_config(weights, adapters=LoRAConfig(**settings))
        config.lora_config.verify_with_model_config(config.model_config)
        return digest(config)

    # A larger capacity, and an explicit dtype equal to the model's, do not change keys.
    assert {of(), of(max_loras=4, max_lora_rank=64), of(lora_dtype="bfloat16")} == {digest(engine_config(weights))}
    assert of(target_modules=["o_proj", "qkv_proj"]) == of(target_modules=["qkv_proj", "o_proj"])
    digests = {
        "all of it": of(),
        "some of its modules": of(target_modules=["o_proj"]),
        "others": of(target_modules=["o_proj", "qkv_proj"]),
        "in another dtype": of(lora_dtype="float16"),
        "also where images are encoded": of(enable_tower_connector_lora=True),
    }
    assert len(set(digests.values())) == len(digests), digests


def test_draft_model_changes_keys(weights: Path, other_weights: Path) -> None:
    def of(method: str, draft: Path | None) -> bytes:
        described = engine_config(draft).model_config if draft is not None else None
        speculation = SimpleNamespace(method=method, draft_model_config=described)
        return digest(engine_config(weights, speculation=speculation))

    assert of("ngram", None) == digest(engine_config(weights))
    assert len({of("ngram", None), of("eagle", other_weights), of("eagle3", other_weights), of("mtp", weights)}) == 4


def test_configuration_changes_during_model_construction_do_not_change_keys(weights: Path) -> None:
    config = engine_config(weights)
    config.model_config = ModelConfig(
        model=str(weights), skip_tokenizer_init=True, hf_overrides={"rms_norm_eps": 1e-4, "note": {"nested": 1}}
    )
    before = digest(config)
    # MiniMax-M2 and Llama 4 do this in the workers' processes.
    config.model_config.hf_config.max_model_len = config.model_config.max_model_len
    config.model_config.hf_config.attn_temperature_tuning = True
    assert digest(config) == before
    config.model_config = ModelConfig(model=str(weights), skip_tokenizer_init=True)
    assert digest(config) != before, "overrides are part of the key"


def test_object_addresses_and_set_order_do_not_change_keys(weights: Path) -> None:
    class Rule:
        """Object whose default repr contains its address."""

    def of(rule: Any) -> bytes:
        return digest(engine_config(weights, architecture={"rule": rule, "labels": [{1: "one", "b": 2}]}))

    one, other = Rule(), Rule()
    assert str(one) != str(other)
    assert of(one) == of(other) != of("another rule")
    assert plain({"names": {"c", "a", "b"}}) == {"names": ["a", "b", "c"]}, "independent of the process's hash seed"


def test_handshake_fails_if_workers_and_scheduler_derive_different_keys(weights: Path) -> None:
    named = geometry.read(engine_config(weights), kv_cache(attention()), Options(), 0).namespace.digest
    Handshake.check({0: Handshake(named)}, {0: named})
    with pytest.raises(ValueError, match=r"worker of rank 1 .* derive different keys"):
        Handshake.check({0: Handshake(named), 1: Handshake(b"another")}, {0: named, 1: named})
    with pytest.raises(ValueError, match="same version of the package"):
        Handshake.check({0: KVConnectorHandshakeMetadata()}, {0: named})


def test_scheduler_side_checks_the_handshakes_that_vllm_passes(weights: Path) -> None:
    made = RepriseConnector(engine_config(weights), KVConnectorRole.SCHEDULER, kv_cache(attention()))
    try:
        namespace = geometry.read(engine_config(weights), kv_cache(attention()), Options(), 0).namespace
        made.set_xfer_handshake_metadata_pp_aware({(0, 0): Handshake(namespace.digest)})
        with pytest.raises(ValueError, match="no block would ever be found"):
            made.set_xfer_handshake_metadata_pp_aware({(0, 0): Handshake(b"another")})
    finally:
        made.shutdown()


def test_weights_are_identified_by_their_bytes_not_their_path(weights: Path, tmp_path: Path) -> None:
    moved = model(tmp_path / "elsewhere", seed=1)
    assert digest(engine_config(weights)) == digest(engine_config(moved))


COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"


def snapshot(home: Path, commit: str = COMMIT) -> Path:
    """Returns the path of a snapshot in the hub's cache, from which vLLM reads a model offline."""
    return home / "models--org--name" / "snapshots" / commit


def test_hub_model_is_identified_by_its_commit_on_every_node(tmp_path: Path) -> None:
    name = Path("org/name")

    def revision(asked: str | None, commit: str = COMMIT) -> ResolvedRevision:
        return ResolvedRevision(commit, initial=asked, repo_id="org/name")

    def of(model_path: Path, resolved: str | None) -> bytes:
        return digest(engine_config(model_path, revision=resolved), model_id="")

    digests = {
        "by default": of(name, revision(None)),
        "by branch": of(name, revision("main")),
        "by commit": of(name, revision(COMMIT)),
        "offline": of(snapshot(tmp_path / "here"), None),
        "offline, by branch": of(snapshot(tmp_path / "there"), "main"),
    }
    assert len(set(digests.values())) == 1, digests
    others = {
        of(name, revision(None, commit="0" * 40)),
        of(snapshot(tmp_path, commit="0" * 40), None),
        of(Path("org/another"), revision(None)),
    }
    assert len(others) == 2, "another commit has one key online and offline, another model has another"
    assert digests["by default"] not in others


def test_path_of_a_model_does_not_change_keys(weights: Path, tmp_path: Path) -> None:
    digests = set()
    for folder in (weights, model(tmp_path / "elsewhere", seed=1)):
        config = engine_config(folder)
        config.model_config = ModelConfig(model=str(folder), skip_tokenizer_init=True)
        digests.add(digest(config))
    assert len(digests) == 1


def test_unresolved_revision_changes_keys_only_if_it_is_not_the_default() -> None:
    def of(revision: str | None) -> bytes:
        return digest(engine_config(Path("org/name"), revision=revision), weights_digest="w")

    assert of(None) == of("main")
    assert of(None) != of("v2")


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_rejects_engines_whose_prefixes_cannot_be_reused(weights: Path, prefix_caching: bool) -> None:
    cache = kv_cache(attention(non_causal=prefix_caching))
    words = "non_causal" if prefix_caching else "needs vLLM's prefix caching, which is off"
    with pytest.raises(ValueError, match=words):
        digest(engine_config(weights, prefix_caching=prefix_caching), cache)


def test_hash_seed_equals_that_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert geometry.hash_seed("sha256") == resolve_none_hash_seed(sha256)
    for seed in ("7", "0", "random"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        assert geometry.hash_seed("sha256") == geometry.hash_seed("xxhash") == resolve_none_hash_seed(sha256) == seed


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (kv_cache(attention(), attention(head_size=64)), "one group of full attention"),
        (
            kv_cache(
                SlidingWindowSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.bfloat16, sliding_window=128)
            ),
            "supports full attention",
        ),
        (kv_cache(attention(sliding_window=128)), "have an attention window"),
        (kv_cache(attention(dtype=torch.int32)), "does not support the KV cache dtype"),
        (kv_cache(attention(page_size_padded=1 << 20)), "padded"),
        (kv_cache(attention(head_size=40_000)), "does not support the blocks of this engine .*head_dim 80000"),
        (kv_cache(attention(block_size=65_536, num_kv_heads=1, head_size=1)), "Set another --block-size"),
    ],
)
def test_rejects_unsupported_kv_cache_specs(weights: Path, cache: KVCacheConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        geometry.read(engine_config(weights), cache, Options(), 0)


def test_rejects_hashes_with_a_random_seed_unless_it_is_set(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="sha256_cbor"):
        digest(engine_config(weights, hash="xxhash"))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    digest(engine_config(weights, hash="xxhash"))


def test_rejects_pipeline_parallelism(weights: Path) -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size"):
        digest(engine_config(weights, pipeline_parallel_size=2))


def test_rejects_weights_that_cannot_be_identified(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weights_digest"):
        digest(engine_config(tmp_path / "nothing"))
    digest(engine_config(tmp_path / "nothing"), weights_digest="abc")


def test_rejects_a_load_failure_policy_that_fails_requests(weights: Path) -> None:
    config = engine_config(weights, transfer={**transfer_config(Path("/x")), "kv_load_failure_policy": "fail"})
    with pytest.raises(ValueError, match="recompute"):
        RepriseConnector(config, KVConnectorRole.SCHEDULER, kv_cache(attention()))


def test_rejects_an_unknown_option(weights: Path) -> None:
    config = engine_config(weights, transfer=transfer_config(Path("/x"), sokcet="/y"))
    with pytest.raises(ValueError, match="did you mean 'socket'"):
        RepriseConnector(config, KVConnectorRole.SCHEDULER, kv_cache(attention()))


def test_rejects_layerwise_loads_with_asynchronous_scheduling(weights: Path) -> None:
    config = engine_config(weights, transfer=transfer_config(Path("/x"), layerwise_loads=True))
    config.scheduler_config = SimpleNamespace(async_scheduling=True, policy="fcfs")
    with pytest.raises(ValueError, match="--no-async-scheduling"):
        RepriseConnector(config, KVConnectorRole.SCHEDULER, kv_cache(attention()))
    config.scheduler_config.async_scheduling = False
    RepriseConnector(config, KVConnectorRole.SCHEDULER, kv_cache(attention())).shutdown()


@pytest.mark.parametrize("option", ["layerwise_loads", "layerwise_saves"])
def test_layerwise_copies_require_piecewise_cuda_graphs(option: str) -> None:
    assert not RepriseConnector.requires_piecewise_for_cudagraph({"socket": "/x"})
    assert RepriseConnector.requires_piecewise_for_cudagraph({"socket": "/x", option: True})


def test_construction_fails_if_the_agent_permanently_rejects_the_engine(weights: Path, cluster: Cluster) -> None:
    config = engine_config(weights, transfer=transfer_config(cluster.agents[0].socket))
    # Blocks of 96 MiB do not fit into an arena region of 64 MiB.
    large = kv_cache(attention(block_size=512, num_kv_heads=32, head_size=512))
    with pytest.raises(BadRequest, match=r"arena\.region_bytes"):
        RepriseConnector(config, KVConnectorRole.SCHEDULER, large)


def test_rejects_a_socket_in_an_inaccessible_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", closed)
    with pytest.raises(ValueError, match="no permission to access /run/reprise/agent"):
        Options.read({})


def test_socket_variable_overrides_only_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRISE_SOCKET", "/run/given/agent.sock")
    assert Options.read({}).socket == "/run/given/agent.sock"
    assert Options.read({"socket": "/run/own/agent.sock"}).socket == "/run/own/agent.sock"
    monkeypatch.setenv("REPRISE_SOCKET", "")
    assert Options.read({}).socket == "/run/reprise/agent.sock"


def test_tenant_and_token_variables_override_only_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REPRISE_TENANT", "team-a")
    monkeypatch.setenv("REPRISE_TOKEN_FILE", "/var/run/secrets/reprise.dev/token")
    given = Options.read({})
    assert (given.tenant, given.token_file) == ("team-a", "/var/run/secrets/reprise.dev/token")
    own = Options.read({"tenant": "team-b", "token_file": "/own/token"})
    assert (own.tenant, own.token_file) == ("team-b", "/own/token")
    monkeypatch.delenv("REPRISE_TENANT")
    monkeypatch.delenv("REPRISE_TOKEN_FILE")
    assert (Options.read({}).tenant, Options.read({}).token_file) == ("default", "")


def test_connector_starts_without_an_agent_and_finds_no_blocks(weights: Path) -> None:
    made = RepriseConnector(engine_config(weights), KVConnectorRole.SCHEDULER, kv_cache(attention()))
    request = SimpleNamespace(
        request_id="r",
        block_hashes=[b"h" * 32] * 4,
        num_prompt_tokens=128,
        lora_request=None,
        skip_reading_prefix_cache=False,
    )
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not made.requires_kv_delivery
    made.shutdown()
