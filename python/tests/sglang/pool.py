"""Host pool with SGLang's memory layouts (0.5.23, ``mem_cache/pool_host/mha.py`` and ``mla.py``).

The real ``HostKVCache`` pins its memory, which needs a GPU. :mod:`engine` uses it unpinned, in one layout.
"""

from __future__ import annotations

import torch

LAYERS, HEADS, HEAD_DIM, PAGE, PAGES = 3, 2, 16, 8, 40


class HostPool:
    """Pages of K and V, or of a latent, in one of SGLang's layouts."""

    def __init__(
        self, layout: str = "page_first", is_latent: bool = False, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, PAGE
        self.layer_num = LAYERS
        self.page_num, self.size = PAGES, PAGES * PAGE
        self.is_latent = is_latent
        tail = (1, HEAD_DIM) if is_latent else (HEADS, HEAD_DIM)
        dims = {
            "layer_first": (LAYERS, self.size, *tail),
            "page_first": (self.size, LAYERS, *tail),
            "page_first_direct": (PAGES, LAYERS, PAGE, *tail),
            "page_head": (PAGES, HEADS, PAGE, LAYERS, HEAD_DIM),
            "page_unified": (PAGES, LAYERS, PAGE, *tail),
        }[layout]
        self.kv_buffer = torch.zeros(dims if is_latent else (2, *dims), dtype=dtype)

    def fill(self, seed: int) -> None:
        """Fills every page with noise."""
        source = torch.Generator().manual_seed(seed)
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape, generator=source).to(self.dtype))

    def indices(self, pages: list[int]) -> torch.Tensor:
        """Returns the indices of the tokens of pages."""
        return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self._page(int(index))
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self._page(0)).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self._page(int(index))
        page.copy_(data_page.reshape(page.shape))

    def _page(self, index: int) -> torch.Tensor:
        halves = self.kv_buffer.unsqueeze(0) if self.is_latent else self.kv_buffer
        if self.layout == "layer_first":
            return halves[:, :, index : index + PAGE]
        if self.layout == "page_first":
            return halves[:, index : index + PAGE]
        return halves[:, index // PAGE : index // PAGE + 1]
