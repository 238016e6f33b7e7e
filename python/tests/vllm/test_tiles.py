"""Permission to use the processor's AMX tiles."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

PROBE = """
import ctypes

ARCH_PRCTL, ARCH_GET_XCOMP_PERM, XTILEDATA = 158, 0x1022, 1 << 18

def has_permission():
    allowed = ctypes.c_ulonglong()
    assert ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_GET_XCOMP_PERM, ctypes.byref(allowed)) == 0
    return bool(allowed.value & XTILEDATA)

from reprise.vllm.amx import request_tiles

before = has_permission()
request_tiles()
print(before, has_permission())
"""


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
def test_process_gets_permission_to_use_tiles() -> None:
    # In a separate process, because a permission is never withdrawn.
    ran = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split() == ["False", "True"], ran.stdout
