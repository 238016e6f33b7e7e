"""Counters and histograms of the connector and the secondary tier, for vLLM's log line and its Prometheus endpoint.

Their Prometheus names are ``vllm:reprise_*``.
"""

from __future__ import annotations

from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from reprise import recompute

COUNTERS = {
    "queries": "Number of look-ups; a very long prompt has several.",
    "queries_unanswered": "Number of look-ups without an answer before the deadline; their requests continued without the cache.",
    "loads": "Number of ended loads.",
    "loaded_blocks": "Number of blocks loaded and verified.",
    "extent_loaded_blocks": "Number of them that came from extents of this node's devices, not through the agent's arena.",
    "failed_blocks": "Number of blocks that were found but not loaded; the engine computed them.",
    "loaded_bytes": "Bytes loaded and verified.",
    "saves": "Number of ended saves.",
    "saved_blocks": "Number of blocks that this engine has added to the cache.",
    "extent_saved_blocks": "Number of blocks that were saved to extents or found before, not through the agent's arena.",
    "duplicate_blocks": "Number of blocks that the cache already had.",
    "unsaved_blocks": "Number of blocks that were not saved, because no agent answered or it had no space in time.",
    "left_out_blocks": "Number of blocks that were not saved before their request ended, because too many saves were pending.",
    "saved_bytes": "Bytes that this engine has added to the cache.",
    "ignored_parameters": "Number of invalid parameters of requests (kv_transfer_params), which were ignored.",
    "ignored_hints": "Number of KV hints that were invalid or could not be executed.",
    "hint_blocks": "Number of blocks that were pinned, read ahead or demoted by KV hints.",
    "hint_refused_blocks": "Number of blocks that KV hints could not pin or demote: over a limit, in use, or pinned.",
    "swapped_out_blocks": "Number of blocks that were saved because their request was preempted.",
    "swapped_in_blocks": "Number of blocks that were loaded for requests that had been preempted.",
    **recompute.COUNTERS,
}
"""Descriptions of the counters, by name."""

TIMES = {
    "match_seconds": "Time that the scheduler waited for one look-up, over all its steps.",
    "load_seconds": "Time from the submission of a load to its end.",
    "save_seconds": "Time from the submission of a save to its end.",
}
"""Descriptions of the histograms, by name."""

BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

SAMPLES_MAX = 1024
"""Maximum number of durations kept between two collections."""


class CounterSink(Protocol):
    """Receiver of the counters and durations above."""

    def add(self, name: str, count: int) -> None:
        """Adds to a counter."""

    def sample(self, name: str, seconds: float) -> None:
        """Records a duration."""


class Stats(KVConnectorStats):
    """Statistics since the last collection."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data if data is not None else {})

    def add(self, name: str, count: int) -> None:
        """Adds to a counter."""
        if count:
            self.data[name] = self.data.get(name, 0) + count

    def sample(self, name: str, seconds: float) -> None:
        """Records a duration."""
        samples = self.data.setdefault(name, [])
        if len(samples) < SAMPLES_MAX:
            samples.append(seconds)

    def take(self) -> Stats | None:
        """Returns and clears the statistics; None if they are empty."""
        if not self.data:
            return None
        taken = Stats(self.data)
        self.data = {}
        return taken

    def reset(self) -> None:
        """Clears the statistics."""
        self.data = {}

    def is_empty(self) -> bool:
        """Returns whether there are no statistics."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds the statistics of another side."""
        for name, value in other.data.items():
            if isinstance(value, list):
                self.data.setdefault(name, []).extend(value)
            else:
                self.add(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns one number per name for the log: sums, and medians of durations in milliseconds."""
        reduced: dict[str, int | float] = {}
        for name, value in sorted(self.data.items()):
            if isinstance(value, list):
                median = sorted(value)[len(value) // 2]
                reduced[name.replace("_seconds", "_ms_median")] = round(median * 1e3, 3)
            else:
                reduced[name] = value
        return reduced


class PromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of the statistics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:reprise_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._times = {
            name: self._histogram_cls(
                name=f"vllm:reprise_{name}", documentation=text, buckets=BUCKETS, labelnames=labelnames
            )
            for name, text in TIMES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds collected statistics to the metrics."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
            elif name in self._times:
                histogram = self._times[name].labels(*labels)
                for seconds in value:
                    histogram.observe(seconds)
