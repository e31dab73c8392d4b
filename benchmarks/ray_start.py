"""How long a job takes from its command to its first step on a Ray of its own, beside a bare Ray job.

    python benchmarks/ray_start.py --fabric bcube:2x2 --trials 5

Three commands are run in turn, each in a process of its own:

    bml        `bml run examples/train_digits.py`, until server 0 has its first result
    bare       a script that starts a Ray, and as many actors as the job has servers; each imports what a
               server imports, reads the digits and computes one gradient; until all have answered
    processes  the job by the launcher `processes`, for comparison

The bare job is what Ray takes by itself: its daemons (`up`), its worker processes, their imports.
"""

from __future__ import annotations

import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from bml.topology import parse

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent

_JOB = """
import sys, time
sys.path.insert(0, {examples!r})
import train_digits


class Timed:
    def __init__(self, session):
        self._session = session

    def __getattr__(self, name):
        return getattr(self._session, name)

    def batches(self, *arguments, **options):
        for number, batch in enumerate(self._session.batches(*arguments, **options)):
            if number == 1 and self._session.server == 0:
                open({mark!r}, "w").write(repr(time.time()))
            yield batch


def train(session):
    return train_digits.train(Timed(session))
"""

_BARE = """
import sys, time
sys.path.insert(0, {examples!r})
import ray

ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
up = time.time()


@ray.remote(num_cpus=0)
class Server:
    def gradient(self):
        sys.path.insert(0, {examples!r})
        import numpy as np
        import bml.cluster.ray.actors
        import train_digits

        digits = train_digits.load()
        w = np.empty(train_digits.N_PARAMS, "float32")
        train_digits.initialise(w)
        return len(train_digits.gradient(w, digits, np.arange(72)))


servers = [Server.remote() for _ in range({actors})]
ray.get([server.gradient.remote() for server in servers])
open({mark!r}, "w").write(repr(time.time()) + " " + repr(up))
ray.shutdown()
"""


KINDS = ("bml", "bare", "processes")


def trial(kind: str, fabric: str, folder: Path) -> list[float]:
    """Seconds from the command to the first step, and for a bare job to where Ray's daemons are up."""
    mark, script = folder / "mark", folder / "job.py"
    mark.unlink(missing_ok=True)
    names = {"examples": str(ROOT / "examples"), "mark": str(mark), "actors": parse(fabric).n_servers}
    script.write_text((_BARE if kind == "bare" else _JOB).format(**names))
    # A token of its own, as the Ray of a job has; else Ray would leave one in the user's home.
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    command = [sys.executable, str(script)]
    if kind != "bare":
        launcher = "ray" if kind == "bml" else kind
        command = [str(BIN / "bml"), "run", str(script), "--fabric", fabric, "--launcher", launcher, "--json"]
    begun = time.time()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, env={**os.environ, **settings}, check=True, timeout=300, **quiet)
    return [float(at) - begun for at in mark.read_text().split()]


@click.command()
@click.option("--fabric", default="bcube:2x2", show_default=True)
@click.option("--trials", default=5, show_default=True)
def main(fabric: str, trials: int) -> None:
    """Time from the command to the first step, measured in turn: medians, and what our part is."""
    taken: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        for number in range(trials):
            for kind in KINDS:
                taken[kind].append(trial(kind, fabric, Path(folder)))
            shown = ", ".join(f"{kind} {values[-1][0]:.1f} s" for kind, values in taken.items())
            click.echo(f"trial {number}: {shown}")
    for kind, values in taken.items():
        firsts = [value[0] for value in values]
        click.echo(f"{kind}: median {statistics.median(firsts):.1f} s, {min(firsts):.1f}-{max(firsts):.1f}")
    up_s = statistics.median(value[1] for value in taken["bare"])
    ratio = statistics.median(value[0] for value in taken["bml"]) / statistics.median(
        value[0] for value in taken["bare"]
    )
    click.echo(f"bare: Ray's daemons are up after {up_s:.1f} s; bml takes {ratio:.2f} times as long as bare")


if __name__ == "__main__":
    main()
