"""SGLang's host memory as ours: pages, each in some runs of memory.

```text
layer_first        kv [2, layers, tokens, …]     a page: one run for K and V of each layer
page_first         kv [2, tokens, layers, …]     a page: one run for K, one for V, cut into as many pieces as layers
page_first_direct  kv [2, pages, layers, …]      as page_first
page_head          kv [2, pages, heads, …]       as page_first
```

A latent (MLA) has no first axis. Other layouts have no runs: their pages go through staging memory, flat, as SGLang gives them.
In the pages of one layout the flat bytes are the runs in this order, so both ways write the same blocks.
"""

from __future__ import annotations

from typing import Any

import torch

DIRECT_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
"""Layouts whose pages lie in runs."""


def runs(pool: Any, is_latent: bool) -> list[torch.Tensor] | None:
    """A pool's pages in place, one tensor ``[pages, bytes]`` for each run; None: they do not lie in runs.

    Args:
        pool: SGLang's ``HostKVCache``.
        is_latent: whether there is one latent instead of K and V.
    """
    buffer = getattr(pool, "kv_buffer", None)
    layout = getattr(pool, "layout", None)
    if not isinstance(buffer, torch.Tensor) or not buffer.is_contiguous() or layout not in DIRECT_LAYOUTS:
        return None
    layers, pages = pool.layer_num, pool.page_num
    halves = [buffer] if is_latent else list(buffer)
    is_known = is_latent or buffer.shape[0] == 2
    if not is_known or buffer.numel() * buffer.element_size() != pages * flat_page_bytes(pool):
        return None
    if layout == "layer_first":
        return [_bytes(half[layer], pages) for half in halves for layer in range(layers)]
    return [piece for half in halves for piece in _cut(_bytes(half, pages), layers)]


def flat_page_bytes(pool: Any) -> int:
    """Bytes of one page."""
    page = pool.get_dummy_flat_data_page()
    return int(page.numel() * page.element_size())


def staging(pages: int, page_bytes: int, pieces: int) -> list[torch.Tensor]:
    """Memory for flat pages, as so many runs."""
    return _cut(torch.zeros((pages, page_bytes), dtype=torch.int8), pieces)


def _bytes(run: torch.Tensor, pages: int) -> torch.Tensor:
    return run.reshape(-1).view(torch.int8).view(pages, -1)


def _cut(run: torch.Tensor, pieces: int) -> list[torch.Tensor]:
    """A run in equal pieces, where it can be cut so."""
    length = run.shape[1]
    if length % pieces:
        return [run]
    step = length // pieces
    return [run[:, at : at + step] for at in range(0, length, step)]
