"""The computation of a step of vLLM's scheduler, for reports of its layers and for measured rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reprise.layer_reports import Computation
from reprise.recompute import Prefill

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def computation_of(output: SchedulerOutput) -> Computation | None:
    """Returns the computation of a step; None if it computes nothing.

    A step is one of decode if each of its requests computes one token besides its drafts.
    """
    scheduled = output.num_scheduled_tokens
    if not scheduled:
        return None
    drafts = output.scheduled_spec_decode_tokens
    decodes = all(tokens - len(drafts.get(request_id, ())) <= 1 for request_id, tokens in scheduled.items())
    prefixes = [new.num_computed_tokens for new in output.scheduled_new_reqs]
    prefixes += output.scheduled_cached_reqs.num_computed_tokens
    return Computation(
        phase="decode" if decodes else "prefill",
        input_tokens=sum(scheduled.values()),
        prefix_tokens=sum(prefixes),
    )


def prefill_of(output: SchedulerOutput) -> Prefill:
    """Returns the tokens of prompts that a step computes: those of requests that compute more than one besides drafts."""
    scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    requests = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    requests += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    parts = ((scheduled[request_id] - len(drafts.get(request_id, ())), prefix) for request_id, prefix in requests)
    return Prefill.of((tokens, prefix) for tokens, prefix in parts if tokens > 1)
