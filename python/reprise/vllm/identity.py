"""What names a model in keys: its weights, and all else that changes the KV that it computes of the same tokens.

Models change their configuration in place when they are built (MiniMax-M2 notes ``max_model_len`` there, Llama 4 how it scales queries), which
happens in the workers' processes and not in the scheduler's, unless they are one. So what vLLM has read is not asked: it is read
anew, from where vLLM has read it and with the same overrides, and is the same in every process. Workers and scheduler compare
what they have all the same (:class:`Handshake`).

What lies in vLLM's settings and changes KV is named one by one: another ``max_model_len`` alone shares, where positions do not depend
on it.
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
"""What a configuration of transformers says of where and by what it was read: it differs between nodes."""

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
"""Kinds of RoPE that rotate a position alike whatever ``max_model_len`` is (``vllm.model_executor.layers.rotary_embedding``)."""

ROPES_OF_TWO_LENGTHS = frozenset({"longrope", "su"})
"""Those with one set of factors up to ``original_max_position_embeddings`` and another for engines that go beyond it."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""What a model's folder says of how images, video and audio become what the model sees."""

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
"""Settings of vLLM's for inputs of other kinds that say where and how fast, or that show in tokens or hashes. Others, also those of
releases to come, are in the keys."""

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
"""Settings of vLLM's for LoRA adapters that say how many there is room for and how they are computed, or that name an adapter, which is
in vLLM's hash; and the dtype, which is looked at by itself. Others, also those of releases to come, are in the keys where they are set."""

WITHOUT_DRAFT = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Ways of speculation that compute no KV of their own."""


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker's keys begin with, for the scheduler to compare."""

    namespace: bytes
    """Digest of the worker's namespace."""

    @staticmethod
    def check(workers: Mapping[int, KVConnectorHandshakeMetadata], namespaces: Mapping[int, bytes]) -> None:
        """Checks that workers and scheduler name blocks alike: else nothing that is asked about would ever be what was saved.

        Args:
            workers: what each tensor-parallel rank says.
            namespaces: digests of each rank's namespace, as the scheduler has them.

        Raises:
            ValueError: they do not, and what to do.
        """
        for rank, said in workers.items():
            if not isinstance(said, Handshake):
                raise ValueError(
                    f"the worker of rank {rank} says {type(said).__name__} about its keys: use the same version of the package "
                    "reprise in all processes of the engine"
                )
            if said.namespace != namespaces.get(rank):
                raise ValueError(
                    f"the worker of rank {rank} and the scheduler would give the same blocks different keys, so nothing would ever be "
                    "found: they see other weights, another configuration of the model or another processor. Let all nodes of "
                    "the engine have the same files, environment (PYTHONHASHSEED) and versions of vllm and reprise; where that is so, "
                    "this model changes its own configuration: leave the connector out for it, and report it"
                )


def model_digest(config: VllmConfig, weights_digest: str) -> str:
    """What names the weights, and everything else about the model that changes its KV.

    Args:
        config: vLLM's configuration.
        weights_digest: of the weights; empty: read from where they are.

    Raises:
        ValueError: weights that cannot be told apart from others.
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
    # Only what is said is in the digest, so that engines share which do not have it.
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
    """The model's name in keys: of the hub, where it comes from there."""
    snapshot = weights.hub_snapshot(config.model_config.model)
    return snapshot[0] if snapshot is not None else str(config.model_config.model)


def configuration_of(model: ModelConfig) -> PretrainedConfig:
    """A model's configuration as it was before any model was built, overrides included."""
    try:
        return _read_anew(model)
    except Exception as error:
        # What a model's files may raise is anybody's guess (its own code may run). The handshake tells if it matters.
        logger.warning(
            "the configuration of %s cannot be read again (%s): keys are made of what this process has",
            model.model,
            error,
        )
        return model.hf_config


def _read_anew(model: ModelConfig) -> PretrainedConfig:
    """As vLLM's ``ModelConfig`` reads it."""
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
    """What the model's positions have of ``max_model_len``; nothing, of most models."""
    # With "auto" the model is built for its longest, and the engine may settle for less.
    length: int | str = "auto" if model.original_max_model_len == -1 else model.max_model_len
    said: list[Any] = []
    for rope in _ropes(architecture):
        kind = _kind(rope)
        original = rope.get("original_max_position_embeddings", architecture.get("original_max_position_embeddings"))
        if kind in ROPES_OF_ANY_LENGTH:
            continue
        if kind in ROPES_OF_TWO_LENGTHS and isinstance(length, int) and isinstance(original, int):
            said.append("long" if length > original else "short")
        else:
            said.append(length)
    return said


def _ropes(described: Any) -> Iterator[dict[str, Any]]:
    """Every description of a RoPE in a configuration, of all its parts."""
    if not isinstance(described, dict):
        return
    for name, value in sorted(described.items()):
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            # One of the model, or one for each kind of its layers.
            yield from (part for part in (value, *value.values()) if isinstance(part, dict) and _kind(part) is not None)
        else:
            yield from _ropes(value)


def _kind(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))


def _inputs(model: ModelConfig, settings: MultiModalConfig) -> dict[str, Any]:
    """How inputs of other kinds than text become what the model sees, as far as vLLM's hash of them does not have it: it covers the
    input and what its request asks for, and not what the engine does with all of them."""
    described = {each.name: getattr(settings, each.name) for each in fields(settings) if each.name not in NOT_INPUTS}
    processor = described.get("mm_processor_kwargs") or {}
    described["mm_processor_kwargs"] = {name: value for name, value in processor.items() if name != "device"}
    scales = described.get("mm_encoder_fp8_scale_path")
    described["mm_encoder_fp8_scale_path"] = _of_file(scales) if scales else None
    folder = Path(model.model)
    if folder.is_dir() and weights.hub_snapshot(model.model) is None:
        # A commit of the hub has them. Here they are beside weights that are told apart by their bytes.
        described["files"] = {name: _of_file(folder / name) for name in PROCESSOR_FILES}
    return described


def _of_file(file: str | Path) -> str | None:
    """What a small file holds; None: there is none."""
    if not Path(file).is_file():
        return None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _adapters(settings: LoRAConfig, model: ModelConfig) -> dict[str, Any]:
    """What an engine makes of the same adapter; nothing, of most engines."""
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
    """Whose KV lies in the same blocks as the model's: that of what guesses its next tokens."""
    speculation = config.speculative_config
    draft = speculation.draft_model_config
    described: dict[str, Any] = {"method": speculation.method}
    if draft is not None and draft.model != config.model_config.model:
        described["weights"] = _weights(draft, config.load_config.load_format)
        described["dtype"] = str(draft.dtype)
    return described


def _weights(model: ModelConfig, load_format: str) -> str:
    """What names weights, the same on every node.

    vLLM resolves the revision of a model of the hub to a commit, once; offline it has the path of the commit's snapshot instead of the
    model's name.
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
        raise ValueError(f"Reprise cannot tell which weights {model.model!r} has: set weights_digest")
    return f"sample:{weights.sample(found)}"


def _revision(model: ModelConfig) -> str:
    """The revision where it says something that the weights' name does not: what it resolves to, or the words of who asked."""
    commit = getattr(model.revision, "resolved", None)
    if commit is not None:
        return str(commit)
    if (snapshot := weights.hub_snapshot(model.model)) is not None:
        return snapshot[1]
    return "" if model.revision in (None, "main") else str(model.revision)
