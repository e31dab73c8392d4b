"""How much shorter an iteration is when what the next forward pass needs first is sent first.

    python benchmarks/priority.py --model vgg19        # needs root: it emulates the fabric
    python benchmarks/priority.py --model resnet50

The gradients have the sizes of the layers of a network, all scaled alike. Computation is sleeping, in the
proportions of the network's operations, so that two cores suffice for all servers; backward takes twice as
long as forward. All computation takes `--compute` times as long as all gradients take on the wires. Measured
in turn are three ways to train:

    fifo        steps in order of begin, all waited for before the next iteration
    late        steps in order of begin, each waited for before its layer's next forward pass
    priority    the same, and what is needed sooner is sent sooner

`modelled` says what each would take on wires that are always as fast as they were alone.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import click
from networks import NETWORKS, Layer, alone

import bml
from bml import fabric as emulated

WARM_UP = 2
WAYS = ("fifo", "late", "priority")


class Plan(NamedTuple):
    """Elements of each layer's gradient, and the seconds of its forward pass; backward takes two times it."""

    sizes: tuple[int, ...]
    forward_s: tuple[float, ...]


def plan(layers: Sequence[Layer], nbytes: int, compute_s: float) -> Plan:
    """Scale a network: all gradients have `nbytes` as float32, an iteration computes for `compute_s`."""
    elements = sum(layer.n_parameters for layer in layers)
    work = sum(layer.work for layer in layers)
    return Plan(
        tuple(max(1, round(layer.n_parameters * nbytes / 4 / elements)) for layer in layers),
        tuple(layer.work * compute_s / 3 / work for layer in layers),
    )


def modelled(plan: Plan, way: str, wires_s: float, step_s: float, piece_nbytes: int, n: int = 8) -> float:
    """Seconds of an iteration in the long run, of `n` that are played.

    All gradients take `wires_s` on the wires, and every step, or piece, `step_s` more. The wires take one
    piece after the other. Which is next is known since the piece before it began.
    """
    total, ends_s = sum(plan.sizes), list[float]()
    now = wires_now = known_s = 0.0
    left: list[list[Any]] = []  # [layer, begun at, pieces left, seconds a piece], in order of begin
    done_s = dict.fromkeys(range(len(plan.sizes)), 0.0)

    def send_one(until_s: float) -> bool:
        """Send a piece that can begin by then."""
        nonlocal wires_now, known_s
        begun = [each for each in left if each[1] <= max(wires_now, until_s)]
        if not begun:
            return False
        start_s = max(wires_now, begun[0][1])
        if start_s > until_s:
            return False
        known = [each for each in begun if each[1] <= known_s] if way == "priority" else []
        chosen = min(known, key=lambda each: each[0]) if known else begun[0]
        known_s, wires_now = start_s, start_s + chosen[3]
        chosen[2] -= 1
        if not chosen[2]:
            left.remove(chosen)
            done_s[chosen[0]] = wires_now
        return True

    for _ in range(n):
        for layer, forward_s in enumerate(plan.forward_s):
            waits = range(len(plan.sizes)) if way == "fifo" and layer == 0 else [layer]
            while any(each[0] in waits for each in left):
                send_one(float("inf"))
            now = max(now, *(done_s[each] for each in waits)) + forward_s
        for layer in range(len(plan.sizes) - 1, -1, -1):
            now += 2 * plan.forward_s[layer]
            while send_one(now):
                pass
            n_pieces = 1 if way == "fifo" else max(1, round(4 * plan.sizes[layer] / piece_nbytes))
            piece_s = wires_s * plan.sizes[layer] / total / n_pieces + step_s
            left.append([layer, now, n_pieces, piece_s])
        ends_s.append(now)
    return statistics.median(b - a for a, b in pairwise(ends_s[1:]))


def training(name: str, nbytes: int, compute: float, turns: int, steps: int) -> Any:
    """A training function that returns the times of iterations, by way, and what the model needs."""

    def train(session: bml.Session) -> dict[str, Any]:
        layers = NETWORKS[name]()
        wires_s, step_s = alone(session, nbytes // 4), alone(session, 1)
        planned = plan(layers, nbytes, compute * wires_s)
        found: dict[str, Any] = {way: [] for way in WAYS}
        for _ in range(turns):
            for way in WAYS:
                found[way] += iterate(session, planned, way, steps)
        piece_nbytes = session._communicator.piece_nbytes
        ideal = {way: modelled(planned, way, wires_s, step_s, piece_nbytes) for way in WAYS}
        return {**found, "wires": wires_s, "small": step_s, "piece": piece_nbytes, "modelled": ideal}

    return train


def iterate(session: bml.Session, planned: Plan, way: str, steps: int) -> list[float]:
    """Seconds of iterations, each from one end of backward to the next."""
    grads = [session.empty(size) for size in planned.sizes]
    for grad in grads:
        grad[:] = 1
    handles: list[Any] = [None] * len(grads)
    ends_s = []
    for _ in session.steps(WARM_UP + steps):
        for layer, forward_s in enumerate(planned.forward_s):
            if handles[layer] is not None:
                handles[layer].wait()
            time.sleep(forward_s)
        for layer in range(len(grads) - 1, -1, -1):
            time.sleep(2 * planned.forward_s[layer])
            urgency = {"fifo": None, "late": 0, "priority": layer}[way]
            handles[layer] = session.allreduce_async(grads[layer], priority=urgency)
        if way == "fifo":
            for handle in handles:
                handle.wait()
        ends_s.append(time.perf_counter())
    return [b - a for a, b in pairwise(ends_s)][WARM_UP:]


@click.command()
@click.option("--model", type=click.Choice(sorted(NETWORKS)), default="vgg19", show_default=True)
@click.option("--fabric", "shape", default="bcube:2x2", show_default=True)
@click.option("--rate", default="200mbit", show_default=True, help="Of every NIC.")
@click.option("--mib", default=32.0, show_default=True, help="Of all gradients.")
@click.option("--compute", default=1.0, show_default=True, help="Computation over communication.")
@click.option("--turns", default=3, show_default=True)
@click.option("--steps", default=6, show_default=True, help="In a turn.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(
    model: str, shape: str, rate: str, mib: float, compute: float, turns: int, steps: int, as_json: bool
) -> None:
    """Measure iterations whose gradients are sent in order of begin, and in order of need."""
    network = emulated.up(shape, rate, name="priority")
    try:
        train = training(model, int(mib * 2**20), compute, turns, steps)
        result = bml.launch(train, shape, launcher="processes", prints=False, emulated=network.name)
    finally:
        network.down()
    values = list(result.values.values())
    wires_s = statistics.median(each["wires"] for each in values)
    row: dict[str, Any] = {"model": model, "wires_s": wires_s, "least_s": max(1.0, compute) * wires_s}
    row |= {"small_s": values[0]["small"], "piece_nbytes": values[0]["piece"]}
    for way in WAYS:
        row[way] = statistics.median(t for each in values for t in each[way])
        row[f"{way}_modelled"] = values[0]["modelled"][way]
    if as_json:
        click.echo(json.dumps(row))
        return
    click.echo(f"{model}: {wires_s * 1000:.0f} ms on the wires, pieces of {row['piece_nbytes'] >> 10} KiB")
    for way in WAYS:
        click.echo(
            f"{way:10} {row[way] * 1000:6.0f} ms, {row[way] / row['least_s']:.2f} of the least time; "
            f"modelled {row[f'{way}_modelled'] * 1000:.0f} ms"
        )
    click.echo(f"priority takes {1 - row['priority'] / row['fifo']:.0%} less than fifo")


if __name__ == "__main__":
    main()
