"""Early warnings of NICs that degrade and then fail, and of NICs that do not.

    python benchmarks/early_warnings.py                        # needs root: the fabric is emulated
    python benchmarks/early_warnings.py --number 0 --quiet 10

One job on an emulated fabric. Again and again a NIC gets worse, by loss that grows or a rate that falls, then
its cable is cut, and healed. Counted is how many seconds before the cut there was a warning of that NIC. Then
nothing is done for some minutes, beside computation: every warning in that time is a false one.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import bml
from bml import fabric as emulated
from bml.fabric import Damage, EmulatedFabric
from bml.lab.commands.quantities import parse_bytes

EARLY_S = 2.0
STAGE_S = 2.0
STAGES: dict[str, tuple[float, ...]] = {
    "loss": (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.15),
    "rate": (0.8, 0.6, 0.45, 0.35, 0.25, 0.2, 0.2, 0.2),
}
"""The share of packets that is lost, or of the rate that is left, for STAGE_S each."""
HEALED_S = 30.0
CUT_S = 1.5
Row = dict[str, Any]


def training(n_elements: int, stop: Path) -> Any:
    """Steps beside which the training thread computes, until `stop` is there."""

    def train(session: bml.Session) -> None:
        x, a = session.empty(n_elements), np.ones((120, 120), "f4")
        while True:
            x[:-1], x[-1] = 1, stop.exists()
            pending = session.allreduce_async(x)
            until_s = time.monotonic() + 0.1
            while time.monotonic() < until_s:
                a @ a
                time.sleep(0.02)
            if pending.wait()[-1]:
                return

    return train


def damage(kind: str, nic: str, value: float, rate_bit: int) -> Damage:
    if kind == "loss":
        return Damage.parse(f"loss:{nic},share={value:.1%}")
    return Damage.parse(f"slow:{nic},rate={int(rate_bit * value) // 1000}kbit")


def warned_at_s(job: bml.Job, nic: tuple[int, int], since_s: float) -> float | None:
    """When there was a warning of a NIC that is newer than `since_s`."""
    for each in job.status()["warnings"]:
        at_s = time.monotonic() - each["for_s"]
        if (each["server"], each["level"]) == nic and at_s >= since_s:
            return at_s
    return None


def degrade(job: bml.Job, network: EmulatedFabric, kind: str, nic: tuple[int, int]) -> Row:
    """Let a NIC get worse until its cable is cut; say how early there was a warning of it."""
    name, began_s, found = f"{nic[0]}/{nic[1]}", time.monotonic(), None
    for value in STAGES[kind]:
        network.damage(damage(kind, name, value, network.condition.rate_bit))
        until_s = time.monotonic() + STAGE_S
        while time.monotonic() < until_s:
            found = found or warned_at_s(job, nic, began_s)
            time.sleep(0.3)
    failed_s = time.monotonic()
    network.damage(Damage.parse(f"cut:{name}"))
    time.sleep(CUT_S)
    network.heal_all()
    until_s = time.monotonic() + HEALED_S
    while (job.status()["failures"] or job.status()["slow"]) and time.monotonic() < until_s:
        time.sleep(0.3)
    time.sleep(6.0)  # so that it is known what is usual
    return {"kind": kind, "nic": name, "early_s": None if found is None else failed_s - found}


def quiet(job: bml.Job, minutes: float) -> list[Row]:
    """The warnings that begin while nothing is done."""
    began_s, found = time.monotonic(), dict[tuple[str, str], Row]()
    while time.monotonic() < began_s + 60 * minutes:
        for each in job.status()["warnings"]:
            if time.monotonic() - each["for_s"] >= began_s:
                found.setdefault((each["part"], each["kind"]), each)
        time.sleep(1.0)
    return list(found.values())


@click.command()
@click.option("--fabric", "shape", default="bcube:3x2", show_default=True)
@click.option("--rate", default="20mbit", show_default=True)
@click.option("--size", default="1MiB", show_default=True)
@click.option("--number", default=50, show_default=True, help="Of degradations.")
@click.option("--quiet", "minutes", default=0.0, show_default=True, help="Minutes without any.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(shape: str, rate: str, size: str, number: int, minutes: float, as_json: bool) -> None:
    """Count early and false warnings."""
    network = emulated.up(shape, rate, name="warn")
    rows, false = list[Row](), list[Row]()
    links = sorted(network.fabric.links)
    try:
        with tempfile.TemporaryDirectory() as folder:
            stop = Path(folder) / "stop"
            train = training(parse_bytes(size) // 4, stop)
            where = {"emulated": network.name, "launcher": "processes", "prints": False}
            with bml.start(train, network.fabric.name, **where) as job:
                time.sleep(8.0)
                for turn in range(number):
                    nic = links[turn * 5 % len(links)]
                    rows.append(degrade(job, network, list(STAGES)[turn % len(STAGES)], nic))
                    click.echo(json.dumps(rows[-1]), err=True)
                false = quiet(job, minutes)
                stop.touch()
                job.wait()
    finally:
        network.down()
    early = sum(row["early_s"] is not None and row["early_s"] >= EARLY_S for row in rows)
    if as_json:
        click.echo(json.dumps({"rows": rows, "early": early, "minutes": minutes, "false": false}))
        return
    table = Table("NIC", "degrades by", "warned before the cut")
    for row in rows:
        said = "no" if row["early_s"] is None else f"{row['early_s']:.1f} s"
        table.add_row(row["nic"], row["kind"], said)
    console = Console()
    console.print(table)
    console.print(
        f"{early} of {number} at least {EARLY_S:g} s before; in {minutes:g} quiet minutes: {len(false)}"
    )
    for each in false:
        console.print(f"  {each['part']}: {each['text']}")


if __name__ == "__main__":
    main()
