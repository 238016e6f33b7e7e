"""The system's leave to use the processor's tiles."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

LOOK = """
import ctypes

ARCH_PRCTL, ARCH_GET_XCOMP_PERM, XTILEDATA = 158, 0x1022, 1 << 18

def has_leave():
    allowed = ctypes.c_ulonglong()
    assert ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_GET_XCOMP_PERM, ctypes.byref(allowed)) == 0
    return bool(allowed.value & XTILEDATA)

from reprise.vllm.tiles import ask_for_tiles

before = has_leave()
ask_for_tiles()
print(before, has_leave())
"""


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
def test_a_worker_has_leave_to_use_tiles_before_anything_is_computed() -> None:
    # In a process of its own: what is allowed once stays so.
    ran = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split() == ["False", "True"], ran.stdout
