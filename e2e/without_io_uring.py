"""Executes a command that may not set up io_uring: a seccomp filter rejects the call, as a container's profile does.

Usage: without_io_uring.py COMMAND [ARGUMENT...]

The process and its children inherit the filter (seccomp(2)). It needs no privileges, since PR_SET_NO_NEW_PRIVS is set.
"""

import ctypes
import os
import sys

# linux/prctl.h, linux/seccomp.h, linux/bpf_common.h, errno.h; the number of the call is the same on all machines.
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
LOAD_WORD_ABSOLUTE = 0x20
JUMP_IF_EQUAL = 0x15
RETURN = 0x06
ALLOW = 0x7FFF0000
FAIL_WITH_EPERM = 0x00050000 | 1
IO_URING_SETUP = 425


class Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("jump_true", ctypes.c_ubyte),
        ("jump_false", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    ]


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]


def main() -> None:
    instructions = (Instruction * 4)(
        Instruction(LOAD_WORD_ABSOLUTE, 0, 0, 0),
        Instruction(JUMP_IF_EQUAL, 0, 1, IO_URING_SETUP),
        Instruction(RETURN, 0, 0, FAIL_WITH_EPERM),
        Instruction(RETURN, 0, 0, ALLOW),
    )
    program = Program(len(instructions), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    )
    if refused:
        sys.exit(f"cannot install the seccomp filter: {os.strerror(ctypes.get_errno())}")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
