"""Identity of a model in keys: its weights, and every setting that changes the KV of the same tokens.

Some models change their configuration object while they are built (MiniMax-M2 stores ``max_model_len`` in it, Llama 4 its
query scaling). This happens in the workers' processes, but not in the scheduler's. So the configuration is read again from
vLLM's source with the same overrides, which gives the same result in every process. Workers and scheduler also compare
their namespaces (:class:`Handshake`).

Settings of vLLM that change KV are listed one by one. For example, engines that differ only in ``max_model_len`` share
blocks if positions do not depend on it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from reprise import digest, weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import LoRAConfig, ModelConfig, VllmConfig
    from vllm.config.multimodal import MultiModalConfig

logger = logging.getLogger("reprise")

NOT_ARCHITECTURE = ("_name_or_path", "transformers_version")
"""Fields of a transformers configuration that describe its source; they differ between nodes."""

ROPES_OF_ANY_LENGTH = frozenset(
    {
        "default",
        "linear",
        "ntk",
        "llama3",
        "yarn",
        "deepseek_yarn",
        "deepseek_llama_scaling",
        "mrope",
        "bailing_mrope",
        "proportional",
        "openpangu",
        "mllama4",
    }
)
"""Kinds of RoPE whose rotation does not depend on ``max_model_len`` (``vllm.model_executor.layers.rotary_embedding``)."""

ROPES_OF_TWO_LENGTHS = frozenset({"longrope", "su"})
"""Kinds of RoPE with one set of factors up to ``original_max_position_embeddings`` and another for longer engines."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files in a model's folder that define the preprocessing of images, video and audio."""

NOT_INPUTS = frozenset(
    {
        "limit_per_prompt",
        "enable_mm_embeds",
        "interleave_mm_strings",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_hasher_algorithm",
        "mm_shm_cache_max_object_size_mb",
        "mm_encoder_tp_mode",
        "mm_encoder_attn_backend",
        "mm_encoder_fp8_scale_save_path",
        "mm_encoder_fp8_scale_save_margin",
        "mm_ipc_gpu_memory_gb",
        "mm_tensor_ipc",
        "skip_mm_profiling",
    }
)
"""Multimodal settings of vLLM that do not change KV, or whose effect is in tokens or hashes. All other settings, also
those of future releases, are part of the keys."""

NOT_ADAPTERS = frozenset(
    {
        "max_lora_rank",
        "max_loras",
        "max_cpu_loras",
        "max_lora_cls_labels",
        "fully_sharded_loras",
        "specialize_active_lora",
        "default_mm_loras",
        "lora_dtype",
    }
)
"""LoRA settings of vLLM that do not change KV: capacities and kernels, the adapter's name (part of vLLM's hash), and the
dtype, which is handled separately. All other settings that are set, also those of future releases, are part of the keys."""

WITHOUT_DRAFT = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Speculation methods that compute no KV."""


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):
    """Namespace of a worker, which the scheduler compares with its own."""

    namespace: bytes
    """Digest of the namespace."""

    @staticmethod
    def check(workers: Mapping[int, KVConnectorHandshakeMetadata], namespaces: Mapping[int, bytes]) -> None:
        """Checks that workers and scheduler derive the same keys; otherwise no saved block would ever be found.

        Args:
            workers: handshake of each tensor-parallel rank.
            namespaces: digest of each rank's namespace in the scheduler.

        Raises:
            ValueError: the namespaces differ; the message has the remedy.
        """
        for rank, handshake in workers.items():
            if not isinstance(handshake, Handshake):
                raise ValueError(
                    f"the worker of rank {rank} sent an unknown handshake ({type(handshake).__name__}): use the same version of "
                    "the package reprise in all processes of the engine"
                )
            if handshake.namespace != namespaces.get(rank):
                raise ValueError(
                    f"the worker of rank {rank} and the scheduler derive different keys for the same blocks, so no block would ever "
                    "be found: their weights, model configuration or processors differ. Use the same files, environment "
                    "(PYTHONHASHSEED) and versions of vllm and reprise on all nodes of the engine. If they are equal, this model "
                    "changes its own configuration: run it without the connector, and report it"
                )


def model_digest(config: VllmConfig, weights_digest: str) -> str:
    """Returns a digest of the weights and of everything else about the model that changes its KV.

    Args:
        config: vLLM's configuration.
        weights_digest: digest of the weights; empty: derived from their files or their commit.

    Raises:
        ValueError: the weights cannot be identified.
    """
    model = config.model_config
    architecture = digest.plain(configuration_of(model).to_dict(), NOT_ARCHITECTURE)
    described: dict[str, Any] = {
        "architecture": _digest(architecture),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "quantization": str(model.quantization),
        "revision": _revision(model),
        "weights": weights_digest or _weights(model, config.load_config.load_format),
    }
    # Optional settings are part of the digest only if set, so that engines without them share blocks.
    if model.quantization_config:
        described["quantization_config"] = model.quantization_config
    if skipped := config.cache_config.kv_cache_dtype_skip_layers:
        described["kv_cache_dtype_skip_layers"] = sorted(skipped)
    if config.lora_config is not None and (adapters := _adapters(config.lora_config, model)):
        described["adapters"] = adapters
    if of_length := _of_length(architecture, model):
        described["length"] = of_length
    if model.multimodal_config is not None:
        described["inputs"] = _inputs(model, model.multimodal_config)
    speculation = config.speculative_config
    if speculation is not None and speculation.method not in WITHOUT_DRAFT:
        described["draft"] = _draft(config)
    return _digest(described)


def model_name(config: VllmConfig) -> str:
    """Returns the model's name in keys: the hub's repository for a hub snapshot, else vLLM's name."""
    snapshot = weights.hub_snapshot(config.model_config.model)
    return snapshot[0] if snapshot is not None else str(config.model_config.model)


def configuration_of(model: ModelConfig) -> PretrainedConfig:
    """Returns a model's configuration, with overrides, as it was before the model was built."""
    try:
        return _read_again(model)
    except Exception as error:
        # Any exception is possible, because the model's own code may run. The handshake detects a difference.
        logger.warning(
            "cannot read the configuration of %s again (%s): deriving keys from the configuration of this process",
            model.model,
            error,
        )
        return model.hf_config


def _read_again(model: ModelConfig) -> PretrainedConfig:
    """Reads the configuration in the same way as vLLM's ``ModelConfig``."""
    from vllm.transformers_utils.config import get_config

    overrides = model.hf_overrides
    flat: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    if not callable(overrides):
        for name, value in overrides.items():
            (nested if isinstance(value, dict) else flat)[name] = value
    read = get_config(
        model.hf_config_path or model.model,
        model.trust_remote_code,
        getattr(model, "_hf_config_revision", None) or model.revision,
        model.code_revision,
        model.config_format,
        hf_overrides_kw=flat,
        hf_overrides_fn=overrides if callable(overrides) else None,
        token=model.hf_token,
    )
    if nested:
        model._apply_dict_overrides(read, nested)
    return read


def _digest(described: Any) -> str:
    return digest.digest(described, NOT_ARCHITECTURE)


def _of_length(architecture: Any, model: ModelConfig) -> list[Any]:
    """Returns how positions depend on ``max_model_len``, one entry per RoPE; empty for most models."""
    # With "auto" the model is built for its maximum length, even if the engine then uses a shorter one.
    length: int | str = "auto" if model.original_max_model_len == -1 else model.max_model_len
    described: list[Any] = []
    for rope in _ropes(architecture):
        kind = _kind(rope)
        original = rope.get("original_max_position_embeddings", architecture.get("original_max_position_embeddings"))
        if kind in ROPES_OF_ANY_LENGTH:
            continue
        if kind in ROPES_OF_TWO_LENGTHS and isinstance(length, int) and isinstance(original, int):
            described.append("long" if length > original else "short")
        else:
            described.append(length)
    return described


def _ropes(described: Any) -> Iterator[dict[str, Any]]:
    """Yields every RoPE description in a configuration, recursively."""
    if not isinstance(described, dict):
        return
    for name, value in sorted(described.items()):
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            # Either one for the model, or one for each kind of layer.
            yield from (part for part in (value, *value.values()) if isinstance(part, dict) and _kind(part) is not None)
        else:
            yield from _ropes(value)


def _kind(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))


def _inputs(model: ModelConfig, settings: MultiModalConfig) -> dict[str, Any]:
    """Returns the engine's settings for preprocessing multimodal inputs.

    vLLM's hash of an input covers the input and its request's options, but not the engine's settings.
    """
    described = {each.name: getattr(settings, each.name) for each in fields(settings) if each.name not in NOT_INPUTS}
    processor = described.get("mm_processor_kwargs") or {}
    described["mm_processor_kwargs"] = {name: value for name, value in processor.items() if name != "device"}
    scales = described.get("mm_encoder_fp8_scale_path")
    described["mm_encoder_fp8_scale_path"] = _of_file(scales) if scales else None
    folder = Path(model.model)
    if folder.is_dir() and weights.hub_snapshot(model.model) is None:
        # A hub commit covers these files. Otherwise the weights are identified by their bytes, and the files separately.
        described["files"] = {name: _of_file(folder / name) for name in PROCESSOR_FILES}
    return described


def _of_file(file: str | Path) -> str | None:
    """Returns a digest of a small file's contents; None if the file does not exist."""
    if not Path(file).is_file():
        return None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _adapters(settings: LoRAConfig, model: ModelConfig) -> dict[str, Any]:
    """Returns the engine's settings that change the effect of an adapter; empty for most engines."""
    described: dict[str, Any] = {}
    for name in (each.name for each in fields(settings) if each.name not in NOT_ADAPTERS):
        value = getattr(settings, name)
        if isinstance(value, list | tuple | set):
            described[name] = sorted(value)
        elif value not in (None, False):
            described[name] = value
    if str(settings.lora_dtype) not in ("auto", str(model.dtype)):
        described["lora_dtype"] = str(settings.lora_dtype)
    return described


def _draft(config: VllmConfig) -> dict[str, Any]:
    """Returns the identity of the draft model, whose KV is in the same blocks as the model's."""
    speculation = config.speculative_config
    draft = speculation.draft_model_config
    described: dict[str, Any] = {"method": speculation.method}
    if draft is not None and draft.model != config.model_config.model:
        described["weights"] = _weights(draft, config.load_config.load_format)
        described["dtype"] = str(draft.dtype)
    return described


def _weights(model: ModelConfig, load_format: str) -> str:
    """Returns the identity of weights, equal on every node.

    vLLM resolves the revision of a hub model to a commit. Offline, the model's name is the path of the commit's snapshot.
    """
    if load_format == "dummy":
        return f"dummy:{model.seed}"
    if (commit := getattr(model.revision, "resolved", None)) is not None:
        return f"hub:{model.model}@{commit}"
    if (snapshot := weights.hub_snapshot(model.model)) is not None:
        repository, commit = snapshot
        return f"hub:{repository}@{commit}"
    found = weights.files(Path(model.model))
    if not found:
        raise ValueError(f"Reprise cannot identify the weights of {model.model!r}: set weights_digest")
    return f"sample:{weights.sample(found)}"


def _revision(model: ModelConfig) -> str:
    """Returns the commit of the revision, or the configured revision if it cannot be resolved and is not the default."""
    commit = getattr(model.revision, "resolved", None)
    if commit is not None:
        return str(commit)
    if (snapshot := weights.hub_snapshot(model.model)) is not None:
        return snapshot[1]
    return "" if model.revision in (None, "main") else str(model.revision)
