"""Load or recompute in the tier: chunks that are faster to compute are missing for vLLM."""

from __future__ import annotations

from collections.abc import Callable

from cluster import Cluster
from offloading import LONG_S, Offloading, chain
from test_lookahead import PATIENT, PROMPT

from reprise.recompute import NO_PREFILL, Prefill

Make = Callable[..., Offloading]
PREFILL = Prefill(1000, 500.0)


def stored(engine: Make, cluster: Cluster, **options: bool) -> Offloading:
    """Returns an engine whose chunks are only in Reprise."""
    offloading = engine(cluster.agents[0].socket, **PATIENT, **options)
    assert offloading.tier._session.wait_connected(LONG_S)
    offloading.store(chain(1, PROMPT))
    offloading.clear_primary()
    return offloading


def test_chunks_that_are_faster_to_compute_are_missing(cluster: Cluster, engine: Make) -> None:
    offloading, keys = stored(engine, cluster), chain(1, PROMPT)
    chooser = offloading.tier._chooser
    assert offloading.find(keys) == PROMPT, "nothing is measured"
    offloading.clear_primary()
    assert chooser._started == {}, "the load has ended"
    chooser.observe_step(PREFILL, 50.0)
    assert offloading.find(keys) == PROMPT, "loading is faster"
    offloading.clear_primary()
    for _ in range(400):
        chooser.observe_step(PREFILL, 1e-6)
    assert offloading.find(keys) == 0, "computing is faster"
    counts = offloading.counts()
    decisions = {name: count for name, count in counts.items() if name.startswith("decisions_")}
    assert decisions == {"decisions_unmeasured": 1, "decisions_load": 1, "decisions_compute": 1}
    assert counts["recomputed_blocks"] == PROMPT


def test_steps_of_the_connector_are_measured_until_no_request_computes(cluster: Cluster, engine: Make) -> None:
    tier = engine(cluster.agents[0].socket, **PATIENT).tier
    tier.note_step(["a"], PREFILL, 0)
    assert tier._chooser.is_computing
    assert tier._chooser.policy.limit(1, 0) is None
    tier.note_step(["a"], NO_PREFILL, 0)
    assert tier._chooser.policy.limit(1, 0) is not None
    tier.note_step([], NO_PREFILL, 0)
    assert not tier._chooser.is_computing


def test_option_turns_decisions_off(cluster: Cluster, engine: Make) -> None:
    offloading = stored(engine, cluster, load_or_recompute=False)
    assert offloading.tier._chooser is None
    offloading.tier.note_step(["a"], PREFILL, 0)
    assert offloading.find(chain(1, PROMPT)) == PROMPT
