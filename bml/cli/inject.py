"""`bml inject`: injects one fault into a running job, or into an emulated fabric."""

from __future__ import annotations

from typing import Any

import click

from bml.cli.output import current
from bml.cluster.launcher import jobsocket
from bml.errors import UsageError
from bml.fabric import find
from bml.fabric.injector import damage_of
from bml.faults import AtOnce, Fault, FaultPlan

DUMP = "dump"


@click.command()
@click.argument("spec")
@click.option("--job", metavar="J", help="Name of the job. [default: the only one that runs]")
@click.option(
    "--fabric-name",
    metavar="NAME",
    help="Inject into the emulated fabric of this name instead of a job, until it is healed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def inject(spec: str, job: str | None, fabric_name: str | None, as_json: bool) -> None:
    """Inject one fault into a running job.

    Such as kill:4, freeze:2,for=3s, blackhole:4/0, switch:0/2, coordinator, freeze:coordinator or
    exception:4. The fault strikes at once, or at the moment that it names: kill:4@step=90,phase=broadcast, or
    cut:4/0@t=2s (two seconds from now). Two are not faults: leave:4 lets server 4 finish its step and leave,
    and join:4 starts it again. And dump writes what the servers' flight recorders hold, for bml replay.

    \b
    Example:
      bml run examples/train_digits.py --launcher processes &
      bml inject kill:4
      bml inject join:4
    """
    if fabric_name is not None and job is not None:
        raise UsageError("give --job or --fabric-name, not both")
    if spec == DUMP and fabric_name is None:
        written = jobsocket.call(job, {"do": "dump"})
        if as_json:
            current().answer(written)
        else:
            click.echo(f"{written['file']} has the last inputs of servers {_named(written['servers'])}")
        return
    # It is parsed here first: a text that is not a fault is refused whether or not a job runs.
    fault = Fault.parse(spec, at_once=True)
    done = (
        jobsocket.call(job, {"do": "inject", "fault": spec})
        if fabric_name is None
        else _break(fault, fabric_name)
    )
    if as_json:
        current().answer(done)
        return
    click.echo(f"{done['fault']} into {done.get('job') or done['fabric']}")
    for each in done["done"]:
        click.echo(f"  {each}")


def _named(servers: list[int]) -> str:
    return ", ".join(map(str, servers))


def _break(fault: Fault, name: str) -> dict[str, Any]:
    network = find(name)
    FaultPlan((fault,)).validate(network.fabric)
    if not isinstance(fault.trigger, AtOnce) or fault.duration_s is not None or fault.kind == "flap":
        raise UsageError(
            f"'{fault}' needs a running job: into a fabric alone give cut, blackhole, slow, loss or switch, "
            "which strike at once and last until bml fabric heal"
        )
    damage = damage_of(fault)
    network.damage(damage)
    cables = len(damage.cables(network.layout))
    return {
        "fault": str(fault),
        "fabric": name,
        "done": [f"{damage}: {cables} cable(s) of {network.fabric.name}"],
    }
