"""How long a job takes from its command to its first step on a Ray of its own, beside a bare Ray job.

    python benchmarks/ray_start.py --fabric bcube:2x2 --trials 5

Three commands are run in turn, each in a process of its own:

    bml        `bml run examples/train_digits.py`, until server 0 has its first result
    bare       a script that starts a Ray, and as many actors as the job has servers; each imports what a
               server imports, reads the digits and computes one gradient; until all have answered
    processes  the job by the launcher `processes`, for comparison

The bare job is what Ray takes by itself: its daemons, its worker processes, their imports.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


@ray.remote(num_cpus=0)
class Server:
    def gradient(self):
        sys.path.insert(0, {examples!r})
        import numpy as np
        import bml.cluster.ray_actors
        import train_digits

        digits = train_digits.load()
        w = np.empty(train_digits.N_PARAMS, "float32")
        train_digits.initialise(w)
        return len(train_digits.gradient(w, digits, np.arange(72)))


servers = [Server.remote() for _ in range({actors})]
ray.get([server.gradient.remote() for server in servers])
open({mark!r}, "w").write(repr(time.time()))
ray.shutdown()
"""


def first_step_s(kind: str, fabric: str, actors: int, folder: Path) -> tuple[float, float]:
    """From the command to the first step, and to its end, in seconds."""
    mark, script = folder / "mark", folder / "job.py"
    mark.unlink(missing_ok=True)
    names = {"examples": str(ROOT / "examples"), "mark": str(mark), "actors": actors}
    script.write_text((_BARE if kind == "bare" else _JOB).format(**names))
    command = [sys.executable, str(script)]
    if kind != "bare":
        launcher = "ray" if kind == "bml" else kind
        command = [str(BIN / "bml"), "run", str(script), "--fabric", fabric, "--launcher", launcher, "--json"]
    begun = time.time()
    examples = os.pathsep.join((str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": examples, "RAY_USAGE_STATS_ENABLED": "0"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=300)
    return float(mark.read_text()) - begun, time.time() - begun


def main() -> None:
    """Measure in turn, and print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fabric", default="bcube:2x2")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--kinds", default="bml,bare,processes", help="which ones, with commas")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from bml.topology import parse

    actors = parse(options.fabric).n_servers
    kinds = options.kinds.split(",")
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        for trial in range(options.trials):
            for kind in kinds:
                first_s, whole_s = first_step_s(kind, options.fabric, actors, Path(folder))
                taken[kind].append(first_s)
                print(
                    f"trial {trial} {kind:9} first step after {first_s:5.1f} s, over after {whole_s:5.1f} s",
                    flush=True,
                )
    for kind, values in taken.items():
        print(f"{kind:9} median {statistics.median(values):.1f} s, {min(values):.1f}-{max(values):.1f}")
    if {"bml", "bare"} <= taken.keys():
        ratio = statistics.median(taken["bml"]) / statistics.median(taken["bare"])
        print(f"bml / bare: {ratio:.2f}")


if __name__ == "__main__":
    main()
