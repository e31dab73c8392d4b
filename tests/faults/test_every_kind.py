"""Every kind of fault in the notation can be applied, is described, and is in the documents."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bml.cluster.server import injection
from bml.cluster.server.injection import Actuators, Injection
from bml.faults import Fault, FaultPlan
from bml.faults.notation import KINDS
from bml.faults.plan import touches
from bml.topology import bcube

FABRIC = bcube(3, 2)
TESTING = (Path(__file__).parents[2] / "docs" / "guides" / "testing.md").read_text()


@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_does_what_the_fault_says(
    kind: str, emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind that is only added to the notation would end the server's loop when it strikes."""
    done: list[str] = []

    def note(name: str) -> Any:
        return lambda *_: done.append(name)

    monkeypatch.setattr(injection.os, "kill", note("kill"))
    monkeypatch.setattr(injection.os, "_exit", note("exit"))
    monkeypatch.setattr(injection, "stop_this_process", note("stop"))
    monkeypatch.setattr(injection, "_hold_the_gil", note("gil"))
    fault = Fault.parse(KINDS[kind].example)
    FaultPlan((fault,)).validate(FABRIC)
    server = 0 if fault.by_anybody else min(s for s in FABRIC.servers if touches(fault, s, FABRIC))
    transport = SimpleNamespace(**{name: note(name) for name in ("silence", "unsilence", "stall", "unstall")})
    poller = SimpleNamespace(now_s=lambda: 0.0, after=lambda *_: None)
    on_fabric = note("fabric") if emulated or KINDS[kind].emulated else None
    actuators = Actuators(
        transport, poller, note("tell"), note("throw"), note("dispatch"), note("leave"), on_fabric
    )  # type: ignore[arg-type]
    core: Any = SimpleNamespace(step=1, phase="", view=None, progress=0.0)
    injection_of = Injection(server, FaultPlan(), FABRIC, actuators)
    assert injection_of.add(str(fault).partition("@")[0] + _settings(fault), core, 0.0).startswith("server ")
    injection_of.poll(core, 0.0)
    assert done


def _settings(fault: Fault) -> str:
    """What follows the time in the notation: without a time it strikes at once."""
    _, comma, settings = str(fault).partition("@")[2].partition(",")
    return comma + settings


@pytest.mark.parametrize("kind", KINDS)
def test_the_documents_know_it(kind: str) -> None:
    assert f"`{kind}:" in TESTING or f"`{kind}`" in TESTING
