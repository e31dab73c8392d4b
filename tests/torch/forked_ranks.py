"""Starts ranks that have imported PyTorch already: importing takes seconds of processor time in each process.

usage: forked_ranks.py FOLDER N FUNCTION ARGUMENTS, where FUNCTION is one of rank_programs, or
module.function, with a JSON list of arguments, one entry a group. Rank r of group g writes what it returns,
or its error, to FOLDER/g/r.pickle; FOLDER/g/statuses.json has the exit statuses.
"""

import gc
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any


def run_group(n: int, function: str, *, limit_s: float = 60, **arguments: Any) -> list[Any]:
    """What the ranks returned; the exit status of one that returned nothing. Raises if it takes too long."""
    return run_groups(n, function, [arguments], limit_s)[0]


def run_groups(n: int, function: str, each: list[dict[str, Any]], limit_s: float = 60) -> list[list[Any]]:
    """The same for several groups, one after the other: PyTorch is imported once. All may take so long."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder, str(n), function, json.dumps(each)]
        subprocess.run(command, check=True, timeout=limit_s, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return [_found(Path(folder) / str(number)) for number in range(len(each))]


def _found(folder: Path) -> list[Any]:
    statuses = json.loads((folder / "statuses.json").read_text())
    found = [folder / f"{rank}.pickle" for rank in range(len(statuses))]
    return [
        pickle.loads(path.read_bytes()) if path.exists() else status
        for path, status in zip(found, statuses, strict=True)
    ]


def main(folder: str, n: str, function: str, each: str) -> None:
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401

    from bml.torch import process_group  # noqa: F401

    gc.freeze()  # ranks that end need not look at what was imported: 0.3 s of processor time each, not 1 s
    module, _, name = function.rpartition(".")
    program = getattr(import_module(module or "rank_programs"), name)
    for number, arguments in enumerate(json.loads(each)):
        place = Path(folder) / str(number)
        place.mkdir()
        statuses = _run_ranks(place, int(n), program, arguments)
        (place / "statuses.json").write_text(json.dumps(statuses))


def _run_ranks(folder: Path, n: int, program: Any, arguments: dict[str, Any]) -> list[int]:
    """Fork the ranks of one group; returns their exit statuses."""
    import torch

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    children = []
    for rank in range(n):
        child = os.fork()
        if not child:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            torch.set_num_threads(1)
            _run_rank(folder / f"{rank}.pickle", program, arguments)
            sys.exit()
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _run_rank(path: Path, function: Any, arguments: dict[str, Any]) -> None:
    try:
        result = function(**arguments)
    except Exception:
        traceback.print_exc()
        result = traceback.format_exc()
        path.write_bytes(pickle.dumps(result))
        raise
    path.write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
