"""What a model of networks predicts for trainings on the emulated fabric; no such training is in it. Pure."""

from __future__ import annotations

from bml.lab.bench.training.asked import Comparison, Contender
from bml.lab.flows.training.job import train
from bml.lab.flows.training.training import Part, Training, ViewTimes
from bml.lab.flows.training.wires import Network
from bml.schedule.select.model import Constants


def healthy(comparison: Comparison, contender: Contender, constants: Constants) -> ViewTimes:
    """Predict a run without failures. `constants` are those of servers on the emulated fabric.

    Raises:
        FabricError: the algorithm cannot work on the fabric.
        UsageError: it is too large to be planned or simulated.
    """
    parts = [Part(0, contender.fabric)]
    training = Training(comparison.layers, comparison.run_iterations, parts, comparison.overlap)
    return train(training, _network(contender, constants))[0]


def failing(comparison: Comparison, constants: Constants) -> list[ViewTimes]:
    """Predict the run with failures: what is before the first one, and after each.

    With t seconds of computation n servers of which f died take t·n/(n-f), and what the wires then take.

    Raises:
        FabricError: the survivors cannot all reach one another.
    """
    return train(comparison.failing(), _network(comparison.own, constants))


def _network(contender: Contender, constants: Constants) -> Network:
    """Return the wires of the model: a hop takes the start-up time, a NIC has the goodput of its rate."""
    return Network(contender.algorithm, 1 / constants.beta_s, constants.alpha_s, None, constants)
