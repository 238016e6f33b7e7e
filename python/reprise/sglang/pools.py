"""Access to the pages of SGLang's host memory, each in several runs of memory.

```text
layer_first        kv [2, layers, tokens, …]     a page: one run for K and V of each layer
page_first         kv [2, tokens, layers, …]     a page: one run for K, one for V, cut into as many pieces as layers
page_first_direct  kv [2, pages, layers, …]      like page_first
page_head          kv [2, pages, heads, …]       like page_first
```

A latent (MLA) has no first axis. Pages of other layouts are not contiguous runs: they are copied through staging memory in
SGLang's flat form. The flat bytes of a page are its runs in this order, so both ways produce the same blocks.
"""

from __future__ import annotations

from typing import Any

import torch

DIRECT_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
"""Layouts whose pages consist of contiguous runs."""


def runs(pool: Any, is_latent: bool) -> list[torch.Tensor] | None:
    """Returns a pool's pages in place, one tensor ``[pages, bytes]`` per run; None if pages do not consist of runs.

    Args:
        pool: SGLang's ``HostKVCache``.
        is_latent: whether the pool has one latent instead of K and V.
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
    """Returns the number of bytes of a page."""
    page = pool.get_dummy_flat_data_page()
    return int(page.numel() * page.element_size())


def staging(pages: int, page_bytes: int, pieces: int) -> list[torch.Tensor]:
    """Allocates memory for flat pages, split into runs."""
    return _cut(torch.zeros((pages, page_bytes), dtype=torch.int8), pieces)


def _bytes(run: torch.Tensor, pages: int) -> torch.Tensor:
    return run.reshape(-1).view(torch.int8).view(pages, -1)


def _cut(run: torch.Tensor, pieces: int) -> list[torch.Tensor]:
    """Splits a run into equal pieces; returns it unsplit if its size is not divisible."""
    length = run.shape[1]
    if length % pieces:
        return [run]
    step = length // pieces
    return [run[:, at : at + step] for at in range(0, length, step)]
