"""How much of communication `bml.torch.attach` hides behind backward.

    python benchmarks/hidden.py --fabric bcube:2x2 --rate 100mbit --size 16MiB      # needs root
    python benchmarks/hidden.py --fabric bcube:2x1 --transport tcp --size 16MiB

On every server a model is trained whose forward and backward together take about as long as the sum of its
gradients over all servers (`--compute` times as long). Measured in turn are forward, backward, the sum of all
gradients in one step, and training steps. Without communication in the next forward pass, none can be
shorter than

    forward + max(backward, backward until the first bucket is full + communication)
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

import bml
import bml.torch
from bml import fabric as emulated
from bml.lab.commands.quantities import parse_bytes
from bml.torch.attached.layout import FIRST_NBYTES

WIDTH, WARM_UP = 512, 2
MOST_SAMPLES = 1 << 14
Times = dict[str, list[float]]


class Alone:
    """Forward and backward without sums: their times, and when the first bucket was full."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._left = self._first_s = 0.0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._made)

    def run(self, x: torch.Tensor) -> tuple[float, float, float]:
        """(forward, backward, backward until the first bucket is full), in seconds."""
        self._left = FIRST_NBYTES
        self._model.zero_grad()
        began_s = time.perf_counter()
        loss = self._model(x).square().sum()
        forward_s = time.perf_counter()
        loss.backward()
        return forward_s - began_s, time.perf_counter() - forward_s, self._first_s - forward_s

    def _made(self, parameter: torch.Tensor) -> None:
        if self._left > 0:
            self._left -= parameter.nbytes
            self._first_s = time.perf_counter()


def training(nbytes: int, compute: float, turns: int, steps: int, bucket_mib: float | None) -> Any:
    """A training function that returns the times of everything."""

    def train(session: bml.Session) -> Times:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        n_layers = max(2, nbytes // (4 * WIDTH * WIDTH))
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n_layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sizes = {} if bucket_mib is None else {"bucket_mib": bucket_mib}
        run = bml.torch.attach(
            session, model, optimizer, loss=lambda model, x: model(x).square().sum(), **sizes
        )
        alone, vector = Alone(model), session.empty(n_layers * WIDTH * WIDTH)
        vector[:] = 1
        found: Times = {name: [] for name in ("forward", "backward", "first", "communication", "step")}

        def communicate(session: bml.Session) -> float:
            session.barrier()
            began_s = time.perf_counter()
            session.allreduce(vector, shared=True)
            return time.perf_counter() - began_s

        def compute_alone(x: torch.Tensor) -> tuple[float, ...]:
            session.barrier()
            return alone.run(x)

        n_samples = samples_for(session, compute, communicate, compute_alone)
        x = torch.rand(n_samples, WIDTH)
        for _ in range(turns):
            for _ in range(steps):
                for name, took_s in zip(("forward", "backward", "first"), compute_alone(x), strict=True):
                    found[name].append(took_s)
            for _ in range(steps):
                found["communication"].append(communicate(session))
            found["step"] += train_steps(session, model, run, x, steps)
        return {**found, "samples": [n_samples]}

    return train


def samples_for(
    session: bml.Session,
    compute: float,
    communicate: Callable[[bml.Session], float],
    compute_alone: Callable[[torch.Tensor], tuple[float, ...]],
) -> int:
    """How many samples make computation `compute` times as long as communication; all servers agree."""
    wanted_s = compute * statistics.median(communicate(session) for _ in range(3))
    n_samples = 64
    for _ in range(3):
        x = torch.rand(n_samples, WIDTH)
        took_s = statistics.median(sum(compute_alone(x)[:2]) for _ in range(3))
        mine = min(max(1, round(n_samples * wanted_s / took_s)), MOST_SAMPLES)
        n_samples = int(session.allreduce(torch.tensor([mine]).numpy(), "max")[0])
    return n_samples


def train_steps(session: bml.Session, model: Any, run: Any, x: torch.Tensor, steps: int) -> list[float]:
    """Seconds of training steps one after the other, each from means to means."""
    n_servers = len(session.contributors)
    session.barrier()
    ends_s = [time.perf_counter()]
    for _ in run.batches(torch.zeros(n_servers, 1), global_batch=n_servers, epochs=WARM_UP + steps):
        model(x).square().sum().backward()
        run.reduce()
        ends_s.append(time.perf_counter())
    return [end_s - began_s for began_s, end_s in pairwise(ends_s)][WARM_UP:]


def summary(values: dict[int, Times]) -> dict[str, float]:
    """Medians over all servers in seconds, the least time of a step, and steps over it."""
    row = {name: statistics.median(t for each in values.values() for t in each[name]) for name in values[0]}
    least_s = row["forward"] + max(row["backward"], row["first"] + row["communication"])
    apart_s = row["forward"] + row["backward"] + row["communication"]
    return {**row, "least": least_s, "over_least": row["step"] / least_s, "apart": apart_s}


@click.command()
@click.option("--fabric", "shape", default="bcube:2x2", show_default=True)
@click.option("--rate", help="Emulate the fabric, at this rate of every NIC.")
@click.option("--transport", default="auto", show_default=True)
@click.option("--size", default="16MiB", show_default=True, help="Of all gradients.")
@click.option("--compute", default=1.0, show_default=True, help="Computation over communication.")
@click.option("--bucket-mib", type=float, help="As of attach.")
@click.option("--turns", default=3, show_default=True)
@click.option("--steps", default=4, show_default=True, help="In a turn.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(
    shape: str,
    rate: str | None,
    transport: str,
    size: str,
    compute: float,
    bucket_mib: float | None,
    turns: int,
    steps: int,
    as_json: bool,
) -> None:
    """Measure steps whose communication goes on beside backward."""
    with ExitStack() as stack:
        settings: dict[str, Any] = {"transport": transport}
        if rate is not None:
            network = emulated.up(shape, rate, name="hidden")
            stack.callback(network.down)
            settings["emulated"] = network.name
        train = training(parse_bytes(size), compute, turns, steps, bucket_mib)
        result = bml.launch(train, shape, launcher="processes", prints=False, **settings)
    row = summary(result.values)
    if as_json:
        click.echo(json.dumps({"fabric": shape, "rate": rate, "size": size, **row}))
        return
    for name in ("forward", "backward", "first", "communication", "apart", "least", "step"):
        click.echo(f"{name:14} {row[name] * 1000:8.1f} ms")
    click.echo(f"a step takes {row['over_least']:.3f} of the least time; {row['samples']:.0f} samples")


if __name__ == "__main__":
    main()
