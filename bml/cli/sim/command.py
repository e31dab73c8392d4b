"""`bml sim`: simulates a step on a modelled network, and prints its time and its busiest links."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import click

from bml.cli.output import current
from bml.cli.plan import parse_bytes, parse_rates
from bml.cli.printed import check_writable
from bml.cli.sim.asked import Asked
from bml.cli.values import FiniteRange
from bml.cluster.spec.constants import load_constants
from bml.schedule import ALGORITHMS
from bml.topology import UsageError, parse
from bml.topology.fattree import is_inner, without_inner

_RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([kmgt])bit(?:/s)?", re.IGNORECASE)
_UNIT = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@click.command()
@click.argument("fabric")
@click.option("--algorithm", default="auto", show_default=True, help=f"One of {', '.join(ALGORITHMS)}.")
@click.option("--bytes", "size", default="64MiB", show_default=True, metavar="P", help="Size of the vector.")
@click.option("--rate", default="10gbit", show_default=True, metavar="B", help="Rate of a NIC, each way.")
@click.option(
    "--goodput",
    type=FiniteRange(0.001, 1),
    default=1.0,
    show_default=True,
    help="Share of the rate that is not headers: 0.954 for TCP over Ethernet.",
)
@click.option("--delay", "delay_s", type=FiniteRange(0, 10), metavar="S", help="Seconds of a hop.")
@click.option("--constants", type=click.Path(path_type=Path), help="File of the cost model's constants.")
@click.option(
    "--fail", multiple=True, metavar="X", help="server:4, link:4/0, switch:0/2, core:3; repeatable."
)
@click.option("--link-rate", multiple=True, metavar="S/L=R", help="Rate of a link in units of B: 4/0=1/10.")
@click.option("--slice", "slice_size", metavar="P", help="The largest slice.  [default: that of a job]")
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
    as_json: bool,
) -> None:
    """Simulate a step on a modelled network, and print its time and its busiest links.

    Connections share links fairly, each sends in order, and a message arrives a delay after its last byte: by
    default the start-up time of the cost model. Headers, losses and processors are not modelled.

    \b
    Example:
      bml sim bcube:8x4 --bytes 256MiB --rate 25gbit
      bml sim bcube:4x2 --fail server:0 --link-rate 5/1=1/10 --trace step.json
      bml sim fattree:10 --algorithm ring --seeds 20
      bml sim bcube:16x2 --compare --prices nic=1,port=2
    """
    _check_numba()
    from bml.cli.sim.answer import answer, show, write_trace
    from bml.cli.sim.compared import compared, show_tables
    from bml.cli.sim.picture import check_drawable, draw
    from bml.flows.prices import read_prices

    check_writable(picture, "--plot")
    check_writable(trace, "--trace")
    if picture is not None:
        check_drawable(picture)
    _check_comparing(comparing, prices, {"--plot": picture, "--trace": trace, "--seeds": seeds > 1})
    inner = [text for text in fail if is_inner(text)]
    broken = parse(fabric).with_rates(parse_rates(link_rate)).without(*(x for x in fail if x not in inner))
    known, source = load_constants(constants)
    asked = Asked(
        fabric=without_inner(broken, inner),
        failures=fail,
        algorithm=algorithm,
        nbytes=parse_bytes(size),
        rate_bit=parse_rate(rate),
        goodput=goodput,
        delay_s=known.alpha_s if delay_s is None else delay_s,
        slice_nbytes=_slice(slice_size),
        seeds=seeds,
        constants=known,
    )
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


def _check_comparing(comparing: bool, prices: str | None, others: dict[str, object]) -> None:
    """Raise UsageError for what only `--compare` has use of, without it, and for `others` with it."""
    if prices is not None and not comparing:
        raise UsageError("--prices is for --compare: add that, or leave out the prices")
    for name in (name for name, given in others.items() if given and comparing):
        raise UsageError(f"{name} is for one simulation: leave it out, or --compare")


def _slice(text: str | None) -> int | None:
    nbytes = None if text is None else parse_bytes(text)
    if nbytes == 0:
        raise UsageError(f"--slice {text}: a slice has at least 1 byte")
    return nbytes


def _check_numba() -> None:
    """Raise UsageError without numba, which only simulations need: it takes 200 MB."""
    if importlib.util.find_spec("numba") is None:
        raise UsageError("bml sim needs numba: pip install 'bml[sim]'")


def parse_rate(text: str) -> float:
    """Read a rate such as `200mbit`, `25gbit` or `1.6tbit`; return bits per second.

    Raises:
        UsageError: the text is no rate, or one of 0.
    """
    found = _RATE.fullmatch(text.strip())
    rate_bit = float(Fraction(found[1]) * _UNIT[found[2].lower()]) if found else 0.0
    if not rate_bit:
        raise UsageError(f"'{text}' is no rate: write it like 200mbit, 25gbit or 1.6tbit")
    return rate_bit
