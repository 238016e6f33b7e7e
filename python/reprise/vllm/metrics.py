"""Counters and times of the connector and the secondary tier, for vLLM's log line and its Prometheus endpoint.

Names in Prometheus are ``vllm:reprise_*``; they mean what the documentation of each says.
"""

from __future__ import annotations

from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "queries": "Look-ups of requests; that of a very long prompt has several parts, each of which counts.",
    "queries_unanswered": "Look-ups that had no answer in time; their requests went on without.",
    "loads": "Loads that have ended.",
    "loaded_blocks": "Blocks that were loaded and verified.",
    "failed_blocks": "Blocks that were found and could not be loaded; they were computed.",
    "loaded_bytes": "Bytes that were loaded and verified.",
    "saves": "Saves that have ended.",
    "saved_blocks": "Blocks that this engine has put into the cache.",
    "duplicate_blocks": "Blocks that somebody had put there before.",
    "unsaved_blocks": "Blocks that were not saved: no agent, no room in time.",
    "left_out_blocks": "Blocks whose save was not begun before their request ended: too many were waiting for theirs.",
    "saved_bytes": "Bytes that this engine has put into the cache.",
}
"""Counters by name, with what they count."""

TIMES = {
    "match_seconds": "Time that the scheduler waited for one look-up, in all its steps.",
    "load_seconds": "Time from the submission of a load to its end.",
    "save_seconds": "Time from the submission of a save to its end.",
}
"""Histograms by name, with what they time."""

BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

SAMPLES_MAX = 1024
"""Times that are kept between two collections at the most."""


class Counted(Protocol):
    """Something that counts, by the names above."""

    def add(self, name: str, count: int) -> None:
        """Counts."""

    def sample(self, name: str, seconds: float) -> None:
        """Notes a time."""


class Stats(KVConnectorStats):
    """What has happened since the last collection."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data if data is not None else {})

    def add(self, name: str, count: int) -> None:
        """Counts."""
        if count:
            self.data[name] = self.data.get(name, 0) + count

    def sample(self, name: str, seconds: float) -> None:
        """Notes a time."""
        samples = self.data.setdefault(name, [])
        if len(samples) < SAMPLES_MAX:
            samples.append(seconds)

    def take(self) -> Stats | None:
        """What there is, leaving nothing; None: nothing."""
        if not self.data:
            return None
        taken = Stats(self.data)
        self.data = {}
        return taken

    def reset(self) -> None:
        """Forgets everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds what another side has counted."""
        for name, value in other.data.items():
            if isinstance(value, list):
                self.data.setdefault(name, []).extend(value)
            else:
                self.add(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One number for each, for the log: sums, and medians of times in milliseconds."""
        reduced: dict[str, int | float] = {}
        for name, value in sorted(self.data.items()):
            if isinstance(value, list):
                median = sorted(value)[len(value) // 2]
                reduced[name.replace("_seconds", "_ms_median")] = round(median * 1e3, 3)
            else:
                reduced[name] = value
        return reduced


class PromMetrics(KVConnectorPromMetrics):
    """The same for Prometheus."""

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
        """Takes what was collected."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
            elif name in self._times:
                histogram = self._times[name].labels(*labels)
                for seconds in value:
                    histogram.observe(seconds)
