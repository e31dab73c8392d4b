"""Kernels that do not know every option of a socket: links work there, and faults say what they cannot do.

A filter of system calls makes a process believe that it runs on one.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import platform
import socket
import struct
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
from wires import Wires, header

from bml.cluster.injection.acts import SERVER_ACTS
from bml.cluster.injection.actuators import Actuators
from bml.cluster.spec.job import JobSpec
from bml.faults import Fault
from bml.faults.busy import Slowdown
from bml.topology import UsageError, parse
from bml.transport import Kind
from bml.transport.handshake.flows import can_pace
from bml.transport.handshake.traffic_class import BULK

#: The numbers of setsockopt and getsockopt.
_CALLS = {"x86_64": (54, 55), "aarch64": (208, 209)}.get(platform.machine())
_SO_MAX_PACING_RATE = 47
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000 | errno.ENOPROTOOPT
_NUMBER_AT, _LEVEL_AT, _OPTION_AT = 0, 24, 32

pytestmark = pytest.mark.skipif(_CALLS is None, reason="the numbers of system calls are not known here")


def forget(option: int) -> None:
    """From now on the kernel does not know this option of sockets, for this process."""
    assert _CALLS is not None
    program = [
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_EQUAL, 1, 0, _CALLS[0]),
        (_IF_EQUAL, 0, 5, _CALLS[1]),
        (_LOAD, 0, 0, _LEVEL_AT),
        (_IF_EQUAL, 0, 3, socket.SOL_SOCKET),
        (_LOAD, 0, 0, _OPTION_AT),
        (_IF_EQUAL, 0, 1, option),
        (_RETURN, 0, 0, _FAIL),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    filters = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _MODE_FILTER, filters)):
        if prctl(*arguments, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")


def without(option: int, act: Callable[[], str]) -> str:
    """What `act` returns, or how it fails, in a process for which the kernel does not know this option."""
    context = get_context("fork")
    ours, theirs = context.Pipe()

    def run(answer: Connection) -> None:
        forget(option)
        try:
            answer.send(act())
        except BaseException as error:
            answer.send(repr(error))

    process = context.Process(target=run, args=(theirs,))
    process.start()
    try:
        assert ours.poll(20.0), "no answer"
        return str(ours.recv())
    finally:
        process.kill()
        process.join()
        process.close()


def _connects(traffic_class: int) -> str:
    with Wires(2, traffic_class=traffic_class).connect() as wires:
        wires.transports[0].send(1, 0, header(Kind.TOKEN), None)
        wires.until(lambda: wires.handlers[1].frames, "the frame")
        (link,) = wires.transports[0]._links.values()
        assert link.sock is not None
        return f"class {link.sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)}"


@pytest.mark.parametrize("traffic_class", [0, BULK])
def test_links_are_made_where_sockets_have_no_priority(traffic_class: int) -> None:
    assert without(socket.SO_PRIORITY, lambda: _connects(traffic_class)) == f"class {traffic_class}"


def _job_with_a_slow_nic() -> str:
    JobSpec(fabric="bcube:2x1", transport="tcp", faults=("slow:1/0@step=2,rate=40mbit",))
    return "taken"


def _strikes() -> str:
    """What a server on such a kernel says when the fault strikes, though its launcher could have paced."""
    with Wires(2).connect() as wires, Said() as said:
        nothing: Any = None
        means = Actuators(
            1,
            parse("bcube:2x1"),
            wires.transports[1],
            wires.poller,
            *[nothing] * 4,
            Slowdown(time.monotonic, lambda seconds: False),
        )
        fault = Fault.parse("slow:1/0@step=2,rate=40mbit")
        SERVER_ACTS["slow"].apply(fault, means)
        return "; ".join(said.texts)


class Said(logging.Handler):
    """Keeps what bml.cluster says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Said:
        logging.getLogger("bml.cluster").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("bml.cluster").removeHandler(self)


def test_a_server_that_cannot_pace_says_so() -> None:
    assert _strikes() == ""
    said = without(_SO_MAX_PACING_RATE, _strikes)
    assert said == "slow:1/0@step=2,rate=40mbit was not injected: this kernel cannot pace connections"


def test_a_slow_nic_is_refused_where_the_kernel_cannot_pace() -> None:
    assert can_pace()
    assert _job_with_a_slow_nic() == "taken"
    assert without(_SO_MAX_PACING_RATE, lambda: str(can_pace())) == "False"
    said = without(_SO_MAX_PACING_RATE, _job_with_a_slow_nic)
    assert said.startswith(UsageError.__name__)
    assert "this kernel cannot pace connections (SO_MAX_PACING_RATE)" in said
