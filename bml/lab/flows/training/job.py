"""A whole training: iterations in views, between which parts fail, and what each view takes.

The work is constant: the servers that are left share the samples of an iteration. A failure strikes between
two iterations. Nothing is computed or sent until it is noticed and the view has changed; what was on the
wires goes on after that, and what was still to be sent is sent by the schedules of the new view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bml.lab.flows.training.iterations import Iterations, Overlap, in_steps
from bml.lab.flows.training.layers import Layer, computed_s, scaled
from bml.lab.flows.training.training import Training, ViewTimes
from bml.lab.flows.training.wires import Network, Wires
from bml.topology import Fabric

_GRAIN = 1e-9
"""Two states are the same if their times differ by less than so many iterations."""
_MOST_PLAYED = 1000
"""Iterations of a view that are played if no state comes twice; the others are taken to be like these."""


def train(
    training: Training, network: Network, wires_of: Callable[[Fabric, Network], Wires] = Wires
) -> list[ViewTimes]:
    """Simulate a training, and return what its views took; the sum of their `seconds` is the whole job.

    `wires_of` may return wires that were simulated before, for the same fabric and network.

    Raises:
        FabricError: the survivors cannot all reach one another, or the algorithm cannot work.
        TooFewServers: no more than half of the servers of a view are left in the next one.
        UsageError: there is no such algorithm, or it is too large; a part never comes.
    """
    training.check()
    state = Iterations(training.overlap, training.by_need)
    found: list[ViewTimes] = []
    ends = [*(part.since for part in training.parts[1:]), training.iterations]
    for view, (part, end) in enumerate(zip(training.parts, ends, strict=True), 1):
        wires = wires_of(part.fabric, network)
        times = training.work_of(part.fabric)
        layers = scaled(training.layers, times)
        lost_s = training.detect_s + training.view_s if view > 1 else 0.0
        n = end - part.since
        seconds, iteration_s = _play(state, layers, wires, n)
        if view == len(ends):
            seconds += state.finish(wires)
        compute_s = computed_s(layers)
        found.append(
            ViewTimes(
                view,
                part.since,
                n,
                list(part.failures),
                len(part.fabric.servers),
                wires.algorithms,
                iteration_s,
                compute_s,
                max(0.0, iteration_s - compute_s),
                communication_s(training.layers, wires, training.overlap),
                lost_s,
                lost_s + seconds,
            )
        )
    return found


def communication_s(layers: Sequence[Layer], wires: Wires, overlap: Overlap) -> float:
    """Seconds that the wires take for all gradients, one step after the other."""
    found = 0.0
    for nbytes in (layer.nbytes for layer in layers if layer.nbytes):
        n_steps, each_nbytes = in_steps(nbytes, wires, overlap)
        found += n_steps * wires.seconds(each_nbytes)
    return found


def _play(state: Iterations, layers: Sequence[Layer], wires: Wires, n: int) -> tuple[float, float]:
    """Seconds of `n` iterations, and of one in the long run. States that come again are played once."""
    took: list[float] = []
    seen: dict[tuple[int, ...], int] = {}
    for played in range(min(n, _MOST_PLAYED)):
        took.append(state.iterate(layers, wires))
        grain = _GRAIN * took[0] or 1.0
        before = seen.setdefault(tuple(round(each / grain) for each in state.state()), played)
        if before < played:
            cycle = took[before + 1 :]
            break
    else:
        cycle = took[len(took) // 2 :]
    cycles, more = divmod(n - len(took), len(cycle))
    seconds = sum(took) + cycles * sum(cycle)
    for _ in range(more):
        seconds += state.iterate(layers, wires)
    return seconds, sum(cycle) / len(cycle)
