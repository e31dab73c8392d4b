"""What a benchmark of trainings runs: the contenders, the failures, and the layers at their scale. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from bml.errors import UsageError
from bml.lab.flows.training.iterations import Overlap
from bml.lab.flows.training.layers import Layer
from bml.lab.flows.training.training import Part, Training
from bml.schedule import plan
from bml.topology import Fabric, Failure, parse, parse_failure

OWN = "bml"
WARM_UP = 2
"""Iterations at the beginning of a run that are not counted: connections open, memory is allocated."""
MOST_NBYTES = 5 << 19
"""By default gradients are scaled to at most so many bytes, which take about a second at 20 Mbit/s."""
MOST_FABRICS = 26
_LEAST_SCALE = Fraction(1, 2**30)
_SCALE = re.compile(r"([0-9]{1,9})(?:/([0-9]{1,10})|(\.[0-9]{1,9}))?")
_STRUCK = re.compile(r"(.+)@([0-9]{1,6})")


@dataclass(frozen=True)
class Contender:
    """A way to sum gradients: an algorithm of bml (`auto` chooses by size) on a fabric."""

    who: str
    algorithm: str
    fabric: Fabric


@dataclass(frozen=True)
class Strike:
    """Failures that strike in iteration `iteration`, counted from 1 with those that warm up."""

    iteration: int
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class Comparison:
    """What is measured.

    Attributes:
        model: name of the network, or its file.
        layers: the layers whose gradients go in one step each, in the order of the forward pass. Their
            gradients are scaled, their computation is not.
        scale: bytes of a gradient on the wires over those of the model.
        rate_bit: bits per second of every NIC, headers included.
        overlap: `none` or `backward`, see `bml.lab.flows.training.iterations`.
        own: bml on the fabric that was asked for.
        against: the other contenders.
        strikes: what fails in a run of bml alone, in order of time; empty: there is no such run.
        iterations: counted iterations of a run, and of those after a failure.
        turns: runs of each contender.
    """

    model: str
    layers: tuple[Layer, ...]
    scale: Fraction
    rate_bit: int
    overlap: Overlap
    own: Contender
    against: tuple[Contender, ...]
    strikes: tuple[Strike, ...]
    iterations: int
    turns: int

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """All contenders, bml first."""
        return (self.own, *self.against)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients on the wires."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def run_iterations(self) -> int:
        """Iterations of a run without failures."""
        return WARM_UP + self.iterations

    @property
    def failing_iterations(self) -> int:
        """Iterations of the run with failures; the one after a failure is not counted."""
        return self.strikes[-1].iteration + 1 + self.iterations

    def failing(self) -> Training:
        """Return the run with failures as a training of the model, in which they strike between iterations.

        Raises:
            UsageError: the fabric has no such part.
        """
        fabric, parts = self.own.fabric, [Part(0, self.own.fabric)]
        for strike in self.strikes:
            fabric = fabric.without(*strike.failures)
            parts.append(Part(strike.iteration, fabric, tuple(map(str, strike.failures))))
        return Training(self.layers, self.failing_iterations, parts, self.overlap)

    def check(self) -> None:
        """Raise UsageError for what cannot run, TooFewServers if a failure leaves too few servers."""
        n_servers = len(self.own.fabric.servers)
        if not self.nbytes:
            raise UsageError(f"{self.model} has no parameters: there is nothing to send")
        for each in self.against:
            others = len(each.fabric.servers)
            if others != n_servers:
                raise UsageError(
                    f"{each.who}@{each.fabric} has {others} servers, {self.own.fabric} has {n_servers}: "
                    "compare fabrics of as many servers, which share the same work"
                )
            if each.algorithm in ("auto", OWN) and each.fabric.name == self.own.fabric.name:
                raise UsageError(f"{each.who} on {self.own.fabric} is what the others are compared with")
        for each in self.contenders:
            plan(each.fabric, each.algorithm)  # raises if it cannot work there
        names = {each.fabric.name for each in self.contenders}
        if len(names) > MOST_FABRICS:
            raise UsageError(f"{len(names)} fabrics would be up at a time, at most {MOST_FABRICS} can be")
        if self.strikes:
            if self.strikes[0].iteration < WARM_UP + 2:
                raise UsageError(
                    f"a failure in iteration {self.strikes[0].iteration} has no iterations before it: "
                    f"the first {WARM_UP} warm up, so let it strike in iteration {WARM_UP + 2} or later"
                )
            self._check_strikes()
            self.failing().check()

    def _check_strikes(self) -> None:
        fabric = self.own.fabric
        for strike in self.strikes:
            for failure in strike.failures:
                left = fabric.without(failure)
                if len(left.links) == len(fabric.links):
                    raise UsageError(f"{failure}@{strike.iteration} strikes what has failed before")
                fabric = left


def contenders(against: str, own: Fabric) -> tuple[Contender, ...]:
    """Read algorithms such as `ring,mesh@switch:9,ps`, each once.

    Those before an `@` are on the fabric after it, up to the next comma; those after the last one on `own`.

    Raises:
        UsageError: an algorithm is missing before an `@`, or there is no such fabric.
    """
    found: list[Contender] = []
    waiting: list[str] = []
    for part in (part.strip() for part in against.split(",") if part.strip()):
        name, at, where = part.partition("@")
        if not name:
            raise UsageError(f"'{part}' names no algorithm: write ring@switch:9")
        waiting.append(name)
        if at:
            found += [Contender(each, each, parse(where)) for each in waiting]
            waiting = []
    found += [Contender(each, each, own) for each in waiting]
    return tuple({(each.who, each.fabric.name): each for each in found}.values())


def strikes(texts: Sequence[str]) -> tuple[Strike, ...]:
    """Read failures such as `server:4@20`, in order of time; those of one iteration strike together.

    Raises:
        UsageError: a text is something else.
    """
    at: dict[int, list[Failure]] = {}
    for text in texts:
        found = _STRUCK.fullmatch(text)
        if found is None:
            raise UsageError(f"'{text}' does not say when: write server:4@20, in iteration 20")
        at.setdefault(int(found[2]), []).append(parse_failure(found[1]))
    found_at = sorted(at)
    for before, after in pairwise(found_at):
        if after < before + 3:
            raise UsageError(
                f"failures in iterations {before} and {after} are too close to be told apart: "
                f"let the second strike in iteration {before + 3} or later, or both in one"
            )
    return tuple(Strike(iteration, tuple(at[iteration])) for iteration in found_at)


def read_scale(text: str) -> Fraction:
    """Read a scale such as `1/8`, `0.25` or `1`.

    Raises:
        UsageError: the text is something else, 0, or more than 1.
    """
    found = _SCALE.fullmatch(text.strip())
    scale = Fraction(0)
    if found and int(found[2] or 1):
        scale = Fraction(int(found[1]), int(found[2])) if found[2] else Fraction(found[0])
    if not _LEAST_SCALE <= scale <= 1:
        raise UsageError(f"'{text}' is no scale: write it like 1/8 or 0.125, at most 1")
    return scale


def usual_scale(nbytes: int) -> Fraction:
    """Return the largest of 1, 1/2, 1/4, … at which gradients of so many bytes are MOST_NBYTES at most."""
    scale = Fraction(1)
    while nbytes * scale > MOST_NBYTES:
        scale /= 2
    return scale


def scaled_down(layers: Sequence[Layer], scale: Fraction) -> tuple[Layer, ...]:
    """Return layers with that share of their parameters, at least one where there were any."""
    return tuple(
        replace(layer, n_parameters=max(1, round(layer.n_parameters * scale)) if layer.n_parameters else 0)
        for layer in layers
    )
