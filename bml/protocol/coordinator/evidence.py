"""The evidence about parts of the fabric, as a coordinator gathers it, and the time to act on it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from math import inf

from bml.faults import Evidence, Suspicion
from bml.faults.healing import healed
from bml.protocol.coordinator.decision import counts_as_alive
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.topology import Fabric, parse_failure

Pair = tuple[int, int, int]
"""(observer, peer, level)."""


class Findings:
    """Servers that are gone, suspicions, and parts that work again.

    `fresh`: some of it is newer than the view in force.
    """

    def __init__(self, timeouts: Timeouts, now: float):
        self.gone: dict[int, str] = {}
        """Server → what is known of it, as in Evidence."""
        self.trusted: set[Pair] = set()
        self.healed: frozenset[str] = frozenset()
        """Failures of the view in force that are over."""
        self.stale: set[int] = set()
        """Members that do not act on the view, or have lost connections that can be made again: they need
        another view."""
        self.held_at: dict[int, float] = {}
        """When a server was last said to live without its loop turning."""
        self.fresh = False
        self.since_s = now
        self.act_at: float | None = None
        self._suspicions: dict[Pair, Suspicion] = {}
        self._doubted: dict[Pair, Suspicion] = {}
        self._doubted_before: Container[Pair] = ()
        self._noted_at: dict[Pair, float] = {}
        self._timeouts = timeouts
        self._silent_s = 0.0

    @property
    def suspected(self) -> bool:
        """Whether a suspicion stands."""
        return bool(self._suspicions)

    def suspects(self, server: int, observers: Container[int]) -> bool:
        """Whether one of these suspects this server; if no other does, its neighbours hear its heartbeats."""
        said = (*self._suspicions, *self._doubted)
        return any(peer == server != observer and observer in observers for observer, peer, _ in said)

    def is_held(self, server: int, now: float) -> bool:
        """Whether the stand-in of this server is heard: it lives, and answers nothing now."""
        return now - self.held_at.get(server, -inf) <= self._timeouts.answer_s

    @property
    def texts(self) -> list[str]:
        """All suspicions, in words."""
        return [each.why for _, each in sorted(self._suspicions.items())]

    def note(self, now: float, window_s: float, silent_s: float = 0.0) -> None:
        """There is new evidence, after a silence of `silent_s`: act on it when the window is over."""
        if not self.fresh:
            self.fresh = True
            self.since_s = now
            self._silent_s = silent_s
        act_at = now + window_s
        self.act_at = act_at if self.act_at is None else min(self.act_at, act_at)

    def note_proof(self, now: float) -> None:
        """There is proof: wait only until other servers have noticed the same death."""
        self.note(now, self._timeouts.proof_window_s)

    def suspect(self, message: msg.Suspect) -> None:
        """A server suspects."""
        self._suspicions[_pair(message)] = _of(message)

    def doubt(self, message: msg.Suspect, now: float) -> bool:
        """A suspicion may be older than what its observer should have heard; returns whether it is doubted.

        It is not diagnosed then, and the next view makes connections anew. One that was doubted in the view
        before is believed, lest a coordinator that is always a little late never is told of a failure.
        """
        key = _pair(message)
        if message.kind == "own-nic" or key in self._doubted_before:
            return False
        self._doubted[key] = _of(message)
        self.stale.add(message.observer)
        self.note(now, self._timeouts.silence_window_s, message.silent_s)
        return True

    def note_suspicion(self, message: msg.Suspect, now: float) -> None:
        """The suspicion is news; those of other observers are awaited."""
        self._noted_at[_pair(message)] = now if message.kind == "silence" else -inf
        # Silence is not noticed by all servers at the same time, nor a stall by both ends.
        windows_s = {"silence": self._timeouts.silence_window_s, "stall": self._timeouts.stall_window_s}
        window_s = windows_s.get(message.kind, self._timeouts.proof_window_s)
        self.note(now, window_s, message.silent_s)

    def _is_news(self, key: Pair, now: float) -> bool:
        return now - self._noted_at.get(key, -inf) < self._timeouts.heartbeat_s

    def noticed_s(self, now: float) -> float:
        """How long detection took: from the silence until now, in seconds."""
        return now - self.since_s + self._silent_s if self.fresh else 0.0

    def evidence(self, fabric: Fabric, settled_at: float | None = None) -> Evidence:
        """The evidence to diagnose on this fabric; `settled_at`: without silences that were new then."""
        suspicions = tuple(
            each
            for key, each in sorted(self._suspicions.items())
            if counts_as_alive(fabric, each) and (settled_at is None or not self._is_news(key, settled_at))
        )
        return Evidence({s: what for s, what in self.gone.items() if s in fabric.servers}, suspicions)

    def forget_gone(self, members: Container[int]) -> None:
        """Forget that servers outside the view are gone."""
        self.gone = {server: what for server, what in self.gone.items() if server in members}

    def forget(self, past: Callable[[Suspicion], bool]) -> None:
        """Drop suspicions, doubted ones too."""
        self._suspicions = {key: each for key, each in self._suspicions.items() if not past(each)}
        self._doubted = {key: each for key, each in self._doubted.items() if not past(each)}

    def answered(self, view: msg.View, fabric: Fabric) -> None:
        """A view is in force on this damaged fabric: keep the evidence that it does not explain.

        What stood still may move in it, as other bytes go other ways. If not, its sender says so again.
        """
        self.trusted.clear()  # servers listen anew in every view
        self._doubted_before, self._doubted = self._doubted, {}
        self.healed = frozenset()
        self.forget_gone(view.members)
        self.forget(lambda each: each.kind == "stall" or not counts_as_alive(fabric, each))

    def heal(self, fabric: Fabric, failures: Iterable[str]) -> bool:
        """Whether any of these failures of the whole fabric is over."""
        parts = [parse_failure(part) for part in failures]
        self.healed = frozenset(str(part) for part in healed(fabric, parts, self.trusted))
        return bool(self.healed)

    def settle(self) -> None:
        """Without any evidence left there is nothing to act on."""
        if not self.gone and not self._suspicions and not self.stale:
            self.fresh, self.act_at = False, None


def _pair(message: msg.Suspect) -> Pair:
    return message.observer, message.peer, message.level


def _of(message: msg.Suspect) -> Suspicion:
    return Suspicion(*_pair(message), message.kind, message.silent_s, message.why, message.losing)
