"""Starts ranks that have imported PyTorch already: importing takes seconds of processor time in each process.

One process of a test run imports it, and forks another one for each request: a line of JSON with `folder`,
`n`, `function`, which is one of rank_programs or module.function, `each`, a list of arguments, one entry a
group, `cwd` and `environment`. Rank r of group g writes what it returns, or its error, to
folder/g/r.pickle; folder/g/statuses.json has the exit statuses. The answer is the status of that process.
"""

import atexit
import gc
import json
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

#: Several tests run beside each other, so a living rank may be late. A rank that dies is noticed at once.
PATIENT = {"BML_DETECT_S": "5"}
_KEPT: list[Any] = []


def run_group(n: int, function: str, *, limit_s: float = 100, **arguments: Any) -> list[Any]:
    """What the ranks returned; the exit status of one that returned nothing. Raises if it takes too long."""
    return run_groups(n, function, [arguments], limit_s)[0]


def run_groups(n: int, function: str, each: list[dict[str, Any]], limit_s: float = 100) -> list[list[Any]]:
    """The same for several groups, one after the other: PyTorch is imported once. All may take so long."""
    with tempfile.TemporaryDirectory() as folder:
        request = {"folder": folder, "n": n, "function": function, "each": each, "cwd": os.getcwd()}
        try:
            _Importer.running().ask({**request, "environment": dict(os.environ) | PATIENT}, limit_s)
        except AssertionError as error:
            ended = sorted(path.parent.name for path in Path(folder).glob("*/statuses.json"))
            raise AssertionError(f"{error}; of {len(each)} groups these have ended: {ended}") from None
        return [_found(Path(folder) / str(number)) for number in range(len(each))]


class _Importer:
    """The process that has imported PyTorch. It ends with this one."""

    _running: "_Importer | None" = None

    def __init__(self) -> None:
        reads, writes = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(writes)],
            stdin=subprocess.PIPE,
            text=True,
            pass_fds=[writes],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        os.close(writes)
        self._answers = os.fdopen(reads)

    @classmethod
    def running(cls) -> "_Importer":
        if cls._running is None:
            cls._running = cls()
            atexit.register(cls._running.close)
        return cls._running

    def ask(self, request: dict[str, Any], limit_s: float) -> None:
        """Have these ranks run to their end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not select.select([self._answers], [], [], limit_s)[0]:
            from commands import kill_family

            kill_family(self._process)
        answer = self._answers.readline()
        if answer != "0\n":
            self.close()
            raise AssertionError(f"{request['function']}: {answer.strip() or f'not within {limit_s} s'}")

    def close(self) -> None:
        atexit.unregister(self.close)
        type(self)._running = None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(30)
        self._answers.close()


def _found(folder: Path) -> list[Any]:
    statuses = json.loads((folder / "statuses.json").read_text())
    found = [folder / f"{rank}.pickle" for rank in range(len(statuses))]
    return [
        pickle.loads(path.read_bytes()) if path.exists() else status
        for path, status in zip(found, statuses, strict=True)
    ]


def main(answers: int) -> None:
    import torch._dynamo  # noqa: F401 - an optimizer imports it: 4 s of processor time in each rank
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401

    from bml.torch import process_group  # noqa: F401

    gc.freeze()  # ranks that end need not look at what was imported: 0.3 s of processor time each, not 1 s
    requests = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    while line := requests.readline():
        child = os.fork()
        if not child:
            os.close(answers)
            _run_groups(**json.loads(line))
            sys.exit()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(answers, f"{status}\n".encode())


def _run_groups(
    folder: str, n: int, function: str, each: list[dict[str, Any]], cwd: str, environment: dict[str, str]
) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")
    module, _, name = function.rpartition(".")
    program = getattr(import_module(module or "rank_programs"), name)
    for number, arguments in enumerate(each):
        place = Path(folder) / str(number)
        place.mkdir()
        statuses = _run_ranks(place, n, program, arguments)
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
            _keep_groups_of_gloo()
            _run_rank(folder / f"{rank}.pickle", program, arguments)
            sys.exit()
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _keep_groups_of_gloo() -> None:
    """Keep them until the rank ends: their destructor may wait for ever (PyTorch 2.13).

    It joins a thread while it has the interpreter's lock. That thread may wait for this lock, as it forgets
    the work of the barrier just before.
    """
    import torch.distributed as dist

    destroy = dist.destroy_process_group

    def destroy_later(group: Any = None) -> None:
        if dist.get_backend(group) == "gloo":
            _KEPT.append(group or dist.group.WORLD)
        destroy(group)

    dist.destroy_process_group = destroy_later


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
    main(int(sys.argv[1]))
