"""GenModel: what a synchronisation of S bytes takes in seconds, from counts of the schedule and constants.

    time = α·rounds + S·(β·wire + γ·added + δ·touched + ε·incast)

For one level of N servers (a parameter server on each) that is
2α + 2(N-1)S/N·β + (N-1)S/N·γ + (N+1)S/N·δ + S·w·ε with fan-in w = N-1; in a ring the coefficient of δ is
3(N-1)S/N.

Source: Xiong, Chen, Jiang, Li, Wang, Wang: "Revisiting the Time Cost Model of AllReduce", 2024,
arXiv:2409.04202.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from bml.schedule.ir.cost import gst
from bml.schedule.ir.exchange import Exchange
from bml.schedule.ir.forest import Forest, Phase
from bml.topology import BCube, Fabric

_MOST_COUNTED = 1 << 18
"""Entries of a table that is counted at once: larger ones leave the cache."""
_FEW_STAGES = 8
"""Up to so many are counted one by one; trees of a ring have as many stages as servers."""
_Table = NDArray[np.int64]


@dataclass(frozen=True)
class Constants:
    """The machine and its network; the defaults are those of 10 Gbit/s Ethernet and one slow core.

    Attributes:
        alpha_s: start-up time of a round: from "send" here to "received" there, for an empty message.
        beta_s: time per byte on a link of rate 1 (1/B).
        gamma_s: time per byte to add one partial to another.
        delta_s: time per byte to read or write memory.
        epsilon_s: time per byte and sender beyond the first that several senders at once cost a receiver.
    """

    alpha_s: float = 50e-6
    beta_s: float = 0.8e-9
    gamma_s: float = 0.1e-9
    delta_s: float = 0.1e-9
    epsilon_s: float = 0.005e-9


DEFAULTS = Constants()


@dataclass(frozen=True)
class Counts:
    """The counts that the model takes from a schedule; all but the rounds as multiples of the vector's size.

    Attributes:
        rounds: messages one after the other on the longest way, reduce and broadcast, relays included.
        wire: busiest NIC and direction at its link's rate (the pipelined GST in T).
        added: partials added by the busiest server.
        touched: reads and writes of memory by the busiest server: c partials and its own are c + 2.
        incast: w·(w+1) per part that a server adds from w > 1 senders in one stage, for the busiest server;
            for one level this sums up to w.
    """

    rounds: int
    wire: Fraction
    added: Fraction
    touched: Fraction
    incast: Fraction

    def seconds(self, nbytes: int, constants: Constants = DEFAULTS) -> float:
        """Modelled time of one synchronisation of so many bytes."""
        return self.start_s(constants) + nbytes * self.per_byte_s(constants)

    def start_s(self, constants: Constants) -> float:
        """Modelled time of an empty vector."""
        return constants.alpha_s * self.rounds

    def per_byte_s(self, constants: Constants) -> float:
        """Modelled time that every byte adds."""
        return (
            constants.beta_s * float(self.wire)
            + constants.gamma_s * float(self.added)
            + constants.delta_s * float(self.touched)
            + constants.epsilon_s * float(self.incast)
        )


@dataclass(frozen=True)
class Price:
    """What a vector costs with one candidate, by the cost model.

    Attributes:
        algorithm: its name.
        least_s: seconds that it cannot be below.
        seconds: modelled time; None if it was not planned, or cannot work here.
        works: False if it was planned and cannot work.
    """

    algorithm: str
    least_s: float
    seconds: float | None
    works: bool = True

    def __str__(self) -> str:
        if not self.works:
            return f"{self.algorithm} cannot work"
        if self.seconds is None:
            return f"{self.algorithm} at least {micros(self.least_s)}"
        return f"{self.algorithm} {micros(self.seconds)}"


def micros(seconds: float) -> str:
    """A time as it is shown."""
    return f"{seconds * 1e6:.1f} µs"


def counts(schedule: Forest | Exchange, fabric: Fabric) -> Counts:
    """Count a schedule."""
    return _of_exchange(schedule) if isinstance(schedule, Exchange) else _of_forest(schedule, fabric)


def counts_of_bml(fabric: Fabric) -> Counts:
    """Counts of BML on a healthy, uniform BCube in closed form; equal to those of its forest."""
    assert isinstance(fabric.wiring, BCube)
    n, k, servers = fabric.ports, fabric.levels, fabric.n_servers
    inner = sum((n - 1) * n ** (k - 1 - j) * (j * (n - 1) + 2) for j in range(1, k))
    stages = sum(n ** (k - 1 - s) for s in range(k))
    return Counts(
        rounds=2 * k,
        wire=Fraction(2 * (servers - 1), k * servers),
        added=Fraction(servers - 1, servers),
        touched=Fraction(inner + k * (n - 1) + 2, servers),
        incast=Fraction(stages * crowd(n - 1), servers),
    )


def crowd(senders: int) -> int:
    """Cost of so many senders at once; one is no crowd."""
    return senders * (senders + 1) if senders > 1 else 0


def _of_forest(forest: Forest, fabric: Fabric) -> Counts:
    added, touched, incast = (np.zeros(forest.parent.shape[1], np.int64) for _ in range(3))
    for weight, children, crowds in _senders(forest):
        added += weight @ children
        touched += weight @ np.where(children, children + 2, 0)
        incast += weight @ crowds
    return Counts(
        rounds=sum(_rounds(forest, phase) for phase in Phase),
        wire=gst(forest, fabric),
        added=Fraction(int(added.max(initial=0)), forest.whole),
        touched=Fraction(int(touched.max(initial=0)), forest.whole),
        incast=Fraction(int(incast.max(initial=0)), forest.whole),
    )


def _senders(forest: Forest) -> Iterator[tuple[_Table, _Table, _Table]]:
    """Weights of some pieces; how many children a server adds in each, and their crowds, [piece, server]."""
    n_servers, n_stages = forest.parent.shape[1], forest.n_stages(Phase.REDUCE)
    rows = max(1, _MOST_COUNTED // max(1, n_servers))
    for start in range(0, forest.pieces, rows):
        parent, stage = forest.parent[start : start + rows], forest.stage[start : start + rows]
        there, shape = parent >= 0, parent.shape
        piece = np.repeat(np.arange(shape[0]), there.sum(axis=1))
        place = piece * n_servers + parent[there]
        children = np.bincount(place, minlength=parent.size)
        crowds = _crowds(place, stage[there], n_stages, parent.size)
        yield forest.weight[start : start + rows], children.reshape(shape), crowds.reshape(shape)


def _crowds(place: _Table, stage: NDArray[np.int16], n_stages: int, n_places: int) -> _Table:
    """The sum of the `crowd`s at each place, of the senders of each stage."""
    found = np.zeros(n_places, np.int64)
    if n_stages <= _FEW_STAGES:
        for each in range(n_stages):
            senders = np.bincount(place[stage == each], minlength=n_places)
            found += np.where(senders > 1, senders * (senders + 1), 0)
        return found
    groups, senders = np.unique(place * n_stages + stage, return_counts=True)
    np.add.at(found, groups // n_stages, np.where(senders > 1, senders * (senders + 1), 0))
    return found


def _rounds(forest: Forest, phase: Phase) -> int:
    """Stages of a phase, each as long as its longest detour."""
    own_broadcast = forest.broadcast if phase is Phase.BROADCAST else None
    detours = own_broadcast.detours if own_broadcast else forest.detours
    stage = own_broadcast.stage if own_broadcast else forest.stage
    longest = [1] * forest.n_stages(phase)
    for edge, path in detours.items():
        longest[int(stage[edge])] = max(longest[int(stage[edge])], len(path))
    return sum(longest)


def _of_exchange(made: Exchange) -> Counts:
    most = [max(len(rounds[i]) for rounds in made.rounds.values()) for i in range(made.n_rounds)]
    busy = [senders for senders in most if senders]
    return Counts(
        rounds=len(busy),
        wire=made.gst(),
        added=Fraction(sum(busy)),
        touched=Fraction(sum(senders + 2 for senders in busy)),
        incast=Fraction(sum(crowd(senders) for senders in busy)),
    )
