"""The pytest plugin: fault plans for tests of training scripts, from a printed seed, and emulated fabrics.

    @pytest.mark.faults("kill:4@step=20", "blackhole:2/0@step=30")          # these faults, or
    @pytest.mark.faults(fabric="bcube:3x2", steps=40, kinds=("kill", "cut"))  # faults from --fault-seed
    def test_training(fault_plan):
        result = bml.launch(train, "bcube:3x2", launcher="processes", faults=fault_plan)

Every test draws a plan of its own from the seed and its own name (`own_name`), so it draws the same one when
it is run alone, from another folder, and by any worker of pytest-xdist. The plan is shown with the failure of
a test. If a fault of the plan was given to no job, or never struck in the jobs of a test, the test fails,
unless the marker has must_strike=False; so does a marked test that does not take the plan.
docs/guides/testing.md tells more.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

# Every pytest in an environment with bml loads this file, so fixtures import what they need themselves.
if TYPE_CHECKING:
    from bml.cluster.launcher.result import Result
    from bml.fabric.network import EmulatedFabric
    from bml.faults.plan import FaultPlan

_SEED = pytest.StashKey[int]()
_WATCH = pytest.StashKey["_Watch"]()
_TITLE = "fault plan"
_MARKER = (
    "faults(*faults, fabric=…, steps=…, count=2, kinds=…, must_strike=True): the plan of the fixture "
    "fault_plan, and whether the test fails if one of its faults struck in no job"
)
BringUp = Callable[..., "EmulatedFabric"]
_DRAWN = {"fabric", "steps", "count", "kinds"}
_MUST_STRIKE = "must_strike"
_WORKERS_SEED = "bml_fault_seed"


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
    """Choose the seed, and register the marker."""
    config.addinivalue_line("markers", _MARKER)
    given = config.getoption("--fault-seed")
    setting = os.environ.get("BML_FAULT_SEED", "")
    if given is None and setting and not setting.isdecimal():
        raise pytest.UsageError(f"BML_FAULT_SEED is {setting!r}: give a number")
    if given is not None and given < 0:
        raise pytest.UsageError(f"--fault-seed is {given}: give a number from 0")
    fresh = int(setting) if setting else secrets.randbelow(1 << 31)
    chosen = fresh if given is None else given
    # A worker of pytest-xdist draws from the seed that its controller prints.
    config.stash[_SEED] = getattr(config, "workerinput", {}).get(_WORKERS_SEED, chosen)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist the seed of this run."""
    node.workerinput[_WORKERS_SEED] = node.config.stash[_SEED]


def pytest_report_header(config: pytest.Config) -> str:
    """Print the seed."""
    return _seed_line(config)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the seed again if a test with a plan failed: with -q there is no header."""
    reports = [each for kind in ("failed", "error") for each in terminalreporter.stats.get(kind, ())]
    if any(title == _TITLE for each in reports for title, _ in each.sections):
        terminalreporter.write_line(_seed_line(config))


def _seed_line(config: pytest.Config) -> str:
    return f"fault seed: {config.stash[_SEED]} (repeat with --fault-seed {config.stash[_SEED]})"


def seed_of(config: pytest.Config) -> int:
    """The seed of this run, for hooks that draw something themselves."""
    return config.stash[_SEED]


@pytest.fixture(scope="session")
def fault_seed(pytestconfig: pytest.Config) -> int:
    """The seed of this run, for tests that draw something themselves."""
    return seed_of(pytestconfig)


@pytest.fixture
def fault_plan(request: pytest.FixtureRequest) -> Iterator[FaultPlan]:
    """The fault plan of a test, for `bml.launch(..., faults=fault_plan)`.

    It comes from `pytest.mark.parametrize("fault_plan", [...], indirect=True)` (texts, or lists of texts),
    else from `pytest.mark.faults`: the texts there, or `count` faults of these `kinds`, drawn for `fabric`
    (needed) within `steps` steps (needed), see FaultPlan.draw. The test fails if no job was given a fault, or
    if it never struck in one that was, unless the marker has must_strike=False.
    """
    from bml.cluster.launcher.outcomes import watched_by
    from bml.faults.plan import FaultPlan
    from bml.topology import UsageError

    plan, wrong = FaultPlan(), ""
    try:
        plan = _plan(request)
    except UsageError as error:  # of the marker: where it was raised tells nothing
        wrong = str(error)
    if wrong:
        pytest.fail(wrong, pytrace=False)
    watch = request.node.stash[_WATCH] = _Watch(plan)
    with watched_by(watch.heard):
        yield plan


@pytest.fixture(scope="session")
def emulated_fabric() -> Iterator[BringUp]:
    """Return `bring_up(shape, rate="200mbit")`: the same healed fabric for the same shape, for all tests.

    Skips the test, with the reason, if no fabric can be emulated here.
    """
    from bml.fabric.network import DEFAULT_RATE, down, obstacle, up

    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    made: dict[str, EmulatedFabric] = {}

    def bring_up(shape: str, rate: str = DEFAULT_RATE) -> EmulatedFabric:
        if shape not in made:
            made[shape] = up(shape, rate, name=f"t{os.getpid()}n{len(made)}", maker=os.getpid())
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
    if _WATCH in item.stash:
        seed = item.config.stash[_SEED]
        text = f"{item.stash[_WATCH].plan or 'no faults'}\nrepeat with --fault-seed {seed}"
        report.sections.append((_TITLE, text))
    return report  # type: ignore[no-any-return]  # a hook wrapper returns its result so


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that passed although its faults never struck: it says nothing about them."""
    result = yield
    marker = item.get_closest_marker("faults")
    if marker is None or marker.kwargs.get(_MUST_STRIKE, True):
        watch = item.stash.get(_WATCH, None)
        if says := _untested() if watch is None and marker is not None else watch and watch.vacuous():
            pytest.fail(says, pytrace=False)
    return result


def _untested() -> str:
    return (
        "this test is marked with faults, and none was injected: it does not take the fixture fault_plan\n"
        "(take fault_plan and give it to the job, faults=fault_plan; or take the marker away)"
    )


class _Watch:
    """Watches which faults of a plan were given to the jobs of a test, and which of those never struck."""

    def __init__(self, plan: FaultPlan):
        self.plan = plan
        self._never_struck: dict[str, str] = {}
        self._given: set[str] = set()

    def heard(self, result: Result) -> None:
        """Note the result of a job. A fault that struck in one job may never have struck in another."""
        planned = {str(fault) for fault in self.plan}
        self._given |= result.struck | {str(fault) for fault in result.spec.fault_plan()}
        self._never_struck.update({text: why for text, why in result.never_struck.items() if text in planned})

    def vacuous(self) -> str:
        """Say which faults the test says nothing about, and what to do; empty if there is none."""
        forgotten = [str(fault) for fault in self.plan if str(fault) not in self._given]
        if not forgotten and not self._never_struck:
            return ""
        lines = [f"  {text}: no job of this test was given it (faults=fault_plan)" for text in forgotten]
        return "\n".join(
            [
                "faults of the plan never struck, so this test says nothing about them:",
                *lines,
                *(f"  {text}: {why}" for text, why in self._never_struck.items()),
                "(let them strike earlier, or give @pytest.mark.faults(…, must_strike=False))",
            ]
        )


def _plan(request: pytest.FixtureRequest) -> FaultPlan:
    from bml.faults.plan import FaultPlan
    from bml.topology import UsageError, parse

    if hasattr(request, "param"):
        return FaultPlan.parse(request.param)
    marker = request.node.get_closest_marker("faults")
    if marker is None:
        raise UsageError(
            "fault_plan needs faults: mark the test with "
            '@pytest.mark.faults("kill:4@step=20") or @pytest.mark.faults(fabric="bcube:3x2", steps=40)'
        )
    settings = {key: value for key, value in marker.kwargs.items() if key != _MUST_STRIKE}
    if marker.args and not settings:
        return FaultPlan.parse(marker.args)
    if marker.args or settings.keys() - _DRAWN or not {"fabric", "steps"} <= settings.keys():
        raise UsageError(
            "pytest.mark.faults takes either faults as texts, or fabric= and steps=, and count= and kinds=; "
            f"and must_strike= with both; it was given {marker.args} and {settings}"
        )
    seed = request.config.stash[_SEED] << 32 | zlib.crc32(own_name(request.node).encode())
    return FaultPlan.draw(seed, parse(settings.pop("fabric")), **settings)


def own_name(item: pytest.Item) -> str:
    """Name a test by its file, classes and function: `test_training.py::TestLoss::test_kill[bcube:3x2]`.

    `item.nodeid` also has the folders from pytest's rootdir on, which depends on where pytest was started,
    and what pytest-xdist adds with `--dist loadgroup`.
    """
    classes = (node.name for node in item.listchain() if isinstance(node, pytest.Class))
    return "::".join([item.path.name, *classes, item.name])
