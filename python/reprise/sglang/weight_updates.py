"""Notices that SGLang changes the weights of a running engine, which it does not report to a storage.

The storage lives in the process of SGLang's scheduler, before which each update passes. So the methods of SGLang that change weights
are wrapped, in their classes, when the first storage is made: SGLang makes it before it binds these methods. While one runs, the
key generation is suspended (:mod:`reprise.sglang.generation`). It resumes, with new keys, when all of this holds:

- the weights are whole: no update session is open, and they are not released;
- SGLang's cache holds nothing: it was reset (``flush_cache``), or it is empty when the update ends, as in engines that were paused
  and flushed before.

A version of SGLang whose update methods differ from the known ones is refused at the start: a method that is not known could change
weights unnoticed.
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
"""Through which the scheduler handles each request that concerns weights."""

CONTROLLER = ("sglang.srt.managers.cache_controller", "HiCacheController")
"""Moves pages between GPU, host memory and storage; its reset is part of each flush."""

CHANGES_WEIGHTS = frozenset(
    {
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        # Between these two a trainer writes weights without a call (RDMA).
        "begin_weight_update",
        "end_weight_update",
        # Released weights are lost, unless SGLang keeps a copy in host memory.
        "release_memory_occupation",
        "resume_memory_occupation",
        # Overwrites weights with noise, when it is asked to.
        "check_weights",
    }
)
"""Methods of the manager after which KV can mean something else."""

NEEDS_SESSION = frozenset({"update_weights_from_distributed", "update_weights_from_tensor", "end_weight_update"})
"""Those that work between ``begin_weight_update`` and ``end_weight_update`` only."""

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
"""The manager's other methods."""

MANAGER_FIELDS = frozenset({"scheduler", "offload_tags", "_session"})
"""Of the manager, read here."""

REMEDY = (
    "RepriseStorage cannot notice updates of weights in it: use sglang 0.5.23, for which it is made, or leave "
    "--hicache-storage-backend out"
)


class WeightUpdates:
    """The weights of this process' engine, and whether SGLang's cache can hold KV of other ones."""

    def __init__(self) -> None:
        self.generation = Generation()
        self._manager: Any = None
        self._depth = 0
        """Of calls that change weights; an update flushes the cache by itself."""

    def changing(self, manager: Any, name: str, call: Callable[[], Any]) -> Any:
        """Runs a call that changes weights."""
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

    def keeping(self, call: Callable[[], Any]) -> Any:
        """Runs a call that leaves the weights as they are, and can complete an update."""
        try:
            return call()
        finally:
            self._resume_if(_is_empty)

    def cache_was_reset(self) -> None:
        """SGLang has dropped what its cache held."""
        self._resume_if(_has_no_backups)

    def _resume_if(self, is_clean: Callable[[Any], bool]) -> None:
        if not self.generation.is_suspended or self._depth or not self._weights_are_whole():
            return
        try:
            clean = is_clean(self._manager.scheduler)
        except Exception as error:
            # Whatever it is: SGLang's update must not fail because of it.
            logger.warning("cannot determine whether SGLang's cache is empty: %s", error)
            clean = False
        if clean:
            self.generation.resume()
            logger.info("weights were updated: pages are saved and found under a new key generation")
        else:
            logger.warning(
                "SGLang's cache can hold KV of weights from before an update: no page is saved or found until the cache is "
                "flushed; call /flush_cache"
            )

    def _weights_are_whole(self) -> bool:
        return self._manager._session is None and GPU_MEMORY_TYPE_WEIGHTS not in self._manager.offload_tags


_process: WeightUpdates | None = None
"""This process' engine: SGLang runs one scheduler a process."""


def observe() -> WeightUpdates:
    """Begins to notice updates of this process' weights, once.

    Raises:
        ValueError: SGLang's methods are not the known ones, or the engine ran before, so that its weights may be others by now.
    """
    global _process
    if _process is None:
        _check_at_start()
        manager, controller = _resolve(MANAGER), _resolve(CONTROLLER)
        _check_manager(manager)
        if not callable(getattr(controller, "reset", None)):
            raise ValueError(f"this version of SGLang has no {CONTROLLER[1]}.reset: {REMEDY}")
        for name in sorted(CHANGES_WEIGHTS):
            _wrap_change(manager, name)
        _wrap_reset(controller)
        _process = WeightUpdates()
    return _process


def _check_at_start() -> None:
    from sglang.srt.runtime_context import get_memory

    if get_memory().hicache_storage_backend != "dynamic":
        raise ValueError(
            "RepriseStorage was attached to a running engine, and cannot tell whether its weights were updated before: start "
            "the engine with --hicache-storage-backend dynamic and the same configuration"
        )


def _resolve(target: tuple[str, str]) -> type:
    module, name = target
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"this version of SGLang has no {module}.{name} ({error}): {REMEDY}") from error
    assert isinstance(found, type)
    return found


def _check_manager(manager: type) -> None:
    methods = {name for name, value in vars(manager).items() if callable(value) and not name.startswith("_")}
    if missing := CHANGES_WEIGHTS - methods:
        raise ValueError(f"this version of SGLang has no {MANAGER[1]}.{', '.join(sorted(missing))}: {REMEDY}")
    fields = getattr(manager, "__dataclass_fields__", {})
    if unread := MANAGER_FIELDS - fields.keys():
        raise ValueError(f"this version of SGLang has no {MANAGER[1]}.{', '.join(sorted(unread))}: {REMEDY}")
    # Fields can hold a default that is callable.
    if unknown := methods - CHANGES_WEIGHTS - KEEPS_WEIGHTS - fields.keys():
        raise ValueError(
            f"this version of SGLang has {MANAGER[1]}.{', '.join(sorted(unknown))}, which is unknown: {REMEDY}"
        )


def _wrap_change(manager: type, name: str) -> None:
    original = getattr(manager, name)

    @functools.wraps(original)
    def wrapped(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            return original(self, request, *args, **kwargs)

        if _process is None:
            return call()
        if _changes(self, name, request):
            return _process.changing(self, name, call)
        return _process.keeping(call)

    setattr(manager, name, wrapped)


def _wrap_reset(controller: type) -> None:
    original = controller.reset  # type: ignore[attr-defined]

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        # It ends the storage threads first, so nothing is read or written with the old generation behind it.
        result = original(self, *args, **kwargs)
        if _process is not None:
            _process.cache_was_reset()
        return result

    controller.reset = wrapped  # type: ignore[attr-defined]


def _changes(manager: Any, name: str, request: Any) -> bool:
    if name == "check_weights":
        return bool(request.action == "reset_tensors")
    if name in NEEDS_SESSION:
        # SGLang rejects it without one.
        return manager._session is not None
    if name in ("release_memory_occupation", "resume_memory_occupation"):
        # Without tags it is all memory.
        return GPU_MEMORY_TYPE_WEIGHTS in (request.tags or (GPU_MEMORY_TYPE_WEIGHTS,)) and not _weights_are_kept()
    return True


def _weights_are_kept() -> bool:
    """Whether weights are the same after their memory was released and resumed."""
    from sglang.srt.runtime_context import get_exec, get_spec

    features = get_exec().features
    draft_is_kept = features.enable_draft_weights_cpu_backup or get_spec().speculative_algorithm is None
    return not features.enable_memory_saver or bool(features.enable_weights_cpu_backup and draft_is_kept)


def _is_empty(scheduler: Any) -> bool:
    """Whether no KV is in SGLang's cache, in GPU or host memory, or on its way to a storage.

    Waiting requests are ignored: those of a paused engine hold no KV, or the scheduler is not idle.
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
    """Whether no page of a decode engine waits to be saved; a flush does not drop these."""
    decode = scheduler.decode_offload_manager
    return decode is None or not (decode.ongoing_offload or decode.ongoing_backup)
