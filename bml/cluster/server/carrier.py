"""Notices at once that one of this server's own NICs has lost its carrier, from the kernel's own news.

The kernel tells every change of a link on a netlink socket (rtnetlink(7), group RTMGRP_LINK). No root is
needed. Loopback is never watched, and where there is no netlink there are heartbeats still.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from bml.io.forks import close_on_fork
from bml.io.poller import READ, Poller

_LOG = logging.getLogger(__name__)

_RTMGRP_LINK = 1
_RTM_NEWLINK, _RTM_DELLINK, _RTM_GETLINK, _RTM_NEWADDR, _RTM_GETADDR = 16, 17, 18, 20, 22
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_IFF_UP, _IFF_LOOPBACK, _IFF_LOWER_UP = 0x1, 0x8, 0x10000
_IFA_ADDRESS, _IFA_LOCAL, _IFLA_IFNAME = 1, 2, 3
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, change
_ADDRESS = struct.Struct("=BBBBi")  # ifaddrmsg: family, prefix, flags, scope, index
_ATTRIBUTE = struct.Struct("=HH")
_READ_NBYTES = 1 << 18
_MOST_READS = 1000


class _Device(NamedTuple):
    number: int
    name: str
    flags: int

    @property
    def has_carrier(self) -> bool:
        return bool(self.flags & _IFF_UP and self.flags & _IFF_LOWER_UP)


class CarrierWatch:
    """Calls `on_change(level, up, why)` when the NIC with address `nics[level]` loses or gets its carrier.

    A NIC that has none at the start is reported at once. Watches nothing where that is not possible.
    """

    def __init__(
        self, server: int, nics: Sequence[str], poller: Poller, on_change: Callable[[int, bool, str], None]
    ):
        self._server = server
        self._poller = poller
        self._on_change = on_change
        self._levels: dict[int, list[int]] = {}
        self._up: dict[int, bool] = {}
        self._sock: socket.socket | None = None
        try:
            self._open(nics)
        except (OSError, AttributeError, struct.error) as error:
            _LOG.info("server %d does not watch its carriers: %s", server, error)
            self.close()

    @property
    def watched(self) -> dict[int, bool]:
        """Level -> whether its NIC has a carrier, of the NICs that are watched."""
        return {level: self._up[index] for index, levels in self._levels.items() for level in levels}

    def close(self) -> None:
        """Stop. Idempotent."""
        if self._sock is not None:
            self._poller.remove(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def _open(self, nics: Sequence[str]) -> None:
        family = getattr(socket, "AF_NETLINK")  # noqa: B009  # Linux only, unknown to mypy elsewhere
        sock = close_on_fork(socket.socket(family, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0))
        self._sock = sock
        sock.bind((0, _RTMGRP_LINK))
        devices = {device.number: device for device in _devices(_dump(sock, _RTM_GETLINK, _LINK.size))}
        owners = {
            address: index for address, index, _ in _addresses(_dump(sock, _RTM_GETADDR, _ADDRESS.size))
        }
        for level, address in enumerate(nics):
            device = devices.get(owners.get(address, -1))
            if device is not None and not device.flags & _IFF_LOOPBACK:
                self._levels.setdefault(device.number, []).append(level)
        self._up = dict.fromkeys(self._levels, True)
        if not self._levels:
            self.close()
            return
        sock.setblocking(False)
        self._poller.add(sock.fileno(), READ, self._ready)
        self._poller.soon(lambda: self._look([devices[index] for index in self._levels]))

    def _ready(self, events: int) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(_READ_NBYTES)
        except BlockingIOError:
            return
        except OSError as error:  # ENOBUFS: news were lost; the next one, or heartbeats, will tell
            _LOG.info("server %d missed news of its links: %s", self._server, error)
            return
        self._look(_devices(_messages(data)))

    def _look(self, devices: Sequence[_Device] | Iterator[_Device]) -> None:
        for device in devices:
            if device.number in self._levels and self._up[device.number] != device.has_carrier:
                self._up[device.number] = device.has_carrier
                state = "has a carrier again" if device.has_carrier else "has no carrier"
                for level in self._levels[device.number]:
                    self._on_change(
                        level, device.has_carrier, f"NIC {self._server}/{level} ({device.name}) {state}"
                    )


def networks(nics: Sequence[str]) -> tuple[str, ...] | None:
    """Return these addresses of this machine with the lengths of their prefixes: "10.10.3.1/24".

    None if one of them is not known here, or the kernel does not say.
    """
    try:
        with socket.socket(getattr(socket, "AF_NETLINK"), socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as sock:  # noqa: B009
            found = _addresses(_dump(sock, _RTM_GETADDR, _ADDRESS.size))
            prefixes = {address: prefix for address, _, prefix in found}
        return tuple(f"{address}/{prefixes[address]}" for address in nics)
    except (OSError, AttributeError, struct.error, KeyError):
        return None


def _dump(sock: socket.socket, request_type: int, body_nbytes: int) -> list[tuple[int, bytes]]:
    """Everything that the kernel has of this type."""
    length = _HEADER.size + body_nbytes
    request = _HEADER.pack(length, request_type, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0) + bytes(body_nbytes)
    sock.settimeout(1.0)
    sock.send(request)
    found: list[tuple[int, bytes]] = []
    for _ in range(_MOST_READS):
        for kind, body in _messages(sock.recv(_READ_NBYTES)):
            if kind == _NLMSG_DONE:
                return found
            if kind == _NLMSG_ERROR:
                code = -struct.unpack_from("=i", body)[0]
                raise OSError(code, os.strerror(code))
            found.append((kind, body))
    raise OSError("the kernel's answer has no end")


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size:
            return
        yield kind, data[at + _HEADER.size : at + length]
        at += (length + 3) & ~3


def _devices(messages: Iterator[tuple[int, bytes]] | list[tuple[int, bytes]]) -> Iterator[_Device]:
    for kind, body in messages:
        if kind in (_RTM_NEWLINK, _RTM_DELLINK) and len(body) >= _LINK.size:
            _, _, index, flags, _ = _LINK.unpack_from(body)
            name = dict(_attributes(body[_LINK.size :])).get(_IFLA_IFNAME, b"").rstrip(b"\0")
            yield _Device(index, name.decode(errors="replace"), 0 if kind == _RTM_DELLINK else flags)


def _addresses(messages: list[tuple[int, bytes]]) -> Iterator[tuple[str, int, int]]:
    """Each address of this machine, with the number of its device and the length of its prefix."""
    for kind, body in messages:
        if kind == _RTM_NEWADDR and len(body) >= _ADDRESS.size:
            family, prefix, _, _, index = _ADDRESS.unpack_from(body)
            known = dict(_attributes(body[_ADDRESS.size :]))
            raw = known.get(_IFA_LOCAL) or known.get(_IFA_ADDRESS)
            if raw is not None and family in (socket.AF_INET, socket.AF_INET6):
                with suppress(ValueError):
                    yield socket.inet_ntop(family, raw), index, prefix


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind & 0x3FFF, data[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
