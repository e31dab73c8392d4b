"""Jobs whose servers live in network namespaces: real cables are cut, the same step is finished."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from click.testing import CliRunner
from wires_in_namespaces import reaches

import bml
from bml.cli import main
from bml.fabric import EmulatedFabric
from bml.pytest_plugin import BringUp
from bml.topology import parse_failure

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

EPOCHS, STEPS = 40, 200
#: What computing a gradient takes: much less than the launcher needs to hear of a step would be a race.
COMPUTE_S = 0.01
TRAIN = """
import numpy as np
def train(session):
    return {"sum": float(session.allreduce(np.ones(3))[0])}
"""


class Paced:
    """A session whose batches take their time, without using the cores."""

    def __init__(self, session: Any):
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def batches(self, *arguments: Any, **settings: Any) -> Iterator[Any]:
        for batch in self._session.batches(*arguments, **settings):
            time.sleep(COMPUTE_S)
            yield batch


def train(session: Any) -> dict[str, Any]:
    return jobs.descend(Paced(session), epochs=EPOCHS)


def run(network: EmulatedFabric, *faults: str) -> bml.Result:
    shape, name = network.fabric.name, network.name
    return bml.launch(train, shape, launcher="processes", emulated=name, faults=faults, prints=False)


def check_sound(result: bml.Result) -> None:
    report = result.report
    assert report["steps"] == STEPS
    assert len(set(report["digests"].values())) == 1
    histories = [value["history"] for value in result.values.values()]
    assert [step for step, _, _ in histories[0]] == list(range(1, STEPS + 1)), "no step lost, none doubled"
    assert all(history == histories[0] for history in histories)
    assert report["samples"]["complete"], "every sample exactly once per epoch"
    np.testing.assert_allclose(result.value["params"], jobs.reference(EPOCHS), rtol=1e-3, atol=1e-5)


def works(network: EmulatedFabric, failures: list[str]) -> set[tuple[int, int]]:
    """The NICs that can be used when these parts are dead."""
    left = network.fabric.without(*map(parse_failure, failures))
    return {(server, level) for server, level in network.fabric.links if left.neighbours(server, level)}


def check_whole_again(network: EmulatedFabric) -> None:
    """After the job, every cable carries traffic both ways."""
    assert network.status()["failures"] == []
    for server, level in network.fabric.links:
        for other in network.fabric.neighbours(server, level):
            assert reaches(network, server, other, level, within_s=20)


@pytest.mark.serial("recovery in well under a second is what bml promises")
def test_a_real_cut_between_two_at_a_time(emulated_fabric: BringUp) -> None:
    network = emulated_fabric("bcube:2x2", "100mbit")
    result = run(network, "cut:1/0@t=300ms")
    check_sound(result)
    assert sorted(result.values) == [0, 1, 2, 3]
    view = result.report["views"][-1]
    # Both ends of a switch with two ports tell the same story; either NIC explains it.
    assert view["failures"] in (["link:0/0"], ["link:1/0"])
    assert view["noticed_s"] + view["recover_s"] < 1.5
    check_whole_again(network)


@pytest.mark.serial("recovery in well under a second is what bml promises")
def test_real_cut_black_hole_dead_switch_and_kill(emulated_fabric: BringUp) -> None:
    network = emulated_fabric("bcube:3x2", "100mbit")
    result = run(
        network, "cut:4/0@step=20", "blackhole:2/1@step=60", "switch:1/0@step=100", "kill:6@step=150"
    )
    check_sound(result)
    assert sorted(result.values) == [0, 1, 2, 3, 4, 5, 7, 8], "no server was lost but the one that was killed"
    start, *views = result.report["views"]
    assert start["failures"] == []
    # A dead switch takes its ports down one by one: a slow machine may notice them in several views.
    failures, expected = views[-1]["failures"], ["link:4/0", "link:2/1", "switch:1/0", "server:6"]
    assert works(network, failures) == works(network, expected), [view["reason"] for view in views]
    assert views[-1]["recover_s"] is not None
    for view in views:  # one that is followed by another before a commit has no recovery of its own
        assert view["noticed_s"] + (view["recover_s"] or 0.0) < 1.5
    check_whole_again(network)


def test_a_spare_takes_the_place_of_a_dead_server_behind_its_cables(emulated_fabric: BringUp) -> None:
    network = emulated_fabric("bcube:2x2")

    def train(session: Any) -> Any:
        lost = session.joins

        def pause() -> None:
            nonlocal lost
            lost = lost or 3 not in session.contributors
            jobs.pace(session, 4 if lost else 0)

        found = jobs.descend(session, epochs=EPOCHS, pause_s=COMPUTE_S, pause=pause)
        return {**found, "namespace": os.stat("/proc/self/ns/net").st_ino, "joined": session.joins}

    settings = {"emulated": network.name, "spares": 1, "faults": ["kill:3@step=20"], "prints": False}
    result = bml.launch(train, "bcube:2x2", launcher="processes", **settings)
    report = result.report
    assert sorted(result.values) == [0, 1, 2, 3], report["dead"]
    assert [server for server, value in result.values.items() if value["joined"]] == [3]
    for server, value in result.values.items():
        assert value["namespace"] == os.stat(str(network.namespace_path(server))).st_ino
    assert len(set(report["digests"].values())) == 1
    assert report["samples"]["complete"]
    np.testing.assert_allclose(result.value["params"], jobs.reference(EPOCHS), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"fabric": "bcube:2x2"}, bml.UsageError, "is a bcube:3x2: run it with --fabric bcube:3x2"),
        ({"launcher": "ray", "address": "10.0.0.1:6379"}, bml.UsageError, "give no address"),
        ({"emulated": "nobody"}, bml.BmlError, "bml fabric up bcube:3x2 --name nobody"),
    ],
)
def test_a_job_that_does_not_fit(
    emulated_fabric: BringUp, settings: dict[str, Any], kind: type[Exception], message: str
) -> None:
    given = {"fabric": "bcube:3x2", "launcher": "processes", "emulated": emulated_fabric("bcube:3x2").name}
    with pytest.raises(kind, match=message):
        bml.launch(train, **{**given, **settings})


@pytest.mark.smoke
def test_bml_run_on_it(emulated_fabric: BringUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = emulated_fabric("bcube:2x2")
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "small_job.py").write_text(TRAIN)
    where = [
        "--fabric",
        "bcube:2x2",
        "--launcher",
        "processes",
        "--fabric-emulated",
        "--fabric-name",
        network.name,
    ]
    done = CliRunner().invoke(main, ["run", str(tmp_path / "small_job.py"), *where, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["values"]["3"] == {"sum": 4.0}
