"""How the gate runs tests: one seed for all that they draw, samples of long lists, the longest tests first.

- **Seed.** It is made from the files of bml and tests, so a run can be repeated from its commit, and what it
  draws changes with what it judges. BML_FAULT_SEED sets another. It is printed at the top and at the bottom,
  with the command that repeats each failure.
- **Samples.** With BML_TESTS=sample, as `make test` and `make gate` set it, the seed draws a quarter
  of the real tests of each folder, a quarter of its slow ones, and of such a test a quarter of the cases, at
  least four; half of the tests that judge time, with all of their cases; and of any test that is marked
  `few(n)` n cases. It leaves alone the other tests of `make test`. So each change is tried by tests of every
  kind, and the next one by others; `make nightly` runs all.
- **Order.** Tests with the longest time limits begin first, so that no core waits at the end for a late one.
- **Groups.** pytest-xdist hands out one test at a time (--dist loadgroup), and a file whose tests share a
  fixture of the module as a whole.
- **Limits.** A time limit finds what hangs, and judges no speed: a machine may be three times as slow as the
  one on which it was set, so none is shorter than `LEAST_LIMIT_S`.
- **Hangs.** A test that its time limit cannot interrupt, or whose fixtures hang after it, ends its worker
  with the stacks of all threads; pytest-xdist names it and goes on in another worker.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import logging
import os
import random
import re
import time
from collections.abc import Generator, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

from bml.pytest_plugin import own_name, seed_of

_ROOT = Path(__file__).resolve().parents[1]
_SEED = "BML_FAULT_SEED"
_SAMPLED = os.environ.get("BML_TESTS") == "sample"


def seed_from(root: Path) -> int:
    """A number from the names and the bytes of what is tested and of its tests."""
    digest = hashlib.sha256()
    # rglob does not follow the links bml/faults and bml/topology
    folders = ("bml", "faults", "topology", "tests")
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return int.from_bytes(digest.digest()[:4], "big") >> 1


if not os.environ.get(_SEED):
    os.environ[_SEED] = str(seed_from(_ROOT))  # for workers of pytest-xdist and for commands that tests start


@pytest.hookimpl(trylast=True)  # the plugin of bml has chosen the seed then
def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import core

    if config.getoption("hypothesis_seed", None) is None:
        core.global_force_seed = seed_of(config)
    config.stash[_STARTED] = (time.monotonic(), _processor_s())
    config.stash[_STDERR] = os.dup(2)  # while a test runs, pytest has its own file there


_STARTED = pytest.StashKey[tuple[float, float]]()
_STDERR = pytest.StashKey[int]()

LEAST_LIMIT_S = 240
grace_s = 60.0
"""A test that goes on for so long after its time limit cannot be interrupted."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    limit_s = _limit_s(item, item.config)
    if limit_s:
        # A thread that needs no lock of the interpreter: the time limit's signal waits for the main thread.
        faulthandler.dump_traceback_later(limit_s + grace_s, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb() -> None:
    faulthandler.cancel_dump_traceback_later()  # somebody looks at the test


def _processor_s() -> float:
    """Seconds that all cores together were busy since the machine started."""
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - times.iowait)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = drawn(items, seed_of(config)) if _SAMPLED else items
    left_out = set(items) - set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = sorted(chosen, key=lambda item: -_limit_s(item, config))  # stable: files stay together
    for item in items:
        if item.get_closest_marker("timeout") and 0 < _limit_s(item, config) < LEAST_LIMIT_S:
            item.add_marker(pytest.mark.timeout(LEAST_LIMIT_S), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is loaded now stays: no garbage collection looks at it, and its loggers need no handlers."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    for name, logger in logging.root.manager.loggerDict.items():
        # pytest gives those that do not propagate its own handlers, six times a test: PyTorch has forty.
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


_OF = 4
"""Of the tests of a folder that are real, and of its slow ones, one in so many is drawn."""
_OF_SERIAL = 2
"""Of those that judge time, in whatever folder, one in so many is drawn."""
_SHARE, _LEAST = 4, 4
"""Of the cases of a test one in so many is drawn, and at least so many."""


def drawn(items: Iterable[pytest.Item], seed: int) -> list[pytest.Item]:
    """The items without those tests, and cases of them, that are not drawn."""
    kinds: dict[str, dict[str, list[pytest.Item]]] = {}
    cases: dict[tuple[str, int | None], list[pytest.Item]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if marks & {"smoke", "matrix"}:  # the matrix draws its cells itself
            continue
        if "serial" in marks:
            kinds.setdefault("serial", {}).setdefault(_function(item), []).append(item)
            continue
        few = item.get_closest_marker("few")
        is_real, is_slow = bool(marks & {"real", "ray"}), "slow" in marks
        if is_real or is_slow or few:
            cases.setdefault((_function(item), few.args[0] if few else None), []).append(item)
        if is_real or is_slow:
            kind = f"{item.path.parent.name} {'real' if is_real else 'slow'}"
            kinds.setdefault(kind, {}).setdefault(_function(item), []).append(item)
    left_out: set[pytest.Item] = set()
    for kind, functions in kinds.items():
        n_taken = -(-len(functions) // (_OF_SERIAL if kind == "serial" else _OF))
        taken = random.Random(f"{seed}:{kind}").sample(sorted(functions), n_taken)
        left_out.update(*(functions[function] for function in {*functions} - {*taken}))
    for (function, few_n), among in cases.items():
        n_taken = max(_LEAST, len(among) // _SHARE) if few_n is None else few_n
        rng = random.Random(f"{seed}:{function}")
        left_out.update(set(among) - set(rng.sample(among, min(n_taken, len(among)))))
    return [item for item in items if item not in left_out]


def _function(item: pytest.Item) -> str:
    return own_name(item).partition("[")[0]


def _limit_s(item: pytest.Item, config: pytest.Config) -> float:
    marker = item.get_closest_marker("timeout")
    if marker is None:
        return float(config.getoption("timeout", None) or config.getini("timeout"))
    return float(marker.args[0] if marker.args else marker.kwargs["timeout"])


class Groups(LoadScopeScheduling):
    """Hands out tests one at a time, in their order; those that share a fixture of their module together.

    When a worker dies, pytest-xdist 3.8 runs its test again, may end before the worker's others ran, and
    gives a new worker a single test, which it begins only when it knows the next one: all would wait.
    """

    @property
    def tests_finished(self) -> bool:
        return not self.workqueue and super().tests_finished

    def remove_node(self, node: Any) -> str | None:
        """The test in which the worker died: it has its result by that, the worker's others run elsewhere."""
        units = self.assigned_work.pop(node)
        left = [nodeid for unit in units.values() for nodeid, done in unit.items() if not done]
        for nodeid in left[1:]:
            self.workqueue.setdefault(self._split_scope(nodeid), {})[nodeid] = False
        for other in self.nodes:
            self._reschedule(other)
        return left[0] if left else None

    def schedule(self) -> None:
        super().schedule()
        for node in self.nodes:
            if self._pending_of(self.assigned_work[node]) == 1:  # it came for a dead one
                self._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if shares_a_fixture(_ROOT / file) else nodeid


@cache
def shares_a_fixture(path: Path) -> bool:
    """Whether a fixture of the test file is made once for all of its tests."""
    return path.is_file() and re.search(r"""scope\s*=\s*["']module["']""", path.read_text()) is not None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return Groups(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_report_header(config: pytest.Config) -> str:
    return _seed_line(config)


def _seed_line(config: pytest.Config) -> str:
    cases = "samples of long tests" if _SAMPLED else "all that was asked for"
    return f"seed of all that is drawn: {seed_of(config)} ({_SEED}), {cases}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    failed = [each.nodeid for kind in ("failed", "error") for each in terminalreporter.stats.get(kind, ())]
    terminalreporter.write_line(_seed_line(config))
    terminalreporter.write_line(_idle_line(*config.stash[_STARTED]))
    for nodeid in dict.fromkeys(failed):
        terminalreporter.write_line(f"repeat with: {repeating(nodeid, seed_of(config))}")


def repeating(nodeid: str, seed: int) -> str:
    """The command that runs a test again as it was run."""
    return f"{_SEED}={seed} .venv/bin/python -m pytest '{nodeid}'"


def _idle_line(began_s: float, busy_before_s: float) -> str:
    took_s, n_cores = time.monotonic() - began_s, os.cpu_count() or 1
    idle = 1 - (_processor_s() - busy_before_s) / (took_s * n_cores)
    return f"idle share of the {n_cores} cores: {max(0.0, idle):.0%} of {took_s:.0f} s"
