"""Every kind of fault, in every phase of a step and of the job, on every server: real processes, one oracle.

A cell of the matrix is a job of 20 steps in which one fault strikes in step 9 (or at the start or the end);
in the phase `recovery` it strikes while the job recovers from another one. In the phases `joining` and
`giving` the job is longer, a server joins it, and the fault strikes this server, or one of those that give
it the state, while the state moves. Whatever happens, whoever ends well has taken every step once, holds the
same bits as all others, has a ledger in which every sample of every epoch is used once, and parameters that
equal the fault-free ones up to the order of additions.

BML_MATRIX=all runs all of it (make test-matrix), BML_MATRIX=N a sample of N cells drawn from --fault-seed.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, replace
from typing import Any, assert_never

import jobs
import numpy as np
import pytest
from every_kind import IN_MATRIX, MATRIX_BREAKS, MATRIX_SETTINGS, OF_LINKS, OF_THE_COORDINATOR

import bml
from bml.errors import TrainingError
from bml.faults.notation import STEP_PHASES
from bml.pytest_plugin import seed_of
from bml.topology import Fabric, parse

pytestmark = [pytest.mark.real, pytest.mark.matrix, pytest.mark.timeout(120)]

FABRICS = ("bcube:2x2", "bcube:3x2")
TRANSFER = ("giving", "joining")
PHASES = (*STEP_PHASES, "recovery", "start", "shutdown", *TRANSFER)
STEP, EPOCHS, STEPS = 9, 4, 20
#: Of jobs that a server joins: it takes as long as a process needs to start.
LONG_EPOCHS, LONG_STEPS = 40, 200
#: Float64 numbers that make the state so large that every donor has a piece of it to give.
_BALLAST = 300_000
DEADLINE_S = 40.0
#: Float32 numbers beside the gradients with which servers that share memory add shares, not the whole.
_PADDING = 300_000
#: What a server may miss of a job and still be told that it is out: it thaws when it is over, or nearly.
FROZEN_S = float(MATRIX_SETTINGS["freeze"]["for"].removesuffix("s"))
SAMPLE = 16


@dataclass(frozen=True)
class Cell:
    fabric: str
    kind: str
    phase: str
    server: int
    transport: str = "tcp"

    def __str__(self) -> str:
        return f"{self.fabric}-{self.kind}-{self.phase}-{self.server}-{self.transport}"

    @property
    def shape(self) -> Fabric:
        return parse(self.fabric)

    @property
    def level(self) -> int:
        """Both levels have their turn."""
        return (self.server + PHASES.index(self.phase)) % self.shape.levels

    @property
    def part(self) -> str:
        """What breaks, as a failure of the fabric; nothing if all of it stays whole."""
        if self.kind == "leave" and self.phase == "shutdown":
            return ""  # there is no step any more before which it could go
        if self.kind == "exception" and self.phase == "joining":
            return f"server:{self.server}"  # a server that only learns is missed by none
        match MATRIX_BREAKS[self.kind]:
            case "server":
                return f"server:{self.server}"
            case "link":
                return f"link:{self.server}/{self.level}"
            case "switch":
                return f"switch:{self.level}/{self.shape.group(self.server, self.level)}"
            case "":
                return ""
            case never:
                assert_never(never)

    @property
    def other(self) -> str:
        """The link whose cut the job recovers from, when the fault strikes in the phase `recovery`."""
        return f"{(self.server + 1) % self.shape.n_servers}/{self.level}"

    @property
    def joiner(self) -> int | None:
        """The server that joins, and is absent before."""
        if self.phase not in TRANSFER:
            return None
        return self.server if self.phase == "joining" else self.shape.neighbours(self.server, self.level)[0]

    @property
    def faults(self) -> list[str]:
        target = f":{self.part.partition(':')[2] or self.server}"
        if self.kind == "flap":
            target = f":{self.server}/{self.level}"
        if self.kind in OF_THE_COORDINATOR:
            target = ""
        when = f"step={STEP},phase={self.phase}"
        if self.phase in ("start", "shutdown"):
            when = f"phase={self.phase}"
        elif self.joiner is not None:
            when = "phase=transfer"
        how = "".join(f",{name}={value}" for name, value in MATRIX_SETTINGS.get(self.kind, {}).items())
        first = [f"cut:{self.other}@step={STEP}"] if self.phase == "recovery" else []
        if self.joiner is not None:
            first = [f"join:{self.joiner}@step={STEP}"]
        return [*first, f"{self.kind}{target}@{when}{how}"]

    @property
    def seen_as(self) -> set[str]:
        """The failures as which a broken cable or switch may show: of two ends, either explains it."""
        two_left = self.shape.ports == 2 or self.phase == "recovery"
        if self.kind == "switch" and not two_left and self._joiner_is_on_it():
            # The joiner's end breaks as soon as it follows. Then the others send no state over this
            # switch, and break nothing at their ends.
            return {self.part, f"link:{self.joiner}/{self.level}"}
        if self.kind not in ("blackhole", "cut", "switch") or not two_left:
            return {self.part}
        return {*self.links, f"switch:{self.level}/{self.shape.group(self.server, self.level)}"}

    @property
    def links(self) -> set[str]:
        """All links of the switch."""
        group = self.shape.group(self.server, self.level)
        return {f"link:{each}/{self.level}" for each in self.shape.members(self.level, group)}

    def _joiner_is_on_it(self) -> bool:
        group = self.shape.group(self.server, self.level)
        return self.joiner in self.shape.members(self.level, group)

    @property
    def survivors(self) -> list[set[int]]:
        """Servers that may end well: of parts of one size, that goes on which was heard from first."""
        broken = [self.part] if self.part else []
        if self.phase == "recovery":
            broken.append(f"link:{self.other}")
        parts = self.shape.without(*broken).components()
        return [set(part) for part in parts if len(part) == len(parts[0])]


CELLS = [
    Cell(fabric, kind, phase, server)
    for fabric in FABRICS
    for kind in IN_MATRIX
    for phase in PHASES
    for server in (range(1) if kind in OF_THE_COORDINATOR else parse(fabric).servers)
]
#: Servers that share memory send no data over links: what befalls those is another matter.
SHARING = [
    replace(cell, transport="shm") for cell in CELLS if cell.kind not in OF_LINKS and cell.phase != "recovery"
]
#: Servers of one host that make zero-copy sends to each other, by the schedules of tcp.
ZERO_COPY = [replace(cell, transport="auto") for cell in SHARING]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    wanted = os.environ.get("BML_MATRIX", str(SAMPLE))
    if "cell" in metafunc.fixturenames:
        rng = random.Random(seed_of(metafunc.config))
        cells = CELLS + SHARING + ZERO_COPY
        if wanted != "all":
            cells = rng.sample(CELLS, int(wanted)) + rng.sample(SHARING, int(wanted) // 4)
            cells += rng.sample(ZERO_COPY, int(wanted) // 16)
        metafunc.parametrize("cell", cells, ids=str)


def train(session: bml.Session) -> dict[str, Any]:
    return jobs.descend(session, epochs=EPOCHS)


def train_widely(session: bml.Session) -> dict[str, Any]:
    return jobs.descend(session, epochs=EPOCHS, padding=_PADDING)


def train_and_wait(joiner: int) -> Any:
    """`train` for longer, and slowly until the server that joins is there."""

    def train(session: bml.Session) -> dict[str, Any]:
        w = session.empty(jobs.LENGTH)
        w[:] = 0
        ballast = np.zeros(_BALLAST)
        session.state(params=w, ballast=ballast)
        contributors, seen = [], False

        def again(indices: Any) -> Any:
            return jobs.sample_rows(indices, w)

        batches = session.batches(jobs.N_SAMPLES, global_batch=jobs.GLOBAL_BATCH, epochs=LONG_EPOCHS, seed=3)
        for batch in batches:
            seen = seen or joiner in session.view.members
            # From this step on the joiner's process starts, and view 2 lets it in.
            starts = len(contributors) >= STEP and session.view.epoch == 1
            time.sleep(0.004 if seen else 0.15 if starts else 0.025)
            w -= np.float32(0.1) * batch.allreduce(again(batch.indices), recompute=again)
            contributors.append(session.contributors)
        return {"params": w, "contributors": contributors}

    return train


def run(cell: Cell, seen: jobs.Seen) -> bml.Result:
    shares, wide = cell.transport == "shm", cell.transport != "tcp"
    with bml.start(
        train_and_wait(cell.joiner) if cell.joiner is not None else train_widely if wide else train,
        cell.fabric,
        launcher="processes",
        transport=cell.transport,
        algorithm="auto" if shares else "bml",
        faults=cell.faults,
        absent=[] if cell.joiner is None else [cell.joiner],
        min_servers=1,
        start_s=20.0,
        detect_s=0.5,
        on_change=seen,
    ) as job:
        try:
            return job.wait(DEADLINE_S)
        except bml.BmlError:
            if job.running:
                pytest.fail(f"it hangs: {job.status()}")
            raise


def test_cell(cell: Cell) -> None:
    print("faults:", *cell.faults)
    seen = jobs.Seen()
    if cell.kind == "exception" and cell.phase not in ("shutdown", "joining"):
        with pytest.raises(TrainingError, match=f"server {cell.server} raised InjectedError") as caught:
            run(cell, seen)
        check_end_by_error(cell, caught.value.result)  # type: ignore[attr-defined]
        return
    result = run(cell, seen)
    if cell.joiner is not None:
        check_joined(cell, result)
    else:
        check_end(cell, result)
    check_struck(cell, result, seen)


def check_struck(cell: Cell, result: bml.Result, seen: jobs.Seen) -> None:
    """The fault did what it is there for. At the end of a job nothing that is not a server is missed."""
    print("coordinators:", *seen.terms, "failures:", *sorted(seen.failures))
    match cell.kind:
        case "freeze" | "gil" if cell.phase not in ("start", "shutdown"):  # nobody misses it there
            noticed = cell.part in seen.failures or cell.server in result.dead
            stood_s = max(each["step_max_s"] for each in result.report["metrics"].values())
            assert noticed or stood_s > 0.9 * FROZEN_S, "it was not frozen"
        case "kill" | "exit" | "leave" if cell.part:
            assert cell.server in result.gone, "it did not go"
        case "coordinator" | "freeze:coordinator" if cell.phase != "shutdown":
            assert seen.terms[:2] == [1, 2], "the coordinator was not replaced"
        case "blackhole" | "cut" | "switch" if cell.phase != "shutdown":
            # Each server silences its own end. One by one, all links but one explain it as well.
            one_by_one = cell.kind == "switch" and len(cell.links & seen.failures) >= len(cell.links) - 1
            assert one_by_one or cell.seen_as & seen.failures, f"{cell.part} did not break"


def check_survivors(cell: Cell, result: bml.Result) -> None:
    """All of them are done, with the same bits, and every sample was used."""
    report = result.report
    views = [(view["epoch"], view["commit"], view["reason"]) for view in report["views"]]
    print("views:", *views, "dead:", report["dead"])
    done = set(result.values)
    # A server that stands still may go on before it is missed.
    spared = {cell.server} if cell.kind in ("freeze", "gil") else set()
    assert done - spared in [survivors - spared for survivors in cell.survivors]
    assert len(set(report["digests"].values())) == 1, "they hold different bits"
    assert report["samples"]["complete"], "a sample was used never, or twice"


def check_joined(cell: Cell, result: bml.Result) -> None:
    check_survivors(cell, result)
    done = set(result.values)
    assert any(f"server {cell.joiner} joins" in view["reason"] for view in result.report["views"])
    assert len({str(each.samples) for server, each in result.reports.items() if server in done}) == 1
    longest = max((value["contributors"] for value in result.values.values()), key=len)
    assert len(longest) == LONG_STEPS
    for value in result.values.values():
        seen = value["contributors"]
        assert seen == longest[-len(seen) :]
    np.testing.assert_allclose(result.value["params"], jobs.reference(LONG_EPOCHS), rtol=1e-4, atol=1e-5)


def check_end(cell: Cell, result: bml.Result) -> None:
    check_survivors(cell, result)
    histories = {server: value["history"] for server, value in result.values.items()}
    first = histories[min(histories)]
    assert all(history == first for history in histories.values())
    assert [step for step, _, _ in first] == list(range(1, STEPS + 1)), "a step is missing, or taken twice"
    np.testing.assert_allclose(result.value["params"], jobs.reference(EPOCHS), rtol=1e-4, atol=1e-6)


def check_end_by_error(cell: Cell, result: bml.Result) -> None:
    """The error ends the job for all; nobody hangs, and who has taken the same steps holds the same bits."""
    assert set(result.reports) | set(result.dead) == set(cell.shape.servers)
    bits: dict[int, set[str]] = {}
    for server, report in result.reports.items():
        assert report.outcome == ("failed" if server == cell.server else "stopped"), (server, report)
        if server != cell.joiner:  # it counts its own steps only
            bits.setdefault(report.metrics["steps"], set()).add(report.digest)
    if cell.joiner is not None:
        assert all(len(digests) == 1 for digests in bits.values()), "who stands alike holds different bits"
        return
    before = 0 if cell.phase == "start" else STEP - 2  # the job's first step compares the state
    others = {steps for steps in bits if steps}
    # A server is one step behind if the tokens of the step before had not reached it.
    assert others <= set(range(before - 1, before + 3)), f"steps taken: {sorted(bits)}"
