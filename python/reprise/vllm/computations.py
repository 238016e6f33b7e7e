"""The computation of a step of vLLM's scheduler, for reports of its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reprise.layer_reports import Computation

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
