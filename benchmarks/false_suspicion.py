"""Whether healthy parts are taken for dead or slow on a machine that is busy with something else.

    python benchmarks/false_suspicion.py --minutes 10
    python benchmarks/false_suspicion.py --minutes 30 --rate 200mbit --wander 20%    # needs root

Nine servers, as processes, sum a vector in step after step, at the default `detect_s`, while other processes
keep every core busy. With `--rate` their fabric is emulated, and with `--wander` the rate of every cable is
drawn anew every second. No fault is injected: every view but the first is a false suspicion.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import numpy as np

import bml
from bml import fabric as emulated
from bml.fabric import EmulatedFabric, parse_rate
from bml.faults.throughput import Meter, Sample
from bml.lab.commands.quantities import parse_bytes
from bml.topology.errors import UsageError

FABRIC = "bcube:3x2"
WANDER_S = 1.0


def spin() -> None:
    while True:
        pass


def record(file: str, session: bml.Session) -> None:
    """Write what this server measures to a file, so that the judgement can be run again on it."""
    take = Meter.take

    def taken(meter: Meter, now: float) -> list[Sample]:
        samples = take(meter, now)
        if samples:
            row = {"at_s": now, "server": session.server, "epoch": session.view.epoch, "moved": samples}
            with open(file, "a") as out:
                out.write(json.dumps(row) + "\n")
        return samples

    Meter.take = taken  # type: ignore[method-assign]


def training(seconds: float, n_elements: int, file: str) -> Any:
    def train(session: bml.Session) -> int:
        if file:
            record(file, session)
        gradient = session.empty(n_elements)
        gradient[:] = 1.0
        end = time.monotonic() + seconds
        steps = 0
        over = np.zeros(1)
        while not over[0]:
            session.allreduce(gradient)
            steps += 1
            over = session.allreduce(np.array([float(time.monotonic() > end)]))
        return steps

    return train


@contextmanager
def busy_cores() -> Iterator[int]:
    """Keep every core of this process busy; gives their number."""
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in os.sched_getaffinity(0)]
    for each in busy:
        each.start()
    try:
        yield len(busy)
    finally:
        for each in busy:
            each.kill()


@contextmanager
def wandering(network: EmulatedFabric, rate_bit: int, wander: float, seed: int) -> Iterator[None]:
    """Draw the rate of every cable anew every WANDER_S, from `rate_bit` ± the fraction `wander` of it."""
    chance, over = random.Random(seed), threading.Event()

    def draw() -> None:
        while not over.wait(WANDER_S):
            for server, level in network.fabric.links:
                network.slow(server, level, int(rate_bit * chance.uniform(1 - wander, 1 + wander)))

    # Cables are made as fast as the fastest may be, as the rate of one can only be lowered.
    network.shape(int(rate_bit * (1 + wander)))
    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        network.heal_all()


def train_on_fabric(train: Any, rate: str, wander: float, seed: int) -> bml.Result:
    """Run the job on an emulated fabric, whose rates wander if they are to."""
    network = emulated.up(FABRIC, rate, name="noise", maker=os.getpid())
    try:
        with wandering(network, parse_rate(rate), wander, seed):
            return bml.launch(
                train, FABRIC, launcher="processes", transport="tcp", emulated=network.name, prints=False
            )
    finally:
        network.down()


def fraction(text: str) -> float:
    """The fraction that a text such as `20%` says."""
    share = float(text.removesuffix("%")) / 100
    if not 0 <= share < 1:
        raise UsageError(f"rates cannot wander by {text}: give 0% to 99%")
    return share


@click.command()
@click.option("--minutes", default=10.0, show_default=True)
@click.option("--rate", default="", help="Of each NIC, on an emulated fabric, such as 200mbit.")
@click.option("--wander", default="0%", show_default=True, help="By how much the rates of cables wander.")
@click.option("--size", default="1MiB", show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the rates that wander.")
@click.option("--record", "file", default="", help="A file to which servers write what they measure.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(minutes: float, rate: str, wander: str, size: str, seed: int, file: str, as_json: bool) -> None:
    """Count false suspicions."""
    train = training(minutes * 60, parse_bytes(size) // 4, file and os.path.abspath(file))
    with busy_cores() as cores:
        if rate:
            result = train_on_fabric(train, rate, fraction(wander), seed)
        else:
            result = bml.launch(train, FABRIC, launcher="processes", transport="tcp")
    views = result.report["views"]
    said = {
        "minutes": minutes,
        "rate": rate,
        "wander": wander,
        "size": size,
        "cores": cores,
        "busy_processes": cores,
        "steps": result.value,
        "views": len(views),
        "evicted": result.report["dead"],
        "reasons": [view["reason"] for view in views[1:]],
    }
    click.echo(json.dumps(said, indent=None if as_json else 1))


if __name__ == "__main__":
    main()
