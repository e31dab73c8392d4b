"""How threads look again before they sleep while they wait for a reply, in a loop whose shell pretends."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from bml.cluster.server import loop as loops
from bml.cluster.steps.mailbox import Mailbox
from bml.cluster.steps.wire import WireSteps
from bml.io.poller import Poller
from bml.io.spin import NO_SPIN, Spin
from bml.train.communicator import Retried

REPLY = Retried(1, 1)
YIELDS = 5


class Waits(Poller):
    """Notes how long each pass may wait; the reply comes in the first one that may wait at all."""

    def __init__(self, mailbox: Mailbox):
        super().__init__(guard=threading.Lock())
        self.timeouts_s: list[float] = []
        self._mailbox = mailbox

    def poll(self, timeout_s: float = 0.0) -> int:
        self.timeouts_s.append(timeout_s)
        if timeout_s > 0:
            self._mailbox.replies.put(REPLY)
        return 0


def passes(
    monkeypatch: pytest.MonkeyPatch, beside: bool, idle_yields: int = YIELDS, only_idle: bool = False
) -> int:
    """How often a thread looks before it sleeps, if other threads want its core after so many yields."""
    idle = iter([True] * idle_yields)
    monkeypatch.setattr(loops, "yield_core", lambda contention: True)
    monkeypatch.setattr(loops, "yield_idle_core", lambda: next(idle, False))
    mailbox = Mailbox(lambda: None)
    shell: Any = MagicMock()
    shell.mailbox, shell.poller = mailbox, Waits(mailbox)
    shell.injection.armed = shell.core.urgent = False
    shell.execution.leave_at = None
    loop = loops.ServerLoop(shell, server=0, n_servers=2)
    loop._tick_at = time.monotonic() + 60
    loop._training_thread = 0 if beside else threading.get_ident()
    assert loop.answer(MagicMock(), Spin(YIELDS, only_idle)) is REPLY
    shell.opened.transport.beside_computation.assert_called_once_with(beside)
    loop.close()
    *before, last_s = shell.poller.timeouts_s
    assert last_s > 0
    assert not any(before)
    shell.poller.close()
    return len(before)


def test_a_thread_looks_again_before_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes(monkeypatch, beside=False) == YIELDS
    assert passes(monkeypatch, beside=True) == YIELDS


@pytest.mark.parametrize("idle_yields", [0, 1, 3])
def test_beside_another_thread_it_sleeps_when_that_wants_the_core(
    idle_yields: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert passes(monkeypatch, True, idle_yields) == idle_yields + 1, "one more look after the last yield"
    assert passes(monkeypatch, False, idle_yields) == YIELDS, "the training thread need not"


@pytest.mark.parametrize("idle_yields", [0, 1, 3])
def test_in_a_long_step_the_training_thread_sleeps_when_others_want_the_core(
    idle_yields: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert passes(monkeypatch, False, idle_yields, only_idle=True) == idle_yields + 1


@pytest.mark.parametrize(
    ("nbytes", "one_host", "wanted"),
    [
        (4, False, Spin(60, False)),
        (64 << 10, False, Spin(60, False)),
        ((64 << 10) + 4, False, NO_SPIN),
        (64 << 20, False, NO_SPIN),
        ((1 << 20) - 4, True, Spin(60, False)),
        (1 << 20, True, Spin(16, True)),
    ],
)
def test_how_a_step_over_links_waits_depends_on_its_vector(nbytes: int, one_host: bool, wanted: Spin) -> None:
    asked: list[Spin] = []
    host = MagicMock()
    host.one_host = lambda: one_host
    host.answer = lambda event, spin: asked.append(spin) or REPLY
    vector = np.zeros(nbytes // 4, np.float32)
    assert WireSteps(host).sync(MagicMock(), vector, "sum", shared=False) is REPLY
    assert asked == [wanted]
