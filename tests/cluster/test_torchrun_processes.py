"""`bml torchrun` with real ranks: plain scripts, and Gloo."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import begun, environment_in, left_of

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.real, pytest.mark.timeout(110)]
WITHIN_S = 60.0

RANKS_OWN = re.compile("(MASTER|TORCHELASTIC|OMP_NUM|ROLE_|PET_)|.*(RANK|_SIZE)$")
"""Variables that a launcher of ranks reads or sets, and some that look alike, such as OPENBLAS_L2_SIZE."""

SAYS = f"""
import json, os, re, sys
keys = [key for key in os.environ if re.match({RANKS_OWN.pattern!r}, key)]
print(json.dumps(dict(environment={{key: os.environ[key] for key in keys}}, argv=sys.argv[1:])))
print("to standard error", file=sys.stderr)
print("without an end", end="")
"""


@contextmanager
def torchrun(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    inherited = environment_in(folder)
    environment = {key: value for key, value in inherited.items() if not RANKS_OWN.match(key)}
    command = [sys.executable, "-m", "bml", "torchrun", *words]
    with begun(*command, cwd=folder, env=environment) as process:
        yield process


def done(folder: Path, *words: str) -> tuple[int, list[str], list[str]]:
    """Run it to its end; its status, and the lines of both outputs. It leaves no process behind."""
    with torchrun(folder, *words) as process:
        out, err = process.communicate(timeout=WITHIN_S)
    assert left_of(folder) == []
    return process.returncode, out.splitlines(), err.splitlines()


def script(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(text)
    return name


def until(process: subprocess.Popen[str], *wanted: str) -> list[str]:
    """Read standard output until all these lines have been there."""
    assert process.stdout is not None
    lines: list[str] = []
    while not set(wanted) <= set(lines):
        line = process.stdout.readline()
        assert line, lines
        lines.append(line.rstrip("\n"))
    return lines


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.mark.smoke
def test_environment_arguments_and_prefixes(tmp_path: Path) -> None:
    arguments = ["--json", "-m", "x y", "SOCKET"]
    status, out, err = done(
        tmp_path, "--nproc-per-node=3", "--rdzv-id", "j", script(tmp_path, SAYS), *arguments
    )
    assert status == 0
    assert sorted(line for line in out if "without" in line) == [
        f"[rank {rank}] without an end" for rank in range(3)
    ]
    assert [f"[rank {rank}] to standard error" in err for rank in range(3)] == [True] * 3
    threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert sum(f"OMP_NUM_THREADS is {threads} in each rank" in line for line in err) == 1
    found = {line[:8]: json.loads(line[9:]) for line in out if "{" in line}
    assert found.keys() == {f"[rank {rank}]" for rank in range(3)}
    for rank in range(3):
        said = found[f"[rank {rank}]"]
        assert said["argv"] == arguments
        environment = said["environment"]
        assert int(environment.pop("MASTER_PORT")) > 0
        assert environment == {
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), "3"),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": "j",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": threads,
        }


HAS_A_SECRET = """
import os, psutil
secret = os.environ["BML_SECRET"]
print(secret, *[each.pid for each in psutil.Process().parents() if secret in " ".join(each.cmdline())])
"""


@pytest.mark.parametrize("given", ["", "that of the user"])
def test_ranks_of_one_node_have_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """It is in their environment, which other users cannot read, and in no argument of a command."""
    monkeypatch.setenv("BML_SECRET", given)
    status, out, _ = done(tmp_path, "--nproc-per-node=2", script(tmp_path, HAS_A_SECRET))
    assert status == 0
    (said,) = {line.partition("] ")[2] for line in out}
    assert said == given if given else re.fullmatch("[0-9a-f]{64}", said)


# Each of these scripts waits for a file that another rank makes, so that no time decides.
DIES = """
import os, pathlib, signal, sys, time
rank, count = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
pid = pathlib.Path("pid")
if rank == 1 and count < int(sys.argv[1]):
    print("last words", count)
    pathlib.Path("written").write_text(str(os.getpid()))
    os.rename("written", pid)
    os.kill(os.getpid(), signal.SIGKILL)
while not pid.exists():
    time.sleep(0.01)
while pathlib.Path("/proc", pid.read_text()).exists():  # until its end was noticed
    time.sleep(0.01)
print("process", os.getpid(), "finishes as", count)
"""


def test_a_dead_rank_is_survived_and_said(tmp_path: Path) -> None:
    status, out, err = done(tmp_path, "--nproc-per-node", "3", script(tmp_path, DIES), "1")
    assert status == 0
    assert "[rank 1] last words 0" in out
    assert sum("finishes as 0" in line for line in out) == 2
    assert err[-1] == "bml torchrun: rank 1 died (signal 9), 2 ranks finished"


def test_only_the_dead_rank_is_started_again(tmp_path: Path) -> None:
    text = DIES.replace("while not pid", "while not (rank == 1 or pathlib.Path('again').exists()) or not pid")
    text = text.replace('print("process"', 'rank == 1 and pathlib.Path("again").touch()\nprint("process"')
    words = ("--nproc-per-node", "3", "--max-restarts", "2", "--json", script(tmp_path, text), "2")
    status, out, err = done(tmp_path, *words)
    assert status == 0
    shown = [line for line in err if line.startswith("[rank")]
    assert [line[9:] for line in shown if "last words" in line] == ["last words 0", "last words 1"]
    assert sorted(line[:9] + line.split()[-1] for line in shown if "finishes" in line) == [
        "[rank 0] 0",
        "[rank 1] 2",
        "[rank 2] 0",
    ]
    ranks = json.loads("\n".join(out))["ranks"]
    assert {rank: each["restarts"] for rank, each in ranks.items()} == {"0": 0, "1": 2, "2": 0}
    assert {each["end"] for each in ranks.values()} == {"finished"}


DELETES_ITSELF = """
import os, pathlib, signal, time
if os.environ["RANK"] == "1":
    while not pathlib.Path("begun").exists():  # rank 0 has read the program, too
        time.sleep(0.01)
    os.unlink("program")
    os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path("begun").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.01)
"""


def test_a_rank_that_cannot_be_started_again_ends_no_other(tmp_path: Path) -> None:
    program = tmp_path / script(tmp_path, f"#!{sys.executable}{DELETES_ITSELF}", "program")
    program.chmod(0o755)
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--no-python", str(program))
    with torchrun(tmp_path, *words) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "cannot be started again" in line:
                break
        (tmp_path / "go").touch()
        _, rest = process.communicate(timeout=WITHIN_S)
    assert "rank 1, which died (signal 9), cannot be started again: No such file" in said[-1], said
    assert rest.splitlines()[-1] == "bml torchrun: rank 1 died (signal 9), 1 rank finished"
    assert process.returncode == 0
    assert left_of(tmp_path) == []


def test_the_first_error_that_nobody_survived_is_the_status(tmp_path: Path) -> None:
    text = DIES + "sys.exit(3)\n"
    status, _, err = done(tmp_path, "--nproc-per-node", "2", script(tmp_path, text), "1")
    assert status == 128 + signal.SIGKILL
    assert err[-1].endswith("rank 0 failed (exit status 3), rank 1 died (signal 9), no ranks finished")


def test_faults_kill_and_freeze(tmp_path: Path) -> None:
    """Rank 1 runs until it has seen that it stood still, rank 2 until then, and rank 0 until it is killed.

    Nobody ends before rank 0 is dead, or none would have finished after it.
    """
    text = """
import os, pathlib, time
rank, over, pid = os.environ["RANK"], pathlib.Path("over"), pathlib.Path("pid")
if rank == "0":
    pathlib.Path("written").write_text(str(os.getpid()))
    os.rename("written", pid)
longest, last = 0, time.monotonic()
while not over.exists():
    time.sleep(0.01)
    longest, last = max(longest, time.monotonic() - last), time.monotonic()
    if rank == "1" and longest > 2.5:
        over.touch()
while rank == "0":
    time.sleep(1)
while not pid.exists() or pathlib.Path("/proc", pid.read_text()).exists():
    time.sleep(0.01)
print("longest", longest)
"""
    faults = ("--fault", "kill:0@t=3s", "--fault", "freeze:1@t=3s,for=4s", "--fault", "kill:2@t=900s")
    status, out, err = done(tmp_path, "--nproc-per-node", "3", *faults, script(tmp_path, text))
    assert status == 0
    longest = {line[:8]: float(line.split()[-1]) for line in out}
    assert longest.keys() == {"[rank 1]", "[rank 2]"}
    assert longest["[rank 1]"] > longest["[rank 2]"], "nobody else was frozen"
    assert "bml torchrun: the fault kill:2@t=900s never struck" in err


def test_a_rank_that_is_frozen_for_good_does_not_hold_the_job(tmp_path: Path) -> None:
    text = "import os, time\ntime.sleep(1000 if os.environ['RANK'] == '0' else 3)\n"
    status, _, err = done(
        tmp_path, "--nproc-per-node", "2", "--fault", "freeze:0@t=1s", script(tmp_path, text)
    )
    assert status == 137, "nobody finished after it"
    assert any("frozen for good" in line for line in err)


#: A rank with a child in its session, one in another, and one that ignores SIGTERM.
FAMILY = """
import os, signal, subprocess, sys, time
wait = [sys.executable, "-c", "import time; time.sleep(1000)"]
subprocess.Popen(wait)
subprocess.Popen(wait, start_new_session=True)
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, lambda *_: (print("asked to end"), sys.exit(0)))
print("up")
time.sleep(1000)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.smoke)]
)
def test_nothing_is_left_of_an_interrupted_job(tmp_path: Path, number: int) -> None:
    with torchrun(tmp_path, "--nproc-per-node", "2", script(tmp_path, FAMILY)) as process:
        until(process, "[rank 0] up", "[rank 1] up")
        began = time.monotonic()
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        out, err = process.communicate(timeout=WITHIN_S)
        assert left_of(tmp_path) == []
        assert time.monotonic() - began < 30, "the ranks end at SIGTERM, and need no SIGKILL"
    if number != signal.SIGKILL:
        assert "[rank 1] asked to end" in out, err
    assert process.returncode == {signal.SIGINT: 1, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]


NOTICED = """
import os, signal, time
if os.environ["RANK"] != "2":
    signal.signal(signal.SIGUSR1, lambda *_: print("has a minute", flush=True) or os._exit(0))
    while True:
        print("up", flush=True)
        signal.pause()
while os.environ["WAITS_FOR"] not in os.listdir():
    time.sleep(0.01)
"""


def test_signals_of_a_scheduler_reach_the_ranks_that_handle_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAITS_FOR", "go")
    with torchrun(tmp_path, "--nproc-per-node", "3", script(tmp_path, NOTICED)) as process:
        until(process, "[rank 0] up", "[rank 1] up")
        process.send_signal(signal.SIGUSR2)
        process.send_signal(signal.SIGUSR1)
        until(process, "[rank 0] has a minute", "[rank 1] has a minute")
        (tmp_path / "go").touch()
        _, err = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0
    assert "SIGUSR1 is passed on to rank 0, 1" in err
    assert "SIGUSR2 is for ranks, and none has a handler for it: nothing is done" in err
    assert left_of(tmp_path) == []


def test_ranks_that_do_not_end_are_killed_after_the_grace(tmp_path: Path) -> None:
    text = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\ntime.sleep(1000)"
    words = ("--nproc-per-node", "2", "--shutdown-timeout", "1", script(tmp_path, text))
    with torchrun(tmp_path, *words) as process:
        until(process, "[rank 0] up", "[rank 1] up")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 143
    assert left_of(tmp_path) == []


def test_children_of_a_dead_rank_are_ended_while_the_others_go_on(tmp_path: Path) -> None:
    text = """
import os, pathlib, subprocess, sys, time
if os.environ["RANK"] == "0":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    pathlib.Path("made").write_text(str(child.pid))
    os.rename("made", "child")
    os._exit(4)
while not pathlib.Path("child").exists():
    time.sleep(0.01)
child = pathlib.Path("/proc") / pathlib.Path("child").read_text()
while child.exists():
    time.sleep(0.01)
print("it is gone")
"""
    status, out, _ = done(tmp_path, "--nproc-per-node", "2", script(tmp_path, text))
    assert (status, out) == (0, ["[rank 1] it is gone"])


def test_modules_and_programs(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    script(tmp_path / "package", "import sys\nprint(__name__, __package__, sys.argv[1:])", "part.py")
    assert done(tmp_path, "-m", "package.part", "-m") == (0, ["[rank 0] __main__ package ['-m']"], [])
    assert done(tmp_path, "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE")[1] == ["[rank 0] 0 of 1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("none.py",), "there is no file none.py"),
        (("--no-python", "no-such-program"), "there is no program"),
        (("--nproc-per-node", "0", "x.py"), "give a number from 1"),
        (("--nproc-per-node", "gpu", "x.py"), "sees no GPU"),
        (("--nnodes", "1:2", "x.py"), "is fixed here"),
        (("--nproc-per-node", "2", "--fault", "cut:0/0@t=1s", "x.py"), "no fault of a process"),
        (("--master-addr", "no.such.host.invalid", "x.py"), "is not known"),
    ],
)
def test_wrong_use(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    if torch.cuda.is_available() and "gpu" in words:
        pytest.skip("there is a GPU")
    script(tmp_path, "print('started')", "x.py")
    status, out, err = done(tmp_path, *words)
    assert (status, out) == (2, [])
    assert says in err[-1]
    assert not any("Traceback" in line for line in err)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])
        status, _, err = done(tmp_path, "--master-port", port, script(tmp_path, "print('started')"))
    assert status == 2
    assert "give another --master-port" in err[-1]


GLOO = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(2)
dist.all_reduce(one)
print("sum", one.tolist(), "of", dist.get_world_size())
dist.barrier()
dist.destroy_process_group()
"""


def test_gloo_meets_in_the_launchers_store(tmp_path: Path) -> None:
    status, out, err = done(tmp_path, "--standalone", "--nproc-per-node", "2", script(tmp_path, GLOO))
    assert status == 0, err
    assert sorted(out) == [f"[rank {rank}] sum [2.0, 2.0] of 2" for rank in range(2)]


STORE = """
import os, pathlib, signal, time
from datetime import timedelta
import torch.distributed as dist
store, rank, size = next(dist.rendezvous("env://"))
count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == 0 and count == 0:
    store.set("key", "of the dead")
    os.kill(os.getpid(), signal.SIGKILL)
found = store.get("key").decode()
store.add("read", 1)
while store.add("read", 0) < size:
    time.sleep(0.02)
print("read", found)
"""


def test_the_store_outlives_rank_0_and_a_restarted_rank_meets_it(tmp_path: Path) -> None:
    status, out, err = done(tmp_path, "--nproc-per-node", "2", "--max-restarts", "1", script(tmp_path, STORE))
    assert status == 0, err
    assert sorted(out) == [f"[rank {rank}] read of the dead" for rank in range(2)]


WAITS = "waiting for node 1"


def nodes(folder: Path, *words: str) -> list[tuple[int, str, str]]:
    """Two launchers of two ranks each on this machine, to their ends.

    There is a file `node 0 waits` in the folder as soon as node 0 has said that it does.
    """
    endpoint = f"127.0.0.1:{free_port()}"
    common = ("--nproc-per-node", "2", "--nnodes", "2", "--rdzv-endpoint", endpoint, *words)

    def end(process: subprocess.Popen[str]) -> tuple[str, str]:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if WAITS in line:
                (folder / "node 0 waits").touch()
        return process.communicate(timeout=WITHIN_S)[0], "".join(said)

    with (
        ThreadPoolExecutor(2) as both,
        torchrun(folder, *common) as first,
        torchrun(folder, *common) as second,
    ):
        outputs = list(both.map(end, (first, second)))
    assert left_of(folder) == []
    statuses = (first.returncode, second.returncode)
    return [(status, *output) for status, output in zip(statuses, outputs, strict=True)]


def test_two_nodes_form_one_job(tmp_path: Path) -> None:
    found = nodes(tmp_path, script(tmp_path, GLOO))
    assert [status for status, _, _ in found] == [0, 0], found
    lines = [out.splitlines() for _, out, _ in found]
    assert sorted(lines[0] + lines[1]) == [f"[rank {rank}] sum [4.0, 4.0] of 4" for rank in range(4)]
    assert {frozenset(line[:8] for line in each) for each in lines} == {
        frozenset({"[rank 0]", "[rank 1]"}),
        frozenset({"[rank 2]", "[rank 3]"}),
    }


def test_the_store_waits_for_the_other_node(tmp_path: Path) -> None:
    """Node 0's ranks end first; node 1's still use the store then."""
    text = "import os, time\nimport torch.distributed as dist\n"
    text += "store, rank, size = next(dist.rendezvous('env://'))\n"
    text += "if rank < 2:\n    store.set(str(rank), 'x')\n    os._exit(0)\n"
    text += "store.wait(['0', '1'])\n"
    text += (
        "whole = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)\n"
    )
    text += "whole.wait(['bml/torchrun/done/0'])\n"
    text += "while not os.path.exists('node 0 waits'):\n    time.sleep(0.01)\n"
    text += "store.set('late', 'x')\nprint(store.get('late'))\n"
    found = nodes(tmp_path, script(tmp_path, text))
    assert [status for status, _, _ in found] == [0, 0], found
    assert sum(out.count("b'x'") for _, out, _ in found) == 2
    assert any(WAITS in err for _, _, err in found)


def test_two_launchers_as_the_same_node_are_refused(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    common = ("--nnodes", "3", "--rdzv-endpoint", endpoint, "--node-rank")
    name = script(tmp_path, "print('started')")
    with (
        torchrun(tmp_path, *common, "0", name) as host,
        torchrun(tmp_path, *common, "1", name) as one,
        torchrun(tmp_path, *common, "1", name) as other,
    ):
        refused = _first_to_end(one, other)
        assert "another launcher is node 1 already" in refused.communicate(timeout=30)[1]
        assert refused.returncode == 1
        for process in {host, one, other} - {refused}:
            process.send_signal(signal.SIGTERM)  # one that waited for the host may have ended by itself
            process.communicate(timeout=20)
    assert left_of(tmp_path) == []


def _first_to_end(*processes: subprocess.Popen[str]) -> subprocess.Popen[str]:
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        for process in processes:
            if process.poll() is not None:
                return process
        time.sleep(0.05)
    raise AssertionError("none has ended")
