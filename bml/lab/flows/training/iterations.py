"""Iterations of a training, one after the other: computation, and steps on the wires beside it.

As in jobs, the wires take one step after the other. All servers compute alike, or wait for the slowest one,
as a step needs all of them. With `Overlap.forward` gradients are cut into pieces, each a step, and a piece
that is on the wires is not interrupted. Which step is next was settled when the one before it began, as
servers must agree on it (bml.train.priority.order).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Protocol

from bml.lab.flows.training.layers import Layer


class Overlap(Enum):
    """Under which computation gradients are sent.

    `none`: the wires begin when backward has ended. `backward`: a layer's gradient is sent when backward has
    it. With both an iteration ends when all gradients are sums. `forward`: the next iteration begins when
    backward has ended, and each layer of its forward pass waits for its own gradient.
    """

    none = "none"
    backward = "backward"
    forward = "forward"


class Steps(Protocol):
    """What the wires of a view take."""

    @property
    def piece_nbytes(self) -> int:  # noqa: D102
        ...

    def seconds(self, nbytes: int, /) -> float:
        """Seconds of an all-reduce of so many bytes."""
        ...


def in_steps(nbytes: int, steps: Steps, overlap: Overlap) -> tuple[int, int]:
    """In how many steps a gradient of so many bytes is sent, and the bytes of each."""
    n_steps = max(1, round(nbytes / steps.piece_nbytes)) if overlap is Overlap.forward else 1
    return n_steps, round(nbytes / n_steps)


@dataclass
class _Gradient:
    """A gradient that has steps to be sent: `n_left` of `nbytes` each; backward had it at `ready_s`."""

    layer: int
    ready_s: float
    n_left: int
    nbytes: int


class Iterations:
    """The state of a training. Times are seconds since the last iteration ended.

    If all stands still for a while between two iterations, what is under way goes on after that: in these
    times nothing changes.

    `by_need`: with `Overlap.forward` what the next forward pass needs first is sent first, else what backward
    had first.
    """

    def __init__(self, overlap: Overlap, by_need: bool = True):
        self._overlap = overlap
        self._by_need = by_need
        self._left: list[_Gradient] = []  # in the order in which backward had them
        self._wires_s = 0.0  # when the wires have nothing under way
        self._settled_s = 0.0  # when the last step began, and the next one was settled
        self._done_s: dict[int, float] = {}  # layer -> when its gradient is a sum, if that is to come

    def iterate(self, layers: Sequence[Layer], steps: Steps) -> float:
        """Compute one iteration, and return its seconds."""
        now = 0.0
        for number, layer in enumerate(layers):
            while any(each.layer == number for each in self._left):
                self._send(steps, inf)
            now = max(now, self._done_s.get(number, 0.0)) + layer.forward_s
        for number in range(len(layers) - 1, -1, -1):
            now += layers[number].backward_s
            if self._overlap is not Overlap.none:
                self._send_until(steps, now)
            self._have(number, layers[number].nbytes, steps, now)
        if self._overlap is not Overlap.forward:
            for each in self._left:
                each.ready_s = now if self._overlap is Overlap.none else each.ready_s
            now = max(now, self._send_all(steps))
        self._rebase(now)
        return now

    def finish(self, steps: Steps) -> float:
        """Send what is left, and return when all gradients are sums, in seconds from now."""
        return max(0.0, self._send_all(steps))

    def state(self) -> tuple[float, ...]:
        """Return numbers on which everything to come depends."""
        found = [self._wires_s, self._settled_s]
        for layer, done_s in sorted(self._done_s.items()):
            found += [layer, done_s]
        for each in self._left:
            found += [each.layer, each.ready_s, each.n_left]
        return tuple(found)

    def _have(self, number: int, nbytes: int, steps: Steps, now: float) -> None:
        """Backward has the gradient of a layer."""
        self._done_s.pop(number, None)
        if nbytes:
            self._left.append(_Gradient(number, now, *in_steps(nbytes, steps, self._overlap)))

    def _send_until(self, steps: Steps, until_s: float) -> None:
        while self._send(steps, until_s):
            pass

    def _send_all(self, steps: Steps) -> float:
        """Return when the wires have nothing under way any more."""
        self._send_until(steps, inf)
        return self._wires_s

    def _send(self, steps: Steps, until_s: float) -> bool:
        """Send the next step, if it begins by then."""
        if not self._left:
            return False
        start_s = max(self._wires_s, self._left[0].ready_s)
        if start_s > until_s:
            return False
        chosen = self._left[0]
        if self._by_need and self._overlap is Overlap.forward:
            settled = [each for each in self._left if each.ready_s <= self._settled_s]
            chosen = min(settled, key=lambda each: each.layer, default=chosen)
        self._settled_s, self._wires_s = start_s, start_s + steps.seconds(chosen.nbytes)
        chosen.n_left -= 1
        if not chosen.n_left:
            self._left.remove(chosen)
            self._done_s[chosen.layer] = self._wires_s
        return True

    def _rebase(self, now: float) -> None:
        """Count times from `now` on, and forget what has no effect any more."""
        self._wires_s = max(0.0, self._wires_s - now)
        self._settled_s = self._settled_s - now if self._left else -1.0
        self._done_s = {layer: s - now for layer, s in self._done_s.items() if s > now}
        for each in self._left:
            each.ready_s -= now
