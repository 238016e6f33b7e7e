"""Tests that engines share pages only if equal tokens have equal KV: settings, weights, adapters and requests."""

from __future__ import annotations

import json
import time
from array import array
from pathlib import Path
from typing import Any

import engine as engines
import pytest
import torch
from engine import MakeEngine
from engine_model import adapter
from pool import HostPool
from sglang import version
from sglang.srt import runtime_context
from sglang.srt.environ import envs
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.schedule_batch import MultimodalDataItem, Req
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.multimodal.modality import Modality
from sglang.srt.sampling.sampling_params import SamplingParams
from test_storage import make_storage, storage_config

from reprise.sglang import identity

PROMPT = list(range(64))
PROCESS_START_S = identity._process_start_s
FILES = {"model_digest": ""}
"""Configuration by which weights are identified by their files."""


def revision(folder: Path, digest: str = "", multimodal: bool = False, **settings: Any) -> str:
    """Returns the model's revision in keys of an engine."""
    engines.publish(folder, **settings)
    return identity.model_revision(digest, multimodal)


def different(revisions: dict[str, str]) -> bool:
    """Returns whether all revisions differ."""
    return len(set(revisions.values())) == len(revisions)


# Requests


def test_page_hashes_cover_all_tokens_before_and_in_a_page(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first, second = engine.hashes(PROMPT), engine.hashes([9_999, *PROMPT[1:]])
    assert len(first) == 8
    assert not set(first) & set(second), "the first token differs, and so does every page after it"
    assert engine.hashes(PROMPT[:16]) == first[:2]
    assert engine.serve(PROMPT) == 0
    assert engine.flush()
    assert engine.serve([*PROMPT[:32], *range(500, 532)]) == 32


def test_salts_and_extra_keys_of_requests_do_not_share_pages(make_engine: MakeEngine) -> None:
    def pages(**namespace: Any) -> str:
        hashes = get_storage_hash_str(RadixKey(array("q", PROMPT), **namespace), None, page_size=engines.PAGE)
        return str(hashes[0])

    make_engine()
    namespaces = {
        "none": pages(),
        "a salt": pages(cache_salt="one"),
        "second salt": pages(cache_salt="two"),
        "an extra key": pages(extra_key="one"),
        "both": pages(extra_key="one", cache_salt="two"),
        "both, split elsewhere": pages(extra_key="onet", cache_salt="wo"),
    }
    assert different(namespaces)


def request(lora: LoRARef | None) -> Req:
    """Returns SGLang's request for an adapter."""
    lora_id = lora.lora_id if lora is not None else None
    return Req("r", "", array("q", PROMPT), SamplingParams(), lora_id=lora_id)


def test_an_adapter_loaded_into_a_running_engine_does_not_find_pages_of_an_earlier_load(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    path = str(adapter(tmp_path / "law", seed=1))
    # SGLang's tokenizer process creates a reference for each load, even when it reloads an evicted adapter.
    loads = [request(LoRARef(lora_name="law", lora_path=path)).extra_key for _ in range(2)]
    assert different(dict(enumerate([request(None).extra_key or "", *loads])))
    engine = make_engine(enable_lora=True, lora_paths=[])
    assert engine.serve(PROMPT, lora=loads[0]) == 0
    assert engine.flush()
    assert engine.serve(PROMPT, lora=loads[1]) == 0
    assert engine.serve(PROMPT) == 0
    assert engine.flush()
    assert engine.serve(PROMPT, lora=loads[0]) == len(PROMPT)


# Adapters of --lora-paths


def loaded_at_start(folder: Path) -> LoRARef:
    """Returns an adapter's reference as SGLang creates it from ``--lora-paths``."""
    path = str(folder)
    return LoRARef(lora_id=LoRARef.deterministic_id("law", path), lora_name="law", lora_path=path, pinned=False)


def test_an_adapter_retrained_under_its_name_and_path_does_not_find_old_pages(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    def start(seed: int) -> tuple[engines.Engine, str]:
        folder = adapter(tmp_path / "law", seed=seed)
        ref = loaded_at_start(folder)
        return make_engine(enable_lora=True, lora_paths=[ref]), ref.lora_id

    before, lora_id = start(seed=1)
    assert before.serve(PROMPT, lora=lora_id) == 0
    again, same_id = start(seed=1)
    assert again.serve(PROMPT, lora=same_id) == len(PROMPT)
    after, id_after = start(seed=2)
    assert id_after == lora_id, "SGLang's id covers only name and path"
    assert after.hashes(PROMPT, lora_id) == before.hashes(PROMPT, lora_id)
    assert after.serve(PROMPT, lora=lora_id) == 0


@pytest.fixture(autouse=True)
def processes_start_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets an engine's process start at its creation instead of pytest's start."""
    monkeypatch.setattr(identity, "_process_start_s", time.time)


def test_an_adapter_whose_files_change_during_the_start_is_rejected(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter(tmp_path / "law", seed=1)
    monkeypatch.setattr(identity, "_process_start_s", PROCESS_START_S)
    with pytest.raises(ValueError, match=r"changed while this engine started.* restart the engine"):
        revision(model, enable_lora=True, lora_paths=[loaded_at_start(folder)])


def test_an_adapter_without_files_is_rejected(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"have its files: set the path of a folder, or .* /load_lora_adapter"):
        revision(model, enable_lora=True, lora_paths=[loaded_at_start(tmp_path / "nothing")])


def test_settings_that_change_the_effect_of_an_adapter_change_keys(model: Path, tmp_path: Path) -> None:
    ref = loaded_at_start(adapter(tmp_path / "law", seed=1))
    lora = {"enable_lora": True, "lora_paths": [ref], "max_lora_rank": 8}
    revisions = {
        "without adapters": revision(model),
        "all modules": revision(model, **lora),
        "some modules": revision(model, **lora, lora_target_modules=["q_proj"]),
        "one outer factor for all experts": revision(model, **lora, experts_shared_outer_loras=True),
    }
    assert different(revisions)
    assert (
        revision(model, **{**lora, "max_loras_per_batch": 4, "lora_eviction_policy": "fifo"})
        == revisions["all modules"]
    )


# Weights


def test_weights_are_distinguished_by_their_bytes_not_by_their_path(tmp_path: Path) -> None:
    revisions = {
        "one": revision(engines.model_folder(tmp_path / "one")),
        "retrained": revision(engines.model_folder(tmp_path / "two", 2.0)),
        "another configuration": revision(engines.model_folder(tmp_path / "three", rope_theta=1e6)),
    }
    assert different(revisions)
    assert revision(engines.model_folder(tmp_path / "elsewhere")) == revisions["one"]
    engines.model_folder(tmp_path / "one", 3.0)
    assert revision(tmp_path / "one") != revisions["one"], "retrained in place"


def test_a_configured_digest_replaces_the_sample_of_weights(tmp_path: Path) -> None:
    one, two = engines.model_folder(tmp_path / "one"), engines.model_folder(tmp_path / "two", 2.0)
    assert revision(one, "a") == revision(two, "a") != revision(one, "b")
    assert revision(one, "a") != revision(one)


def test_a_model_of_the_hub_is_identified_by_its_commit(tmp_path: Path) -> None:
    def snapshot(cache: str, commit: str) -> Path:
        return engines.model_folder(tmp_path / cache / "models--a--b" / "snapshots" / commit)

    one, other = "1" * 40, "2" * 40
    assert revision(snapshot("here", one)) == revision(snapshot("there", one)) != revision(snapshot("here", other))


def test_weights_that_cannot_be_identified_are_rejected(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="set model_digest"):
        make_storage(storage_config(changes=FILES), HostPool())
    assert revision(model, "a")


# Settings


def test_each_setting_that_changes_kv_is_in_the_key(model: Path, tmp_path: Path) -> None:
    scales, other_scales = tmp_path / "scales.json", tmp_path / "other.json"
    scales.write_text("{}")
    other_scales.write_text('{"a": 1}')
    settings: dict[str, dict[str, Any]] = {
        "none": {},
        "dtype": {"dtype": "float16"},
        "quantization": {"quantization": "fp8"},
        "e4m3": {"kv_cache_dtype": "fp8_e4m3"},
        # SGLang's host memory has dtype uint8 for both.
        "e5m2": {"kv_cache_dtype": "fp8_e5m2"},
        "scales": {"kv_cache_dtype": "fp8_e4m3", "quantization_param_path": str(scales)},
        "other scales": {"kv_cache_dtype": "fp8_e4m3", "quantization_param_path": str(other_scales)},
        "overrides": {"json_model_override_args": json.dumps({"rope_theta": 1e6})},
        "length": {"context_length": 2_048},
        "implementation": {"model_impl": "transformers"},
        "revision": {"revision": "next"},
    }
    revisions = {name: revision(model, "a", **changes) for name, changes in settings.items()}
    assert different(revisions)
    moved = tmp_path / "moved.json"
    moved.write_bytes(scales.read_bytes())
    assert revision(model, "a", kv_cache_dtype="fp8_e4m3", quantization_param_path=str(moved)) == revisions["scales"]


def test_settings_that_cannot_change_kv_are_not_in_the_key(model: Path) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"download_dir": "/elsewhere"},
        {"load_format": "safetensors"},
        {"weight_loader_disable_mmap": True},
        {"mem_fraction_static": 0.5},
        {"max_running_requests": 7},
    ]
    assert len({revision(model, "a", **changes) for changes in settings}) == 1


def test_byte_order_in_device_memory_dtype_of_states_and_version_are_in_the_key(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revisions = {"plain": revision(model, "a"), "states": revision(model, "a", mamba_ssm_dtype="bfloat16")}
    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        revisions["heads first"] = revision(model, "a")
    monkeypatch.setattr(version, "__version__", "0.5.24")
    revisions["another version of SGLang"] = revision(model, "a")
    assert different(revisions)


def test_a_draft_model_is_in_the_key_by_its_weights(model: Path, tmp_path: Path) -> None:
    def of(weight: float, algorithm: str = "EAGLE3", **changes: Any) -> str:
        draft = engines.model_folder(tmp_path / "draft", weight)
        engines.publish(model)
        settings = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(draft), **changes}
        with runtime_context.get_spec().override(**settings):
            return identity.model_revision("a", False)

    revisions = {
        "no draft": revision(model, "a"),
        "a draft": of(1.0),
        "retrained": of(2.0),
        "another algorithm": of(1.0, "STANDALONE"),
        "in another dtype": of(1.0, speculative_draft_kv_cache_dtype="fp8_e4m3"),
    }
    assert different(revisions)
    assert of(1.0) == revisions["a draft"]
    assert of(1.0, "NGRAM") == revisions["no draft"]
    with pytest.raises(ValueError, match=r"--speculative-draft-model-path: .* not have their files: set the path"):
        of(1.0, speculative_draft_model_path=str(tmp_path / "nothing"))


# Other inputs


VISION = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2},
}


def test_sglang_gives_images_of_different_shape_and_equal_values_the_same_hash() -> None:
    """Shows why models with vision are rejected: this is SGLang's own identity of an image."""
    pads = []
    for grid in ([1, 4, 8], [1, 8, 4]):
        item = MultimodalDataItem(modality=Modality.IMAGE, feature=torch.ones(32, 8))
        item.image_grid_thw = torch.tensor([grid])
        item.set_pad_value()
        pads.append(item.pad_values)
    assert pads[0] == pads[1]
    other = MultimodalDataItem(modality=Modality.IMAGE, feature=torch.zeros(32, 8))
    other.set_pad_value()
    assert other.pad_values != pads[0]


def test_a_model_with_vision_is_rejected_unless_sglang_s_identity_of_images_is_accepted(tmp_path: Path) -> None:
    folder = engines.model_folder(tmp_path / "vision", **VISION)
    with pytest.raises(ValueError, match=r"a 64-bit hash .*--language-model-only.* multimodal: true"):
        revision(folder, enable_multimodal=True)
    accepted = revision(folder, multimodal=True, enable_multimodal=True)
    with runtime_context.get_disagg().override(language_model_only=True):
        assert identity.model_revision("", False) != accepted
    with pytest.raises(ValueError, match="--trust-mm-content-hashes"):
        revision(folder, multimodal=True, enable_multimodal=True, trust_mm_content_hashes=True)
