"""A Ray on this machine that has time: in software emulation all is some 30 times slower than Ray expects.

Everything that the job uses is Ray's own: control store, raylets, workers. Left out is what it does not use,
as each is a Python that imports for minutes: dashboard, log monitor, autoscaler, and the two agents of every
node, one for metrics and one for packages that a job would have installed. A raylet waits 15 s, whatever is
set, for the files with the ports of its agents, so these are written before it starts.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
import worker_template
from ray._private import services, utils
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import (
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)
from ray_settings import STARTS_S
from worker_template import WorkerTemplate

#: What workers import when they have started, to be imported before they are forked.
_LATE = ("bml.cluster.ray.actors", "ray._common.usage.usage_lib")
_STORE_NBYTES = 80_000_000
_PORTS = (
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
)
_AGENTS = ("--dashboard_agent_command=", "--runtime_env_agent_command=")
#: The raylet adds arguments of its own.
_NO_AGENT = 'bash -c "exec sleep infinity"'


class _Node(Node):  # type: ignore[misc]
    """Ray's node, without a dashboard, which it starts even if it is told not to, and without agents."""

    def start_api_server(self, **_: Any) -> None:
        pass

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        for name in _PORTS:
            persist_port(self._session_dir, self._node_id, name, getattr(self._ray_params, name))
        super().start_raylet(*arguments, **options)


def _patient_get_node(get_node: Any, gcs_address: str, node_id: str) -> Any:
    """Return what Ray knows of a node, as soon as it does: Ray itself asks for 30 s, which cannot be set."""
    deadline = time.monotonic() + STARTS_S
    while True:
        try:
            return get_node(gcs_address, node_id)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _start_without_agents(start: Any, command: list[str], *arguments: Any, **options: Any) -> Any:
    """Start one of Ray's processes; the agents of a raylet are processes that do nothing."""
    command = [
        next((each + _NO_AGENT for each in _AGENTS if word.startswith(each)), word) for word in command
    ]
    return start(command, *arguments, **options)


@contextmanager
def slow_ray(folder: Path, servers: int, first_port: int = 30_000) -> Iterator[str]:
    """A head, and a node for each of so many servers; the head's address. This process has no threads yet."""
    for name in _LATE:
        importlib.import_module(name)
    template = WorkerTemplate(folder)
    nodes: list[Node] = []
    try:
        with (
            patch.object(services, "get_node", functools.partial(_patient_get_node, services.get_node)),
            patch.object(
                services,
                "start_ray_process",
                functools.partial(_start_without_agents, services.start_ray_process),
            ),
            # Agents need packages, and to look whether they are there means to import them.
            patch.object(utils, "get_dashboard_dependency_error", return_value=ImportError("not looked for")),
        ):
            for number in range(servers + 1):
                nodes.append(_node(folder, number, nodes[0].gcs_address if nodes else None, first_port))
        yield nodes[0].gcs_address
    finally:
        if ray.is_initialized():
            ray.shutdown()
        for node in reversed(nodes):
            node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
        template.close()


def _node(folder: Path, number: int, head: str | None, first_port: int) -> Node:
    """Start the node with this number at an address of its own; 0 is the head, where no server is."""
    began = time.monotonic()
    ports = {name: first_port + len(_PORTS) * number + place for place, name in enumerate(_PORTS)}
    parameters = RayParams(
        gcs_address=head,
        node_ip_address=f"127.0.0.{number + 2}",  # not .1, for which Ray takes another address
        num_cpus=1 if number else 0,
        num_gpus=0,
        object_store_memory=_STORE_NBYTES,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        setup_worker_path=worker_template.__file__,
        temp_dir=str(folder),
        **ports,
    )
    node = _Node(parameters, head=head is None, shutdown_at_exit=True, spawn_reaper=True)
    print(f"\nray: node {number} is there after {time.monotonic() - began:.1f} s", flush=True)
    return node
