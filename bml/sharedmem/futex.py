"""Sleep until a word of shared memory changes: the system call `futex` of Linux."""

from __future__ import annotations

import ctypes

_FUTEX = 202  # its number on x86-64, see `segment.why_not`
_WAIT, _WAKE = 0, 1
_ALL = 1 << 30


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
]


def wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at `address` is `value`, for `timeout_s` at most; may return early."""
    seconds = int(timeout_s)
    timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _syscall(_FUTEX, address, _WAIT, value, ctypes.byref(timeout), None, 0)


def wake(address: int) -> None:
    """Wake all threads that sleep on the word at `address`."""
    _syscall(_FUTEX, address, _WAKE, _ALL, None, None, 0)
