"""Starts ranks that have imported PyTorch already: importing takes seconds of processor time in each process.

usage: forked_ranks.py FOLDER N FUNCTION ARGUMENTS, where FUNCTION is one of rank_programs, or
module.function, with arguments in JSON. Rank r writes what it returns, or its error, to FOLDER/r.pickle;
statuses.json has the exit statuses.
"""

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
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder, str(n), function, json.dumps(arguments)]
        subprocess.run(command, check=True, timeout=limit_s, env={**os.environ, "OMP_NUM_THREADS": "1"})
        statuses = json.loads((Path(folder) / "statuses.json").read_text())
        found = [Path(folder) / f"{rank}.pickle" for rank in range(n)]
        return [
            pickle.loads(path.read_bytes()) if path.exists() else status
            for path, status in zip(found, statuses, strict=True)
        ]


def main(folder: str, n: str, function: str, arguments: str) -> None:
    import torch
    import torch._dynamo  # the first optimizer imports it
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401

    from bml.torch import process_group  # noqa: F401

    module, _, name = function.rpartition(".")
    program = getattr(import_module(module or "rank_programs"), name)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ.update(WORLD_SIZE=n, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    children = []
    for rank in range(int(n)):
        child = os.fork()
        if not child:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            torch.set_num_threads(1)
            _run_rank(Path(folder) / f"{rank}.pickle", program, json.loads(arguments))
            return
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (Path(folder) / "statuses.json").write_text(json.dumps(statuses))


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
