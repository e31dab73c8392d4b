"""Opens a link that is wanted and not up: it dials again and again, or waits for the peer, until a deadline.

Of two servers the one with the lower number dials.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from bml.io.poller import Poller, Timer
from bml.transport.handshake.greeting import Dial, GreetingKind
from bml.transport.interface import LostKind

_FIRST_RETRY_S = 0.01  # the peer may open its port in a moment
_LAST_RETRY_S = 0.2  # a peer that comes back is found as late

Attempt = Callable[[Callable[[GreetingKind, str], None]], Dial | None]
"""Starts one attempt, which reports its failure; None if nothing can be sent now (the NIC is silenced)."""


class Opening:
    """The attempts to open one link, for `timeout_s` seconds. `attempt` is None if the peer dials.

    It ends by `cancel` (the link is up, or no longer wanted) or, at the deadline, by `on_fail(kind, why)`.
    """

    def __init__(
        self,
        poller: Poller,
        attempt: Attempt | None,
        on_fail: Callable[[LostKind, str], None],
        timeout_s: float,
    ) -> None:
        self._poller = poller
        self._attempt = attempt
        self._on_fail = on_fail
        self._timeout_s = timeout_s
        self._dial: Dial | None = None
        self._retry: Timer | None = None
        self._retry_s = _FIRST_RETRY_S
        self._last: tuple[LostKind, str] = (
            "timeout",
            "the peer has not connected" if attempt is None else "no answer",
        )
        self._deadline = poller.after(timeout_s, self._time_out)
        self._try()

    def begin_anew(self) -> None:
        """Start the time limit again: a new view wants this link, whose peer may have been away before."""
        self._deadline.cancel()
        self._deadline = self._poller.after(self._timeout_s, self._time_out)

    def cancel(self) -> None:
        """Stop trying, without a callback. Idempotent."""
        self._deadline.cancel()
        sock = self.abandon()
        if self._retry is not None:
            self._retry.cancel()
        if sock is not None:
            sock.close()

    def abandon(self) -> socket.socket | None:
        """Give up the present attempt and return its socket; the next attempt comes as usual."""
        dial, self._dial = self._dial, None
        if dial is None:
            return None
        self._retry_later()
        return dial.detach()

    def _try(self) -> None:
        self._retry = None
        if self._attempt is not None:
            self._dial = self._attempt(self._failed)
            if self._dial is None:
                self._retry_later()

    def _failed(self, kind: GreetingKind, why: str) -> None:
        self._dial = None
        # If another process answers on that port, the peer's process does not exist any more.
        self._last = ("refused" if kind == "auth" else kind, why)
        self._retry_later()

    def _retry_later(self) -> None:
        self._retry = self._poller.after(self._retry_s, self._try)
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _time_out(self) -> None:
        kind, why = self._last
        self.cancel()
        self._on_fail(kind, f"not connected within {self._timeout_s:g} s: {why}")
