"""Settings that a job on an emulated fabric refuses before any of its processes starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bml.cluster.emulated.fleet import EmulatedFleet
from bml.cluster.spec.job import JobSpec
from bml.errors import FabricError, UsageError
from bml.fabric import Layout
from bml.topology import parse


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fabric that a user keeps up, of which nothing is made."""
    network = SimpleNamespace(name="lab", fabric=parse("bcube:2x1"), layout=Layout(parse("bcube:2x1"), "lab"))
    monkeypatch.setattr("bml.fabric.use", lambda name: network)


@pytest.mark.usefixtures("lab")
def test_loss_on_a_machine_that_cannot_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "s390x")
    spec = JobSpec("bcube:2x1", faults=("loss:1/0@step=2,share=5%",), emulated="lab")
    with pytest.raises(FabricError, match="needs x86-64 or AArch64, this is s390x"):
        EmulatedFleet(spec, "processes", False, print)


@pytest.mark.usefixtures("lab")
def test_another_shape() -> None:
    with pytest.raises(
        UsageError, match="the job is for bcube:2x2, but the emulated fabric lab is a bcube:2x1"
    ):
        EmulatedFleet(JobSpec("bcube:2x2", emulated="lab"), "processes", False, print)
