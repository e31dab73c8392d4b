"""`bml inject`: one fault into a running job, or into an emulated fabric."""

from __future__ import annotations

from typing import Any

import click

from bml.cli.output import current
from bml.cluster.launcher import jobsocket
from bml.errors import UsageError
from bml.fabric import find
from bml.fabric.injector import damage_of
from bml.faults import AtOnce, Fault, FaultPlan


@click.command()
@click.argument("spec")
@click.option("--job", metavar="J", help="Name of the job. [default: the only one that runs]")
@click.option(
    "--fabric-name",
    metavar="NAME",
    help="Not into a job, but into the emulated fabric of this name, for good.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def inject(spec: str, job: str | None, fabric_name: str | None, as_json: bool) -> None:
    """Inject one fault: kill:4, freeze:2,for=3s, blackhole:4/0, switch:0/2, coordinator,
    freeze:coordinator, exception:4, ...

    It strikes at once, or when it says: kill:4@step=90,phase=broadcast or cut:4/0@t=2s (from now). Two are no
    faults: leave:4 has a server go after its step, join:4 starts one that is gone, or was absent, again.

    \b
    Example:
      bml run examples/train_digits.py --launcher processes &
      bml inject kill:4
      bml inject join:4
    """
    if fabric_name is not None and job is not None:
        raise UsageError("give --job or --fabric-name, not both")
    # Read here first, so that what is no fault is said so whether or not a job runs.
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


def _break(fault: Fault, name: str) -> dict[str, Any]:
    network = find(name)
    FaultPlan((fault,)).validate(network.fabric)
    if not isinstance(fault.trigger, AtOnce) or fault.duration_s is not None or fault.kind == "flap":
        raise UsageError(
            f"'{fault}' needs a job to follow: without one there is cut, blackhole, slow, loss or switch, at "
            "once, until bml fabric heal"
        )
    damage = damage_of(fault)
    network.damage(damage)
    cables = len(damage.cables(network.layout))
    return {
        "fault": str(fault),
        "fabric": name,
        "done": [f"{damage}: {cables} cable(s) of {network.fabric.name}"],
    }
