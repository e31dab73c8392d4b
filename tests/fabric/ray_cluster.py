"""A Ray cluster on an emulated fabric, as users start one: `ray start` on every machine, a namespace.

The head has the machine at the switches to itself. Tests kill all its processes, and may start it again.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bml.cluster.fleets.machines import MACHINE_FOLDER, Machines
from bml.cluster.ray import auth
from bml.cluster.ray.watching import head
from bml.fabric import EmulatedFabric, namespace

PORT = 6379
_REDIS_PORT = 6380
_STARTS_S = 100.0
_RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start")
_NODE = (
    *(f"--temp-dir={MACHINE_FOLDER}", "--num-cpus=1", "--object-store-memory=80000000"),
    "--disable-usage-stats",
)
_HEAD = "switches"
#: Processes that Ray's own nodes have without a job.
_OWN = ("ray::Dashboard", "ray::RuntimeEnv", "ray::IDLE")


def redis() -> str | None:
    """Where Redis is, in Debian's redis-tools under the name of a tool; None if it is not installed."""
    return shutil.which("redis-server") or shutil.which("redis-check-rdb")


class RayCluster:
    """A head, and a node on the machine of each server. Logs and the files of the job are in `folder`."""

    def __init__(self, network: EmulatedFabric, folder: Path, with_redis: bool, patience_s: float):
        self._network, self._folder = network, folder
        self._layout = network.layout
        self._machines = Machines((), prints=False)
        self.address = f"{self._layout.coordinator_address}:{PORT}"
        outside = {name: text for name, text in os.environ.items() if name not in ("RAY_ADDRESS", "BML_NICS")}
        self._environment = {
            **outside,
            **auth.own_settings(outside),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_enable_metrics_collection": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_agent_register_timeout_ms": "100000",
            "RAY_gcs_rpc_server_reconnect_timeout_s": f"{patience_s:g}",
        }
        self._store: dict[str, str] = {}
        if with_redis:  # on a machine that lives
            host = self._layout.management_address(1)
            self._store = {"RAY_REDIS_ADDRESS": f"{host}:{_REDIS_PORT}"}
            command = (
                f"exec -a redis-server {redis()} --port {_REDIS_PORT} --bind {host} --save '' "
                "--protected-mode no"
            )
            self._start("redis", self._layout.namespace("s1"), command)
        self.start_head()

    def start_nodes(self, last: str) -> None:
        """Start a node for each server; that of server 0 then runs this command, as its user would.

        One starts after the other, as Ray gives each 30 s, on a busy machine, too.
        """
        servers = self._network.fabric.servers
        all_up = " -a ".join(f"-e up-{server}" for server in servers)
        for server in servers:
            host = self._layout.management_address(server)
            command = shlex.join((*_RAY, f"--address={self.address}", f"--node-ip-address={host}", *_NODE))
            then = f"while ! [ {all_up} ]; do sleep 0.1; done; {last}" if server == 0 else "exec sleep 1000"
            before = f"while ! [ -e up-{server - 1} ]; do sleep 0.1; done; " if server else ""
            nics = {"BML_NICS": ",".join(self._layout.nics(server))}
            self._start(
                str(server),
                self._layout.namespace(f"s{server}"),
                f"{before}{command} > ray-{server}.log 2>&1 && touch up-{server} && {then}",
                nics,
            )

    def start_head(self) -> None:
        """Start Ray's head, and wait until it has started: Ray gives each machine 30 s for that."""
        (log := self._folder / "ray-head.log").unlink(missing_ok=True)
        host = self._layout.coordinator_address
        options = ("--head", "--block", f"--port={PORT}", f"--node-ip-address={host}", "--no-monitor")
        command = shlex.join((*_RAY, *options, "--include-dashboard=false", *_NODE, "--num-cpus=0"))
        self._start("head", self._layout.namespace(_HEAD), f"exec {command} > ray-head.log 2>&1", self._store)
        self.until(lambda: log.exists() and "runtime started" in log.read_text(), "Ray's head did not start")
        assert self.head_answers()

    def head_answers(self) -> bool:
        """Whether the control store answers."""
        return namespace.inside(self._layout.namespace("s0"), lambda: head.obstacle(self.address) == "")

    def kill_head(self) -> None:
        """Kill every process on the head's machine."""
        assert namespace.kill(self._layout.namespace(_HEAD)) > 1

    def actors(self) -> list[str]:
        """The actors of the job that live on the servers' machines."""
        spaces = [self._layout.namespace(f"s{server}") for server in self._network.fabric.servers]
        names = namespace.processes(spaces).values()
        return [name for name in names if name.startswith("ray::") and not name.startswith(_OWN)]

    def until(self, condition: Callable[[], object], otherwise: str, within_s: float = _STARTS_S) -> None:
        """Wait for a condition; shows the ends of all logs if it does not come."""
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                logs = [path for path in self._folder.iterdir() if path.suffix in (".log", ".txt")]
                said = [f"{path.name}: {path.read_text(errors='replace')[-800:]}" for path in logs]
                raise AssertionError("\n".join([otherwise, *said]))
            time.sleep(0.1)

    def close(self) -> None:
        """End every process."""
        self._machines.close()

    def _start(self, machine: str, space: str, command: str, extra: dict[str, str] | None = None) -> None:
        # Ray takes every raylet that a driver sees in /proc for one of its own machine.
        shell = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c"]
        shell.append(f"cd {shlex.quote(str(self._folder))} && {command}")
        environment = {**self._environment, **(extra or {})}
        self._machines.start(machine, namespace.path_of(space), shell, environment, logged=False)


@contextmanager
def ray_cluster(
    network: EmulatedFabric, folder: Path, with_redis: bool, patience_s: float
) -> Iterator[RayCluster]:
    """A Ray whose processes do without their head for `patience_s` seconds; all of it ends with the test."""
    cluster = RayCluster(network, folder, with_redis, patience_s)
    try:
        yield cluster
    finally:
        cluster.close()
