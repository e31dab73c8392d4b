"""How much less a training takes with BML on a BCube than with flat algorithms and one NIC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bml.lab.figures.figure import How, Point, ends, figure
from bml.lab.figures.sources import BML, FAULT_TOLERANT
from bml.lab.flows.training.iterations import Overlap
from bml.lab.flows.training.job import train
from bml.lab.flows.training.layers import Layer, assumed_s, spread
from bml.lab.flows.training.networks import NETWORKS
from bml.lab.flows.training.training import Part, Training
from bml.lab.flows.training.wires import Network
from bml.schedule.select.model import DEFAULTS
from bml.topology import parse

MODELS = ("vgg19", "resnet50", "alexnet", "lenet", "mnist-1m")
RATES = (10, 40)
"""Gbit/s of a NIC."""
_BCUBE = ("bcube:3x2", "bml")
_OTHERS = {
    "mesh, one switch": ("switch:9", "mesh"),
    "ring, one switch": ("switch:9", "ring"),
    "mesh, Fat-Tree": ("fattree:4/9", "mesh"),
    "ring, cables in a ring": ("torus:9x1", "ring"),
}
_RANGE = (-18.7, -56.4)
"""Published least and most reductions, in percent."""
_MEASURED = frozenset({"mesh, Fat-Tree", "ring, cables in a ring"})
_MEASURED_MODELS = ("vgg19", "lenet", "mnist-1m")
"""What was measured on the papers' testbed: VGG-19, and a model for MNIST, of which there are two here."""
_ITERATIONS = 1000


@figure(
    "job-completion",
    title="How much less a training takes with BML",
    unit="percent, less time is negative",
    source=f"{BML}; {FAULT_TOLERANT}",
    about="Nine servers, as in the papers' testbed: BML on `bcube:3x2` with two NICs, beside what was "
    "measured there, a mesh (parameter servers on all servers) on a Fat-Tree, `fattree:4/9` with paths by "
    "hash and one NIC, and a ring on cables in a ring, `torus:9x1`; and beside both on one switch that does "
    "not block, with one NIC of the same rate. 1000 iterations as `bml sim train` simulates them: a step "
    "for each layer, 32 samples a server at 10 Tflop/s, 50 µs a hop, gradients sent beside backward, or "
    "*after backward*. Published are −18.7 … −56.4 %, a range over VGG-19 and a model for MNIST; beside its "
    "ends stand those of ours for these models (both of ours for MNIST) and the two fabrics of the testbed. "
    "Which end belongs to which is not known to us.",
    reading="Nothing is fitted, so the ends need not be those of the testbed, whose computation and rate "
    "are assumptions here. Where the wires are the limit, two NICs save half, and more where flows collide "
    "in a Fat-Tree: VGG-19 at 10 Gbit/s has −53.8 % there. Where computation hides the wires, nothing is "
    "saved. LeNet has 0.25 MB of gradients in five steps, so start-ups are its time: BML has four rounds a "
    "step where a mesh has two and a ring sixteen, so it loses against a mesh and wins against a ring. A "
    "job takes the exchange for such sizes. Of a ratio below 0 the signs differ: we have more time where "
    "the range has less.",
)
def job_completion(models: Sequence[str] = MODELS, rates: Sequence[int] = RATES) -> list[Point]:
    """Return reductions for each model and rate (in Gbit/s of a NIC), in percent, and their ends."""
    found = []
    for overlap in (Overlap.backward, Overlap.none):
        for name, other in _OTHERS.items():
            series = name if overlap is Overlap.backward else f"{name}, after backward"
            values = {}
            for model in models:
                shapes = NETWORKS[model]()
                layers = spread(shapes, assumed_s(shapes))
                for rate in rates:
                    times = (_seconds(*each, layers, rate, overlap) for each in (_BCUBE, other))
                    values[f"{model} {rate}G"] = (next(times) / next(times) - 1) * 100
            found += [Point(series, at, value, How.simulation) for at, value in values.items()]
            if name in _MEASURED and (measured := _of_testbed(values)):
                found += ends(series, measured, How.simulation, _RANGE)
    return found


def _of_testbed(values: Mapping[str, float]) -> list[float]:
    """Those of the models that were measured; a key begins with the name of its model."""
    return [value for at, value in values.items() if at.partition(" ")[0] in _MEASURED_MODELS]


def _seconds(fabric: str, algorithm: str, layers: Sequence[Layer], rate: int, overlap: Overlap) -> float:
    """Return the time of the whole training."""
    network = Network(algorithm, rate * 1e9 / 8, DEFAULTS.alpha_s, None, DEFAULTS)
    training = Training(layers, _ITERATIONS, [Part(0, parse(fabric))], overlap)
    return sum(view.seconds for view in train(training, network))
