"""Looks for Ray's head, in a thread: is its control store (GCS) alive?

Ray's own client of the control store cannot be asked, as it ends its process when the store does not come
back in time. The store speaks gRPC, so HTTP/2: a client that opens a connection and says hello is sent the
server's settings at once, without a token. A process that is stopped, or a dead machine, sends nothing.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable

import ray

from bml.cluster.ray.watching.absence import LOOK_S, PATIENCE_S, Absence, rays_patience_s
from bml.io.interruptible import Event

#: The first bytes of an HTTP/2 connection, and an empty frame of settings (RFC 9113, 3.4 and 6.5).
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))

_GONE = "Ray's head at"
#: Errors of the network or of the other end. Others are of this process, as when it has no descriptor left.
_ABSENT = {
    *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT),
    *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN),
}


def obstacle(address: str, within_s: float = PATIENCE_S) -> str | None:
    """Say why the control store at host:port does not answer; empty if it does, None if nobody could ask.

    A name that stands for no address is an obstacle: that of a service in Kubernetes goes with its pod.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), within_s) as sock:
            sock.sendall(_HELLO)
            # With TLS it hangs up on such a hello, and that is an answer, too.
            return "" if sock.recv(1) or os.environ.get("RAY_USE_TLS", "0") != "0" else "it hangs up"
    except TimeoutError:
        return f"it is silent for {within_s:g} s"
    except socket.gaierror as error:
        return f"{host} has no address: {error.strerror}" if _can_open() else None
    except OSError as error:
        return str(error) if error.errno in _ABSENT else None
    except ValueError as error:  # of the port
        return str(error)


def _can_open() -> bool:
    """Whether this process has a descriptor left; without one it finds no address of any name."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


def was_cut_off(watch: HeadWatch | None, error: str) -> bool:
    """Whether a server with this error left because the head was gone for it alone.

    `watch` is that of this process; None: it is on the head's machine.
    """
    return _GONE in error and (watch is None or not (watch.absence.away_s or watch.absence.gone))


class HeadWatch:
    """Looks for the head at host:port. `gone(why)` is called in its thread, once, if the job must end."""

    @classmethod
    def of_this_cluster(cls, gone: Callable[[str], None] = lambda why: None) -> HeadWatch:
        """Look for the head of the cluster to which this process is connected."""
        return cls(ray.get_runtime_context().gcs_address, gone)

    def __init__(self, address: str, gone: Callable[[str], None]):
        self.address = address
        self.absence = Absence(rays_patience_s(os.environ))
        self._gone = gone
        self._over = Event()
        self._told = False
        threading.Thread(target=self._watch, name="bml-head", daemon=True).start()

    @property
    def why(self) -> str:
        """Say that it is gone, and what was seen last."""
        absence = self.absence
        return f"{_GONE} {self.address} has been gone for {absence.away_s:.0f} s: {absence.why}"

    def heard(self, error: str) -> None:
        """A server has ended with this error. If it left because the head is gone, the job ends for it."""
        if _GONE in error and self.absence.away_s:
            self.absence.gone = True

    def is_news(self) -> bool:
        """Whether it is gone, and this was not asked since."""
        news = self.absence.gone and not self._told
        self._told |= news
        return news

    def close(self) -> None:
        """Look no longer."""
        self._over.set()

    def _watch(self) -> None:
        absence = self.absence
        while not self._over.wait(LOOK_S):
            began = time.monotonic()
            why = obstacle(self.address)
            if why:
                absence.missed(why, began, time.monotonic())
            elif why is not None:
                absence.answered()
            if absence.gone:
                self._gone(self.why)
                return
