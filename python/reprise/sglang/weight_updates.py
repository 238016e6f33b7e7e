"""Detection of weight updates in a running SGLang engine, which SGLang does not report to a storage.

The storage runs in the process of SGLang's scheduler, which handles each update. So SGLang's methods that change weights
are wrapped in their classes when the first storage is created, before SGLang binds these methods. While such a method
runs, the key generation is suspended (:mod:`reprise.sglang.generation`). It resumes with new keys when both hold:

- The weights are complete: no update session is open, and they are not released.
- SGLang's cache is empty: it was reset (``flush_cache``), or it is empty at the end of the update, as in engines that were
  paused and flushed before.

A version of SGLang with other update methods than the known ones is rejected at the start, because an unknown method could
change weights undetected.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

from reprise.sglang.generation import Generation

logger = logging.getLogger("reprise")

MANAGER = ("sglang.srt.managers.scheduler_components.weight_updater", "SchedulerWeightUpdaterManager")
"""Class that handles all weight requests in the scheduler."""

CONTROLLER = ("sglang.srt.managers.cache_controller", "HiCacheController")
"""Class that moves pages between GPU, host memory and storage; each flush calls its reset."""

CHANGES_WEIGHTS = frozenset(
    {
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        # Between these two calls, a trainer writes weights directly by RDMA.
        "begin_weight_update",
        "end_weight_update",
        # Released weights are lost, unless SGLang keeps a copy in host memory.
        "release_memory_occupation",
        "resume_memory_occupation",
        # Overwrites weights with noise on request.
        "check_weights",
    }
)
"""Methods of the manager that can change weights."""

NEEDS_SESSION = frozenset({"update_weights_from_distributed", "update_weights_from_tensor", "end_weight_update"})
"""Methods that SGLang accepts only between ``begin_weight_update`` and ``end_weight_update``."""

KEEPS_WEIGHTS = frozenset(
    {
        "flush_cache_after_weight_update",
        "record_weight_version_after_update",
        "init_weights_update_group",
        "destroy_weights_update_group",
        "get_weights_by_name",
        "save_remote_model",
        "save_sharded_model",
    }
)
"""Methods of the manager that do not change weights."""

MANAGER_FIELDS = frozenset({"scheduler", "offload_tags", "_session"})
"""Fields of the manager that this module reads."""

REMEDY = "RepriseStorage cannot detect weight updates in this version: use sglang 0.5.23, or remove --hicache-storage-backend"


class WeightUpdates:
    """State of weight updates in this process' engine, and its key generation."""

    def __init__(self) -> None:
        self.generation = Generation()
        self._manager: Any = None
        self._depth = 0
        """Nesting depth of running calls that change weights; an update may itself flush the cache."""

    def run_change(self, manager: Any, name: str, call: Callable[[], Any]) -> Any:
        """Runs a call that changes weights, with the generation suspended."""
        self._manager = manager
        self._depth += 1
        self.generation.suspend()
        outcome = "raised"
        try:
            result = call()
            outcome = str(getattr(result, "success", True))
            return result
        finally:
            self._depth -= 1
            self.generation.note(f"{name}:{outcome}")
            self._resume_if(_is_empty)

    def run_other(self, call: Callable[[], Any]) -> Any:
        """Runs a call that does not change weights but may complete an update."""
        try:
            return call()
        finally:
            self._resume_if(_is_empty)

    def handle_cache_reset(self) -> None:
        """Resumes the generation if possible, after SGLang has reset its cache."""
        self._resume_if(_has_no_backups)

    def _resume_if(self, is_clean: Callable[[Any], bool]) -> None:
        if not self.generation.is_suspended or self._depth or not self._weights_are_whole():
            return
        try:
            clean = is_clean(self._manager.scheduler)
        except Exception as error:
            # Any exception: SGLang's update must not fail because of this check.
            logger.warning("cannot determine whether SGLang's cache is empty: %s", error)
            clean = False
        if clean:
            self.generation.resume()
            logger.info("weights were updated: pages now use a new key generation")
        else:
            logger.warning(
                "SGLang's cache may have KV of the weights before an update: no page is saved or found until the cache is "
                "flushed; call /flush_cache"
            )

    def _weights_are_whole(self) -> bool:
        return self._manager._session is None and GPU_MEMORY_TYPE_WEIGHTS not in self._manager.offload_tags


_process: WeightUpdates | None = None
"""State of this process' engine; SGLang runs one scheduler per process."""


def observe() -> WeightUpdates:
    """Starts to detect updates of this process' weights; later calls return the same state.

    Raises:
        ValueError: SGLang's methods are not the known ones, or the engine was already running, so that its weights may have
            changed.
    """
    global _process
    if _process is None:
        _check_at_start()
        manager, controller = _resolve(MANAGER), _resolve(CONTROLLER)
        _check_manager(manager)
        if not callable(getattr(controller, "reset", None)):
            raise ValueError(f"{CONTROLLER[1]}.reset is missing in this version of SGLang: {REMEDY}")
        for name in sorted(CHANGES_WEIGHTS):
            _wrap_change(manager, name)
        _wrap_reset(controller)
        _process = WeightUpdates()
    return _process


def _check_at_start() -> None:
    from sglang.srt.runtime_context import get_memory

    if get_memory().hicache_storage_backend != "dynamic":
        raise ValueError(
            "RepriseStorage was attached to a running engine and does not know whether its weights were updated before: start the "
            "engine with --hicache-storage-backend dynamic and the same configuration"
        )


def _resolve(target: tuple[str, str]) -> type:
    module, name = target
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{module}.{name} is missing in this version of SGLang ({error}): {REMEDY}") from error
    assert isinstance(found, type)
    return found


def _check_manager(manager: type) -> None:
    methods = {name for name, value in vars(manager).items() if callable(value) and not name.startswith("_")}
    if missing := CHANGES_WEIGHTS - methods:
        raise ValueError(f"{MANAGER[1]}.{', '.join(sorted(missing))} is missing in this version of SGLang: {REMEDY}")
    fields = getattr(manager, "__dataclass_fields__", {})
    if unread := MANAGER_FIELDS - fields.keys():
        raise ValueError(f"{MANAGER[1]}.{', '.join(sorted(unread))} is missing in this version of SGLang: {REMEDY}")
    # Exclude dataclass fields, whose default may be callable.
    if unknown := methods - CHANGES_WEIGHTS - KEEPS_WEIGHTS - fields.keys():
        raise ValueError(f"{MANAGER[1]}.{', '.join(sorted(unknown))} of this version of SGLang is unknown: {REMEDY}")


def _wrap_change(manager: type, name: str) -> None:
    original = getattr(manager, name)

    @functools.wraps(original)
    def wrapped(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            return original(self, request, *args, **kwargs)

        if _process is None:
            return call()
        if _changes(self, name, request):
            return _process.run_change(self, name, call)
        return _process.run_other(call)

    setattr(manager, name, wrapped)


def _wrap_reset(controller: type) -> None:
    original = controller.reset  # type: ignore[attr-defined]

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The original reset ends the storage threads first, so no transfer uses the old generation afterwards.
        result = original(self, *args, **kwargs)
        if _process is not None:
            _process.handle_cache_reset()
        return result

    controller.reset = wrapped  # type: ignore[attr-defined]


def _changes(manager: Any, name: str, request: Any) -> bool:
    if name == "check_weights":
        return bool(request.action == "reset_tensors")
    if name in NEEDS_SESSION:
        # SGLang rejects these calls without a session.
        return manager._session is not None
    if name in ("release_memory_occupation", "resume_memory_occupation"):
        # Without tags, the call concerns all memory.
        return GPU_MEMORY_TYPE_WEIGHTS in (request.tags or (GPU_MEMORY_TYPE_WEIGHTS,)) and not _weights_are_kept()
    return True


def _weights_are_kept() -> bool:
    """Returns whether weights survive the release of their memory, because SGLang has a copy of them."""
    from sglang.srt.runtime_context import get_exec, get_spec

    features = get_exec().features
    draft_is_kept = features.enable_draft_weights_cpu_backup or get_spec().speculative_algorithm is None
    return not features.enable_memory_saver or bool(features.enable_weights_cpu_backup and draft_is_kept)


def _is_empty(scheduler: Any) -> bool:
    """Returns whether SGLang has no KV in GPU or host memory and none is being saved.

    Waiting requests are ignored: in a paused engine they have no KV, otherwise the scheduler is not idle.
    """
    tree = scheduler.tree_cache
    if not scheduler.is_fully_idle(ignore_waiting=True) or not _has_no_backups(scheduler):
        return False
    held = tree.total_size()
    if sum(held) if isinstance(held, tuple) else held:
        return False
    controller = getattr(tree, "cache_controller", None)
    if controller is not None and not _is_unused(controller.mem_pool_host):
        return False
    allocator = scheduler.token_to_kv_pool_allocator
    if getattr(allocator, "full_available_size", allocator.available_size)() < allocator.size_full:
        return False
    windows = getattr(allocator, "swa_available_size", None)
    return windows is None or bool(windows() >= allocator.size_swa)


def _is_unused(pool: Any) -> bool:
    return bool(pool.available_size() >= getattr(pool, "logical_size", pool.size))


def _has_no_backups(scheduler: Any) -> bool:
    """Returns whether no page of a decode engine waits to be saved; a flush does not drop such pages."""
    decode = scheduler.decode_offload_manager
    return decode is None or not (decode.ongoing_offload or decode.ongoing_backup)
