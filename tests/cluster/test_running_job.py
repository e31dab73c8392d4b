"""A running job can be looked at and hurt: from Python, by `bml status` and by `bml inject`."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from descriptors import opened
from jobs import wait_for
from rich.console import Console

import bml
from bml.cli.status import _show
from bml.cluster.launcher import jobsocket, launch, running
from bml.errors import FabricError, UsageError
from bml.io import interruptible
from bml.topology import parse, parse_failure

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

BML = [sys.executable, "-m", "bml"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Jobs of other tests, or of the user, are not seen."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path / "bml"
    assert list((tmp_path / "bml").glob("*")) == [], "a job's socket was left behind"


def until_told(path: Path) -> Callable[[bml.Session], int]:
    def train(session: bml.Session) -> int:
        """Steps until the file is there, which server 0 (or the lowest that is left) sees for all."""
        steps = 0
        while True:
            time.sleep(0.005)  # what looks at the job from outside needs the processor, too
            stop = session.allreduce(np.array([path.exists()]).astype(np.int32), op="max")
            steps += 1
            if stop[0]:
                return steps

    return train


def answered(job: bml.Job) -> dict[str, Any]:
    """The status, once every server has answered within the second that it has, and is in a view."""
    answers = wait_for(lambda: (now := job.status()) and _all_have_a_view(now) and now)
    assert isinstance(answers, dict)
    return answers


def _all_have_a_view(now: dict[str, Any]) -> bool:
    return all(each.get("epoch") for each in now["servers"].values())


def told_by_all(*arguments: str, says: Callable[[str], bool]) -> str:
    """What a command prints, once every server has answered it within the second that it has."""

    def ask() -> str:
        done = command(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout if says(done.stdout) else ""

    return str(wait_for(ask))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BML, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_an_interrupt_that_does_not_wake_who_waits_is_not_lost(tmp_path: Path) -> None:
    """As when it comes just before the wait begins; here another thread gets the signal."""
    waiter = threading.get_ident()

    def waits() -> bool:
        stack = traceback.extract_stack(sys._current_frames()[waiter])
        return {running.__file__, interruptible.__file__} <= {frame.filename for frame in stack}

    def interrupt() -> None:
        wait_for(waits)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    with bml.start(until_told(tmp_path / "stop"), "bcube:2x1", launcher="processes") as job:
        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            job.wait(timeout_s=20)
        other.join()
        assert job.running


def reached_over(failures: list[str], level: int, group: int) -> list[int]:
    """The servers of a bcube:3x2 that reach others over a switch when these parts are dead."""
    whole = parse("bcube:3x2")
    left = whole.without(*map(parse_failure, failures))
    return [server for server in whole.members(level, group) if left.neighbours(server, level)]


def test_status_and_inject_from_python(tmp_path: Path, own_folder: Path) -> None:
    children, before = jobs.children(), opened()
    stop = tmp_path / "stop"
    with bml.start(until_told(stop), "bcube:3x2", launcher="processes", transport="tcp") as job:
        assert stat.S_IMODE(own_folder.stat().st_mode) == 0o700
        assert [stat.S_IMODE(path.stat().st_mode) for path in own_folder.iterdir()] == [0o600]
        now = answered(job)
        assert now["epoch"] == 1
        assert now["members"] == list(range(9))
        assert sorted(now["servers"]) == list(range(9))
        first = now["servers"][0]
        assert first["epoch"] == 1
        assert first["waits_for"]
        assert len(first["nics"]) == 2
        wait_for(lambda: job.status()["step"] > 2)  # silence is borne for longer before
        done = job.inject("kill:4")
        assert done["fault"] == "kill:4"
        assert done["done"] == [
            f"server 4 (process {now['servers'][4]['process']}) sends SIGKILL to its process"
        ]
        wait_for(lambda: job.status()["epoch"] >= 2)
        assert "signal 9" in job.status()["lost"][4]
        assert [len(each) for each in job.inject("switch:1/0")["done"]]
        # Servers silence their ends one by one: on a busy machine several views may tell of it.
        wait_for(lambda: not reached_over(job.status()["failures"], 1, 0))
        busy = wait_for(lambda: [nic for nic in answered(job)["servers"][1]["nics"] if nic["sent_per_s"] > 0])
        assert busy[0]["nbytes_sent"] > 0
        with pytest.raises(FabricError, match="no server can apply kill:4"):
            job.inject("kill:4")
        with pytest.raises(UsageError, match="no server 12"):
            job.inject("kill:12")
        with pytest.raises(UsageError, match="there is no level 7"):
            job.inject("slow:1/7,rate=10mbit")
        with pytest.raises(UsageError, match="loss needs real cables"):
            job.inject("loss:1/1,share=1%")
        stop.touch()
        result = job.wait()
        assert len(set(result.values.values())) == 1
        assert job.status()["running"] is False
        with pytest.raises(FabricError, match="has ended"):
            job.inject("kill:1")
    assert jobs.children() == children
    assert opened() <= before


def test_a_frozen_server_does_not_answer_and_is_suspected(tmp_path: Path) -> None:
    suspicions: list[str] = []

    def note(snapshot: dict[str, Any]) -> None:
        suspicions.extend(snapshot["suspicions"])

    with bml.start(until_told(tmp_path / "stop"), "bcube:2x2", launcher="processes", on_change=note) as job:
        wait_for(lambda: job.status()["step"] > 2)  # silence is borne for longer before
        job.inject("freeze:3")
        wait_for(lambda: 3 not in job.status()["members"])
        assert job.status()["servers"][3] == {"answers": False}
    assert any("heard nothing from server 3" in each for each in suspicions), suspicions


def test_what_a_wait_waits_for(tmp_path: Path) -> None:
    release = tmp_path / "go"

    def train(session: bml.Session) -> None:
        while session.server == 2 and not release.exists():
            time.sleep(0.01)
        session.barrier()

    with bml.start(train, "bcube:2x2", launcher="processes", transport="tcp") as job:
        waits = wait_for(
            lambda: {
                server: answer["waits_for"]
                for server, answer in job.status()["servers"].items()
                if "tokens" in answer.get("waits_for", "")
            }
        )
        assert any("barrier tokens of step 1 from servers [" in each for each in waits.values())
        assert answered(job)["servers"][2]["waits_for"] == "the training function to bring step 1"
        release.touch()
        job.wait()


def test_a_job_that_is_left_early_leaves_nothing(tmp_path: Path) -> None:
    children, before, threads = jobs.children(), opened(), threading.active_count()
    with bml.start(until_told(tmp_path / "never"), "bcube:2x2", launcher="processes") as job:
        assert job.running
        with pytest.raises(FabricError, match=r"still runs after 0\.1 s"):
            job.wait(0.1)
    assert not job.running
    assert job.outcome()["interrupted"]
    assert job.status()["servers"] == {}, "none is silent after the end"
    assert jobs.children() == children
    assert opened() <= before
    wait_for(lambda: threading.active_count() <= threads)  # one has closed the job, and ends by itself


def test_commands(tmp_path: Path, own_folder: Path) -> None:
    stop = tmp_path / "stop"
    none = command("status")
    assert (none.returncode, "no job that this user may ask runs" in none.stderr) == (1, True)
    with (
        bml.start(until_told(stop), "bcube:3x2", launcher="processes", traffic_class=104) as job,
        bml.start(until_told(stop), "bcube:2x2", launcher="processes") as other,
    ):
        both = command("status")
        assert both.returncode == 2
        assert f"choose one with --job, of {min(job.name, other.name)}" in both.stderr
        stale = own_folder / "bml-dead.sock"
        with jobsocket.socket.socket(jobsocket.socket.AF_UNIX) as dead:
            dead.bind(str(stale))
        done = command("inject", "kill:4", "--job", job.name, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["fault"] == "kill:4"
        assert not stale.exists()
        wait_for(lambda: job.status()["epoch"] >= 2)
        all_eight = "transport of server 0, 1, 2, 3, 5, 6, 7, 8: tcp, traffic class 104"
        text = told_by_all("status", "--job", job.name, says=lambda text: all_eight in text)
        assert "view 2: 8 servers (server 4 is dead" in text.replace("\n", " ")
        assert "lost: server 4" in text
        all_json = told_by_all(
            "status", "--job", job.name, "--json", says=lambda text: _all_have_a_view(json.loads(text))
        )
        shown = json.loads(all_json)
        assert shown["failures"] == ["server:4"]
        assert sorted(shown["servers"]) == ["0", "1", "2", "3", "5", "6", "7", "8"]
        assert shown["servers"]["0"]["waits_for"]
        used = shown["servers"]["0"]["transport"]
        assert (used["name"], used["traffic_class"], used["fallback"]) == ("tcp", 104, "")
        assert command("inject", "coordinator", "--job", job.name).returncode == 0
        for arguments, code, message in (
            (["kill:44", "--job", job.name], 2, "no server 44"),
            (["kill", "--job", job.name], 2, "does not say which server"),
            (["kill:1", "--job", "bml-none"], 2, "no job bml-none runs here; there are"),
        ):
            wrong = command("inject", *arguments)
            assert (wrong.returncode, message in wrong.stderr) == (code, True), wrong.stderr
        stopped = command("inject", "freeze:coordinator,for=1s", "--job", job.name)
        assert (stopped.returncode, "has the coordinator stopped" in stopped.stdout) == (0, True)
        stop.touch()
        assert len(job.wait().values) == 8
        assert len(other.wait().values) == 4


def test_a_folder_that_is_not_private_is_refused(own_folder: Path) -> None:
    own_folder.mkdir(mode=0o755)
    with pytest.raises(FabricError, match="not a private folder"):
        jobsocket.folder()
    result = jobs.launch(lambda session: session.barrier(), "bcube:2x1")
    assert sorted(result.values) == [0, 1], "the job runs without its door"
    own_folder.chmod(0o700)


def test_requests_that_are_none(tmp_path: Path) -> None:
    with bml.start(until_told(tmp_path / "stop"), "bcube:2x1", launcher="processes") as job:
        for request, message in (
            (b"nonsense\n", "a request is one JSON object"),
            (b"[1]\n", "a request is one JSON object"),
            (b'{"do": "dance"}\n', "can be asked for its status"),
        ):
            with jobsocket.socket.socket(jobsocket.socket.AF_UNIX) as sock:
                sock.settimeout(10)
                sock.connect(str(jobsocket.find(job.name)))
                sock.sendall(request)
                answer = json.loads(sock.makefile("rb").readline())
            assert message in answer["error"]
            assert answer["usage"]


def test_doctor() -> None:
    done = command("doctor", "--json", "--detect-s", "2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["timeouts"]["answer_s"]["seconds"] == 3.0
    assert found["checks"]["Python"]["usable"]
    assert all(check["why"] for check in found["checks"].values())
    text = command("doctor")
    assert "time-outs, in the order that makes them safe" in text.stdout
    assert command("doctor", "--detect-s", "0").returncode == 2


def shown(capsys: pytest.CaptureFixture[str], **other: Any) -> str:
    """What `bml status` prints of a job on bcube:2x2 of which this is known."""
    now = {"job": "j", "fabric": "bcube:2x2", "algorithm": "auto", "launcher": "processes", "emulated": None}
    gone = {"lost": {}, "left": {}, "ended": {}, "absent": [], "awaited": []}
    _show({**now, **gone, "servers": {}, **other}, Console(markup=False, width=200))
    return capsys.readouterr().out


def test_status_calls_nothing_broken_that_left_never_came_or_is_to_come(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failures = ["link:0/1", *(f"server:{server}" for server in range(4))]
    text = shown(capsys, failures=failures, left={1: "SIGTERM"}, absent=[2], awaited=[3], lost={0: "killed"})
    assert "broken: link:0/1, server:0\n" in text
    assert "lost: server 0 (killed)\nleft: server 1 (SIGTERM)\n" in text
    assert "never started: server 2" in text
    assert "to come: server 3" in text


def test_status_names_who_joins(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, learners=[2], waiting=[3], members=[0, 1, 2])
    assert "learner: server 2 follows the steps" in text
    assert "waiting: server 3 asks to join" in text


def test_every_command_shows_an_example() -> None:
    for name in ("status", "inject", "doctor"):
        assert "Example:\n    bml" in command(name, "--help").stdout


def test_servers_do_not_draw_alike() -> None:
    def train(session: bml.Session) -> tuple[float, int]:
        return float(np.random.random()), os.getpid()

    values = jobs.launch(train, "bcube:2x2").values
    assert len({number for number, _ in values.values()}) == 4


def test_a_function_that_cannot_be_pickled_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a Ray or a fabric would be left behind")

    monkeypatch.setattr(launch, "_fleet", started)
    lock = threading.Lock()
    with pytest.raises(UsageError, match="cannot be sent to the servers: TypeError: cannot pickle"):
        bml.start(lambda session: lock, "bcube:2x1", launcher="processes")
