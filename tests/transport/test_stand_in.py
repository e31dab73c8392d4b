"""A stand-in speaks for a server whose loop does not turn, while its process lives: with its real process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from descriptors import opened
from wires import DEADLINE_S, JOB, TOKEN, Wires, polled

from bml.transport import Identity
from bml.transport.links import stand_in_process
from bml.transport.links.stand_in import StandIn

INTERVAL_S, HOLD_S = 0.02, 0.4


def started(wires: Wires, hold_s: float = 60.0) -> StandIn:
    """That of server 0, which has server 1 for a neighbour."""
    transport = wires.transports[0]
    identity = Identity.of(TOKEN, JOB, 0, 0)
    return StandIn(identity, [nic.heartbeats for nic in transport.nics], INTERVAL_S, hold_s)


def neighbours(wires: Wires) -> dict[int, dict[int, tuple[tuple[str, int], int]]]:
    return {level: {1: (endpoint, 0)} for level, endpoint in enumerate(wires.transports[1].endpoints)}


def expecting(levels: int = 1) -> Wires:
    wires = Wires(2, levels)
    for level, endpoint in enumerate(wires.transports[0].endpoints):
        wires.transports[1].nics[level].heartbeats.expect(0, endpoint, 0)
    return wires


def test_it_speaks_on_every_nic_while_the_loop_stands_still() -> None:
    with expecting(levels=2) as wires:
        stand_in = started(wires)
        stand_in.begin(neighbours(wires))
        held = wires.handlers[1].held_ones
        wires.until(lambda: {(0, 0), (0, 1)} <= {*held}, "heartbeats of the stand-in on both levels")
        assert {*held} <= {*wires.handlers[1].heard_from}, "they are signs of life"
        assert wires.transports[1].nics[0].heartbeats.rejected == 0
        stand_in.close()


def test_it_says_nothing_while_the_loop_turns_and_the_server_is_heard_after_it() -> None:
    with expecting() as wires:
        stand_in, handler = started(wires), wires.handlers[1]
        stand_in.begin(neighbours(wires))
        wires.until(lambda: handler.held_ones, "it speaks")
        stand_in.turned()
        wires.until(lambda: stand_in_waits(wires, stand_in), "what it said before has come")
        before = len(handler.held_ones)
        for _ in range(50):
            stand_in.turned()
            n_heard = len(handler.heard_from)
            wires.transports[0].heartbeat(1, 0, wires.transports[1].endpoints[0])
            wires.until(lambda n_heard=n_heard: len(handler.heard_from) > n_heard, "the server's own")  # type: ignore[misc]
        assert len(handler.held_ones) <= before + 5, "it was late by itself for a moment at most"
        stand_in.close()


def stand_in_waits(wires: Wires, stand_in: StandIn, turns: bool = True) -> bool:
    """Whether nothing came in the time of three heartbeats, in which the loop turned if it is to."""
    n_heard = len(wires.handlers[1].heard_from)
    ends_at = time.monotonic() + 3 * INTERVAL_S
    while time.monotonic() < ends_at:
        if turns:
            stand_in.turned()
        wires.poller.poll(INTERVAL_S / 4)
    return len(wires.handlers[1].heard_from) == n_heard


@pytest.mark.slow
def test_it_speaks_for_hold_s_at_most() -> None:
    with expecting() as wires:
        stand_in, held = started(wires, HOLD_S), wires.handlers[1].held_ones
        stand_in.begin(neighbours(wires))
        while not held:  # it takes longer to start on a busy machine
            stand_in.turned()
            polled(wires.poller, HOLD_S / 2)
        stand_in.turned()
        before, ends_at = len(held), time.monotonic() + 4 * HOLD_S
        wires.until(lambda: time.monotonic() > ends_at, "the time is over")
        stand_in.close()
        assert 0 < len(held) - before <= HOLD_S / INTERVAL_S


def test_it_speaks_on_no_nic_that_a_fault_silences() -> None:
    with expecting(levels=2) as wires:
        stand_in, held = started(wires), wires.handlers[1].held_ones
        wires.transports[0].silence(0)
        stand_in.begin(neighbours(wires))
        wires.until(lambda: len(held) > 5, "it speaks on the other one")
        assert {*held} == {(0, 1)}
        stand_in.close()


def test_it_speaks_again_after_all_nics_were_silent() -> None:
    """It had nobody to speak to, and must not end for that."""
    with expecting() as wires:
        stand_in, held = started(wires), wires.handlers[1].held_ones
        stand_in.begin(neighbours(wires))
        wires.until(lambda: held, "it speaks")
        wires.transports[0].silence(0)
        stand_in.tell()
        wires.until(lambda: stand_in_waits(wires, stand_in, turns=False), "it says nothing")
        wires.transports[0].unsilence(0)
        wires.transports[0].heartbeat(1, 0, wires.transports[1].endpoints[0])
        stand_in.tell()
        before = len(held)
        wires.until(lambda: len(held) > before, "it speaks again")
        stand_in.close()


def test_a_view_changes_to_whom_it_speaks() -> None:
    with Wires(3) as wires:
        for observer in (1, 2):
            wires.transports[observer].nics[0].heartbeats.expect(0, wires.transports[0].endpoints[0], 0)
        stand_in = wires.transports[0].stand_in = started(wires)
        stand_in.begin({})
        wires.transports[0].set_peers({(1, 0): wires.transports[1].endpoints[0]})
        wires.until(lambda: wires.handlers[1].held_ones, "it speaks to server 1")
        assert wires.handlers[2].held_ones == []
        both = {(peer, 0): wires.transports[peer].endpoints[0] for peer in (1, 2)}
        wires.transports[0].set_peers(both)
        wires.until(
            lambda: wires.handlers[2].held_ones, "it speaks to server 2, though the loop did not turn"
        )
        before = len(wires.handlers[1].held_ones)
        wires.until(lambda: len(wires.handlers[1].held_ones) > before + 3, "and to server 1 as before")
        stand_in.close()


def test_nothing_is_left_of_it() -> None:
    with expecting() as wires:
        before = opened()
        stand_in = started(wires)
        (process,) = psutil.Process().children()
        stand_in.close()
        stand_in.close()
        assert not process.is_running()
        assert opened() == before


def test_a_server_without_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    with expecting() as wires:
        stand_in = started(wires)
        stand_in.begin(neighbours(wires))
        stand_in.turned()
        stand_in.close()
    assert "server 0 has no stand-in: too many processes" in caplog.text


_SERVER = """
import sys
sys.path[:0] = sys.argv[1:]
from test_stand_in import expecting, neighbours, started
wires = expecting()
stand_in = started(wires)
stand_in.begin(neighbours(wires))
print(stand_in._running.process.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_a_server_that_is_killed() -> None:
    folder = Path(__file__).parent
    command = [sys.executable, "-c", _SERVER, *map(str, (folder, *folder.parents[:2]))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ends = os.pidfd_open(int(server.stdout.readline()))
        server.kill()
        assert select.select([ends], [], [], DEADLINE_S)[0], "it outlives its server"
        os.close(ends)


def test_one_that_has_ended_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with expecting() as wires:
        stand_in = started(wires)
        (process,) = psutil.Process().children()
        stand_in.begin(neighbours(wires))
        wires.until(lambda: wires.handlers[1].held_ones, "it speaks")
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            process.send_signal(number)  # as to all processes of a step of Slurm
        before = len(wires.handlers[1].held_ones)
        wires.until(lambda: len(wires.handlers[1].held_ones) > before + 5, "it goes on")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        for _ in range(3):
            stand_in.turned()
        stand_in.close()
    assert caplog.text.count("the stand-in has ended") == 1


def test_a_process_that_is_stopped_or_dead_is_not_spoken_for() -> None:
    with subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE) as process:
        assert not stand_in_process._is_gone(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert stand_in_process._is_gone(process.pid)
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert not stand_in_process._is_gone(process.pid)
        process.kill()
    assert stand_in_process._is_gone(process.pid)
