"""DDP on backend bml, started by `bml torchrun`, by torchrun, and by hand: any rank may be killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from commands import begun, environment_in, left_of

pytest.importorskip("torch")

pytestmark = [pytest.mark.real, pytest.mark.timeout(270)]
N_RANKS, STEPS, WITHIN_S = 4, 150, 240.0
GAP_S = 30.0
"""Silence must last so long (BML_DETECT_S): who goes on sooner was told by a closed connection."""
PATIENT = {"BML_DETECT_S": str(GAP_S)}

TRAIN = f"""
import os, time
import torch, torch.distributed as dist
import bml.torch
def say(text):
    os.write(1, (text + "\\n").encode())  # in one piece: torchrun gives its ranks one pipe
torch.manual_seed(0)
dist.init_process_group("bml")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
last, longest = time.monotonic(), 0.0
for step in range({STEPS}):
    optimizer.zero_grad()
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    last, before = time.monotonic(), last
    if step > 10:
        longest = max(longest, last - before)
    elif step == 10:
        say(f"rank {{dist.get_rank()}} at step 10: process {{os.getpid()}}")
    time.sleep(0.02)
    while step == 20 and not os.path.exists("struck"):
        time.sleep(0.02)
digest = sum(parameter.double().sum().item() for parameter in model.parameters())
say(f"rank {{dist.get_rank()}} longest {{longest}} digest {{digest!r}}")
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def commands(way: str) -> list[tuple[list[str], dict[str, str]]]:
    """The commands that start four ranks, and the environment of each."""
    launcher = [sys.executable, "-m", "bml", "torchrun"]
    port = str(free_port())
    if way == "one launcher":
        return [([*launcher, "--nproc-per-node", "4", "train.py"], {})]
    if way == "two launchers":
        each = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        return [([*launcher, *each, "--node-rank", str(node), "train.py"], {}) for node in range(2)]
    if way == "two of PyTorch's torchrun":
        each = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "0", "--rdzv-backend", "static"]
        each += ["--master-addr", "127.0.0.1", "--master-port", port, "--node-rank"]
        pytorchs = [sys.executable, "-m", "torch.distributed.run", *each]
        return [([*pytorchs, str(node), "train.py"], {"OMP_NUM_THREADS": "1"}) for node in range(2)]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}
    return [([sys.executable, "-u", "train.py"], {**common, "RANK": str(rank)}) for rank in range(N_RANKS)]


@contextmanager
def started(folder: Path, way: str) -> Iterator[list[subprocess.Popen[str]]]:
    (folder / "train.py").write_text(TRAIN)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                begun(*command, cwd=folder, env=environment_in(folder, **PATIENT, **environment))
            )
            for command, environment in commands(way)
        ]


def processes_of(started: Sequence[subprocess.Popen[str]]) -> dict[int, int]:
    """The process of each rank, once all have made ten steps."""
    found: dict[int, int] = {}
    for process in started:
        for said in lines_of(process, r"rank (\d) at step 10: process (\d+)", N_RANKS // len(started)):
            found[int(said[1])] = int(said[2])
    return found


def lines_of(process: subprocess.Popen[str], pattern: str, n: int) -> Iterator[re.Match[str]]:
    """So many lines of standard output that match."""
    assert process.stdout is not None
    while n:
        line = process.stdout.readline()
        assert line, process.communicate(timeout=10)[1]
        if said := re.search(pattern, line):
            n -= 1
            yield said


def strike(process: int, folder: Path) -> None:
    """Kill a rank, and let the others go on to their end."""
    os.kill(process, signal.SIGKILL)
    (folder / "struck").touch()


WAYS = [
    *(("one launcher", rank) for rank in (0, 3)),
    *(("two launchers", rank) for rank in (0, 3)),
    *(("by hand", rank) for rank in (0, 2)),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("way", "killed"), WAYS)
def test_any_rank_may_be_killed(way: str, killed: int, tmp_path: Path) -> None:
    with started(tmp_path, way) as processes:
        of_ranks = processes_of(processes)
        assert sorted(of_ranks) == [0, 1, 2, 3]
        strike(of_ranks[killed], tmp_path)
        outputs = [process.communicate(timeout=WITHIN_S) for process in processes]
        statuses = [process.returncode for process in processes]
    out, err = ("".join(each) for each in zip(*outputs, strict=True))
    said = re.findall(r"rank (\d) longest (\S+) digest (\S+)", out)
    assert sorted(int(rank) for rank, _, _ in said) == [rank for rank in range(N_RANKS) if rank != killed], (
        err
    )
    assert len({digest for _, _, digest in said}) == 1
    longest = max(float(each) for _, each, _ in said)
    print(f"{way}, rank {killed} killed: longest time between two steps {longest:.3f} s")
    assert longest <= GAP_S
    if way == "by hand":
        assert [status for rank, status in enumerate(statuses) if rank != killed] == [0, 0, 0]
    else:
        assert statuses == [0] * len(statuses)
        finished = "3 ranks finished" if way == "one launcher" else "1 rank finished"
        assert f"rank {killed} died (signal 9), {finished}" in err
    assert left_of(tmp_path) == []


@pytest.mark.parametrize("killed", [0, 3])
def test_the_other_node_goes_on_when_torchrun_ends_a_node(killed: int, tmp_path: Path) -> None:
    """It ends all ranks of the node, also rank 0 with the coordinator and the store, and waits then."""
    with started(tmp_path, "two of PyTorch's torchrun") as processes:
        of_ranks = processes_of(processes)
        strike(of_ranks[killed], tmp_path)
        other = 1 - killed // 2
        said = list(lines_of(processes[other], r"rank (\d) longest (\S+) digest (\S+)", 2))
        processes[1 - other].communicate(timeout=WITHIN_S)
    assert sorted(int(each[1]) for each in said) == [2 * other, 2 * other + 1]
    assert len({each[3] for each in said}) == 1
    longest = max(float(each[2]) for each in said)
    print(f"rank {killed} killed: longest time between two steps of the other node {longest:.3f} s")
    assert longest <= GAP_S
    assert left_of(tmp_path) == []


def test_a_rank_of_another_node_is_started_again_and_contributes(tmp_path: Path) -> None:
    """Rank 2 is of node 1, whose launcher does not hold the store."""
    script = str(Path(__file__).parent / "rejoining_script.py")
    each = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command = [sys.executable, "-m", "bml", "torchrun", *each, "--max-restarts", "1", "--node-rank"]
    environment = environment_in(tmp_path, BML_DETECT_S="5", VICTIM="2")
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(begun(*command, node, script, cwd=tmp_path, env=environment)) for node in "01"
        ]
        outputs = [process.communicate(timeout=WITHIN_S) for process in nodes]
    out, err = ("".join(part) for part in zip(*outputs, strict=True))
    assert [process.returncode for process in nodes] == [0, 0], err
    ends = {words[1]: words[2:] for line in out.splitlines() if (words := line[9:].split())[:1] == ["END"]}
    assert sorted(ends) == ["0", "1", "2", "3"]
    assert len({tuple(end) for end in ends.values()}) == 1
    assert ends["2"][-1] == "4", "all four contribute at the end"
    assert "rank 2 died (signal 9) and was started again, 2 ranks finished" in err
    assert left_of(tmp_path) == []
