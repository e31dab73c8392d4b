"""`bml fabric`: emulates a server-centric network on this machine, with cables that can be cut."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from bml.cli.output import current
from bml.cli.tables import print_table
from bml.fabric import DEFAULT_NAME, DEFAULT_RATE, Damage, EmulatedFabric, find, parse_rate, rate_text
from bml.fabric import down as take_down
from bml.fabric import up as bring_up
from bml.faults.settings import DIRECTIONS

_Command = TypeVar("_Command", bound=Callable[..., Any])
_RATE_HELP = "Rate of every NIC in each direction, such as 200mbit or 1gbit."


def _common(command: _Command) -> _Command:
    """Add the two options that every command takes."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
    name = click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the fabric.")
    return name(as_json(command))


@click.group()
def fabric() -> None:
    """Emulate a server-centric network, and break it.

    It is made of network namespaces of this machine, which needs root.

    \b
    Example:
      bml fabric up bcube:3x2 --rate 200mbit
      bml run examples/train_digits.py --fabric-emulated --fault cut:4/0@t=1s
      bml fabric down
    """


@fabric.command()
@click.argument("shape", metavar="FABRIC")
@click.option("--rate", default=DEFAULT_RATE, show_default=True, help=_RATE_HELP)
@click.option("--one-switch-rate", help="Rate of the one-switch network beside it. [default: as --rate]")
@_common
def up(shape: str, rate: str, one_switch_rate: str | None, name: str, as_json: bool) -> None:
    """Bring up a fabric of up to 16 servers.

    FABRIC is bcube:3x2, torus:4x2, switch:9 or the like. If that fabric is up already, nothing changes.

    \b
    Example:
      bml fabric up bcube:3x2 --rate 200mbit
    """
    start_s = time.perf_counter()
    network = bring_up(shape, rate, one_switch_rate=one_switch_rate, name=name)
    seconds = round(time.perf_counter() - start_s, 3)
    _say(network, as_json, f"up in {seconds:.2f} s", addresses=True, seconds=seconds)


@fabric.command()
@_common
def down(name: str, as_json: bool) -> None:
    """Remove a fabric.

    That includes what an interrupted `up` left behind.

    \b
    Example:
      bml fabric down
    """
    left = take_down(name)
    if as_json:
        current().answer({"name": name, "processes": left})
        return
    click.echo(f"the emulated fabric {name} is gone")
    for pid, command in left.items():
        click.echo(f"process {pid} ({command}) is still running, and has no network any more", err=True)


@fabric.command()
@_common
def status(name: str, as_json: bool) -> None:
    """Show the fabric and its damage.

    \b
    Example:
      bml fabric status --json
    """
    _say(find(name), as_json, addresses=True)


@fabric.command()
@click.option("--rate", help=_RATE_HELP)
@click.option("--one-switch-rate", help="Rate of the one-switch network beside it.")
@_common
def shape(rate: str | None, one_switch_rate: str | None, name: str, as_json: bool) -> None:
    """Change the rate of all cables.

    Cables that were slowed stay slow.

    \b
    Example:
      bml fabric shape --rate 100mbit
    """
    if rate is None and one_switch_rate is None:
        raise click.UsageError("give --rate, --one-switch-rate, or both")
    network = find(name)
    network.shape(rate, one_switch_rate)
    _say(network, as_json)


@fabric.command()
@click.argument("link", metavar="SERVER/LEVEL")
@_common
def cut(link: str, name: str, as_json: bool) -> None:
    """Cut the cable of a NIC.

    The NIC has no carrier then, and the other end receives nothing.

    \b
    Example:
      bml fabric cut 4/0
    """
    _damage(name, f"cut:{link}", as_json)


@fabric.command()
@click.argument("link", metavar="SERVER/LEVEL")
@_common
def blackhole(link: str, name: str, as_json: bool) -> None:
    """Drop all packets on a cable, in both directions.

    Both ends keep their carrier.

    \b
    Example:
      bml fabric blackhole 4/0
    """
    _damage(name, f"blackhole:{link}", as_json)


@fabric.command()
@click.argument("link", metavar="SERVER/LEVEL")
@click.option("--rate", required=True, help="Rate of this cable, such as 10mbit.")
@click.option(
    "--direction",
    type=click.Choice(DIRECTIONS),
    default="both",
    show_default=True,
    help="Slow what the NIC sends, what it receives, or both.",
)
@_common
def slow(link: str, rate: str, direction: str, name: str, as_json: bool) -> None:
    """Slow one cable down.

    \b
    Example:
      bml fabric slow 4/0 --rate 10mbit
    """
    _damage(name, f"slow:{link},rate={rate_text(parse_rate(rate))},direction={direction}", as_json)


@fabric.command("switch-down")
@click.argument("switch", metavar="LEVEL/GROUP")
@_common
def switch_down(switch: str, name: str, as_json: bool) -> None:
    """Take a switch down.

    No NIC on it has a carrier then.

    \b
    Example:
      bml fabric switch-down 0/2
    """
    _damage(name, f"switch:{switch}", as_json)


@fabric.command("switch-up")
@click.argument("switch", metavar="LEVEL/GROUP")
@_common
def switch_up(switch: str, name: str, as_json: bool) -> None:
    """Bring a switch back.

    \b
    Example:
      bml fabric switch-up 0/2
    """
    _mend(name, f"switch:{switch}", as_json)


@fabric.command()
@click.argument("link", metavar="SERVER/LEVEL", required=False)
@click.option("--all", "everything", is_flag=True, help="Heal all cables and switches.")
@_common
def heal(link: str | None, everything: bool, name: str, as_json: bool) -> None:
    """Undo all damage of a cable, or all damage.

    \b
    Example:
      bml fabric heal 4/0
    """
    if (link is None) != everything:
        raise click.UsageError("give either a cable such as 4/0, or --all")
    if link is not None:
        _mend(name, f"cut:{link}", as_json)
        return
    network = find(name)
    network.heal_all()
    _say(network, as_json)


def _damage(name: str, text: str, as_json: bool) -> None:
    damage, network = Damage.parse(text), find(name)
    network.damage(damage)
    _say(network, as_json)


def _mend(name: str, text: str, as_json: bool) -> None:
    part, network = Damage.parse(text), find(name)
    network.mend(part)
    _say(network, as_json)


def _say(
    network: EmulatedFabric, as_json: bool, remark: str = "", *, addresses: bool = False, **more: Any
) -> None:
    """Print the state of the network, with `addresses` also the table of its servers."""
    now = {**network.status(), **more}
    if as_json:
        current().answer(now)
        return
    console = Console(markup=False, highlight=False)
    if addresses:
        print_table(_table(now), console)
    rates = f"{rate_text(now['rate'])} a NIC, one-switch network {rate_text(now['one_switch_rate'])}"
    console.print(f"{now['servers']} servers, {now['switches']} switches, {rates}")
    console.print("broken: " + (", ".join(now["failures"]) or "nothing"))
    if remark:
        console.print(remark)


def _table(now: dict[str, Any]) -> Table:
    table = Table(
        "server", "namespace", "NICs", "one switch", "management", title=f"{now['name']}: {now['fabric']}"
    )
    for server, place in now["addresses"].items():
        nics = ", ".join(place["nics"])
        table.add_row(str(server), place["namespace"], nics, place["one_switch"], place["management"])
    return table
