"""The walks of docs/explanation/walks.md are the ways that a gradient and a failure go: both are walked."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
from one_process import DEADLINE_S, OneProcess

import bml
from bml.cluster.spec.job import JobSpec
from bml.train.session import Session

PAGE = Path(__file__).parents[2] / "docs/explanation/walks.md"
ROOT = Path(bml.__file__).parent
N_ELEMENTS = 1 << 18
WARM, STEPS = 5, 30
SERVER_0, DIES = ("train-0", "bml-server-0"), 3

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


class Station(NamedTuple):
    """A function on the way, as the page names it."""

    module: str
    function: str

    def is_at(self, call: Call) -> bool:
        of_it = call.function == self.function or call.function.startswith(f"{self.function}.<locals>")
        return of_it and call.module == self.module


class Call(NamedTuple):
    """A call that was seen."""

    thread: str
    module: str
    function: str


def section(title: str) -> str:
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def stations(text: str) -> list[Station]:
    return [Station(*found) for found in re.findall(r"^\| `([\w/.]+)` \| `([\w.]+)` \|", text, re.MULTILINE)]


class Recorder:
    """What all threads of this process call of bml, while it is switched on."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.on = False
        self._modules: dict[str, str] = {}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self.on:
            return
        code = frame.f_code
        if (module := self._modules.get(code.co_filename)) is None:
            module = self._modules[code.co_filename] = self._module(code.co_filename)
        if module:
            self.calls.append(Call(threading.current_thread().name, module, code.co_qualname))

    @staticmethod
    def _module(file: str) -> str:
        path = Path(file)
        return str("bml" / path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""

    def take(self) -> list[Call]:
        self.on = False
        calls, self.calls = self.calls, []
        return calls


class Walked(NamedTuple):
    steps: list[list[Call]]
    """What each step called, of those without a fault."""
    failure: list[Call]
    """What was called from a death in a step until that step was committed."""


@pytest.fixture(scope="module")
def walked() -> Walked:
    """A job of four servers in this process; after some steps one of them dies in a step."""
    recorder, taken, worlds = Recorder(), list[list[Call]](), list[OneProcess]()
    barrier = threading.Barrier(4)

    def train(session: Session) -> None:
        w = np.zeros(N_ELEMENTS, np.float32)
        session.state(params=w)
        me = session.server
        for step, batch in enumerate(session.batches(16 * (STEPS + 1), global_batch=16, epochs=1, seed=0)):
            barrier.wait(DEADLINE_S)
            if me == 0:
                recorder.on = True
            barrier.wait(DEADLINE_S)
            if step == STEPS and me == DIES:
                worlds[0].die(DIES)
                return
            w += batch.allreduce(
                np.full(N_ELEMENTS, len(batch.indices), np.float32),
                recompute=lambda lost: np.full(N_ELEMENTS, len(lost), np.float32),
            )
            if step < STEPS:
                barrier.wait(DEADLINE_S)
            if me == 0:
                taken.append(recorder.take())

    with pytest.MonkeyPatch.context() as patch:
        threading.setprofile(recorder.note)
        try:
            worlds.append(OneProcess(patch, JobSpec("bcube:2x2", detect_s=5.0, transport="tcp"), train))
            worlds[0].wait()
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
    assert len(taken) == STEPS + 1
    return Walked(taken[WARM:STEPS], taken[STEPS])


def first_missed(way: list[Station], calls: list[Call], threads: tuple[str, ...]) -> Station | None:
    """The first station to which these threads do not come after the one before; None if they go the way."""
    of_them = iter([each for each in calls if each.thread in threads])
    return next((station for station in way if not any(station.is_at(each) for each in of_them)), None)


def test_a_gradient_goes_the_way_that_is_told(walked: Walked) -> None:
    text = section("The walk of a gradient")
    way = stations(text)
    _, beside = text.split("\nBeside it,")
    named = {station.module for station in way} | set(re.findall(r"`(bml/[\w/]+\.py)`", beside))
    assert len(way) > 50
    comes_in = [station.function for station in way].index("Poller.poll")
    missed = {first_missed(way[:comes_in], step, SERVER_0[:1]) for step in walked.steps}
    assert None in missed, missed
    assert None in {first_missed(way[comes_in:], step, SERVER_0) for step in walked.steps}
    in_every_step = set.intersection(*({each.module for each in step} for step in walked.steps))
    assert in_every_step <= named, in_every_step - named
    assert named <= set.union(*({each.module for each in step} for step in walked.steps))


def test_a_failure_goes_the_way_that_is_told(walked: Walked) -> None:
    noticed, *parts = section("The walk of a failure").split("\n**The ")
    way = stations("".join(parts))
    threads = (*SERVER_0, "coordinator")
    assert len(way) > 30
    assert first_missed(way, walked.failure, threads) is None
    for station in stations(noticed):
        assert any(station.is_at(each) for each in walked.failure), station
    without_a_fault = [each for step in walked.steps for each in step]
    only_then = [each for each in way if not any(each.is_at(call) for call in without_a_fault)]
    assert len(only_then) > 20, "it is a way of its own"


def test_modules_that_the_page_names_are_there() -> None:
    for module in re.findall(r"`(bml/[\w/]+\.py)`", PAGE.read_text()):
        assert (ROOT.parent / module).exists() or (ROOT / module.removeprefix("bml/")).exists(), module
