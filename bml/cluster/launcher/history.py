"""What has happened in a job, as its launcher heard of it; time is an argument."""

from __future__ import annotations

from collections import deque
from typing import Any

from bml.cluster.fleets.fleet import Changed, Died, FleetEvent, NotInjected, Reported
from bml.cluster.launcher.restarts import OUT
from bml.cluster.spec.leaving import NOTICED

MOST_VIEWS = 50
MOST_EVENTS = 100
_KEPT = 1024
"""Views that are kept; the first one is, too, as times count from it."""
_OF_VIEW = ("epoch", "members", "failures", "slow", "commit", "reason", "noticed_s")


class History:
    """The views and the last events of a job, oldest first. Any thread may read, and note, at any time.

    Times are seconds since 1970, so that they can be compared on another machine.
    """

    def __init__(self) -> None:
        self.all_views: list[dict[str, Any]] = []
        """The views: `epoch`, `at_s`, `members`, `failures`, `slow`, `commit`, `reason`, `noticed_s`."""
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self._last: dict[str, Any] = {}
        self._epoch = 0

    @property
    def views(self) -> list[dict[str, Any]]:
        """The last of all views."""
        return self.all_views[-MOST_VIEWS:]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events: `at_s`, `kind` and `text`.

        A `kind` is view, suspected, joining, coordinator, lost, left, fault or ended.
        """
        return list(self._events)

    def note(self, kind: str, text: str, now_s: float) -> None:
        """Something has happened."""
        self._events.append({"at_s": round(now_s, 3), "kind": kind, "text": text})

    def heard(self, event: FleetEvent, now_s: float) -> None:
        """The fleet reports an event."""
        match event:
            case Changed(snapshot):
                self.seen(snapshot, now_s)
            case Died(server, why):
                self.note("lost", _gone(server, why), now_s)
            case Reported(report) if report.kind in OUT:
                kind = "left" if report.kind in NOTICED else "lost"
                self.note(kind, _gone(report.server, report.error), now_s)
            case Reported(report):
                self.note("ended", f"server {report.server} has ended: {report.outcome}", now_s)
            case NotInjected(fault, why):
                self.note("fault", f"{fault} could not be injected: {why}", now_s)
            case _:
                pass

    def seen(self, snapshot: dict[str, Any], now_s: float) -> None:
        """Note what is new in a snapshot of the coordinator."""
        before, self._last = self._last, snapshot
        for text in _new(snapshot, before, "suspicions"):
            self.note("suspected", text, now_s)
        if before and snapshot.get("term", 0) > before.get("term", 0):
            self.note("coordinator", f"coordinator {snapshot['term']} has taken over", now_s)
        for server in _new(snapshot, before, "waiting"):
            self.note("joining", f"server {server} asks to join", now_s)
        if snapshot["epoch"] > self._epoch:  # a new coordinator begins without a view
            self._epoch = snapshot["epoch"]
            self.all_views.append(
                {
                    **{key: snapshot.get(key) for key in _OF_VIEW},
                    "at_s": round(now_s, 3),
                }
            )
            if len(self.all_views) > _KEPT:
                del self.all_views[1]
            n_servers, reason = len(snapshot["members"]), snapshot.get("reason")
            text = f"view {snapshot['epoch']}: {n_servers} servers ({reason})"
            self.note("view", text, now_s)


def _gone(server: int, why: str) -> str:
    return why if why.startswith(f"server {server} ") else f"server {server}: {why}"


def _new(snapshot: dict[str, Any], before: dict[str, Any], key: str) -> list[Any]:
    return [each for each in snapshot.get(key, ()) if each not in before.get(key, ())]
