"""Requests that compute with blocks that are still being loaded (layer-wise loads).

vLLM counts such blocks as computed. It enters them, and the blocks that the step fills, into its prefix cache before they
are loaded. If the load fails and the request is aborted before it recomputes them, another request could reuse wrong
blocks. So until the load is verified, the blocks are not in the prefix cache, and no block of the request is saved:

```text
allocated ──▶ removed from the prefix cache; saves of the step are deferred
                └ worker output ── complete on all ranks ──▶ restored to the cache; the saves start with the next step
                                └─ incomplete ─────────────▶ the saves are dropped; vLLM recomputes the blocks
```

This requires a scheduler that knows the result of a step before it schedules the next one, as with vLLM's CPU backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from reprise.vllm.metadata import SavePlan

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


@dataclass
class UnverifiedLoad:
    """Unverified load of one request in one step."""

    request: Request
    blocks: tuple[int, ...]
    """All blocks of the request."""
    first: int
    """Index of the first loaded block; the blocks before it are vLLM's own."""
    cached: int
    """Number of blocks from ``first`` that were removed from the prefix cache."""
    saves: list[SavePlan] = field(default_factory=list)
    """Deferred saves of the request."""

    @classmethod
    def withdraw(cls, pool: BlockPool, request: Request, blocks: Sequence[int], first: int) -> UnverifiedLoad:
        """Removes the blocks to load, and all after them, from vLLM's prefix cache."""
        cached = list(takewhile(lambda block: pool.blocks[block].block_hash is not None, blocks[first:]))
        pool.evict_blocks(set(cached))
        return cls(request=request, blocks=tuple(blocks), first=first, cached=len(cached))

    def restore(self, pool: BlockPool, block_tokens: int) -> None:
        """Adds the blocks to vLLM's prefix cache again, after their load was verified."""
        pool.cache_full_blocks(
            request=self.request,
            blocks=[pool.blocks[block] for block in self.blocks],
            num_cached_blocks=self.first,
            num_full_blocks=self.first + self.cached,
            block_size=block_tokens,
            kv_cache_group_id=0,
        )
