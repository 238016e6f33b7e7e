"""SGLang engine around the storage, built from SGLang's own classes (0.5.23), without a GPU.

The configuration, the radix tree, the cache controller with its threads, the pools in device and host memory,
the scheduler's flush, its manager of weights and the weight loader are real. The tests replace the model's forward pass,
the compiled copies between device and host memory, and the pinning of host memory.

The KV of a prompt is the product of its tokens and the model's weight, so it shows with which weights it was computed.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import io_struct
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.pool_host import mha
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from sglang.srt.utils.weight_checker import WeightChecker

from reprise.sglang import weight_updates

LAYERS, HEADS, HEAD_DIM, PAGE, SLOTS = 2, 2, 16, 8, 512
LONG_S = 60.0
"""Timeout that only a hang exceeds."""

PATIENT = {
    f"{name}_ms": LONG_S * 1e3
    for name in ("match_deadline", "load_deadline", "load_stall", "load_standstill", "save_stall")
}
CONFIGURATION = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEADS * HEAD_DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": 128,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def model_folder(folder: Path, weight: float = 1.0, **configuration: Any) -> Path:
    """Writes a model: its configuration and one weight."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGURATION, **configuration}))
    safetensors.torch.save_file({"weight": torch.tensor([weight])}, folder / "model.safetensors")
    return folder


def publish(model: Path, **settings: Any) -> ServerArgs:
    """Publishes a configuration in this process, as SGLang's scheduler does at its start."""
    arguments = ServerArgs(
        model_path=str(model),
        **{
            "device": "cpu",
            "enable_hierarchical_cache": True,
            "hicache_storage_backend": "dynamic",
            "hicache_mem_layout": "layer_first",
            "hicache_io_backend": "direct",
            "hicache_write_policy": "write_through",
            "hicache_storage_prefetch_policy": "wait_complete",
            "served_model_name": "test/model",
            "page_size": PAGE,
            **settings,
        },
    )
    runtime_context.publish(arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
    return arguments


def another_process(monkeypatch: Any) -> None:
    """Lets storages created from now on belong to another engine."""
    monkeypatch.setattr(weight_updates, "_process", weight_updates.WeightUpdates())


def extra_config(socket: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns a value of ``--hicache-storage-backend-extra-config``."""
    return {
        "backend_name": "reprise",
        "module_path": "reprise.sglang",
        "class_name": "RepriseStorage",
        "interface_v1": 1,
        "socket": str(socket),
        **PATIENT,
        **(changes or {}),
    }


class Model(torch.nn.Module):
    """Model with one weight, which SGLang's loaders set."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([weight]), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            if tensor.isnan().any():
                raise ValueError("a weight is not a number")
            self.weight.copy_(tensor)


def _copy_pages(
    *,
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


class Engine:
    """Rank of an engine.

    Args:
        model: folder of the model.
        extra: configuration of the storage.
        group: process group of the tensor-parallel ranks.
    """

    def __init__(self, model: Path, extra: dict[str, Any], group: Any, weight: float = 1.0, **settings: Any) -> None:
        arguments = publish(model, hicache_storage_backend_extra_config=json.dumps(extra), **settings)
        ranks = SimpleNamespace(cpu_group=group, device_group=group, world_size=1)
        runtime_context.get_parallel().override_permanently(tp_group=ranks)
        self._numbers = itertools.count()
        self.model = Model(weight)
        self.device = MHATokenToKVPool(
            size=SLOTS,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.slots = PagedTokenToKVPoolAllocator(SLOTS, PAGE, torch.float32, "cpu", self.device, need_sort=False)
        parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(4, SLOTS, "cpu", False),
            token_to_kv_pool_allocator=self.slots,
            page_size=PAGE,
            tp_cache_group=group,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="python",
        )
        self.tree = UnifiedRadixCache(parameters)
        self.tree.init_hicache(arguments, parameters)
        self.wait_connected()
        self.scheduler = self._scheduler(parameters)
        # SGLang creates it after the tree, and binds its methods in a table of requests.
        runner = self._runner(arguments)
        worker = SimpleNamespace(
            model_runner=runner,
            weight_update_runners=lambda: [("target", runner)],
            deserialize_own_rank=lambda tensors: tensors,
        )
        self.weights = SchedulerWeightUpdaterManager(
            tp_worker=worker,
            draft_worker=None,
            memory_saver_adapter=TorchMemorySaverAdapter.create(enable=False),
            flush_cache=self.scheduler.flush_cache,
            is_fully_idle=self.scheduler.is_fully_idle,
            scheduler=self.scheduler,
        )

    @property
    def storage(self) -> Any:
        """Storage that SGLang has created."""
        return self.tree.cache_controller.storage_backend

    def hashes(self, tokens: list[int], lora: str | None = None) -> list[str]:
        """Returns SGLang's page hashes of a prompt."""
        hashes = get_storage_hash_str(RadixKey(array("q", tokens), extra_key=lora), None, page_size=PAGE)
        assert isinstance(hashes, list)
        return hashes

    def wait_connected(self) -> None:
        """Waits until each pool has a session."""
        for store in self.storage._stores.values():
            assert store.session.wait_connected(LONG_S)

    def close(self) -> None:
        """Closes the storage and its threads."""
        self.tree.cache_controller.detach_storage_backend()

    # Requests

    def serve(self, tokens: list[int], lora: str | None = None) -> int:
        """Serves a prompt and checks that its KV belongs to the model's weights; returns the number of tokens found."""
        key = RadixKey(array("q", tokens), extra_key=lora)
        self._prefetch(key, lora)
        slots, found = self._cached(key)
        fresh = self.slots.alloc(len(tokens) - found)
        assert fresh is not None
        for layer, (k, v) in enumerate(zip(self.device.k_buffer, self.device.v_buffer, strict=True)):
            k[fresh], v[fresh] = self._kv(tokens[found:], layer), -self._kv(tokens[found:], layer)
        for layer, k in enumerate(self.device.k_buffer):
            # The KV that attention reads, from any source.
            assert torch.equal(k[torch.cat([slots, fresh])], self._kv(tokens, layer)), "KV of other weights was served"
        self.tree.insert(InsertParams(key=key, value=torch.cat([slots, fresh])))
        self.wait(lambda: not self.tree.ongoing_write_through and not self.tree.ongoing_backup)
        return found

    def serve_again(self, tokens: list[int]) -> int:
        """Flushes SGLang's own cache and serves a prompt from the storage."""
        assert self.flush()
        return self.serve(tokens)

    def flush(self) -> bool:
        """Flushes SGLang's cache, as ``/flush_cache`` does."""
        return bool(self.scheduler.flush_cache())

    def wait(self, condition: Any) -> None:
        """Lets SGLang poll its transfers until the condition is true."""
        deadline = time.monotonic() + LONG_S
        while True:
            self.tree.check_hicache_events()
            if condition():
                return
            assert time.monotonic() < deadline, "SGLang's transfers hang"
            time.sleep(0.001)

    @contextmanager
    def running_request(self) -> Iterator[None]:
        """Simulates a running request."""
        self.scheduler.running_batch = SimpleNamespace(is_empty=lambda: False, reqs=[None])
        yield
        self.scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)

    # Updates of weights

    def update_from_disk(self, folder: Path, **request: Any) -> Any:
        return self.weights.update_weights_from_disk(
            io_struct.UpdateWeightFromDiskReqInput(model_path=str(folder), load_format="auto", **request)
        )

    def update_from_tensor(self, weight: float, **request: Any) -> Any:
        return self.weights.update_weights_from_tensor(
            io_struct.UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[("weight", torch.tensor([weight]))], **request
            )
        )

    def begin(self) -> Any:
        return self.weights.begin_weight_update(io_struct.BeginWeightUpdateReqInput())

    def end(self) -> Any:
        return self.weights.end_weight_update(io_struct.EndWeightUpdateReqInput())

    # Parts

    def _kv(self, tokens: list[int], layer: int) -> torch.Tensor:
        values = (torch.tensor(tokens, dtype=torch.float32) + 1) * (layer + 1) * self.model.weight.data
        return values.reshape(-1, 1, 1).expand(-1, HEADS, HEAD_DIM)

    def _prefetch(self, key: RadixKey, lora: str | None) -> None:
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        matched = match.device_prefix_len + match.host_hit_length
        handle = CacheRequestHandle(f"request-{next(self._numbers)}", 0)
        self.tree.prefetch_from_storage(
            handle,
            match.last_host_node,
            key.token_ids[matched:],
            self.tree.get_last_hash_value(match.last_host_node),
            None,
            matched_prefix_tokens=key.token_ids[:matched],
            extra_key=lora,
        )
        self.wait(lambda: self.tree.check_prefetch_progress(handle))

    def _cached(self, key: RadixKey) -> tuple[torch.Tensor, int]:
        """Returns the slots of the leading tokens in SGLang's cache, in device or host memory."""
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        if match.host_hit_length:
            self.tree.load_back(match.best_match_node, None)
            self.tree.ready_to_load_host_cache()
            self.wait(lambda: not self.tree.ongoing_load_back)
            match = self.tree.match_prefix(MatchPrefixParams(key=key))
        root = self.tree.root_node_handle(extra_key=key.extra_key)
        slots = self.tree.tree_core.collect_full_device_indices(match.last_device_node, root)
        return slots, match.device_prefix_len

    def _scheduler(self, parameters: CacheInitParams) -> Any:
        scheduler: Any = Scheduler.__new__(Scheduler)
        scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        scheduler.waiting_queue = []
        scheduler.chunked_req = scheduler.last_batch = scheduler.draft_worker = scheduler.decode_offload_manager = None
        scheduler.enable_overlap = scheduler.enable_hisparse = scheduler._engine_paused = False
        scheduler.enable_hierarchical_cache = True
        scheduler.disaggregation_mode = DisaggregationMode.NULL
        scheduler.dllm_manager = SimpleNamespace(any_staging_reqs=lambda: False)
        scheduler.grammar_manager = SimpleNamespace(grammar_queue=[], clear=lambda: None)
        scheduler.metrics_reporter = SimpleNamespace(reset_metrics=lambda: None, is_stats_logging_rank=False)
        scheduler.tree_cache = self.tree
        scheduler.req_to_token_pool = parameters.req_to_token_pool
        scheduler.token_to_kv_pool_allocator = self.slots
        return scheduler

    def _runner(self, arguments: ServerArgs) -> Any:
        configuration = ModelConfig.from_server_args(arguments)
        checker = WeightChecker(get_model=lambda: self.model)
        runner = SimpleNamespace(model=self.model, check_weights=checker.handle)
        runner.weight_updater = WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=configuration,
            custom_weight_loaders={},
            get_model=lambda: self.model,
            update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: runner,
        )
        return runner


def replace_gpu(monkeypatch: Any) -> None:
    """Replaces SGLang's compiled copies between device and host memory, and leaves host memory unpinned."""
    unpinned = functools.partialmethod(mha.MHATokenToKVPoolHost.__init__, pin_memory=False)
    monkeypatch.setattr(mha.MHATokenToKVPoolHost, "__init__", unpinned)
    monkeypatch.setattr(mha, "transfer_kv_direct", _copy_pages, raising=False)


MakeEngine = Callable[..., Engine]
"""Factory of engines, each as if in its own process."""
