"""What a job of many servers costs them: messages while nothing happens, and a view change.

    python benchmarks/large_jobs.py
    python benchmarks/large_jobs.py --fabric bcube:32x2

The real cores of all servers and of the coordinator, one after the other on a virtual clock. A message takes
100 µs. One training function computes for ever; after 2.5 s its server is killed, and the others finish
the step. Processor times are those of the cores alone, on this machine: of the coordinator all that it does
from the death on until all have the new view, of a server the median. Planning is measured apart, by
bench_planning.py. "bytes" are those that the coordinator sends, and gets.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bml.protocol.coordinator.core import Coordinator
from bml.protocol.server.core import ServerCore
from bml.protocol.wire import messages as msg
from bml.sim.mishaps.chaos import Mishap, When
from bml.sim.server.machine import Machine
from bml.sim.simulation import Simulation
from bml.sim.world.coordinators import SimulatedCoordinators
from bml.sim.world.settings import Settings
from bml.sim.world.wires import Wires
from bml.topology import parse

DEAD = 5
IDLE_FROM_S, KILLED_AT_S = 0.5, 2.5
STEPS, ELEMENTS = 2, 17
Row = dict[str, Any]


@dataclass
class Seen:
    """What is counted while the job idles, and from the death of its server on."""

    idle: Counter[str] = field(default_factory=Counter)
    change: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    frozen_at_s: float = 0.0
    installed_at_s: float = 0.0
    coordinator_s: float = 0.0
    servers_s: Counter[int] = field(default_factory=Counter)

    def count(self, now_s: float, what: str, message: msg.Message | None = None) -> None:
        """One message more."""
        if IDLE_FROM_S <= now_s < KILLED_AT_S:
            self.idle[what] += 1
        elif now_s >= KILLED_AT_S and not self.installed_at_s and message is not None:
            self.change[what] += 1
            self.nbytes[what] += len(msg.encode(message))


class Watched(Simulation):
    """A simulation that counts and times; the classes that do the work are patched while it runs."""

    def __init__(self, *arguments: Any) -> None:
        self.seen = Seen()
        super().__init__(*arguments)

    def measure(self) -> Seen:
        """Run, and return what was seen."""
        seen, network = self.seen, self.network
        changing = lambda: network.now >= KILLED_AT_S and not seen.installed_at_s  # noqa: E731

        def posted(_: Any, __: Any, message: msg.Message) -> None:
            if isinstance(message, msg.Freeze) and changing() and not seen.frozen_at_s:
                seen.frozen_at_s = network.now
            seen.count(network.now, "from the coordinator", message)

        def told(_: Any, __: int, message: msg.Message) -> None:
            seen.count(network.now, "to the coordinator", message)

        def installed(_: Any, view: msg.View) -> None:
            if (
                DEAD not in view.members
                and view.members
                and all(
                    machine.core.view is not None and machine.core.view.epoch == view.epoch
                    for server, machine in self.machines.items()
                    if server in view.members
                )
            ):
                seen.installed_at_s = network.now

        def coordinated(_: Any, seconds: float) -> None:
            seen.coordinator_s += seconds if changing() else 0.0

        def served(core: Any, seconds: float) -> None:
            seen.servers_s[core.server] += seconds if changing() else 0.0

        undo = [
            before(SimulatedCoordinators, "post", posted),
            before(SimulatedCoordinators, "tell", told),
            before(Wires, "heartbeat", lambda *_: seen.count(network.now, "heartbeats")),
            after(Machine, "_installed", installed),
            timed(Coordinator, "handle", coordinated),
            timed(ServerCore, "handle", served),
        ]
        try:
            self.run()
        finally:
            for each in undo:
                each()
        return seen


def patched(owner: type, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Put a function in the place of a method; returns what undoes it."""
    original = getattr(owner, name)
    setattr(owner, name, wrapper)
    return lambda: setattr(owner, name, original)


def before(owner: type, name: str, look: Callable[..., None]) -> Callable[[], None]:
    """Call `look` with the same arguments before a method."""
    original = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        look(*arguments)
        return original(*arguments)

    return patched(owner, name, call)


def after(owner: type, name: str, look: Callable[..., None]) -> Callable[[], None]:
    """Call `look` with the same arguments after a method."""
    original = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        done = original(*arguments)
        look(*arguments)
        return done

    return patched(owner, name, call)


def timed(owner: type, name: str, tell: Callable[[Any, float], None]) -> Callable[[], None]:
    """Tell how many seconds of the processor each call of a method took."""
    original = getattr(owner, name)

    def call(self: Any, *arguments: Any) -> Any:
        began_s = time.process_time()
        done = original(self, *arguments)
        tell(self, time.process_time() - began_s)
        return done

    return patched(owner, name, call)


def measure(name: str, delay_s: float) -> Row:
    """One fabric."""
    fabric = parse(name)
    settings = Settings(steps=STEPS, n_elements=ELEMENTS, delay_s=(delay_s, delay_s))
    mishaps = (
        Mishap("endless", (DEAD,), When("", 0, 0.0)),
        Mishap("crash", (DEAD,), When("", 0, KILLED_AT_S)),
    )
    seen = Watched(fabric, 1, settings, mishaps, False).measure()
    per_server_s = fabric.n_servers * (KILLED_AT_S - IDLE_FROM_S)
    return {
        "fabric": name,
        "servers": fabric.n_servers,
        "neighbours": sum(len(fabric.neighbours(0, level)) for level in range(fabric.levels)),
        "heartbeats_per_s": seen.idle["heartbeats"] / per_server_s,
        "to_coordinator_per_s": seen.idle["to the coordinator"] / per_server_s,
        "from_coordinator_per_s": seen.idle["from the coordinator"] / per_server_s,
        "change_s": seen.installed_at_s - seen.frozen_at_s,
        "since_death_s": seen.installed_at_s - KILLED_AT_S,
        "messages": sum(seen.change.values()),
        "sent_nbytes": seen.nbytes["from the coordinator"],
        "received_nbytes": seen.nbytes["to the coordinator"],
        "coordinator_s": seen.coordinator_s,
        "server_s": statistics.median(seen.servers_s.values()),
    }


@click.command()
@click.option("--fabric", "names", multiple=True, help="[default: bcube:3x2, 8x2, 16x2, 4x5 and 32x2]")
@click.option("--delay-us", default=100, show_default=True, help="Of every message.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(names: tuple[str, ...], delay_us: int, as_json: bool) -> None:
    """Measure jobs of many servers on a virtual clock."""
    chosen = names or ("bcube:3x2", "bcube:8x2", "bcube:16x2", "bcube:4x5", "bcube:32x2")
    rows = [measure(name, delay_us / 1e6) for name in chosen]
    if as_json:
        click.echo(json.dumps({"rows": rows}))
        return
    table = Table("fabric", "servers", "heartbeats", "view change", "messages", "bytes", "processor")
    for row in rows:
        table.add_row(
            row["fabric"],
            f"{row['servers']}, {row['neighbours']} neighbours",
            f"{row['heartbeats_per_s']:.0f}/s",
            f"{row['change_s'] * 1e3:.1f} ms",
            f"{row['messages']:,}",
            f"{row['sent_nbytes'] / 1e6:.2f}, {row['received_nbytes'] / 1e6:.2f} MB",
            f"{row['coordinator_s'] * 1e3:.0f}, {row['server_s'] * 1e3:.1f} ms",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
