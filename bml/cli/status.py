"""`bml status`: shows where a running job stands, and why."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from bml.cli.output import current
from bml.cli.printed import future_lines, size_lines
from bml.cli.tables import print_table
from bml.cli.values import FiniteRange
from bml.cli.web.options import WithWeb, served, web_options
from bml.cluster.launcher import jobsocket
from bml.errors import FabricError
from bml.train.balancing.shown import in_words
from bml.train.balancing.throughput import of_all

if TYPE_CHECKING:
    from bml.web.served import ServedPage

_AGAIN_S = 0.1
"""After so long it is looked again whether a job is there."""


@click.command(cls=WithWeb)
@click.option("--job", metavar="J", help="Name of the job. [default: the only one that runs]")
@click.option("--wait", type=FiniteRange(0), metavar="S", help="Wait up to S seconds for the first view.")
@web_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def status(job: str | None, wait: float | None, web: int | None, web_inject: bool, as_json: bool) -> None:
    """Show a running job: its view, joiners, suspicions.

    For every server it shows the step, the phase, what the server waits for, whom it suspects and why, and
    the rates of its NICs. With --web a page in the browser shows that, until the job has ended. A job that
    was just started is there only once its servers are.

    \b
    Example:
      bml run examples/train_digits.py --launcher processes &
      bml status --wait 60
    """
    if wait is not None:
        _await(job, wait)
    if web is not None:
        jobsocket.find(job)  # before an address is printed
    with served(web, web_inject, lambda text: click.echo(text, err=as_json)) as page:
        if page is not None:
            _follow(job, page, as_json)
            return
    now = jobsocket.call(job, {"do": "status"})
    if as_json:
        current().answer(now)
        return
    _show(now, Console(markup=False, highlight=False))


def _await(job: str | None, wait_s: float) -> None:
    """Wait until this job, or any, has a view; for so many seconds at most."""
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        running = jobsocket.running()
        is_there = bool(running) if job is None else job in running
        with suppress(FabricError):  # it ends, or is busy
            if is_there and jobsocket.call(job, {"do": "status"}).get("epoch"):
                return
        time.sleep(_AGAIN_S)


def _follow(job: str | None, page: ServedPage, as_json: bool) -> None:
    """Show a job on the page until it has ended; then say how it has."""
    from bml.web.source import OtherJob

    source = OtherJob(job)
    page.follow(source)
    try:
        outcome = source.outcome()
    except KeyboardInterrupt:
        page.leave("Nobody looks at the job any more: bml status was ended, and the job goes on.")
        raise
    page.end(outcome)
    if as_json:
        current().answer(outcome)
    else:
        click.echo(f"job {source.name} has ended{' well' * outcome['ended_well']}: {outcome['text']}")


def _show(now: dict[str, Any], console: Console) -> None:
    where = f"on the emulated fabric {now['emulated']}" if now["emulated"] else f"launcher {now['launcher']}"
    console.print(f"job {now['job']}: {now['fabric']}, algorithm {now['algorithm']}, {where}")
    members = now.get("members", [])
    console.print(
        f"view {now.get('epoch', 0)}: {len(members)} servers ({now.get('reason') or 'no reason given yet'}), "
        f"{now.get('state', 'starting')}, step {now.get('step', 0)}"
    )
    for server in now.get("learners", []):
        console.print(f"learner: server {server} follows the steps while the training state is sent to it")
    for server in now.get("waiting", []):
        console.print(f"waiting: server {server} asks to join; it is let in at the next step boundary")
    if now.get("awaited"):
        console.print(f"to come: {_servers(now['awaited'])}")
    console.print("broken: " + (", ".join(_broken(now)) or "nothing"))
    for nic, rate in now.get("slow", {}).items():
        console.print(f"slow: NIC {nic} runs at {rate}, trees avoid it")
    for line in future_lines(now):
        console.print(line)
    for line in _share_lines(now["servers"]):
        console.print(line)
    for line in size_lines(of_all(each.get("sizes") or {} for each in now["servers"].values())):
        console.print(line)
    for why in now.get("suspicions", []):
        console.print(f"suspected: {why}")
    print_table(_server_table(now), console)
    for server, answer in now["servers"].items():
        for each in answer.get("suspects", []):
            console.print(f"server {server} suspects {each['peer']}/{each['level']}: {each['why']}")
    for line in _transport_lines(now["servers"]):
        console.print(line)
    for how in ("lost", "left"):
        for server, why in now.get(how, {}).items():
            console.print(f"{how}: server {server} ({why})")
    if now.get("absent"):
        console.print(f"never started: {_servers(now['absent'])}")


def _broken(now: dict[str, Any]) -> list[str]:
    """Return what is broken: not the servers that left, never came, are to come, or have ended."""
    well = {f"server:{each}" for key in ("left", "absent", "awaited", "ended") for each in now.get(key, ())}
    return [each for each in now.get("failures", []) if each not in well]


def _share_lines(servers: dict[str, Any]) -> list[str]:
    """Say how batches are shared, if not equally; servers may be a batch apart, and differ."""
    return sorted({f"shares: {in_words(each['shares'])}" for each in servers.values() if each.get("shares")})


def _transport_lines(servers: dict[str, Any]) -> list[str]:
    """Say which transport and devices each server uses; servers with the same ones share a line."""
    said: dict[str, list[str]] = {}
    for server, answer in sorted(servers.items(), key=lambda item: int(item[0])):
        transport = answer.get("transport")
        if transport is None:
            continue
        text = transport["name"]
        if transport["traffic_class"]:
            text += f", traffic class {transport['traffic_class']}"
        if transport["fallback"]:
            text += f", instead of verbs: {transport['fallback']}"
        if transport["zero_copy_to"]:
            text += f", but payloads to {_servers(transport['zero_copy_to'])} through shared memory"
        if transport["devices"]:
            text += ", " + "; ".join(f"NIC {i} {name}" for i, name in enumerate(transport["devices"]))
        said.setdefault(text, []).append(server)
    return [f"transport of server {', '.join(who)}: {text}" for text, who in said.items()]


def _servers(numbers: list[int]) -> str:
    return f"server{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _server_table(now: dict[str, Any]) -> Table:
    table = Table("server", "view", "step", "phase", "waits for", "out / in per NIC, MB/s", "carrier")
    for server, answer in sorted(now["servers"].items(), key=lambda item: int(item[0])):
        if not answer.get("answers", True):
            table.add_row(server, "", "", "", "does not answer: it is frozen or too busy", "", "")
            continue
        nics = answer["nics"]
        rates = "  ".join(
            f"{nic['sent_per_s'] / 1e6:.1f} / {nic['received_per_s'] / 1e6:.1f}" for nic in nics
        )
        carriers = " ".join({True: "yes", False: "NO", None: "-"}[nic["carrier"]] for nic in nics)
        progress = "" if answer["progress"] is None else f" {answer['progress']:.0%}"
        table.add_row(
            server,
            str(answer["epoch"]),
            str(answer["step"]),
            answer["phase"] + progress,
            answer["waits_for"],
            rates,
            carriers,
        )
    return table
