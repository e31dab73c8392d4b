"""How long a step will take in a view, said before the view's steps are measured.

What the wires take comes from the cost model, for the schedule that a step of this size takes on what is left
of the fabric. How fast this host is, and how long the training function computes, is learned from steps of
the view before; in the first view, from its first steps.

    step = step before + the change of what the wires take

of which the training function feels only what is not hidden under its computation (bml.predict.pace). In the
first view the change is that from the measured to the modelled time, so nothing but computation is learned.
Later the wires take as many times the modelled time as they did before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bml.predict.pace import LEARNED, VIEWS_KEPT, StepTimes, mean_s
from bml.schedule import Schedules
from bml.schedule.select.model import Constants

_FILLING = 8
"""Of the slices of all trees, one in so many holds up a NIC before all NICs are busy, and after. Found by
comparison with simulated steps (bml.lab.flows) on damaged fabrics."""

_USUAL_ERROR = 0.05
"""By so much steps on NICs of known rate usually differ from the model."""

Wires = Callable[[int], float]
"""Modelled seconds of a step of so many bytes, from the contribution to the result."""


class Foretold(NamedTuple):
    """Of a view: seconds of a step as predicted and as measured, and from what it was predicted, in words."""

    predicted_s: float | None
    measured_s: float | None
    basis: str


@dataclass(frozen=True)
class StepTime:
    """A prediction for the steps of view `epoch`.

    `step_s` seconds from step to step, of which `wires_s` are modelled for the wires; `basis` says from what
    it was predicted, in words. `counts`: size in bytes -> in how many steps vectors of that size were seen.
    """

    epoch: int
    step_s: float
    wires_s: float
    basis: str
    counts: Mapping[int, int]

    def shown(self, steps: StepTimes | None) -> dict[str, Any]:
        """Return it ready for JSON, beside what the view's steps took so far."""
        return {
            "epoch": self.epoch,
            "step_s": self.step_s,
            "wires_s": self.wires_s,
            "basis": self.basis,
            "measured_s": self.measured_s(steps),
            "steps": 0 if steps is None else steps.n_steps,
        }

    def measured_s(self, steps: StepTimes | None) -> float | None:
        """What these steps took, if sizes come as often as was predicted; None: there are none of a size."""
        return steps.step_s(self.counts) if steps is not None and steps.has(self.counts) else None


def modelled(schedules: Schedules, constants: Constants, slice_nbytes: Callable[[int], int]) -> Wires:
    """Return the model of steps over links with these schedules, of which `slice_nbytes` are cut."""

    def wires_s(nbytes: int) -> float:
        plan = schedules.for_nbytes(nbytes)
        seconds = plan.counts().seconds(nbytes, constants)
        if plan.is_plain_bml or not nbytes:
            return seconds
        # Trees that are not alike: NICs wait for one another until all trees are filled.
        longest = min(slice_nbytes(nbytes), nbytes / plan.pieces)
        return seconds + plan.pieces / _FILLING * longest * constants.beta_s

    return wires_s


def modelled_shared(n_servers: int, constants: Constants) -> Wires:
    """Return the model of steps in memory that all servers share: each adds its share, and copies the sum."""
    touched = (n_servers + 1) / n_servers + 2
    per_byte_s = constants.gamma_s * (n_servers - 1) / n_servers + constants.delta_s * touched
    return lambda nbytes: 2 * constants.alpha_s + nbytes * per_byte_s


class Predictor:
    """Predicts the steps of one job, view by view; `source` says in words whence the constants are.

    `known`: the rate of the NICs is known, so a host that takes much longer than the model is believed as far
    as its steps agree with each other.
    """

    def __init__(self, source: str, known: bool = False):
        self._source = source
        self._known = known
        self._models: dict[int, Wires] = {}
        self.predictions: dict[int, StepTime] = {}
        """Epoch -> what was predicted for it; it never changes. Of the last views alone."""

    def installed(self, epoch: int, wires: Wires) -> None:
        """A view is in force, and this is the model of its steps."""
        self._models[epoch] = wires
        for kept in (self._models, self.predictions):
            for old in sorted(kept)[:-VIEWS_KEPT]:
                del kept[old]

    def look(self, views: Mapping[int, StepTimes], n_servers: int, shares_work: bool) -> None:
        """Predict the newest view, once it can be: `views` are the steps so far, of all views.

        `n_servers` contribute in it. With `shares_work` they share a number of samples. Of the view's own
        steps only the first ones of a run are looked at, to learn what the training function computes.
        """
        epoch = max(self._models, default=0)
        if not epoch or epoch in self.predictions:
            return
        known = [each for each in sorted(views) if each in self._models and views[each].n_steps >= LEARNED]
        earlier = [each for each in known if each < epoch]
        if earlier:
            last = earlier[-1]
            self.predictions[epoch] = self._following(epoch, last, views[last], n_servers, shares_work)
        elif epoch in known:
            first = views[epoch].first
            assert first is not None
            self.predictions[epoch] = self._first(epoch, first)

    def _first(self, epoch: int, steps: StepTimes) -> StepTime:
        wires = self._models[epoch]

        def step_s(nbytes: int) -> float:
            usual = steps.usual(nbytes)
            return usual.step_s + felt_s(wires(nbytes) - usual.wires_s, usual.slack_s, usual.exposed_s)

        basis = f"{self._source}; computation as in the first {steps.n_steps} steps"
        return StepTime(
            epoch, mean_s(steps.counts, step_s), mean_s(steps.counts, wires), basis, dict(steps.counts)
        )

    def _following(
        self, epoch: int, before: int, steps: StepTimes, n_servers: int, shares_work: bool
    ) -> StepTime:
        wires, then = self._models[epoch], self._models[before]
        longer = steps.n_servers / n_servers - 1 if shares_work and n_servers else 0.0

        def times(nbytes: int) -> float:
            """How many times the modelled time the wires take, as this host has it."""
            usual, modelled_s = steps.usual(nbytes), then(nbytes)
            found = usual.wires_s / modelled_s if modelled_s else 0.0
            trust = _USUAL_ERROR**2 / (_USUAL_ERROR**2 + usual.error**2) if self._known else 1.0
            return 1 + (found - 1) * trust

        def wires_s(nbytes: int) -> float:
            return wires(nbytes) * times(nbytes)

        def step_s(nbytes: int) -> float:
            usual = steps.usual(nbytes)
            computed_s = usual.step_s - usual.exposed_s - usual.slack_s
            change_s = felt_s(wires_s(nbytes) - usual.wires_s, usual.slack_s, usual.exposed_s)
            return usual.step_s + change_s + max(0.0, computed_s) * longer

        counts = dict(steps.counts)
        host = mean_s(counts, wires_s) / max(mean_s(counts, wires), 1e-12)
        basis = f"{self._source}; this host took {host:.2f} times as long as that in view {before}"
        return StepTime(epoch, mean_s(counts, step_s), mean_s(counts, wires_s), basis, counts)


def felt_s(change_s: float, slack_s: float, exposed_s: float) -> float:
    """The part of a change of the wires' time that makes a step longer, or shorter."""
    return max(0.0, change_s - slack_s) if change_s > 0 else max(change_s, -exposed_s)
