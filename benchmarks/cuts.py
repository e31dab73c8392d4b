"""Cables that are cut while steps are under way: nothing in flight is lost, nothing is counted twice.

    python benchmarks/cuts.py --cuts 200        # needs root: the fabric is emulated, the cables are real

Nine servers in network namespaces sum vectors of integers, other ones in every step, and every server
compares every result with the exact sum. Meanwhile cables are cut at random, so that a NIC loses its carrier,
or made black holes, which only silence shows, and healed, perhaps before any server has noticed.
A fresh job every 20 cuts, as links that failed often are trusted late.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

import bml
from bml import fabric as emulated
from bml.fabric import EmulatedFabric
from bml.protocol.timeouts import detect_s_from
from bml.topology.failure import LinkFailure, parse_failure

FABRIC, RATE, LENGTH = "bcube:3x2", "100mbit", 1 << 16
MOST_CUTS_A_JOB = 20
DEADLINE_S = 20.0
NOTICED_S = 3 * detect_s_from(os.environ)
"""Until servers have noticed damage that lasted a moment only: silence, a retry of TCP, a diagnosis."""


def training(stop: Path, seed: int) -> Any:
    """Every server sums until one has seen `stop`; returns the number of steps, all of them right."""

    def train(session: bml.Session) -> int:
        tables = [np.random.default_rng((seed, each)).integers(-(2**40), 2**40, LENGTH) for each in range(9)]
        table = tables[session.server]
        x = session.empty(LENGTH + 1, "int64")
        step = 0
        while True:
            step += 1
            x[:-1] = table * step + step  # other numbers in every step: one that is late would show
            x[-1] = stop.exists()
            total = session.allreduce(x)
            there = session.contributors
            whole = sum(tables[each] for each in there)
            if not np.array_equal(total[:-1], whole * step + step * len(there)):
                wrong = np.flatnonzero(total[:-1] != whole * step + step * len(there))
                raise AssertionError(f"step {step}: {len(wrong)} elements are wrong, the first {wrong[:5]}")
            if total[-1]:
                return step

    return train


class Cutter:
    """Breaks and heals cables such that no server is ever cut off."""

    def __init__(self, network: EmulatedFabric, job: bml.Job, chance: random.Random):
        self._network, self._job, self._chance = network, job, chance
        self._broken: dict[tuple[int, int], float] = {}
        self._healed: dict[tuple[int, int], float] = {}
        self._struck: dict[tuple[int, int], int] = {}

    def one(self) -> str:
        """Break a cable at a random moment; return a text about the damage."""
        time.sleep(self._chance.uniform(0.02, 0.3))
        link = self._choose()
        kind = self._chance.choice(["cut", "blackhole"])
        (self._network.cut if kind == "cut" else self._network.blackhole)(*link)
        # Shorter than the time to notice it, about as long, or longer than the view change.
        self._broken[link] = time.monotonic() + self._chance.choice([0.02, 0.1, 0.6, 1.5])
        self._struck[link] = self._struck.get(link, 0) + 1
        return f"{kind}:{link[0]}/{link[1]}"

    def heal(self) -> None:
        """Heal cables that have been broken long enough."""
        for link, until_s in list(self._broken.items()):
            if time.monotonic() >= until_s:
                self._network.heal(*link)
                del self._broken[link]
                self._healed[link] = time.monotonic()

    def _choose(self) -> tuple[int, int]:
        """A link that is in use, on a switch and a server where nothing else is broken.

        Three broken links of three switches and servers can part a fabric, too.
        """
        fabric, deadline = self._network.fabric, time.monotonic() + DEADLINE_S
        while True:
            self.heal()
            out = self._out_of_use()
            groups = {(level, fabric.group(server, level)) for server, level in out}
            servers = {server for server, _ in out}
            free = [
                (server, level)
                for server, level in fabric.links
                if server not in servers
                and (level, fabric.group(server, level)) not in groups
                and fabric.without(*(LinkFailure(*link) for link in {*out, (server, level)})).is_connected
            ]
            if free and len(out) < 3:
                fewest = min(self._struck.get(link, 0) for link in free)
                return self._chance.choice([link for link in free if self._struck.get(link, 0) == fewest])
            assert time.monotonic() < deadline, f"{sorted(out)} does not heal"
            time.sleep(0.05)

    def _out_of_use(self) -> set[tuple[int, int]]:
        now, failures = self._job.status(), set()
        for each in map(parse_failure, now["failures"]):
            assert isinstance(each, LinkFailure), f"{each}: {now['reason']}"
            failures.add((each.server, each.level))
        late = {link for link, at_s in self._healed.items() if time.monotonic() - at_s < NOTICED_S}
        return failures | late | set(self._broken)


def run(network: EmulatedFabric, n_cuts: int, seed: int) -> dict[str, Any]:
    """Run one job with this many cuts; return a record of it. Raises the error of the job."""
    with tempfile.TemporaryDirectory() as folder:
        stop = Path(folder) / "stop"
        with bml.start(
            training(stop, seed),
            network.fabric.name,
            launcher="processes",
            emulated=network.name,
            prints=False,
        ) as job:
            try:
                deadline = time.monotonic() + DEADLINE_S
                while job.status()["epoch"] < 1:
                    assert time.monotonic() < deadline
                cutter = Cutter(network, job, random.Random(seed))
                done = [cutter.one() for _ in range(n_cuts)]
                stop.touch()
                result = job.wait()
            finally:
                network.heal_all()
    views = result.report["views"]
    return {
        "cuts": done,
        "steps": result.value,
        "same_on_all": len(set(result.values.values())) == 1,
        "servers_left": sorted(result.values),
        "views": len(views),
        "reasons": [view["reason"] for view in views],
        "views_with_damage": sum(bool(view["failures"]) for view in views),
        "steps_gone_on_with": sum(view["kept"] > 0 for view in views),
    }


@click.command()
@click.option("--cuts", default=200, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(cuts: int, seed: int, as_json: bool) -> None:
    """Cut cables at random under jobs that check every sum."""
    network = emulated.up(FABRIC, RATE, name="cuts")
    said: dict[str, Any] = {"cuts": 0, "jobs": 0, "steps": 0, "views": 0, "steps_gone_on_with": 0}
    try:
        while said["cuts"] < cuts:
            one = run(network, min(MOST_CUTS_A_JOB, cuts - said["cuts"]), seed + said["jobs"])
            assert one["same_on_all"], one
            assert one["servers_left"] == list(range(9)), one
            said["jobs"] += 1
            said["cuts"] += len(one["cuts"])
            for name in ("steps", "views", "steps_gone_on_with"):
                said[name] += one[name]
            if not as_json:
                click.echo(json.dumps(one))
    finally:
        network.down()
    click.echo(json.dumps(said))


if __name__ == "__main__":
    main()
