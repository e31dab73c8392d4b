"""The simulator beside two independent ones: a slow one, and SimGrid where it is installed."""

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from random_traffic import draw, simulated
from slow_oracle import arrivals, max_min

SYSTEM_PYTHON = "/usr/bin/python3"

pytestmark = pytest.mark.timeout(600)  # the first of them may compile, on a busy machine


def test_the_oracle_shares_as_the_book_does():
    # Bertsekas and Gallager: three connections of one link each share what the long one leaves.
    assert max_min([[0, 1], [0], [1], [1]], [1.0, 1.0]) == pytest.approx([1 / 3, 2 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize("seed", range(50))
def test_random_traffic_arrives_when_the_slow_oracle_says(seed):
    case = draw(seed)
    assert simulated(case) == pytest.approx(arrivals(**asdict(case)), rel=1e-6)


def has_simgrid():
    known = subprocess.run([SYSTEM_PYTHON, "-c", "import simgrid"], capture_output=True)
    return known.returncode == 0


@pytest.mark.skipif(
    not Path(SYSTEM_PYTHON).exists() or not has_simgrid(), reason="SimGrid is not installed (python3-simgrid)"
)
def test_random_traffic_arrives_when_simgrid_says():
    runner, scale = Path(__file__).with_name("simgrid_runner.py"), 1e9  # it takes whole bytes
    cases = [replace(draw(seed, in_order=True), delay=0.0) for seed in range(100, 150)]
    asked = [
        {**asdict(case), "scale": scale, "capacity": [each * scale for each in case.capacity]}
        for case in cases
    ]
    answer = subprocess.run(
        [SYSTEM_PYTHON, runner], input=json.dumps(asked), capture_output=True, text=True, timeout=100
    )
    assert answer.returncode == 0, answer.stderr
    for case, arrived in zip(cases, json.loads(answer.stdout), strict=True):
        assert simulated(case) == pytest.approx(arrived, rel=1e-6)
