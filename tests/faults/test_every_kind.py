"""Every kind of fault has an act in each harness that it claims, is in the matrix and is in the documents."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import every_kind
import pytest

from bml.cluster.injection import acts, coordinator_acts, registry, server_acts
from bml.cluster.injection.actuators import Actuators
from bml.cluster.injection.injection import Injection
from bml.fabric.injector import FABRIC_ACTS, damage_of
from bml.faults import AtOnce, Fault, FaultPlan
from bml.faults.kinds import KINDS
from bml.faults.plan import touches
from bml.faults.settings import SETTINGS
from bml.sim import Mishap, Simulation, When
from bml.sim.world.settings import Settings
from bml.topology import UsageError, bcube, parse

FABRIC = bcube(3, 2)
INJECTION = Path(acts.__file__).parent


@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_does_what_the_fault_says(
    kind: str, emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind without an act would end the server's loop when it strikes."""
    done: list[str] = []

    def note(name: str) -> Any:
        return lambda *_: done.append(name)

    monkeypatch.setattr(server_acts.os, "kill", note("kill"))
    for name in ("_exit", "abort"):
        monkeypatch.setattr(server_acts.os, name, note(name))
    monkeypatch.setattr(server_acts, "stop_this_process", note("stop"))
    monkeypatch.setattr(server_acts.ctypes, "PyDLL", lambda _: SimpleNamespace(usleep=note("gil")))
    fault = replace(Fault.parse(KINDS[kind].example), trigger=AtOnce())
    FaultPlan((fault,)).validate(FABRIC)
    server = 0 if fault.by_anybody else min(s for s in FABRIC.servers if touches(fault, s, FABRIC))
    transport = SimpleNamespace(
        **{name: note(name) for name in ("silence", "unsilence", "stall", "unstall", "stand_still", "pace")}
    )
    poller = SimpleNamespace(now_s=lambda: 0.0, after=lambda *_: None)
    on_fabric = note("fabric") if emulated or KINDS[kind].emulated else None
    real = acts.SERVER_ACTS.get(kind)
    if real is not None:

        def acted(fault: Fault, actuators: Actuators) -> None:
            done.append("act")
            real.apply(fault, actuators)

        monkeypatch.setitem(acts.SERVER_ACTS, kind, real._replace(apply=acted))
    actuators = Actuators(
        server,
        FABRIC,
        transport,
        poller,
        note("tell"),
        note("throw"),
        note("dispatch"),
        note("leave"),
        SimpleNamespace(begin=note("slowdown")),
        on_fabric,
    )  # type: ignore[arg-type]
    core: Any = SimpleNamespace(step=1, phase="", view=None, progress=0.0)
    injection = Injection(FaultPlan(), FABRIC, actuators)
    assert injection.add(str(fault), core, 0.0).startswith(f"server {server} ")
    injection.poll(core, 0.0)
    assert done
    assert ("fabric" in done) == (on_fabric is not None and "fabric" in KINDS[kind].on)


def test_every_harness_that_a_kind_claims_has_its_act_and_no_other() -> None:
    claimed = {
        harness: {name for name, kind in KINDS.items() if harness in kind.on}
        for harness in ("server", "coordinator", "fabric")
    }
    assert acts.SERVER_ACTS.keys() == claimed["server"]
    assert acts.COORDINATOR_ACTS.keys() == claimed["coordinator"]
    assert FABRIC_ACTS.keys() == claimed["fabric"]


def test_every_file_that_registers_acts_is_imported() -> None:
    registering = {
        f"bml.cluster.injection.{path.stem}"
        for path in INJECTION.glob("*.py")
        if re.search(r"^@on_(server|coordinator)\(", path.read_text(), re.MULTILINE)
    }
    lines = (INJECTION / "acts.py").read_text().splitlines()
    assert registering == {line.removeprefix("import ") for line in lines if line.startswith("import bml.")}


def test_an_act_that_no_kind_claims_is_refused() -> None:
    with pytest.raises(ValueError, match="does not say that 'join' is applied on: server"):
        registry.on_server("join", does="x")(lambda fault, actuators: None)
    with pytest.raises(ValueError, match="two acts for 'kill' on: server"):
        registry.on_server("kill", does="x")(lambda fault, actuators: None)
    with pytest.raises(ValueError, match="does not say that 'kill' is applied on: coordinator"):
        registry.on_coordinator("kill", does="x")(lambda fault, ask: None)


@pytest.mark.parametrize("kind", acts.COORDINATOR_ACTS)
def test_the_coordinator_does_what_it_is_asked_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(coordinator_acts.os, "kill", lambda *_: done.append("kill"))
    monkeypatch.setattr(coordinator_acts, "stop_this_process", done.append)
    example, _ = KINDS[kind].coordinator or (KINDS[kind].example, "")
    fault = Fault.parse(example)
    assert fault.by_anybody
    acts.COORDINATOR_ACTS[kind].apply(fault, done.append)
    assert len(done) == 1


@pytest.mark.parametrize("kind", FABRIC_ACTS)
def test_a_fault_of_cables_is_a_damage_and_one_of_a_machine_is_none(kind: str) -> None:
    fault = Fault.parse(KINDS[kind].example)
    if KINDS[kind].target == "server":
        with pytest.raises(UsageError, match="strikes no cable"):
            damage_of(fault)
    else:
        assert damage_of(fault).kind in ("cut", "blackhole", "switch", "slow", "loss")


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.simulated])
def test_the_simulation_has_the_mishap_that_stands_for_it(kind: str) -> None:
    name = KINDS[kind].simulated
    targets = {"server": (3,), "link": (0, 1, 0) if name in ("stall", "lossy") else (1, 0), "switch": (0, 0)}
    mishap = Mishap(name, targets.get(KINDS[kind].target, ()), When("", 0, 0.05), 0.2)
    run = Simulation(parse("bcube:2x2"), seed=1, settings=Settings(steps=4), mishaps=[mishap])
    history = run.run()
    assert history.counts["fault"] >= 1


@pytest.mark.parametrize("kind", KINDS)
def test_its_settings_are_known_and_written_in_its_example(kind: str) -> None:
    known, fault = KINDS[kind], Fault.parse(KINDS[kind].example)
    assert {*known.takes} <= SETTINGS.keys()
    assert {*known.needs} <= {*known.takes}
    assert fault.settings.keys() >= {*known.needs}
    assert not (known.drawable and known.needs)
    assert known.means
    assert hash(fault) == hash(Fault.parse(known.example))


def test_every_kind_is_in_the_matrix_or_has_a_reason_not_to_be() -> None:
    there = {name.partition(":")[0] for name in every_kind.IN_MATRIX}
    assert there | every_kind.NOT_IN_MATRIX.keys() == KINDS.keys()
    assert not there & every_kind.NOT_IN_MATRIX.keys()
    assert all(len(reason) > 10 for reason in every_kind.NOT_IN_MATRIX.values())
    assert len(every_kind.NOT_IN_MATRIX) < len(KINDS) / 2


def test_the_matrix_knows_what_every_kind_in_it_breaks() -> None:
    assert every_kind.MATRIX_BREAKS.keys() == {*every_kind.IN_MATRIX}
    assert not any(KINDS[name.partition(":")[0]].emulated for name in every_kind.IN_MATRIX)


@pytest.mark.parametrize("written", every_kind.IN_MATRIX)
def test_the_matrix_gives_every_kind_its_settings(written: str) -> None:
    known = KINDS[written.partition(":")[0]]
    given = every_kind.MATRIX_SETTINGS.get(written, {})
    assert {*known.needs} <= given.keys() <= {*known.takes}
    assert all(SETTINGS[name].value(value) for name, value in given.items())
