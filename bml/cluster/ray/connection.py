"""The connection of this process to Ray. A process has one at most, and all its jobs share it.

The first job that needs it makes it, to the given cluster or to a Ray of this process. It is closed at the
end of the last job. A connection that the user has made is used, and not closed.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from bml.cluster.ray import auth
from bml.cluster.ray.own import NAMESPACE, OwnRay
from bml.errors import StartError, UsageError

_CLIENT = "ray://"
_OWN = "local"
"""Ray's address for a Ray that is started here."""
#: How long a cluster may take to accept a first connection, in seconds; Ray itself would try for minutes.
_REACH_S = 10.0

_changing = threading.Lock()


@dataclass
class _Shared:
    """The connection that the jobs of this process have made."""

    address: str
    own: OwnRay | None
    jobs: int = 0


_shared: _Shared | None = None


class RayConnection:
    """The connection as one job has it; `close` releases it. Any thread may use it.

    Without an address, and outside of a Ray job, Ray is started here. Raises UsageError for a wrong address,
    or one of another cluster than that to which this process is connected; StartError if no cluster answers.
    """

    def __init__(self, address: str | None, prints: bool):
        global _shared
        self._closed = False
        self._holds = False
        with _changing:
            if _shared is not None or not ray.is_initialized():
                if _shared is None:
                    _shared = _connect(address or os.environ.get("RAY_ADDRESS"), prints)
                elif address is not None and address != _shared.address:
                    _check_same(address, _shared)
                _shared.jobs += 1
                self._holds = True
            elif address is not None:
                _check_same(address, None)
            self.is_own = _shared is not None and _shared.own is not None

    def close(self) -> None:
        """Release the connection; the last job closes it, and ends a Ray of its own. Idempotent."""
        global _shared
        with _changing:
            if self._closed:
                return
            self._closed = True
            if not self._holds or _shared is None:
                return
            _shared.jobs -= 1
            if _shared.jobs:
                return
            ended, _shared = _shared, None
            if ended.own is not None:
                ended.own.stop()
            elif ray.is_initialized():
                ray.shutdown()


def _connect(address: str | None, prints: bool) -> _Shared:
    with _users_sigterm():
        if not address or address == _OWN:
            return _Shared(_OWN, OwnRay(prints))
        _check_reachable(address)
        try:
            ray.init(address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=prints)
        except (ConnectionError, RuntimeError, ValueError, AssertionError, RayError) as error:
            raise StartError(_refusal(address, error)) from error
    return _Shared(address, None)


def _refusal(address: str, error: Exception) -> str:
    """Return why a cluster cannot be used, and how to give its token, which Ray does not say."""
    text = f"there is no Ray cluster that can be used at {address}: {str(error).partition('. ')[0]}"
    if address != "auto" and not address.startswith(_CLIENT) and auth.exposure(address)[0]:
        text += f"; it asks for its token: {auth.HOW_TO_GIVE}"
    return text


def _check_reachable(address: str) -> None:
    """Raise UsageError or StartError unless this address accepts connections."""
    if address == "auto":
        return
    host, port = _parsed(address)
    try:
        socket.create_connection((host, port), _REACH_S).close()
    except OSError as error:
        raise StartError(
            f"no Ray cluster can be reached at {address} ({error}); give the address that `ray start` showed"
        ) from None


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"{address!r} is not the address of a Ray cluster: write host:port as `ray start` shows it, "
            "auto, or ray://host:port"
        )
    return host.strip("[]"), int(port)


def _check_same(address: str, shared: _Shared | None) -> None:
    """Raise UsageError unless this is the address of the cluster that this process is connected to."""
    if shared is not None and shared.own is not None:
        raise UsageError(
            f"a job of this process runs on a Ray of its own: wait for its end before one at {address} is "
            "started, or start that in another process"
        )
    if address == "auto":
        return
    here = ray.get_runtime_context().gcs_address
    if not _same(_parsed(address), _parsed(here)):
        raise UsageError(
            f"this process is connected to the Ray cluster at {here}, so it cannot connect to {address}: "
            "give no address, or start the job in another process"
        )


def _same(one: tuple[str, int], other: tuple[str, int]) -> bool:
    """Whether two addresses are those of one place."""
    found = []
    for host, port in (one, other):
        with suppress(OSError):
            host = socket.gethostbyname(host)
        found.append((host, port))
    return found[0] == found[1]


@contextmanager
def _users_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM that this process has set: Ray sets its own."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
