"""What a server says of the future: a thread looks once a second at what was noted, and predicts.

Steps never wait for it. What it finds is in the status (`bml status`) and in the report.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from bml.cluster.server.shell import ServerShell
from bml.cluster.spec import news
from bml.cluster.spec.job import JobSpec
from bml.faults.slowness import slowed
from bml.io.interruptible import Event
from bml.io.vitals import HostVitals
from bml.predict.pace import Pace
from bml.predict.remaining import Remaining
from bml.predict.step_time import Foretold, Predictor, Wires, modelled, modelled_shared
from bml.predict.trouble import Trouble, Warning
from bml.protocol.server import events as ev
from bml.protocol.wire.messages import View
from bml.schedule import Schedules
from bml.sharedmem.registration_page import boot_id
from bml.topology import LinkFailure

_LOG = logging.getLogger(__name__)

_LOOK_S = 1.0  # how often steps and NICs are judged, in a thread of its own
_USED_ON = ("falling", "slow")
"""Warnings of NICs that are used as much as they can carry, and are not taken out."""


class Forecast:
    """Predictions of one server; `shares_memory`: its steps take no links."""

    def __init__(self, shell: ServerShell, spec: JobSpec, shares_memory: bool):
        self._shell = shell
        self._spec = spec
        self._shares_memory = shares_memory
        self._fabric = spec.parsed_fabric()
        self._predictor = Predictor(spec.constants_from, known=spec.nic_rate is not None)
        self._remaining = Remaining()
        self._trouble = Trouble(shell.core.server, spec.timeouts().heartbeat_s)
        self._host = HostVitals()
        self._lost: Mapping[int, int] = {}
        self._recent: tuple[Warning, ...] = ()
        self._losing: tuple[tuple[int, int], ...] = ()
        self._modelled = 0
        self._lock = threading.Lock()
        # What was noted, and what is said of it: the loop's thread reads it, and must not wait for a model.
        self._facts = threading.Lock()
        self._over = Event()
        self._thread = threading.Thread(target=self._run, name="bml-forecast", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._over.set()

    def predicted(self) -> dict[str, Any] | None:
        """What is predicted for the view in force, beside what was measured; None: nothing yet."""
        pace, epoch = self._pace, self._shell.core.epoch
        predicted = self._predictor.predictions.get(epoch)
        if predicted is None or pace is None:
            return None
        with self._facts:
            return predicted.shown(pace.views.get(epoch))

    def remaining(self, now: float) -> dict[str, float] | None:
        """The seconds that are left of the outermost loop; None: too little is known."""
        with self._facts:
            rest, done = self._remaining.rest(now), self._remaining.done
        return None if rest is None else {"done": done, **asdict(rest)}

    def warnings(self, now: float) -> list[dict[str, Any]]:
        """The early warnings that stand."""
        return [each.shown(now) for each in list(self._trouble.warnings.values())]

    def of_view(self, epoch: int) -> Foretold:
        """What was predicted for the steps of a view, and what they took, for the report."""
        predicted, pace = self._predictor.predictions.get(epoch), self._pace
        if predicted is None or pace is None:
            return Foretold(None, None, "")
        with self._facts:
            return Foretold(predicted.step_s, predicted.measured_s(pace.views.get(epoch)), predicted.basis)

    def look(self, now: float) -> None:
        """Take in what was noted, and predict what can be. Never raises: a job runs without, too."""
        try:
            with self._lock:
                self._look(now)
        except Exception:
            _LOG.exception("server %d cannot predict", self._shell.core.server)

    def looked(self) -> Forecast:
        """Return this, after a look at what was noted until now."""
        self.look(time.monotonic())
        return self

    @property
    def _pace(self) -> Pace | None:
        return None if self._shell.throughput is None else self._shell.throughput.pace

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            now = time.monotonic()
            self.look(now)
            try:
                self._watch(now)
            except Exception:
                _LOG.exception("server %d cannot look for trouble", self._shell.core.server)

    def _watch(self, now: float) -> None:
        """Look for trouble ahead; what is new is logged."""
        me, samples = self._shell.core.server, self._shell.nics.samples
        if not samples:
            return
        at_s, peers, lost = samples.pop()
        new = {level: times - self._lost.get(level, 0) for level, times in lost.items()}
        self._lost = lost
        host, view = self._host.sample(now), self._shell.core.view
        slow = {} if view is None else {level: n for (who, level), n in view.halvings.items() if who == me}
        epoch = 0 if view is None else view.epoch
        for warning in self._trouble.sample(peers, new, host, epoch, at_s, slow):
            shown = warning.shown(at_s)
            _LOG.warning(
                "%s",
                news.line(
                    "early-warning", server=me, part=shown["part"], kind=warning.kind,
                    why=warning.text,
                ),
            )  # fmt: skip
        self._recent = tuple(self._trouble.recent(at_s))
        self._tell_of_losses()

    def _tell_of_losses(self) -> None:
        """The core knows where segments are lost now: a connection that stands still does so there."""
        losing = tuple(
            (each.server, each.level)
            for each in self._recent
            if each.kind == "resent" and each.level is not None
        )
        if losing != self._losing:
            self._losing = losing
            with self._shell.poller.guard:
                self._shell.dispatch(ev.LossyNics(losing))

    def suspects(self, now: float) -> dict[str, Any]:
        """What speaks for taking out parts of this server: its machine, and the warnings of its own parts.

        `leaves`: it is about to leave; `last`: without that NIC it has no way to any other server. The
        launcher decides, as it hears all servers (see bml.predict.suspects). Under the guard.
        """
        return {
            "leaves": bool(self._shell.handover.leaves),
            "machine": _machine(),
            "suspects": [{**each.shown(now), "last": self._is_last(each.level)} for each in self._own()],
        }

    def take_out(self, part: str) -> bool:
        """Take out a part before it fails; under the guard. Returns whether that is done.

        It is not if the part is none of this server's, or no warning of it stands any more.
        """
        shell = self._shell
        for warning in self._own():
            level, why = warning.level, f"early warning: {warning.text}"
            if warning.part != part:
                continue
            if level is None and not shell.handover.leaves:
                shell.handover.ask_to_leave(why)
                return True
            if level is not None and not self._is_last(level):
                shell.dispatch(ev.OwnNicLost(level, f"{part} is taken out: {why}"))
                return True
        return False

    def _own(self) -> list[Warning]:
        """The warnings of parts of this server that are in use and could be taken out."""
        me, view = self._shell.core.server, self._shell.core.view
        if view is None:
            return []
        return [
            each
            for each in self._recent
            if each.server == me
            and each.kind not in _USED_ON
            and (each.level is None or str(LinkFailure(me, each.level)) not in view.failures)
        ]

    def _is_last(self, level: int | None) -> bool:
        """Whether a NIC is the only one by which this server reaches others, in this view."""
        view, me = self._shell.core.view, self._shell.core.server
        if level is None or view is None:
            return False
        left = self._fabric.without(*view.failures, str(LinkFailure(me, level)))
        return not any(left.nic_alive(me, each) and left.neighbours(me, each) for each in range(left.levels))

    def _look(self, now: float) -> None:
        pace, views = self._pace, self._shell.core.views
        if pace is None or not views:
            return
        with self._facts:
            pace.look()
        # Until a view has committed a step, the server plans for it, and this thread would slow it down.
        recovered = [each.view for each in views if each.recover_s is not None]
        for view in [each for each in recovered if each.epoch >= self._modelled]:
            if view.epoch > self._modelled:
                self._predictor.installed(view.epoch, self._model(view))
            self._predict(view, self._modelled, pace)
            self._modelled = view.epoch
        boundary = pace.boundary
        if boundary is not None:
            with self._facts:
                self._remaining.note(boundary.done, boundary.epoch or self._modelled, boundary.at_s)

    def _predict(self, view: View, before: int, pace: Pace) -> None:
        known = view.epoch in self._predictor.predictions
        self._predictor.look(pace.views, len(view.contributors), pace.shares_work)
        predicted, earlier = self._predictor.predictions.get(view.epoch), pace.views.get(before)
        if known or predicted is None or earlier is None or before == view.epoch:
            return
        took_s = predicted.measured_s(earlier)
        if took_s:
            with self._facts:
                self._remaining.expect(view.epoch, predicted.step_s / took_s)

    def _model(self, view: View) -> Wires:
        if self._shares_memory:
            return modelled_shared(len(view.contributors), self._spec.constants)
        fabric = slowed(self._fabric.without(*view.failures), view.halvings)
        schedules = Schedules(fabric, self._spec.algorithm, self._spec.constants)
        return modelled(schedules, self._spec.constants, self._shell.slice_nbytes)


def _machine() -> str:
    """An id of this machine; of one that does not tell, the same as of all such."""
    with suppress(OSError):
        return boot_id()
    return ""
