"""`bml sim --packets`: its options, its answer packet by packet, and the table of it."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bml.cli.printed import without
from bml.cli.tables import print_table
from bml.lab.commands.quantities import parse_bytes
from bml.lab.commands.sim.asked import Asked
from bml.lab.commands.sim.options import Command, rate_of, read_size
from bml.lab.packets.settings import Settings
from bml.topology import UsageError

if TYPE_CHECKING:  # it needs numba
    from bml.lab.packets.simulate import Outcome

_SHOWN = 5
"""Ports of the table; JSON has all."""
_MOST_PACKET_NBYTES = 1 << 20
_USUAL = Settings()

_OPTIONS = (
    click.option("--packets", "packet_level", is_flag=True, help="Simulate packets, queues and pauses."),
    click.option("--packet", metavar="P", help="With --packets: largest packet.  [default: 4KiB]"),
    click.option(
        "--buffer",
        metavar="P",
        help="With --packets: buffer of a switch for each of its ports, which share it.  [default: 375KB]",
    ),
    click.option(
        "--dcqcn/--no-dcqcn",
        default=None,
        help="With --packets: whether NICs send slower when switches mark packets.  [default: dcqcn]",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**31 - 1),
        metavar="N",
        help="With --packets: seed of paths, marks and turns.  [default: 0]",
    ),
)


@dataclass(frozen=True)
class Wanted:
    """The options that are for packets alone, read: settings without the delay, and the seed."""

    settings: Settings
    seed: int


def packet_options(command: Command) -> Command:
    """Give a command the options of packets; it is called with `packets`, a Wanted or None."""

    @functools.wraps(command)
    def read(packet_level: bool, **others: Any) -> Any:
        given = {name: others.pop(name) for name in ("packet", "buffer", "dcqcn", "seed")}
        return command(packets=_read(packet_level, **given), **others)

    for option in reversed(_OPTIONS):
        read = option(read)
    return read


def _read(
    packet_level: bool, packet: str | None, buffer: str | None, dcqcn: bool | None, seed: int | None
) -> Wanted | None:
    """Raise UsageError for options of packets without `--packets`, and for sizes that cannot be."""
    if not packet_level:
        dcqcn_name = "--dcqcn" if dcqcn else "--no-dcqcn"
        named = {"--packet": packet, "--buffer": buffer, dcqcn_name: dcqcn, "--seed": seed}
        for name in (name for name, value in named.items() if value is not None):
            raise UsageError(f"{name} is for packets: add --packets, or leave it out")
        return None
    packet_nbytes = read_size("packet", packet) or _USUAL.packet_nbytes
    if packet_nbytes > _MOST_PACKET_NBYTES:
        raise UsageError(f"--packet {packet}: packets of up to {_MOST_PACKET_NBYTES} bytes are simulated")
    settings = Settings(
        packet_nbytes=packet_nbytes,
        buffer_nbytes=_USUAL.buffer_nbytes if buffer is None else float(parse_bytes(buffer)),
        dcqcn=dcqcn is not False,
    )
    return Wanted(settings, seed or 0)


@dataclass(frozen=True)
class PacketReport:
    """The answer of `bml sim --packets --json`.

    Its first fields are those of `Report`, but `delay_s` is that of a cable. `crossings` counts packets
    over links. `pauses` and `paused_s` are sums over all links, and `longest_queue` is the most bytes that
    waited for one port of a switch. A link has how often and for how long the switch at its end paused it,
    and the longest queue for it; a switch has the most bytes that were in it at one time.
    """

    fabric: str
    failures: list[str]
    algorithm: str
    why: str
    survivors: int
    nbytes: int
    rate_bit: float
    goodput: float
    delay_s: float
    packet_nbytes: int
    buffer_nbytes: float
    dcqcn: bool
    seed: int
    gst_s: float
    gst: float
    planned: float
    packets: int
    crossings: int
    marked: int
    notifications: int
    pauses: int
    paused_s: float
    longest_queue: float
    links: list[dict[str, Any]]
    switches: list[dict[str, Any]]
    planning_s: float
    simulating_s: float


def packet_answer(asked: Asked, wanted: Wanted) -> PacketReport:
    """Plan and simulate; show on a terminal's standard error how far it is.

    Raises:
        FabricError, UsageError: as `bml.lab.packets.simulate.simulate`, or there is no such algorithm.
    """
    from bml.lab.commands.sim.answer import conditions, planned
    from bml.lab.packets.simulate import simulate

    start_s = time.perf_counter()
    made = planned(asked)
    fastest = float(made.gst())
    planned_s = time.perf_counter()
    console = Console(stderr=True)
    columns = TextColumn("packets"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as shown:
        task = shown.add_task("packets", total=1.0)
        outcome = simulate(
            made,
            conditions(asked),
            wanted.settings,
            wanted.seed,
            lambda share: shown.update(task, completed=share),
        )
    stop_s = time.perf_counter()
    return PacketReport(
        fabric=asked.fabric.name,
        failures=list(asked.failures),
        algorithm=made.algorithm,
        why=made.why,
        survivors=len(asked.fabric.servers),
        nbytes=asked.nbytes,
        rate_bit=asked.rate_bit,
        goodput=asked.goodput,
        delay_s=wanted.settings.delay_s,
        packet_nbytes=wanted.settings.packet_nbytes,
        buffer_nbytes=wanted.settings.buffer_nbytes,
        dcqcn=wanted.settings.dcqcn,
        seed=wanted.seed,
        gst_s=outcome.seconds,
        gst=round(outcome.seconds / asked.whole_s, 6) if asked.whole_s else 0.0,
        planned=round(fastest, 4),
        packets=outcome.n_packets,
        crossings=outcome.n_crossings,
        marked=outcome.n_marked,
        notifications=outcome.n_notified,
        pauses=int(outcome.pauses.sum()),
        paused_s=float(outcome.paused_s.sum()),
        longest_queue=float(outcome.most_queued.max(initial=0.0)),
        links=_links(outcome),
        switches=_switches(outcome),
        planning_s=round(planned_s - start_s, 6),
        simulating_s=round(stop_s - planned_s, 6),
    )


def _links(outcome: Outcome) -> list[dict[str, Any]]:
    """Return all links, the most paused first, then those with the longest queues."""
    columns = outcome.pauses, outcome.paused_s, outcome.most_queued
    order = np.lexsort([-column for column in reversed(columns)]).tolist()
    pauses, paused_s, queued = (column.tolist() for column in columns)
    return [
        {
            "link": outcome.ports.name[at],
            "pauses": pauses[at],
            "paused_s": paused_s[at],
            "longest_queue": round(queued[at]),
        }
        for at in order
    ]


def _switches(outcome: Outcome) -> list[dict[str, Any]]:
    columns = outcome.ports.switch, outcome.most_held.tolist(), outcome.buffer_nbytes.tolist()
    return [
        {"switch": name, "most_held": round(held), "buffer": round(buffer)}
        for name, held, buffer in zip(*columns, strict=True)
    ]


def show_packets(report: PacketReport) -> None:
    """Print the report as a table of two columns."""
    table = Table(title=without(report.fabric, report.failures))
    table.add_column("quantity")
    table.add_column("value")
    table.add_row("algorithm", f"{report.algorithm} ({report.why})")
    table.add_row("survivors", str(report.survivors))
    table.add_row("time of a step", f"{report.gst_s * 1e3:.3f} ms, {report.gst:.4f} T")
    table.add_row("time of the busiest NIC", f"{report.planned:.4f} T, without start-ups")
    table.add_row("rate of a NIC", rate_of(report.rate_bit, report.goodput))
    table.add_row("delay of a cable", f"{report.delay_s * 1e6:g} µs")
    sizes = f"of up to {report.packet_nbytes} bytes, {report.crossings} times over a link"
    table.add_row("packets", f"{report.packets} {sizes}")
    control = "DCQCN" if report.dcqcn else "none"
    table.add_row("rate control", f"{control}: {report.marked} marked, {report.notifications} notifications")
    table.add_row("pauses", f"{report.pauses}, together {report.paused_s * 1e3:.3f} ms")
    table.add_row("longest queue", f"{report.longest_queue:.0f} bytes")
    if report.switches:
        fullest = max(report.switches, key=lambda each: each["most_held"] / each["buffer"])
        share = fullest["most_held"] / fullest["buffer"]
        table.add_row("fullest switch", f"{fullest['switch']}: {share:.1%} of {fullest['buffer']} bytes")
    for each in report.links[:_SHOWN]:
        pauses = f"paused {each['pauses']} times for {each['paused_s'] * 1e3:.3f} ms"
        queue = f"queue of up to {each['longest_queue']} bytes"
        told = [text for text, is_so in ((pauses, each["pauses"]), (queue, each["longest_queue"])) if is_so]
        if told:
            table.add_row(f"link {each['link']}", ", ".join(told))
    table.add_row("planned, simulated in", f"{report.planning_s:.3f} s, {report.simulating_s:.3f} s")
    print_table(table, Console(markup=False))
