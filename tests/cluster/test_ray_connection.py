"""One process's jobs share its connection to Ray, and the last one ends it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import AuthenticationError

from bml.errors import StartError, UsageError

ray_connection: Any = pytest.importorskip("bml.cluster.ray.connection")

pytestmark = pytest.mark.timeout(60)


class FakeRay:
    """What is done to Ray in this process."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.address = ""

    def is_initialized(self) -> bool:
        return bool(self.address)

    def init(self, address: str, **settings: Any) -> None:
        self.done.append(f"init {address}")
        self.address = address

    def shutdown(self) -> None:
        self.done.append("shutdown")
        self.address = ""

    def get_runtime_context(self) -> Any:
        return type("Context", (), {"gcs_address": self.address})


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()

    class Own:
        def __init__(self, prints: bool) -> None:
            made.init("own:1")

        def stop(self) -> None:
            made.shutdown()

    monkeypatch.setattr(ray_connection, "ray", made)
    monkeypatch.setattr(ray_connection, "OwnRay", Own)
    monkeypatch.setattr(ray_connection, "_shared", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return made


@pytest.fixture
def cluster() -> Iterator[str]:
    """An address at which somebody takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield f"127.0.0.1:{sock.getsockname()[1]}"


def test_the_end_of_one_job_leaves_ray_to_the_other(ray: FakeRay) -> None:
    first, second = ray_connection.RayConnection(None, True), ray_connection.RayConnection(None, True)
    assert first.is_own
    assert second.is_own
    first.close()
    first.close()
    assert ray.done == ["init own:1"]
    third = ray_connection.RayConnection(None, True)
    second.close()
    assert ray.done == ["init own:1"]
    third.close()
    assert ray.done == ["init own:1", "shutdown"]
    ray_connection.RayConnection(None, True).close()
    assert ray.done == 2 * ["init own:1", "shutdown"]


def test_jobs_of_one_cluster_share_the_connection(ray: FakeRay, cluster: str) -> None:
    jobs = [ray_connection.RayConnection(address, True) for address in (cluster, cluster, "auto", None)]
    assert not any(job.is_own for job in jobs)
    for job in jobs:
        assert ray.done == [f"init {cluster}"]
        job.close()
    assert ray.done[1:] == ["shutdown"]


def test_what_the_user_has_connected_is_left_alone(ray: FakeRay) -> None:
    ray.address = "10.0.0.1:6379"
    for address in (None, "auto", "10.0.0.1:6379"):
        ray_connection.RayConnection(address, True).close()
    with pytest.raises(UsageError, match=r"connected to the Ray cluster at 10\.0\.0\.1:6379"):
        ray_connection.RayConnection("10.0.0.2:6379", True)
    assert ray.done == []


def test_a_job_is_not_put_on_another_cluster_than_it_was_meant_for(ray: FakeRay, cluster: str) -> None:
    job = ray_connection.RayConnection(None, True)
    with pytest.raises(UsageError, match="runs on a Ray of its own"):
        ray_connection.RayConnection(cluster, True)
    job.close()
    job = ray_connection.RayConnection(cluster, True)
    with pytest.raises(UsageError, match="give no address"):
        ray_connection.RayConnection("127.0.0.1:1", True)
    job.close()


@pytest.mark.parametrize("address", ["nosuch", "http://127.0.0.1:8265", "host:", ":6379", "host:0", "host:x"])
def test_an_address_that_is_none_is_refused(ray: FakeRay, address: str) -> None:
    with pytest.raises(UsageError, match="host:port as `ray start` shows it"):
        ray_connection.RayConnection(address, True)
    assert ray.done == []


def test_an_address_in_the_environment_is_looked_at_too(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(UsageError, match="http"):
        ray_connection.RayConnection(None, True)
    job = ray_connection.RayConnection("local", True)
    ray_connection.RayConnection("local", True).close()
    job.close()
    assert ray.done == ["init own:1", "shutdown"]


def test_an_address_at_which_nobody_answers_is_said_at_once(ray: FakeRay) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    with pytest.raises(StartError, match="no Ray cluster can be reached"):
        ray_connection.RayConnection(address, True)
    assert ray.done == []


def test_what_ray_says_of_a_cluster_is_passed_on(
    ray: FakeRay, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**settings: Any) -> None:
        raise ConnectionError("it is of another version")

    monkeypatch.setattr(ray, "init", fails)
    monkeypatch.setattr(ray_connection.auth, "exposure", lambda address: (False, ""))
    with pytest.raises(StartError, match=r"another version$"):
        ray_connection.RayConnection(cluster, True)


@pytest.mark.parametrize(
    "error", [ConnectionError("no connection"), AuthenticationError("no token was found")]
)
def test_a_cluster_that_asks_for_a_token_says_how_it_is_given(
    ray: FakeRay, cluster: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(**settings: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", fails)
    monkeypatch.setattr(ray_connection.auth, "exposure", lambda address: (address == cluster, ""))
    with pytest.raises(StartError, match="set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN"):
        ray_connection.RayConnection(cluster, True)


def test_a_ray_of_ones_own_leaves_nothing_in_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And its sockets, in a folder of this depth, would have names that no socket can have."""
    from bml.cluster.ray import own as ray_own

    deep = tmp_path / ("deep" * 10)
    deep.mkdir()
    monkeypatch.setattr(ray_own.tempfile, "gettempdir", lambda: str(deep))
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setattr(ray_own.ray_auth, "forget", lambda: None)
    seen: dict[str, str] = {}

    class Ray:
        def is_initialized(self) -> bool:
            return False

        def init(self, _temp_dir: str, **settings: Any) -> None:
            seen.update(os.environ, folder=_temp_dir)
            assert Path(_temp_dir).is_dir()

    monkeypatch.setattr(ray_own, "ray", Ray())
    before = dict(os.environ)
    own = ray_own.OwnRay(prints=False)
    assert dict(os.environ) == before
    assert "GLIBC_TUNABLES" in seen
    assert set(sys.path) - {""} <= set(seen["PYTHONPATH"].split(os.pathsep)), (
        "servers import what this one can"
    )
    assert len(seen["folder"]) < 50
    own.stop()
    assert not Path(seen["folder"]).exists()


def test_a_ray_that_does_not_come_up_leaves_nothing_and_is_a_start_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine with much load: Ray gives its own processes 30 s, and lets them run when they are late."""
    from bml.cluster.ray import own as ray_own

    started: list[subprocess.Popen[bytes]] = []

    class Ray:
        def is_initialized(self) -> bool:
            return False

        def init(self, _temp_dir: str, **settings: Any) -> None:
            command = [sys.executable, "-c", "import time; time.sleep(60)"]
            started.extend(subprocess.Popen([*command, name]) for name in (f"{_temp_dir}/session", "other"))
            raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.setattr(ray_own.ray_auth, "forget", lambda: None)
    monkeypatch.setattr(ray_own, "ray", Ray())
    try:
        with pytest.raises(StartError, match=r"cannot be started on this machine.*timed out during startup"):
            ray_own.OwnRay(prints=False)
        ours, other = started
        assert ours.poll() is not None
        assert other.poll() is None, "it is not of that Ray"
    finally:
        for process in started:
            process.kill()
            process.wait()
