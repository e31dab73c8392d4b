"""`bml torchrun`: starts the ranks of a PyTorch script, with torchrun's flags."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from bml.cli.output import current
from bml.cluster.torchrun.launcher import Request
from bml.cluster.torchrun.launcher import run as run_ranks
from bml.cluster.torchrun.layout import command_of, read_endpoint
from bml.errors import UsageError

_PORT = 29500
"""torchrun's port of the store where several nodes meet."""
_DEVICES = """
import torch
found = torch.accelerator if hasattr(torch, "accelerator") else torch.cuda
print(found.device_count() if found.is_available() else 0)
"""


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--nproc-per-node",
    "--nproc_per_node",
    default="1",
    show_default=True,
    envvar="PET_NPROC_PER_NODE",
    metavar="N",
    help="Ranks on this node: a number; cpu: one for each core; gpu: one for each GPU; auto: gpu if there is "
    "one, else cpu.",
)
@click.option(
    "--nnodes", default="1", show_default=True, envvar="PET_NNODES", metavar="N", help="Number of nodes."
)
@click.option(
    "--node-rank",
    "--node_rank",
    type=click.IntRange(0),
    envvar="PET_NODE_RANK",
    help="Rank of this node; node 0 holds the store. [default: by arrival; the first launcher on the machine "
    "of the endpoint is 0]",
)
@click.option(
    "--rdzv-endpoint",
    "--rdzv_endpoint",
    envvar="PET_RDZV_ENDPOINT",
    metavar="HOST:PORT",
    help="Where the store is, on node 0. [default: --master-addr and --master-port]",
)
@click.option(
    "--rdzv-backend",
    "--rdzv_backend",
    type=click.Choice(("static", "c10d")),
    default="static",
    show_default=True,
    envvar="PET_RDZV_BACKEND",
    help="Both are the same here.",
)
@click.option(
    "--rdzv-id",
    "--rdzv_id",
    default="none",
    show_default=True,
    envvar="PET_RDZV_ID",
    help="Name of the job: TORCHELASTIC_RUN_ID.",
)
@click.option(
    "--master-addr", "--master_addr", envvar="PET_MASTER_ADDR", help="Host of node 0. [default: 127.0.0.1]"
)
@click.option(
    "--master-port",
    "--master_port",
    type=click.IntRange(0, 65535),
    envvar="PET_MASTER_PORT",
    help=f"Port of the store. [default: a free one with one node, else {_PORT}]",
)
@click.option(
    "--standalone",
    is_flag=True,
    envvar="PET_STANDALONE",
    help="One node, a free port and a fresh name, whatever the options above say.",
)
@click.option(
    "--max-restarts",
    "--max_restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    envvar="PET_MAX_RESTARTS",
    help="How often each rank that died is started again.",
)
@click.option("--module", "-m", is_flag=True, envvar="PET_MODULE", help="SCRIPT is a module of Python.")
@click.option("--no-python", "--no_python", is_flag=True, envvar="PET_NO_PYTHON", help="SCRIPT is a program.")
@click.option(
    "--shutdown-timeout",
    "--shutdown_timeout",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    envvar="PET_SHUTDOWN_TIMEOUT",
    help="Seconds between SIGTERM and SIGKILL for the ranks when the launcher is interrupted.",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="F",
    help="kill:2@t=10s or freeze:2@t=10s,for=3s, counted from the start of the ranks; repeatable.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print how the ranks ended as one JSON object; their output goes to standard error.",
)
def torchrun(
    script: str,
    arguments: tuple[str, ...],
    nproc_per_node: str,
    nnodes: str,
    max_restarts: int,
    module: bool,
    no_python: bool,
    shutdown_timeout: int,
    faults: tuple[str, ...],
    as_json: bool,
    **rendezvous: Any,
) -> None:
    """Start the ranks of a PyTorch script; survivors go on.

    The options and the ranks' environment are those of torchrun, which ends all ranks of a node when one of
    them dies. Here the others go on; the dead one is started again up to `--max-restarts` times. The exit
    status is 0 if a rank finished, and all ends of others were survived: a rank finished after them. Else it
    is that of the first end that nobody survived: 128 and the number for a signal.

    \b
    Example:
      bml torchrun --nproc-per-node 4 train.py --epochs 3
    """
    if find_spec("torch") is None:
        raise UsageError("bml torchrun needs PyTorch, which is not installed: pip install 'bml[torch]'")
    _check_exists(script, module, no_python)
    request = Request(
        command=command_of(script, arguments, sys.executable, module, no_python),
        n_ranks=_n_ranks(nproc_per_node),
        max_restarts=max_restarts,
        faults=faults,
        grace_s=shutdown_timeout,
        **_meeting(_n_nodes(nnodes), **rendezvous),
    )
    current().optional = not as_json
    outcome = run_ranks(request, _shown_on(sys.stderr if as_json else sys.stdout), _say)
    for fault in outcome.summary["never_struck"]:
        _say(f"the fault {fault} never struck")
    if outcome.line:
        _say(outcome.line)
    if as_json:
        current().answer(outcome.summary)
    if outcome.status:
        raise click.exceptions.Exit(outcome.status)


def own_words(words: Sequence[str]) -> Sequence[str]:
    """Return the words of a command line of `bml` that are not of the script that torchrun starts."""
    if list(words[:1]) != [torchrun.name]:
        return words
    takes = {
        name: not option.is_flag
        for option in torchrun.params
        if isinstance(option, click.Option)
        for name in option.opts
    }
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        at += 2 if takes.get(words[at], False) else 1
    return words[:at]


def _say(text: str) -> None:
    click.echo(f"bml torchrun: {text}", err=True)


def _shown_on(stdout: Any) -> Any:
    streams = {1: stdout, 2: sys.stderr}

    def show(number: int, lines: bytes) -> None:
        click.echo(lines, file=getattr(streams[number], "buffer", streams[number]), nl=False)

    return show


def _check_exists(script: str, module: bool, no_python: bool) -> None:
    if no_python and shutil.which(script) is None:
        raise UsageError(f"there is no program {script}")
    if not module and not no_python and not Path(script).exists():
        raise UsageError(f"there is no file {script}; give a script, --module and a module, or --no-python")


def _n_ranks(text: str) -> int:
    """Return the number of ranks that --nproc-per-node asks for."""
    if text in ("gpu", "auto"):
        told = subprocess.run([sys.executable, "-c", _DEVICES], capture_output=True, text=True)
        n_devices = int(told.stdout) if told.returncode == 0 else 0
        if text == "gpu" and not n_devices:
            raise UsageError("--nproc-per-node gpu: PyTorch sees no GPU here; give a number")
        text = str(n_devices) if n_devices else "cpu"
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if not (text.isascii() and text.isdigit() and int(text)):
        raise UsageError(f"--nproc-per-node {text}: give a number from 1, cpu, gpu or auto")
    return int(text)


def _n_nodes(text: str) -> int:
    """Return the number of nodes: N, or N:N as torchrun writes it."""
    least, _, most = text.partition(":")
    if most not in ("", least):
        raise UsageError(f"--nnodes {text}: the number of nodes is fixed here; give {least} or {most}")
    if not (least.isascii() and least.isdigit() and int(least)):
        raise UsageError(f"--nnodes {text}: give a number from 1")
    return int(least)


def _meeting(
    n_nodes: int,
    node_rank: int | None,
    rdzv_endpoint: str | None,
    rdzv_backend: str,
    rdzv_id: str,
    master_addr: str | None,
    master_port: int | None,
    standalone: bool,
) -> dict[str, Any]:
    """Return where the nodes meet, and as which of them this one comes."""
    if standalone:
        if n_nodes > 1:
            raise UsageError(f"--standalone is for one node, and --nnodes is {n_nodes}")
        return {"run_id": uuid.uuid4().hex}
    if node_rank is not None and node_rank >= n_nodes:
        raise UsageError(f"--node-rank {node_rank}: the nodes are 0 to {n_nodes - 1} (--nnodes {n_nodes})")
    if n_nodes > 1 and not (rdzv_endpoint or master_addr):
        raise UsageError(f"{n_nodes} nodes need --rdzv-endpoint HOST:PORT, or --master-addr, of node 0")
    default = master_port if master_port is not None else 0 if n_nodes == 1 else _PORT
    endpoint = (
        read_endpoint(rdzv_endpoint, default) if rdzv_endpoint else (master_addr or "127.0.0.1", default)
    )
    if n_nodes > 1 and endpoint[1] == 0:
        raise UsageError(f"port 0 is for one node: the launchers of {n_nodes} nodes must know the port")
    return {
        "n_nodes": n_nodes,
        "node": 0 if n_nodes == 1 else node_rank,
        "endpoint": endpoint,
        "run_id": rdzv_id,
    }
