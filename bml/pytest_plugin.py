"""The pytest plugin: fault plans for tests of training scripts, drawn from a printed seed; emulated fabrics.

    @pytest.mark.faults("kill:4@step=20", "blackhole:2/0@step=30")          # these
    @pytest.mark.faults(fabric="bcube:3x2", steps=40, kinds=("kill", "cut"))  # drawn from --fault-seed
    def test_training(fault_plan):
        result = bml.launch(train, "bcube:3x2", launcher="processes", faults=fault_plan)

Every test draws a plan of its own from the seed and its own name, so it draws the same one when it is run
alone. The plan is shown with the failure of a test. docs/testing.md tells more.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

# Every pytest of an environment with bml in it loads this file: what a fixture needs is imported in it.
if TYPE_CHECKING:
    from bml.fabric.network import Emulated
    from bml.faults.plan import FaultPlan

_SEED = pytest.StashKey[int]()
_PLAN = pytest.StashKey["FaultPlan"]()
_MARKER = "faults(*faults, fabric=…, steps=…, count=2, kinds=…): what the fixture fault_plan is"
BringUp = Callable[..., "Emulated"]
_DRAWN = {"fabric", "steps", "count", "kinds"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --fault-seed."""
    parser.getgroup("faults").addoption(
        "--fault-seed",
        type=int,
        default=None,
        metavar="N",
        help="draw the fault plans of tests from this seed (default: BML_FAULT_SEED, else a fresh one)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed, and make the marker known."""
    config.addinivalue_line("markers", _MARKER)
    given = config.getoption("--fault-seed")
    setting = os.environ.get("BML_FAULT_SEED", "")
    if given is None and setting and not setting.isdecimal():
        raise pytest.UsageError(f"BML_FAULT_SEED is {setting!r}: give a number")
    if given is not None and given < 0:
        raise pytest.UsageError(f"--fault-seed is {given}: give a number from 0")
    fresh = int(setting) if setting else secrets.randbelow(1 << 31)
    config.stash[_SEED] = fresh if given is None else given


def pytest_report_header(config: pytest.Config) -> str:
    """Print the seed."""
    return f"fault seed: {config.stash[_SEED]} (repeat with --fault-seed {config.stash[_SEED]})"


def seed_of(config: pytest.Config) -> int:
    """The seed of this run, for hooks that draw something themselves."""
    return config.stash[_SEED]


@pytest.fixture(scope="session")
def fault_seed(pytestconfig: pytest.Config) -> int:
    """The seed of this run, for tests that draw something themselves."""
    return seed_of(pytestconfig)


@pytest.fixture
def fault_plan(request: pytest.FixtureRequest) -> FaultPlan:
    """The fault plan of a test, for `bml.launch(..., faults=fault_plan)`.

    From `pytest.mark.parametrize("fault_plan", [...], indirect=True)` (texts, or lists of texts), else from
    `pytest.mark.faults`: its texts, or a plan drawn for `fabric` (needed) within `steps` steps (needed) of
    `count` faults of these `kinds` (see FaultPlan.draw).
    """
    plan = _plan(request)
    request.node.stash[_PLAN] = plan
    return plan


@pytest.fixture(scope="session")
def emulated_fabric() -> Iterator[BringUp]:
    """Return `bring_up(shape, rate="200mbit")`: the same healed fabric for the same shape, for all tests.

    Skips the test, with the reason, where no fabric can be emulated.
    """
    from bml.fabric.network import DEFAULT_RATE, down, obstacle, up

    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    made: dict[str, Emulated] = {}

    def bring_up(shape: str, rate: str = DEFAULT_RATE) -> Emulated:
        if shape not in made:
            made[shape] = up(shape, rate, name=f"t{os.getpid()}n{len(made)}")
        made[shape].heal_all()
        made[shape].shape(rate, rate)
        return made[shape]

    try:
        yield bring_up
    finally:
        for network in made.values():
            down(network.name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show the plan with the report of a test."""
    report: Any = yield
    if _PLAN in item.stash:
        seed = item.config.stash[_SEED]
        text = f"{item.stash[_PLAN] or 'no faults'}\nrepeat with --fault-seed {seed}"
        report.sections.append(("fault plan", text))
    return report  # type: ignore[no-any-return]  # how a hook wrapper gives its result back


def _plan(request: pytest.FixtureRequest) -> FaultPlan:
    from bml.faults.plan import FaultPlan
    from bml.topology import UsageError, parse

    if hasattr(request, "param"):
        return FaultPlan.parse(request.param)
    marker = request.node.get_closest_marker("faults")
    if marker is None:
        raise UsageError(
            "fault_plan needs to know what to break: mark the test with "
            '@pytest.mark.faults("kill:4@step=20") or @pytest.mark.faults(fabric="bcube:3x2", steps=40)'
        )
    if marker.args and not marker.kwargs:
        return FaultPlan.parse(marker.args)
    settings = dict(marker.kwargs)
    if marker.args or settings.keys() - _DRAWN or not {"fabric", "steps"} <= settings.keys():
        raise UsageError(
            "pytest.mark.faults takes either faults as texts, or fabric= and steps=, and count= and kinds=; "
            f"it was given {marker.args} and {settings}"
        )
    seed = request.config.stash[_SEED] << 32 | zlib.crc32(request.node.nodeid.encode())
    return FaultPlan.draw(seed, parse(settings.pop("fabric")), **settings)
