"""`bml sim`: simulates a step on a modelled network, and prints its time and its busiest links."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from bml.cli.output import current
from bml.cli.printed import check_writable
from bml.cluster.spec.constants import load_constants
from bml.lab.commands.quantities import parse_bytes
from bml.lab.commands.sim.asked import Asked
from bml.lab.commands.sim.options import (
    check_numba,
    check_prices,
    damaged,
    network_options,
    parse_rate,
    read_size,
)
from bml.lab.commands.sim.packets import Wanted, packet_answer, packet_options, show_packets
from bml.lab.commands.sim.train import train
from bml.topology import UsageError
from bml.topology.fattree import with_seed


class Simulation(click.Command):
    """A command that has others below it, each called by its name in the place of the first argument."""

    def __init__(self, *given: Any, **settings: Any):
        super().__init__(*given, **settings)
        self.commands: dict[str, click.Command] = {}

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """See click.Command."""
        below = self.commands.get(args[0]) if args else None
        if below is None:
            return super().make_context(info_name, args, parent, **extra)
        return below.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)


@click.command(cls=Simulation)
@click.argument("fabric")
@click.option("--bytes", "size", default="64MiB", show_default=True, metavar="P", help="Size of the vector.")
@network_options
@click.option(
    "--fail", multiple=True, metavar="X", help="server:4, link:4/0, switch:0/2, core:3; repeatable."
)
@click.option("--seeds", type=click.IntRange(1, 1000), default=1, help="Seeds of ECMP's hash to try: 0, 1, …")
@click.option(
    "--compare",
    "comparing",
    is_flag=True,
    help="Compare algorithms, and fabrics of one size, these without --fail and --link-rate.",
)
@click.option("--prices", metavar="TEXT", help="Prices for --compare, such as nic=1,port=2,cable=0.5.")
@click.option(
    "--plot", "picture", type=click.Path(path_type=Path), help="Draw links into .png, .svg or .pdf."
)
@click.option("--trace", type=click.Path(path_type=Path), help="Write a timeline for ui.perfetto.dev.")
@packet_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def sim(
    fabric: str,
    algorithm: str,
    size: str,
    rate: str,
    goodput: float,
    delay_s: float | None,
    constants: Path | None,
    fail: tuple[str, ...],
    link_rate: tuple[str, ...],
    slice_size: str | None,
    seeds: int,
    comparing: bool,
    prices: str | None,
    picture: Path | None,
    trace: Path | None,
    packets: Wanted | None,
    as_json: bool,
) -> None:
    """Simulate a step on a modelled network: time, busiest links.

    Connections share links fairly, each sends in order, and a message arrives a delay after its last byte: by
    default the start-up time of the cost model. Headers, losses and processors are not modelled. With
    --packets every packet is simulated, with queues, pause frames and rate control; --delay is then that of a
    cable, by default 1 µs. `bml sim train` simulates a whole training.

    \b
    Example:
      bml sim bcube:8x4 --bytes 256MiB --rate 25gbit
      bml sim bcube:4x2 --fail server:0 --link-rate 5/1=1/10 --trace step.json
      bml sim fattree:10 --algorithm ring --seeds 20
      bml sim bcube:16x2 --compare --prices nic=1,port=2
      bml sim fattree:4 --algorithm mesh --rate 40gbit --packets --no-dcqcn
      bml sim train bcube:3x2 --model vgg19
    """
    check_numba()
    from bml.lab.commands.sim.answer import answer, show, write_trace
    from bml.lab.commands.sim.compared import compared, show_tables
    from bml.lab.commands.sim.picture import check_drawable, draw
    from bml.lab.flows.prices import read_prices

    check_writable(picture, "--plot")
    check_writable(trace, "--trace")
    if picture is not None:
        check_drawable(picture)
    others: dict[str, object] = {"--plot": picture, "--trace": trace, "--seeds": seeds > 1}
    check_prices(comparing, prices)
    _check_comparing(comparing, others)
    known, source = load_constants(constants)
    asked = Asked(
        fabric=damaged(fabric, link_rate, fail),
        failures=fail,
        algorithm=algorithm,
        nbytes=parse_bytes(size),
        rate_bit=parse_rate(rate),
        goodput=goodput,
        delay_s=known.alpha_s if delay_s is None else delay_s,
        slice_nbytes=read_size("slice", slice_size),
        seeds=seeds,
        constants=known,
    )
    if packets is not None:
        _answer_packets(asked, packets, delay_s, {**others, "--compare": comparing}, as_json)
        return
    if comparing:
        tables = compared(asked, read_prices(prices or ""))
        current().answer(tables) if as_json else show_tables(tables)
        return
    report, outcome = answer(asked)
    if trace is not None:
        click.echo(write_trace(outcome, trace), err=True)
    if picture is not None:
        click.echo(draw(report, outcome, picture), err=True)
    if as_json:
        current().answer(asdict(report))
    else:
        show(report, f"{delay_s} s, asked for" if delay_s is not None else source)


def _answer_packets(
    asked: Asked, packets: Wanted, delay_s: float | None, others: dict[str, object], as_json: bool
) -> None:
    """Raises UsageError for `others`, which are for flows alone."""
    for name in (name for name, given in others.items() if given):
        raise UsageError(f"{name} is for flows: leave it out, or --packets")
    seeded = replace(asked, fabric=with_seed(asked.fabric, packets.seed))
    if delay_s is not None:
        packets = replace(packets, settings=replace(packets.settings, delay_s=delay_s))
    report = packet_answer(seeded, packets)
    current().answer(asdict(report)) if as_json else show_packets(report)


def _check_comparing(comparing: bool, others: dict[str, object]) -> None:
    """Raise UsageError for `others` with `--compare`."""
    for name in (name for name, given in others.items() if given and comparing):
        raise UsageError(f"{name} is for one simulation: leave it out, or --compare")


sim.commands["train"] = train
