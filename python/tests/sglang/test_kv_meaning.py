"""Engines share pages only where the same tokens have the same KV: settings, weights and adapters of an engine, and its requests."""

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
from test_storage import storage_config, storage_of

from reprise.sglang import identity

PROMPT = list(range(64))
PROCESS_START_S = identity._process_start_s
FILES = {"model_digest": ""}
"""Weights are identified by their files."""


def revision(folder: Path, digest: str = "", multimodal: bool = False, **settings: Any) -> str:
    """What keys of an engine have as the model's revision."""
    engines.publish(folder, **settings)
    return identity.model_revision(digest, multimodal)


def different(revisions: dict[str, str]) -> bool:
    """Whether no two are the same."""
    return len(set(revisions.values())) == len(revisions)


# Requests


def test_page_hashes_cover_all_tokens_before_and_in_a_page(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first, second = engine.hashes(PROMPT), engine.hashes([9_999, *PROMPT[1:]])
    assert len(first) == 8
    assert not set(first) & set(second), "the first token is other, so each page behind it is"
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
        "another salt": pages(cache_salt="two"),
        "an extra key": pages(extra_key="one"),
        "both": pages(extra_key="one", cache_salt="two"),
        "both, cut otherwise": pages(extra_key="onet", cache_salt="wo"),
    }
    assert different(namespaces)


def request(lora: LoRARef | None) -> Req:
    """SGLang's, of an adapter."""
    lora_id = lora.lora_id if lora is not None else None
    return Req("r", "", array("q", PROMPT), SamplingParams(), lora_id=lora_id)


def test_an_adapter_that_is_loaded_into_a_running_engine_finds_nothing_of_an_earlier_load(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    path = str(adapter(tmp_path / "law", seed=1))
    # The tokenizer's process makes one for each load, also where it loads an evicted adapter again.
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
    """As SGLang reads ``--lora-paths``."""
    path = str(folder)
    return LoRARef(lora_id=LoRARef.deterministic_id("law", path), lora_name="law", lora_path=path, pinned=False)


def test_an_adapter_that_was_trained_again_under_its_name_and_path_finds_no_old_pages(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    def started(seed: int) -> tuple[engines.Engine, str]:
        folder = adapter(tmp_path / "law", seed=seed)
        ref = loaded_at_start(folder)
        return make_engine(enable_lora=True, lora_paths=[ref]), ref.lora_id

    before, lora_id = started(seed=1)
    assert before.serve(PROMPT, lora=lora_id) == 0
    again, same_id = started(seed=1)
    assert again.serve(PROMPT, lora=same_id) == len(PROMPT)
    after, id_after = started(seed=2)
    assert id_after == lora_id, "SGLang has name and path in it only"
    assert after.hashes(PROMPT, lora_id) == before.hashes(PROMPT, lora_id)
    assert after.serve(PROMPT, lora=lora_id) == 0


@pytest.fixture(autouse=True)
def processes_start_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's process starts when it is made here, and not when pytest has started."""
    monkeypatch.setattr(identity, "_process_start_s", time.time)


def test_an_adapter_whose_files_change_while_the_engine_starts_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter(tmp_path / "law", seed=1)
    monkeypatch.setattr(identity, "_process_start_s", PROCESS_START_S)
    with pytest.raises(ValueError, match=r"were written while this engine started.* start the engine again"):
        revision(model, enable_lora=True, lora_paths=[loaded_at_start(folder)])


def test_an_adapter_of_which_there_are_no_files_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no files: give the path of a folder, or load it with /load_lora_adapter"):
        revision(model, enable_lora=True, lora_paths=[loaded_at_start(tmp_path / "nothing")])


def test_what_an_engine_makes_of_the_same_adapter_is_in_its_keys(model: Path, tmp_path: Path) -> None:
    ref = loaded_at_start(adapter(tmp_path / "law", seed=1))
    lora = {"enable_lora": True, "lora_paths": [ref], "max_lora_rank": 8}
    revisions = {
        "without adapters": revision(model),
        "all of its modules": revision(model, **lora),
        "some of its modules": revision(model, **lora, lora_target_modules=["q_proj"]),
        "one outer factor for all experts": revision(model, **lora, experts_shared_outer_loras=True),
    }
    assert different(revisions)
    assert (
        revision(model, **{**lora, "max_loras_per_batch": 4, "lora_eviction_policy": "fifo"})
        == revisions["all of its modules"]
    )


# Weights


def test_weights_are_told_apart_by_their_bytes_not_by_where_they_lie(tmp_path: Path) -> None:
    revisions = {
        "one": revision(engines.model_folder(tmp_path / "one")),
        "trained again": revision(engines.model_folder(tmp_path / "two", 2.0)),
        "another configuration": revision(engines.model_folder(tmp_path / "three", rope_theta=1e6)),
    }
    assert different(revisions)
    assert revision(engines.model_folder(tmp_path / "elsewhere")) == revisions["one"]
    engines.model_folder(tmp_path / "one", 3.0)
    assert revision(tmp_path / "one") != revisions["one"], "trained again in place"


def test_a_digest_that_is_given_stands_for_the_weights(tmp_path: Path) -> None:
    one, two = engines.model_folder(tmp_path / "one"), engines.model_folder(tmp_path / "two", 2.0)
    assert revision(one, "a") == revision(two, "a") != revision(one, "b")
    assert revision(one, "a") != revision(one)


def test_a_model_of_the_hub_is_named_by_its_commit(tmp_path: Path) -> None:
    def snapshot(cache: str, commit: str) -> Path:
        return engines.model_folder(tmp_path / cache / "models--a--b" / "snapshots" / commit)

    one, other = "1" * 40, "2" * 40
    assert revision(snapshot("here", one)) == revision(snapshot("there", one)) != revision(snapshot("here", other))


def test_weights_that_cannot_be_told_apart_are_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="set model_digest"):
        storage_of(storage_config(changes=FILES), HostPool())
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
        # SGLang's host memory has the same dtype for both, uint8.
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


def test_the_order_of_bytes_in_device_memory_and_states_of_other_dtypes_are_in_the_key(
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
        "trained again": of(2.0),
        "another way": of(1.0, "STANDALONE"),
        "in another dtype": of(1.0, speculative_draft_kv_cache_dtype="fp8_e4m3"),
    }
    assert different(revisions)
    assert of(1.0) == revisions["a draft"]
    assert of(1.0, "NGRAM") == revisions["no draft"]
    with pytest.raises(ValueError, match=r"--speculative-draft-model-path: .* no files: give the path"):
        of(1.0, speculative_draft_model_path=str(tmp_path / "nothing"))


# Inputs of other kinds


SEES = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2},
}


def test_sglang_gives_images_of_other_shapes_and_the_same_values_one_hash() -> None:
    """Why models that see are refused: this is SGLang's own identity of an image."""
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


def test_a_model_that_sees_is_refused_unless_its_operator_accepts_sglang_s_identity_of_images(tmp_path: Path) -> None:
    folder = engines.model_folder(tmp_path / "sees", **SEES)
    with pytest.raises(ValueError, match=r"64 bits of a hash .*--language-model-only.* multimodal: true"):
        revision(folder, enable_multimodal=True)
    accepted = revision(folder, multimodal=True, enable_multimodal=True)
    with runtime_context.get_disagg().override(language_model_only=True):
        assert identity.model_revision("", False) != accepted
    with pytest.raises(ValueError, match="--trust-mm-content-hashes"):
        revision(folder, multimodal=True, enable_multimodal=True, trust_mm_content_hashes=True)
