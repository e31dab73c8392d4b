"""An invalid payload closes the connection that brought it, and no other."""

from __future__ import annotations

import pytest
from fake_rdma import VerbsWires
from wires import Wires, header

from bml.protocol.wire.frame import FrameError, Header
from bml.transport import WAIT, Kind


def refuse(peer: int, level: int, frame: Header) -> None:
    if frame.kind != Kind.TOKEN:
        raise FrameError("that cannot be")


@pytest.mark.parametrize("kind", [Wires, VerbsWires])
@pytest.mark.parametrize("nbytes", [4, 100_000])
@pytest.mark.parametrize("waits", [False, True])
def test_a_frame_that_is_refused_when_it_is_complete(kind: type[Wires], nbytes: int, waits: bool) -> None:
    with kind(3, 1, nbytes=nbytes) as wires:
        wires.connect()
        receiver = wires.handlers[1]
        receiver.on_received = refuse
        if waits:
            receiver.verdict = lambda frame: WAIT
        wires.transports[0].send(1, 0, header(Kind.REDUCE, 0, nbytes), memoryview(bytes(nbytes)))
        wires.until(lambda: receiver.admitted, "the frame is asked about")
        if waits:
            receiver.verdict = None
            wires.transports[1].resume()
        wires.until(lambda: receiver.losses, "the connection is closed")
        assert receiver.losses[0][:3] == (0, 0, "malformed")
        assert "that cannot be" in receiver.losses[0][3]
        wires.transports[2].send(1, 0, header(Kind.TOKEN), None)
        wires.until(lambda: receiver.frames and receiver.frames[-1][0] == 2, "the others go on")
        wires.until(lambda: wires.handlers[0].losses, "the sender sees it")
        wires.transports[1].set_peers(wires.wanted(1))
        wires.transports[0].set_peers(wires.wanted(0))
        wires.until(wires.all_up, "it may come again")
        assert len(receiver.losses) == 1
