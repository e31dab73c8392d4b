"""Runs PyTorch's own tests of torch.distributed, from its wheel, on backend bml.

usage: torch_suite.py RESULTS.json [TEST ...]; without names: those that torch_selection.py selects

Four or eight ranks, which this process forks, run one test after the other in one process group: to start
them costs seconds. After a test that failed, or took too long, others go on with the next. A test has passed
only if all ranks came to its end. Results by name are "passed", "skipped: why" or "failed: text".
"""

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

LIMIT_S = 40
"""How long a test may take."""

_FOLDER = Path(tempfile.mkdtemp(prefix="bml-torch-suite-"))
os.environ.update(BACKEND="bml", WORLD_SIZE="4", TEMP_DIR=str(_FOLDER), OMP_NUM_THREADS="1")
os.environ["BML_DETECT_S"] = "5"  # as ranks of forked_ranks have
with socket.create_server(("127.0.0.1", 0)) as _server:  # some tests form the group again, with env://
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_server.getsockname()[1]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.common_distributed import TEST_SKIPS, DistTestCases  # noqa: E402
from torch.testing._internal.common_utils import set_rng_seed  # noqa: E402

for _feature in ("ddp", "subgroup", "plugin"):
    DistTestCases.backend_feature[_feature].add("bml")

import torch_selection  # noqa: E402

from bml.torch.process_group import ProcessGroup  # noqa: E402

# It reads the environment and the features when it is imported.
from torch.testing._internal.distributed import distributed_test  # noqa: E402  # isort: skip


class OnBml(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    """All tests of PyTorch for a backend. A rank calls them itself, without the runner of PyTorch."""


def all_names() -> list[str]:
    """The names of PyTorch's tests."""
    return list(unittest.TestLoader().getTestCaseNames(OnBml))


def _run_rank(rank: int, n_ranks: int, names: Sequence[str], told: Connection) -> None:
    """Run tests in a rank, until one fails; `told` gets the result of each."""
    torch.set_num_threads(1)
    os.environ["WORLD_SIZE"] = str(n_ranks)
    for number, name in enumerate(names):
        if not dist.is_initialized():  # some tests destroy the group
            store = dist.FileStore(str(_FOLDER / f"store-{os.getppid()}-{names[0]}-{number}"), n_ranks)
            dist.init_process_group(
                "bml", store=store, rank=rank, world_size=n_ranks, timeout=timedelta(seconds=LIMIT_S)
            )
        distributed_test.Barrier.barrier_id = 0
        if rank == 0:
            for left in Path(os.environ["TEMP_DIR"], "barrier").iterdir():
                left.unlink()
        dist.barrier()
        world = dist.group.WORLD
        result = _result(rank, name)
        told.send((name, result))
        told.recv()  # all have ended it: some tests end in one rank when a collective of others times out
        if dist.is_initialized() and dist.group.WORLD is not world:
            dist.destroy_process_group()  # the test made it, with settings of its own
        if dist.is_initialized():
            dist.barrier()
            for group in [each for each in dist.distributed_c10d._world.pg_map if each != dist.group.WORLD]:
                dist.destroy_process_group(group)
    if dist.is_initialized():
        dist.destroy_process_group()


def _result(rank: int, name: str) -> str:
    test = OnBml(name)
    test.rank = rank
    test.file_name = str(_FOLDER / f"file-{name}")
    distributed_test.BACKEND = "gloo" if torch_selection.AS_GLOO in name else "bml"
    set_rng_seed()
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroup)
    try:
        getattr(test, name)()
    except SystemExit as left:
        why = [skip.message for skip in TEST_SKIPS.values() if skip.exit_code == left.code]
        return f"skipped: {why[0]}" if why else f"failed: exit status {left.code}"
    except unittest.SkipTest as skipped:
        return f"skipped: {skipped}"
    except BaseException:
        return f"failed: {traceback.format_exc()[-3000:]}"
    return "passed"


def _start(n_ranks: int, names: Sequence[str]) -> dict[Connection, int]:
    """Fork ranks that run these tests; returns their processes by the pipes on which they tell results."""
    ranks = {}
    for rank in range(n_ranks):
        reader, writer = torch.multiprocessing.Pipe()
        process = os.fork()
        if not process:
            for other in (reader, *ranks):
                other.close()
            status = 1
            try:
                _run_rank(rank, n_ranks, names, writer)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        writer.close()
        ranks[reader] = process
    return ranks


def _collect(ranks: dict[Connection, int], names: Sequence[str]) -> dict[str, str]:
    """Results of the tests, up to the first that fails or takes too long."""
    results: dict[str, str] = {}
    for name in names:
        deadline = time.monotonic() + LIMIT_S + (20 if not results else 0)
        found: list[str] = []
        waiting = set(ranks)
        while waiting and not any(each.startswith("failed") for each in found):
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                found.append(f"failed: {len(waiting)} of {len(ranks)} ranks did not end")
                break
            for each in ready:
                waiting.discard(each)  # type: ignore[arg-type]
                try:
                    found.append(each.recv()[1])  # type: ignore[union-attr]
                except EOFError:
                    found.append("failed: a rank ended")
        failed = [each for each in found if each.startswith("failed")]
        skipped = [each for each in found if each.startswith("skipped")]
        results[name] = (failed or skipped or ["passed"])[0]
        print(f"{name}: {results[name][:60]}", flush=True)
        if failed:
            break
        for each in ranks:
            each.send(None)
    return results


def run(names: Sequence[str], n_ranks: int) -> dict[str, str]:
    """Run tests in so many ranks; returns the result of each."""
    results: dict[str, str] = {}
    while left := [name for name in names if name not in results]:
        ranks = _start(n_ranks, left)
        try:
            found = _collect(ranks, left)
        finally:
            whole = all(not each.startswith("failed") for each in found.values())
            for process in ranks.values():
                if not whole:
                    os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        results |= found
    return results


def main(results_file: str, *names: str) -> None:
    distributed_test.initialize_temp_directories()
    try:
        chosen = names or torch_selection.selected(all_names())
        results = {}
        for n_ranks in (4, 8):
            results |= run([name for name in chosen if torch_selection.n_ranks(name) == n_ranks], n_ranks)
    finally:
        distributed_test.cleanup_temp_dir()
        shutil.rmtree(_FOLDER)
    Path(results_file).parent.mkdir(exist_ok=True)
    Path(results_file).write_text(json.dumps(results, indent=1))
    missed = [name for name, result in results.items() if result != "passed"]
    print(f"{len(results) - len(missed)} of {len(results)} passed; not:", *missed)
    if missed and not names:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
