"""How much shorter an iteration of `bml.torch.attach` is if communication goes on in the next forward pass.

    python benchmarks/late_steps.py --rate 100mbit --size 16MiB            # needs root
    python benchmarks/late_steps.py --rate 100mbit --layers resnet50

On every server a model is trained whose layers have the sizes and times of a known network, scaled to
`--size` bytes of gradients in all, and to computation that takes `--compute` times as long as their sum. The
layers wait instead of computing, so that the cores of one machine suffice for all servers; forward takes a
third of the time. Each iteration is measured from one first layer to the next, without `overlap_forward` and
with it. The bits of both are compared.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import click
import torch
from networks import NETWORKS, alone

import bml
import bml.torch
from bml import fabric as emulated
from bml.lab.commands.quantities import parse_bytes
from bml.torch.overlap.before import Before

WARM_UP = 3


class Waiting(torch.autograd.Function):
    """A layer that waits so many seconds forward, and twice as many backward."""

    @staticmethod
    def forward(context: Any, x: Any, weight: Any, wait_s: float) -> Any:
        """Return the input; the weight is read, as a layer would."""
        context.save_for_backward(weight)
        context.wait_s = wait_s
        time.sleep(wait_s)
        return x + weight[0] * 0

    @staticmethod
    def backward(context: Any, grad: Any) -> Any:
        """Return a gradient of the weight with other values in every batch."""
        (weight,) = context.saved_tensors
        time.sleep(2 * context.wait_s)
        return grad, weight * 0.01 + grad.sum(), None


class Layer(torch.nn.Module):
    """See Waiting."""

    def __init__(self, n_elements: int, part: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, max(1, n_elements)))
        self.part = part
        self.forward_s = 0.0

    def forward(self, x: Any) -> Any:
        """Return the input, later."""
        return Waiting.apply(x, self.weight, self.part * self.forward_s)


def made(network: str, nbytes: int) -> list[Layer]:
    """The layers of a network, scaled to so many bytes."""
    layers = NETWORKS[network]()
    n_all, time_all = sum(n for n, _ in layers), sum(each for _, each in layers)
    return [Layer(round(n * nbytes / 4 / n_all), each / time_all) for n, each in layers]


def training(network: str, nbytes: int, overlaps: bool, computes: float, compute_s: float, steps: int) -> Any:
    """A training function that returns the times of everything, and the digest of the parameters."""

    def train(session: bml.Session) -> dict[str, Any]:
        torch.set_num_threads(1)
        layers = made(network, nbytes)
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        run = bml.torch.attach(
            session, model, optimizer, loss=lambda model, x: model(x).sum(), overlap_forward=overlaps
        )
        communication_s = alone(session, nbytes // 4)
        took_s = compute_s or computes * communication_s
        for layer in layers:
            layer.forward_s = took_s / 3
        copied, begins = timed(Before, "keep"), []
        n_servers = len(session.contributors)
        loop = run.batches(torch.ones(n_servers, 1), global_batch=n_servers, epochs=WARM_UP + steps)
        for (x,) in ((batch.samples,) for batch in loop):
            begins.append(time.perf_counter())
            model(x.view(1, 1)).sum().backward()
            optimizer.step()
        iterations = [end_s - begin_s for begin_s, end_s in pairwise(begins)][WARM_UP:]
        return {
            "iterations": iterations,
            "compute": took_s,
            "communication": communication_s,
            "copy": sum(copied) / len(begins),
            "digest": session.digest(),
        }

    return train


def timed(owner: Any, name: str) -> list[float]:
    """The list to which the seconds of every call of this method are added."""
    method: Callable[..., Any] = getattr(owner, name)
    found: list[float] = []

    def measured(*given: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return method(*given)
        finally:
            found.append(time.perf_counter() - began_s)

    setattr(owner, name, measured)
    return found


def summary(values: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Medians over all servers, in seconds."""
    return {
        "iteration": statistics.median(each_s for value in values.values() for each_s in value["iterations"]),
        **{
            name: statistics.median(value[name] for value in values.values())
            for name in ("compute", "communication", "copy")
        },
        "digests": sorted({value["digest"] for value in values.values()}),
    }


@click.command()
@click.option("--fabric", "shape", default="bcube:2x2", show_default=True)
@click.option("--rate", help="Emulate the fabric, at this rate of every NIC.")
@click.option("--transport", default="auto", show_default=True)
@click.option("--layers", "network", type=click.Choice(list(NETWORKS)), default="vgg19", show_default=True)
@click.option("--size", default="16MiB", show_default=True, help="Of all gradients.")
@click.option("--compute", default=1.0, show_default=True, help="Computation over communication.")
@click.option("--steps", default=10, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(
    shape: str,
    rate: str | None,
    transport: str,
    network: str,
    size: str,
    compute: float,
    steps: int,
    as_json: bool,
) -> None:
    """Measure iterations without `overlap_forward` and with it."""
    rows: dict[bool, dict[str, Any]] = {}
    with ExitStack() as stack:
        settings: dict[str, Any] = {"transport": transport}
        if rate is not None:
            fabric = emulated.up(shape, rate, name="late")
            stack.callback(fabric.down)
            settings["emulated"] = fabric.name
        for overlaps in (False, True):
            compute_s = rows[False]["compute"] if overlaps else 0.0
            train = training(network, parse_bytes(size), overlaps, compute, compute_s, steps)
            result = bml.launch(train, shape, launcher="processes", prints=False, **settings)
            rows[overlaps] = summary(result.values)
    without, with_it = rows[False], rows[True]
    longest_s = max(without["compute"], without["communication"])
    row = {
        "compute": without["compute"],
        "communication": without["communication"],
        "without": without["iteration"],
        "with": with_it["iteration"],
        "copy": with_it["copy"],
        "shorter": 1 - with_it["iteration"] / without["iteration"],
        "over_longest": with_it["iteration"] / longest_s,
        "same_bits": without["digests"] == with_it["digests"],
    }
    if as_json:
        click.echo(json.dumps({"fabric": shape, "rate": rate, "layers": network, "size": size, **row}))
        return
    for name in ("compute", "communication", "without", "with", "copy"):
        click.echo(f"{name:14} {row[name] * 1000:8.1f} ms")
    click.echo(
        f"{row['shorter']:.1%} shorter; {row['over_longest']:.3f} of the longer of the two; "
        f"{'the same' if row['same_bits'] else 'OTHER'} bits"
    )


if __name__ == "__main__":
    main()
