"""Permission to use the processor's AMX tiles, in which vLLM's CPU backend computes attention."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger("reprise")


def request_tiles() -> None:
    """Requests permission to use AMX tiles for this process, if the processor has them.

    Linux kills a process that uses tiles without permission (SIGILL). vLLM 0.32 does not request it; oneDNN does, in the
    first large matrix product. If the first prompt of an engine is loaded from the cache, attention runs before any such
    product.
    """
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logger.warning(
            "the system does not permit this process to use AMX, which the processor has: vLLM may crash with an illegal "
            "instruction when its first prompt is loaded; set --dtype float32 to avoid AMX"
        )
