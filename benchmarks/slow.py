"""Steps before a NIC gets slow, until that is noticed, with trees round it, and after it has healed.

    python benchmarks/slow.py --case nic --case switch    # needs root: the fabric is emulated

One job a case, on an emulated fabric: steps on the healthy fabric; the damage, which nobody tells the job of;
steps until trees have gone round it for a while; healing, and steps until the trees are the first ones again.
Beside them is the optimum, which no schedule of trees can beat on links of those rates.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import competing
from rich.console import Console
from rich.table import Table

import bml
from bml import fabric as emulated
from bml.fabric import GOODPUT, Damage, EmulatedFabric
from bml.lab.commands.quantities import parse_bytes
from bml.schedule import bound
from bml.topology import Link

FABRIC = "bcube:3x2"
DEADLINE_S = 60.0
FLAP_S = 4.0
_JOB = "slow.py"
_LOOK_S = 0.02
Row = dict[str, Any]
Clock = list[tuple[str, float]]


@dataclass(frozen=True)
class Case:
    """A damage that lasts while `strike` is open, and the `shares` of their rates that NICs have left."""

    strike: Callable[[EmulatedFabric], Any]
    shares: Mapping[Link, float]


@contextmanager
def damages(network: EmulatedFabric, *texts: str) -> Iterator[None]:
    """Damage of cables by the kernel."""
    for text in texts:
        network.damage(Damage.parse(text))
    try:
        yield
    finally:
        network.heal_all()


@contextmanager
def flapping(network: EmulatedFabric, text: str) -> Iterator[None]:
    """A damage that comes and goes, each for FLAP_S seconds."""
    over, damage = threading.Event(), Damage.parse(text)

    def toggle() -> None:
        while not over.is_set():
            network.apply(damage, _JOB)
            over.wait(FLAP_S)
            network.undo(damage, _JOB)
            over.wait(FLAP_S)

    thread = threading.Thread(target=toggle, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def slow(*nics: Link, share: float = 0.1, way: str = "") -> Case:
    """NICs with a share of their rate."""

    def strike(network: EmulatedFabric) -> Any:
        bits = int(network.condition.rate_bit * share)
        return damages(network, *(f"slow:{a}/{b},rate={bits // 1000}kbit{way}" for a, b in nics))

    return Case(strike, dict.fromkeys(nics, share))


CASES: Mapping[str, Case] = {
    "nic": slow((4, 0)),
    "switch": slow((3, 0), (4, 0), (5, 0)),
    "two": slow((4, 0), (2, 1)),
    "out": slow((4, 0), way=",direction=out"),
    "in": slow((4, 0), way=",direction=in"),
    "loss": Case(lambda network: damages(network, "loss:4/0,share=2%"), {}),
    # Its flows, one each way to either neighbour, take half of the NIC and a quarter of the neighbours'.
    "competing": Case(
        lambda network: competing.flows(network, (4, 0)), {(4, 0): 0.5, (3, 0): 0.75, (5, 0): 0.75}
    ),
    "flapping": Case(lambda network: flapping(network, slow_text(network)), {(4, 0): 0.1}),
}


def slow_text(network: EmulatedFabric) -> str:
    """NIC 4/0 at a tenth of its rate."""
    return f"slow:4/0,rate={network.condition.rate_bit // 10_000}kbit"


def training(n_elements: int, stop: Path) -> Any:
    """Every server sums until `stop` is there, and compares every sum with the right one."""

    def train(session: bml.Session) -> int:
        x = session.empty(n_elements)
        step = 0
        while True:
            step += 1
            x[:-1] = step % 7 + session.server
            x[-1] = stop.exists()
            total = session.allreduce(x)
            there = session.contributors
            assert (total[:-1] == len(there) * (step % 7) + sum(there)).all()
            if total[-1]:
                return step

    return train


def measure(network: EmulatedFabric, case: Case, nbytes: int, n_steps: int, lasts_s: float) -> Row:
    """Run one job through a case; see `row`. Raises the error of the job, and AssertionError if it hangs."""
    clock: Clock = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as at_end:
        stop = Path(folder) / "stop"
        train, where = training(nbytes // 4, stop), {"emulated": network.name, "launcher": "processes"}
        job = at_end.enter_context(bml.start(train, network.fabric.name, prints=False, **where))
        at_end.callback(stop.touch)

        def until(done: Callable[[Mapping[str, Any]], bool]) -> None:
            deadline_s = time.monotonic() + DEADLINE_S
            while not done(job.status()) and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)

        until(lambda now: now["step"] >= n_steps)
        with case.strike(network):
            clock.append(("struck", time.monotonic()))
            time.sleep(lasts_s)
            begun = job.status()["step"]
            until(lambda now: now["step"] >= begun + 2)
            clock.append(("healing", time.monotonic()))
        until(lambda now: not now["slow"])
        begun = job.status()["step"]
        until(lambda now: now["step"] >= begun + n_steps)
        stop.touch()
        result = job.wait()
    return row(network, case, nbytes, dict(clock), result)


def row(network: EmulatedFabric, case: Case, nbytes: int, at_s: Mapping[str, float], result: Any) -> Row:
    """Times of steps in seconds, beside the optimum for the rates then, and what the views said.

    `slow_s` are the steps until the first view with other rates was in force, that which was under way
    included; `planned_s` is the median of the later ones until it healed.
    """
    commits = [metrics["commit_at_s"] for metrics in result.report["metrics"].values()]
    ends = [max(each) for each in zip(*commits, strict=True)]
    steps = list(enumerate(pairwise(ends), 2))  # (number, (begin, end)), from the second step on
    views = result.report["views"]
    slowed = [view["commit"] for view in views if view["slow"]]
    planned_from = slowed[0] + 1 if slowed else len(ends) + 1
    struck_s, healing_s = at_s["struck"], at_s["healing"]
    bad = [(number, b - a) for number, (a, b) in steps if b > struck_s and b <= healing_s]
    whole_from = views[-1]["commit"] + 2 if not views[-1]["slow"] else len(ends) + 1
    healthy = [b - a for _, (a, b) in steps if b <= struck_s]
    healed = [b - a for number, (a, b) in steps if a > healing_s and number >= whole_from]
    late = [took_s for number, took_s in bad if number > planned_from]
    return {
        "healthy_s": statistics.median(healthy),
        "optimum_healthy_s": optimum_s(network, {}, nbytes),
        "slow_s": [took_s for number, took_s in bad if number <= planned_from],
        "planned_s": statistics.median(late) if late else None,
        "optimum_s": optimum_s(network, case.shares, nbytes),
        "healed_s": statistics.median(healed) if healed else None,
        "steps": len(ends),
        "views": len(views),
        "slow": [view["slow"] for view in views],
        "reasons": [view["reason"] for view in views[1:]],
    }


def optimum_s(network: EmulatedFabric, shares: Mapping[Link, float], nbytes: int) -> float:
    """The least time of a step on NICs that have these shares of their rate, by the bound of all trees."""
    goodput = network.condition.rate_bit / 8 * GOODPUT
    fabric = network.fabric.with_rates({nic: str(share) for nic, share in shares.items()})
    return float(bound(fabric)) * nbytes / goodput


@click.command()
@click.option("--rate", default="200mbit", show_default=True)
@click.option("--size", default="16MiB", show_default=True)
@click.option("--case", "names", multiple=True, type=click.Choice([*CASES]), help="Default: all of them.")
@click.option("--steps", default=6, show_default=True, help="Before, and after.")
@click.option("--lasts", "lasts_s", default=16.0, show_default=True, help="How long it lasts, in seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(rate: str, size: str, names: tuple[str, ...], steps: int, lasts_s: float, as_json: bool) -> None:
    """Measure steps while parts are slow."""
    network, rows = emulated.up(FABRIC, rate, name="slow", maker=os.getpid()), {}
    try:
        for name in names or CASES:
            rows[name] = measure(network, CASES[name], parse_bytes(size), steps, lasts_s)
    finally:
        network.down()
    if as_json:
        click.echo(json.dumps({"fabric": FABRIC, "rate": rate, "size": size, "cases": rows}))
        return
    show(rows)


def show(rows: Mapping[str, Row]) -> None:
    """Print a table, in milliseconds, and what the views said."""
    table = Table(
        "case", "healthy", "optimum", "slow steps", "planned", "optimum", "ratio", "healed", "views"
    )
    for name, each in rows.items():
        planned_s, optimum = each["planned_s"], each["optimum_s"]
        times = [_ms(each["healthy_s"]), _ms(each["optimum_healthy_s"]), ", ".join(map(_ms, each["slow_s"]))]
        ratio = f"{planned_s / optimum:.2f}" if planned_s else ""
        times += [_ms(planned_s), _ms(optimum), ratio, _ms(each["healed_s"])]
        table.add_row(name, *times, str(each["views"]))
    Console().print(table)
    for name, each in rows.items():
        for reason in each["reasons"]:
            click.echo(f"{name}: {reason}")


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.0f}"


if __name__ == "__main__":
    main()
