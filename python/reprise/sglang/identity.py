"""Identity of a model in keys: its weights, its adapters, and each setting of SGLang that changes the KV of the same tokens.

SGLang passes only the model's name and the ranks to a storage. Everything else is read from the configuration that SGLang
publishes in its scheduler's process (``sglang.srt.runtime_context``). Whole groups of settings are part of the keys,
including settings of later versions. Settings that cannot change KV or that differ between nodes are excluded by name.

SGLang's page hashes cover a request's tokens, its ``extra_key`` and ``cache_salt``, and the id of its LoRA adapter. The id
of an adapter that is loaded at run time is random. The id of an adapter of ``--lora-paths`` is derived from its name and
path, which a retrained adapter keeps. So the digests of these adapters are part of the identity of every page.
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
        # Refer to the weights, which are identified by their bytes or by model_digest.
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
        # Placement of expert computation.
        "shared_experts",
    }
)
"""Settings of SGLang's group ``model`` that cannot change KV."""

FILES_MODEL = ("quantization_param_path", "rl_quant_profile")
"""Settings that name a file; its contents are part of the identity."""

NOT_KV_LORA = frozenset(
    {
        # Each adapter is in the identity by its digest.
        "lora_paths",
        # Capacities and kernels.
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
"""Settings of a draft model that change its KV, which is in the same pages or next to them."""

WITHOUT_DRAFT = ("NGRAM",)
"""Speculation algorithms that compute no KV."""

KV_MAMBA = ("mamba_ssm_dtype", "enable_mamba_cache_stochastic_rounding", "enable_int8_mamba_checkpoint")
"""Settings that change the bytes of Mamba states."""

CONFIGURATION = "config.json"


def model_revision(model_digest: str, allow_multimodal: bool) -> str:
    """Returns the model's revision in keys.

    Args:
        model_digest: digest of the weights from the configuration; empty: the weights are identified by their files.
        allow_multimodal: whether the operator accepts SGLang's hashes of images, video and audio.

    Raises:
        ValueError: the engine's KV cannot be identified; the message has the remedy.
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
    """Returns SGLang's version, because the byte order of pages may change between versions."""
    from sglang.version import __version__

    return str(__version__)


def _fields(group: Any) -> dict[str, Any]:
    """Returns the published settings of a group."""
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
            "--hicache-storage-backend-extra-config: RepriseStorage cannot identify the weights of "
            f"{model.model_path!r}: set model_digest to a text that changes with weights, revision and configuration"
        )
    return found


def _weights(path: str, revision: str | None) -> str | None:
    """Returns the identity of weights and their configuration; None if this machine does not have their files."""
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
    """Returns a digest of a small file, or its name if this process does not find the file."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else f"name:{file}"


def _inputs(allow_multimodal: bool) -> str:
    from sglang.srt.runtime_context import get_disagg, get_mm, process_model_config

    if not process_model_config().is_multimodal or get_disagg().language_model_only:
        return "text"
    if not allow_multimodal:
        raise ValueError(
            "--hicache-storage-backend-extra-config: SGLang identifies an image by a 64-bit hash of its pixels without their "
            "arrangement, so an image can get the KV of another (for example, images of one colour with swapped width and height): "
            "serve a text model (or set --language-model-only, if SGLang has it), or accept this with multimodal: true"
        )
    if get_mm().trust_mm_content_hashes:
        raise ValueError(
            "--trust-mm-content-hashes: clients could send equal hashes for different images, and RepriseStorage would save wrong "
            "KV for all engines: remove this option"
        )
    return "multimodal"


def _adapters() -> dict[str, Any]:
    """Returns the adapters of ``--lora-paths`` and the settings that change their effect; empty without adapters."""
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
            f"--lora-paths: RepriseStorage cannot identify the adapter {path!r}, because this machine does not have its files: "
            "set the path of a folder, or load the adapter with /load_lora_adapter after the start"
        )
    # SGLang may have read the files before they changed.
    if files.changed_since(_process_start_s()):
        raise ValueError(
            f"--lora-paths: files of the adapter {path!r} changed while this engine started, so RepriseStorage does not know which "
            "of them SGLang has loaded: restart the engine"
        )
    return files.digest().hex()


def _draft() -> dict[str, Any]:
    """Returns the identity of the draft model and its settings; empty without a draft model."""
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
                f"--speculative-draft-model-path: RepriseStorage cannot identify the weights of {path!r}, because this machine "
                "does not have their files: set the path of a folder"
            )
        described["weights"] = found
    return described


def _process_start_s() -> float:
    """Returns the start of this process in seconds since the epoch (proc(5): field 22 of ``stat``, in ticks since boot)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
