"""How exact `bml sim` is: steps on the emulated fabric beside simulated ones.

    python benchmarks/simulated.py    # needs root: the fabric is emulated

One job for each size and damage: some steps on the healthy fabric, the damage, and steps until the view that
plans with it has had enough of them. Measured is the median of these, on all servers, and simulated is the
plan for that view on links of the same rates.
"""

from __future__ import annotations

import json
import os
import time
from statistics import median
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

import bml
from bml import fabric as emulated
from bml.cluster.spec.constants import load_constants
from bml.fabric import GOODPUT, EmulatedFabric
from bml.lab.commands.quantities import parse_bytes
from bml.lab.commands.sim.answer import answer
from bml.lab.commands.sim.asked import Asked
from bml.lab.commands.sim.options import damaged

CORES = os.cpu_count() or 1
Row = dict[str, Any]


class Case(NamedTuple):
    """What is broken: as a fault of a job, and as options of `bml sim`."""

    fault: str = ""
    failures: tuple[str, ...] = ()
    link_rates: tuple[str, ...] = ()


#: Jobs plan with the power of two below the rate of a slow NIC: this one has a tenth more than that.
CASES = {
    "healthy": Case(),
    "server": Case("kill:4@step=3", ("server:4",)),
    "link": Case("cut:4/0@step=3", ("link:4/0",)),
    "switch": Case("switch:0/1@step=3", ("switch:0/1",)),
    "slow NIC": Case("slow:4/0@step=3,rate={slow}", (), ("4/0=1/8",)),
}


class Step(NamedTuple):
    """A step of one server: the view in force at its end, and seconds on the wall and of the processor."""

    epoch: int
    wall_s: float
    processor_s: float


def training(n_elements: int, n_steps: int, wanted: int) -> Any:
    """Sums until the last of `wanted` views has had `n_steps` steps; returns all steps."""

    def train(session: bml.Session) -> list[Step]:
        x, done = session.empty(n_elements), list[Step]()
        for _ in session.steps(100 * n_steps):
            x[:] = 1
            wall_s, processor_s = time.perf_counter(), time.process_time()
            total = session.allreduce(x)
            assert total[0] == total[-1] == len(session.contributors)
            took = time.perf_counter() - wall_s, time.process_time() - processor_s
            done.append(Step(session.view.epoch, *took))
            if len({each.epoch for each in done}) >= wanted and len(_last(done)) > n_steps:
                return done
        return done

    return train


def _last(steps: list[Step]) -> list[Step]:
    """The steps in the last view, without the first of them."""
    return [each for each in steps if each.epoch == steps[-1].epoch][1:]


def measure(network: EmulatedFabric, name: str, nbytes: int, n_steps: int) -> Row:
    """One job; times in seconds, and the share of the machine's processors that its servers took."""
    case = CASES[name]
    slow = f"{network.condition.rate_bit * 11 // 80_000}kbit"
    faults = [case.fault.format(slow=slow)] if case.fault else []
    result = bml.launch(
        training(nbytes // 4, n_steps, 1 + len(faults)),
        network.fabric.name,
        launcher="processes",
        emulated=network.name,
        faults=faults,
        prints=False,
    )
    servers = [_last(steps) for steps in result.values.values()]
    wall_s = median(each.wall_s for steps in servers for each in steps)
    processor_s = sum(median(each.processor_s for each in steps) for steps in servers)
    simulated_s = simulate(network, case, nbytes)
    return {
        "case": name,
        "nbytes": nbytes,
        "planned": result.report["views"][-1]["slow"] or result.report["views"][-1]["failures"],
        "steps": min(map(len, servers)),
        "measured_s": wall_s,
        "simulated_s": simulated_s,
        "difference": simulated_s / wall_s - 1,
        "processor_share": processor_s / wall_s / CORES,
    }


def simulate(network: EmulatedFabric, case: Case, nbytes: int) -> float:
    """The seconds of the same step by `bml sim`."""
    constants, _ = load_constants(None)
    asked = Asked(
        fabric=damaged(network.fabric.name, case.link_rates, case.failures),
        failures=case.failures,
        algorithm="auto",
        nbytes=nbytes,
        rate_bit=network.condition.rate_bit,
        goodput=GOODPUT,
        delay_s=constants.alpha_s,
        slice_nbytes=None,
        seeds=1,
        constants=constants,
    )
    return answer(asked)[0].gst_s


@click.command()
@click.option("--fabric", "shape", default="bcube:3x2", show_default=True)
@click.option("--rate", default="100mbit", show_default=True)
@click.option("--size", "sizes", multiple=True, default=("16MiB", "64MiB"), show_default=True)
@click.option("--case", "cases", multiple=True, type=click.Choice(tuple(CASES)), help="[default: all]")
@click.option("--steps", default=7, show_default=True, help="That are measured in the last view.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(
    shape: str, rate: str, sizes: tuple[str, ...], cases: tuple[str, ...], steps: int, as_json: bool
) -> None:
    """Compare steps on the emulated fabric with simulated ones."""
    rows = []
    for case in cases or CASES:
        for size in sizes:
            network = emulated.up(shape, rate, name="simulated")
            try:
                rows.append(measure(network, case, parse_bytes(size), steps))
            finally:
                network.down()
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = Table("case", "size", "planned", "steps", "measured", "simulated", "difference", "processors")
    for row in rows:
        times = [f"{row[name] * 1000:.0f} ms" for name in ("measured_s", "simulated_s")]
        size, planned = f"{row['nbytes'] >> 20} MiB", str(row["planned"] or "")
        shares = f"{row['difference']:+.1%}", f"{row['processor_share']:.0%}"
        table.add_row(row["case"], size, planned, str(row["steps"]), *times, *shares)
    Console().print(table)


if __name__ == "__main__":
    main()
