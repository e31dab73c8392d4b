"""A fleet of actors on a Ray that only records its calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_ray import NOBODY, SPEC, FakeRay, contact

from bml.cluster.fleets.placement import Machine


@pytest.fixture
def own_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logger of bml has no handlers, as in a process of its own, and those that it gets go."""
    logger = logging.getLogger("bml")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "handlers", [])


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    ray_fleet = pytest.importorskip("bml.cluster.ray.fleet")
    from bml.cluster.ray import asking as ray_asking
    from bml.cluster.ray import connection as ray_connection
    from bml.cluster.ray import coordinator as ray_coordinator
    from bml.cluster.ray import gathering as ray_gathering
    from bml.cluster.ray import machines as ray_machines
    from bml.cluster.ray import reports as ray_reports
    from bml.cluster.ray import spares as ray_spares
    from bml.cluster.ray.watching import cluster as ray_watch

    made = FakeRay()
    for module in (
        *(ray_fleet, ray_coordinator, ray_connection, ray_gathering, ray_machines),
        *(ray_asking, ray_reports, ray_spares, ray_watch),
    ):
        monkeypatch.setattr(module, "ray", made)
    for module in (ray_fleet, ray_coordinator):
        monkeypatch.setattr(module, "on_node", lambda node: node)
    for module, name in (
        *((ray_fleet, "living_machines"), (ray_fleet, "open_machines")),
        (ray_spares, "open_machines"),
    ):
        monkeypatch.setattr(module, name, lambda: [Machine("127.0.0.1", "a", 2.0, True)])
    monkeypatch.setattr(ray_watch, "draining_nodes", lambda: made.draining)
    for module in (ray_fleet, ray_reports, ray_spares):
        monkeypatch.setattr(module, "_LOOK_S", 0.05)
    for server in SPEC.servers:
        made.answers[f"ServerActor {server}", "contact"] = (contact(server), NOBODY)
    before = {*threading.enumerate()}
    yield made
    left = {thread.name for thread in {*threading.enumerate()} - before}
    assert "bml-watch" not in left, "a fleet that is not closed would look at the Ray of the next test"


@pytest.fixture
def fleet(ray: FakeRay) -> Iterator[Any]:
    from bml.cluster.ray.fleet import RayFleet

    made = RayFleet(SPEC, None, prints=False)
    made.start(b"train")
    yield made
    made._watch.close()
