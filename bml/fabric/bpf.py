"""A program for the kernel that drops arriving packets at random: a classifier in its eBPF instructions."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

from bml.topology.errors import FabricError

#: The number of the system call bpf(2).
_CALLS = {"x86_64": 321, "aarch64": 280}
_LOAD, _CLASSIFIER = 5, 3
_ATTRIBUTE_NBYTES = 128
_CALL, _EXIT, _SET, _SKIP_IF_NOT_LESS = 0x85, 0x95, 0xB7, 0x36
_RANDOM = 7
#: Verdicts of a classifier: the packet is dropped, or it goes on to what else looks at it.
_DROP, _GO_ON = 2, -1
_OF = 1 << 32
_libc = ctypes.CDLL(None, use_errno=True)


def dropping(share: float) -> int:
    """Load a classifier that drops this fraction (0..1) of packets; returns its file descriptor.

    Raises FabricError if the kernel takes none.
    """
    code = program(share)
    call = _CALLS.get(platform.machine())
    if call is None:
        raise FabricError(f"loss on a cable needs x86-64 or AArch64, this is {platform.machine()}")
    instructions, licence = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"MIT")
    places = ctypes.addressof(instructions), ctypes.addressof(licence)
    attribute = struct.pack("=IIQQ", _CLASSIFIER, len(code) // 8, *places).ljust(_ATTRIBUTE_NBYTES, b"\0")
    descriptor = _libc.syscall(call, _LOAD, ctypes.create_string_buffer(attribute), len(attribute))
    if descriptor < 0:
        why = os.strerror(ctypes.get_errno())
        raise FabricError(f"loss on a cable needs BPF in the kernel, and CAP_BPF: {why}")
    return int(descriptor)


def check() -> None:
    """Raise FabricError if this machine cannot make loss."""
    os.close(dropping(1.0))


def program(share: float) -> bytes:
    """The instructions: draw 32 random bits, and drop the packet if they are below the share."""
    bound = min(max(1, round(share * _OF)), _OF - 1)
    return b"".join(
        (
            _instruction(_CALL, value=_RANDOM),
            _instruction(_SKIP_IF_NOT_LESS, skip=2, value=bound),
            _instruction(_SET, value=_DROP),
            _instruction(_EXIT),
            _instruction(_SET, value=_GO_ON),
            _instruction(_EXIT),
        )
    )


def _instruction(code: int, skip: int = 0, value: int = 0) -> bytes:
    return struct.pack("=BBhi", code, 0, skip, value if value < 1 << 31 else value - _OF)
