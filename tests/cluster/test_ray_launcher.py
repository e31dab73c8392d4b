"""The same jobs on a real local Ray: actors, a coordinator that is replaced, and a Ray job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import commands
import psutil
import pytest

from bml.cluster.process import coordinator
from bml.cluster.ray import actors as ray_actors
from bml.cluster.spec.job import JobSpec

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "BML_DETECT_S": "5"}  # no server may be lost
USERS = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of a cluster that users have made themselves"}
"""How users say that a cluster of theirs has a token."""


def run(*command: str, timeout_s: float = 120, **settings: str) -> subprocess.CompletedProcess[str]:
    with commands.begun(*command, cwd=ROOT, env={**ENVIRONMENT, **settings}) as process:
        stdout, stderr = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def ray_leftovers() -> set[str]:
    folders = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("bml-ray-")}
    return folders | set(os.listdir("/dev/shm"))


@pytest.mark.parametrize(
    ("fabric", "victim", "faults", "n_members"),
    [
        ("bcube:3x2", 4, ["coordinator@step=25", "blackhole:2/0@step=35"], [9, 8, 8]),
        pytest.param("bcube:2x2", 3, ["coordinator@step=25"], [4, 3], marks=pytest.mark.smoke),
    ],
)
def test_digits_with_faults_on_a_local_ray(
    fabric: str, victim: int, faults: list[str], n_members: list[int]
) -> None:
    before = ray_leftovers()
    options = [word for fault in [f"kill:{victim}@step=20", *faults] for word in ("--fault", fault)]
    done = run(str(BIN / "bml"), "run", "examples/train_digits.py", "--fabric", fabric, *options, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["steps"] == 70
    assert [len(view["members"]) for view in report["views"]] == n_members
    assert len(set(report["digests"].values())) == 1
    assert len(report["digests"]) == n_members[-1]
    assert report["samples"]["complete"]
    assert "The actor died" in report["dead"][str(victim)]
    assert report["values"]["0"]["accuracy"] >= 0.95
    # The NIC falls silent while a new coordinator starts, which takes a second or two on a busy machine.
    assert max(metrics["step_max_s"] for metrics in report["metrics"].values()) < 30.0
    assert ray_leftovers() == before


def test_a_stopped_coordinator_is_replaced_on_ray() -> None:
    """Ray takes its actor for alive, and would start a dead one with the same term."""
    options = ["--fault", "freeze:coordinator@step=20", "--fault", "kill:3@step=20"]
    done = run(
        str(BIN / "bml"), "run", "examples/train_digits.py", "--fabric", "bcube:2x2", *options, "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["steps"] == 70
    assert [len(view["members"]) for view in report["views"]] == [4, 3]
    # A new actor takes a second or two to start on a machine that is busy with others.
    assert max(metrics["step_max_s"] for metrics in report["metrics"].values()) < 30.0


def test_an_actor_whose_coordinator_failed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lived on, answered, and coordinated nothing."""
    ended = threading.Event()

    class Failing:
        deposed_by = 0

        def __init__(self, *arguments: object) -> None:
            pass

        def run(self) -> None:
            raise RuntimeError("planted")

    monkeypatch.setattr(coordinator, "CoordinatorLoop", Failing)
    monkeypatch.setattr(coordinator.os, "_exit", lambda status: ended.set())
    ray_actors.CoordinatorActor().begin(JobSpec("bcube:2x1"), {}, {}, 1)
    assert ended.wait(10)


@pytest.mark.parametrize(
    ("number", "times", "status"), [(signal.SIGINT, 1, 1), (signal.SIGINT, 2, 1), (signal.SIGTERM, 1, 143)]
)
def test_interrupt_and_termination_leave_no_ray_behind(
    tmp_path: Path, number: int, times: int, status: int
) -> None:
    before = ray_leftovers()
    (tmp_path / "endless.py").write_text(
        "import numpy as np\ndef train(session):\n    while True:\n        session.allreduce(np.ones(3))\n"
    )
    command = [str(BIN / "bml"), "run", str(tmp_path / "endless.py"), "--fabric", "bcube:2x1"]
    with commands.begun(*command, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        assert "view 1" in process.stdout.readline()
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4
        commands.interrupt(process, number)
        if times == 2:
            time.sleep(0.05)  # as a user does who presses Ctrl-C twice
            commands.interrupt(process, number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == status, said
    assert psutil.wait_procs(family, timeout=30)[1] == []
    assert ray_leftovers() == before


def test_a_running_ray_job_can_be_looked_at_and_hurt(tmp_path: Path) -> None:
    (tmp_path / "until.py").write_text(
        "import numpy as np, os\n"
        f"STOP = {str(tmp_path / 'stop')!r}\n"
        "def train(session):\n"
        "    while not session.allreduce(np.array([os.path.exists(STOP)]).astype('i4'), op='max')[0]:\n"
        "        pass\n"
    )
    environment = {**ENVIRONMENT, "XDG_RUNTIME_DIR": str(tmp_path)}
    bml = [str(BIN / "bml")]

    def ask(*arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [*bml, *arguments, "--json"],
            capture_output=True,
            text=True,
            env=environment,
            timeout=60,
            check=False,
        )
        return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr}

    def until(condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while not condition(now := ask("status")):
            assert time.monotonic() < deadline, now
            assert process.poll() is None
        return now

    command = [*bml, "run", str(tmp_path / "until.py"), "--fabric", "bcube:2x2", "--json"]
    with commands.begun(*command, env=environment) as process:
        # A server has a second to answer, and busy ones miss it.
        now = until(lambda now: now.get("epoch") == 1 and "waits_for" in now["servers"].get("0", {}))
        assert now["launcher"] == "ray"
        assert sorted(now["servers"]) == ["0", "1", "2", "3"]
        assert now["servers"]["0"]["waits_for"]
        assert "server 3" in ask("inject", "kill:3")["done"][0]
        now = until(lambda now: now.get("epoch", 0) >= 2 and now["lost"])
        assert "actor" in now["lost"]["3"]
        assert ask("inject", "coordinator")["done"]
        (tmp_path / "stop").touch()
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
        assert [len(view["members"]) for view in json.loads(stdout)["views"]] == [4, 3]
    assert list((tmp_path / "bml").iterdir()) == []


_TWO_JOBS = """
import json, os
import bml
import numpy as np

STOP = os.environ["STOP_AT"]
RAYS = ("RAY_CLIENT_MODE", "PYTHONBREAKPOINT")  # what Ray itself sets


def until(session):
    while not session.allreduce(np.array([os.path.exists(STOP)]).astype("i4"), op="max")[0]:
        pass
    return "second"


def short(session):
    return "first"


before = dict(os.environ)
second = bml.start(until, "bcube:2x1")
first = bml.start(short, "bcube:2x1")
values = [first.wait(60).value]
open(STOP, "w").close()
values.append(second.wait(60).value)
values.append(bml.launch(short, "bcube:2x1").value)
kept = {name for name in os.environ.items() - before.items() if name[0] not in RAYS}
print(json.dumps([values, sorted(kept)]))
"""


def test_the_end_of_a_job_leaves_ray_to_another_one_of_the_same_process(tmp_path: Path) -> None:
    before = ray_leftovers()
    (tmp_path / "two.py").write_text(_TWO_JOBS)
    shown = {"RAY_DEDUP_LOGS_SKIP_REGEX": "^$"}  # so nothing that Ray says of dead workers is hidden
    done = run(sys.executable, str(tmp_path / "two.py"), STOP_AT=str(tmp_path / "stop"), **shown)
    assert done.returncode == 0, done.stderr
    values, kept = json.loads(done.stdout.splitlines()[-1])
    assert values == ["first", "second", "first"]
    assert kept == [], "nothing stays in the environment"
    assert "died or was killed" not in done.stdout + done.stderr, "all was well"
    assert ray_leftovers() == before


_KILLED = """
import bml
import numpy as np

def train(session):
    for _ in session.steps(10):
        session.allreduce(np.ones(4))

if __name__ == "__main__":
    bml.launch(train, "bcube:2x2", faults=["kill:1@step=2"])
"""


def test_a_death_is_one_line_of_ours_and_not_a_paragraph_of_rays(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(_KILLED)
    done = run(sys.executable, str(tmp_path / "killed.py"))
    assert done.returncode == 0, done.stderr
    (line,) = (done.stdout + done.stderr).splitlines()
    assert re.fullmatch(r"view 2: 3 servers \(server 1 is dead: .*\)", line), line


@pytest.mark.skipif(os.geteuid() != 0, reason="shuts down sockets of other processes")
def test_connections_of_ray_that_break_cost_no_server_and_no_report() -> None:
    """Two jobs of the fifty that benchmarks/ray_connections.py is there for; Ray takes most of the time."""
    done = run(sys.executable, "benchmarks/ray_connections.py", "--jobs", "2", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 jobs" in done.stdout
    assert ", 0 connections" not in done.stdout


@pytest.fixture
def cluster() -> Iterator[tuple[str, str]]:
    """A Ray with its dashboard and a token, as a user's cluster would be: (address, dashboard)."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        command = [
            str(BIN / "ray"), "start", "--head", "--block", "--port=0", "--include-dashboard=true",
            "--dashboard-port=0", f"--temp-dir={folder}", "--num-cpus=4", "--object-store-memory=100000000",
            "--disable-usage-stats",
        ]  # fmt: skip
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**ENVIRONMENT, **USERS, "TMPDIR": folder},
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            yield _addresses(process.stdout)
        finally:
            commands.kill_family(process)


def _addresses(lines: Iterator[str]) -> tuple[str, str]:
    address = dashboard = ""
    for line in lines:
        if found := re.search(r"--address='([^']+)'", line):
            address = found[1]
        if found := re.search(r"RAY_(?:API_SERVER_)?ADDRESS='(http://[^']+)'", line):
            dashboard = found[1]
        if address and dashboard:
            return address, dashboard
    raise AssertionError(f"Ray did not start: {address!r} {dashboard!r}")


def test_a_ray_job_and_an_address(cluster: tuple[str, str]) -> None:
    address, dashboard = cluster
    doctor = json.loads(run(str(BIN / "bml"), "doctor", "--json", RAY_ADDRESS=address).stdout)
    assert doctor["checks"]["Ray asks for a token"]["usable"]
    assert "asks for its token" in doctor["checks"]["Ray asks for a token"]["why"]
    submit = [str(BIN / "ray"), "job", "submit", "--address", dashboard, "--working-dir", "."]
    script = [
        sys.executable,
        "examples/train_digits.py",
        "--fabric",
        "bcube:2x2",
        "--fault",
        "kill:3@step=20",
    ]
    done = run(*submit, "--", *script, **USERS)
    assert "succeeded" in done.stdout, done.stdout + done.stderr
    assert re.search(r"accuracy 0\.9[5-9]", done.stdout), done.stdout
    attached = run(
        str(BIN / "bml"),
        "run",
        "examples/train_digits.py",
        "--address",
        address,
        "--fabric",
        "bcube:2x2",
        "--json",
        **USERS,
    )
    assert attached.returncode == 0, attached.stderr
    assert json.loads(attached.stdout)["values"]["3"]["accuracy"] >= 0.95


_ON_TWO_MACHINES = """
import json
import bml
import numpy as np
import ray
from ray.cluster_utils import Cluster


def train(session):
    w, lost = np.zeros(1, "f4"), session.joins
    session.state(w=w)
    for _ in session.steps(10**6):
        w += session.allreduce(np.ones(1, "f4"))
        lost |= len(session.contributors) < 4
        if lost and len(session.contributors) == 4:
            return ray.get_runtime_context().get_node_id()


def where(session):
    assert session.allreduce(np.ones(2, "f4"))[0] == 4
    return ray.get_runtime_context().get_node_id()


def grown(session):
    w = np.zeros(1, "f4")
    session.state(w=w)
    for _ in session.steps(10**6):
        w += session.allreduce(np.ones(1, "f4"))
        if len(session.contributors) == 4:
            return ray.get_runtime_context().get_node_id()


quick = {"health_check_period_ms": 300, "health_check_failure_threshold": 2}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": quick})
try:
    machines = [cluster.add_node(num_cpus=2, resources={"slot": 3})]
    slots = {"servers": (3, 4), "resources": {"slot": 1}, "address": cluster.address}
    with bml.start(grown, "bcube:2x2", **slots) as job:
        first = job.status()
        machines.append(cluster.add_node(num_cpus=2, resources={"slot": 1}))
        result = job.wait(60)
    found = {"machines": [each.node_id for each in machines]}
    sizes = {size: result.report["sizes"][size]["steps"] for size in (3, 4)}
    found |= {"first": [first["members"], first["awaited"]], "grown": result.values, "sizes": sizes}
    found["steps"], found["digests"] = result.report["steps"], result.report["digests"]
    found["reserved"] = bml.launch(where, "bcube:2x2", address=cluster.address, resources={"CPU": 1}).values
    with bml.start(train, "bcube:2x2", address=cluster.address, rejoin=True, min_servers=2) as job:
        cluster.remove_node(machines[1], allow_graceful=False)
        result = job.wait(60)
    found |= {"rejoined": result.values, "views": result.report["views"]}
    print(json.dumps(found))
finally:
    cluster.shutdown()
"""


@pytest.mark.timeout(300)
def test_a_job_grows_with_its_cluster_and_outlives_a_dead_machine(tmp_path: Path) -> None:
    (tmp_path / "machines.py").write_text(_ON_TWO_MACHINES)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # for what Ray leaves, with a short name
        done = run(sys.executable, str(tmp_path / "machines.py"), timeout_s=240, TMPDIR=folder, **USERS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    machines = found["machines"]
    members, awaited = found["first"]
    assert (len(members), sorted(members + awaited)) == (3, [0, 1, 2, 3]), "three fit on the first machine"
    late = {server: machines[server in map(str, awaited)] for server in "0123"}
    assert found["grown"] == late, "the fourth came with the second machine"
    assert sum(found["sizes"].values()) == found["steps"]
    assert len({*found["digests"].values()}) == 1
    assert sorted(found["reserved"].values()) == sorted(2 * machines), "two fit on each, on the head none"
    views = [set(view["members"]) for view in found["views"]]
    assert min(views, key=len) in ({0, 1}, {2, 3}), "neighbours live together"
    assert views[-1] == {0, 1, 2, 3}
    assert found["rejoined"] == dict.fromkeys("0123", machines[0])
