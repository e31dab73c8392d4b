"""Which threads look again before they sleep while they wait for a reply: a loop whose shell only pretends."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import MagicMock

import pytest

from bml.cluster.server import loop as loops
from bml.cluster.steps.meeting import Meeting
from bml.io.poller import Poller
from bml.train.communicator import Retried

REPLY = Retried(1, 1)
YIELDS = 5


class Waits(Poller):
    """Notes how long each pass may wait; the reply comes in the first one that may wait at all."""

    def __init__(self, meeting: Meeting):
        super().__init__(guard=threading.Lock())
        self.timeouts_s: list[float] = []
        self._meeting = meeting

    def poll(self, timeout_s: float = 0.0) -> int:
        self.timeouts_s.append(timeout_s)
        if timeout_s > 0:
            self._meeting.replies.put(REPLY)
        return 0


def passes(spins_beside: bool, beside: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a thread that waits looks without sleeping before it sleeps."""
    monkeypatch.setattr(loops, "yield_core", lambda contention: True)
    meeting = Meeting(lambda: None)
    shell: Any = MagicMock()
    shell.meeting, shell.poller = meeting, Waits(meeting)
    shell.injection.armed = shell.core.urgent = False
    shell.execution.leave_at = None
    loop = loops.ServerLoop(shell, server=0, n_servers=2)
    loop._tick_at = time.monotonic() + 60
    loop._training_thread = 0 if beside else threading.get_ident()
    loop.spins_beside = spins_beside
    assert loop.answer(MagicMock(), YIELDS) is REPLY
    shell.opened.transport.beside_computation.assert_called_once_with(beside)
    loop.close()
    *before, last_s = shell.poller.timeouts_s
    assert last_s > 0
    assert not any(before)
    shell.poller.close()
    return len(before)


def test_only_the_training_thread_looks_again_unless_others_may(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes(spins_beside=False, beside=False, monkeypatch=monkeypatch) == YIELDS
    assert passes(spins_beside=False, beside=True, monkeypatch=monkeypatch) == 0
    assert passes(spins_beside=True, beside=True, monkeypatch=monkeypatch) == YIELDS
