"""The processor's tiles (AMX), which vLLM's CPU backend computes attention in."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger("reprise")


def ask_for_tiles() -> None:
    """Asks the system for the tiles, where the processor has them, for this process and all threads of it.

    Linux ends a process that uses them without having asked (SIGILL). vLLM 0.32 does not ask: oneDNN does so for it, in the first product
    of matrices that is worth it. When the first prompt of an engine is loaded there is none before attention, for all that is computed is
    a token or two.
    """
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logger.warning(
            "this processor has AMX, and the system does not let this process use it: vLLM may end with an illegal instruction "
            "when its first prompt is loaded; --dtype float32 does without AMX"
        )
