"""The identity of a model in keys: its weights, its adapters, and each setting of SGLang that changes the KV of the same tokens.

SGLang passes a storage the model's name and the ranks. All else is read here from the configuration that SGLang publishes in its
scheduler's process (``sglang.srt.runtime_context``). Whole groups of settings are in the keys, those of later versions of SGLang
included; settings that cannot change KV, and those that differ between nodes, are excluded by name.

SGLang's page hashes cover a request's tokens, its ``extra_key`` and ``cache_salt``, and the id of its LoRA adapter. That id is random
for an adapter that is loaded into a running engine. For one of ``--lora-paths`` it is made of name and path, which an adapter keeps
when it is trained again; so the digests of these adapters are part of the identity of every page of the engine.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from reprise import weights
from reprise.adapters import AdapterFiles
from reprise.digest import digest

NOT_KV_MODEL = frozenset(
    {
        # Name the weights, which are identified by their bytes or by model_digest.
        "model_path",
        "model_checksum",
        "download_dir",
        "modelopt_checkpoint_restore_path",
        "decrypted_config_file",
        "decrypted_draft_config_file",
        # How weights are loaded, shared or exported.
        "load_format",
        "trust_remote_code",
        "startup_weight_load_mode",
        "is_startup_weight_load_overlap",
        "custom_weight_loader",
        "weight_loader_disable_mmap",
        "weight_loader_prefetch_checkpoints",
        "weight_loader_prefetch_num_threads",
        "weight_loader_drop_cache_after_load",
        "remote_instance_weight_loader_seed_instance_ip",
        "remote_instance_weight_loader_seed_instance_service_port",
        "remote_instance_weight_loader_send_weights_group_ports",
        "remote_instance_weight_loader_backend",
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        "engine_info_bootstrap_port",
        "modelexpress_config",
        "modelopt_checkpoint_save_path",
        "modelopt_export_path",
        "delete_ckpt_after_loading",
        "checkpoint_engine_wait_weights_before_ready",
        "weight_cache_mode",
        "weight_cache_socket",
        "weight_cache_timeout",
        # Where experts are computed.
        "shared_experts",
    }
)
"""Settings of SGLang's group ``model`` that cannot change KV."""

FILES_MODEL = ("quantization_param_path", "rl_quant_profile")
"""Settings that name a file, whose content counts."""

NOT_KV_LORA = frozenset(
    {
        # Each adapter is in the identity by its digest.
        "lora_paths",
        # How many adapters there is room for, and how they are computed.
        "enable_lora_overlap_loading",
        "max_lora_rank",
        "max_loaded_loras",
        "max_loras_per_batch",
        "lora_eviction_policy",
        "lora_backend",
        "max_lora_chunk_size",
        "lora_use_virtual_experts",
        "lora_drain_wait_threshold",
    }
)
"""Settings of SGLang's group ``lora`` that cannot change KV."""

KV_DRAFT = (
    "speculative_algorithm",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_model_quantization",
    "enable_multi_layer_eagle",
)
"""Settings of a draft model that change its KV, which lies in the same pages or beside them."""

WITHOUT_DRAFT = ("NGRAM",)
"""Ways of speculation that compute no KV."""

KV_MAMBA = ("mamba_ssm_dtype", "enable_mamba_cache_stochastic_rounding", "enable_int8_mamba_checkpoint")
"""Settings of states that change their bytes."""

CONFIGURATION = "config.json"


def model_revision(model_digest: str, allow_multimodal: bool) -> str:
    """What goes into keys as the model's revision.

    Args:
        model_digest: of the weights, given by the operator; empty: they are identified by their files.
        allow_multimodal: whether SGLang's identity of images, video and audio is good enough for this engine's operator.

    Raises:
        ValueError: this engine cannot be told from one with other KV, and what to do.
    """
    described = {
        "sglang": _version(),
        "weights": _main_weights(model_digest),
        "settings": _settings(),
        "inputs": _inputs(allow_multimodal),
    }
    if adapters := _adapters():
        described["adapters"] = adapters
    if draft := _draft():
        described["draft"] = draft
    return digest(described)


def _version() -> str:
    """Pages have the order of bytes of one version."""
    from sglang.version import __version__

    return str(__version__)


def _fields(group: Any) -> dict[str, Any]:
    """Settings of a group that SGLang publishes."""
    fields = object.__getattribute__(group, "_fields")
    assert isinstance(fields, dict)
    return fields


def _main_weights(model_digest: str) -> str:
    from sglang.srt.runtime_context import get_model

    if model_digest:
        return f"digest:{model_digest}"
    model = get_model()
    if model.load_format == "dummy":
        return "dummy"
    found = _weights(str(model.model_path), model.revision)
    if found is None:
        raise ValueError(
            "--hicache-storage-backend-extra-config: RepriseStorage cannot tell which weights "
            f"{model.model_path!r} has: set model_digest to something that differs wherever weights, revision or configuration do"
        )
    return found


def _weights(path: str, revision: str | None) -> str | None:
    """Identifies weights and the configuration beside them; None: this machine has no files of them."""
    folder: Path | None = Path(path).expanduser()
    assert folder is not None
    if not folder.exists():
        folder = None if folder.is_absolute() else weights.downloaded(path, revision)
    if folder is None:
        return None
    if (snapshot := weights.hub_snapshot(str(folder))) is not None:
        return f"hub:{snapshot[0]}@{snapshot[1]}"
    files = weights.files(folder)
    if not files:
        return None
    return f"sample:{weights.sample(files)}:{_content(folder / CONFIGURATION)}"


def _settings() -> dict[str, Any]:
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_exec, get_model

    settings = {name: value for name, value in _fields(get_model()).items() if name not in NOT_KV_MODEL}
    for name in FILES_MODEL:
        if settings.get(name):
            settings[name] = _content(Path(settings[name]))
    mamba = get_exec().mamba
    settings.update({name: getattr(mamba, name) for name in KV_MAMBA})
    settings["hnd"] = envs.SGLANG_USE_HND_KVCACHE.get()
    return settings


def _content(file: Path) -> str:
    """Identifies a small file by its content; one that this process does not find by its name."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else f"name:{file}"


def _inputs(allow_multimodal: bool) -> str:
    from sglang.srt.runtime_context import get_disagg, get_mm, process_model_config

    if not process_model_config().is_multimodal or get_disagg().language_model_only:
        return "text"
    if not allow_multimodal:
        raise ValueError(
            "--hicache-storage-backend-extra-config: SGLang identifies an image by 64 bits of a hash over its pixels, without "
            "their arrangement, so an image can get the KV of another (one-coloured images of turned sides do): serve a "
            "model of text (or --language-model-only, where SGLang has it), or accept this with multimodal: true"
        )
    if get_mm().trust_mm_content_hashes:
        raise ValueError(
            "--trust-mm-content-hashes: clients could give different images one hash, and RepriseStorage would keep the wrong "
            "KV for all engines; leave it out"
        )
    return "multimodal"


def _adapters() -> dict[str, Any]:
    """Adapters of ``--lora-paths`` by their id, and what changes each adapter's effect; empty: an engine without adapters."""
    from sglang.srt.runtime_context import get_lora

    lora = get_lora()
    if not lora.enable_lora and not lora.lora_paths:
        return {}
    described = {name: value for name, value in _fields(lora).items() if name not in NOT_KV_LORA}
    if isinstance(targets := described.get("lora_target_modules"), list | tuple | set):
        described["lora_target_modules"] = sorted(targets)
    described["digests"] = {ref.lora_id: _adapter_digest(str(ref.lora_path)) for ref in lora.lora_paths or ()}
    return described


def _adapter_digest(path: str) -> str:
    files = AdapterFiles.find(path)
    if files is None:
        raise ValueError(
            f"--lora-paths: RepriseStorage cannot tell which weights the adapter {path!r} has, of which this machine has no "
            "files: give the path of a folder, or load it with /load_lora_adapter after the start"
        )
    # SGLang has read them, maybe before they changed.
    if files.changed_since(_process_start_s()):
        raise ValueError(
            f"--lora-paths: files of the adapter {path!r} were written while this engine started, so RepriseStorage cannot "
            "tell which SGLang has loaded: start the engine again"
        )
    return files.digest().hex()


def _draft() -> dict[str, Any]:
    """What changes the KV of a draft model; empty: there is none."""
    from sglang.srt.runtime_context import get_model, get_spec

    spec = get_spec()
    algorithm = spec.speculative_algorithm
    if algorithm is None or str(algorithm).upper() in WITHOUT_DRAFT:
        return {}
    described = {name: getattr(spec, name) for name in KV_DRAFT}
    if spec.uno_lora_path is not None:
        described["adapter"] = _adapter_digest(str(spec.uno_lora_path))
    path = spec.speculative_draft_model_path
    if path is not None and path != get_model().model_path:
        found = _weights(str(path), spec.speculative_draft_model_revision)
        if found is None:
            raise ValueError(
                f"--speculative-draft-model-path: RepriseStorage cannot tell which weights {path!r} has, of which this machine "
                "has no files: give the path of a folder"
            )
        described["weights"] = found
    return described


def _process_start_s() -> float:
    """When this process started, in seconds since the epoch (proc(5): field 22 of ``stat``, in ticks since the boot)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
