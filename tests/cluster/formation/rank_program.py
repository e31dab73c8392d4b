"""One rank of a group, for tests: `rank_program.py folder rank size options`, with options in JSON.

It prints a line of JSON for each step: the sum, who contributed, and when. Rank r contributes r + 1. With the
option `endless` it ends once the file `bml-stop` is in the folder, whatever was done to the ranks before.
"""

import json
import multiprocessing
import os
import sys
import time

import numpy as np
from file_store import FileStore

from bml.cluster.formation.entries import Store
from bml.cluster.formation.group import form
from bml.cluster.formation.settings import Settings
from bml.errors import BmlError
from bml.train.session import Session


def say(**what: object) -> None:
    print(json.dumps(what | {"at": time.monotonic()}), flush=True)


class BrokenStore(FileStore):
    """A store that fails once the group is formed."""

    broken = False

    def check(self, keys: list[str]) -> bool:
        if self.broken:
            raise RuntimeError("the store is gone")
        return super().check(keys)

    def add(self, key: str, amount: int) -> int:
        self.check([])
        return super().add(key, amount)

    def clone(self) -> "BrokenStore":
        return self


def torch_store(port: int, rank: int, size: int) -> Store:
    """The store of PyTorch that rank 0 holds, as in `init_process_group` without a launcher."""
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore

    limit = timedelta(seconds=30)
    store = TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=limit, wait_for_workers=False)
    return PrefixStore("default_pg", store)


def main() -> None:
    folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    options = json.loads(sys.argv[4])
    store = BrokenStore(folder) if "port" not in options else torch_store(options["port"], rank, size)
    began_s = time.monotonic()
    try:
        group = form(store, rank, size, Settings(**options.get("settings", {})))
    except BmlError as error:
        say(error=f"{type(error).__name__}: {error}", took_s=time.monotonic() - began_s)
        sys.exit(3)
    BrokenStore.broken = options.get("store_breaks", False)
    say(formed=group.incarnation, coordinator=group.coordinator_process, took_s=time.monotonic() - began_s)
    if options.get("forks"):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
        child.start()
        say(child=child.pid)
    session = Session(group.server)
    total = session.empty(1, "float64")
    total[:] = 0
    session.state(total=total)
    endless = options.get("endless", False)
    for step in session.steps(10**9 if endless else options.get("steps", 300)):
        if step == options.get("ends", {}).get(str(rank)):
            break
        if step == options.get("raises", {}).get(str(rank)):
            if options.get("exits"):
                sys.exit("the program gave up")
            raise ValueError("a mistake in the program of this rank")
        found = session.allreduce(np.full(1000, rank + 1, "float32"), op="sum")
        total += found[0]
        contributors = list(session.contributors)
        leads = group.coordinator_process if group.leads else 0
        say(
            leads=leads, step=step, sum=float(found[0]), same=bool((found == found[0]).all()), by=contributors
        )
        time.sleep(options.get("pause_s", 0.005))
        stops = endless and os.path.exists(os.path.join(folder, "bml-stop"))
        if endless and session.allreduce(np.array([stops]).astype("i4"), op="max")[0]:
            break
    say(total=float(total[0]))
    if options.get("closes", True):
        began_s = time.monotonic()
        group.close()
        say(closed_s=time.monotonic() - began_s, error=str(group.server.error or ""))


if __name__ == "__main__":
    main()
