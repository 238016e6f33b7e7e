"""Requests that compute with blocks which are still being loaded, as layer-wise loads have it.

vLLM counts such blocks as computed, and enters them and those that the step fills into its prefix cache, before a byte has come.
Another request could build upon them, and would keep what was computed from nothing if the first one were aborted before it has
computed them again. So nobody else gets them, and nothing of the request is saved, until it is known that they are whole:

```text
allocated ──▶ taken out of the prefix cache; saves of the step are held
                └ workers said ── whole on all ranks ──▶ entered again; the saves go out with the next step
                               └─ not whole ───────────▶ the saves are dropped; vLLM computes the blocks again
```

It takes a scheduler that knows what has become of a step before it schedules the next: vLLM's CPU backend has no other.
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
class Unproven:
    """One request, for one step."""

    request: Request
    blocks: tuple[int, ...]
    """All of the request's."""
    first: int
    """Blocks before it are vLLM's own."""
    cached: int
    """Blocks that were taken out of the prefix cache, from the first on."""
    saves: list[SavePlan] = field(default_factory=list)
    """Held."""

    @classmethod
    def withdraw(cls, pool: BlockPool, request: Request, blocks: Sequence[int], first: int) -> Unproven:
        """Takes what is to be loaded, and all behind it, out of vLLM's prefix cache."""
        cached = list(takewhile(lambda block: pool.blocks[block].block_hash is not None, blocks[first:]))
        pool.evict_blocks(set(cached))
        return cls(request=request, blocks=tuple(blocks), first=first, cached=len(cached))

    def enter(self, pool: BlockPool, block_tokens: int) -> None:
        """Enters the blocks into vLLM's prefix cache again: they are whole."""
        pool.cache_full_blocks(
            request=self.request,
            blocks=[pool.blocks[block] for block in self.blocks],
            num_cached_blocks=self.first,
            num_full_blocks=self.first + self.cached,
            block_size=block_tokens,
            kv_cache_group_id=0,
        )
