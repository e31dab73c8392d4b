"""The handler of the transport: it brings frames to the core, and says where their payloads belong."""

from __future__ import annotations

import time

from bml.cluster.server.shell import ServerShell
from bml.protocol.server import events as ev
from bml.protocol.step.dataflow import Buffer, Place
from bml.protocol.wire.frame import Header, Kind
from bml.transport import interface as wire

_EMPTY = memoryview(bytearray())


class Arrivals:
    """See bml.transport.interface.Handler; called in the thread that polls, under the guard."""

    def __init__(self, shell: ServerShell):
        self._shell = shell
        self._texts: dict[wire.LinkKey, bytearray] = {}
        self._heard: dict[wire.LinkKey, float] = {}

    def admit(self, peer: int, level: int, header: Header) -> memoryview | wire.Verdict:
        """See Handler."""
        shell = self._shell
        verdict = shell.core.admit(peer, header)
        if isinstance(verdict, Place):
            if verdict.buffer == Buffer.STATE:
                return shell.handover.incoming(verdict, header.nbytes)
            workspace = shell.runner.workspace
            assert workspace is not None
            return workspace.view(verdict, header.stop - header.start)
        if verdict is ev.Verdict.TOKEN:
            return _EMPTY
        if verdict is ev.Verdict.TEXT:
            self._texts[peer, level] = bytearray(header.nbytes)
            return memoryview(self._texts[peer, level])
        return wire.WAIT if verdict is ev.Verdict.WAIT else wire.DROP

    def read_in_place(self, header: Header, payload: memoryview) -> bool:
        """Whether a term of a sum is read where it lies, in `payload`, until the sum is made.

        See bml.sharedmem.zero_copy.ZeroCopy.
        """
        place = self._shell.core.summand_place(header)
        if place is None:
            return False
        workspace = self._shell.runner.workspace
        assert workspace is not None
        workspace.refer(place, payload)
        return True

    def received(self, peer: int, level: int, header: Header) -> None:
        """See Handler."""
        shell, text = self._shell, ""
        if header.kind in (Kind.DESCRIBE, Kind.HEAD):
            text = self._texts.pop((peer, level)).decode(errors="replace")
        armed = shell.injection.armed
        if armed:
            shell.injection.saw(header)
        shell.execution.execute(shell.core.received(peer, header, text, time.monotonic()))
        if armed:
            shell.apply_faults()

    def heard(self, peer: int, level: int) -> None:
        """See Handler; the core is told at its next tick."""
        self._heard[peer, level] = time.monotonic()

    def tell_heard(self) -> None:
        """Tell the core which peers were heard, over which level, since it was told last."""
        for (peer, level), heard_at in self._heard.items():
            self._shell.core.heard(peer, level, heard_at)
        self._heard.clear()

    def stood_in(self, peer: int, level: int) -> None:
        """See Handler."""
        self._shell.dispatch(ev.StoodIn(peer, level))

    def lost(self, peer: int, level: int, kind: str, why: str) -> None:
        """See Handler."""
        self._shell.dispatch(ev.PeerLost(peer, level, kind, why))

    def proved(self, peer: int, level: int) -> None:
        """See Handler."""
        self._shell.dispatch(ev.Proved(peer, level))
