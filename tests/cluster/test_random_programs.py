"""A sample of the random training programs of `bml check --programs`, on real processes with real faults."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import jobs
import pytest

from bml.errors import BmlError
from bml.sharedmem import segment
from bml.sim.programs.check import Ends, judge
from bml.sim.programs.writer import Program, Writer

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

SEEDS = range(int(os.environ.get("BML_PROGRAMS", "10")))
N_SERVERS = 4
TRANSPORTS = ("tcp",) if segment.why_not() else ("tcp", "shm")


def faults(chance: random.Random) -> dict[str, Any]:
    """Servers that are killed, leave, freeze or join, early in the program: many have few steps only."""
    victim, other = chance.sample(range(N_SERVERS), 2)
    step = chance.randint(1, 8)
    kinds: list[dict[str, Any]] = [
        {"faults": [f"kill:{victim}@step={step}"]},
        {"faults": [f"kill:{victim}@step={step}"], "rejoin": True},
        {"faults": [f"kill:{victim}@step={step}", f"leave:{other}@step={step + chance.randint(0, 2)}"]},
        {"faults": [f"freeze:{victim}@step={step},for=1.5s"], "rejoin": True, "detect_s": 0.5},
        {"absent": [victim], "faults": [f"join:{victim}@step={step}"]},
    ]
    return chance.choice(kinds)


def outcome(program: Program, chance: random.Random) -> tuple[Ends, str]:
    """Run it; the text says what befell the job."""
    ends, befell = Ends(), {"transport": chance.choice(TRANSPORTS), **faults(chance)}
    try:
        result = jobs.launch(program.compiled(), "bcube:2x2", **befell)
    except BmlError as error:
        ends.failed = True
        ends.errors.append((-1, False, error))
        return ends, f"{befell}: {error}"
    for server, report in result.reports.items():
        if report.outcome == "done" and report.contributed:
            ends.values[server], ends.digests[server] = report.value, report.digest
            ends.ledgers[server] = report.samples
    return ends, f"{befell}; lost: {result.dead}"


@pytest.mark.parametrize("seed", SEEDS)
def test_it_ends_with_the_oracles_numbers_or_a_named_error(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(f"real {seed}")
    program = Writer(chance, chance.random() < 0.25).program()
    monkeypatch.setenv("BML_DEBUG", "1" if program.flaw == "changed before it is committed" else "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends, befell = outcome(program, chance)
    assert ends.values or ends.failed
    assert not judge(program, N_SERVERS, ends), (
        f"seed {seed}, {befell}, flaw {program.flaw!r}\n{program.text}"
    )
